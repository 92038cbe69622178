"""Regions, what they do to operators, and rules for one's own."""

from halfstep.cast.custom import operator
from halfstep.cast.linear_loss import linear_cross_entropy
from halfstep.cast.region import autocast, suspended

__all__ = ["autocast", "linear_cross_entropy", "operator", "suspended"]
