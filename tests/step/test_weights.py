"""Windows weighted by tokens: `hs.Loss`."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError
from tests.two_processes import in_two_processes

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(1))
BEGIN = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))


def by_tensor(model: nn.Module, x: Tensor, y: Tensor) -> hs.Loss:
    return hs.Loss(F.cross_entropy(model(x).float(), y, reduction="sum", ignore_index=-100), (y != -100).sum())


def by_number(model: nn.Module, x: Tensor, y: Tensor) -> hs.Loss:
    return hs.Loss(F.cross_entropy(model(x).float(), y, reduction="sum"), len(y), {"rows": len(y)})


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def built(loss_fn: Any, policy: str = "O0", dtype: str = "fp32", **named: Any) -> hs.TrainStep:
    model = nn.Linear(8, 8, bias=False)
    model.load_state_dict({"weight": BEGIN})
    chosen = hs.Policy.of(policy) if dtype == "fp32" else hs.Policy.of(policy, dtype=dtype)
    return hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, policy=chosen, **named)


def moved(step: hs.TrainStep) -> Tensor:
    weight: Tensor = step.model.state_dict()["weight"]
    return weight - BEGIN


def whole() -> Tensor:
    step = built(mean)
    step(X, Y)
    return moved(step)


@pytest.mark.parametrize("loss_fn", [by_tensor, by_number])
@pytest.mark.parametrize("sizes", [(4, 60), (1, 2, 61), (16, 16, 16, 16)])
def test_micro_batches_of_any_size_give_the_update_of_the_whole_batch(loss_fn: Any, sizes: tuple[int, ...]) -> None:
    step = built(loss_fn, accumulate=len(sizes))
    for part in zip(X.split(sizes), Y.split(sizes), strict=True):
        result = step(*part)
        assert result.host().loss == pytest.approx(mean(step.model, *part).item(), rel=1e-5) or result.due
    torch.testing.assert_close(moved(step), whole(), rtol=1e-5, atol=1e-7)


def test_the_program_that_found_it_differs_without_weights() -> None:
    step = built(mean, accumulate=2)
    for part in zip(X.split((4, 60)), Y.split((4, 60)), strict=True):
        step(*part)
    assert (moved(step) - whole()).norm() > 0.1 * whole().norm()


@pytest.mark.parametrize(("policy", "dtype"), [("mixed", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("pure", "bf16")])
def test_under_low_formats_and_a_loss_scale(policy: str, dtype: str) -> None:
    found = []
    for sizes in ((64,), (4, 60)):
        step = built(by_tensor, policy, dtype, accumulate=len(sizes), clip_norm=0.5, retry=dtype == "fp16")
        for part in zip(X.split(sizes), Y.split(sizes), strict=True):
            step(*part)
        found.append((step.record.micro_batches, moved(step)))
    assert (found[0][1] - found[1][1]).norm() < 0.02 * found[0][1].norm()


def test_a_window_that_ends_early() -> None:
    step = built(by_tensor, accumulate=4)
    for part in zip(X.split((4, 60)), Y.split((4, 60)), strict=True):
        step(*part)
    assert step.flush() is not None
    torch.testing.assert_close(moved(step), whole(), rtol=1e-5, atol=1e-7)


def test_a_micro_batch_without_a_token_changes_nothing() -> None:
    step = built(by_tensor, accumulate=2)
    step(X, Y)
    result = step(X, torch.full_like(Y, -100))
    assert not result.host().skipped and result.host().loss == 0.0
    torch.testing.assert_close(moved(step), whole(), rtol=1e-5, atol=1e-7)


def test_bits_do_not_depend_on_the_reference_and_a_checkpoint_has_it() -> None:
    step = built(by_tensor, "O2", "fp16", accumulate=2)
    for n in range(4):
        step(X[: 8 + n], Y[: 8 + n])
    state = step.state_dict()
    assert state["reference"] == 8.0
    again = built(by_tensor, "O2", "fp16", accumulate=2)
    again.load_state_dict(state)
    for one in (step, again):
        for n in range(4):
            one(X[: 60 - n], Y[: 60 - n])
    assert torch.equal(moved(step), moved(again))


def test_one_batch_in_a_window_is_its_mean_and_needs_no_part() -> None:
    step = built(by_number)
    result = step(X, Y)
    assert result.aux == {"rows": 64} and not any("Weights" in type(part).__name__ for part in step.parts)
    torch.testing.assert_close(moved(step), whole(), rtol=1e-6, atol=1e-8)


def test_what_is_refused() -> None:
    def sometimes(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return by_tensor(model, x, y) if len(x) > 4 else mean(model, x, y)

    step = built(sometimes, accumulate=2)
    step(X, Y)
    with pytest.raises(StepError, match="micro-batch 2 of a window returned no hs.Loss, and the one before it an"):
        step(X[:4], Y[:4])
    step(X[:4], Y[:4])
    with pytest.raises(StepError, match="micro-batch 2 of a window returned an hs.Loss, and the one before it no"):
        step(X, Y)
    for weight in (-1.0, math.nan, "12", True):
        with pytest.raises(StepError, match="hs.Loss: weight must be a finite number from 0"):
            built(lambda model, x, y, weight=weight: hs.Loss(mean(model, x, y), weight))(X, Y)
    with pytest.raises(StepError, match="hs.Loss: sum must be"):
        built(lambda model, x, y: hs.Loss(model(x), 3))(X, Y)


def test_evaluate_returns_it_as_it_is() -> None:
    found = built(by_number).evaluate(X, Y)
    assert isinstance(found, hs.Loss) and found.weight == 64


def test_a_compiled_step_weighs_too() -> None:
    step = built(by_tensor, accumulate=2, compile={"backend": "aot_eager"})
    for part in zip(X.split((4, 60)), Y.split((4, 60)), strict=True):
        step(*part)
    torch.testing.assert_close(moved(step), whole(), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- ranks


def on_ranks(rank: int, kind: str) -> dict[str, Tensor]:
    """Train on 64 rows that two ranks have cut up in several ways; return what the weight has moved by, for each."""
    found: dict[str, Tensor] = {}
    cuts = {
        "one micro-batch each": ((4,), (60,)),
        "windows": ((4, 20), (10, 30)),
        "a flush": ((4, 20, 1), (10, 29)),
        "a join": ((4, 20, 1), (10, 29)),
    }
    for name, sizes in cuts.items():
        model: nn.Module = nn.Linear(8, 8, bias=False)
        model.load_state_dict({"weight": BEGIN})
        policy = hs.Policy.of("O0")
        if kind == "fully_shard":
            if name in {"a flush", "a join"}:
                continue  # its passes need all ranks
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if kind == "ddp":
            hs.prepare(model, optimizer, policy=policy)
            model = DistributedDataParallel(model)
        accumulate = {"one micro-batch each": 1, "windows": 2}.get(name, 4)
        step = hs.TrainStep(model, optimizer, by_tensor, policy=policy, accumulate=accumulate)
        first = 0 if rank == 0 else sum(sizes[0])
        rows = slice(first, first + sum(sizes[rank]))
        parts = zip(X[rows].split(sizes[rank]), Y[rows].split(sizes[rank]), strict=True)
        with step.join() if name == "a join" else nullcontext():
            for part in parts:
                step(*part)
        if name == "a flush":
            step.flush()
        weight = unwrap(step.model).state_dict()["weight"]
        found[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight) - BEGIN
    return found


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_ranks_with_different_numbers_of_tokens_train_as_one_process(kind: str, tmp_path: Path) -> None:
    for found in in_two_processes(on_ranks, tmp_path, kind):
        assert len(found) == (4 if kind == "ddp" else 2)
        for name, weight in found.items():
            torch.testing.assert_close(weight, whole(), rtol=1e-4, atol=1e-6, msg=f"{kind}, {name}")
