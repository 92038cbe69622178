"""halfstep run: run a script that imports Apex, unchanged."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from halfstep.compat import apex

__all__ = ["run_script"]


def run_script(script: Path, args: Sequence[str], *, force: bool = False) -> int:
    """Run `script` as Python would, with halfstep's Apex under the name ``apex``; return the exit status.

    Args:
        script: path of a Python file.
        args: its arguments.
        force: take the place of an installed apex that has amp.
    """
    if not script.is_file():
        print(f"halfstep run: there is no file {str(script)!r}", file=sys.stderr)
        return 2
    if not apex.install(force=force):
        print("halfstep run: an apex with amp is installed and is used; --force takes halfstep's", file=sys.stderr)
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *args], [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0
