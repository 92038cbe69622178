"""Hypothesis strategies for policies, made from the annotations of `Policy` so that a new field is covered at once."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from halfstep.formats import DTYPES, FORMATS
from halfstep.policy.operators import known
from halfstep.policy.policy import Policy
from halfstep.policy.rule_kinds import MODULE_RULES, RULES
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule

SPELLINGS = ("F.softmax", "torch.add", "Tensor.__matmul__", "linalg_inv", "conv*", "linalg.*", "*", "log[12]*")


def scale_rules() -> st.SearchStrategy[ScaleRule]:
    """Return scale rules with odd but possible numbers."""
    numbers = st.floats(min_value=2.0**-40, max_value=2.0**40)
    return st.builds(
        lambda bounds, backoff, interval, tolerance: ScaleRule(
            floor=bounds[0], init=bounds[1], ceiling=bounds[2], backoff=backoff, interval=interval, tolerance=tolerance
        ),
        st.tuples(numbers, numbers, numbers).map(sorted),
        st.floats(min_value=0.01, max_value=1.0),
        st.integers(min_value=1, max_value=10**6),
        st.floats(min_value=0.0, max_value=1.0),
    )


def _field(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if name == "name":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    if name == "dtype":
        return st.sampled_from(["auto", *DTYPES, *FORMATS, "e3m4", "e2m1-noinf-nonan"])
    if name == "ops":
        operators = st.sampled_from(sorted(known())) | st.sampled_from([*SPELLINGS, "mylib::swiglu", "mylib::*"])
        return st.lists(st.tuples(operators, st.sampled_from(RULES)), max_size=3)
    if name == "modules":
        patterns = st.sampled_from(["", "*", "decoder.*.norm", "class:*Norm*"]) | st.text(
            st.characters(exclude_categories=["Cs"]), max_size=8
        )
        return st.lists(st.tuples(patterns, st.sampled_from(MODULE_RULES)), max_size=3)
    assert name == "scale", f"no strategy for the field {name}"
    numbers = st.floats(min_value=1e-30, max_value=1e30) | st.integers(min_value=1, max_value=2**24)
    return st.sampled_from(["auto", "none", *SCALE_RULES]) | numbers | scale_rules()


def policies() -> st.SearchStrategy[Policy]:
    """Return any policies."""
    hints = get_type_hints(Policy)
    return st.builds(Policy, **{f.name: _field(f.name, hints[f.name]) for f in dataclasses.fields(Policy)})
