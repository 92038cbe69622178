"""The black box: verdicts with cures, nothing changed by looking, evidence, trouble, loops written by hand."""

from __future__ import annotations

import logging
import math
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.errors import StepError
from halfstep.lens.box.stepbox import SkippedStep, Streak
from tests.lens.broken import Body, batch, classify, explained, here, squared, transformer

FP16 = hs.Policy.of("mixed", dtype="fp16")


def step_of(model: nn.Module, loss_fn: Any = classify, policy: Any = FP16, **settings: Any) -> hs.TrainStep:
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_fn, policy=policy, **settings)


# ---------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("policy", ["mixed", "O2", "pure"])
def test_cures_are_policies_under_which_training_goes_on(policy: str) -> None:
    base = hs.Policy.of(policy, dtype="fp16")
    step = step_of(transformer(), policy=base)
    assert step(*batch()).host().skipped
    cures = [cure for cure in step.explain().cures if cure.verified]
    assert [cure.policy for cure in cures] == [
        base.with_ops(fp32=["matmul"]),
        base.with_modules({"blocks.1": "fp32"}),
        base.replace(dtype="bf16"),
    ]
    for cure in cures:
        again = step_of(transformer(), policy=cure.policy.replace(scale=1.0))
        assert again(*batch()).host().updated


def test_a_cure_can_be_pasted_as_a_line_and_as_toml() -> None:
    step = step_of(transformer())
    step(*batch())
    for cure in step.explain().cures:
        words, _, rest = cure.text.partition("\nin TOML:\n")
        line = words.rpartition(": policy.")[2]
        assert eval(f"policy.{line}", {"policy": FP16}) == cure.policy
        assert hs.Policy.from_toml('preset = "mixed"\ndtype = "fp16"\n' + rest.replace('dtype = "bf16"', "")).ops == (
            cure.policy.ops
        )


def test_a_cure_may_need_several_rules() -> None:
    def after(m: Any, h: Tensor) -> Tensor:
        large = torch.bmm(h[None] * 0 + 200, (h.t() * 0 + 200)[None])[0]
        return F.linear(large, torch.eye(4)) * 1e-4

    texts = [cure.text for cure in explained(after).cures if cure.verified]
    assert any("fp32=['bmm', 'linear']" in text for text in texts)


def test_a_scale_that_is_too_high_is_harmless_if_it_is_dynamic() -> None:
    model = transformer(1.0)
    step = step_of(model, scaler=hs.GradScaler("cpu", init_scale=2.0**40, ceiling=2.0**40))
    assert step(*batch()).host().skipped
    verdict = step.explain()
    assert verdict.kind == "scale_too_high" and verdict.phase == "backward"
    assert "nothing to change" in verdict.cures[0].text and verdict.cures[0].verified


@pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")
def test_a_static_scale_that_is_too_high_is_cured_by_a_lower_one() -> None:
    verdict = explained(lambda m, h: h, policy=FP16.replace(scale=2.0**40))
    (cure,) = verdict.cures
    assert verdict.kind == "scale_too_high" and cure.verified and cure.policy.scale < 2.0**40


def test_a_replay_that_is_finite_is_not_reproducible_and_says_what_differed() -> None:
    calls = iter([math.inf, 1.0, 1.0])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return squared(model, x) * next(calls)

    verdict = explained(lambda m, h: h, loss_fn=loss_fn)
    assert verdict.kind == "not_reproducible" and verdict.op == ""
    assert any("was inf and is" in note for note in verdict.notes)


def test_a_batch_that_can_be_read_once_is_not_reproducible() -> None:
    def loss_fn(model: nn.Module, rows: Iterator[Tensor]) -> Tensor:
        return squared(model, next(rows, torch.ones(4, 8)))

    model = Body(lambda m, h: h)
    step = step_of(model, loss_fn)
    step(iter([torch.full((4, 8), math.nan)]))
    verdict = step.explain()
    assert verdict.kind == "not_reproducible" and any("can be read once" in note for note in verdict.notes)


