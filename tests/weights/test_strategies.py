"""Laws of all strategies: any torch optimizer steps their fp32 values, and nothing else of it or the model changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.kernels.reference.operators import noise
from halfstep.weights import STRATEGIES, WeightStore
from tests.products import sampled
from tests.stepping import fragile
from tests.weights.small import EVERY, OPTIMIZERS, buffers, gradients, shapes

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
COMPACT = ("split", "kahan", "stochastic")
CASES = [
    *(("master", BF16), ("master", HALF), ("split", BF16)),
    *(("kahan", BF16), ("kahan", HALF), ("stochastic", BF16), ("stochastic", HALF)),
]
IDS = [f"{name}-{'bf16' if low is BF16 else 'fp16'}" for name, low in CASES]


def adopted(name: str, parameters: list[nn.Parameter], low: torch.dtype = BF16) -> WeightStore:
    torch.manual_seed(5)
    return STRATEGIES[name]([(f"p{i}", p) for i, p in enumerate(parameters)], low)


def counted(store: WeightStore) -> dict[str, Any]:
    return {} if store.draws is None else store.draws.state()


def compensated(wide: Tensor, low: torch.dtype) -> Tensor:
    rounded = wide.to(low).float()
    return rounded + (wide - rounded).to(low).float()


def kept_by_hand(name: str, low: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return what becomes of an fp32 value that a strategy keeps after a step."""
    if name in ("master", "split"):
        return lambda wide: wide
    if name == "kahan":
        return lambda wide: compensated(wide, low)
    torch.manual_seed(5)
    seed = int(torch.randint(0, 2**63 - 1, ()))
    calls = iter(range(10**6))

    def keep(wide: Tensor) -> Tensor:
        count, place = divmod(next(calls), len(shapes()))
        bits = noise(torch.tensor([seed, count]), place, 0, wide.numel()).reshape(wide.shape)
        size = wide.abs()
        near = size.to(low).view(torch.int16)
        near = torch.where(near.view(low).double() > size, near - 1, near)
        below, above = near.view(low).double(), (near + 1).view(low).double()
        fraction = (size.double() - below) / (above - below)
        if low is BF16:
            up = fraction + bits / 65536 >= 1
        else:  # works on values, so that the noise of a negative one counts from the other side
            up = torch.where(wide < 0, bits / 65536 < fraction, fraction + bits / 65536 >= 1)
        return (torch.where(up, above, below) * wide.sign()).float()

    return keep


@pytest.mark.parametrize("optimizer_name", EVERY)
@pytest.mark.parametrize(("name", "low"), CASES, ids=IDS)
def test_bit_equal_to_the_strategy_by_hand_under_every_optimizer(
    name: str, low: torch.dtype, optimizer_name: str
) -> None:
    make = EVERY[optimizer_name]
    want = shapes()
    keep = kept_by_hand(name, low)
    with torch.no_grad():
        for p in want:
            p.copy_(p.to(low) if name == "stochastic" else keep(p))
    reference = make(want)
    parameters = shapes()
    optimizer = make(parameters)
    store = adopted(name, parameters, low)
    store.attach(optimizer)
    for i in range(4):
        gradients(want, i, low)
        reference.step()
        with torch.no_grad():
            for p in want:
                p.copy_(keep(p))
        gradients(parameters, i, low)
        optimizer.step()
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        assert not list(store.temporaries()) and (name == "master" or not buffers(store))
    for p, w in zip(parameters, want, strict=True):
        assert p.dtype is low and torch.equal(store.read(p), w)
        assert name == "split" or torch.equal(p, w.to(low))
        for key, value in optimizer.state[p].items():
            other = reference.state[w][key]
            assert value is None and other is None or torch.equal(torch.as_tensor(value), torch.as_tensor(other)), key


