"""The black box of a loop written by hand: what it accuses, what it lets pass, and that its cures hold once pasted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.errors import StepError
from halfstep.kernels.choose import load_kernels
from halfstep.lens.box import blackbox
from halfstep.lens.box.cures import _pasted
from halfstep.lens.box.stepbox import Box, SkippedStep, Streak
from tests.lens.broken import batch, classify, squared, transformer
from tests.lens.test_blackbox import SEEN, step_of

Region = Callable[[], AbstractContextManager[Any]]


def fp16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.float16)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(4)


def convolutions(norm: nn.Module, large: int) -> nn.Module:
    """Return two convolutions, the norm and a head; the convolution `large` overflows in fp16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), norm, nn.Flatten(), nn.Linear(8 * 36, 4))
    with torch.no_grad():
        model.get_parameter(f"{large}.weight").mul_(1e6)
    return model


def loss_in(region: Region) -> Callable[..., Tensor]:
    """Return a loss function as a loop written by hand has it, with `region` in it."""

    def loss_fn(model: nn.Module, *inputs: Tensor) -> Tensor:
        with region():
            x, y = inputs
            out = model(x)
            return F.cross_entropy(out if out.dim() == 2 else out.mean(1), y)

    return loss_fn


def looped(model: nn.Module, inputs: tuple[Any, ...], *, scale: float = 1.0, region: Region = fp16) -> hs.BlackBox:
    box = hs.BlackBox(model, loss_in(region), torch.optim.SGD(model.parameters(), 1e-6))
    (box(*inputs) * scale).backward()
    return box


# ------------------------------------------------------------------------------------------------- who is accused


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("loop", ["hand", "step"])
def test_running_statistics_of_a_norm_in_training_are_no_cause(
    loop: str, kind: Callable[..., nn.Module], spoiled: bool
) -> None:
    """They are written to in the step, and nothing is read from them."""
    model = convolutions(kind(8, track_running_stats=True), 0)
    if spoiled:
        model.get_buffer("2.running_var").fill_(math.nan)
    if loop == "hand":
        verdict = looped(model, images()).explain()
    else:
        step = step_of(model, lambda m, x, y: F.cross_entropy(m(x), y))
        step(*images())
        verdict = step.explain()
    assert (verdict.kind, verdict.op, verdict.module) == ("overflow", "conv2d", "0")


def test_running_statistics_that_are_read_are_a_cause() -> None:
    model = convolutions(nn.BatchNorm2d(8), 0).eval()
    model.get_buffer("2.running_var").fill_(math.nan)
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1e-6)
    verdict = looped(model, images()).explain()
    assert (verdict.kind, verdict.parameter) == ("bad_state", "2.running_var")


def test_statistics_begin_a_replay_as_they_began_the_step_and_are_left_as_the_step_left_them() -> None:
    model = convolutions(nn.BatchNorm2d(8), 0)
    seen = []

    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(m.get_buffer("2.running_mean").clone())
        return loss_in(fp16)(m, x, y)

    box = hs.BlackBox(model, loss_fn)
    box(*images()).backward()
    left = model.get_buffer("2.running_mean").clone()
    box.explain()
    assert len(seen) > 2 and all(torch.equal(value, torch.zeros(8)) for value in seen)
    assert torch.equal(model.get_buffer("2.running_mean").nan_to_num(), left.nan_to_num())


def test_finite_gradients_are_fine_though_their_norm_overflows() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    box = hs.BlackBox(model, lambda m, x: m(x).sum(), optimizer)
    box(torch.full((1, 4), 1e20)).backward()
    optimizer.step()
    assert box.verdict is None
    with pytest.raises(StepError, match="there is no step to explain"):
        box.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_gradient_that_is_not_finite_is_seen(dtype: torch.dtype, value: float) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(5, dtype=dtype))
    model.empty = nn.Parameter(torch.zeros(0))
    factor = torch.tensor([1.0, 2.0, value, 0.0, 1.0])
    box = hs.BlackBox(model, lambda m: (m.weight.real * factor).nan_to_num().sum() + m.empty.sum())
    model.weight.register_hook(lambda g: g * factor)
    box().backward()
    assert box._flag is not None and bool(box._flag)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, 1e30])
