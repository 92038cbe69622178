"""What each rule of an operator means: one table, which everything that carries out, exports or explains rules reads.

A new kind is one more table of ``tables/rules.toml``. Code that needs an answer of its own for each kind (a colour, an
argument of a method) builds it with `for_every_kind`, which raises at import where a kind has none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from halfstep.errors import PolicyError
from halfstep.schema import packaged_toml

T = TypeVar("T")

Rules = tuple[tuple[str, str], ...]
"""Pairs of (pattern, rule), as the fields `ops` and `modules` of a policy have them; the last that matches wins."""


CastTo = Callable[[str, Sequence[Tensor]], "torch.dtype | None"]
"""(device type, floating tensors of an operator) -> the format that they are cast to; None: they stay as they are."""


def _to_first(device: str, tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The first activation decides; a parameter decides only if there is nothing else."""
    if len(tensors) == 1:
        return None
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            return tensor.dtype
    return tensors[0].dtype


def _to_widest(device: str, tensors: Sequence[Tensor]) -> torch.dtype | None:
    first = tensors[0].dtype
    return None if all(t.dtype is first for t in tensors) else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleKind:
    """What a rule means. No field has a default, so that a new kind states each of them.

    Attributes:
        format: the format an operator computes in: "low", "fp32", or "input", where its arguments decide. With "low"
            and "fp32" an operator of torch.autocast's lists needs no handler if the lists have the same rule.
        cast_to: the format that the operator's arguments are cast to.
        refuses_low: whether the operator raises `BannedOperatorError` for low arguments.
        may_be_low: whether the operator may compute in the low format.
        of_operators: whether an operator may have it.
        of_modules: whether a module may have it for all its operators.
        params: the format of a module's parameters where the policy lowers others; "input": as they come.
        recipe: torchao's recipe by which linear layers are computed in eight bits; "" for none.
        means: what it does, in words; "{low}" stands for the low format.

    Examples:
        >>> hs.policy.RULE_KINDS["banned"].may_be_low
        False
    """

    format: Literal["low", "fp32", "input"]
    cast_to: CastTo
    refuses_low: bool
    may_be_low: bool
    of_operators: bool
    of_modules: bool
    params: Literal["low", "fp32", "input"]
    recipe: str
    means: str


CASTS: Mapping[str, CastTo] = {
    "low": lambda device, tensors: torch.get_autocast_dtype(device),
    "fp32": lambda device, tensors: torch.float32,
    "first": _to_first,
    "widest": _to_widest,
    "none": lambda device, tensors: None,
}
"""What a table calls a way to cast arguments -> it."""

RULE_KINDS: Mapping[str, RuleKind] = {
    rule: RuleKind(**{**fields, "cast_to": CASTS[fields["cast_to"]]})
    for rule, fields in packaged_toml("policy/tables/rules.toml").items()
}
"""Rule -> what it means, in the order in which tables show them."""

NO_RULE = replace(RULE_KINDS["banned"], refuses_low=False, may_be_low=True, means="in the format its arguments come in")
"""What holds for an operator without a rule."""

RULES = tuple(rule for rule, kind in RULE_KINDS.items() if kind.of_operators)
MODULE_RULES = tuple(rule for rule, kind in RULE_KINDS.items() if kind.of_modules)


def for_every_kind(reader: str, answers: Mapping[str, T], rules: Sequence[str] = RULES) -> Mapping[str, T]:
    """Return `answers` (rule -> what `reader` does for it), at import; refuse them if they are not those of `rules`."""
    if answers.keys() != set(rules):
        lacking, unknown = sorted(set(rules) - answers.keys()), sorted(answers.keys() - set(rules))
        raise PolicyError(f"{reader} has no answer for the rules {lacking}, and answers for the unknown {unknown}")
    return answers
