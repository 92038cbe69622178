"""Tune: find the cheapest policy for a task on this machine, and show that it trains as fp32 does."""

from halfstep.advise.tune.result import Change, Tried, TuneError, Tuning

__all__ = ["Change", "Tried", "TuneError", "Tuning"]
