"""Files for programs: JSON without nan, and SARIF 2.1.0, findings as editors and code hosts read them.

Source of SARIF: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SarifResult:
    """One finding."""

    rule: str  # its name
    level: str  # "error", "warning" or "note"
    text: str  # what was found; its first line is shown in lists
    file: str = ""  # its path; "" if it is in none
    line: int = 0  # from 1; 0 for the whole file


def sarif_log(rules: Mapping[str, str], page: str, results: Iterable[SarifResult]) -> dict[str, Any]:
    """Return a SARIF log of plain values; `page` is the page on a rule, in which ``{}`` stands for its name."""
    names = list(rules)
    described = [
        {"id": name, "shortDescription": {"text": rules[name]}, "help": {"text": f"See {page.format(name)}."}}
        for name in names
    ]
    found = [
        {
            "ruleId": result.rule,
            "ruleIndex": names.index(result.rule),
            "level": result.level,
            "message": {"text": result.text},
            "locations": [_location(result)] if result.file else [],
        }
        for result in results
    ]
    tool = {"driver": {"name": "halfstep", "rules": described}}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": tool, "results": found}]}


def _location(result: SarifResult) -> dict[str, Any]:
    """Return where a finding is; paths below the current folder are relative to it, as SARIF's readers expect."""
    path = Path(result.file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    uri = path.as_uri() if path.is_absolute() else path.as_posix()
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if result.line:
        place["region"] = {"startLine": result.line}
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
