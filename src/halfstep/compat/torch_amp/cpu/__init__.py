"""torch.cpu.amp without its deprecation warnings."""

from halfstep.compat.torch_amp.cpu.autocast_mode import autocast
from halfstep.compat.torch_amp.cpu.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
