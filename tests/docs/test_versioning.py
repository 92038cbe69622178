"""The page of versions names what is public, and the current version."""

from __future__ import annotations

import re
from pathlib import Path

import halfstep as hs
from tests.architecture.imports import PUBLIC

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "versioning.md"


def test_public_parts_and_the_version_are_the_codes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = re.search(r"- the names in `__all__` of (.*?);\n", text, re.DOTALL)
    assert listed
    named = {name.removeprefix("halfstep.").removeprefix("halfstep") for name in re.findall(r"`([\w.]+)`", listed[1])}
    assert named == PUBLIC | {"integrations", "compat"}
    assert f"The current version is {hs.__version__}" in text
