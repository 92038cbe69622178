"""policy: what is wanted, as pure data; public names.

`Policy` and its `PRESETS`; `ScaleRule`, the numbers of a loss scale, and `SCALE_RULES` by name. `resolve` makes a
`Plan` of a policy and a model: every decision with its reason. `units` returns which low formats a device computes in
natively (`Units`). Operators have one name each: `operator_names` lists those that a pattern stands for,
`operator_name` is the name of a function, and `RULE_KINDS` says what each rule does (`RuleKind`).
"""

from halfstep.policy.operators import operator_name, operator_names
from halfstep.policy.plan import Plan, resolve
from halfstep.policy.policy import PRESETS, Policy
from halfstep.policy.resolve import Units, units
from halfstep.policy.rule_kinds import RULE_KINDS, RuleKind
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule

__all__ = [
    "PRESETS", "RULE_KINDS", "SCALE_RULES", "Plan", "Policy", "RuleKind", "ScaleRule", "Units", "operator_name",
    "operator_names", "resolve", "units",
]  # fmt: skip
