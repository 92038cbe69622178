"""Step boxes: what a black box does about one bad step, and the box of a `TrainStep`.

A step that is not finite only because a dynamic scale is still falling is left alone. Any other is replayed with
instruments (`trace`), its first cause is named (`diagnose`), small changes of policy are tried by replay (`cures`), and
evidence is written if a folder was given. `Trouble` recognises what several steps have in common.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.cast.regions.recompute import recomputing
from halfstep.cast.rules.recipe import Recipe
from halfstep.errors import StepError
from halfstep.events import Verdict
from halfstep.kernels.host import number
from halfstep.lens.box.cures import cures, rebound
from halfstep.lens.box.diagnose import Subject, diagnose
from halfstep.lens.box.evidence import save_evidence
from halfstep.lens.box.replay import Replay
from halfstep.lens.calls import extremes
from halfstep.policy.policy import Policy
from halfstep.step.bind import binding_of
from halfstep.step.memory import Window
from halfstep.step.prepare import prepared_policy, unwrap

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

__all__ = ["LOW_SCALE", "MOST_REPLAYS", "Box", "Seen", "StepBox", "Trouble", "rank"]

STREAK = 10
"""Bad steps in a row that are worth a word."""

LONG_STREAK = 20
"""The same under a dynamic scale: on its way down from 2**24 to 1 it skips 24; most begin at 2**16 and need few."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a step that was not applied, without a replay."""

    loss_finite: bool
    scaling: str  # "none", "static" or "dynamic"
    scale: float
    floor: float
    low: str  # the low format
    state_finite: bool  # weights and optimizer state; looked at now and then
    verdict: Verdict | None = None  # on the first step of the streak


@dataclass(eq=False)
class Trouble:
    """Recognises repeated trouble.

    Attributes:
        said: names of the diagnoses made so far.
        streak: steps in a row that were not applied.
        losses: steps in a row that were applied and whose loss was not finite.
    """

    said: set[str] = field(default_factory=set)
    streak: int = 0
    losses: int = 0

    def fine(self) -> None:
        """Take note of an applied step with a finite loss."""
        self.streak = self.losses = 0

    def lost(self) -> list[str]:
        """Take note of an applied step whose loss was not finite; return what has not been said before."""
        self.streak = 0
        self.losses += 1
        return self._new(self._of_losses())

    def skipped(self) -> None:
        """Take note of a step that was not applied."""
        self.streak += 1
        self.losses = 0

    def see(self, seen: Seen) -> list[str]:
        """Return what has not been said before of a step that was not applied, which `skipped` has counted."""
        return self._new(self._diagnoses(seen))

    def _new(self, diagnoses: Iterator[tuple[str, str]]) -> list[str]:
        found = []
        for name, text in diagnoses:
            if name not in self.said:
                self.said.add(name)
                found.append(f"{name}: {text}")
        return found

    def _of_losses(self) -> Iterator[tuple[str, str]]:
        yield (
            "the loss is not finite while gradients are",
            "the update was applied, as torch.amp does; what the loss says is lost, and a term of it trains nothing. "
            "Compute that term in fp32, or keep it where the format ends (step.explain() names the operator)",
        )
        if self.losses == STREAK:
            yield (
                f"{STREAK} steps in a row had a loss that is not finite and gradients that are",
                "no loss curve, early stopping or best checkpoint can be trusted; training itself goes on",
            )

    def _diagnoses(self, seen: Seen) -> Iterator[tuple[str, str]]:
        if not seen.state_finite:
            yield (
                "weights or optimizer state are not finite",
                "no step can be finite any more; load the last good checkpoint, and find the update that wrote them",
            )
            return
        dynamic = seen.scaling == "dynamic"
        if dynamic and seen.scale <= seen.floor * (1 + 1e-6):
            yield (
                "the scale is at its floor",
                f"{seen.scale:g} cannot get lower and gradients still overflow: the numbers do not fit fp16; use bf16, "
                "or give what overflows fp32 (step.explain() names it)",
            )
        elif dynamic and seen.scale <= 1.0 and self.streak >= 2:
            yield (
                "not a scaling problem",
                f"gradients are not finite at scale {seen.scale:g}; a lower one does not help (explain() says why)",
            )
        if self.streak == (LONG_STREAK if dynamic and seen.scale > 1.0 else STREAK):
            yield (
                f"{self.streak} steps in a row were skipped",
                "training stands still; if the scale is not the reason, step.explain() names it",
            )
        if self.streak >= 2 and seen.low == "bf16" and seen.scaling == "none":
            yield (
                "bf16 skips steps",
                "bf16 reaches as far as fp32, so fp32 would overflow too, or a value is invalid: lower the learning "
                "rate, clip gradients, look at the data",
            )
        if not seen.loss_finite and self.streak >= 2:
            yield (
                "the loss is not finite",
                f"skipping leaves weights as they are, so the same data gives the same; {_where_to_look(seen.verdict)}",
            )


