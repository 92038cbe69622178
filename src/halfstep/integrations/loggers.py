"""Loggers: what halfstep records, in TensorBoard, Weights & Biases and MLflow.

They take records of `TrainStep.metrics` and of `hs.Monitor`, verdicts on bad steps, and audits.

Examples:
    >>> logger = hs.integrations.loggers.TensorBoard("runs/today")  # or WandB(project="p"), MLflow(experiment="e")
    >>> metrics = step.metrics(every=50, to=logger)
    >>> for x, y in batches:
    ...     step(x, y)
    >>> metrics.flush()
    >>> logger.close()
"""

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import IntegrationError
from halfstep.integrations.shared import need
from halfstep.lens import Audit, ExponentSketch, SketchWriter, Verdict
from halfstep.step import StepMetrics

__all__ = ["Logger", "MLflow", "TensorBoard", "WandB"]


class Logger(ABC):
    """Logs the records of a run; `TensorBoard`, `WandB` and `MLflow` are its subclasses.

    Numbers that are not finite are left out: they have no place in a curve. What made them so is in the texts.

    Args:
        prefix: what the names of everything begin with.
    """

    def __init__(self, prefix: str = "halfstep/") -> None:
        self.prefix = prefix

    def add(self, record: Any, step: int | None = None) -> None:
        """Log one record.

        Args:
            record: `hs.step.StepMetrics`: its numbers as curves, and as text which gradients were not finite.
                A record of `hs.Monitor`: its numbers as curves, its sketches as histograms.
                `hs.lens.Verdict`: its text.
                `hs.lens.Audit`: its text, its sketches and, where the library shows HTML, its page with pictures.
            step: where it belongs; None: where the record says, or 0.

        Raises:
            IntegrationError: it is none of these.
        """
        at = int(getattr(record, "step", 0)) if step is None else step
        if isinstance(record, Audit):
            self._add_audit(record, at)
        elif isinstance(record, Verdict):
            self.text("verdict", str(record), at)
        elif isinstance(record, StepMetrics):
            self.numbers(record.numbers(), at)
            if record.culprits:
                self.text("culprits", ", ".join(record.culprits), at)
        elif hasattr(record, "numbers") and hasattr(record, "sketches"):
            self.numbers(record.numbers(), at)
            self.histograms(record.sketches(), at)
        else:
            raise IntegrationError(
                f"{type(self).__name__}.add takes a record of step.metrics or hs.Monitor, a Verdict or an Audit, not "
                f"{type(record).__name__}; log other numbers by {type(self).__name__}.numbers({{name: number}}, step)"
            )

    def _add_audit(self, audit: Audit, step: int) -> None:
        self.text("audit", str(audit), step)
        names = (f"audit/{row.role}/{row.module or 'model'}/{row.op}" for row in audit.rows)
        self.histograms({name: row.sketch for name, row in zip(names, audit.rows, strict=True) if row.sketch}, step)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "audit.html"
            audit.save_html(file)
            self.page("audit", file.read_text(encoding="utf-8"), step)

    def numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers as points of curves; those of a hand-written loop too, such as ``scaler.get_scale()``."""
        finite = {self.prefix + name: float(value) for name, value in numbers.items() if math.isfinite(value)}
        if finite:
            self._numbers(finite, step)

    @abstractmethod
    def _numbers(self, numbers: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def histograms(self, sketches: Mapping[str, ExponentSketch], step: int) -> None:
        """Log sketches as histograms: the bar over e counts the numbers with ``2**e <= |x| < 2**(e + 1)``."""

    @abstractmethod
    def text(self, name: str, text: str, step: int) -> None:
        """Log a text."""

    @abstractmethod
    def page(self, name: str, html: str, step: int) -> None:
        """Log an HTML page that needs nothing else."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is buffered; the end of a run that this logger has begun."""


