"""policy: what is wanted, as pure data. `Policy` x model -> `Plan`, with a reason for every decision."""

from halfstep.policy.policy import Policy
from halfstep.policy.presets import PRESETS
from halfstep.policy.resolve import Plan, resolve
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule

__all__ = ["PRESETS", "SCALE_RULES", "Plan", "Policy", "ScaleRule", "resolve"]