@pytest.mark.parametrize(("case", "optimizer_name", "stepped_before"), sampled(CASES, OPTIMIZERS, (False, True)))
def test_resume_is_bit_exact(case: tuple[str, torch.dtype], optimizer_name: str, stepped_before: bool) -> None:
    name, low = case

    def fresh() -> tuple[list[nn.Parameter], torch.optim.Optimizer, WeightStore]:
        parameters = shapes()
        optimizer = OPTIMIZERS[optimizer_name](parameters)
        if stepped_before:
            gradients(parameters, 90, FP32)
            optimizer.step()
        store = adopted(name, parameters, low)
        store.attach(optimizer)
        return parameters, optimizer, store

    (parameters, optimizer, store), (again, other, second) = fresh(), fresh()
    for i in range(3):
        gradients(parameters, i, low)
        optimizer.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if store.draws is not None and second.draws is not None:
        second.draws.load_state(store.draws.state())
    for p, q in zip(parameters, again, strict=True):
        second.assign(q, store.read(p))
        assert torch.equal(p, q)
        assert all(v.dtype is FP32 for v in other.state[q].values() if isinstance(v, Tensor))
    for i in range(3, 6):
        for params, opt in ((parameters, optimizer), (again, other)):
            gradients(params, i, low)
            opt.step()
    for p, q in zip(parameters, again, strict=True):
        assert torch.equal(store.read(p), second.read(q)) and torch.equal(p, q)


@pytest.mark.parametrize(("name", "low"), CASES, ids=IDS)
def test_a_step_that_moves_nothing_leaves_every_bit(name: str, low: torch.dtype) -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    parameter = nn.Parameter(torch.cat([values, values * 1e-6, torch.tensor([0.0, -0.0, 1 + 2**-8 - 2**-20])]))
    store = adopted(name, [parameter], low)
    optimizer = torch.optim.SGD([parameter], 0.0)
    before = parameter.detach().clone(), [k.clone() for k in store.kept()], store.read(parameter)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(parameter, before[0]) and torch.equal(store.read(parameter), before[2])
    assert all(torch.equal(a, b) for a, b in zip(store.kept(), before[1], strict=True))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("make", [OPTIMIZERS["adamw-fused"], OPTIMIZERS["sgd-fused"]])
def test_found_inf_leaves_everything(name: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    parameters = shapes()
    optimizer = make(parameters)
    store = adopted(name, parameters)
    store.attach(optimizer)
    gradients(parameters, 0, BF16)
    optimizer.step()
    before = [p.detach().clone() for p in parameters], [store.read(p) for p in parameters], counted(store)
    gradients(parameters, 1, BF16)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), None  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    assert all(torch.equal(p, b) for p, b in zip(parameters, before[0], strict=True))
    assert all(torch.equal(store.read(p), b) for p, b in zip(parameters, before[1], strict=True))
    assert counted(store) == before[2]


@pytest.mark.parametrize("name", COMPACT)
def test_bytes_between_steps_are_those_of_its_docstring(name: str) -> None:
    parameters = shapes()
    total = sum(p.numel() for p in parameters)
    store = adopted(name, parameters)
    optimizer = torch.optim.SGD(parameters, 0.1)
    store.attach(optimizer)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(sum(t.numel() for t in store.temporaries())))
    gradients(parameters, 0, BF16)
    optimizer.step()
    held = [*parameters, *store.kept(), *store.temporaries(), *buffers(store)]
    assert sum(t.numel() * t.element_size() for t in held) == total * (2 if name == "stochastic" else 4)
    assert seen == [total]


