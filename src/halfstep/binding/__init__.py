"""Binding: a model and an optimizer are prepared for a policy, and unprepared; public names."""

from halfstep.binding.exported import exported
from halfstep.binding.lowered import lowered
from halfstep.binding.prepare import edit_weights, prepare, prepared_policy, unprepare
from halfstep.binding.shard import shard

__all__ = ["edit_weights", "exported", "lowered", "prepare", "prepared_policy", "shard", "unprepare"]
