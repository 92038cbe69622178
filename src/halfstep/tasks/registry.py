"""Which tasks there are: three by name, and anybody's own as ``path/to/file.py:function``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from halfstep.errors import did_you_mean
from halfstep.tasks.task import Task, TaskError

__all__ = ["load_task", "task_names"]


def _lenet5() -> Task:
    from halfstep.tasks.lenet import lenet5_task

    return lenet5_task()


def _resnet() -> Task:
    from halfstep.tasks.resnet import resnet_task

    return resnet_task()


def _gpt() -> Task:
    from halfstep.tasks.gpt import gpt_task

    return gpt_task()


TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType({"lenet5": _lenet5, "resnet": _resnet, "gpt": _gpt})


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks that come with halfstep."""
    return tuple(TASKS)


def load_task(name: str) -> Task:
    """Return the task called `name`, or the one that ``path/to/file.py:function`` returns.

    Raises:
        TaskError: no such task, file or function, its data is not installed, or the function returns something else.
    """
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), function)
    if name not in TASKS:
        raise TaskError(
            f"unknown task {name!r}{did_you_mean(name, TASKS)}; there are {', '.join(TASKS)} "
            "and path/to/file.py:function, a function that returns an hs.Task"
        )
    return TASKS[name]()


def _from_file(path: Path, function: str) -> Task:
    if not path.is_file():
        raise TaskError(f"task file {str(path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a .py suffix always finds the source loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise TaskError(f"{path} has no function {function!r}{did_you_mean(function, names)}")
    task = make()
    if not isinstance(task, Task):
        raise TaskError(f"{path}:{function} must return an hs.Task and returned {type(task).__name__}")
    return task