@pytest.mark.parametrize("name", COMPACT)
def test_a_change_by_hand_keeps_what_the_low_weights_lack(name: str) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) + 2.0**-12)
    store = adopted(name, [parameter])
    optimizer = torch.optim.SGD([parameter], 0.5)
    store.attach(optimizer)
    with torch.no_grad():
        parameter[1] = 7.0
    rest = 2.0**-12 * store.keeps_more
    assert torch.equal(store.read(parameter), torch.tensor([1.0 + rest, 7.0, 3.0 + rest]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(store.read(parameter), torch.tensor([0.5 + rest, 6.5, 2.5 + rest]))
    nn.init.zeros_(parameter)
    store.release()
    assert torch.equal(parameter, torch.zeros(3))


@pytest.mark.parametrize("name", COMPACT)
def test_a_referenced_master_is_one_object_and_follows(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3) + 1e-3)
    store = adopted(name, [parameter])
    master = store.master(parameter)
    assert store.master(parameter) is master and master.requires_grad
    with torch.no_grad():
        parameter.fill_(2.0)
    assert store.master(parameter) is master and torch.equal(master, torch.full((3,), 2.0))
    with torch.no_grad():
        master.fill_(3.0)
    assert torch.equal(store.read(parameter), torch.full((3,), 3.0))
    store.write_back()
    assert torch.equal(parameter, torch.full((3,), 3.0, dtype=BF16))
    del master
    assert not list(store.temporaries())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_that_raises_is_undone_and_training_goes_on(name: str) -> None:
    Fragile = fragile(torch.optim.AdamW)

    def run(*, failing: bool) -> list[Tensor]:
        parameters = shapes()
        optimizer = Fragile(parameters, 1e-2)
        store = adopted(name, parameters)
        store.attach(optimizer)
        for i in range(4):
            gradients(parameters, i, BF16)
            if failing and i == 2:
                optimizer.broken = True
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                assert name == "master" or list(store.temporaries())
                assert store.restore() and not store.restore()
                assert optimizer.param_groups[0]["params"][0] is parameters[0] and not list(store.temporaries())
            optimizer.step()
        return [store.read(p) for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(run(failing=False), run(failing=True), strict=True))


@pytest.mark.parametrize("name", STRATEGIES)
def test_channels_last_weights_keep_their_layout(name: str) -> None:
    def train(layout: torch.memory_format) -> Tensor:
        values = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1)).to(memory_format=layout)
        parameter = nn.Parameter(values)
        store = adopted(name, [parameter])
        optimizer = torch.optim.AdamW([parameter], 1e-2, fused=True)
        for i in range(3):
            gradient = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(10 + i))
            parameter.grad = gradient.to(BF16).to(memory_format=layout)
            optimizer.step()
        assert parameter.is_contiguous(memory_format=layout)
        return store.read(parameter)

    plain, last = train(torch.contiguous_format), train(torch.channels_last)
    assert name == "stochastic" or torch.equal(plain, last)


@pytest.mark.parametrize("name", STRATEGIES)
def test_sparse_gradients_and_frozen_parameters(name: str) -> None:
    table, frozen = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(3), requires_grad=False)
    store = adopted(name, [table, frozen])
    optimizer = torch.optim.SparseAdam([table, frozen], 0.1)
    before, still = store.read(table), store.read(frozen)
    nn.functional.embedding(torch.tensor([1, 4, 1]), table, sparse=True).sum().backward()
    assert table.grad is not None and table.grad.is_sparse and table.grad.dtype is BF16
    optimizer.step()
    moved = (store.read(table) != before).any(1)
    assert moved.tolist() == [False, True, False, False, True, False]
    assert torch.equal(store.read(frozen), still) and not store.master(frozen).requires_grad


@pytest.mark.parametrize("name", STRATEGIES)
def test_release(name: str) -> None:
    parameters = shapes()
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    store = adopted(name, parameters)
    store.attach(optimizer)
    gradients(parameters, 0, BF16)
    optimizer.step()
    want = [store.read(p) for p in parameters]
    assert hasattr(optimizer, WEIGHTS_ATTRIBUTE)
    store.release()
    assert not hasattr(optimizer, WEIGHTS_ATTRIBUTE)
    assert all(p.dtype is FP32 and torch.equal(p, w) for p, w in zip(parameters, want, strict=True))
    assert not list(store.kept())
    gradients(parameters, 1, FP32)
    optimizer.step()


def test_only_stochastic_has_a_state_of_its_own() -> None:
    for name in STRATEGIES:
        store = adopted(name, shapes())
        assert (store.draws is not None) is (name == "stochastic")
