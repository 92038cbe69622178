"""Precise weights behind low parameters."""

from collections.abc import Mapping
from types import MappingProxyType

from halfstep.weights.kahan import KahanWeights
from halfstep.weights.master import MasterWeights
from halfstep.weights.split import SplitWeights
from halfstep.weights.stochastic import StochasticWeights
from halfstep.weights.store import WeightStore
from halfstep.weights.unkept import UnkeptWeights

__all__ = [
    "STRATEGIES",
    "KahanWeights",
    "MasterWeights",
    "SplitWeights",
    "StochasticWeights",
    "UnkeptWeights",
    "WeightStore",
]

STRATEGIES: Mapping[str, type[WeightStore]] = MappingProxyType(
    {"master": MasterWeights, "split": SplitWeights, "kahan": KahanWeights, "stochastic": StochasticWeights}
)
"""Value of `Policy.master` -> what keeps the precise weights."""
