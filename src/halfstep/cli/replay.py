"""``halfstep replay``: a step that was not finite, from its evidence file."""

from pathlib import Path

import halfstep as hs
from halfstep.cli.terminal import STYLES, Files, console, say
from halfstep.tasks import Task, TaskError
from halfstep.tasks.task import load_model


def carry_out(file: Path, model: str, json: Path | None, sarif: Path | None, html: Path | None) -> int:
    """Run the command; return its exit code."""
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise TaskError(f"file {str(file)!r} {what}; expected a halfstep-blackbox-STEP.pt")
    task = load_model(model)
    if not isinstance(task, Task):
        raise TaskError(f"{model} returns a module, and a replay needs its loss function too: return an hs.Task")
    files = Files(json=json, sarif=sarif, html=html)
    verdict = hs.lens.replay(file, task)
    out = console()
    for line, style in verdict.lines():
        say(out, line, STYLES.get(style))
    files.write(out, json=verdict.to_json, sarif=verdict.to_sarif, html=verdict.save_html)
    return 0
