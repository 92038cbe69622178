"""Black box: why a step was not finite, and under which policy it would have been.

`StepBox` looks after a `TrainStep`. A step that is not finite only because a dynamic scale is on its way down is left
alone; any other is replayed with instruments (`trace`), its first cause named, and small changes of policy are tried by
replay (`cures`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.errors import StepError
from halfstep.events import Cure, Verdict
from halfstep.lens.replay import Attempt, Replay
from halfstep.lens.trace import Source, Trace
from halfstep.step.prepare import unwrap

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

__all__ = ["StepBox", "judge"]

LOG = logging.getLogger("halfstep")

LOW_SCALE = 2.0**8
"""A dynamic scale above it is on its way down; no remark on a step that overflows under it."""

MOST_REPLAYS = 16
"""Explanations made without being asked, in the life of one TrainStep."""


class StepBox:
    """The black box of one TrainStep.

    Attributes:
        verdict: the last one, or None.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.verdict: Verdict | None = None
        self._for = 0  # the step `verdict` is about
        self._streak = 0
        self._replays = 0
        self._said: set[str] = set()

    def fine(self) -> None:
        """Take note of an applied step."""
        self._streak = 0

    def bad(self) -> None:
        """Look at a step that was not applied; training goes on whatever happens here."""
        self._streak += 1
        if self._for == self.step._step:  # somebody asked already
            return
        try:
            if self._streak == 1 and self._replays < MOST_REPLAYS and self._matters():
                self._replays += 1
                self._announce(self._explained())
        except Exception as error:
            self._say("failed", f"a step was not finite, and its replay failed: {type(error).__name__}: {error}")

    def _matters(self) -> bool:
        """Return whether there is more to the last step than a dynamic scale on its way down."""
        step = self.step
        memory = step._memory
        if memory is None:
            return False
        if not step.scaler.is_enabled() or step.scaler.rule.is_static:
            return True
        if float(step._scale) <= LOW_SCALE:
            return True
        return any(kept.loss is not None and not bool(torch.isfinite(kept.loss)) for kept in memory.window)

    def explain(self) -> Verdict:
        """Return the verdict on the last step that was not applied."""
        step = self.step
        if step._memory is None:
            raise StepError("explain(): this TrainStep was built with blackbox=False and keeps nothing to replay")
        pending = step._pending
        if pending is not None and bool(pending):
            return self._explained() if self.verdict is None or self._for != step._step else self.verdict
        if self.verdict is None:
            raise StepError(
                "explain(): no step to explain: the last one was applied; call it after a step whose result.skipped is "
                "true, before the next step"
            )
        return self.verdict

    def _explained(self) -> Verdict:
        step = self.step
        memory = step._memory
        assert memory is not None
        model = unwrap(step.model)

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            return step._forward(model, batch, named)[0]

        replay = Replay(model, forward, memory.window, memory.buffers)
        self.verdict = replace(judge(replay, model), step=step._step)
        self._for = step._step
        return self.verdict

    def _announce(self, verdict: Verdict) -> None:
        self._say(f"{verdict.kind} {verdict.op} {verdict.module}", f"{verdict.headline} (step.explain() says more)")

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            LOG.warning("black box: %s", text)


def judge(replay: Replay, model: nn.Module) -> Verdict:
    """Replay with instruments and name the first cause; without cures."""
    attempt = replay.run(traced=True)
    if not attempt.bad:
        return Verdict(kind="not_reproducible")
    names = {id(p): n for n, p in model.named_parameters()}
    trace = attempt.trace
    if trace is None:
        return Verdict(kind="overflow", op="add", phase="backward", parameter=names.get(id(attempt.added), ""))
    return verdict_of(trace, names)


def verdict_of(trace: Trace, names: dict[int, str]) -> Verdict:
    """Return what the instruments say."""
    assert trace.loss is not None
    if not bool(torch.isfinite(trace.loss)):
        source = trace.accused(trace.loss)[0]
        return _verdict(source, "")
    found: list[tuple[Source, Tensor]] = []
    for leaf, gradient in trace.gradients.items():
        if not bool(torch.isfinite(gradient).all()):
            found += [(source, leaf) for source in trace.accused(gradient)]
    source, leaf = min(found, key=lambda pair: (pair[0].innocent, pair[0].kind == "operator", pair[0].order))
    return _verdict(source, names.get(id(leaf), ""))


def _verdict(source: Source, culprit: str) -> Verdict:
    call = source.call
    kinds = {"batch": "bad_batch", "parameter": "bad_state", "buffer": "bad_state", "constant": "bad_state"}
    kind = kinds.get(source.kind) or ("invalid" if source.invalid else "overflow")
    if source.innocent:
        kind = "invalid"
    if call is None:
        return Verdict(kind=kind, parameter=source.name or culprit)
    return Verdict(
        kind=kind,
        op=call.site.op,
        module=call.site.module,
        phase=call.site.phase,
        line=call.site.line,
        parameter=source.name if kind.startswith("bad") else "",
        dtypes=call.dtypes,
        shapes=call.shapes,
        value=call.largest,
        limit=source.limit,
    )
