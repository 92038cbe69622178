"""Regions, what they do to operators, and rules for one's own."""

from halfstep.cast.custom import operator
from halfstep.cast.region import autocast, suspended

__all__ = ["autocast", "operator", "suspended"]
