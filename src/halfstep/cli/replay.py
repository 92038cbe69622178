"""``halfstep replay``: a step that was not finite, from its evidence file."""

from __future__ import annotations

from pathlib import Path

import halfstep as hs
from halfstep.cli.terminal import complain, console, say
from halfstep.errors import HalfstepError
from halfstep.tasks import Task, TaskError
from halfstep.tasks.registry import load_model

__all__ = ["run_replay"]


def run_replay(file: Path, model: str) -> int:
    """Replay `file` on the task `model`, print the verdict, and return the exit code."""
    try:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise TaskError(f"file {str(file)!r} {what}; expected a halfstep-blackbox-STEP.pt")
        task = load_model(model)
        if not isinstance(task, Task):
            raise TaskError(f"{model} returns a module, and a replay needs its loss function too: return an hs.Task")
        verdict = hs.lens.replay(file, task)
    except HalfstepError as error:
        return complain(error)
    out = console()
    for line in str(verdict).splitlines():
        say(out, line)
    return 0
