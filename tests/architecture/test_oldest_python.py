"""The package is written for its oldest Python, 3.10, whatever Python the tests run under."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src" / "halfstep"
OLDEST = (3, 10)

NEWER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "inspect": {"getmembers_static"},
    "itertools": {"batched"},
    "logging": {"getHandlerByName", "getHandlerNames", "getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "fma", "sumprod"},
    "operator": {"call"},
    "typing": {
        "LiteralString", "Never", "NotRequired", "ReadOnly", "Required", "Self", "TypeAliasType", "TypeIs",
        "TypeVarTuple", "Unpack", "assert_never", "assert_type", "clear_overloads", "dataclass_transform",
        "get_overloads", "override", "reveal_type",
    },
    "warnings": {"deprecated"},
}  # fmt: skip
"""Module -> names that Python has had since 3.11 or later (the "New in version" notes of its documentation)."""


def newer(text: str) -> set[str]:
    """Return the names that a source text takes from a later Python; SyntaxError if it is written in one."""
    nodes = list(ast.walk(ast.parse(text, feature_version=OLDEST)))
    used = {(n.value.id, n.attr) for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    taken = {(n.module, a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    return {f"{module}.{name}" for module, name in used | taken if name in NEWER.get(module or "", ())}


def test_no_file_needs_a_later_python() -> None:
    files = {path: newer(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    assert len(files) > 300
    assert {str(path.relative_to(SOURCE)): names for path, names in files.items() if names} == {}


def test_what_needs_a_later_python_is_found() -> None:
    assert newer("from typing import Any, Self") == {"typing.Self"}
    assert newer("import contextlib\nwith contextlib.chdir('x'): pass") == {"contextlib.chdir"}
    with pytest.raises(SyntaxError):
        newer("try: pass\nexcept* ValueError: pass")
