"""Regions, what they do to operators, and rules for one's own."""

from halfstep.cast.custom import operator
from halfstep.cast.region import autocast

__all__ = ["autocast", "operator"]
