"""Regions, what they do to operators, and rules for operators of the user."""

from halfstep.cast.losses.linear_loss import linear_cross_entropy
from halfstep.cast.regions.autocast import autocast, suspended
from halfstep.cast.rules.custom import operator

__all__ = ["autocast", "linear_cross_entropy", "operator", "suspended"]