class TensorBoard(Logger):
    """Logs to TensorBoard's event files, in which pages have no place.

    Args:
        target: a folder, or a SummaryWriter.
        prefix: as `Logger`.

    Raises:
        IntegrationError: the package tensorboard is absent or older than 2.18.
        HalfstepError: `target` is neither of the two.
    """

    def __init__(self, target: str | Path | Any, *, prefix: str = "halfstep/") -> None:
        need("tensorboard", "2.18")
        super().__init__(prefix)
        self._sketches = SketchWriter(target)
        self.writer: Any = self._sketches.writer

    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, global_step=step)

    def histograms(self, sketches: Mapping[str, ExponentSketch], step: int) -> None:
        """Log sketches, by `hs.SketchWriter`."""
        for name, sketch in sketches.items():
            self._sketches.add_sketch(self.prefix + name, sketch, step)

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text, its lines and columns as they are."""
        self.writer.add_text(self.prefix + name, f"<pre>\n{text}\n</pre>", global_step=step)

    def page(self, name: str, html: str, step: int) -> None:
        """Log nothing: event files have no pages; an audit is there as text and histograms."""

    def close(self) -> None:
        """Write out what is buffered."""
        self._sketches.close()


class WandB(Logger):
    """Logs to Weights & Biases; with ``mode="offline"`` into a local folder.

    All it logs has the step of its record as ``halfstep/step``, which its curves are drawn over: W&B's own step, which
    only grows, is left to the loop.

    Args:
        run: a run that exists; None: a new one, which `close` finishes.
        prefix: as `Logger`.
        **options: of ``wandb.init``, such as ``project="p", mode="offline", dir="runs"``.

    Raises:
        IntegrationError: the package wandb is absent or older than 0.18, or `run` comes with options.
    """

    def __init__(self, run: Any = None, *, prefix: str = "halfstep/", **options: Any) -> None:
        self._wandb: Any = need("wandb", "0.18")
        super().__init__(prefix)
        if run is not None and options:
            raise IntegrationError(f"WandB(run, ...): {', '.join(options)} begin a new run; leave them or the run out")
        self._own = run is None
        self.run = self._wandb.init(**options) if run is None else run
        self.run.define_metric(f"{prefix}step")
        self.run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")

    def _numbers(self, numbers: Mapping[str, Any], step: int) -> None:
        self.run.log({**numbers, f"{self.prefix}step": step})

    def histograms(self, sketches: Mapping[str, ExponentSketch], step: int) -> None:
        """Log sketches."""
        bars = {self.prefix + name: sketch.bars() for name, sketch in sketches.items() if sketch.nonzero}
        if bars:
            self._numbers({name: self._wandb.Histogram(np_histogram=found) for name, found in bars.items()}, step)

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text."""
        self._numbers({self.prefix + name: text}, step)

    def page(self, name: str, html: str, step: int) -> None:
        """Log a page."""
        self._numbers({f"{self.prefix}{name}_page": self._wandb.Html(html, inject=False)}, step)

    def close(self) -> None:
        """Finish the run if this logger began it."""
        if self._own:
            self.run.finish()


class MLflow(Logger):
    """Logs to MLflow: numbers as metrics, the rest as artifacts.

    Artifacts are files by name and step: ``halfstep/culprits/step-400.txt``, ``halfstep/audit/step-0.html``. The
    sketches of a record are one file, ``halfstep/sketches/step-400.json``, which `hs.ExponentSketch.from_dict` reads.

    Args:
        uri: where runs are kept, such as "sqlite:///runs.db" or a server's address; None: what MLflow is set to.
        experiment: its name; None: MLflow's default.
        run_id: a run that exists; None: a new one, which `close` ends.
        prefix: as `Logger`.

    Raises:
        IntegrationError: the package mlflow is absent or older than 3.17.
    """

    def __init__(
        self, uri: str | None = None, *, experiment: str | None = None, run_id: str | None = None,
        prefix: str = "halfstep/",
    ) -> None:  # fmt: skip
        tracking: Any = need("mlflow.tracking", "3.17", package="mlflow")
        super().__init__(prefix)
        self.client = tracking.MlflowClient(uri)
        self._own = run_id is None
        if run_id is None:
            name = experiment or "Default"
            known = self.client.get_experiment_by_name(name)
            number = self.client.create_experiment(name) if known is None else known.experiment_id
            run_id = self.client.create_run(number).info.run_id
        self.run_id: str = run_id

    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def histograms(self, sketches: Mapping[str, ExponentSketch], step: int) -> None:
        """Log sketches, as one file."""
        values = {name: sketch.to_dict() for name, sketch in sketches.items()}
        if values:
            self.client.log_dict(self.run_id, values, f"{self.prefix}sketches/step-{step}.json")

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text, as a file."""
        self.client.log_text(self.run_id, text, f"{self.prefix}{name}/step-{step}.txt")

    def page(self, name: str, html: str, step: int) -> None:
        """Log a page, as a file."""
        self.client.log_text(self.run_id, html, f"{self.prefix}{name}/step-{step}.html")

    def close(self) -> None:
        """End the run if this logger began it."""
        if self._own:
            self.client.set_terminated(self.run_id)
