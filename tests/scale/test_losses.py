"""Nested losses: containers keep their types, tensors are scaled, anything else is an error that names the place."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch

from halfstep.errors import ScaleError
from halfstep.scale import GradScaler

Pair = namedtuple("Pair", "loss aux")
ONE = torch.tensor(1.0)


def no_tensor() -> torch.Tensor:
    return torch.zeros(())


def double(losses: Any) -> Any:
    return GradScaler("cpu", init_scale=2.0).scale(losses)


@pytest.mark.parametrize(
    "value",
    [
        ONE,
        [ONE, ONE],
        (ONE, [ONE]),
        Pair(ONE, (ONE,)),
        {"a": ONE, "b": {"c": [ONE]}},
        OrderedDict(b=ONE, a=ONE),
        defaultdict(no_tensor, a=ONE),
        types.MappingProxyType({"a": ONE}),
        [],
        {},
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],  # an address differs between processes
)
def test_the_same_structure_comes_back(value: Any) -> None:
    result = double(value)
    assert type(result) is type(value)
    flat, spec = torch.utils._pytree.tree_flatten(value)
    results, other = torch.utils._pytree.tree_flatten(result)
    assert spec == other or isinstance(value, types.MappingProxyType)
    if not isinstance(value, types.MappingProxyType):
        assert all(item.item() == 2.0 for item in results) and all(item.item() == 1.0 for item in flat)


def test_mappings_keep_what_they_carry() -> None:
    result = double(defaultdict(no_tensor, a=ONE))
    assert result.default_factory is no_tensor
    assert list(double(OrderedDict(b=ONE, a=ONE))) == ["b", "a"]
    assert double(types.MappingProxyType({"a": ONE}))["a"].item() == 2.0


def test_a_generator_comes_back_as_a_list() -> None:
    result = double(ONE for _ in range(3))
    assert [item.item() for item in result] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "scale: outputs is None of type NoneType; expected a tensor or a (nested) container of tensors"),
        ("loss", "outputs is 'loss' of type str"),
        ({"loss": ONE, "log": [3.0]}, "outputs['log'][0] is 3.0 of type float"),
    ],
)
def test_anything_else_is_named(value: Any, text: str) -> None:
    with pytest.raises(ScaleError) as caught:
        double(value)
    assert text in str(caught.value)
