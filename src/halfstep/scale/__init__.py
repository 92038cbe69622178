"""Loss scaling: the rule as a state machine on the device, and the scaler that carries it through training."""

from halfstep.scale.rule import ScaleState, advance, initial_state
from halfstep.scale.scaler import GradScaler

__all__ = ["GradScaler", "ScaleState", "advance", "initial_state"]
