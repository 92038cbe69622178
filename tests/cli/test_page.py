from __future__ import annotations

import datetime
import math
from typing import Any

import halfstep as hs
from halfstep.cli.comparison import comparison_page
from halfstep.report import BarChart, Document, DotChart, Figure, Gallery, LineChart, Table, render
from halfstep.tasks import machine
from halfstep.tasks.compare import Comparison
from tests.cli.small_comparison import FAST, SAME, comparison, row
from tests.report.reader import Page

SAFE = (97.0, 97.1, 96.9, 97.0, 97.0)
DAY = datetime.date(2026, 11, 21)


def page(*comparisons: Comparison, **changes: Any) -> Document:
    options: dict[str, Any] = {"about": machine(), "command": "halfstep compare", "day": DAY}
    return comparison_page(comparisons, **{**options, **changes})


def figures(document: Document, section: int = 0) -> list[Figure]:
    return [f for b in document.sections[section].blocks if isinstance(b, Gallery) for f in b.figures]


def tables(document: Document, section: int = 0) -> list[Table]:
    return [b for b in document.sections[section].blocks if isinstance(b, Table)]


def test_a_page_has_a_section_a_task_and_says_where_it_was_measured() -> None:
    document = page(comparison(5), comparison(5, task="other"))
    assert [s.heading for s in document.sections] == [
        "At a glance", "toy", "other", "The policies", "How it was measured",
    ]  # fmt: skip
    assert document.title == "halfstep compare: toy, other"
    assert "2026-11-21" in document.lead and machine()["torch"] in document.lead and hs.__version__ in document.lead
    (glance,) = tables(document)
    assert [c.text for c in glance.rows[1]] == ["O2 fp16", "worse", "0.700", "worse", "0.700"]
    assert glance.rows[1][1].tone == "bad"
    assert [s.heading for s in page(comparison(5)).sections][0] == "toy"  # one task needs no overview


def test_the_pictures_show_what_the_rows_say() -> None:
    result, time, state, saved, loss, apart = figures(page(comparison(5)))
    assert isinstance(result.chart, DotChart) and result.chart.margin == 1.0
    assert [d.mark for d in result.chart.dots] == ["full", "full", "cross"]
    assert (result.chart.dots[2].value, result.chart.dots[2].text) == (-7.0, "−7.00 worse")
    assert isinstance(time.chart, BarChart) and time.chart.line == 1.0 and time.chart.band == (0.99, 1.012)
    assert [b.text for b in time.chart.bars] == ["undecided (1.008)", "reference", "0.700"]
    assert (time.chart.bars[2].low, time.chart.bars[2].high) == (0.69, 0.71)
    assert isinstance(state.chart, BarChart) and [b.value for b in state.chart.bars] == [2.5, 2.5, 2.5]
    assert isinstance(saved.chart, BarChart) and saved.chart.x_label == "kB"
    assert isinstance(loss.chart, LineChart) and loss.chart.series[0].y == (2.0, 1.0)
    assert loss.chart.series[2].marks == (1.0, 2.0, 3.0, 4.0)  # steps are counted from 1 where people read them
    assert isinstance(apart.chart, LineChart) and [s.label for s in apart.chart.series] == ["torch.amp bf16", "O2 fp16"]
    assert apart.chart.series[0].y == (0.0, 0.0)


def test_a_policy_looks_the_same_in_every_picture_and_its_second_format_is_paler() -> None:
    rows = (row("O2 bf16", SAFE, FAST, FAST), row("O2 fp16", SAFE, FAST, FAST), row("careful", SAFE, FAST, FAST))
    looks = []
    for figure in figures(page(comparison(5, *rows))):
        chart = figure.chart
        assert isinstance(chart, DotChart | BarChart | LineChart)
        parts = (
            chart.dots if isinstance(chart, DotChart) else chart.bars if isinstance(chart, BarChart) else chart.series
        )
        looks.append([(p.label, p.key.colour, p.key.light) for p in parts][-4:])
    assert all(look == looks[0] for look in looks)
    assert looks[0] == [
        ("torch.amp bf16", 1, False),
        ("O2 bf16", 2, False),
        ("O2 fp16", 2, True),
        ("careful", 3, False),
    ]


def test_few_seeds_and_unrepeatable_runs_are_not_passed_over() -> None:
    text = " ".join(Page(render(page(comparison(3, repeatable=False)))).texts)
    assert "An indication, not a verdict: 3 runs of each policy. A verdict takes 5." in text
    assert "did not end with the same result" in text and "100 steps, 3 seeds, on cpu; same weights" in text
    sure = " ".join(Page(render(page(comparison(5)))).texts)
    assert "An indication" not in sure and "did not end" not in sure


def test_what_was_not_measured_or_not_finite_is_left_out() -> None:
    lost = row("lost", (math.nan,), None, None, losses=(math.nan, math.nan), milliseconds=math.nan)
    rows = (row("fp32", (97.0,), None, None, milliseconds=math.nan), row("torch.amp bf16", (97.0,), None, None), lost)
    document = page(comparison(1, rows=rows, control=None))
    assert [type(f.chart) for f in figures(document)] == [DotChart, BarChart, BarChart, LineChart, LineChart]
    rendered = Page(render(document))
    assert rendered.problems == [] and not any("nan" in text.split() for text in rendered.texts)
    assert "not finite" in rendered.texts and "diverged" in rendered.texts


def test_every_policy_can_be_copied_out_of_the_page() -> None:
    policy = hs.Policy.of("mixed", dtype="bf16").with_ops(fp32=["softmax"])
    rows = (row("mixed bf16", SAFE, FAST, FAST, policy=policy.to_toml()),)
    texts = Page(render(page(comparison(5, *rows)))).texts
    (toml,) = (text for text in texts if text.startswith("name = "))
    assert hs.Policy.from_toml(toml) == policy


def test_names_are_text() -> None:
    strange = comparison(5, row("<i>&$x$ bf16", SAFE, SAME, SAME), task="<b>&", about="<script>", metric='"loss"')
    rendered = Page(render(page(strange, command="halfstep compare --task '<b>&'")))
    assert rendered.problems == [] and rendered.fetches() == []
    assert "<b>&" in rendered.texts and "halfstep compare --task '<b>&'" in rendered.texts
    assert rendered.all("b") == [] and rendered.all("i") == []


def test_all_pictures_have_words_with_numbers() -> None:
    alts = [p["aria-label"] for p in Page(render(page(comparison(5)))).pictures()]
    assert len(alts) == 6
    assert alts[0] == (
        "Difference of accuracy, % from fp32, margin ±1: "
        "fp32 reference, 97.00; torch.amp bf16 0.00 within the margin; O2 fp16 −7.00 worse."
    )
    assert alts[1].startswith("Time of a step over that of torch.amp bf16: fp32 undecided (1.008);")