def test_dropout_is_drawn_again_as_it_was() -> None:
    drawn = []

    def after(m: nn.Module, h: Tensor) -> Tensor:
        drawn.append(F.dropout(torch.ones(1000)))
        return h / (h * 0)

    explained(after)
    assert len(drawn) > 1 and all(torch.equal(drawn[0], other) for other in drawn)


def test_buffers_that_a_forward_changes_begin_as_in_the_step() -> None:
    class Counts(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.linear(x) / torch.ne(self.seen, 3).float()  # type: ignore[no-any-return]

    model = Counts()
    step = step_of(model, squared, policy="O0")
    skipped = [step(torch.randn(4, 8)).host().skipped for _ in range(3)]
    assert skipped == [False, False, True]
    assert step.explain().op == "div" and float(model.seen) == 3


def test_the_micro_batch_of_a_window_is_named() -> None:
    model = Body(lambda m, h: h)
    step = step_of(model, squared, accumulate=3)
    x = torch.randn(4, 8)
    step(x)
    step(torch.full((4, 8), math.inf))
    assert step(x).host().skipped
    verdict = step.explain()
    assert verdict.kind == "bad_batch" and "micro-batch 2 of 3 of its window" in verdict.notes


def test_gradients_whose_sum_of_squares_overflows_are_said_to_be_finite_one_by_one() -> None:
    model = Body(lambda m, h: h)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * 1e38  # type: ignore[no-any-return]

    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O0", accumulate=1)
    assert step(torch.ones(2, 8)).host().skipped
    verdict = step.explain()
    assert (verdict.op, verdict.phase) == ("linalg.vector_norm", "update")


def added(grads: str, scale: float, factor: float) -> hs.TrainStep:
    """Train one window of three micro-batches with low weights, whose gradients are `factor` times `scale` each."""
    model = nn.Linear(2, 1, bias=False)
    policy = hs.Policy.of("O2", dtype="fp16", grads=grads, scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).float().sum() * factor, policy=policy, accumulate=3)
    for _ in range(3):
        result = step(torch.ones(1, 2))
    assert result.host().skipped == (grads == "param")
    return step


@pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")
def test_micro_batches_whose_gradients_overflow_together_are_cured_by_adding_in_fp32() -> None:
    verdict = added("param", 1.0, 90000.0).explain()
    assert (verdict.kind, verdict.op, verdict.phase, verdict.parameter) == ("overflow", "add", "backward", "weight")
    assert (verdict.dtypes, verdict.limit) == (("float16",), 65504.0)
    assert "the gradients of each micro-batch are finite, and their sum is not" in verdict.notes
    assert [cure.policy.grads for cure in verdict.cures if cure.verified][:1] == ["fp32"]
    added("fp32", 1.0, 90000.0)


@pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")
def test_micro_batches_that_overflow_together_under_a_scale_have_it_too_high() -> None:
    verdict = added("param", 4096.0, 30.0).explain()
    assert verdict.kind == "scale_too_high" and verdict.op == "add"
    (cure,) = verdict.cures
    assert cure.verified and cure.policy.scale < 4096.0


def test_optimizer_state_that_is_not_finite_is_named() -> None:
    model = Body(lambda m, h: h)
    step = step_of(model, squared, policy="O0")
    step(torch.ones(2, 8))
    step.optimizer.state[model.enter.weight]["exp_avg"][0, 0] = math.nan
    model.enter.weight.data[0, 0] = math.nan
    assert step(torch.ones(2, 8)).host().skipped
    verdict = step.explain()
    assert verdict.kind == "bad_state" and verdict.parameter == "enter.weight"
    assert any("exp_avg of enter.weight in AdamW" in note for note in verdict.notes)


def test_the_text_of_a_verdict() -> None:
    step = step_of(transformer())
    step(*batch())
    text = str(step.explain())
    assert text.startswith("halfstep black box, step 1: overflow of float16, largest input ")
    assert " | matmul in blocks.1, forward, broken.py:" in text.splitlines()[0]
    assert f"            {here('logits')}" in text and "ends at 65504" in text
    assert "  cure      matmul in fp32: policy.with_ops(fp32=['matmul'])" in text
    assert step.explain().file.endswith("broken.py") and Path(step.explain().file).is_file()


