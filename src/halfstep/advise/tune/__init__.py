"""Tune: find the cheapest policy for a task on this machine, and test whether it trains as fp32 does.

`tune` returns a `Tuning`: the choice, every candidate that was tried (`Tried`) with its differences from a preset
(`Change`), and the equivalence test. `Progress` is what its `on_progress` is given.
"""

from halfstep.advise.tune.lab import Progress
from halfstep.advise.tune.result import Change, Tried, TuneError, Tuning
from halfstep.advise.tune.tuner import tune

__all__ = ["Change", "Progress", "Tried", "TuneError", "Tuning", "tune"]
