"""Nothing is said that was not tried: of fp32, of a batch without a sample, of divergence, of masks and states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import BindError
from halfstep.lens.box import advice
from halfstep.lens.box.advice import LOADED, NAMED, WITHOUT
from halfstep.lens.verdict import Verdict
from tests.lens.broken import batch, classify, transformer

pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")

BF16, FP16 = (hs.Policy.of("mixed", dtype=dtype) for dtype in ("bf16", "fp16"))


def step_of(model: nn.Module, loss_fn: Any, policy: Any = BF16, lr: float = 1e-3) -> hs.TrainStep:
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr), loss_fn, policy=policy)


# ---------------------------------------------------------------------- fp32


def dice(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    p = model(x).sigmoid()
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum() + 1e-6)  # type: ignore[no-any-return]


def test_fp32_is_tried_where_the_model_is_low_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 1, 1)
    nn.init.constant_(model.bias, 4.0)  # type: ignore[arg-type]
    model = model.half()
    box = hs.BlackBox(model, dice, torch.optim.SGD(model.parameters(), 1e-3))
    box(torch.randn(1, 3, 512, 512).half(), torch.ones(1, 1, 512, 512).half()).backward()
    verdict = box.explain()
    assert (verdict.cause, verdict.sure) == ("precision", "shown") and verdict.because.startswith(NAMED)
    assert verdict.cures[0].text.startswith("take out what is low by name") and "trained 12 steps" in verdict.shown
    assert all(p.dtype is torch.float16 for p in model.parameters())


def test_a_cast_by_name_is_no_reason_to_blame_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    step = step_of(model, lambda m, x: ((m(x) * 300).half() * 300).float().square().mean().sqrt() * 1e-5)
    assert step(torch.randn(4, 8)).host().skipped
    verdict = step.explain()
    assert verdict.cause == "precision" and NAMED in verdict.because


def test_a_loss_that_is_a_sum_over_the_batch_is_trained_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 32), nn.Linear(32, 256))

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        h = model[0](x) * 1000
        return (
            F.binary_cross_entropy_with_logits(model[1](F.layer_norm((h * h).float(), (32,))), x, reduction="sum") * 9
        )

    step = step_of(model, loss_fn, FP16)
    assert step(torch.rand(1024, 256)).host().skipped
    verdict = step.explain()
    assert verdict.cause == "precision" and verdict.shown.startswith("trained 12 steps, loss 1.")


# ---------------------------------------------------------------------- divergence


class Noisy(nn.Module):
    """Its loss is mostly noise of a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.drop, self.leave = nn.Linear(16, 32), nn.Dropout(0.9), nn.Linear(32, 4)

    def forward(self, x: Tensor, large: float) -> Tensor:
        h = self.drop(self.enter(x).exp())
        return self.leave(h + (h * 0 + large) @ torch.full((32, 32), large) * 0)  # type: ignore[no-any-return]


def test_the_noise_of_a_dropout_is_no_divergence() -> None:
    torch.manual_seed(3)
    step = step_of(Noisy(), lambda m, x, large: m(x, large).float().square().mean(), FP16.replace(scale=1.0), lr=1e-9)
    x = torch.randn(2, 16)
    losses = [step(x, 0.0).host().loss for _ in range(8)]
    assert max(losses) > 3 * min(losses)
    assert step(x, 300.0).host().skipped
    verdict = step.explain()
    assert verdict.cause == "precision" and "loss 3.132 to 13.64" in verdict.shown


# ---------------------------------------------------------------------- data


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 4) for _ in range(4))
        with torch.no_grad():
            self.router.bias[2] = -100

    def forward(self, x: Tensor) -> Any:
        chosen = self.router(x).argmax(-1)
        return sum(expert(x[chosen == i]).float().mean(0) for i, expert in enumerate(self.experts))


def masked(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return (model(x).float().square().mean(-1) * mask).sum() / mask.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["experts", "masks"])
def test_what_fails_on_every_batch_is_not_put_down_to_a_sample(name: str) -> None:
    torch.manual_seed(0)
    if name == "experts":
        step = step_of(Experts(), lambda m, x, _: m(x).square().mean())
    else:
        step = step_of(nn.Linear(16, 4), masked)
    for _ in range(4):
        assert step(torch.randn(16, 16), torch.zeros(16)).host().skipped
    verdict = step.explain()
    assert verdict.cause == "model" and "sample" not in str(verdict)
    assert verdict.remedy.startswith("divide the sum by the count" if name == "experts" else "add an eps")


