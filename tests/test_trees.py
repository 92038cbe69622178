"""Containers of tensors: mapped, counted, and closed again with their own type."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from halfstep.trees import map_tensors, opened, tensors

ONE = torch.tensor(1.0)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    name: str


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    "tree",
    [
        [ONE, 3, "text", None],
        (ONE, [ONE]),
        Pair(ONE, {"a": ONE}),
        OrderedDict(b=ONE, a=ONE),
        types.MappingProxyType({"a": ONE}),
        Output(ONE, (ONE, ONE)),
        Frozen(ONE, "x"),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_container_keeps_its_type_and_its_order(tree: Any) -> None:
    result = map_tensors(tree, double)
    assert type(result) is type(tree)
    assert [t.item() for t in tensors(result)] == [2.0] * len(tensors(tree))
    assert all(t is ONE for t in tensors(tree))
    assert [type(t) for t in tensors(tree)] == [Tensor] * len(tensors(tree))


def test_a_default_dict_keeps_its_factory() -> None:
    assert map_tensors(defaultdict(list, a=ONE), double).default_factory is list


def test_a_dataclass_is_copied_and_not_made_again() -> None:
    output = Output(ONE)
    assert map_tensors(output, double).made == output.made == 1


def test_packed_sequences_stay_packed() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = map_tensors(packed, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t)
    assert isinstance(result, PackedSequence)
    assert result.data.dtype is torch.bfloat16 and torch.equal(result.batch_sizes, packed.batch_sizes)


def test_what_changes_nothing_returns_the_very_same_container() -> None:
    tree = {"a": [ONE, (ONE,)]}
    assert map_tensors(tree, lambda t: t) is tree


@pytest.mark.parametrize("leaf", ["text", 3, None, b"bytes", range(3), Output])
def test_what_is_no_container_stays(leaf: Any) -> None:
    assert opened(leaf) is None
    assert map_tensors(leaf, double) is leaf


def test_ways_are_written_as_one_would_type_them() -> None:
    def ways(tree: Any) -> list[str]:
        node = opened(tree)
        assert node is not None
        return [way for way, _ in node[0]]

    assert ways([1, 2]) == ["[0]", "[1]"]
    assert ways({"a": 1}) == ["['a']"]
    assert ways(Frozen(ONE, "x")) == [".value", ".name"]
