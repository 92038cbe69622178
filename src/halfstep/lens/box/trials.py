"""Trials: some steps of training under a policy, from the state of a bad step, beside the same steps in fp32.

A policy under which a step is finite once may still not train: its loss is 1e13, or statistics of a BatchNorm become
infinite. A trial replays the step's window, updates, and goes on with the same micro-batches (and more, if given), from
the weights, optimizer state, buffers and generators of the bad step. Everything is as before afterwards.

Note [trial weights]: a trial has parameters of its own, which take the places of the model's for its time, and a copy
of the optimizer over fp32 values of them; the user's tensors are not written to. Where the policy has low parameters,
the fp32 values are rounded into them after each update.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.errors import HalfstepError, StepError
from halfstep.formats import LOW_DTYPES
from halfstep.lens.box.diagnose import Subject
from halfstep.lens.box.replay import Attempt, Windows
from halfstep.lens.box.sharded import is_gathered
from halfstep.lens.calls import extremes, is_sharded
from halfstep.policy.policy import Policy
from halfstep.step.bind import binding_of
from halfstep.step.record import MicroBatch, versions_of
from halfstep.step.wrappers import unwrap_optimizer
from halfstep.trees import tensors
from halfstep.weights import WeightStore

__all__ = ["FAILURES", "STEPS", "Trial", "Trials", "highest", "more_batches"]

STEPS = 12
"""Steps of a trial, the bad one included."""

MOST_BATCHES = 64
"""So many of the batches given are taken."""

MOST_ON_CPU = 1 << 32
"""Bytes of trial weights, gradients and optimizer state on a CPU, where free memory is not known."""

ABSURD = 1e3
"""A loss so many times as large as it was before is none to train on."""

ABSURD_AT_FIRST = 2.0**20
"""The same of a loss without others before it: 16 times what fp16 holds, or the square of the batch's values."""

RISE = 100.0
"""A loss that rises so many times within a trial runs away."""

NEAR = 0.25
"""A loss is near that of fp32 if they differ by so much of the largest loss of the fp32 trial, at most."""

LAST = 3
"""So many losses are averaged at the end of a trial."""

FAILURES = (HalfstepError, RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, KeyError)
"""What a model or an optimizer raises that cannot run under a policy, or cannot be copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What training under one policy showed.

    Attributes:
        finite_once: whether the bad step is finite under it; None if it cannot run.
        trained: steps that were made and finite.
        losses: their losses.
        buffers_finite: whether buffers that were finite before are so afterwards.
        trains: whether all steps are finite, their losses no larger than losses may be, and near those of fp32.
        outcome: all this in words.
        scale: the loss scale at which the first step was finite.
    """

    finite_once: bool | None
    trained: int = 0
    losses: tuple[float, ...] = ()
    buffers_finite: bool = True
    trains: bool = False
    outcome: str
    scale: float = 1.0


