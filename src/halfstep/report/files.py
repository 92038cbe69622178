"""Files for programs: JSON without nan, and SARIF 2.1.0, findings as editors and code hosts read them.

Source of SARIF: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_log(rules: Mapping[str, str], page: str, results: Iterable[tuple[str, str, str, str, int]]) -> dict[str, Any]:
    """Return a SARIF log of plain values.

    Args:
        rules: name -> title.
        page: the page on a rule, in which ``{}`` stands for its name.
        results: (rule, level, text, file, line) of each finding. Its level is "error", "warning" or "note"; the first
            line of its text is shown in lists; "" for no file, 0 for no line.
    """
    names = list(rules)
    described = [
        {"id": name, "shortDescription": {"text": rules[name]}, "help": {"text": f"See {page.format(name)}."}}
        for name in names
    ]
    found = [
        {
            "ruleId": rule,
            "ruleIndex": names.index(rule),
            "level": level,
            "message": {"text": text},
            "locations": [_location(file, line)] if file else [],
        }
        for rule, level, text, file, line in results
    ]
    tool = {"driver": {"name": "halfstep", "rules": described}}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": tool, "results": found}]}


def _location(file: str, line: int) -> dict[str, Any]:
    """Return where a finding is; paths below the current folder are relative to it, as SARIF's readers expect."""
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    uri = path.as_uri() if path.is_absolute() else path.as_posix()
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line:
        place["region"] = {"startLine": line}
    return {"physicalLocation": place}


def strict_json(value: Any, path: str | Path | None = None) -> str:
    """Return what `plain` makes of a value as JSON, nan and inf as null; also write it to `path`, if given."""
    text = json.dumps(plain(value, finite=True), indent=1) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def plain(value: Any, *, finite: bool = False) -> Any:
    """Return dataclasses as dicts, policies as TOML, tuples as lists, all they hold too; `finite`: nan, inf as None."""
    if hasattr(value, "to_toml") and not hasattr(value, "record"):  # a policy, without an import of torch
        return value.to_toml()
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, finite=finite) for item in value]
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value
