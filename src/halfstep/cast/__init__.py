"""Casting: regions, operator rules and emulation."""

from halfstep.cast.region import Recipe, autocast, recipe_for

__all__ = ["Recipe", "autocast", "recipe_for"]
