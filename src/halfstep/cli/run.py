"""halfstep run: run a script that imports Apex, unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from halfstep.compat import apex

__all__ = ["run_script"]

SHIM = str(Path(apex.__file__).parent / "shim")
"""A folder with a package `apex` for processes that the script starts."""


def run_script(script: Path, args: Sequence[str], *, force: bool = False) -> int:
    """Run `script` as Python would, with halfstep's Apex under the name ``apex``; return the exit status.

    Processes that it starts (workers, `torch.multiprocessing.spawn`) find it too, on their path.
    """
    if not script.is_file():
        print(f"halfstep run: there is no file {str(script)!r}", file=sys.stderr)
        return 2
    argv, path = sys.argv, list(sys.path)
    children = os.environ.get("PYTHONPATH")
    sys.argv, sys.path[:0] = [str(script), *args], [str(script.resolve().parent)]
    if apex.install(force=force):
        sys.path.insert(1, SHIM)
        os.environ["PYTHONPATH"] = os.pathsep.join([SHIM, *([children] if children else [])])
    else:
        print("halfstep run: an apex with amp is installed and is used; --force takes halfstep's", file=sys.stderr)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
        if children is not None:
            os.environ["PYTHONPATH"] = children
        else:
            os.environ.pop("PYTHONPATH", None)
    return 0
