"""Binding: a model and an optimizer are prepared for a policy, and unprepared; public names."""

from halfstep.binding.prepare import edit_weights, prepare, prepared_policy, unprepare
from halfstep.binding.serving import exported, lowered
from halfstep.binding.shard import shard

__all__ = ["edit_weights", "exported", "lowered", "prepare", "prepared_policy", "shard", "unprepare"]
