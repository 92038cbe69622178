"""What a result says of the code that it was measured on, and how much of it has changed since.

python -m benchmarks.stamp FILE ...  # adds it to results that `halfstep` wrote, which knows no checkout
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["AGE", "ROOT", "commit", "stamped", "told", "write"]

ROOT = Path(__file__).resolve().parent.parent
DIRTY = "-dirty"
AGE = re.compile(r"; (?:\d+ commits? changed src|src is unchanged) since")
"""What every commit makes false: it is written anew by `make tables` and not compared by --check."""


def commit(root: Path = ROOT) -> str:
    """Return the commit of a checkout, with a mark if files differ from it; "" outside of one."""
    return _git(root, "describe", "--always", "--abbrev=10", f"--dirty={DIRTY}", "--exclude=*")


def stamped(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the commit measured, unless it names one, whether no file differed from it, and the day."""
    measured = report.get("commit") or commit()
    clean = bool(measured) and not measured.endswith(DIRTY)
    return {**report, "commit": measured, "clean": clean, "date": date.today().isoformat()}


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Write the report with its stamp, or print it."""
    text = json.dumps(stamped(report), indent=1)
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def told(*commits: str, root: Path = ROOT) -> str:
    """Return the sentence about the commits that a table was measured on: how many have changed src since."""
    known = sorted({name for name in commits if name})
    if not known:
        return "Measured before results named their commit."
    words = ", ".join(re.sub(f"{DIRTY}$", " with changes", name) for name in known)
    ages = [age for name in known if (age := _age(root, name.removesuffix(DIRTY))) is not None]
    if not ages:
        return f"Commit {words}."
    oldest = max(ages)
    since = f"{oldest} commit{'s' * (oldest > 1)} changed src" if oldest else "src is unchanged"
    return f"Commit {words}; {since} since."


@cache
def _age(root: Path, name: str) -> int | None:
    """Return how many commits after `name` have changed the package; None if this history does not have it."""
    counted = _git(root, "rev-list", "--count", f"{name}..HEAD", "--", "src/halfstep")
    return int(counted) if counted else None


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:]):
        write(given, json.loads(given.read_text(encoding="utf-8")))
