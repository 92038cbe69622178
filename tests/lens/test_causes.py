"""Root causes: which evidence decides, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.lens.box import advice as causes
from halfstep.lens.box.advice import settle
from halfstep.lens.box.diagnose import CURABLE
from halfstep.lens.box.trials import Trial
from halfstep.lens.verdict import Verdict
from halfstep.step.parts.signals import Signals

TRAINS = Trial(finite_once=True, trained=12, losses=(1.0, 0.9), trains=True, outcome="trained 12 steps")
LOST = Trial(finite_once=True, trained=3, losses=(1.0, 9.0), outcome="finite once: not finite in step 4")
UNTRIED = Trial(finite_once=True, losses=(1.0,), outcome="finite once: not trained: no optimizer is known")
NEVER = Trial(finite_once=False, outcome="not finite")
ABSENT = Trial(finite_once=None, outcome="cannot run: TypeError")
NAMES = ("_off_course", "wrong_target", "poisoned", "runaway", "loaded", "lost_eps")
NOTHING: dict[str, Any] = {**dict.fromkeys(NAMES, ""), "suspects": (), "without": None}


def settled(
    monkeypatch: pytest.MonkeyPatch, kind: str, wide: Trial, before: list[float], updated: bool = True,
    astray: str = "", **evidence: Any
) -> Verdict:  # fmt: skip
    """Return a verdict of `kind`, settled on some evidence."""
    for name, value in {**NOTHING, **evidence}.items():
        monkeypatch.setattr(causes, name, lambda *args, value=value: value)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if updated:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    subject: Any = SimpleNamespace(signals=Signals(), optimizer=optimizer, model=model, window=(), step=1)
    usual = before[-1] if before else None
    trials: Any = SimpleNamespace(wide=wide, before=before, usual=usual, astray=astray, by_name=False)
    attempt: Any = SimpleNamespace()
    found = settle(subject, Verdict(kind=kind, parameter="input 0"), attempt, trials if kind in CURABLE else None)
    assert bool(found.because) == bool(found.cause) == bool(found.sure) >= bool(found.shown)
    return found


@pytest.mark.parametrize(
    ("kind", "wide", "before", "evidence", "cause", "sure"),
    [
        ("overflow", TRAINS, [1.0], {}, "precision", "shown"),
        ("invalid", TRAINS, [1.0], {}, "precision", "shown"),
        ("overflow", UNTRIED, [1.0], {}, "precision", "likely"),
        ("overflow", UNTRIED, [], {}, "", ""),  # weights may be too large for any format
        ("overflow", UNTRIED, [1.0], {"runaway": "the loss rose"}, "divergence", "likely"),
        ("overflow", UNTRIED, [1.0], {"suspects": ("input 0 holds 1e9",)}, "data", "likely"),
        ("overflow", ABSENT, [1.0], {"runaway": "the loss rose"}, "divergence", "likely"),
        ("scale_too_high", TRAINS, [1.0], {}, "scale", "shown"),
        ("overflow", LOST, [1.0], {"runaway": "the loss rose"}, "divergence", "shown"),
        ("scale_too_high", LOST, [1.0], {"runaway": "the loss rose"}, "divergence", "shown"),
        ("overflow", TRAINS, [1.0], {"runaway": "the loss rose"}, "precision", "shown"),  # it came back
        ("overflow", TRAINS, [0.01], {"runaway": "the loss rose"}, "divergence", "shown"),  # it did not
        ("overflow", NEVER, [1.0, 50.0], {"_off_course": "the loss rose"}, "divergence", "likely"),
        ("overflow", NEVER, [1.0, 0.9], {}, "model", "likely"),
        ("overflow", LOST, [1.0], {"astray": "without updates it is finite"}, "divergence", "shown"),
        ("overflow", LOST, [1.0], {}, "", ""),  # without updates it is no better
        ("overflow", LOST, [1.0, 50.0], {"_off_course": "the loss rose"}, "divergence", "likely"),
        ("bad_state", NEVER, [1.0], {"loaded": "exp_avg_sq is 0", "runaway": "the loss rose"}, "divergence", "likely"),
        ("overflow", TRAINS, [1.0], {"suspects": ("input 0 holds 1e9",)}, "data", "likely"),
        ("overflow", NEVER, [1.0], {"suspects": ("input 0 holds 1e9",)}, "data", "shown"),
        ("overflow", LOST, [1.0], {"runaway": "the loss rose", "suspects": ("9",)}, "divergence", "shown"),
        ("overflow", LOST, [1.0], {"runaway": "the loss rose", "wrong_target": "255"}, "data", "shown"),
        ("overflow", LOST, [1.0], {"runaway": "the loss rose", "poisoned": "step 3"}, "data", "shown"),
        ("bad_batch", TRAINS, [1.0], {}, "data", "shown"),
        ("invalid", NEVER, [1.0], {}, "model", "shown"),
        ("overflow", NEVER, [], {}, "model", "likely"),
        ("bad_state", NEVER, [1.0], {"lost_eps": "eps is 0"}, "precision", "likely"),
        ("bad_state", NEVER, [1.0], {"runaway": "the weights grew"}, "divergence", "likely"),
        ("bad_state", NEVER, [1.0], {}, "", ""),
        ("overflow", ABSENT, [1.0], {}, "", ""),
        ("not_reproducible", TRAINS, [1.0], {"suspects": ("input 0 holds 1e9",)}, "", ""),
    ],
)  # fmt: skip
def test_the_evidence_decides(
    kind: str, wide: Trial, before: list[float], evidence: dict[str, Any], cause: str, sure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    verdict = settled(monkeypatch, kind, wide, before, **evidence)
    assert (verdict.cause, verdict.sure) == (cause, sure)


def test_what_is_lost_before_any_update_is_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = settled(monkeypatch, "overflow", LOST, [], updated=False)
    assert verdict.cause == "model" and "initial weights" in verdict.because
    resumed = settled(monkeypatch, "overflow", LOST, [], updated=True, astray="without updates it is finite")
    assert resumed.cause == "divergence"


def test_a_loss_that_rises_in_fp32_on_the_same_batches_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    rising = Trial(finite_once=True, trained=12, losses=(10.0, 20.0), trains=True, outcome="trained 12 steps")
    still = "without updates the loss is 10 at most"
    assert settled(monkeypatch, "overflow", rising, [4.0, 8.0], astray=still).shown == still
    assert settled(monkeypatch, "overflow", rising, [4.0, 8.0]).cause == "precision"  # it is as large without updates
    assert settled(monkeypatch, "overflow", rising, [4.0, 30.0], astray=still).cause == "precision"
