"""The seeded mistakes: their scripts are Python, the linter reaches its goals on them, and the report is of today."""

from __future__ import annotations

import json

import pytest

from benchmarks import lint_mistakes as seeded

REPORT = seeded.REPORT


def test_findings_of_every_eighth_script_are_those_of_the_report() -> None:
    assert seeded.run(every=8) == json.loads(REPORT.read_text())["rows"][::8]


@pytest.mark.slow
def test_recall_and_precision_reach_their_goals_and_are_those_of_the_report() -> None:
    found = seeded.summary(seeded.run())
    report = json.loads(REPORT.read_text())
    assert report["summary"] == found and report["blind"].keys() == {*seeded.BLIND}
    for half in ("mine", "held out", "both"):
        assert all(found[half][name] >= goal for name, goal in seeded.GOAL.items()), half


def test_the_halves_share_no_script_and_no_shape() -> None:
    every = [{text for one in half for _, text in seeded.texts(one, shapes)} for half, shapes in seeded.HALVES.values()]
    assert not every[0] & every[1] and not {*seeded.HALVES["mine"][1]} & {*seeded.HALVES["held out"][1]}


def test_a_mistake_that_no_rule_sees_is_missed_and_a_finding_in_a_right_script_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unseen = seeded.mistake("a print", {}, file="import torch\n-print(1)\n+print(2)")
    deprecated = seeded.mistake("a name", {}, file="import torch\n-print(1)\n+torch.cuda.amp.GradScaler()")
    monkeypatch.setattr(seeded, "HALVES", {"mine": ((unseen, deprecated), ()), "held out": ((unseen,), ())})
    found = seeded.summary(seeded.run())
    assert found["mine"]["recall"] == 0.0 and found["mine"]["wrong"] == 1
    assert found["held out"]["missed"] == {"a print": ["file"]}