def test_explain_says_what_is_missing() -> None:
    step = step_of(transformer(1.0), policy="O0")
    with pytest.raises(StepError, match="there is no step to explain"):
        step.explain()
    step(*batch())
    with pytest.raises(StepError, match="there is no step to explain"):
        step.explain()
    off = step_of(transformer(), blackbox=False)
    off(*batch())
    with pytest.raises(StepError, match="blackbox=False"):
        off.explain()


# ------------------------------------------------------------------------------------------------- nothing is changed


class Stateful(nn.Module):
    """Dropout, BatchNorm, a buffer of its own, an attribute, a checkpoint."""

    average: Tensor

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.calls = 0
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.first(x)))
        self.average.mul_(0.9).add_(h.detach().float().mean(0), alpha=0.1)
        return checkpoint(self.last, h, use_reentrant=self.reentrant) * x.abs().max()  # type: ignore[no-any-return]


def trajectory(blackbox: bool, policy: hs.Policy, reentrant: bool) -> tuple[list[Tensor], hs.TrainStep]:
    torch.manual_seed(3)
    model = Stateful(reentrant)
    step = step_of(model, squared, policy, blackbox=blackbox)
    losses = []
    for i in range(8):
        x = torch.randn(4, 8)
        if i in {2, 5}:
            x[0] = 1e30 if i == 2 else math.inf
        losses.append(step(x).loss)
    step.flush()
    state = [*model.state_dict().values(), torch.tensor(model.calls)]
    optimizer = [v for s in step.optimizer.state.values() for v in s.values()]
    return [*losses, *state, *optimizer, torch.get_rng_state()], step


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["mixed", "O2"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_training_is_the_same_bit_for_bit_with_and_without(name: str, dtype: str, reentrant: bool) -> None:
    policy = hs.Policy.of(name, dtype=dtype)
    with_box, step = trajectory(True, policy, reentrant)
    without, _ = trajectory(False, policy, reentrant)
    assert step._verdicts.box is not None and step._verdicts.box.verdict is not None  # something was replayed
    for a, b in zip(with_box, without, strict=True):
        assert torch.equal(torch.nan_to_num(a.float()), torch.nan_to_num(b.float()))


@pytest.mark.parametrize("name", ["mixed", "O2", "pure"])
def test_parameters_keep_their_gradients_hooks(name: str) -> None:
    model = transformer()
    step = step_of(model, policy=hs.Policy.of(name, dtype="fp16"))
    parameters = list(model.parameters())
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]  # DistributedDataParallel hooks these
    step(*batch())
    assert any(cure.verified for cure in step.explain().cures)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [torch.autograd.graph.get_gradient_edge(p).node for p in parameters] == nodes


def test_recurrent_weights_are_back_after_cures_were_tried() -> None:
    model = Body(lambda m, h: m.cell(h[None])[0][0] * 60000 * 60000, cell=nn.LSTM(8, 8))
    step = step_of(model, squared, hs.Policy.of("O2", dtype="fp16"))
    cell = model.get_submodule("cell")
    before = list(cell.parameters())
    step(torch.randn(4, 8))
    step.explain()
    assert all(a is b for a, b in zip(cell.parameters(), before, strict=True))
    assert all(a is b for a, b in zip(vars(cell)["_flat_weights"], before, strict=True))


def test_gradients_and_hooks_of_others_are_left_alone() -> None:
    model, other = transformer(), nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    fired = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    before = other.weight.grad
    step = step_of(model, lambda m, x, y: classify(m, x, y) + other(torch.ones(1, 4)).sum() * 0)
    step(*batch())
    count = len(fired)
    kept = None if other.weight.grad is None else other.weight.grad.clone()
    step.explain()
    assert len(fired) == count and other.weight.grad is before
    assert before is not None and kept is not None and torch.equal(before, kept)