def _where_to_look(verdict: Verdict | None) -> str:
    if verdict is None or verdict.kind == "not_reproducible":
        return "look at the loss and the batch (explain() says more)"
    if verdict.kind == "bad_batch":
        return f"look at the batch: {verdict.headline}"
    return f"step {verdict.step} was the first, and the verdict on it says what helps"


LOG = logging.getLogger("halfstep")

LOW_SCALE = 2.0**8
"""A dynamic scale above it is on its way down; no remark on a step that overflows under it."""

MOST_REPLAYS = 16
"""Explanations made without being asked, in the life of one box; those of applied steps count apart in a TrainStep."""

LOOK_EVERY = 10
"""Steps of a streak between two looks at weights and optimizer state."""

APPLIED = (
    "gradients were finite and the update was applied: the weights have been written to since, and the replay ran with "
    "those after it"
)


class Box:
    """What both boxes do.

    Attributes:
        verdict: the last one, or None.
    """

    spelled = "step"  # whose explain() the user calls

    def __init__(self, evidence: Path | None) -> None:
        self.verdict: Verdict | None = None
        self._evidence = evidence
        self._written: list[Path] = []
        self._trouble = Trouble()
        self._replays = 0
        self._said: set[str] = set()
        self._first: Verdict | None = None  # on the first step of the streak, if that was explained

    def explain_subject(self, subject: Subject) -> Verdict:
        """Replay, name the cause, look for cures, keep the evidence."""
        if any(hasattr(p, "placements") for p in subject.model.parameters()):
            raise StepError("its parameters are sharded, and a replay on one rank would wait for the others")
        try:
            verdict, attempt = diagnose(subject)
        except Exception as error:
            raise StepError(f"the replay of step {subject.step} failed: {type(error).__name__}: {error}") from error
        if subject.foreign and attempt.trace is not None:
            low = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(attempt.trace.low)  # type: ignore[arg-type]
            subject.policy = attempt.trace.region or (None if low is None else Policy.of("torch", dtype=low))
            subject.region = "torch.autocast" if attempt.trace.region is None else "hs.autocast"
        try:
            verdict = replace(verdict, cures=cures(subject, verdict, attempt))
        except Exception as error:  # the cause is known; what would help is not
            verdict = replace(verdict, notes=(*verdict.notes, f"no cure was looked for: {error}"))
        self.verdict = verdict
        if self._evidence is not None:
            said = save_evidence(self._evidence, subject, verdict, self._written)
            if not said.endswith(".pt"):
                self._say("evidence", said)
        return verdict

    def _state_finite(self, model: nn.Module, optimizer: Optimizer | None) -> bool:
        """Return whether weights and optimizer state are finite; now and then: the first bad loss is explained."""
        if self._trouble.streak % LOOK_EVERY != 2:
            return True
        states = () if optimizer is None else optimizer.state.values()
        held = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        return all(extremes(t)[1] for t in (*model.parameters(), *held))

    def _announce(self, verdict: Verdict) -> None:
        """Say what happened and what helps in one line, once for each cause."""
        self._first = verdict
        verified = [cure for cure in verdict.cures if cure.verified]
        text = verdict.headline
        if verified and verdict.kind != "scale_too_high":
            text += f"; verified cure: {verified[0].text.splitlines()[0]}"
            if len(verified) > 1:
                text += f" ({len(verified) - 1} more: print({self.spelled}.explain()))"
        self._say(f"{verdict.kind} {verdict.op} {verdict.module} {verdict.phase}", text)

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            said = text.replace("step.explain()", f"{self.spelled}.explain()")
            LOG.warning("black box: %s", f"step {step}: {said}")

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            LOG.warning("black box: %s", text)


