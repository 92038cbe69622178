"""Journal: what a search has measured so far, in a JSON file, so that an interrupted search goes on where it was.

A search is a function of what it measures: run again, it asks for the same measurements in the same order, and the
journal answers those that it has. Floats that JSON lacks are written as Python's json does: NaN, Infinity.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from halfstep.advise.tune.result import TuneError
from halfstep.schema import Each, number, read_json

__all__ = ["Journal"]

VERSION = 1
MOST_BYTES = 1 << 26  # of a file: a race is a few KB
CONTENT = {"version": Any, "about": Any, "seconds": number(0.0), "entries": Each(str, Any)}


class Journal:
    """Measurements by key, written to a file after each.

    Args:
        path: the file; None: nothing is written.
        about: what the measurements belong to: task, weights, device, versions. A file about something else is refused.

    Raises:
        TuneError: the file cannot be read, or belongs to another task or machine.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.entries: dict[str, Any] = {}
        self.seconds = 0.0  # that measuring took before this process
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            values = read_json(path, TuneError, CONTENT, MOST_BYTES)
        except TuneError as error:
            raise TuneError(
                f"{str(path)!r} holds no measurements of a search ({error}); delete it, or search without resuming"
            ) from error
        version, about = values["version"], values["about"]
        self.entries, self.seconds = values["entries"], values["seconds"]
        wanted = json.loads(json.dumps(self.about))
        if version != VERSION or about != wanted:
            other = [key for key in wanted if about.get(key) != wanted[key]] if isinstance(about, dict) else []
            differs = "; ".join(f"{key}: {about.get(key)!r} there, {wanted[key]!r} here" for key in other)
            raise TuneError(
                f"{str(path)!r} belongs to another search ({differs or f'version {version}'}); delete it, or "
                "search without resuming"
            )

    def keep(self, key: str, value: Any) -> None:
        """Keep a value and write the file; a kill leaves the last one whole."""
        self.entries[key] = value
        if self.path is None:
            return
        text = json.dumps(
            {"version": VERSION, "about": self.about, "seconds": self.seconds, "entries": self.entries}, indent=1
        )
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self.path)
