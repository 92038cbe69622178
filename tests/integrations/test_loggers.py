"""Loggers: what they wrote, read back from each library's own files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations import loggers

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUMBERS = {"loss", "scale", "skipped", "grad_norm", "samples_per_second"}


class Written(NamedTuple):
    """What is in a library's files."""

    curves: dict[str, list[tuple[int, float]]]
    texts: dict[str, dict[int, str]]
    histograms: dict[tuple[str, int], list[int]]  # name, step -> the counts of its bars
    pages: dict[str, str]


def make_step() -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = hs.Policy.of("mixed", dtype="fp16")
    return hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy, blackbox=False)


class Keeps(loggers.Logger):
    """Keeps what it is given: what every logger should have written."""

    def __init__(self) -> None:
        super().__init__("")
        self.written = Written({}, {}, {}, {})

    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.written.curves.setdefault(name, []).append((step, value))

    def histograms(self, sketches: Mapping[str, hs.ExponentSketch], step: int) -> None:
        found = {(name, step): sketch.bars()[0] for name, sketch in sketches.items() if sketch.nonzero}
        self.written.histograms.update(found)

    def text(self, name: str, text: str, step: int) -> None:
        self.written.texts.setdefault(name, {})[step] = text

    def page(self, name: str, html: str, step: int) -> None:
        self.written.pages[name] = html

    def close(self) -> None:
        pass


class Both:
    """Gives each record to several loggers."""

    def __init__(self, *loggers: loggers.Logger) -> None:
        self.loggers = loggers

    def add(self, record: Any) -> None:
        for logger in self.loggers:
            logger.add(record)


def logged(logger: loggers.Logger) -> Written:
    """Log a run with a skipped step, a monitor's records, an audit and a number of one's own; return what it was."""
    keeps = Keeps()
    both, step = Both(keeps, logger), make_step()
    metrics = step.metrics(every=2, to=both)
    monitor = hs.Monitor(step, every=3)
    for number in range(6):
        step(torch.full((5, 3), math.inf) if number == 2 else torch.randn(5, 3))
        for record in monitor.poll():
            both.add(record)
    assert metrics.flush() == []
    both.add(hs.audit(step.model, [(torch.randn(5, 3),)], step.loss_fn, None, step.optimizer, steps=1))
    for one in (keeps, logger):
        one.numbers({"own": 3.0, "nowhere": math.nan}, 7)
        one.close()
    return keeps.written