def test_a_loss_function_that_fails_in_the_replay_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter(range(9))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if next(calls) == 1:
            raise KeyError("only once")
        return squared(model, x)

    model = Body(lambda m, h: h)
    step = step_of(model, loss_fn, policy="O0")
    step(torch.full((4, 8), math.nan))
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert step(torch.randn(4, 8)).host().updated
    assert "only once" in caplog.text


# ------------------------------------------------------------------------------------------------------ what is said


def test_a_scale_on_its_way_down_is_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(transformer(1.0), scaler=hs.GradScaler("cpu", init_scale=2.0**24))
    with caplog.at_level(logging.WARNING, "halfstep"):
        skipped = [step(*batch()).host().skipped for _ in range(4)]
    assert any(skipped) and not caplog.records


def test_a_real_bad_step_is_explained_in_one_line_once(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(Body(lambda m, h: h), squared)
    bad = torch.full((4, 8), math.nan)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for x in (bad, torch.randn(4, 8), bad, torch.randn(4, 8)):
            step(x)
    (record,) = caplog.records
    found = "black box: step 1: bad batch: input 0 holds nan in sample 0 at [0]: 32 of 32 values are not finite | "
    assert record.getMessage().startswith(found)


SEEN: dict[str, Any] = {
    "loss_finite": True,
    "scaling": "dynamic",
    "scale": 64.0,
    "floor": 2.0**-14,
    "low": "fp16",
    "state_finite": True,
}


@pytest.mark.parametrize(
    ("changed", "steps", "name"),
    [
        ({"scale": 2.0**-14}, 1, "the scale is at its floor"),
        ({"state_finite": False}, 1, "weights or optimizer state are not finite"),
        ({"loss_finite": False}, 2, "the loss is not finite"),
        ({"scaling": "none", "low": "bf16"}, 2, "bf16 skips steps"),
        ({}, 20, "20 steps in a row were skipped"),
        ({"scaling": "static"}, 10, "10 steps in a row were skipped"),
    ],
)
def test_repeated_trouble_has_a_name_and_is_said_once(changed: dict[str, Any], steps: int, name: str) -> None:
    trouble = Streak()
    said = []
    for _ in range(2 * steps + 2):
        trouble.skipped()
        said += trouble.see(SkippedStep(**{**SEEN, **changed}))
    assert [text for text in said if text.startswith(name)] == [said[0]]
    trouble.fine()
    assert trouble.streak == 0


# ---------------------------------------------------------------------------------------------------------- evidence

TASK = """
import halfstep as hs, torch
from tests.lens.broken import batch, classify, transformer

def task():
    return hs.Task(name="broken", model=lambda: transformer(1.0), batches=lambda seed, step: batch(), loss_fn=classify,
                   optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3), metric=lambda model: 0.0,
                   margin=1.0)

def wrong():
    import dataclasses
    return dataclasses.replace(task(), model=lambda: torch.nn.Linear(3, 3))
"""


@pytest.mark.parametrize("policy", ["mixed", "O2"])
def test_evidence_is_replayed_from_its_file(tmp_path: Path, policy: str) -> None:
    step = step_of(transformer(), policy=hs.Policy.of(policy, dtype="fp16"), blackbox=tmp_path / "box")
    step(*batch())
    verdict = step.explain()
    file = tmp_path / "box" / "halfstep-blackbox-1.pt"
    assert (tmp_path / "box" / "halfstep-blackbox-1.txt").read_text() == f"{verdict}\n"
    (tmp_path / "mine.py").write_text(TASK)
    done = CliRunner().invoke(app, ["replay", str(file), "--model", f"{tmp_path / 'mine.py'}:task"])
    assert done.exit_code == 0, done.output
    assert str(verdict) in done.output
    for name, words in (("wrong", "do not fit"), ("nothing", "has no function")):
        done = CliRunner().invoke(app, ["replay", str(file), "--model", f"{tmp_path / 'mine.py'}:{name}"])
        assert done.exit_code == 2 and words in done.output
    for bad in (tmp_path / "absent.pt", tmp_path / "mine.py"):
        done = CliRunner().invoke(app, ["replay", str(bad), "--model", f"{tmp_path / 'mine.py'}:task"])
        assert done.exit_code == 2 and ("does not exist" in done.output or "cannot read" in done.output)


def test_evidence_is_bounded_in_number(tmp_path: Path) -> None:
    step = step_of(Body(lambda m, h: h), squared, blackbox=str(tmp_path))
    for _ in range(6):
        step(torch.full((4, 8), math.nan))
        step.explain()
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == [f"halfstep-blackbox-{i}.pt" for i in (3, 4, 5, 6)]
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize(
    ("most", "words"), [("MOST_BYTES", "weights are left out"), ("MOST_BATCHES", "its micro-batches are")]
)
def test_evidence_too_large_goes_without_weights_or_is_the_report_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, words: str
) -> None:
    monkeypatch.setattr(f"halfstep.lens.box.evidence.{most}", 100)
    step = step_of(nn.Linear(8, 500), squared, blackbox=tmp_path)
    step(torch.full((4, 8), math.nan))
    step.explain()
    assert words in (tmp_path / "halfstep-blackbox-1.txt").read_text()
    assert (tmp_path / "halfstep-blackbox-1.pt").exists() == (most == "MOST_BYTES")


