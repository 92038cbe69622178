"""Precise weights behind low parameters."""

from halfstep.weights.store import WeightStore
from halfstep.weights.strategies import STRATEGIES, KahanWeights, MasterWeights, SplitWeights, StochasticWeights
from halfstep.weights.unkept import UnkeptWeights

__all__ = [
    "STRATEGIES", "KahanWeights", "MasterWeights", "SplitWeights", "StochasticWeights", "UnkeptWeights",
    "WeightStore",
]  # fmt: skip
