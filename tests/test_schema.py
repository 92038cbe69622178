"""Schemas: the path, what was there, and what was expected, of the first mistake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from halfstep.arguments import Kind, number, whole
from halfstep.errors import CheckpointError
from halfstep.schema import Each, check, read_json, regular, text

TABLE = {
    "step": whole(of="updates"),
    "name?": (str, None),
    "files": Each(text("[a-z]+", "a lower-case name"), {"bytes": whole(0, 9), "sum": text("[0-9a-f]{4}", "4 digits")}),
    "pair": [number(), bool],
    "many": [(float, Tensor), ...],
    "open": {"a": int, ...: str},
    "any": Any,
}


def good() -> dict[str, Any]:
    return {
        "step": 3,
        "files": {"a": {"bytes": 1, "sum": "00ff"}},
        "pair": (1.5, True),
        "many": [1, 2.5, torch.ones(1)],
        "open": {"a": 1, "b c": "x"},
        "any": object(),
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    found = good()
    *way, last = path.split("/")
    place: Any = found
    for key in way:
        place = place[key]
    place[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("step", -1, "f.step: -1, expected a whole number of updates from 0"),
        ("step", True, "f.step: True, expected"),
        ("step", 1.0, "f.step: 1.0, expected"),
        ("step", 2**63, "f.step: 9223372036854775808, expected"),
        ("step", 10**5000, "f.step: a number of 16610 bits, expected"),
        ("name", 1, "f.name: 1, expected text or None"),
        ("nam", "x", "f: 'nam' is unknown; did you mean 'name'?"),
        (3, "x", "f: 3 is unknown"),
        ("files", [], "f.files: a list of 0, expected a dict"),
        ("files/B", {}, "f.files: the key 'B': 'B', expected a lower-case name"),
        ("files/a", {"bytes": 1}, "f.files.a: 'sum' is missing"),
        ("files/a/bytes", 10, "f.files.a.bytes: 10, expected a whole number from 0 to 9"),
        ("files/a/sum", "00FF", "f.files.a.sum: '00FF', expected 4 digits"),
        ("pair", [1.5], "f.pair: a list of 1, expected a list of 2"),
        ("pair", [float("nan"), True], "f.pair[0]: nan, expected a finite number"),
        ("pair", [10**400, True], "f.pair[0]: a number of 1329 bits, expected a finite number"),
        ("pair", [1, 1], "f.pair[1]: 1, expected True or False"),
        ("many", [1, "x"], "f.many[1]: 'x', expected a number or a Tensor"),
        ("open/d e", 1, "f.open['d e']: 1, expected text"),
        ("open", {}, "f.open: 'a' is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_first_mistake_is_named(path: Any, value: Any, expected: str) -> None:
    wrong = good() | {path: value} if isinstance(path, int) else changed(path, value)
    with pytest.raises(CheckpointError) as raised:
        check(wrong, TABLE, "f", CheckpointError)
    assert str(raised.value).startswith(expected) and str(raised.value).endswith("; nothing was loaded")


def test_what_fits_is_accepted() -> None:
    check(good(), TABLE, "f", CheckpointError)
    check(changed("step", numpy.int64(3)), TABLE, "f", CheckpointError)
    check(changed("name", None), TABLE, "f", CheckpointError)
    check(float("inf"), number(finite=False), "f", CheckpointError)
    check("x", Kind("an x", lambda value: value == "x"), "f", CheckpointError)


def test_of_several_containers_the_mistake_inside_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"f\.a: 1, expected text"):
        check({"a": 1}, (None, {"a": str}), "f", CheckpointError)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert regular(tmp_path / "file", CheckpointError) == 4
    for path, words in {
        tmp_path / "pipe": "is a pipe or a device",
        tmp_path / "link": "is a link",
        tmp_path: "is a folder",
        tmp_path / "none": "cannot be read",
        tmp_path / "n\0ne": "cannot be read",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            regular(path, CheckpointError)
    with pytest.raises(CheckpointError, match="has 4 bytes, and at most 3 are expected"):
        regular(tmp_path / "file", CheckpointError, 3)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100000, b"1" * 5000, b""])
def test_what_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="f.json"):
        read_json(tmp_path / "f.json", CheckpointError, {"a": int}, 1 << 20)
    (tmp_path / "f.json").write_text('{"a": 1}', encoding="utf-8")
    assert read_json(tmp_path / "f.json", CheckpointError, {"a": int}, 1 << 20) == {"a": 1}
