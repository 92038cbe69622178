"""Bad input: odd models and batches, wrong arguments, full disks: clear words, and training goes on as if unwatched.

Every odd model trains three steps, the second of them bad, watched by a black box, by a box of a hand-written loop and
by a `Monitor`, and is audited.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.errors import StepError

BF16 = hs.Policy.of("mixed", dtype="bf16")


class Divide(nn.Module):
    """Divides by a gate, which is 0 in a bad batch."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x / gate


class Repeated(nn.Module):
    """Calls its modules several times, and has them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.divide = Divide()
        self.again = nn.ModuleList([self.inner, self.divide])

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        for _ in range(3):
            x = self.again[1](self.inner(x), torch.ones_like(gate))
        return self.divide(self.again[0](x), gate)  # type: ignore[no-any-return]


class Yields(nn.Module):
    """Returns a generator, so that what it computes is computed outside of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def _parts(self, x: Tensor, gate: Tensor) -> Iterator[Tensor]:
        yield self.inner(x)
        yield self.inner(2 * x) / gate

    def forward(self, x: Tensor, gate: Tensor) -> Iterator[Tensor]:
        return self._parts(x, gate)


class Named(nn.Module):
    """Returns a dictionary of dictionaries, with what is no tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.divide = Divide()

    def forward(self, x: Tensor, gate: Tensor) -> dict[str, Any]:
        return {"out": {"y": self.divide(self.inner(x), gate)}, "best": x.argmax(-1), "none": None, "name": "x"}


class Lazy(nn.Module):
    """Creates a parameter in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LazyLinear(4)
        self.divide = Divide()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.divide(self.inner(x), gate)  # type: ignore[no-any-return]


class Complex(nn.Module):
    """Has complex and integer parameters and buffers, and changes one of these."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.wave = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.divide = Divide()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        self.count += 1
        turned = torch.complex(self.inner(x).float(), x) * self.wave
        return self.divide((turned * turned.conj()).real + self.shift, gate)  # type: ignore[no-any-return]


class Wide(nn.Module):
    """Computes in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.divide = Divide()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.divide(self.inner(x.double()), gate)  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Draws from a generator of its own, which no replay brings back: another loss, the same fault."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.divide = Divide()
        self.random = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.divide(self.inner(x + torch.randn(x.shape, generator=self.random)), gate)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Odd:
    """An odd model, and the module that its bad step is put down to."""

    make: Callable[[], nn.Module]
    module: str = "divide"


