"""Eight bits: which linear layers a rule such as "fp8" converts, and why it leaves the others.

Of the layers that the rule covers, these stay as they are: the first and the last linear layer of the model, those with
a dimension that is no multiple of 16, and those whose products are too small to gain. A pattern that ends in a layer's
own name ("blocks.*.qkv") converts it whatever its place and size. A module that stays follows the rules before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from halfstep.formats import DTYPES
from halfstep.policy.match import rules_of_modules
from halfstep.policy.policy import Policy
from halfstep.policy.rule_kinds import RULE_KINDS
from halfstep.torch_private.modes import is_traceable_wrapper_subclass

MULTIPLE = 16
"""What the units demand of both dimensions of a weight."""


def is_small(recipe: str, inputs: int, outputs: int) -> bool:
    """Return whether torchao's filter for `recipe` leaves out a layer of this size: the casts would cost more.

    `_auto_filter_for_recipe` in torchao/float8/float8_linear_utils.py, from times on an H100; it has none for
    "rowwise_with_gw_hp", which is given that of "rowwise".
    """
    if recipe == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


def rules_and_stays(
    policy: Policy, model: nn.Module
) -> tuple[Mapping[nn.Module, tuple[str, str]], Mapping[nn.Module, str]]:
    """Return module -> (pattern, rule) by the module rules of `policy`, and the linear layers that stay, with reasons.

    Raises:
        PolicyError: a pattern matches nothing.
    """
    given = rules_of_modules(policy.modules, model)
    if not any(RULE_KINDS[rule].recipe for _, rule in given.values()):
        return given, {}
    others = rules_of_modules(tuple(pair for pair in policy.modules if not RULE_KINDS[pair[1]].recipe), model)
    paths = {module: path for path, module in model.named_modules()}
    linear = [module for module in paths if isinstance(module, nn.Linear)]
    rules: dict[nn.Module, tuple[str, str]] = {}
    stays: dict[nn.Module, str] = {}
    for module, (pattern, rule) in given.items():
        reason = "it is no linear layer"
        if (recipe := RULE_KINDS[rule].recipe) and isinstance(module, nn.Linear):
            reason = _cannot(policy, module)
            if not reason and pattern.rpartition(".")[2] != paths[module].rpartition(".")[2]:
                reason = _should_not(recipe, module, linear)
            if reason:
                stays[module] = f"{rule}: {reason}"
        if not recipe or not reason:
            rules[module] = pattern, rule
        elif module in others:
            rules[module] = others[module]
    return rules, stays


def _cannot(policy: Policy, layer: nn.Linear) -> str:
    """Return why `layer` cannot be computed in eight bits, "" if it can."""
    kind = type(layer)
    if policy.dtype not in DTYPES or policy.dtype == "fp32":
        return f"dtype {policy.dtype!r} is neither 'bf16' nor 'fp16'"
    if kind.forward is not nn.Linear.forward or issubclass(kind, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"{kind.__name__} is not computed by the forward of torch.nn.Linear"
    values: Any = layer.weight.data
    if is_traceable_wrapper_subclass(values) and not hasattr(values, "placements"):  # not a DTensor
        return f"its weight is a {type(values).__name__}"
    wrong = [size for size in (layer.in_features, layer.out_features) if size % MULTIPLE]
    return f"{' and '.join(map(str, wrong))} no multiple of {MULTIPLE}" if wrong else ""


def _should_not(recipe: str, layer: nn.Linear, linear: list[nn.Linear]) -> str:
    """Return why `layer`, of all `linear` ones of its model, better stays in the low format; "" if it does not."""
    if layer in (linear[0], linear[-1]):
        return f"the {'first' if layer is linear[0] else 'last'} linear layer of the model"
    if is_small(recipe, layer.in_features, layer.out_features):
        return f"{layer.in_features} x {layer.out_features} is too small to gain"
    return ""
