"""Guests: modules without state that may serve several models, and the rules that may speak of them.

What a guest does in which region is said in `bind`, note [guests].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from halfstep.errors import BindError
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.step.bind import binding_of

__all__ = ["Ruled", "is_stateless", "refuse_rules", "ruled"]

Ruled = tuple[str, nn.Module, str, bool]
"""Path, module, its rule or "", and whether it is the outermost one that has the rule."""


def is_stateless(module: nn.Module) -> bool:
    """Return whether `module` has no parameters, no buffers and no children."""
    kept = [*module._parameters.values(), *module._buffers.values()]
    return not module._modules and all(value is None for value in kept)


def ruled(model: nn.Module, plan: Plan) -> Iterator[Ruled]:
    """Iterate over the modules of `model` with the rules of its `plan`."""
    rules = {m.path: m.rule for m in plan.modules}
    for path, module in list(model.named_modules()):
        rule = rules.get(path, "")
        parent = rules.get(path.rpartition(".")[0], "") if path else ""
        yield path, module, rule, bool(rule) and rule != parent


def refuse_rules(model: nn.Module, policy: Policy, modules: Iterable[Ruled]) -> None:
    """Refuse rules for guests that serve another prepared model under other rules.

    Raises:
        BindError: which module, the two rules, and what to do.
    """
    for path, module, rule, entrance in modules:
        known = binding_of(module)
        if known is None or known.home is None or not any(holder is not model for holder in known.holders):
            continue
        mine, theirs = rule if entrance else "", known.rule if known.entrance else ""
        if mine != theirs if known.wanted == policy else mine and theirs:
            raise BindError(
                f"module {path!r} serves another prepared model too, whose policy {known.wanted.name!r} has the rule "
                f"{theirs or 'none'!r} for it, and this one has {mine or 'none'!r}; give each model a "
                f"{type(module).__name__} of its own (copy.deepcopy), or both the same policy"
            )
