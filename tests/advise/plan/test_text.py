"""What is said and drawn of a plan: sentences, tables, the drawing of the peak, the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halfstep.advise.plan import PARTS, Largest, MemoryPlan, Moment, Row, fit_of
from halfstep.advise.plan.memory import (
    LETTERS,
    drawing,
    figure,
    gpus_line,
    module_table,
    part_table,
    plan_page,
    preset_table,
    sent_table,
    verdict,
)
from halfstep.report import render
from tests.advise.plan.plans import GIB, made


def fitted(peak: float, gpu: str = "a100-80", **fields: Any) -> MemoryPlan:
    plan = made(peak, **fields)
    return made(peak, fit=fit_of(plan, gpu), **fields)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (fitted(40.0), "fits an a100-80 with 38.5 GiB to spare: peak 40.0 GiB of 78.5 GiB"),
        (fitted(75.0), "undecided for an a100-80: peak 75.0 GiB of 78.5 GiB, and a plan may be 10 % off"),
        (fitted(90.0, "t4"), "does not fit a t4: peak 90.0 GiB, and 14.0 GiB can be allocated"),
        (
            fitted(40.0, devices=8, shard="fsdp2", largest=Largest(batch=16, need=GIB, plans=3, proved=True)),
            "fits an a100-80 with 38.5 GiB to spare on each of 8 devices: peak 40.0 GiB of 78.5 GiB; largest batch 16",
        ),
        (
            fitted(90.0, "t4", largest=Largest(batch=0, need=0, plans=2, proved=True)),
            "does not fit a t4: peak 90.0 GiB, and 14.0 GiB can be allocated; no batch fits",
        ),
        (made(40.0), "needs 40.0 GiB at its peak and 1.00 GiB between steps"),
        (fitted(4.0, first_peak=60 * GIB), "fits an a100-80 with 18.5 GiB to spare: peak in the first step 60.0 GiB "
         "of 78.5 GiB"),
    ],
)  # fmt: skip
def test_the_answer_is_one_sentence(plan: MemoryPlan, text: str) -> None:
    assert verdict(plan) == text


def test_a_plan_without_a_gpu_names_those_it_fits() -> None:
    assert gpus_line(made(40.0)).startswith(
        "fits: h200, h100, a100-80, mi300x; undecided: a100-40, l40s; does not fit: 5090"
    )


def test_parts_and_modules_add_up() -> None:
    plan = made(9.0)
    assert part_table(plan).texts()[1:] == [
        ("parameters", "1.00 GiB", "1.00 GiB", "11 %"),
        ("saved for backward", "0 B", "8.00 GiB", "89 %"),
        ("together", "1.00 GiB", "9.00 GiB", ""),
    ]
    assert module_table(plan, 5).texts()[1:] == [
        ("blocks.*.up", "2", "saved for backward 8.00 GiB", "9.00 GiB", "100 %")
    ]
    assert preset_table([plan, fitted(75.0)]).texts()[2][-2:] == ("undecided", "")
    assert sent_table(()).rows == ()


def test_the_drawing_has_the_phases_the_peak_and_a_letter_for_each_part() -> None:
    assert set(LETTERS) == set(PARTS) and len(set(LETTERS.values())) == len(PARTS)
    lines = drawing(made(9.0), height=9)
    assert lines[0] == "  9.00 GiB |  S"
    assert lines[8] == "           |PPPPP" and lines[7] == "           |SSSS"
    assert lines[9:] == [
        "         0 +-----",
        "            f b update",
        "              ^ peak: backward, mm of blocks.1.up",
        "            P parameters, S saved for backward",
    ]


def test_the_highest_column_survives_when_a_step_is_long() -> None:
    short = made(9.0).timeline
    calm = Moment(phase="backward", operator=9, name="", module="", bytes=short[-1].bytes)
    plan = made(9.0, timeline=(*short[:3], *[calm] * 500, *short[3:]))
    lines = drawing(plan, width=40, height=9)
    assert lines[0].count("S") == 1 and all(len(line) <= 12 + 42 for line in lines[:10])
    assert figure(plan).alt == "Memory over a step; highest point 9.00 GiB in backward, mm of blocks.1.up."


def test_a_page_is_escaped_and_loads_nothing() -> None:
    row = Row(part="temporaries", module="<b>", format="fp32", bytes=5, tensors=1)
    page = render(plan_page([replace(fitted(75.0), name="<i>net", peak=(row,)), made(40.0)]))
    assert "<i>net" not in page and "&lt;i&gt;net" in page and "<td><b>" not in page and "&lt;b&gt;" in page
    assert "http" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert "stroke-dasharray" in page  # the GPU's memory


def test_str_and_table(tmp_path: object) -> None:
    plan = fitted(40.0)
    assert plan.table()[0] == ("part", "between steps", "at the peak", "share")
    assert str(plan).startswith("net, mixed bf16: fits an a100-80 with ")
