"""Task: a model, its data, loss and optimizer, and its metric; and those that the command line loads by name."""

import importlib
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.arguments import COUNT, FLAG, NONE, POSITIVE, TEXT, Kind, check
from halfstep.errors import TaskError, did_you_mean
from halfstep.torch_private.trees import tree_map

STEPS_OF_A_SEED = 1_000_003  # a prime larger than any run, so that no two (seed, step) share a random state

FUNCTION = Kind("callable", callable)  # a class too: it returns a model or an optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A training problem that can be run again and again from the same start, with the same data in the same order.

    Attributes:
        name: short name, used in tables and on the command line.
        model: returns a new fp32 model; its weights may depend only on torch's global generator, which is seeded first.
        batches: ``batches(seed, step)`` returns the positional arguments of `loss_fn` after the model; equal arguments
            give equal batches, in whatever order they are asked for. Tensors on the CPU.
        loss_fn: ``loss_fn(model, *batch)`` returns a 0-dim loss.
        optimizer: returns a new torch optimizer over the parameters of the model it is given.
        scheduler: ``scheduler(optimizer, steps)`` returns a learning-rate scheduler for a run of that length, advanced
            after every applied step; None: the rate stays.
        metric: the number that counts, computed from a trained model in eval mode without gradients, on fixed data;
            None: the task can be audited and replayed, not compared.
        metric_name: what `metric` returns, with its unit, such as "accuracy, %".
        higher_is_better: whether a larger metric is a better one.
        margin: how far the metric may lie from fp32's and still count as the same; fixed before anything is measured.
            In the metric's unit, or a fraction of fp32's metric if `relative_margin`. It comes with `metric`.
        relative_margin: whether `margin` is a fraction of the metric of fp32.
        steps: training steps of a full run.
        excerpt_steps: training steps of an excerpt (a few seconds).
        clip_norm: largest gradient norm, or None for no clipping.
        about: one line on model and data.

    Examples:
        >>> task = hs.Task(
        ...     name="classifier",
        ...     model=lambda: nn.Linear(8, 2),
        ...     batches=lambda seed, step: (torch.full((4, 8), float(step)), torch.zeros(4, dtype=torch.long)),
        ...     loss_fn=lambda model, x, y: F.cross_entropy(model(x), y),
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ... )
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, int], tuple[Any, ...]]
    loss_fn: Callable[..., Any]
    optimizer: Callable[[nn.Module], Optimizer]
    metric: Callable[[nn.Module], float] | None = None
    scheduler: Callable[[Optimizer, int], LRScheduler] | None = None
    metric_name: str = "loss"
    higher_is_better: bool = False
    margin: float | None = None
    relative_margin: bool = False
    steps: int = 500
    excerpt_steps: int = 100
    clip_norm: float | None = 1.0
    about: str = ""

    def __post_init__(self) -> None:
        kinds = {
            "name": Kind("a text that is not empty", lambda name: isinstance(name, str) and bool(name)),
            **dict.fromkeys(("model", "batches", "loss_fn", "optimizer"), FUNCTION),
            **dict.fromkeys(("metric", "scheduler"), FUNCTION | NONE),
            **dict.fromkeys(("metric_name", "about"), TEXT),
            **dict.fromkeys(("higher_is_better", "relative_margin"), FLAG),
            **dict.fromkeys(("steps", "excerpt_steps"), COUNT),
            **dict.fromkeys(("margin", "clip_norm"), POSITIVE | NONE),
        }
        where = f"task {self.name!r}" if isinstance(self.name, str) else "hs.Task"
        check(where, TaskError, **{field: (getattr(self, field), kind) for field, kind in kinds.items()})
        if (self.metric is None) != (self.margin is None):
            raise TaskError(f"task {self.name!r}: metric and margin go together; give both, or none")

    def batch_on(self, device: str, seed: int, step: int) -> tuple[Any, ...]:
        """Return a batch with its tensors on `device`."""
        batch = self.batches(seed, step)
        moved: tuple[Any, ...] = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
        return moved

    def measured(self, model: nn.Module) -> float:
        """Return the metric of `model`; TaskError if the task has none."""
        if self.metric is None:
            raise self._no_metric()
        return self.metric(model)

    def margin_around(self, reference: float) -> float:
        """Return how far a metric may lie from `reference`, fp32's, in its own unit; TaskError if there is none."""
        if self.margin is None:
            raise self._no_metric()
        return self.margin * abs(reference) if self.relative_margin else self.margin

    def _no_metric(self) -> TaskError:
        return TaskError(f"task {self.name!r} has no metric to compare by; give it metric= and margin=")


# ------------------------------------------------------------------ tasks and models by name

TASKS: Mapping[str, str] = {"lenet5": "images", "resnet": "images", "gpt": "gpt"}
"""Name of a task -> the module with its function NAME_task; imported when it is loaded."""


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks that come with halfstep."""
    return tuple(TASKS)


def load_task(name: str) -> Task:
    """Return the task called `name`, or the one that ``path/to/file.py:function`` returns; else TaskError."""
    task = _loaded(name, "task", "an hs.Task", Task)
    assert isinstance(task, Task)
    return task


def load_model(name: str) -> Task | nn.Module:
    """Return the task called `name`, or what ``path/to/file.py:function`` returns: an hs.Task or a model."""
    made = _loaded(name, "model", "an hs.Task or a torch.nn.Module", Task, nn.Module)
    assert isinstance(made, (Task, nn.Module))
    return made


def _loaded(name: str, what: str, returned: str, *kinds: type) -> object:
    """Return the task called `name`, or what a function in a file returns; `what`: what the user asked for."""
    path, colon, _ = name.rpartition(":")
    if colon and path.endswith(".py"):
        made = call_function(name)
        if not isinstance(made, kinds):
            raise TaskError(f"{name} must return {returned} and returned {type(made).__name__}")
        return made
    if name.endswith(".py"):
        raise TaskError(f"{what} {name!r} names no function; write {name}:function, one that returns {returned}")
    if name not in TASKS:
        raise TaskError(
            f"unknown task {name!r}{did_you_mean(name, TASKS)}; there are {', '.join(TASKS)} "
            f"and path/to/file.py:function, a function that returns {returned}"
        )
    return getattr(importlib.import_module(f"halfstep.tasks.{TASKS[name]}"), f"{name}_task")()


def call_function(name: str) -> object:
    """Return what the function at ``path/to/file.py:function`` returns; the file's folder stays first on `sys.path`."""
    text, _, function = name.rpartition(":")
    path = Path(text)
    if not path.is_file():
        raise TaskError(f"file {text!r} does not exist")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        # a name of its own if the file has that of a module, which it may import
        found = runpy.run_path(text, run_name=f"{path.stem}_" if path.stem in sys.modules else path.stem)
        make = found.get(function)
        if callable(make):
            made: object = make()
            return made
    except Exception as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename) == path:
                line = frame.lineno
        raise TaskError(f"{path}{f':{line}' if line else ''} raised {type(error).__name__}: {error}") from error
    names = [n for n, v in found.items() if callable(v) and not n.startswith("_")]
    raise TaskError(f"{path} has no function {function!r}{did_you_mean(function, names)}")
