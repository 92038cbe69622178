"""Several optimizers in one step: one norm, one verdict, and all of them step or none."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import halfstep as hs
from halfstep.errors import StepError

Kind = Callable[[list[nn.Parameter], list[nn.Parameter]], list[torch.optim.Optimizer]]

PRESETS = ("O0", "mixed", "O2", "pure", "lean")


def made(seed: int = 0) -> tuple[nn.Sequential, list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    matrices: list[nn.Parameter] = [model[1].weight, model[4].weight]  # type: ignore[list-item]
    return model, matrices, [p for p in model.parameters() if all(p is not m for m in matrices)]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (8, 16), generator=generator), torch.randint(0, 64, (8, 16), generator=generator)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def muon_and_adamw(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


def two_adams(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.95))]


def adamw_and_lion(matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [hs.Lion(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-2)]


KINDS = [two_adams, adamw_and_lion, pytest.param(muon_and_adamw, marks=pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="no torch.optim.Muon"
))]  # fmt: skip


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_optimizer_trains_and_a_resumed_run_has_the_same_bits(preset: str, kind: Kind) -> None:
    def build(seed: int) -> hs.TrainStep:
        model, matrices, rest = made(seed)
        return hs.TrainStep(model, kind(matrices, rest), loss_fn, policy=hs.Policy.of(preset, dtype="bf16"))

    step = build(0)
    before = values(step.model)
    losses = [step(*batch(n)).host().loss for n in range(6)]
    assert not any(torch.equal(a, b) for a, b in zip(before, values(step.model), strict=True))
    assert losses[-1] < losses[0] * 1.5
    state = pickle.loads(pickle.dumps(step.state_dict()))
    resumed = build(3)
    resumed.load_state_dict(state)
    copied = copy.deepcopy(step)
    for n in range(6, 9):
        step(*batch(n))
        resumed(*batch(n))
        copied(*batch(n))
    assert same(values(step.model), values(resumed.model))
    assert same(values(step.model), values(copied.model))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_loop_by_hand_in_fp32(kind: Kind) -> None:
    steps = 1 if kind is muon_and_adamw else 4  # its iteration in bf16 makes large differences of small ones
    model, matrices, rest = made()
    optimizers = kind(matrices, rest)
    for n in range(steps):
        loss_fn(model, *batch(n)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twin, matrices, rest = made()
    step = hs.TrainStep(twin, kind(matrices, rest), loss_fn, policy="O0")
    for n in range(steps):
        step(*batch(n))
    for a, b in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_norm_over_all_clips_all() -> None:
    model, matrices, rest = made()
    sgd = [torch.optim.SGD(matrices, lr=1.0), torch.optim.SGD(rest, lr=1.0)]
    before = values(model)
    step = hs.TrainStep(model, sgd, loss_fn, policy="O0", clip_norm=0.5)
    result = step(*batch()).host()
    moved = [b - a for a, b in zip(before, values(model), strict=True)]
    assert result.grad_norm > 0.5
    assert torch.cat([m.flatten() for m in moved]).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_norm_for_each_of_them() -> None:
    model, matrices, rest = made()
    sgd = {"matrices": torch.optim.SGD(matrices, lr=1.0), "rest": torch.optim.SGD(rest, lr=1.0)}
    old = [p.detach().clone() for p in matrices], [p.detach().clone() for p in rest]
    step = hs.TrainStep(model, sgd, loss_fn, policy="O0", clip_norm={"matrices": 0.25, "rest": 0.125})
    step(*batch())
    for parameters, some, limit in zip((matrices, rest), old, (0.25, 0.125), strict=True):
        moved = torch.cat([(p.detach() - a).flatten() for p, a in zip(parameters, some, strict=True)])
        assert moved.norm().item() == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["mixed", "O2"])
def test_a_gradient_that_is_not_finite_stops_all_of_them(preset: str, kind: Kind) -> None:
    model, matrices, rest = made()
    step = hs.TrainStep(model, kind(matrices, rest), loss_fn, policy=hs.Policy.of(preset, dtype="bf16"), blackbox=False)
    step(*batch())
    before, states = values(model), copy.deepcopy(step.optimizer.state_dict()["state"])
    rest[-1].register_hook(lambda gradient: gradient * math.inf)  # of the second optimizer alone
    assert step(*batch(2)).host().skipped
    assert same(before, values(model))
    for number, state in step.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[number][name])), (number, name)


def test_schedulers_advance_together_and_are_saved() -> None:
    model, matrices, rest = made()
    optimizers = two_adams(matrices, rest)
    schedulers = [LambdaLR(optimizer, lambda n: 0.5**n) for optimizer in optimizers]
    step = hs.TrainStep(model, optimizers, loss_fn, policy="O0", scheduler=schedulers)
    for n in range(3):
        step(*batch(n))
    step.flush()
    assert [g["lr"] for g in step.optimizer.param_groups] == [1e-3 / 8, 1e-2 / 8]
    state = step.state_dict()
    twin, matrices, rest = made()
    optimizers = two_adams(matrices, rest)
    schedulers = [LambdaLR(optimizer, lambda n: 0.5**n) for optimizer in optimizers]
    other = hs.TrainStep(twin, optimizers, loss_fn, policy="O0", scheduler=schedulers)
    other.load_state_dict(state)
    assert [s.last_epoch for s in schedulers] == [3, 3]


def test_accumulation_retry_and_a_shared_scaler() -> None:
    model, matrices, rest = made()
    step = hs.TrainStep(
        model,
        two_adams(matrices, rest),
        loss_fn,
        policy=hs.Policy.of("O2", dtype="fp16"),
        accumulate=2,
        retry=True,
        clip_norm=1.0,
    )
    results = [step(*batch(n)) for n in range(8)]
    assert [r.due for r in results] == [False, True] * 4
    assert not any(r.host().skipped for r in results if r.due)


@pytest.mark.parametrize("kind", [two_adams, adamw_and_lion])
def test_update_in_backward_has_the_bits_of_the_whole_update(kind: Kind) -> None:
    found = []
    for early in (False, True):
        model, matrices, rest = made()
        policy = dataclasses.replace(hs.Policy.of("O2", dtype="bf16"), master="kahan")  # which draws no random bits
        step = hs.TrainStep(model, kind(matrices, rest), loss_fn, policy=policy, update_in_backward=early)
        norms = [step(*batch(n)).host().grad_norm for n in range(3)]
        found.append((norms, values(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert same(found[0][1], found[1][1])


def test_a_checkpoint_on_disk_is_by_name(tmp_path: Path) -> None:
    def build(first: str) -> hs.TrainStep:
        model, matrices, rest = made()
        a, b = two_adams(matrices, rest)
        return hs.TrainStep(model, {first: a, "rest": b}, loss_fn, policy=hs.Policy.of("O2", dtype="bf16"))

    step = build("matrices")
    for n in range(3):
        step(*batch(n))
    hs.save(step, tmp_path)
    again = build("matrices")
    hs.load(again, tmp_path)
    step(*batch(9))
    again(*batch(9))
    assert same(values(step.model), values(again.model))
    with pytest.raises(StepError, match="saved with matrices, rest, and here there is body, rest"):
        build("body").load_state_dict(step.state_dict())


def test_what_is_refused() -> None:
    model, matrices, rest = made()
    a, b = two_adams(matrices, rest)
    with pytest.raises(StepError, match=r"in both 'AdamW' and 'AdamW 2'"):
        hs.TrainStep(model, [a, torch.optim.AdamW(matrices)], loss_fn)
    with pytest.raises(StepError, match="'third' is to be the name of an optimizer and is none of 'AdamW', 'AdamW 2'"):
        hs.TrainStep(model, [a, b], loss_fn, clip_norm={"third": 1.0})
    with pytest.raises(StepError, match="names one, and there are not several"):
        hs.TrainStep(model, a, loss_fn, clip_norm={"AdamW": 1.0})
    with pytest.raises(StepError, match="or a list or a dict of some, and is \\[\\]"):
        hs.TrainStep(model, [], loss_fn)
    with pytest.raises(StepError, match="closure"):
        hs.TrainStep(model, [a, torch.optim.LBFGS(rest)], loss_fn)
    step = hs.TrainStep(model, [a, b], loss_fn, policy="O0")
    with pytest.raises(StepError, match="add the group to one of them"):
        step.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(StepError, match="does not take the place of several"):
        step.optimizer = a
    other, matrices, rest = made(1)
    single = hs.TrainStep(other, torch.optim.AdamW(other.parameters()), loss_fn, policy="O0")
    with pytest.raises(StepError, match="saved with AdamW, AdamW 2, and here there is one optimizer"):
        single.load_state_dict(step.state_dict())


def test_a_bad_step_is_explained(tmp_path: Path) -> None:
    model, matrices, rest = made()
    step = hs.TrainStep(model, two_adams(matrices, rest), loss_fn, policy=hs.Policy.of("mixed", dtype="bf16"))
    step(*batch())
    with torch.no_grad():
        rest[-1][0] = math.inf
    assert step(*batch(2)).host().skipped
    assert "4.bias" in str(step.explain())


def test_an_audit_measures_each_of_them() -> None:
    model, matrices, rest = made()
    found = hs.audit(model, [batch()], loss_fn, "O2", muon_and_adamw(matrices, rest), steps=1, clip_norm=1.0)
    assert {"Muon", "AdamW"} <= {row.op for row in found.rows if row.role == "update"}