def test_a_folder_that_runs_share_keeps_the_newest_files_of_all_and_what_is_not_evidence(tmp_path: Path) -> None:
    kept = [tmp_path / "halfstep-blackbox-notes.txt", tmp_path / "halfstep-blackbox-7-rank1.txt"]
    for file in kept:
        file.write_text("mine")
        os.utime(file, ns=(0, 0))
    for run in range(1, 7):
        step = step_of(Body(lambda m, h: h), squared, policy="O0", blackbox=tmp_path)
        step.record.done = 10 * run
        for _ in range(4):
            step(torch.full((4, 8), math.nan))
            step.explain()
        for file in tmp_path.glob(f"halfstep-blackbox-{run}*"):  # a file system may count time in whole seconds
            os.utime(file, ns=(run, run))
    numbers = {int(re.findall(r"\d+", p.name)[0]) for p in tmp_path.glob("*.pt")}
    assert numbers == {10 * run + k for run in (3, 4, 5, 6) for k in (1, 2, 3, 4)}
    assert len(list(tmp_path.glob("*.txt"))) == 16 + len(kept)
    assert all(file.exists() for file in kept)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    step = step_of(Body(lambda m, h: h), squared, blackbox=tmp_path / "file" / "box")
    with caplog.at_level(logging.WARNING, "halfstep"):
        step(torch.full((4, 8), math.nan))
        assert step(torch.randn(4, 8)).host().updated
    assert "could not be written" in caplog.text


def test_a_full_disk_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(content: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    step = step_of(Body(lambda m, h: h), squared, blackbox=tmp_path)
    with caplog.at_level(logging.WARNING, "halfstep"):
        step(torch.full((4, 8), math.nan))
        step.explain()
    assert "No space left" in caplog.text and not [p for p in tmp_path.iterdir() if p.suffix != ".txt"]


# -------------------------------------------------------------------------------------------------- kinds of training


def test_two_steps_with_one_scaler_have_a_box_each() -> None:
    scaler = hs.GradScaler("cpu", init_scale=64.0)
    good = step_of(transformer(1.0), scaler=scaler)
    bad = step_of(transformer(), scaler=scaler)
    for _ in range(2):
        good(*batch())
        bad(*batch())
    assert bad.explain().op == "matmul"
    with pytest.raises(StepError, match="there is no step"):
        good.explain()


def test_a_compiled_model_is_replayed_eagerly_and_it_says_so() -> None:
    model = transformer()
    hs.prepare(model, policy=FP16)
    model.compile(backend="eager")
    step = step_of(model)
    assert step(*batch()).host().skipped
    verdict = step.explain()
    assert (verdict.op, verdict.module) == ("matmul", "blocks.1")
    assert "the model is compiled; the replay ran it eagerly" in verdict.notes


def test_models_that_take_and_give_dictionaries_integers_and_complex_numbers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.LazyLinear(4)

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            h = self.embed(inputs["ids"])
            wave = torch.fft.fft(h.float(), dim=-1) * inputs["phase"]
            return {"out": self.head(wave.abs()), "log": torch.log(h.float() * 0)}

    def loss_fn(model: nn.Module, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(inputs)
        return out["out"].float().mean() + out["log"].mean(), out

    model = Mixed()
    inputs = {"ids": torch.randint(0, 10, (4,)), "phase": torch.ones(8, dtype=torch.complex64)}
    model(inputs)
    step = step_of(model, loss_fn)
    assert step(**inputs).host().skipped
    verdict = step.explain()
    assert (verdict.op, verdict.kind) == ("log", "invalid")


def test_on_a_cpu_the_batch_of_a_good_step_is_let_go_at_once() -> None:
    model = nn.Linear(4, 2)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).square().mean())
    x = torch.ones(3, 4)
    gone = weakref.ref(x)
    step(x)
    del x
    assert gone() is None


