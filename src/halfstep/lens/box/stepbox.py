"""Step boxes: what a black box does about one bad step, and the box of a `TrainStep`.

A step that is not finite only because a dynamic scale is still falling is left alone (`Streak`). Any other is replayed
with instruments (`replay`), its cause named (`diagnose`), changes of policy tried (`cures`), and evidence written.

Note [ranks]: ranks that make a step together (DistributedDataParallel, `fully_shard`, tensor parallelism) see the same
bad steps, and each replays its own batch. They exchange their verdicts through an `Exchange`, which is no
collective and waits for a bounded time, and every rank takes the same one: that of the lowest rank with a fault.
`explain()` then returns it without waiting. A step that was not explained by itself is exchanged when `explain()`
is called; called on one rank only, it returns that rank's verdict after the wait, with a note. The one collective
there is gathers the parameters of a model under `fully_shard`, after all ranks have agreed to it.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.binding.bind import binding_of
from halfstep.binding.fsdp import has_room, unsharded
from halfstep.cast.regions.recompute import recomputing
from halfstep.cast.rules.recipe import Recipe
from halfstep.errors import StepError, lacks_memory
from halfstep.formats import DTYPE_NAMES
from halfstep.kernels.native.calls import number
from halfstep.kernels.sharded import has_parts
from halfstep.lens.box.advice import advice, settle
from halfstep.lens.box.cures import cures, rebound
from halfstep.lens.box.diagnose import CURABLE, Subject, diagnose, helping_scale, inspect
from halfstep.lens.box.evidence import save_evidence
from halfstep.lens.box.exchange import Exchange, exchange_of
from halfstep.lens.box.replay import Attempt
from halfstep.lens.box.trials import Trials, more_batches, refuse_wrong
from halfstep.lens.calls import extremes
from halfstep.lens.tracing import file_of
from halfstep.lens.verdict import Verdict, shown
from halfstep.meeting import processes
from halfstep.policy.policy import Policy
from halfstep.schema import packaged_toml
from halfstep.step.parts.record import History, MicroBatch, Window

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

LOG = logging.getLogger("halfstep")

MOST_REPLAYS = 16  # a box explains so many steps by itself; applied steps of a TrainStep count apart
LOOK_EVERY = 10  # weights and optimizer state are read at every so many steps of a streak
PATIENCE = 10.0  # seconds to wait for the other ranks, which come to a bad step at nearly the same time
ASKED = 3.0  # seconds to wait for them where the user called `explain`, perhaps on one rank only
REPLAYS = 30  # the wait for their verdicts is longer by so many replays of this rank: they may look for cures
LOW_SCALE = 2.0**8  # a larger dynamic scale that overflows once is left alone: it is still falling
THIRD = 3  # bad steps in a row that are examined under any scale; then twice as many each time, for data may change
STREAK = 10  # a streak of so many bad steps is reported
LONG_STREAK = 20  # the same under a dynamic scale, which skips 24 steps from 2**24 to 1; most begin at 2**16
SHOWN = 8  # missing ranks are named up to this number
FINITE = 3  # the weight of a verdict on a rank whose replay was finite, see `_weight`
ELSEWHERE = "the part that another rank has of a parameter is not finite"
UPDATE, CALL = "update", "call"
NO_MORE: Mapping[int, MicroBatch] = {}
STREAKS = packaged_toml("lens/box/streaks.toml")


@dataclass(frozen=True, slots=True)
class Topic:
    """A bad step as the ranks name it among each other."""

    exchange: Exchange  # of these ranks
    name: str  # equal on all ranks, and used for this step only
    place: str  # where in the program it is explained: `UPDATE` or `CALL`

    @property
    def patience(self) -> float:
        """Seconds to wait for ranks that have not come to this place."""
        return PATIENCE if self.place == UPDATE else ASKED

    @property
    def agreement(self) -> str:
        """The topic of an agreement, which holds for one place: elsewhere ranks may run other collectives."""
        return f"{self.name}/{self.place}"


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """What is known without a replay of a step whose gradients were not finite."""

    loss_finite: bool
    scaling: str  # "none", "static" or "dynamic"
    scale: float
    floor: float  # the lowest the scale can be; 0.0 if that is not known
    low: str  # the low format
    state_finite: bool  # weights and optimizer state; read every `LOOK_EVERY` steps
    applied: bool = False  # whether its update was applied to the weights


@dataclass(eq=False)
class Streak:
    """Recognises what many bad steps have in common, and reports each diagnosis once.

    Under a dynamic scale most bad steps are its search for the right value. The third in a row is examined: a replay at
    a lower scale decides whether to wait, or whether gradients are not finite at any scale (`helps`).
    """

    reported: set[str] = field(default_factory=set)  # the diagnoses made so far, as `what` has them
    streak: int = 0  # steps in a row whose gradients were not finite
    losses: int = 0  # steps in a row whose loss was not finite under finite gradients
    verdict: Verdict | None = None  # that on a step of the streak, if one was explained
    helps: float | None = None  # the loss scale at which a replay of the streak was finite; 0.0: none, None: not tried

    def fine(self) -> None:
        """Count an applied step with a finite loss."""
        self.streak = self.losses = 0

    def lost(self, *, applied: bool = True) -> list[str]:
        """Count a step whose loss was not finite under finite gradients; return what has not been reported before."""
        self.streak = 0
        self.losses += 1
        how = "applied, as torch.amp does" if applied else "not applied: the loop has left it out"
        return self._new(["lost", "no curve"] if self.losses == STREAK else ["lost"], how=how)

    def skipped(self) -> None:
        """Count a step whose gradients were not finite."""
        self.streak += 1
        self.losses = 0
        if self.streak == 1:
            self.verdict = self.helps = None

    @property
    def undecided(self) -> bool:
        """Whether the streak has come to a step that is examined under any scale: the 3rd, 6th, 12th and so on."""
        times, rest = divmod(self.streak, THIRD)
        return self.verdict is None and not rest and times > 0 and not times & (times - 1)

    def see(self, step: SkippedStep) -> list[str]:
        """Return what has not been reported before about a bad step that `skipped` has counted."""
        return self._new(self._diagnoses(step), scale=step.scale, reason=self._reason())

    def _new(self, found: Iterable[str], **words: object) -> list[str]:
        texts = []
        for name in found:
            numbers = {"streak": self.streak, "losses": self.losses, "helps": self.helps}
            what, why = (STREAKS[name][part].format(**numbers, **words) for part in ("what", "why"))
            if what not in self.reported:
                self.reported.add(what)
                texts.append(f"{what}: {why}")
        return texts

    def _diagnoses(self, seen: SkippedStep) -> Iterator[str]:
        """Yield the names of what is known of a bad step in ``streaks.toml``."""
        if not seen.state_finite:
            yield "state"
            return
        dynamic = seen.scaling == "dynamic"
        if dynamic and seen.scale <= seen.floor * (1 + 1e-6):
            yield "floor"
        elif dynamic and self.helps and self.helps < 1.0:
            yield "large loss"
        if self.streak == (LONG_STREAK if dynamic and seen.scale > 1.0 else STREAK):
            yield "applied" if seen.applied else "skipped"
        if self.streak >= 2 and not seen.applied:
            if seen.low == "bf16" and seen.scaling == "none":
                yield "bf16"
            if not seen.loss_finite:
                yield "loss"

    def _reason(self) -> str:
        verdict = self.verdict
        if verdict is not None and verdict.kind == "bad_batch":
            return f"look at the batch: {verdict.headline}"
        if verdict is not None and verdict.kind != "not_reproducible":
            return f"the verdict on step {verdict.step} has the reason and what helps"
        if self.helps:
            return f"a replay was finite at a loss scale of {self.helps:g}"
        return "the reason is not known yet (step.explain() looks for it)"


class Box:
    """What the boxes of a `TrainStep` and of a loop written by hand share."""

    spelled = "step.explain()"  # how the user gets the verdict
    explainable: str  # which steps that method explains, in words
    _wrong_window: Callable[[], Window | None]  # the last window if it was not finite
    _subject: Callable[[Window], Subject]  # a window as a step to diagnose
    # the topic of a window, at a place, that all ranks see as bad; None of any other, and without other ranks
    _topic: Callable[[Window, str], Topic | None]
    # the model as the user calls it, the one inside its wrappers, and a name for the box on all ranks
    _named_models: Callable[[], tuple[nn.Module, nn.Module, str]]

    def __init__(self, evidence: Path | None) -> None:
        self.verdict: Verdict | None = None  # the last one, or None
        self._folder = evidence
        self._judged: Callable[[Verdict], Verdict] = lambda verdict: verdict  # blames the loop, if it is to blame
        self._written: list[Path] = []
        self._streak = Streak()
        self._replays = 0
        self._warned: set[str] = set()
        self._mine: Verdict | None = None  # on the step that `verdict` is about, of this rank alone
        self._posted = ""  # the last topic that a verdict was posted about
        self._explained_step = 0  # the step that `verdict` is about
        self._missing: tuple[int, ...] = ()  # ranks that posted none in time

    def explain(self, batches: Iterable[Any] | None = None) -> Verdict:
        """Return why the last step was not finite; ``print(box.explain())`` is a report.

        Args:
            batches: more batches, such as a data loader, of which the first are taken: cures are tried on them too.

        Raises:
            StepError: the last step was finite, or nothing has run backward; `batches` is no iterable of batches, has
                one that the loss function does not take, or comes after later steps. Nothing is changed then.
        """
        more, window = {} if batches is None else more_batches(batches), self._wrong_window()
        if window is None:
            if self.verdict is None:
                raise StepError(f"explain(): there is no step to explain: {self.explainable}, before the next one")
            if more:
                raise StepError("explain(batches=...): the step is not kept any more; call it before the next one")
            return self.verdict
        known = None if more else self._known(window)
        if known is None:
            try:
                return self._explained(window, more=more)
            except StepError as error:
                if error.__cause__ is not None and lacks_memory(error.__cause__):
                    raise error.__cause__ from None
                raise
        topic = self._topic(window, CALL) if self._missing else None
        if topic is not None:  # ranks may have posted theirs since
            self.verdict = self._first_of_ranks(topic, 0.0)
        return self.verdict or known

    # ------------------------------------------------------------------ one step

    def _known(self, window: Window) -> Verdict | None:
        return self.verdict if self._explained_step == window.last else None

    def _explained(self, window: Window, place: str = CALL, more: Mapping[int, MicroBatch] = NO_MORE) -> Verdict:
        """Explain the step of a window; `more`: micro-batches for trials, given to `explain`."""
        verdict = self.explain_subject(replace(self._subject(window), more=more), self._topic(window, place))
        self._explained_step = window.last
        return verdict

    def explain_subject(self, subject: Subject, topic: Topic | None = None) -> Verdict:
        """Replay a step, name the first cause, look for cures, collect those of the other ranks, write the evidence.

        Raises:
            StepError: the replay failed, and the model is on this rank alone; or a further batch cannot be run.
        """
        with ExitStack() as whole:
            began = time.monotonic()
            sharded = has_parts(subject.model)
            parts = [n for n, p in subject.model.named_parameters() if not extremes(p)[1]] if sharded else []
            try:
                if sharded:
                    self._gather(subject.model, topic, whole)
                verdict, attempt = inspect(subject, subject.gone) if subject.gone else diagnose(subject)
                if sharded and verdict.kind == "bad_state" and not parts:
                    verdict = replace(verdict, kind="not_reproducible", detail=ELSEWHERE, parameter="")
            except Exception as error:
                why = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
                if topic is None and not sharded:
                    raise StepError(f"the replay of step {subject.step} failed: {why}") from error
                verdict, attempt = inspect(subject, why)
            if not attempt.odd:  # the step itself can be run
                refuse_wrong(subject)
            replays = REPLAYS * (time.monotonic() - began)
            if verdict.parameter in parts:
                verdict = replace(verdict, notes=(*verdict.notes, f"in the part of it that rank {subject.rank} has"))
            verdict = self._judged(verdict)
            verdict = verdict if verdict.because else _cured(subject, verdict, attempt)
            self._mine = self.verdict = replace(verdict, file=file_of(verdict.line))
            self._missing = ()
            if topic is not None:
                self.verdict = self._first_of_ranks(topic, topic.patience + replays)
            if self._folder is not None and (not self.verdict.ranks or subject.rank in self.verdict.ranks):
                saved = save_evidence(self._folder, subject, self.verdict, self._written)
                if not saved.endswith(".pt"):
                    self._warn_once("evidence", saved)
        return self.verdict

    # ------------------------------------------------------------------ ranks

    @cached_property
    def exchange(self) -> Exchange | None:
        """The exchange of the ranks that see the same bad steps; None if there are no others."""
        return exchange_of(*self._named_models()) if processes()[1] > 1 else None

    def _matters(self, topic: Topic | None, *, mine: bool) -> bool:
        """Return whether a step matters on some rank; `mine`: it does on this one."""
        if topic is None:
            return mine
        name = f"{topic.name}/matters"
        try:
            topic.exchange.post(name, b"yes" if mine else None)
            return mine or bool(topic.exchange.collect(name, topic.patience, one=True)[0])
        except Exception as error:
            self._warn_once("store", f"the other ranks could not be reached: {type(error).__name__}: {error}")
            return mine

    def _is_due(self, seen: SkippedStep, window: Window) -> bool:
        """Return whether a bad step is explained without being asked about; all ranks come here together."""
        streak = self._streak
        if self._replays >= MOST_REPLAYS or not (streak.streak == 1 or streak.undecided):
            return False
        if seen.scaling != "dynamic":
            return True
        if streak.streak > 1:
            return self._matters(self._topic(window, UPDATE), mine=self._beyond_scaling(self._subject(window)))
        # more than a dynamic scale on its way down
        return seen.scale <= LOW_SCALE or self._matters(self._topic(window, UPDATE), mine=not seen.loss_finite)

    def _beyond_scaling(self, subject: Subject) -> bool:
        """Return whether replays show that no loss scale makes a step finite; not of one that cannot be replayed.

        True of sharded parameters: `explain_subject` gathers them, and then finds it out.
        """
        if subject.gone or math.isinf(subject.scale) or has_parts(subject.model):
            return has_parts(subject.model) and not subject.gone
        try:
            helps = helping_scale(subject)
            self._streak.helps = helps if helps >= subject.floor else 0.0
        except Exception as error:
            self._warn_once("scales", f"step {subject.step} was not replayed: {type(error).__name__}: {error}")
            return False
        return not self._streak.helps

    def _gather(self, model: nn.Module, topic: Topic | None, whole: ExitStack) -> None:
        """Gather the parameters of a sharded model until `whole` is left; StepError if not all ranks agree to it."""
        if topic is None:
            if processes()[1] > 1:
                raise StepError("its parameters are sharded, and the other ranks have no part in this")
        elif not topic.exchange.agree(topic.agreement, ok=has_room(model), patience=topic.patience):
            raise StepError("its parameters are sharded, and a rank was missing or had no room to gather them all")
        whole.enter_context(unsharded(model))

    def _first_of_ranks(self, topic: Topic, patience: float) -> Verdict:
        """Return the verdict of the lowest rank with a fault, which is the same on all ranks that come in time."""
        mine, exchange = self._mine, topic.exchange
        assert mine is not None
        try:
            if self._posted != topic.name:
                self._posted = topic.name
                # without any fault all take the verdict of the first rank
                told = _weight(mine) < FINITE or exchange.me == exchange.ranks[0]
                exchange.post(topic.name, pickle.dumps(mine) if told else None)
            values, missing = exchange.collect(topic.name, patience, at_update=topic.place == UPDATE)
        except Exception as error:
            note = f"the other ranks could not be reached: {type(error).__name__}: {error}"
            return replace(mine, notes=(*mine.notes, note))
        self._missing = missing
        found: list[Verdict] = [mine, *(pickle.loads(v) for rank, v in values.items() if rank != exchange.me)]
        first = min(found, key=lambda verdict: (_weight(verdict), verdict.rank))
        alike = (v.rank for v in found if _weight(v) == _weight(first) < FINITE)
        notes = first.notes
        if missing:
            notes = (*notes, f"no verdict came from {shown(missing, 'rank', SHOWN)} in {patience:.0f} s")
        return replace(first, ranks=tuple(sorted(alike)), notes=notes)

    def _state_finite(self, model: nn.Module, optimizer: Optimizer | None) -> bool:
        """Return whether weights and optimizer state are finite; reads them at every `LOOK_EVERY`-th step."""
        if self._streak.streak % LOOK_EVERY != 2:  # the first bad loss is explained
            return True
        states = () if optimizer is None else optimizer.state.values()
        found = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        return all(extremes(t)[1] for t in (*model.parameters(), *found))

    def _announce(self, verdict: Verdict, *, dynamic: bool = False) -> None:
        """Log what happened and what helps in one line, once for each cause; nothing if a dynamic scale is to fall."""
        if verdict.kind == "scale_too_high" and dynamic:
            return
        self._streak.verdict = verdict
        verified = [cure for cure in verdict.cures if cure.verified]
        text = verdict.headline
        if verified and verdict.kind != "scale_too_high":
            text += f": {verified[0].text.splitlines()[0].partition(': ')[2]}"
            if len(verified) > 1:
                report = self._written[-1].with_suffix(".txt") if self._written else f"print({self.spelled})"
                text += f" ({len(verified) - 1} more: {report})"
        self._warn_once(f"{verdict.kind} {verdict.op} {verdict.module} {verdict.phase}", text)

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            LOG.warning("black box: step %d: %s", step, text.replace(Box.spelled, self.spelled))

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            LOG.warning("black box: %s", text)


class StepBox(Box):
    """The black box of one TrainStep, made when one of its steps is not finite."""

    explainable = (
        "the last one was applied and its loss was finite, or nothing has run; call it after a step whose "
        "result.skipped is true or whose result.loss is not finite"
    )

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step.evidence)
        self._ref = weakref.ref(step)
        self._bad_steps = 0  # updates that were not applied
        self._lone = 0  # explanations of applied steps, on which ranks do not agree

    @property
    def step(self) -> TrainStep:
        """The TrainStep."""
        step = self._ref()
        assert step is not None
        return step

    @property
    def _history(self) -> History:
        history = self.step.record.history
        if history is None or not history.examined:
            raise StepError("explain(): this TrainStep was built with blackbox=False and keeps nothing to replay")
        return history

    @property
    def _scaling(self) -> str:
        scaler = self.step.scaler
        if not scaler.is_enabled():
            return "none"
        return "static" if scaler.rule.is_static and not scaler.by_hand else "dynamic"

    def _named_models(self) -> tuple[nn.Module, nn.Module, str]:
        return self.step.model, self._history.model, f"step {self.step.ordinal}"

    # ------------------------------------------------------------------ after each update

    def see(self, window: Window) -> None:
        """Count an update; examine one that was not applied. No error of the box reaches the training loop."""
        try:
            if window.bad:
                self._skipped(window)
            elif window.wrong:  # it was applied, though a loss of this rank alone may not be finite
                self._warn(window.last, self._streak.lost())
                if self._streak.losses == 1 and self._lone < MOST_REPLAYS:
                    self._lone += 1
                    self._announce(self._known(window) or self._explained(window))
            else:
                self._streak.fine()
        except Exception as error:
            self._warn_once("failed", f"step {window.last} was not finite, and {type(error).__name__}: {error}")

    def _skipped(self, window: Window) -> None:
        """Examine an update that was not applied. All ranks come here, at the same place of the program."""
        self._bad_steps += 1
        self._streak.skipped()
        step, finite = self.step, window.finite()
        seen = SkippedStep(
            loss_finite=finite, scaling=self._scaling, scale=_scale(window), floor=step.scaler.rule.floor,
            low=step.policy.dtype, state_finite=finite or self._state_finite(self._history.model, step.optimizer),
        )  # fmt: skip
        due = self._is_due(seen, window)
        try:
            if due:  # also after an error: the other ranks wait for a verdict
                self._replays += 1
                known = self._known(window)  # the user has called `explain` on this rank
                if known is None:
                    self._announce(self._explained(window, UPDATE), dynamic=self._scaling == "dynamic")
                else:
                    self._streak.verdict = known
                    topic = self._topic(window, UPDATE)
                    if topic is not None and has_parts(self._history.model):
                        topic.exchange.agree(topic.agreement, ok=False, patience=0.0)  # they need not wait for this one
        finally:
            self._warn(window.last, self._streak.see(seen))

    # ------------------------------------------------------------------ replay

    def _wrong_window(self) -> Window | None:
        record = self._history
        # the losses of an update that is still to come count first
        window = record.judged if record.window.finite() else record.window
        return window if window is not None and window.explainable() else None

    def _topic(self, window: Window, place: str) -> Topic | None:
        if self.exchange is None or window.flag is None or not bool(window.flag):
            return None
        number = self._bad_steps + (not window.seen)  # not counted yet
        return Topic(self.exchange, f"{number}.{window.last}", place)

    def _subject(self, window: Window) -> Subject:
        step, model = self.step, self._history.model
        binding = binding_of(model)
        dropped, notes = window.dropped, []
        if dropped:
            size, limit = len(window.batches), f"the batches exceeded step.record.history.limit, {self._history.limit}"
            notes.append(f"micro-batches 1 to {dropped} of {size} were dropped and not run again: {limit} bytes")
        gone = notes.pop() if dropped == len(window.batches) else ""
        if window.flag is not None and not bool(window.flag):
            notes.append(
                "gradients were finite and the update was applied: the weights have been written to since, and the "
                "replay ran with those after it"
            )
        elif step.update_in_backward is True:
            notes.append(
                "update_in_backward=True: parameters whose gradients came before the first that was not finite were "
                "updated, and the replay ran with them"
            )
        if step.compile:
            notes.append("the step is compiled; the replay ran it eagerly")
        return Subject(
            model=model,
            forward=lambda batch, named: step.run_forward(model, batch, named, _recipe(model))[0],
            window=window.batches[0 if gone else dropped :],
            buffers=window.buffers,
            around=lambda: recomputing(_recipe(model)),
            wide=step.policy.grads == "fp32",
            optimizer=step.optimizer,
            policy=None if binding is None else binding.wanted,
            under=lambda policy: rebound(model, policy),
            scaling=self._scaling,
            scale=_scale(window),
            floor=step.scaler.rule.floor if self._scaling == "dynamic" else 0.0,
            step=window.last,
            rank=processes()[0],
            notes=tuple(notes),
            dropped=0 if gone else dropped,
            gone=gone,
            clip_norm=step.clip_norm,
            clip_value=step.clip_value,
            signals=step.record.signals,
        )


def _weight(verdict: Verdict) -> int:
    """Return the order of verdicts of several ranks: first a cause, then a bad loss, no replay, a finite replay."""
    if verdict.kind != "not_reproducible":
        return 0
    return 1 if verdict.parameter else 2 if verdict.detail else FINITE


def _cured(subject: Subject, verdict: Verdict, attempt: Attempt) -> Verdict:
    if subject.foreign and attempt.trace is not None:
        low = DTYPE_NAMES.get(attempt.trace.low) if attempt.trace.low is not None else None
        subject.policy = attempt.trace.region or (None if low is None else Policy.of("torch", dtype=low))
        subject.region = "torch.autocast" if attempt.trace.region is None else "hs.autocast"
    trials = Trials(subject) if verdict.kind in CURABLE else None
    try:
        verdict = settle(subject, verdict, attempt, trials)
        found = advice(verdict) if trials is None else cures(subject, verdict, attempt, trials)
        return replace(verdict, cures=found)
    except Exception as error:  # the place is known, a cure is not
        return replace(verdict, notes=(*verdict.notes, f"no cure was looked for: {error}"))


def _recipe(model: nn.Module) -> Recipe:
    binding = binding_of(model)
    assert binding is not None
    return binding.recipe


def _scale(window: Window) -> float:
    return 1.0 if window.scale is None else number(window.scale)
