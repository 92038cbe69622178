"""Every public name of halfstep is used in the README, on a page or in an example."""

from __future__ import annotations

import re
from pathlib import Path

import halfstep as hs

ROOT = Path(__file__).parent.parent.parent
EXCEPT = ("decisions.md",)

UNDOCUMENTED = frozenset(
    {
        "Audit",
        "Cure",
        "HostStepResult",
        "Metrics",
        "PRESETS",
        "Plan",
        "StepMetrics",
        "StepResult",
        "Units",
        "Verdict",
        "map_tensors",
        "operator_of",
        "operators",
        "replay",
    }
)
"""Names found without a use when this test was written; each gets one, or leaves the top level."""


def unused(names: list[str], text: str) -> set[str]:
    """Return the names that are not used as ``hs.name`` in a text."""
    return {name for name in names if not re.search(rf"\bhs\.{name}\b", text)}


def test_every_public_name_is_used_in_docs() -> None:
    pages = [ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if p.name not in EXCEPT)]
    files = [*pages, *(ROOT / "examples").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert unused(hs.__all__, text) <= UNDOCUMENTED


def test_a_name_without_a_use_is_found() -> None:
    assert unused(["Policy", "Plan"], "hs.Policy.of('mixed') and a hs.Planner") == {"Plan"}
