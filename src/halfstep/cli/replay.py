"""``halfstep replay``: a step that was not finite, from its evidence file."""

from __future__ import annotations

from pathlib import Path

import halfstep as hs
from halfstep.cli.terminal import complain, console, say, writable
from halfstep.errors import HalfstepError
from halfstep.report import require_extra
from halfstep.tasks import Task, TaskError
from halfstep.tasks.registry import load_model

__all__ = ["run_replay"]

STYLES = {"title": "bold", "bad": "red", "good": "green", "dim": "dim"}


def run_replay(
    file: Path, model: str, *, json_path: Path | None, sarif_path: Path | None, html_path: Path | None
) -> int:
    """Replay `file` on the task `model`, print and write the verdict, and return the exit code."""
    try:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise TaskError(f"file {str(file)!r} {what}; expected a halfstep-blackbox-STEP.pt")
        task = load_model(model)
        if not isinstance(task, Task):
            raise TaskError(f"{model} returns a module, and a replay needs its loss function too: return an hs.Task")
        writable(json_path)
        writable(sarif_path, "--sarif")
        if html_path is not None:
            require_extra("--html")
            writable(html_path, "--html")
        verdict = hs.lens.replay(file, task)
    except HalfstepError as error:
        return complain(error)
    out = console()
    for line, style in verdict.lines():
        say(out, line, STYLES.get(style))
    for path, write in ((json_path, verdict.to_json), (sarif_path, verdict.to_sarif), (html_path, verdict.save_html)):
        if path is not None:
            write(path)
            say(out, f"written: {path}")
    return 0