def test_a_finite_step_on_a_cpu_is_known_by_one_pass_of_its_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float
) -> None:
    magnitudes, passes = blackbox._norms, list[int]()

    def counted(found: list[Tensor]) -> list[Tensor]:
        passes.append(len(found))
        return magnitudes(found)

    monkeypatch.setattr(blackbox, "_norms", counted)
    model: Any = nn.Conv2d(2, 2, 3).to(dtype)
    model.to(memory_format=torch.channels_last)
    last = {"value": 1.0}
    model.weight.register_hook(lambda g: g * last["value"])
    box = hs.BlackBox(model, lambda m, x: m(x).float().sum(), torch.optim.SGD(model.parameters(), 0.0))
    for last["value"] in (1.0, value):
        model.zero_grad()
        box(torch.ones(1, 2, 4, 4, dtype=dtype)).backward()
    finite = bool(torch.isfinite(torch.tensor(value, dtype=dtype)))
    assert box._flag is not None and bool(box._flag) is not finite
    # a 2-norm of 1e30 overflows, and the gradients do not
    assert bool(passes) is (value != 1.0 or bool(load_kernels("cpu")))
    if value == 1.0:
        (_, loss, norm, versions, *_), _ = box._memory.signals.recent
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
        assert norm == pytest.approx(float(gradient.norm()), rel=1e-6)


def test_a_sparse_gradient_that_is_not_finite_is_seen() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    box = hs.BlackBox(model, lambda m, ids: torch.sqrt(m(ids) * 0).sum())
    box(torch.tensor([1, 1, 2])).backward()
    assert (box.explain().op, box.explain().phase) == ("sqrt", "backward")


# ------------------------------------------------------------------------------------------- what is in a user's way


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_losses_may_be_reduced_outside(scale: float) -> None:
    model = nn.Linear(4, 4)
    box = hs.BlackBox(model, lambda m, x: m(x))
    (box(torch.ones(2, 4)).sum() * scale).backward()
    with pytest.raises(StepError, match="the last one was finite"):
        box.explain()
    box = hs.BlackBox(model, lambda m, x: torch.log(m(x) * 0))
    (box(torch.ones(2, 4)).sum() * scale).backward()
    assert (box.explain().kind, box.explain().op) == ("invalid", "log")


def test_a_box_that_fails_to_look_raises_nothing_into_a_backward_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(history: object, bad: Tensor, scale: None) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("halfstep.step.parts.record.History.end", fail)
    model = nn.Linear(4, 4)
    box = hs.BlackBox(model, squared)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(2):
            box(torch.ones(2, 4)).backward()
    assert model.weight.grad is not None
    assert caplog.text.count("the gradients of step 1 were not looked at: RuntimeError: no kernel") == 1
    assert "step 2" not in caplog.text


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: loss.item(), "a float"),
        (lambda loss: {"loss": loss}, "a dict"),
        (lambda loss: (loss, 1, 2), "a tuple of 3"),
        (lambda loss: [loss], "a list of 1"),
    ],
)
def test_a_result_without_a_loss_is_refused(returned: Callable[[Tensor], Any], words: str) -> None:
    box = hs.BlackBox(nn.Linear(4, 4), lambda m, x: returned(m(x).sum()))
    with pytest.raises(StepError, match=f"must return the loss, a tensor, or .loss, aux., and returned {words}$"):
        box(torch.ones(2, 4))


def test_no_loss_and_a_loss_beside_others_are_taken() -> None:
    model = nn.Linear(4, 4)
    assert hs.BlackBox(model, lambda m, x: None)(torch.ones(2, 4)) is None
    box = hs.BlackBox(model, lambda m, x: (torch.log(m(x) * 0).sum(), {"more": 1}))
    loss, more = box(torch.ones(2, 4))
    loss.backward()
    assert more == {"more": 1} and box.explain().op == "log"


def test_wrong_arguments_are_named() -> None:
    model = nn.Linear(4, 4)
    step = step_of(model, squared)
    for arguments, words in (
        ((3, squared), "model must be a torch.nn.Module and is 3"),
        ((step, squared), "is <halfstep.*; a TrainStep has a black box of its own: step.explain.."),
        ((model, squared, 3), "optimizer must be a torch.optim.Optimizer or None and is 3"),
        ((model, squared, model), "optimizer must be a torch.optim.Optimizer or None and is Linear"),
    ):
        with pytest.raises(StepError, match=words):
            hs.BlackBox(*arguments)
    with pytest.raises(StepError, match="BlackBox: evidence must be a path or None and is 3.5"):
        hs.BlackBox(model, squared, evidence=3.5)  # type: ignore[arg-type]