class Trials:
    """The trials of one bad step; each policy is tried once.

    Args:
        subject: the step; its `policy` is known by now, if it can be.
        attempt: the replay that was diagnosed.
    """

    def __init__(self, subject: Subject, attempt: Attempt) -> None:
        self.subject, self.attempt = subject, attempt
        self._known: dict[Policy | None, Trial] = {}
        self._room: str | None = None

    @property
    def wide(self) -> Trial:
        """The trial with everything in fp32, unscaled."""
        base = self.subject.policy
        return self.of(None if base is None else base.replace(dtype="fp32", scale="none"))

    @cached_property
    def usual(self) -> float | None:
        """What the size of the loss was before the bad step: the median of the losses kept; None without any."""
        if self.subject.signals is None:
            return None
        history = self.subject.signals.read()
        before = [
            abs(loss)
            for step, loss in zip(history.steps, history.losses, strict=True)
            if math.isfinite(loss) and step < self.subject.step
        ]
        return median(before) if before else None

    def of(self, policy: Policy | None) -> Trial:
        """Return what training under `policy` shows; None: as the loss function is, where no policy is known."""
        if policy not in self._known:
            try:
                self._known[policy] = self._judged(policy, self._run(policy))
            except FAILURES as error:
                self._known[policy] = Trial(finite_once=None, outcome=f"cannot run: {_first_line(error)}")
        return self._known[policy]

    # ------------------------------------------------------------------ running

    def _run(self, policy: Policy | None) -> Trial:
        """Train under `policy`; the outcome is "" unless it stopped."""
        subject = self.subject
        why = self._untrainable()
        with ExitStack() as stack:
            trained = {} if why else self._trained()
            weights = self._precise(trained)
            if policy is not None and policy != subject.policy:
                stack.enter_context(subject.under(policy))
            wide = subject.replay.wide if policy is None else policy.grads == "fp32"
            windows = stack.enter_context(replace(subject.replay, wide=wide).windows())
            if why:
                return self._once(policy, windows, why)
            leaves = stack.enter_context(_placed(subject.model, weights))
            originals = {id(parameter): weights[name] for name, parameter in trained.items()}
            return self._train(policy, windows, originals, leaves, weights)

    def _once(self, policy: Policy | None, windows: Windows, why: str) -> Trial:
        attempt, scale = self._finite(windows, self.subject.replay.window, self._scale(policy))
        loss = _mean(attempt.losses)
        if attempt.bad or attempt.odd:
            return Trial(finite_once=False, outcome="not finite", scale=scale)
        return Trial(finite_once=True, losses=(loss,), outcome=f"no training was tried: {why}", scale=scale)

    def _train(
        self,
        policy: Policy | None,
        windows: Windows,
        originals: dict[int, nn.Parameter],
        leaves: dict[str, nn.Parameter],
        weights: dict[str, nn.Parameter],
    ) -> Trial:
        subject, scale = self.subject, self._scale(policy)
        assert subject.optimizer is not None
        optimizer: Optimizer | None = None
        finite = [b for b in subject.model.buffers() if extremes(b)[1]]
        names = {id(b): name for name, b in subject.model.named_buffers()}
        losses: list[float] = []
        first_scale, first = scale, ""
        for number, window in enumerate(self._windows()):
            attempt, scale = self._finite(windows, window, scale)
            if number == 0:
                first_scale, first = scale, attempt.odd
            if attempt.bad or attempt.odd:
                break
            losses.append(_mean(attempt.losses))
            broken = [names[id(b)] for b in finite if not extremes(b)[1]]
            absurd = self._absurd(attempt.losses)
            if broken or absurd:
                what = absurd or f"{broken[0]} is not finite after it"
                return Trial(
                    finite_once=True, trained=len(losses), losses=tuple(losses), buffers_finite=not broken,
                    outcome=what, scale=first_scale,
                )  # fmt: skip
            if optimizer is None:
                try:
                    optimizer = _copy_of(unwrap_optimizer(subject.optimizer), originals)
                except FAILURES as error:
                    why = f"no training was tried: its optimizer cannot be copied: {_first_line(error)}"
                    return Trial(finite_once=True, losses=tuple(losses), outcome=why, scale=first_scale)
            divisor = 1.0 if subject.scaling == "none" else scale
            self._update(optimizer, weights, leaves, attempt.gradients, divisor)
        done = len(losses)
        outcome = "" if done == STEPS else first or "not finite" if not done else f"not finite in step {done + 1}"
        return Trial(finite_once=done > 0, trained=done, losses=tuple(losses), outcome=outcome, scale=first_scale)

    @torch.no_grad()
    def _update(
        self,
        optimizer: Optimizer,
        weights: dict[str, nn.Parameter],
        leaves: dict[str, nn.Parameter],
        gradients: dict[Tensor, Tensor],
        divisor: float,
    ) -> None:
        """Update trial weights as the step does, and round them into the model's leaves."""
        subject = self.subject
        for name, weight in weights.items():
            gradient = gradients.get(leaves[name])
            weight.grad = None if gradient is None else gradient.to(weight.dtype) / divisor
        gradients.clear()
        if subject.clip_value is not None:
            nn.utils.clip_grad_value_(weights.values(), subject.clip_value)
        if subject.clip_norm is not None:
            nn.utils.clip_grad_norm_(weights.values(), subject.clip_norm)
        optimizer.step()
        for name, weight in weights.items():
            weight.grad = None
            if leaves[name] is not weight:
                leaves[name].copy_(weight)

    def _finite(self, windows: Windows, window: Sequence[MicroBatch], scale: float) -> tuple[Attempt, float]:
        """Replay a window at `scale` or, if that is dynamic, at the largest lower one at which it is finite."""

        def at(scale: float) -> Attempt:
            return windows(window, factor=scale / self.subject.scale)

        attempt = at(scale)
        if not attempt.bad or self.subject.scaling != "dynamic" or any(not extremes(x)[1] for x in attempt.losses):
            return attempt, scale
        lower = highest(lambda scale: not at(scale).bad, scale, self.subject.floor)
        return (at(lower), lower) if lower else (attempt, scale)

    def _windows(self) -> Iterator[Sequence[MicroBatch]]:
        """Yield the micro-batches of each step: those of the bad step, then the ones given, then these again.

        Only the first begins with the state of the generators that it had.
        """
        own = list(self.subject.replay.window)
        yield own
        following = cycle([*self.subject.more, *own])
        for _ in range(STEPS - 1):
            taken = islice(following, len(own))
            yield [replace(micro, random={}, seed=first.seed) for micro, first in zip(taken, own, strict=True)]

    def _scale(self, policy: Policy | None) -> float:
        """Return the loss scale that a trial of `policy` begins with."""
        subject = self.subject
        if subject.scaling == "none" or policy is None or subject.policy is None:
            return subject.scale
        if policy.scale == "none":
            return 1.0
        given = policy.scale if policy.scale != subject.policy.scale else None
        return given if isinstance(given, float) else subject.scale

    # ------------------------------------------------------------------ weights

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model that the optimizer trains, by name."""
        optimizer = self.subject.optimizer
        groups = [] if optimizer is None else unwrap_optimizer(optimizer).param_groups
        stepped = {id(p) for group in groups for p in group["params"]}
        named = self.subject.model.named_parameters()
        return {name: p for name, p in named if id(p) in stepped and p.requires_grad and not is_lazy(p)}

    def _precise(self, trained: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return new parameters of the fp32 values of those that are trained."""
        binding = binding_of(self.subject.model)
        store = None if binding is None else binding.store
        return {name: nn.Parameter(_value(p, store)) for name, p in trained.items()}

    def _untrainable(self) -> str:
        """Return why no training can be tried; "" if it can."""
        if self._room is None:
            self._room = self._reason()
        return self._room

    def _reason(self) -> str:
        subject = self.subject
        if subject.optimizer is None:
            return "no optimizer is known; pass optimizer="
        if is_sharded(subject.model) or is_gathered(subject.model):
            return "the model's parameters are sharded"
        trained = self._trained()
        if not trained:
            return "the optimizer trains no parameter of the model"
        states = (subject.optimizer.state.get(p, {}) for p in trained.values())
        kept = sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and not v.is_sparse)
        need = kept + sum(p.numel() * 4 * 3 for p in trained.values())  # values, leaves or their gradients, temporaries
        device = next(iter(trained.values())).device
        if device.type == "cpu":
            enough = need <= MOST_ON_CPU
        else:
            try:
                torch.empty(need, dtype=torch.uint8, device=device)  # given back at once, and cached by torch
                enough = True
            except RuntimeError:
                enough = False
        return "" if enough else f"it takes {need / 2**30:.3g} GiB of memory beside the model"

    # ------------------------------------------------------------------ judging

    def _judged(self, policy: Policy | None, trial: Trial) -> Trial:
        """Return the trial with its judgement and its outcome in words."""
        if not trial.finite_once:
            return trial
        if trial.outcome and trial.trained < STEPS:
            return replace(trial, outcome=f"finite once: {trial.outcome}")
        losses = trial.losses
        wrong = self._rises(losses)
        if wrong:
            return replace(trial, outcome=f"finite once: {wrong}")
        words = f"trained {trial.trained} steps, loss {losses[0]:.4g} to {_end(losses):.4g}"
        base = self.subject.policy
        if base is None or policy is None or (policy.dtype == "fp32" and policy.scale == "none"):
            return replace(trial, trains=True, outcome=words)
        wide = self.wide
        if wide.finite_once is None or (wide.finite_once and not wide.trained):
            return replace(trial, trains=True, outcome=words)
        if not wide.trains:
            return replace(trial, outcome=f"finite once: in fp32 too training does not go on ({wide.outcome})")
        beside = f"in fp32 {wide.losses[0]:.4g} to {_end(wide.losses):.4g}"
        size = max(map(abs, wide.losses))
        if abs(_end(losses) - _end(wide.losses)) > NEAR * size:
            return replace(trial, outcome=f"finite, but not near fp32: {words}, {beside}")
        return replace(trial, trains=True, outcome=f"{words} ({beside})")

    def _absurd(self, losses: Sequence[Tensor]) -> str:
        """Return in words why the losses of a window are none to train on; "" if they may be.

        The smallest of its micro-batches counts: where weights have run away all are large, else one has odd data.
        """
        loss = min((_mean([loss]) for loss in losses), key=abs)
        if self.usual is not None:
            absurd = abs(loss) > max(ABSURD * self.usual, 1.0)
            return f"the loss is {loss:.3g}, and was {self.usual:.3g} before" if absurd else ""
        absurd = abs(loss) > max(ABSURD_AT_FIRST, self._largest_input**2)
        return f"the loss is {loss:.3g}" if absurd else ""

    def _rises(self, losses: Sequence[float]) -> str:
        begin = max(abs(losses[0]), self.usual or 0.0, 1e-3)
        rises = abs(_end(losses)) > RISE * begin
        return f"the loss rises from {losses[0]:.3g} to {_end(losses):.3g} in {len(losses)} steps" if rises else ""

    @cached_property
    def _largest_input(self) -> float:
        found = tensors([(micro.batch, micro.named) for micro in self.subject.replay.window])
        return max((extremes(t)[0] for t in found), default=0.0)


