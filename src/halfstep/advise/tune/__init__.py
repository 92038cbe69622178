"""Tune: find the cheapest policy for a task on this machine, and test whether it trains as fp32 does."""

from halfstep.advise.tune.lab import Progress
from halfstep.advise.tune.result import Change, Tried, TuneError, Tuning
from halfstep.advise.tune.tuner import tune

__all__ = ["Change", "Progress", "Tried", "TuneError", "Tuning", "tune"]
