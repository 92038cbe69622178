"""Precise weights behind low parameters."""

from halfstep.weights.store import WeightStore
from halfstep.weights.strategies import STRATEGIES, UnkeptWeights

__all__ = ["STRATEGIES", "UnkeptWeights", "WeightStore"]