class StepBox(Box):
    """The black box of one TrainStep, made when one of its steps is not finite.

    Attributes:
        verdict: the last one, or None.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step._evidence)
        self._step = weakref.ref(step)
        self._for = 0  # the step `verdict` is about
        self._lone = 0  # explanations of applied steps, which ranks do not agree on

    @property
    def step(self) -> TrainStep:
        """The TrainStep."""
        step = self._step()
        assert step is not None
        return step

    def see(self, window: Window) -> None:
        """Take note of an update; look at one that was not applied. Training goes on whatever happens here."""
        if not window.wrong:
            self._trouble.fine()
            return
        try:
            if window.bad:
                self._skipped(window)
            else:
                self._lost(window)
        except Exception as error:
            self._say("failed", f"step {window.last} was not finite, and {type(error).__name__}: {error}")

    def _skipped(self, window: Window) -> None:
        """Look at an update that was not applied; all ranks come here together."""
        self._trouble.skipped()
        if self._trouble.streak == 1:
            self._first = None
        matters = self._together(self._matters(window))
        try:
            self._warn(window.last, self._trouble.see(self._seen(window)))
        finally:  # where others wait
            if matters and self._trouble.streak == 1 and self._replays < MOST_REPLAYS:
                self._replays += 1
                self._unasked(window)

    def _lost(self, window: Window) -> None:
        """Look at an update that was applied though a loss of this rank was not finite.

        The other ranks may know nothing of it: no word to them, and a count of its own.
        """
        self._warn(window.last, self._trouble.lost())
        if self._trouble.losses == 1 and self._lone < MOST_REPLAYS:
            self._lone += 1
            self._announce(self.verdict if self._for == window.last and self.verdict else self._explained(window))

    def _unasked(self, window: Window) -> None:
        """Explain a step that nobody asked about, in one line; all ranks come here together or not at all."""
        known = self.verdict if self._for == window.last else None  # somebody on this rank has asked
        try:
            mine = known or self._explained(window)
        except Exception as error:
            if self._group() is None:
                raise
            mine = Verdict(kind="not_reproducible", step=window.last, rank=rank(), notes=(str(error),))
        verdict = self._shared(mine)
        if known is None:
            self._announce(verdict)

    def explain(self) -> Verdict:
        """Return the verdict on the last step that was not applied or whose loss was not finite."""
        memory = self.step._memory
        if memory is None:
            raise StepError("explain(): this TrainStep was built with blackbox=False and keeps nothing to replay")
        window = memory.judged
        if not memory.window.finite():  # of an update that is still to come
            window = memory.window
        if window is not None and window.explainable():
            known = self.verdict if self._for == window.last else None
            return known or self._explained(window)
        if self.verdict is None:
            raise StepError(
                "explain(): there is no step to explain: the last one was applied and its loss was finite, or nothing "
                "has run; call it after a step whose result.skipped is true or whose result.loss is not finite, before "
                "the next one"
            )
        return self.verdict

    # ------------------------------------------------------------------ what is known without a replay

    def _scaling(self) -> str:
        scaler = self.step.scaler
        if not scaler.is_enabled():
            return "none"
        return "static" if scaler.rule.is_static and not scaler.by_hand else "dynamic"

    def _matters(self, window: Window) -> bool:
        """Return whether there is more to a step than a dynamic scale on its way down."""
        return self._scaling() != "dynamic" or _scale(window) <= LOW_SCALE or not window.finite()

    def _seen(self, window: Window) -> Seen:
        step = self.step
        finite = window.finite()
        return Seen(
            loss_finite=finite,
            scaling=self._scaling(),
            scale=_scale(window),
            floor=step.scaler.rule.floor,
            low=step.policy.dtype,
            state_finite=finite or self._state_finite(unwrap(step.model), step.optimizer),
            verdict=self._first,
        )

    # ------------------------------------------------------------------ replay

    def _explained(self, window: Window) -> Verdict:
        step = self.step
        model = unwrap(step.model)

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            return step._forward(model, batch, named, recipe())[0]

        def recipe() -> Recipe:  # that of the policy under trial
            binding = binding_of(model)
            assert binding is not None
            return binding.recipe

        subject = Subject(
            replay=Replay(
                model,
                forward,
                window.batches,
                window.buffers,
                lambda: recomputing(recipe()),
                step.policy.grads == "fp32",
            ),
            model=model,
            optimizer=step.optimizer,
            policy=prepared_policy(model),
            under=lambda policy: rebound(model, policy),
            scaling=self._scaling(),
            scale=_scale(window),
            step=window.last,
            rank=rank(),
        )
        self._for = window.last
        if window.flag is not None and not bool(window.flag):
            subject.notes = (APPLIED,)
        return self.explain_subject(subject)

    # ------------------------------------------------------------------ ranks

    def _together(self, matters: bool) -> bool:
        """Let the ranks of DistributedDataParallel, which all know of the step, agree on whether to look at it."""
        group = self._group()
        if group is None:
            return matters
        flag = torch.tensor(float(matters), device=next(self.step.model.parameters()).device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group[0])
        return bool(flag)

    def _shared(self, mine: Verdict) -> Verdict:
        """Return the verdict of the first rank whose own replay was not finite."""
        group = self._group()
        if group is None:
            return mine
        found: list[Any] = [None] * torch.distributed.get_world_size(group[0])
        torch.distributed.all_gather_object(found, mine, group=group[0])
        bad = [v for v in found if v is not None and v.kind != "not_reproducible"]
        self.verdict = bad[0] if bad else mine
        return self.verdict

    def _group(self) -> tuple[Any] | None:
        if not isinstance(self.step.model, nn.parallel.DistributedDataParallel):
            return None
        return (self.step.model.process_group,)


def _scale(window: Window) -> float:
    return 1.0 if window.scale is None else number(window.scale)


def rank() -> int:
    """Return the rank of this process, 0 where there are no others."""
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if here else 0
