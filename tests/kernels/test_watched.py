"""Parameters that notice writes through ``.data``: what they say to their owner, and that they are plain elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels.watched import WatchedParameter, unwatch, unwatch_copies, watch


class Owner:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        self.heard.append((name, value))
        return value + 1

    def data_written(self, name: str, *, copied: bool) -> None:
        self.heard.append((name, copied))

    def data_read(self) -> None:
        pass

    def copied(self, copy: nn.Parameter, memo: dict[Any, Any]) -> None:
        pass

    def averaged(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()


def made() -> tuple[Any, Owner]:
    parameter, owner = nn.Parameter(torch.ones(3)), Owner()
    watch(parameter, owner, "w")
    return parameter, owner


def test_writes_are_counted_and_looks_are_not() -> None:
    parameter, owner = made()
    assert not parameter.written()
    first, second = parameter.data, parameter.data
    assert first is not second and first.data_ptr() == parameter.data_ptr() and not first.requires_grad
    assert type(first) is Tensor and not parameter.written() and parameter._version == 0
    first.mul_(1.0)  # also where nothing changes, and through an alias that was kept
    assert parameter.written() and not parameter.written()
    second[0].add_(1)
    assert owner.heard == []
    assert torch.equal(parameter.data, torch.tensor([2.0, 1.0, 1.0])) and owner.heard == [("w", False)]
    assert parameter.written()


def test_replaced_data_is_what_the_owner_says() -> None:
    parameter, owner = made()
    value = torch.full((3,), 5.0)
    parameter.data = value
    assert owner.heard == [("w", value)] and torch.equal(parameter, torch.full((3,), 6.0))
    assert parameter.data.data_ptr() == parameter.data_ptr() and not parameter.written()
    parameter.note()
    assert parameter.written() and not parameter.written()


def test_a_copy_tells_of_its_second_write_until_the_owner_is_gone() -> None:
    parameter, owner = made()
    twin = copy.deepcopy(parameter)
    assert type(twin) is WatchedParameter and twin.data_ptr() != parameter.data_ptr()
    twin.data = torch.zeros(3)
    twin.data.add_(1)
    assert owner.heard == []
    twin.data.add_(1)
    assert owner.heard == [("w", True)]
    del owner
    twin.data.add_(1)
    parameter.data = torch.zeros(3)
    assert torch.equal(twin, torch.full((3,), 3.0)) and torch.equal(parameter, torch.zeros(3))


def test_it_is_a_plain_parameter_wherever_it_is_carried_to() -> None:
    parameter, owner = made()
    parameter.tag = "mine"
    loaded: Any = pickle.loads(pickle.dumps(parameter))
    assert vars(loaded) == {"tag": "mine"} and torch.equal(loaded, parameter)
    assert type(loaded) is nn.Parameter
    del parameter.tag
    file = io.BytesIO()
    torch.save({"w": parameter}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["w"]) is nn.Parameter
    with torch.inference_mode():
        assert torch.equal(parameter.data, torch.ones(3))
    unwatch(parameter, Owner())
    assert type(parameter) is WatchedParameter
    unwatch(parameter, owner)
    assert type(parameter) is nn.Parameter and not vars(parameter)


def test_other_classes_are_left_alone() -> None:
    parameter: Any = nn.UninitializedParameter()
    watch(parameter, Owner(), "w")
    assert type(parameter) is nn.UninitializedParameter


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_made_of_one_is_plain(requires_grad: bool) -> None:
    parameter, owner = made()
    twin = nn.Parameter(parameter, requires_grad)
    assert type(twin) is nn.Parameter and twin.requires_grad is requires_grad and not vars(twin)
    assert twin.data_ptr() == parameter.data_ptr() and type(parameter) is WatchedParameter
    assert type(parameter.detach()) is Tensor and not parameter.detach().requires_grad
    assert isinstance(parameter, nn.Parameter) and owner.heard == []


def test_compiled_code_reads_data_without_a_break() -> None:
    parameter, _ = made()

    def reads(x: Tensor, w: Tensor) -> Tensor:
        return x * w.data + w.detach() + w

    function = torch.compile(reads, backend="eager", fullgraph=True)
    assert torch.equal(function(torch.ones(3), parameter), torch.full((3,), 3.0))


def test_a_copy_that_is_trained_is_plain() -> None:
    parameter, _ = made()
    twin = copy.deepcopy(parameter)
    unwatch_copies([parameter, twin])
    assert type(twin) is nn.Parameter and not vars(twin) and type(parameter) is WatchedParameter
