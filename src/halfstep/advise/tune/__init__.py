"""Tune: measure candidates on this machine and decide on the cheapest policy within a bound of error."""
