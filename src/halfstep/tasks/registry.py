"""The tasks and models that the command line loads: three tasks by name, and functions ``path/to/file.py:function``."""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from halfstep.errors import TaskError, did_you_mean
from halfstep.tasks.task import Task

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
