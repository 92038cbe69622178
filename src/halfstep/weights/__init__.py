"""Precise weights behind low parameters."""

from halfstep.weights.master import MasterWeights

__all__ = ["MasterWeights"]