def test_a_generator_that_a_sum_consumed_is_not_reproducible() -> None:
    box = hs.BlackBox(nn.Linear(4, 4), lambda m, xs: sum(torch.log(m(x) - 99).mean() for x in xs))
    box(torch.randn(2, 4) for _ in range(2)).backward()
    verdict = box.explain()
    assert verdict.kind == "not_reproducible"
    assert "the loss function returned int in the replay" in verdict.notes
    assert any("can be read once" in note for note in verdict.notes)


# -------------------------------------------------------------------------------------------------------------- cures


def pasted(cure: hs.lens.Cure, model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """Do in a loop what the first line of `cure` says, and return the loss."""
    line = cure.text.splitlines()[0]
    if "hs.prepare(" in line:
        eval(line[line.index("hs.prepare(") :], {"hs": hs, "model": model})
        return loss_in(nullcontext)(model, *inputs)
    made = line[line.index("hs.autocast(") :].removesuffix(":")
    return loss_in(lambda: eval(made, {"hs": hs}))(model, *inputs)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], list[str]]] = {
    "the module after it divides by what was too large": (
        lambda: convolutions(nn.GroupNorm(2, 8), 1), images,
        ["module 1 in fp32", "conv2d in fp32", "bf16 instead of fp16"],
    ),
    "the first module is too large, and it returns fp32 as it was given": (
        lambda: convolutions(nn.BatchNorm2d(8), 0), images,
        ["modules 0 and 1 in fp32", "conv2d in fp32", "bf16 instead of fp16"],
    ),
    "attention": (transformer, batch, ["matmul in fp32", "module blocks.1 in fp32", "bf16 instead of fp16"]),
}  # fmt: skip


REGIONS: dict[str, Region] = {
    "torch.autocast": fp16,
    "hs.autocast": lambda: hs.autocast("cpu", torch.float16),
    "a policy's hs.autocast": lambda: hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16")),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", CASES)
def test_what_was_verified_is_what_is_pasted(name: str, region: str) -> None:
    made, inputs, expected = CASES[name]
    model = made()
    kinds = [type(module) for module in model.modules()]
    verdict = looped(model, inputs(), region=REGIONS[region]).explain()
    preset = "mixed" if region == "a policy's hs.autocast" else "torch"
    for cure in verdict.cures:
        assert f"hs.Policy.of('{preset}', dtype=" in cure.text
        assert cure.text.endswith(f"in place of {'hs' if 'hs' in region else 'torch'}.autocast")
    verified = [cure.text.partition(":")[0] for cure in verdict.cures if cure.verified]
    if preset == "mixed" and "conv2d in fp32" in expected:  # whose norms take what is fp32 into fp16
        assert verified[0] in {"modules 1 and 2 in fp32", "modules 0 and 1 in fp32"}
    else:
        assert verified == expected
    assert [type(module) for module in model.modules()] == kinds  # prepared for a trial, and as before
    assert not any("_halfstep" in vars(module) for module in model.modules())
    for cure in verdict.cures:
        again = made()
        loss = pasted(cure, again, inputs())
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in again.parameters() if p.grad is not None)
        assert bool(loss.isfinite())


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_may_be_around_the_call(region: str) -> None:
    model = transformer()
    box = hs.BlackBox(model, loss_in(nullcontext), torch.optim.SGD(model.parameters(), 1e-3))
    with REGIONS[region]():
        loss = box(*batch())
    loss.backward()
    verdict = box.explain()
    assert (verdict.kind, verdict.op, verdict.module) == ("overflow", "matmul", "blocks.1")
    assert sum(cure.verified for cure in verdict.cures) == 3
    with torch.autocast("cpu", enabled=False):
        assert box(*batch()).isfinite()


