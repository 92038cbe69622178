"""Verdicts in words: the headline, the report, JSON, SARIF and the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfstep as hs
from halfstep.lens.verdict import BETWEEN, CAUSES, KINDS, WIDTH, Cure, Magnitude, Verdict

PAGES = Path(__file__).resolve().parents[2] / "docs" / "verdicts"


def row(**changed: Any) -> Magnitude:
    values = {"op": "linear", "module": "0", "line": "train.py:7 x", "phase": "forward", "dtype": "float16"}
    return Magnitude(**{**values, "largest": 300.0, "limit": 65504.0, "finite": True, **changed})


VERDICT = Verdict(
    kind="overflow",
    cause="precision",
    because="in fp32 the same steps are finite and train",
    sure="shown",
    op="matmul",
    module="blocks.1.attn",
    phase="forward",
    line="train.py:12 logits = q @ k.mT",
    file="/somewhere/train.py",
    dtypes=("float16", "float16"),
    shapes=((2, 8, 16), (2, 16, 8)),
    value=787.5,
    limit=65504.0,
    step=812,
    cures=(
        Cure(
            policy=hs.Policy.of("mixed"),
            text="matmul in fp32: policy.with_ops(fp32=['matmul'])\nin TOML:\nops = []",
            verified=True,
            outcome="trained 12 steps",
        ),
        Cure(policy=None, text="scale queries down; it is the usual way", verified=False),
    ),
    notes=("one", "two"),
    story=(row(), row(op="matmul", module="blocks.1.attn", largest=787.5, finite=False)),
    history=((810, 2.0, 1.0), (811, float("inf"), 3.0)),
)


def test_a_headline_has_what_where_and_what_to_do() -> None:
    assert VERDICT.headline == (
        "step 812: overflow of float16, largest input 787.5 | matmul in blocks.1.attn, forward, train.py:12 | "
        "matmul in fp32 (verified)"
    )


WORDS = st.text("abc defgh.:;|", max_size=300)


@given(
    kind=st.sampled_from(list(KINDS)),
    cause=st.sampled_from(["", *CAUSES]),
    words=st.lists(WORDS, min_size=7, max_size=7),
    rank=st.integers(0, 10**6),
)  # fmt: skip
def test_a_headline_is_one_line_of_bounded_length(kind: str, cause: str, words: list[str], rank: int) -> None:
    because, op, module, line, parameter, detail, advice = words
    verdict = Verdict(
        kind=kind, cause=cause, because=because, op=op, module=module, line=line, parameter=parameter, detail=detail,
        rank=rank, step=10**9, phase="backward", cures=(Cure(policy=None, text=advice or "x", verified=False),),
    )  # fmt: skip
    assert len(verdict.headline) <= WIDTH and "\n" not in verdict.headline
    assert verdict.headline.startswith(f"step {10**9}") and str(verdict)


def test_a_long_part_leaves_the_others_whole() -> None:
    verdict = Verdict(kind="overflow", op="m" * 300, module="x" * 99, phase="forward", line="a.py:1 x", limit=65504.0)
    what, where = verdict.headline.split(BETWEEN)
    assert what == "step 0: overflow of float16, largest input 0" and where.endswith("...")
    named = dataclasses.replace(verdict, op="matmul", module="model.layers." + 9 * "deep." + "attn")
    assert named.where == "matmul in ...ep.deep.deep.deep.deep.attn, forward, a.py:1"


def test_the_report_tells_cause_place_numbers_and_cures_in_this_order() -> None:
    lines = str(VERDICT).splitlines()
    first = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert first == ["cause", "place", "inputs", "story", "cure", "do", "notes", "read"]
    assert "            verified: trained 12 steps" in lines
    table = lines[lines.index(next(line for line in lines if "story" in line)) :][:3]
    assert len({line.index("float16") for line in table[1:]}) == 1 and "not finite" in table[2]


def test_json_is_strict_and_has_every_field(tmp_path: Path) -> None:
    text = VERDICT.to_json(tmp_path / "verdict.json")
    assert (tmp_path / "verdict.json").read_text() == text
    read = json.loads(text, parse_constant=pytest.fail)
    assert read["history"] == [[810, 2.0, 1.0], [811, None, 3.0]]
    assert read["cures"][0]["policy"] == hs.Policy.of("mixed").to_toml() and read["cures"][1]["policy"] is None
    assert set(Verdict.__dataclass_fields__) <= set(read)


def test_sarif_points_at_the_line(tmp_path: Path) -> None:
    (run,) = json.loads(VERDICT.to_sarif(tmp_path / "verdict.sarif"))["runs"]
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "precision"
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "file:///somewhere/train.py"}, "region": {"startLine": 12}}
    (run,) = json.loads(Verdict(kind="not_reproducible").to_sarif())["runs"]
    assert run["results"][0]["locations"] == [] and run["results"][0]["level"] == "warning"


def test_the_page_shows_cause_place_cure_and_pictures(tmp_path: Path) -> None:
    VERDICT.save_html(tmp_path / "verdict.html")
    page = (tmp_path / "verdict.html").read_text()
    for text in ("precision (shown)", "matmul in blocks.1.attn, forward, train.py:12", "trained 12 steps", "magnitude"):
        assert text in page
    assert page.count("<svg role") == 2  # magnitudes and norms; one finite loss draws no curve


def test_every_cause_has_its_page() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*CAUSES, "unknown"}
    assert Verdict(kind="overflow").page == "halfstep explain unknown"