def test_a_sample_is_dropped_only_where_that_was_tried() -> None:
    torch.manual_seed(0)
    step = step_of(nn.Linear(16, 4), masked)
    assert step(torch.randn(8, 16), torch.ones(8)).host().updated
    assert step(torch.randn(8, 16), torch.zeros(8)).host().skipped
    verdict = step.explain()
    assert verdict.cause == "data" and verdict.cures[0].text == "mend it where it is loaded"
    step = step_of(nn.Linear(16, 4), lambda m, x: m(x / x.norm(dim=-1, keepdim=True)).float().square().mean())
    assert step(torch.randn(8, 16).index_fill(0, torch.tensor(2), 0.0)).host().skipped
    verdict = step.explain()
    assert verdict.cause == "data" and verdict.shown.startswith(WITHOUT) and "trained 12 steps" in verdict.shown
    assert verdict.cures[0].text.startswith("mend or drop that sample")


@pytest.mark.filterwarnings(r"ignore:std\(\)")
def test_a_batch_of_one_and_a_masked_target_have_a_remedy_of_their_own() -> None:
    torch.manual_seed(0)
    step = step_of(nn.Linear(8, 4), lambda m, x: m((x - x.mean(0)) / x.std(0)).float().square().mean())
    assert step(torch.randn(1, 8)).host().skipped
    assert "drop_last=True" in step.explain().headline

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (F.mse_loss(model(x).float(), y, reduction="none") * y.isfinite()).sum()

    step = step_of(nn.Linear(8, 4), loss_fn)
    assert step(torch.randn(4, 8), torch.zeros(4, 4).index_fill(0, torch.tensor(1), math.nan)).host().skipped
    assert "torch.where(mask, target, 0)" in step.explain().cures[0].text


# ---------------------------------------------------------------------- states of an optimizer


