"""The page of a search: its sentences, its points, and what it makes of a search without result."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

import halfstep as hs
from halfstep.advise.tune.proof import Proof
from halfstep.advise.tune.result import Change, Tried, Tuning, tuning_page
from halfstep.report import Code, Facts, Figure, Gallery, Note, Paragraph, PointChart, Table, render
from halfstep.tasks.measure import difference
from halfstep.timing import Ratio
from tests.report.reader import Page

FP32 = (1.0, 1.1, 0.9, 1.05, 0.95)
OWN = (1.01, 1.1, 0.91, 1.05, 0.96)
RULE = Change(field="ops", pattern="matmul", value="fp32", why="local error 2e-3, 0.4 bits of headroom; costs 0.3 ms")


def ratio(median: float) -> Ratio:
    return Ratio(median=median, low=0.99 * median, high=1.01 * median, rounds=30)


def tried(label: str, time: float | None, rise: float, verdict: str, **more: Any) -> Tried:
    return Tried(
        label=label, policy=hs.Policy.of("mixed", dtype="bf16"), preset=label.split()[0],
        time=None if time is None else ratio(time), milliseconds=math.nan if time is None else 10 * time,
        state_bytes=1000, saved_bytes=3000, error=0.01, loss_rise=rise, verdict=verdict, reason=f"why {label}", **more,
    )  # fmt: skip


ALL = (
    tried("fp32", 1.0, 0.0, "within"),
    tried("mixed bf16", 0.5, 0.4, "worse"),
    tried("mixed fp16", 1.2, math.inf, "failed"),
    tried("O2 bf16", 1.5, math.nan, "slower"),
    tried("mixed bf16 + matmul fp32", 0.6, 0.001, "chosen", changes=(RULE,)),
)


def proof(verdict: str = "equivalent", **changes: Any) -> Proof:
    made = Proof(
        verdict=verdict, reason="loss minus fp32's: +0.006", measure="loss", higher_is_better=False, margin=0.05,
        margin_from="the task's own margin", difference=difference(OWN, FP32, 0.05, higher=False), fp32=FP32,
        values=OWN, seeds_more=0, seconds_more=0.0, steps=3, loss_steps=(1.0, 2.0, 3.0), fp32_losses=(3.0, 2.0, 1.0),
        losses=(3.0, 2.1, 1.01), skipped=(0,) * 5,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def tuning(**changes: Any) -> Tuning:
    machine = {"cpu": "a CPU", "cores": 2, "accelerator": "", "torch": "2.13", "torch_threads": 1}
    made = Tuning(
        task="<points>", chosen=ALL[-1], tried=ALL, target="time", bound=0.01, bound_from="max_loss_rise",
        proof=proof(), proofs=(("mixed bf16 + matmul fp32", proof()),), control=ratio(1.0), steps=3, seed=0,
        device="cpu", machine=machine, command="halfstep tune train.py:task -o policy.toml",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def blocks(made: Tuning, kind: type) -> list[Any]:
    found: list[Any] = []
    waiting = [block for section in tuning_page(made).sections for block in section.blocks]
    while waiting:
        block = waiting.pop(0)
        found += [block] if isinstance(block, kind) else []
        waiting += getattr(block, "blocks", ())
        waiting += getattr(block, "figures", ())
    return found


def test_the_conclusion_comes_first_in_sentences() -> None:
    words = blocks(tuning(), Paragraph)[0].text
    assert words == (
        "Train with mixed bf16 + matmul fp32: it takes 0.60 of fp32's time for a step and 1.00 of its memory. Why "
        "mixed bf16 + matmul fp32. It trains as fp32 does: loss minus fp32's: +0.006."
    )
    assert [fact.heading for fact in blocks(tuning(), Facts)[0].facts] == ["Time of a step", "Memory", "Beside fp32"]


@pytest.mark.parametrize(
    ("verdict", "words", "tone"),
    [
        ("better", "It ends better than fp32", "good"),
        ("worse", "It ends worse than fp32", "bad"),
        ("diverged", "Its training failed", "bad"),
        ("undecided", "is undecided", "open"),
    ],
)
def test_each_verdict_has_its_sentence(verdict: str, words: str, tone: str) -> None:
    made = tuning(proof=proof(verdict))
    assert words in blocks(made, Paragraph)[0].text
    assert blocks(made, Facts)[0].facts[-1].tone == tone


def test_a_search_that_was_cut_off_and_tested_nothing_does_not_sound_certain() -> None:
    made = tuning(proof=None, proofs=(), finished=False, notes=("the time was too short",))
    assert "did not come to its end" in blocks(made, Note)[0].text
    assert "was not tested" in blocks(made, Paragraph)[1].text
    assert blocks(made, Facts)[0].facts[-1].text == "not tested"
    page = render(tuning_page(made))
    assert "The time was too short." in page and "Training loss" not in page


def test_fp32_that_was_chosen_is_no_policy_to_train_with() -> None:
    safe = dataclasses.replace(ALL[0], label="O0", preset="O0")
    made = tuning(chosen=safe, tried=(*ALL[:3], safe), proof=None, proofs=())
    assert blocks(made, Paragraph)[0].text.startswith("Stay with fp32")
    assert blocks(made, Facts)[0].facts[-1].text == "fp32"


def test_every_candidate_is_a_point_the_chosen_one_is_marked_and_the_bound_a_line() -> None:
    time, memory = (f.chart for f in blocks(tuning(), Figure) if isinstance(f.chart, PointChart))
    assert {p.label for p in time.points} == {t.label for t in ALL if not math.isnan(t.loss_rise)}
    assert [p.label for p in time.points if p.mark == "chosen"] == ["mixed bf16 + matmul fp32"]
    assert {p.label: p.mark for p in time.points}["mixed fp16"] == "cross"
    assert time.limit == pytest.approx(1.0) and time.limit_label == "bound"
    assert time.front == ((0.5, 40.0), (0.6, 0.1), (1.0, 0.0))
    assert {p.x for p in memory.points} == {1.0}


def test_what_was_tried_is_a_table_with_reasons_and_the_exceptions_too() -> None:
    exceptions, tables = blocks(tuning(), Table)[0], blocks(tuning(), Table)
    assert [cell.text for cell in exceptions.rows[0]] == [
        "matmul fp32", "Local error 2e-3, 0.4 bits of headroom; costs 0.3 ms.",
    ]  # fmt: skip
    (table,) = (t for t in tables if t.headers[0] == "candidate")
    assert [row[0].text for row in table.rows] == [t.label for t in ALL]
    assert table.rows[2][4].text == "not finite" and table.rows[3][4].text == ""
    assert all(row[-1].text == f"Why {row[0].text}." for row in table.rows)


def test_the_policy_can_be_copied_and_read_back() -> None:
    text = blocks(tuning(), Code)[1].text
    assert hs.Policy.from_toml(text) == ALL[-1].policy
    assert "compile=True" in blocks(tuning(chosen=dataclasses.replace(ALL[-1], compile=True)), Code)[0].text


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = render(tuning_page(tuning()))
    page = Page(text)
    assert not page.problems and "<points>" not in text and "halfstep tune: &lt;points&gt;" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert len(blocks(tuning(), Gallery)) == 2


def test_candidates_without_time_bytes_or_loss_are_left_out_of_the_pictures() -> None:
    nothing = Tried(label="fp32", policy=hs.Policy.of("O0"), preset="fp32")
    made = tuning(chosen=nothing, tried=(nothing,), proof=None, proofs=(), control=None)
    assert not [f for f in blocks(made, Figure) if isinstance(f.chart, PointChart)]
    render(tuning_page(made))


def test_a_proof_without_a_pair_has_no_pictures() -> None:
    bare = proof("undecided", difference=None, values=(), losses=(), skipped=(), margin=math.nan, margin_from="",
                 seeds_more=5, seconds_more=math.nan)  # fmt: skip
    text = render(tuning_page(tuning(proof=bare, proofs=(("mixed bf16 + matmul fp32", bare),))))
    assert "undecided" in text and "nan" not in Page(text).texts