ODD = {
    "modules called several times and shared": Odd(Repeated),
    "a generator returned": Odd(Yields, ""),
    "dictionaries returned": Odd(Named),
    "parameters created lazily": Odd(Lazy),
    "complex numbers and integers": Odd(Complex),
    "fp64": Odd(Wide),
    "a generator of its own": Odd(Drawing),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ODD[name].make()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches, the second of which is divided by zero."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.tensor(gate)) for gate in (1.0, 0.0, 1.0)]


def loss_fn(model: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    out = model(x, gate)
    if isinstance(out, dict):
        out = out["out"]["y"]
    parts = [out] if isinstance(out, Tensor) else list(out)
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def stepped(name: str, *, watched: bool, folder: Path | None = None) -> tuple[dict[str, Tensor], list[Any]]:
    """Train by a TrainStep; return the weights, and verdict and record if it is watched."""
    model = made(name)
    step = hs.TrainStep(model, sgd(model), loss_fn, policy=BF16, blackbox=folder or watched)
    monitor = hs.Monitor(step, every=1, activations=True) if watched else None
    seen: list[Any] = []
    for number, batch in enumerate(batches()):
        if step(*batch).host().skipped:
            assert number == 1
            if watched:
                seen.append(step.explain())
        if monitor is not None:
            seen += monitor.poll()
    return model.state_dict(), seen


def looped(name: str, *, watched: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """Train by a loop with torch's own autocast, which leaves the bad step out; return weights and verdict."""

    def loss_of(model: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, x, gate)

    model, seen = made(name), []
    optimizer = sgd(model)
    box: Any = hs.BlackBox(model, loss_of, optimizer) if watched else lambda *batch: loss_of(model, *batch)
    for batch in batches():
        loss = box(*batch)
        loss.backward()
        if bool(loss.isfinite()):
            optimizer.step()
        elif watched:
            seen.append(box.explain())
        optimizer.zero_grad()
    return model.state_dict(), seen


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(t, others[n]) for n, t in some.items())


@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_explained_and_sampled_and_ends_with_the_bits_of_an_unwatched_run(
    name: str, tmp_path: Path
) -> None:
    plain, _ = stepped(name, watched=False)
    weights, seen = stepped(name, watched=True, folder=tmp_path)
    assert same(weights, plain)
    (verdict,) = (v for v in seen if isinstance(v, hs.lens.Verdict))
    assert (verdict.kind, verdict.op, verdict.module, verdict.step) == ("invalid", "div", ODD[name].module, 2)
    assert len(list(tmp_path.glob("*.pt"))) == 1
    records = [r for r in seen if not isinstance(r, hs.lens.Verdict)]
    assert [r.step for r in records] == [1, 2, 3]
    assert max(p.nonfinite for p in records[1].parameters) > 0 and "inf or nan" in str(records[1])
    assert not any(p.nonfinite for p in records[2].parameters) and "inf or nan" not in str(records[2])


@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_in_a_loop_of_ones_own_too(name: str) -> None:
    plain, _ = looped(name, watched=False)
    weights, (verdict,) = looped(name, watched=True)
    assert same(weights, plain)
    assert (verdict.kind, verdict.op, verdict.module, verdict.step) == ("invalid", "div", ODD[name].module, 2)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_model_is_audited_and_left_alone(name: str) -> None:
    model = made(name)
    if not isinstance(model, Lazy):
        before = {n: t.clone() for n, t in model.state_dict().items()}
    audit = hs.audit(model, batches()[::2], loss_fn, BF16)
    assert audit.steps == 2 and not audit.findings()
    assert audit.filter(module="inner", role="activation").rows
    if isinstance(model, Lazy):
        assert isinstance(model.inner.weight, nn.UninitializedParameter)
    else:
        assert same(model.state_dict(), before)


# ---------------------------------------------------------------------- what comes out differently each time


class Moody(nn.Module):
    """Is inf in its second forward pass and in no other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.inner(x) * (torch.inf if len(self.calls) == 2 else 1.0)  # type: ignore[no-any-return]


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_forward_that_is_not_deterministic_is_said_to_be_so(by_hand: bool) -> None:
    torch.manual_seed(0)
    model = Moody()
    x = torch.randn(8, 4)
    if by_hand:
        box = hs.BlackBox(model, squared, optimizer := sgd(model))
        for _ in range(2):
            optimizer.zero_grad()
            box(x).backward()
        verdict, loss = box.explain(), float(box(x).detach())
    else:
        step = hs.TrainStep(model, sgd(model), squared, policy=BF16)
        assert [step(x).host().skipped for _ in range(2)] == [False, True]
        verdict, loss = step.explain(), step(x).host().loss
    assert verdict.kind == "not_reproducible" and verdict.step == 2
    assert any("the loss of micro-batch 1 was inf and is" in note for note in verdict.notes)
    assert loss == loss and loss < torch.inf


def test_an_audit_of_a_forward_that_is_not_deterministic_says_which_steps_were_not_finite() -> None:
    audit = hs.audit(Moody(), [(torch.ones(8, 4),), (torch.ones(8, 4),)], squared, BF16)
    assert not audit.findings()
    assert any("1 of 2 steps were not finite" in note for note in audit.notes)


class Dice(nn.Module):
    """Draws from Python's and NumPy's generators and divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * random.random() * numpy.random.rand() / torch.zeros(4)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_hand", [False, True])
def test_generators_of_python_and_numpy_are_put_back_after_a_replay(by_hand: bool) -> None:
    def drawn(watched: bool) -> tuple[float, float]:
        random.seed(0)
        numpy.random.seed(0)
        model = Dice()
        x = torch.ones(8, 4)
        if by_hand:
            box = hs.BlackBox(model, squared)
            (box(x) if watched else squared(model, x)).backward()
            if watched:
                assert box.explain().op == "div"
        else:
            step = hs.TrainStep(model, sgd(model), squared, policy=BF16, blackbox=watched)
            assert step(x).host().skipped
            if watched:
                assert step.explain().op == "div"
        return random.random(), float(numpy.random.rand())

    assert drawn(True) == drawn(False)


# ---------------------------------------------------------------------- batches on another device


@pytest.mark.parametrize("door", ["step", "box"])
def test_a_batch_on_another_device_is_torchs_own_error_and_the_next_batch_trains(door: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    call: Any = (
        hs.TrainStep(model, optimizer, squared, policy=BF16)
        if door == "step"
        else hs.BlackBox(model, squared, optimizer)
    )
    with pytest.raises(RuntimeError, match="meta"):
        call(torch.ones(8, 4, device="meta"))
    if door == "step":
        assert call(torch.ones(8, 4)).host().updated
    else:
        call(torch.ones(8, 4)).backward()
        optimizer.step()
    with pytest.raises(StepError, match="there is no step to explain"):
        call.explain()


# ---------------------------------------------------------------------- evidence


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_disk_that_fills_up_is_said_once_and_training_goes_on(
    by_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(content: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")  # so says torch

    monkeypatch.setattr(torch, "save", full)
    model = made("dictionaries returned")
    optimizer = sgd(model)
    box = hs.BlackBox(model, loss_fn, optimizer, evidence=tmp_path)
    step = None if by_hand else hs.TrainStep(model, optimizer, loss_fn, policy=BF16, blackbox=tmp_path)
    good, bad, _ = batches()
    with caplog.at_level(logging.WARNING, "halfstep"):
        for batch in (bad, good, bad, good):
            if step is not None:
                assert step(*batch).host().skipped == (batch is bad)
                continue
            box(*batch).backward()
            if batch is good:
                optimizer.step()
            else:
                assert box.explain().op == "div"
            optimizer.zero_grad()
    assert caplog.text.count("could not be written") == 1
    assert "file write failed (is the disk full?)" in caplog.text
    assert all(bool(t.isfinite().all()) for t in model.state_dict().values())
    assert not [p for p in tmp_path.iterdir() if p.suffix != ".txt"]


def test_reports_are_bounded_in_number_where_evidence_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(content: object, file: IO[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    model = made("dictionaries returned")
    step = hs.TrainStep(model, sgd(model), loss_fn, policy=BF16, blackbox=tmp_path)
    for _ in range(6):
        step(*batches()[1])
        step.explain()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"halfstep-blackbox-{n}.txt" for n in (3, 4, 5, 6)]


def test_a_path_that_is_a_file_is_said_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes").write_text("mine")
    model = made("dictionaries returned")
    step = hs.TrainStep(model, sgd(model), loss_fn, policy=BF16, blackbox=tmp_path / "notes")
    with caplog.at_level(logging.WARNING, "halfstep"):
        assert [step(*batch).host().updated for batch in batches()] == [True, False, True]
    assert "could not be written" in caplog.text and "'notes" not in (tmp_path / "notes").read_text()
    assert (tmp_path / "notes").read_text() == "mine"


TASKS = """
import torch
import halfstep as hs
from tests.lens.test_bad_input import batches, loss_fn, made, sgd

def task(model="dictionaries returned"):
    return hs.Task(name="odd", model=lambda: made(model), batches=lambda seed, step: batches()[step], loss_fn=loss_fn,
                   optimizer=sgd)

def another():
    return task("complex numbers and integers")

def module():
    return torch.nn.Linear(2, 2)

def fails():
    raise OSError("no data here")
"""


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """An evidence file, beside a file of tasks."""
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    stepped("dictionaries returned", watched=True, folder=tmp_path)
    return tmp_path / "halfstep-blackbox-2.pt"


def replayed(file: Path, model: str, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["replay", str(file), "--model", model, *more])
    return done.exit_code, " ".join(done.output.split())


def test_a_task_without_metric_and_margin_is_enough_for_a_replay(evidence: Path) -> None:
    code, text = replayed(evidence, f"{evidence.parent / 'tasks.py'}:task")
    assert code == 0 and "step 2: " in text and "| div in divide, forward, " in text


def test_a_replay_writes_its_verdict_for_people_and_for_programs(evidence: Path, tmp_path: Path) -> None:
    files = {"--json": "v.json", "--sarif": "v.sarif", "--html": "v.html"}
    wanted = [word for option, name in files.items() for word in (option, str(tmp_path / "made" / name))]
    code, text = replayed(evidence, f"{evidence.parent / 'tasks.py'}:task", *wanted)
    assert code == 0 and text.count("written: ") == 3
    made = {path.name: path.read_text() for path in (tmp_path / "made").iterdir()}
    assert json.loads(made["v.json"])["op"] == "div" and '"ruleId"' in made["v.sarif"] and "<html" in made["v.html"]
    code, text = replayed(evidence, f"{evidence.parent / 'tasks.py'}:task", "--sarif", str(tmp_path))
    assert code == 2 and "--sarif" in text and "cannot be written: Is a directory" in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (":another", "do not fit the task's Complex: wave is missing, shift is missing, count is missing; is it the"),
        (":module", "returns a module, and a replay needs its loss function too"),
        (":fails", "raised OSError: no data here"),
        (":absent", "has no function 'absent'"),
        ("", "names no function; write"),
    ],
)
def test_what_is_not_the_task_of_the_evidence_is_one_line_and_exit_code_2(
    model: str, words: str, evidence: Path
) -> None:
    code, text = replayed(evidence, f"{evidence.parent / 'tasks.py'}{model}")
    assert code == 2 and words in text


def test_what_is_no_evidence_is_one_line_and_exit_code_2(evidence: Path) -> None:
    whole = evidence.read_bytes()
    half, other = evidence.parent / "half.pt", evidence.parent / "other.pt"
    half.write_bytes(whole[: len(whole) // 2])
    torch.save({"model": {}}, other)
    task = f"{evidence.parent / 'tasks.py'}:task"
    for file, words in (
        (half, "cannot read"),
        (other, "it was cut off, or written before evidence had one"),
        (evidence.with_suffix(".txt"), "cannot read"),
        (evidence.parent, "is a folder"),
        (evidence.parent / "absent.pt", "does not exist"),
    ):
        code, text = replayed(file, task)
        assert code == 2 and text.startswith("error: ") and words in text


def test_evidence_without_weights_is_replayed_with_those_of_the_task_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfstep.lens.box.evidence.MOST_BYTES", 0)
    stepped("dictionaries returned", watched=True, folder=tmp_path)
    task = hs.Task(
        name="odd",
        model=lambda: made("dictionaries returned"),
        batches=lambda seed, step: batches()[step],
        loss_fn=loss_fn,
        optimizer=sgd,
    )
    verdict = hs.lens.replay(tmp_path / "halfstep-blackbox-2.pt", task)
    assert verdict.op == "div" and any("the evidence holds no weights" in note for note in verdict.notes)


def test_evidence_that_is_finite_under_other_code_is_advised_to_be_given_that_of_the_run(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def root(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(model(x) - 1e3).sum()

    model = nn.Linear(4, 4)
    step = hs.TrainStep(model, sgd(model), root, policy=BF16, blackbox=tmp_path)
    assert bool(step(torch.ones(2, 4)).skipped)
    task = hs.Task(
        name="other", model=lambda: nn.Linear(4, 4), batches=lambda seed, step: (), loss_fn=squared, optimizer=sgd
    )
    (file,) = tmp_path.glob("*.pt")
    verdict = hs.lens.replay(file, task)
    assert verdict.kind == "not_reproducible"
    assert verdict.cures[0].text.startswith("give the model and the loss of that run")
    assert not any("of that run" in cure.text for cure in step.explain().cures)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize("wrong", [3.5, 3, None, "", b"box", ["box"]])
def test_a_black_box_that_is_no_folder_is_refused_before_anything_changes(wrong: Any) -> None:
    model = nn.Linear(4, 4)
    kind = type(model)
    with pytest.raises(StepError, match="must be True or False or a folder for evidence files"):
        hs.TrainStep(model, sgd(model), squared, policy=BF16, blackbox=wrong)
    assert type(model) is kind


def test_a_replay_of_no_task_is_refused(evidence: Path) -> None:
    with pytest.raises(StepError, match="takes an hs.Task of the run and got int"):
        hs.lens.replay(evidence, 3)