def trained(
    wrong: Callable[[dict[str, Any]], object],
) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Return a model, its Adam after three updates and then `wrong`, and the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    for _ in range(3):
        small(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in optimizer.state.values():
        wrong(state)
    return model, optimizer, (x, y)


def small(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y) * 1e-3


def emptied(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].zero_()
    state["exp_avg"] *= 1e3
    state["step"] *= 1000


@pytest.mark.parametrize("recovered", [False, True])
def test_a_state_that_destroys_the_weights_is_named(recovered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its averages contradict each other at first; the loss has jumped."""
    if recovered:
        monkeypatch.setattr(advice, "_apart", lambda group, state: "")
    model, optimizer, given = trained(emptied)
    step = hs.TrainStep(model, optimizer, small, policy=FP16)
    for _ in range(40):
        if step(*given).host().skipped:
            break
    verdict = step.explain()
    assert verdict.cause == "divergence" and verdict.because.startswith(LOADED)
    assert ("the loss rose" if recovered else "exp_avg_sq of 0.weight") in verdict.headline
    assert verdict.cures[0].text.startswith("load the optimizer's state as it was saved")


def test_a_low_state_that_underflows_by_itself_is_none_that_was_loaded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).half()
    box = hs.BlackBox(model, lambda m, x: m(x).square().mean(), optimizer := torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        box(torch.randn(4, 8).half() * 1e-2).backward()
        optimizer.step()
        optimizer.zero_grad()
    verdict = box.verdict or box.explain()
    assert LOADED not in str(verdict)


def test_nan_in_a_state_is_refused() -> None:
    model, optimizer, _ = trained(lambda state: state["exp_avg"].view(-1)[3:4].fill_(math.nan))
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(BindError, match=r"the optimizer's state exp_avg of 0.weight holds nan before the first step"):
        hs.TrainStep(model, optimizer, small, policy=BF16)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


# ---------------------------------------------------------------------- factors, buffers, headlines, replays


@pytest.mark.parametrize("factor", [math.inf, torch.tensor(-math.inf), torch.full((8,), -math.inf)])
def test_an_infinite_factor_is_no_mask(factor: Any) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(*layers)
    step = step_of(model, lambda m, x: m[1](m[0](x) * factor).float().square().mean())
    assert step(torch.randn(4, 8)).host().skipped
    verdict = step.explain()
    assert "mask" not in str(verdict).replace("masked_fill", "") and verdict.op == "mul"
    assert verdict.cause in {"model", ""}


def test_a_buffer_that_stops_being_finite_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    step = step_of(model, lambda m, x, y: F.cross_entropy(m(x).float(), y), "O0")
    for number in range(1, 17):
        x = torch.rand(4, 3, 8, 8)
        if number == 4:
            x[1, 0, 2, 2] = torch.finfo(torch.float32).min
        assert step(x, torch.tensor([0, 1, 0, 1])).host().updated
    (text,) = [record.message for record in caplog.records]
    assert text.startswith("buffer 1.running_var is not finite any more before step 8: ")


def test_a_headline_keeps_what_happened_and_where() -> None:
    said = Verdict(
        kind="invalid", cause="data", because="x" * 45 + " holds 1234567", op="matmul", module="a.b", phase="forward",
        line="train.py:12 x", cures=(hs.lens.Cure(policy=None, text="y" * 90, verified=False),),
    ).headline  # fmt: skip
    assert len(said) == 160 and "1234567" in said and "train.py:12" in said and said.endswith("yyy...")


def amp() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.float16)


def halfsteps() -> AbstractContextManager[Any]:
    return hs.autocast("cpu", torch.float16)


def loss_in(region: Callable[[], AbstractContextManager[Any]]) -> Any:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with region():
            return classify(model, x, y)

    return loss_fn


def evidence(
    folder: Path, inside: Callable[[], AbstractContextManager[Any]], around: Any, low: bool
) -> Iterator[Verdict]:
    """Yield the verdict on a loop of one's own, and that on its replay."""

    def model() -> nn.Module:
        return transformer().half() if low else transformer()

    def data() -> tuple[Tensor, Tensor]:
        x, y = batch()
        return (x.half() if low else x), y

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 1e-3)

    mine = model()
    optimizer, scaler = optimizer_of(mine), torch.amp.GradScaler("cpu", init_scale=256.0, enabled=not low)
    box = hs.BlackBox(mine, loss_in(inside), optimizer, evidence=folder)
    with around():
        loss = box(*data())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    yield box.explain()
    (file,) = folder.glob("*.pt")
    task = hs.Task(
        name="t", model=model, loss_fn=loss_in(inside), optimizer=optimizer_of, batches=lambda *_: data()
    )  # fmt: skip
    yield hs.lens.replay(file, task)


@pytest.mark.parametrize(
    ("inside", "around", "low"),
    [
        (amp, nullcontext, False),
        pytest.param(halfsteps, nullcontext, False, marks=pytest.mark.slow),
        pytest.param(nullcontext, amp, False, marks=pytest.mark.slow),
        (nullcontext, halfsteps, False),
        (nullcontext, nullcontext, True),
    ],
    ids=["amp inside", "hs inside", "amp around", "hs around", "low by name"],
)
def test_a_replay_of_a_loops_own_regions_gives_its_verdict(inside: Any, around: Any, low: bool, tmp_path: Path) -> None:
    run, replayed = evidence(tmp_path, inside, around, low)
    for field in ("kind", "cause", "because", "sure", "op", "module", "dtypes"):
        assert getattr(run, field) == getattr(replayed, field), field
    assert run.cause == "precision"
    assert [cure.verified for cure in run.cures] == [cure.verified for cure in replayed.cures]


class Sums(nn.Module):
    """Adds up many numbers in bf16."""

    def __init__(self, terms: int) -> None:
        super().__init__()
        self.rate, self.out, self.terms = nn.Linear(16, 16), nn.Linear(16, 4), terms

    def forward(self, x: Tensor) -> Tensor:
        rate = F.softplus(self.rate(x)).bfloat16()
        total = torch.zeros_like(rate)
        for _ in range(self.terms):
            total = total + rate
        return self.out(total.to(x.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("terms", "found"), [(400, True), (8, False)])
def test_a_running_sum_that_swallows_its_terms_is_a_finding(terms: int, found: bool) -> None:
    torch.manual_seed(0)
    model = Sums(terms)
    batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,)))] * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    audit = hs.audit(model, batches, lambda m, x, y: F.cross_entropy(m(x).float(), y), BF16, optimizer)
    assert any(f.op == "add" and "the sum does not contain them" in f.cause for f in audit.findings()) == found
