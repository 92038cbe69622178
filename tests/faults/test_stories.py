"""Stories are what is written about them, and whoever judges or checks them can find a mistake."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.blame import PEERS
from benchmarks.faults import stories_scored
from benchmarks.faults.case import MIXED
from benchmarks.faults.catalog import FOURTH, LIST_A, LIST_B, SECOND_A, SECOND_B, THIRD
from benchmarks.faults.stories_scored import Listener, alarms, scored, told_of, verdict_on
from benchmarks.faults.story import Course, Place, Story, changed, checked, form, near, place_of
from benchmarks.faults.story_score import cure_right, place_right, unsaid
from benchmarks.stories_tables import story_blocks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # halfstep and torch say what they think of the faults

QUICK = (
    "scale_doubles_in_every_step",
    "statistics_of_a_skipped_step",
    "radiance_field_never_unscales",
    "batch_without_triplets",
)


def found(name: str) -> Story:
    return next(told for told in (*THIRD, *FOURTH) if told.name == name)


def each() -> Any:
    return pytest.mark.parametrize("told", [pytest.param(told, id=told.name) for told in (*THIRD, *FOURTH)])


def labelled(told: Story, **truth: Any) -> Story:
    """Return a story with other labels."""
    return replace(told, truth=replace(told.truth, **truth))


def test_every_story_has_a_source_a_cause_and_a_name_of_its_own() -> None:
    assert {told.name: form(told) for told in (*THIRD, *FOURTH) if form(told)} == {}
    names = [fault.name for fault in (*LIST_A, *LIST_B, *SECOND_A, *SECOND_B, *THIRD, *FOURTH)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", QUICK)
def test_a_story_is_what_is_written_about_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.story.TWIN_STEPS", 20)
    assert checked(found(name)) == []


@pytest.mark.hours
@each()
def test_each_story_is_what_is_written_about_it(told: Story) -> None:
    assert checked(told) == []


# ------------------------------------------------------------------ the check


@pytest.mark.parametrize(
    ("truth", "complaint"),
    [
        ({"step": 10}, "it breaks at step 9, not 10"),
        ({"cause": "model", "cures": ()}, "cause model, but fp32 breaks at step 0"),
        ({"cause": "divergence", "cures": ()}, "cause divergence, but fp32 trains"),
        ({"cures": ()}, "cause scale has no cure"),
        ({"cause": "fate"}, "cause 'fate' is none of precision"),
        ({"op": "linear"}, "no line ends with '# FAULT scale_doubles_in_every_step'"),
        ({"module": "head"}, "there is no module 'head'"),
    ],
)
def test_a_wrong_label_is_found(truth: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.story.TWIN_STEPS", 8)
    monkeypatch.setattr("benchmarks.faults.story.CURED_STEPS", 16)
    assert any(complaint in wrong for wrong in checked(labelled(found("scale_doubles_in_every_step"), **truth)))


def test_a_cure_that_does_not_train_and_a_twin_that_breaks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.story.TWIN_STEPS", 20)
    told = labelled(found("scale_doubles_in_every_step"), cures=("scale: 1e9",))
    assert any("the cure 'scale: 1e9' does not train" in wrong for wrong in checked(told))
    sick = found("statistics_of_a_skipped_step")
    sick = replace(sick, program=never_healthy(sick))
    assert "the twin breaks at step 4" in checked(sick)


def never_healthy(told: Story) -> Any:
    """Return the program of a loop whose twin has the fault in it."""
    loop: Any = told.program

    def program(healthy: bool, watch: Any) -> Any:
        """Run the loop that is ill."""
        yield from loop(False, watch)

    return program


def test_a_run_is_near_fp32_if_its_losses_are_and_it_goes_on() -> None:
    wide = Course(tuple(1.0 + 0.01 * (i % 2) for i in range(50)), (), 0, 0.0)
    assert near(wide, wide) == ""
    assert near(wide._replace(bad=tuple(range(1, 20))), wide) == ""  # a scale that comes down
    assert "updates were refused" in near(wide._replace(bad=(31, 33, 35, 37, 39, 41)), wide)
    assert "loss 2, in fp32 1.005" in near(wide._replace(losses=(2.0,) * 50), wide)
    assert "the loss of step 3 is not finite" in near(wide._replace(losses=(1, 1, math.nan, *(1,) * 47)), wide)
    assert "after step 7" in near(wide._replace(poisoned=7), wide)


def test_a_place_in_library_code_is_a_function_or_a_line_of_it() -> None:
    told = found("scale_doubles_in_every_step")
    whole = place_of(replace(told, place="nn/modules/linear.py: Linear.forward"))
    line = place_of(replace(told, place="nn/modules/linear.py: Linear.forward: F.linear(input"))
    assert whole is not None and line is not None
    assert whole.file == "linear.py" and whole.first < line.first == line.last == whole.last
    with pytest.raises(LookupError, match="0 imported modules have"):
        place_of(replace(told, place="nn/modules/linear.py: Linear.backward"))


def test_cures_set_another_scale() -> None:
    truth = found("scale_doubles_in_every_step").truth
    assert [changed(MIXED, f"scale: {to}", truth).scale for to in ("256", "dynamic", "none")] == [
        256,
        "halfstep",
        "none",
    ]
    assert changed(MIXED, "bf16", truth).dtype == "bf16"


# ------------------------------------------------------------------ the score


def said(**fields: Any) -> Any:
    """Return a verdict that has these fields."""
    names = {"kind": "overflow", "op": "linear", "module": "0", "phase": "forward", "parameter": "", "cures": ()}
    return SimpleNamespace(**{**names, "line": "a/loops.py:12 x", "headline": "the loss scale", **fields})


def test_a_place_is_right_only_if_all_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told = labelled(found("scale_doubles_in_every_step"), kind="overflow", op="linear", module="0", phase="forward")
    monkeypatch.setattr("benchmarks.faults.story_score.place_of", lambda told: Place("loops.py", 11, 13))
    assert place_right(said(), told) and place_right(said(kind="invalid"), told)
    wrong = ({"op": "add"}, {"module": ""}, {"phase": "backward"}, {"line": "loops.py:14 x"}, {"line": ""})
    assert not any(place_right(said(**fields), told) for fields in wrong)
    assert not place_right(None, told)
    no_op = labelled(told, op="", kind="bad_state", parameter="0.weight", also=("0.bias", "loop"))
    assert place_right(said(kind="bad_state", parameter="0.bias"), no_op)
    assert place_right(said(kind="loop", parameter="0.weight"), no_op)
    assert not place_right(said(kind="bad_state"), no_op) and not place_right(said(parameter="0.weight"), no_op)


def test_a_cure_is_right_if_there_can_be_one_and_has_to_train() -> None:
    curable, loop = found("scale_doubles_in_every_step"), found("no_zero_grad_under_bf16")
    good, advice = (
        SimpleNamespace(text="x", verified=True, policy=1),
        SimpleNamespace(text="y", verified=False, policy=2),
    )
    assert cure_right(said(cures=(advice, good)), curable, lambda policy: "") == (True, {"x": ""})
    assert cure_right(said(cures=(good,)), curable, lambda policy: f"bad {policy}") == (True, {"x": "bad 1"})
    assert cure_right(said(cures=(advice,)), curable, lambda policy: "") == (False, {})
    assert cure_right(said(cures=(good,)), loop, lambda policy: "") == (False, {"x": "there is no cure"})
    assert cure_right(said(cures=(advice,)), loop, lambda policy: "") == (True, {})
    assert cure_right(said(), found("scaler_is_not_in_the_checkpoint"), lambda policy: "") == (None, {})


def test_words_are_searched_in_headline_and_report() -> None:
    told = replace(found("scale_doubles_in_every_step"), says=("loss scale",), never=("learning rate",))
    assert unsaid(said(), told) == []
    assert unsaid(said(headline="x" * 161), told)[-1] == "the headline has 161 characters"
    assert unsaid(said(headline="learning rate"), told) == ["does not say 'loss scale'", "says 'learning rate'"]
    assert unsaid(None, told) == ["silent"]


def test_a_story_is_scored_and_the_table_counts_it() -> None:
    told = found("detector_with_a_static_scale")
    verdict = verdict_on(told)
    assert verdict is not None and verdict.kind == "scale_too_high" and place_right(verdict, told)
    row = {
        "source": told.source,
        "truth": {**stories_scored.said_by(verdict), "cause": "scale", "op": "linear"},
        "said": None,
        "error": "",
        "place": False,
        "parts": {},
        "cause": True,
        "cure": None,
        "verified": {"x": "", "y": "loss 2, in fp32 1"},
        "unsaid": [],
        "twin": ["Monitor: dead"],
        "peers": {"hooks": {"words": "", "op": True, "module": True, "line": False}},
        "seconds": 1.0,
    }
    report = {
        "command": "x",
        "commit": "y",
        "machine": {"cpu": "c", "torch": "t", "python": "p"},
        "seconds": 120.0,
        "instruments": ["hs.TrainStep", "hooks"],
        "stories": {"a": row, "b": {"died": "no answer in 120 s"}},
    }
    blocks = story_blocks(report)
    assert "| scale | 0 of 1 | 1 of 1 | - | 1 of 1 | 1 of 2 | 1 of 1 |" in blocks["stories"]
    assert "1 stories gave no answer" in blocks["stories"]
    assert "| hooks | 1 of 1 | 1 of 1 | 0 of 1 | 0 of 1 | 1 |" in blocks["stories peers"]
    assert "`a` (open-mmlab/mmdetection#3690): wrong place" in blocks["stories wrong"]
    assert "a verified cure does not train: loss 2, in fp32 1" in blocks["stories wrong"]
    assert told_of("a", row, verbose=False) == "a (scale), 1.0 s: wrong place, cure, twin"
    assert story_blocks({})["stories"] == "Not scored."


def test_what_is_said_of_a_twin_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that has the fault in it: a step overflows whatever the scale is, and nothing excuses that."""
    monkeypatch.setattr(stories_scored, "TWIN_STEPS", 5)
    told = found("statistics_of_a_skipped_step")
    assert alarms(told) == []
    heard = alarms(replace(told, program=never_healthy(told)))
    assert any(line.startswith("step 4") for line in heard)


def test_what_is_logged_is_heard_while_it_is_listened_to() -> None:
    heard: list[str] = []
    logger = logging.getLogger("halfstep")
    before = logger.level, logger.propagate, list(logger.handlers)
    with Listener(heard):
        logger.warning("one\ntwo")
        logger.info("not this")
    assert heard == ["log: one"]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.hours
@pytest.mark.parametrize("name", QUICK)
def test_a_whole_row_has_an_answer_of_every_instrument(name: str) -> None:
    row = scored(found(name))
    assert set(row["peers"]) == set(PEERS)
    assert row["twin"] == [] and row["error"] == ""
