"""Low parameters that read and write the fp32 value of their owner, and what they are elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels.names import READS, SHAPES, WRITES
from halfstep.kernels.watched import (
    Owner,
    WatchedParameter,
    WeightTensor,
    as_stored,
    low_written,
    unwatch,
    unwatch_copies,
    watch,
)

BF16, FP32 = torch.bfloat16, torch.float32
FINE = 1.0 + 2.0**-12
"""A value that bf16 rounds to 1."""


class Kept(Owner):
    """Keeps the fp32 value of one parameter, and what was asked of it."""

    def __init__(self, wide: Tensor) -> None:
        super().__init__(records=lambda: False if self.computing else None)
        self.wide, self.heard, self.computing, self.gone = wide, list[Any](), False, False

    def __contains__(self, parameter: object) -> bool:
        return not self.gone

    def value(self, parameter: nn.Parameter) -> Tensor:
        return self.wide

    @contextmanager
    def writing(self, parameter: nn.Parameter, *, fills: bool, counted: bool) -> Iterator[Tensor]:
        self.heard.append((fills, counted))
        yield self.wide
        Tensor.detach(parameter).copy_(self.wide)

    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor, *, converted: bool) -> Tensor:
        self.heard.append((name, value, converted))
        return value.to(BF16)

    def rounded(self, parameter: nn.Parameter, value: Tensor) -> None:
        self.heard.append(("rounded", value))


def made(*shape: int) -> tuple[Any, Kept]:
    parameter = nn.Parameter(torch.ones(shape or 3, dtype=BF16))
    owner = Kept(torch.full(shape or (3,), FINE))
    watch(parameter, owner, "w")
    return parameter, owner


@pytest.mark.parametrize("alias", [lambda p: p, lambda p: p.data, lambda p: p.detach(), lambda p: p.data.detach()])
def test_in_place_methods_of_a_parameter_and_its_aliases_change_the_fp32_value(alias: Callable[[Any], Any]) -> None:
    parameter, owner = made()
    target = alias(parameter)
    counted = target is parameter or target.__dict__["counted"]
    with torch.no_grad():
        target.mul_(2)
        target += torch.full((3,), 2.0**-12)
        target[1] = 5
        assert target.lerp_(torch.zeros(3), 0.5) is target
        target.addcmul_(parameter, parameter.data, value=0.0)
        assert torch.equal(owner.wide, torch.tensor([FINE + 2.0**-13, 2.5, FINE + 2.0**-13]))
        assert torch.equal(Tensor.detach(parameter), torch.tensor([1.0, 2.5, 1.0], dtype=BF16))
        target.fill_(3)
    assert owner.heard == 5 * [(False, counted)] + [(True, counted)]
    assert type(parameter) is WatchedParameter and torch.equal(owner.wide, torch.full((3,), 3.0))


def test_what_writes_values_is_written_here_and_nothing_else() -> None:
    """A method that a later torch adds is one or the other; those that change no values are listed."""
    assert {"add_", "lerp_", "copy_", "clamp_", "normal_", "masked_fill_", "__iadd__", "__setitem__"} <= WRITES
    assert not WRITES & SHAPES and {"mul", "norm", "__sub__"} <= READS
    assert all(name in vars(WatchedParameter) for name in WRITES)


def test_torch_refuses_what_it_refuses_of_any_leaf() -> None:
    parameter, owner = made()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad.*in-place operation"):
        parameter.add_(1)
    assert owner.heard == [] and torch.equal(owner.wide, torch.full((3,), FINE))


def test_operators_read_the_fp32_value_where_no_policy_computes() -> None:
    parameter, owner = made()
    fine = torch.full((3,), FINE)
    with torch.no_grad():
        for read in (parameter * 1, parameter.float(), parameter.data.clone(), 1 * parameter, parameter.detach() + 0):
            assert read.dtype is FP32 and torch.equal(read, fine)
        assert parameter.bfloat16().dtype is BF16 and parameter.norm().dtype is FP32
        owner.computing = True
        activation = torch.ones(2, 3, dtype=BF16)
        assert (parameter * 1).dtype is (parameter.detach() * activation).dtype is BF16
        assert torch.equal(parameter.detach() * 1, fine) and torch.equal(parameter.data * fine, fine * fine)
    owner.computing = False
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 2.0, dtype=BF16))


@pytest.mark.parametrize(
    "taken", [copy.deepcopy, lambda p: p.clone(), lambda p: p.detach().clone(), lambda p: p.clone().detach()]
)
def test_copies_have_the_fp32_value_and_are_no_aliases(taken: Callable[[Any], Any]) -> None:
    parameter, owner = made()
    with torch.no_grad():
        twin = taken(parameter)
        assert twin.dtype is FP32 and torch.equal(twin.detach(), owner.wide)
        twin.mul_(0.5).add_(parameter, alpha=0.5)
    assert torch.equal(twin.detach(), torch.full((3,), FINE)) and owner.heard == []
    assert torch.equal(twin.detach(), owner.wide)
    twin.data = torch.zeros(3)
    assert torch.equal(owner.wide, torch.full((3,), FINE))


def test_writes_into_low_values_by_another_way_are_counted_and_looks_are_not() -> None:
    parameter, owner = made()
    assert not low_written(parameter) and parameter.data.data_ptr() == parameter.data_ptr()
    version = parameter._version
    parameter.data.sum(), parameter.detach().abs(), parameter.data.view(-1), list(parameter.data)
    assert not low_written(parameter) and parameter._version == version
    parameter.data.as_subclass(Tensor).zero_()
    assert low_written(parameter) and not low_written(parameter) and parameter._version == version
    with torch.no_grad():
        torch.ops.aten.add_(parameter, 1)
    assert parameter._version == version + 1 and owner.heard == []


PARTS: dict[str, Callable[[Any], list[Any]]] = {
    "a row": lambda p: [p[1]],
    "chunks": lambda p: [*p.chunk(2)],
    "rows": lambda p: [*p.data],
    "the transpose": lambda p: [p.data.t()],
    "the transpose, an attribute": lambda p: [p.detach().T],
    "flat": lambda p: [p.view(-1), p.data.flatten()],
    "part of a part": lambda p: [p.data[1:][:, 2:]],
    "every second": lambda p: [p[::2, 1::2].detach()],
    "a diagonal": lambda p: [p.data.diagonal()],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts_of_a_parameter_read_and_write_its_fp32_value(parts: Callable[[Any], list[Any]]) -> None:
    parameter, owner = made(4, 6)
    exact = owner.wide.clone()
    with torch.no_grad():
        for part, value in zip(parts(parameter), parts(exact), strict=True):
            assert part.dtype is BF16 and torch.equal(part * 1, value)
            assert torch.equal(torch.cat([part, part]), torch.cat([value, value]))
            part.mul_(2 + 2.0**-13)
            value.mul_(2 + 2.0**-13)
            part[0] += 2.0**-12
            value[0] += 2.0**-12
            part.zero_() if part.dim() == 1 else part.add_(0)
            value.zero_() if value.dim() == 1 else value.add_(0)
        owner.computing = True
        assert (parts(parameter)[0] * torch.ones(2, 1, 1, dtype=BF16)).dtype is BF16
    assert torch.equal(owner.wide, exact) and torch.equal(Tensor.detach(parameter), exact.bfloat16())
    assert not low_written(parameter)


def test_functions_of_aliases_alone_read_fp32_and_layers_low_values() -> None:
    parameter, owner = made(4, 6)
    wide, x = owner.wide, torch.ones(3, 6, dtype=BF16)
    for alias in (parameter.data, parameter.detach()):
        for function in (torch.roll, torch.fliplr, torch.linalg.norm, torch.amax, torch.trace, torch.sort):
            given = (1,) if function is torch.roll else ()
            got, wanted = function(alias, *given), function(wide, *given)
            assert all(
                map(
                    torch.equal,
                    (got if isinstance(got, tuple) else (got,)),
                    wanted if isinstance(wanted, tuple) else (wanted,),
                )
            )
        assert torch.equal(torch.where(alias > FINE - 2.0**-14, alias, 0), wide)
        assert torch.equal(alias @ alias.T, wide @ wide.T) and alias.tolist() == wide.tolist()
        assert torch.nn.functional.linear(x, alias).dtype is BF16 and (x + alias[:3]).dtype is FP32
        assert torch.empty_like(alias).dtype is x.float().type_as(alias).dtype is BF16
        assert alias.element_size() == 2 and alias.data_ptr() == parameter.data_ptr() and alias.dtype is BF16
    with torch.no_grad():
        assert torch.equal(parameter.roll(1), wide.roll(1)) and parameter.tolist() == wide.tolist()
        assert torch.equal(parameter[[2, 0]], wide[[2, 0]]) and parameter.amax().dtype is FP32


def test_functions_of_torch_read_and_write_the_fp32_value_of_a_parameter() -> None:
    parameter, owner = made(4, 4)
    other, _ = made(4, 4)
    wide, mean = owner.wide, torch.zeros(4, 4)
    with torch.no_grad():
        for function in (torch.linalg.norm, torch.norm, torch.sum, torch.roll, torch.linalg.matrix_norm):
            given = (1,) if function is torch.roll else ()
            assert torch.equal(function(parameter, *given), function(wide, *given))
        assert torch.equal(torch.cat([parameter, other]), torch.cat([wide, wide]))
        assert torch.equal(parameter @ other, wide @ wide) and torch.equal(torch.mm(parameter, other), wide @ wide)
        for write in (mean.copy_, partial(mean.lerp_, weight=1.0), lambda p: mean.zero_().add_(p)):
            write(parameter)
            assert torch.equal(mean, wide)
        torch._foreach_lerp_([mean.zero_()], [parameter], 1.0)
        assert torch.equal(mean, wide) and torch.equal(torch.add(mean, parameter), 2 * wide)
        exact = wide + 2.0**-12
        torch.add(parameter, 2.0**-12, out=parameter)
        assert torch.equal(owner.wide, exact) and not low_written(parameter)
        torch._foreach_mul_([parameter, other], 2.0)
        nn.init.constant_(other, 1.0)
        assert torch.equal(owner.wide, 2 * exact) and torch.equal(Tensor.detach(parameter), (2 * exact).bfloat16())


def test_layers_makers_kernels_and_hooks_get_the_low_tensor_itself() -> None:
    parameter, owner = made(4, 4)
    x = torch.ones(2, 4, dtype=BF16)
    with torch.no_grad():
        assert nn.functional.linear(x, parameter).dtype is (x @ parameter).dtype is BF16
        assert nn.functional.embedding(torch.tensor([1]), parameter).dtype is BF16
        assert torch.zeros_like(parameter, dtype=BF16).dtype is torch.empty_like(parameter).dtype is BF16
        assert torch.ops.aten.mul(parameter, 1).dtype is BF16
        assert parameter.data_ptr() == parameter.untyped_storage().data_ptr() and torch.is_floating_point(parameter)
        owner.computing = True
        assert torch.sum(parameter).dtype is BF16
        owner.computing = False
    heard: list[Tensor] = []
    with torch.no_grad():
        handle = parameter.register_hook(heard.append)
    loss = nn.functional.linear(x, parameter).float().sum()
    (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    loss.backward()
    handle.remove()
    assert torch.equal(gradient, parameter.grad) and len(heard) == 2 and owner.heard == []
    assert torch.mul(x.unsqueeze(1), parameter).dtype is (x * parameter[0]).dtype is BF16  # what modules compute


def test_it_sees_low_tensors_as_they_are_where_that_is_asked_for_also_after_an_error() -> None:
    parameter, _ = made()

    @as_stored
    def formats(error: str = "") -> list[torch.dtype]:
        with torch.no_grad():
            found = torch.sum(parameter).dtype
        if error:
            raise ValueError(error)
        return [found]

    assert formats() == [BF16]
    with pytest.raises(ValueError, match="then"):
        formats("then")
    with torch.no_grad():
        assert torch.sum(parameter).dtype is FP32


def test_replaced_data_is_what_the_owner_says() -> None:
    parameter, owner = made()
    value = torch.full((3,), 5.0)
    parameter.data = value
    assert owner.heard == [("w", value, False)] and torch.equal(Tensor.detach(parameter), value.bfloat16())
    parameter.set_(value)
    parameter.data = parameter.data.float()
    assert [entry[2] for entry in owner.heard] == [False, False, True]
    assert parameter.data.data_ptr() == parameter.data_ptr() and not low_written(parameter)


def test_it_is_a_plain_parameter_wherever_it_is_carried_to() -> None:
    parameter, owner = made()
    parameter.tag = "mine"
    loaded: Any = pickle.loads(pickle.dumps(parameter))
    assert vars(loaded) == {"tag": "mine"} and torch.equal(loaded, owner.wide)
    assert type(loaded) is nn.Parameter
    del parameter.tag
    file = io.BytesIO()
    torch.save({"w": parameter, "d": parameter.data}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert type(saved["w"]) is nn.Parameter and type(saved["d"]) is Tensor
    with torch.inference_mode():
        assert torch.equal(parameter.data, torch.ones(3, dtype=BF16))
    unwatch(parameter, Kept(owner.wide))
    assert type(parameter).__name__ == "WatchedParameter"
    unwatch(parameter, owner)
    assert type(parameter).__name__ == "Parameter" and not vars(parameter)


def test_an_owner_that_is_gone_leaves_low_values() -> None:
    parameter, owner = made()
    view = parameter.data
    owner.gone = True
    with torch.no_grad():
        view.add_(1)
        assert parameter.add_(1).dtype is BF16 and (parameter * 1).dtype is BF16
    del owner
    parameter.data = torch.zeros(3, dtype=BF16)
    assert torch.equal(parameter.detach().clone(), torch.zeros(3, dtype=BF16))


def test_other_classes_are_left_alone() -> None:
    parameter: Any = nn.UninitializedParameter()
    watch(parameter, Kept(torch.ones(3)), "w")
    assert type(parameter) is nn.UninitializedParameter


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_made_of_one_is_plain(requires_grad: bool) -> None:
    parameter, owner = made()
    twin: Any = nn.Parameter(parameter, requires_grad)
    assert type(twin) is nn.Parameter and twin.requires_grad is requires_grad and not vars(twin)
    assert twin.data_ptr() == parameter.data_ptr() and type(parameter) is WatchedParameter
    assert type(parameter.detach()) is WeightTensor and not parameter.detach().requires_grad
    assert isinstance(parameter, nn.Parameter) and owner.heard == []


def test_compiled_code_reads_data_without_a_break() -> None:
    parameter, owner = made()
    owner.computing = True  # as in a region

    def reads(x: Tensor, w: Tensor) -> Tensor:
        return x * w.data + w.detach() + w

    function = torch.compile(reads, backend="eager", fullgraph=True)
    assert torch.equal(function(torch.ones(3), parameter), torch.full((3,), 3.0))


def test_a_copy_that_is_trained_is_plain() -> None:
    parameter, _ = made()
    twin = copy.deepcopy(parameter)
    assert type(twin).__name__ == "WatchedParameter"
    unwatch_copies([parameter, twin])
    assert type(twin).__name__ == "Parameter" and not vars(twin)
    assert type(parameter).__name__ == "WatchedParameter"