class Gated(nn.Module):
    """Multiplies in a function that a checkpoint computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def gate(h: Tensor) -> Tensor:
            return h * h * 1e-3

        with torch.no_grad():
            self.layer.weight.fill_(500.0)
        return checkpoint(gate, self.layer(x), use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("region", REGIONS)
def test_a_rule_that_a_checkpoint_would_not_know_when_it_computes_again_is_no_cure(region: str) -> None:
    inputs = torch.ones(2, 4), torch.tensor([0, 1])
    verdict = looped(Gated(), inputs, region=REGIONS[region]).explain()
    assert verdict.op == "mul"
    verified = [cure for cure in verdict.cures if cure.verified]
    assert verified and not any("mul in fp32" in cure.text for cure in verified)
    for cure in verified:
        model = Gated()
        pasted(cure, model, inputs).backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_a_policy_of_ones_own_is_changed_by_its_name() -> None:
    mine = hs.Policy.of("torch", dtype="fp16").with_ops(fp32=["softmax"]).replace(name="mine")
    verdict = looped(transformer(), batch(), region=lambda: hs.autocast(policy=mine)).explain()
    first = verdict.cures[0]
    assert first.policy == mine.with_ops(fp32=["matmul"])
    assert first.text == (
        "matmul in fp32: with hs.autocast(policy=policy.with_ops(fp32=['matmul'])):\n"
        "in place of hs.autocast, `policy` being that of the region"
    )


def test_a_model_with_low_parameters_is_not_prepared_for_a_trial() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4).half())
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(6e4)
        model.get_parameter("0.weight").fill_(1.0)
    box = hs.BlackBox(model, loss_in(fp16))
    box(torch.ones(2, 4), torch.tensor([0, 1])).backward()
    texts = [cure.text for cure in box.explain().cures]
    assert all(p.dtype is torch.float16 for p in model.parameters())
    assert texts and not any("module" in text for text in texts)


@pytest.mark.parametrize("loop", ["hand", "step"])
def test_a_cure_says_at_which_scale_it_was_verified(loop: str) -> None:
    scale = 2.0**20
    if loop == "hand":
        cures = looped(transformer(), batch(), scale=scale).explain().cures
    else:
        step = step_of(transformer(), scaler=hs.GradScaler("cpu", init_scale=scale, ceiling=scale))
        step(*batch())
        cures = step.explain().cures
    first = cures[0].text.splitlines()[0]
    assert first.startswith("matmul in fp32 (finite at a scale of 65536, to which it adapts; it was 1.04858e+06): ")
    assert not any("scale" in cure.text for cure in cures if cure.text.startswith("bf16"))


# -------------------------------------------------------------------------------------------------------- what is said


def test_the_one_line_of_the_log_says_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "halfstep"):
        looped(transformer(), batch()).read()
        step = step_of(transformer())
        step(*batch())
        step.flush()
    hand, own = (record.getMessage() for record in caplog.records if "overflow" in record.getMessage())
    assert hand.endswith(
        " | matmul in fp32 (verified): with hs.autocast(policy=hs.Policy.of('torch', dtype='fp16')."
        "with_ops(fp32=['matmul'])): (2 more: print(box.explain()))"
    )
    assert own.endswith(
        " | matmul in fp32 (verified): policy.with_ops(fp32=['matmul']) (2 more: print(step.explain()))"
    )


def test_a_loss_that_stays_not_finite_refers_to_the_verdict() -> None:
    def said(verdict: hs.lens.Verdict | None) -> str:
        return Streak(streak=2, verdict=verdict).see(SkippedStep(**{**SEEN, "loss_finite": False}))[-1]

    assert "the reason is not known yet" in said(None)
    assert "the verdict on step 3 has the reason" in said(hs.lens.Verdict(kind="overflow", step=3))
    assert "look at the batch: step 3: bad batch: input 1" in said(
        hs.lens.Verdict(kind="bad_batch", step=3, parameter="input 1")
    )


def test_a_box_calls_itself_a_box(caplog: pytest.LogCaptureFixture) -> None:
    box = hs.BlackBox(nn.Linear(2, 2), squared)
    with caplog.at_level(logging.WARNING, "halfstep"):
        box._warn(1, ["a: step.explain() names it"])
        Box._warn(hs.BlackBox(nn.Linear(2, 2), squared), 2, ["step.explain()"])
    assert "box.explain() names it" in caplog.text and "step.explain()" not in caplog.text


class Writes(nn.Module):
    """Does to what a layer gives what its argument does."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.layer(x))


def put(h: Tensor) -> Tensor:
    h = h.clone()
    h[0] = math.nan
    return h


@pytest.mark.parametrize(
    ("write", "op"),
    [
        (put, "setitem"),
        (lambda h: h * torch.full((4,), math.nan), "full"),
        (lambda h: h + torch.tensor(math.nan), "tensor"),
        (lambda h: h.masked_fill(torch.ones(4, dtype=torch.bool), math.nan), "masked_fill"),
        (lambda h: h * math.nan, "mul"),
        (lambda h: h + h.masked_fill(torch.ones(4, dtype=torch.bool), math.inf), "masked_fill"),
    ],
)
def test_what_the_program_writes_itself_is_called_so(write: Callable[[Tensor], Tensor], op: str) -> None:
    step = step_of(Writes(write), lambda m, x: m(x).float().sum())
    step(torch.ones(2, 4))
    verdict = step.explain()
    assert (verdict.kind, verdict.op) == ("invalid", op)
    assert verdict.what.endswith(", a value that is not finite is written here by the program itself")
    assert verdict.cures[0].text.startswith("look at the line: it puts nan or inf there itself")