def check(wanted: Written, found: Written, *, pages: bool) -> None:
    """What a library's files have is what was logged."""
    assert wanted.curves.keys() >= NUMBERS | {"own"} and "nowhere" not in wanted.curves
    assert [step for step, _ in wanted.curves["skipped"]] == [2, 4, 6]
    assert [value for _, value in wanted.curves["skipped"]] == [0, 1, 1]
    assert wanted.texts["culprits"].keys() == {4} and "0.weight" in wanted.texts["culprits"][4]
    assert ("gradient/0.weight", 6) in wanted.histograms and any("audit/" in name for name, _ in wanted.histograms)
    assert found.curves.keys() == {f"halfstep/{name}" for name in wanted.curves}
    for name, points in wanted.curves.items():
        steps, values = zip(*found.curves[f"halfstep/{name}"], strict=True)
        assert steps == tuple(step for step, _ in points)
        assert values == pytest.approx(tuple(value for _, value in points), rel=1e-6)
    assert found.texts.keys() == {f"halfstep/{name}" for name in wanted.texts}
    for name, texts in wanted.texts.items():
        assert {step: text.split() for step, text in found.texts[f"halfstep/{name}"].items()} == {
            step: text.split() for step, text in texts.items()
        }
    assert found.histograms == {(f"halfstep/{name}", step): bars for (name, step), bars in wanted.histograms.items()}
    assert set(found.pages) == ({"halfstep/audit"} if pages else set())
    if pages:
        assert "<svg" in found.pages["halfstep/audit"] and found.pages["halfstep/audit"] == wanted.pages["audit"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_tensorboard(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = logged(loggers.TensorBoard(folder / "runs"))
    events = EventAccumulator(str(folder / "runs"), size_guidance={"histograms": 0, "tensors": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    curves = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in tags["scalars"]}
    texts: dict[str, dict[int, str]] = {}
    for name in tags["tensors"]:
        for event in events.Tensors(name):
            text = event.tensor_proto.string_val[0].decode()
            texts.setdefault(name.removesuffix("/text_summary"), {})[event.step] = text[5:-6]
    histograms = {
        (name, e.step): [int(c) for c in e.histogram_value.bucket] for name in tags["histograms"]
        for e in events.Histograms(name)
    }  # fmt: skip
    trimmed = {key: bars[next(i for i, c in enumerate(bars) if c) :] for key, bars in histograms.items()}
    check(wanted, Written(curves, texts, trimmed, {}), pages=False)


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file, which is a log of LevelDB behind a header of 7 bytes."""
    place, block, record = 7, 1 << 15, b""
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for a header: the next block
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + length > len(data):  # still being written
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # whole, or its last part
            yield record
            record = b""


def test_weights_and_biases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    wanted = logged(loggers.WandB(project="p", mode="offline", dir=str(folder)))
    found = Written({}, {}, {}, {})
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    metrics = []
    for _ in range(100):  # the process that writes the file may come to its end after finish()
        found_records = [wandb_internal_pb2.Record.FromString(data) for data in records(file.read_bytes())]
        if any(record.HasField("exit") for record in found_records):
            break
        time.sleep(0.3)
    for record in found_records:
        if record.HasField("metric"):
            metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
        if not record.HasField("history"):
            continue
        values: dict[str, Any] = {}
        for item in record.history.item:
            name, *below = [item.key] if item.key else item.nested_key
            value = json.loads(item.value_json)
            if below:
                values.setdefault(name, {})[below[0]] = value
            else:
                values[name] = value
        step = values.pop("halfstep/step")
        for name, value in values.items():
            if name.startswith("_"):
                continue
            if isinstance(value, str):
                found.texts.setdefault(name, {})[step] = value
            elif not isinstance(value, dict):
                found.curves.setdefault(name, []).append((step, value))
            elif value["_type"] == "histogram":
                found.histograms[name, step] = value["values"]
            else:
                found.pages[name.removesuffix("_page")] = (file.parent / "files" / value["path"]).read_text()
    check(wanted, found, pages=True)
    assert ("halfstep/*", "halfstep/step") in metrics


@pytest.mark.parametrize("kind", ["folder", "sqlite"])
def test_mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (folder / "runs").as_uri() if kind == "folder" else f"sqlite:///{folder / 'runs.db'}"
    logger = loggers.MLflow(uri, experiment="e")
    wanted = logged(logger)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == logger.run_id and run.info.status == "FINISHED"
    found = Written({}, {}, {}, {})
    for name in run.data.metrics:
        found.curves[name] = [(m.step, m.value) for m in client.get_metric_history(logger.run_id, name)]
    root = Path(client.download_artifacts(logger.run_id, "", str(folder)))
    for file in (root / "halfstep").glob("*/step-*"):
        name, step = f"halfstep/{file.parent.name}", int(file.stem.removeprefix("step-"))
        if file.suffix == ".txt":
            found.texts.setdefault(name, {})[step] = file.read_text()
        elif file.suffix == ".html":
            found.pages[name] = file.read_text()
        else:
            for key, value in json.loads(file.read_text()).items():
                bars = hs.ExponentSketch.from_dict(value).bars()[0]
                if bars:
                    found.histograms[f"halfstep/{key}", step] = bars
    check(wanted, found, pages=True)


def test_a_run_that_exists_is_used_and_left_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(folder))
    with pytest.raises(IntegrationError, match="project begin a new run; leave them or the run out"):
        loggers.WandB(run, project="p")
    logger = loggers.WandB(run, prefix="amp/")
    logger.numbers({"scale": 2.0}, 1)
    logger.close()
    run.log({"mine": 1})
    assert run.summary["amp/scale"] == 2.0
    run.finish()


def test_what_is_no_record_is_an_error() -> None:
    with pytest.raises(IntegrationError, match=r"not dict; log other numbers by Keeps\.numbers"):
        Keeps().add({"loss": 1.0})


def test_a_verdict_is_its_text() -> None:
    keeps = Keeps()
    verdict = hs.lens.Verdict(kind="overflow", op="softmax", module="head", step=3)
    keeps.add(verdict)
    assert keeps.written.texts == {"verdict": {3: str(verdict)}}