@pytest.mark.parametrize("scaled", [True, False])
def test_a_loop_written_by_hand_with_torch_autocast(scaled: bool, caplog: pytest.LogCaptureFixture) -> None:
    low = torch.float16 if scaled else torch.bfloat16

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=low):
            logits = model(x).mean(1)
            return F.cross_entropy(logits if scaled else logits / (logits * 0), y)

    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
    box = hs.BlackBox(model, loss_fn, optimizer)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(2):
            scaler.scale(box(*batch())).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    verdict = box.verdict
    assert verdict is not None and verdict.step == 1
    assert (verdict.op, verdict.module) == (("matmul", "blocks.1") if scaled else ("div", ""))
    assert sum("black box" in record.getMessage() for record in caplog.records) <= 2
    verified = [cure.text for cure in verdict.cures if cure.verified]
    assert len(verified) == (3 if scaled else 0)
    line = "with hs.autocast(policy=hs.Policy.of('torch', dtype='fp16').with_ops(fp32=['matmul'])):"
    assert not scaled or verified[0] == f"matmul in fp32: {line}\nin place of torch.autocast"


def test_a_loop_written_by_hand_is_the_same_with_and_without() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, x, y)

    def run(box_on: bool) -> list[Tensor]:
        model = transformer(1.0)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        box = hs.BlackBox(model, loss_fn, optimizer) if box_on else None
        for i in range(4):
            x, y = batch()
            x = x * (math.inf if i == 2 else 1)
            loss = loss_fn(model, x, y) if box is None else box(x, y)
            optimizer.zero_grad()
            loss.backward()
            if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None):
                optimizer.step()
        return [*model.state_dict().values(), torch.get_rng_state()]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_a_box_for_a_prepared_model_uses_its_policy() -> None:
    model, optimizer, scaler = hs.prepare(
        *(lambda m: (m, torch.optim.AdamW(m.parameters())))(transformer()), policy=hs.Policy.of("O2", dtype="fp16")
    )
    box = hs.BlackBox(model, classify, optimizer)
    scaler.scale(box(*batch())).backward()
    verdict = box.explain()
    assert verdict.op == "matmul" and verdict.cures[0].policy.params == "low"
    with pytest.raises(StepError, match="loss_fn must be callable"):
        hs.BlackBox(model, None)  # type: ignore[arg-type]


def test_a_gradient_from_outside_that_is_not_finite_is_named_as_it_is() -> None:
    model = nn.Linear(4, 4)
    box = hs.BlackBox(model, lambda model, x: model(x))
    given = torch.ones(2, 4)
    given[0, 0] = torch.inf
    box(torch.randn(2, 4)).backward(given)
    verdict = box.explain()
    assert (verdict.kind, verdict.phase, verdict.cause) == ("bad_batch", "backward", "")
    assert "next stage of a pipeline" in verdict.notes[0] and "gradient that backward() was given" in str(verdict)