def test_a_bad_batch_says_how_much_of_it_and_where() -> None:
    def said(*inputs: Tensor) -> str:
        step = step_of(nn.Linear(4, 4), lambda m, x, y: (m(x) * y).float().sum())
        step(*inputs)
        return step.explain().what

    good = torch.ones(8, 4)
    bad = torch.ones(8, 4)
    bad[1, 2] = math.inf
    assert said(bad, good) == "bad batch: input 0 holds inf in sample 1 at [2]: 1 of 32 values are not finite"
    bad[2:] = math.nan
    assert said(good, bad) == "bad batch: input 1 holds inf in sample 1 at [2]: 25 of 32 values are not finite"
    assert (
        said(good, torch.tensor(math.nan))
        == "bad batch: input 1 holds nan in its one value: 1 of 1 values are not finite"
    )


def test_a_weight_that_the_format_cannot_hold_is_named() -> None:
    model = nn.Linear(4, 4)
    step = step_of(model, squared)
    with torch.no_grad():
        model.weight[0, 0] = 90345.0
    step(torch.ones(2, 4))
    verdict = step.explain()
    assert verdict.what == "overflow of float16, weight holds 90345, and the format ends at 65504"
    assert verdict.cause == "model" and "initial weights" in verdict.because
    assert "weight holds values as large as 9.03e+04" in verdict.notes


def test_a_report_of_an_invalid_operation_has_no_limit_and_no_negative_zero() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.bias.fill_(-1.0)
    step = step_of(model, lambda m, x: torch.log(-m(x).float().relu()).mean())
    step(torch.zeros(2, 4))
    report = str(step.explain())
    assert " | log in the model, forward" in report
    assert "  largest 0\n" in report and "the format ends" not in report


def test_a_slope_of_a_root_at_zero_and_an_impossible_alignment_are_invalid() -> None:
    def root(model: nn.Module, x: Tensor) -> Tensor:
        return model(x * 0).float().norm(dim=-1).sqrt().mean()  # type: ignore[no-any-return]

    def aligned(model: nn.Module, x: Tensor) -> Tensor:
        steps = model(x).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(steps, torch.ones(2, 9, dtype=torch.long), torch.tensor([5, 5]), torch.tensor([9, 9]))

    for loss_fn, op, phase, words in (
        (root, "sqrt", "backward", "add an eps under the root"),
        (aligned, "ctc_loss", "forward", "mend it where it is loaded"),  # all samples are so
    ):
        step = step_of(nn.Linear(4, 6, bias=False), loss_fn)
        step(torch.randn(2, 5, 4))
        verdict = step.explain()
        assert (verdict.kind, verdict.op, verdict.phase) == ("invalid", op, phase)
        assert words in verdict.cures[0].text


def test_classify_is_finite_with_weights_as_they_were() -> None:
    """A control: nothing above comes from the model."""
    with fp16():
        assert bool(classify(transformer(1.0), *batch()).isfinite())


def test_a_cure_that_a_region_cannot_carry_out_is_one_for_prepare() -> None:
    """`hs.autocast` refuses grads='fp32'."""
    base = hs.Policy.of("torch", dtype="fp16")
    line = "policy.replace(grads='fp32')"
    text = _pasted(base, base.replace(grads="fp32"), "gradients added in fp32", line, "torch.autocast")
    made = text.partition("hs.prepare(model, policy=")[2].partition(")\n")[0]
    assert eval(made, {"hs": hs}) == base.replace(grads="fp32")
    assert "hs.autocast" not in text


def test_a_decorated_loss_is_replayed_under_other_policies() -> None:
    model = transformer()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    box = hs.BlackBox(model, hs.autocast("cpu", torch.float16)(loss_in(nullcontext)), optimizer)
    box(*batch()).backward()
    verdict = box.explain()
    assert (verdict.kind, verdict.op) == ("overflow", "matmul")
    assert verdict.cures[0].verified and "matmul in fp32" in verdict.cures[0].text