def more_batches(batches: Iterable[Any]) -> tuple[MicroBatch, ...]:
    """Return batches as micro-batches: as many as a trial can use.

    Raises:
        StepError: they are no iterable of batches.
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise StepError(
            f"batches must be an iterable of batches and is a {type(batches).__name__}; for one batch write [batch]"
        )
    found = []
    for batch in islice(batches, MOST_BATCHES):
        args = tuple(batch) if isinstance(batch, (tuple, list)) else () if isinstance(batch, Mapping) else (batch,)
        named = dict(batch) if isinstance(batch, Mapping) else {}
        found.append(MicroBatch(args, named, {}, versions_of((args, named))))
    return tuple(found)


def highest(finite: Callable[[float], bool], scale: float, floor: float) -> float:
    """Return the largest scale below `scale`, by powers of 16 and down to `floor`, that is finite; 0.0 for none."""
    if scale <= floor or not finite(floor):
        return 0.0
    while (scale := scale / 16.0) > floor:
        if finite(scale):
            return scale
    return floor


def _end(losses: Sequence[float]) -> float:
    return fmean(losses[-LAST:])


def _mean(losses: Sequence[Tensor]) -> float:
    return fmean(float(loss.float().mean()) for loss in losses) if losses else math.nan


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _value(parameter: nn.Parameter, store: WeightStore | None) -> Tensor:
    """Return the precise value of a parameter as a new tensor."""
    if store is not None and parameter in store:
        return store.read(parameter)
    value = parameter.detach().clone()
    return value.float() if value.dtype in LOW_DTYPES else value


@contextmanager
def _placed(model: nn.Module, weights: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Put trial weights, rounded where the model has low ones now, in the places of its parameters in a block."""
    leaves: dict[str, nn.Parameter] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, weight in weights.items():
        present = model.get_parameter(name)
        same = present.dtype is weight.dtype
        leaf = weight if same else nn.Parameter(weight.detach().to(present.dtype))
        leaf._backward_hooks = present._backward_hooks
        leaves[name] = by_id[id(present)] = leaf
    taken: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, present in list(module._parameters.items()):
                if present is not None and id(present) in by_id:
                    taken.append((module, name, present))
                    setattr(module, name, by_id[id(present)])
        yield leaves
    finally:
        for module, name, present in taken:
            setattr(module, name, present)


def _copy_of(optimizer: Optimizer, weights: dict[int, nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same class, groups and state over other parameters.

    Args:
        optimizer: the original, which is not written to.
        weights: id of a parameter of it -> the one in its place. Parameters without get an empty one.
    """
    made: Any = type(optimizer).__new__(type(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(optimizer): made}
    memo |= {id(p): weights[id(p)] if id(p) in weights else nn.Parameter(torch.empty(0)) for p in parameters}
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler's patch
    own["state"] = defaultdict(dict, {p: _wide(state) for p, state in optimizer.state.items() if id(p) in weights})
    for name in own:
        if name.startswith("_optimizer_") and name.endswith("hooks"):
            own[name] = OrderedDict()
    vars(made).update(copy.deepcopy(own, memo))
    return made  # type: ignore[no-any-return]


def _wide(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, with fp32 values for low ones; not copied otherwise."""
    low = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.dtype in LOW_DTYPES}
    return {**state, **{name: value.float() for name, value in low.items()}} if low else state
