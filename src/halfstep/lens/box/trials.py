"""Trials: some steps of training under a policy, from the state of a bad step, beside the same steps in fp32.

A policy under which a step is finite once may still not train: its loss is 1e13, or statistics of a BatchNorm become
infinite. A trial goes on from the bad step with the same micro-batches and random numbers, and more batches if given;
then all is as before. What is said of fp32 comes from such a trial, in which casts by name (`.half()`) do nothing
either; that updates are to blame, from the same trial without them.

Note [trial weights]: a trial has parameters of its own, which take the places of the model's for its time, and a copy
of the optimizer over fp32 values of them; the user's tensors are not written to. Where the policy has low parameters,
the fp32 values are rounded into them after each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.binding.fsdp import fits, is_distributed
from halfstep.binding.prepare import store_of
from halfstep.binding.wrappers import unwrap_optimizer
from halfstep.errors import StepError, lacks_memory
from halfstep.formats import LOW_DTYPES
from halfstep.lens.box.diagnose import LOWEST, Subject
from halfstep.lens.box.replay import Attempt, Windows
from halfstep.lens.calls import extremes, taken_from, widened, writes
from halfstep.lens.tracing import Sink, Tracer
from halfstep.optim import clipped_together, copy_of, stepped_by
from halfstep.policy.policy import Policy
from halfstep.snapshot import Snapshot, attributes
from halfstep.step.parts.record import MicroBatch, random_states, versions_of
from halfstep.torch_private.autograd import backward_hooks
from halfstep.torch_private.modules import global_optimizer_post_hooks, global_optimizer_pre_hooks
from halfstep.trees import map_tensors, tensors

STEPS = 12  # steps of a trial, the bad one included
MOST_BATCHES = 32  # so many of the batches given are taken, and kept until the trials end
BYTES = 12  # of trial weights, their gradients and what an update needs meanwhile, for each element
BEYOND = 2.0**20  # a loss below this, which is 16 times what fp16 holds, is one to train on
ABSURD = 1e3  # times the usual loss, above which it may be none; at first that of a sum over the squares of the batch
LOST = 3.0  # training is lost if the loss was so many times the usual one before the step, and is so after the trial
NEAR = 0.25  # a loss is near that of fp32 if they differ by so much of the largest loss of the fp32 trial, at most
LAST = 3  # so many losses are averaged at the end of a trial
FELL = 0.25  # share of its size by which a loss falls in a trial, however large it is, where training goes on
RISING = 1.5  # times that a loss rises within a trial, above the same steps without updates, where training runs away


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What training under one policy showed."""

    finite_once: bool | None  # whether the bad step is finite under it; None if it cannot run
    trained: int = 0  # steps that were made and finite
    losses: tuple[float, ...] = ()  # their losses
    trains: bool = False  # whether all steps are finite, their losses as losses may be, and near those of fp32
    outcome: str  # all this in words
    scale: float = 1.0  # the loss scale at which the first step was finite


class Trials:
    """The trials of one bad step, whose policy is known by now, if it can be; each policy is tried once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.fp32 = (subject.policy or Policy.of("O0")).replace(dtype="fp32", scale="none")
        self._known: dict[Policy | None, Trial] = {}
        self._random: list[dict[str, torch.Generator]] = []  # states of the generators at each step after the first

    @cached_property
    def wide(self) -> Trial:
        """The trial with everything in fp32, unscaled; without casts by name, where those keep it from training."""
        given = self.of(self.fp32)
        whole = given if given.trains or given.finite_once is None else self._tried(self.fp32, by_name=False)
        return whole if whole.trains or whole.finite_once and not given.finite_once else given

    @property
    def by_name(self) -> bool:
        """Whether fp32 trains only without what the program makes low by name: a cast, the model, its inputs."""
        return self.wide.trains and not self.of(self.fp32).trains

    @cached_property
    def still(self) -> Trial:
        """The trial in fp32 without updates."""
        return self._tried(self.fp32, by_name=not self.by_name, updates=False)

    @cached_property
    def astray(self) -> str:
        """What shows that updates make fp32 worse than the same steps without them; "" if they do not."""
        wide, still = self.wide, self.still
        if not wide.trained or not still.trained:
            return ""
        largest = max(map(abs, still.losses))
        if abs(_end(wide.losses)) <= RISING * largest and wide.trained >= still.trained:
            return ""
        beside = f"without updates {still.trained} steps are finite, the loss at most {largest:.3g}"
        return f"in fp32: {wide.outcome}; {beside}"

    @cached_property
    def before(self) -> list[float]:
        """Sizes of the losses before the bad step."""
        history = self.subject.signals.read()
        known = zip(history.steps, history.losses, strict=True)
        return [abs(loss) for step, loss in known if math.isfinite(loss) and step < self.subject.step]

    @property
    def usual(self) -> float | None:
        """The median size of the losses before the bad step; None without any."""
        return median(self.before) if self.before else None

    def of(self, policy: Policy | None) -> Trial:
        """Return what training under `policy` shows; None: as the loss function is, where no policy is known."""
        if policy not in self._known:
            self._known[policy] = self._tried(policy)
        return self._known[policy]

    def _tried(self, policy: Policy | None, *, by_name: bool = True, updates: bool = True) -> Trial:
        why = self._untrainable
        if not why:
            try:
                with self._under(policy, by_name) as windows:
                    trial = self._train(policy, windows, updates)
                return self._judged(policy, trial)
            except Exception as error:  # of the user's code
                why = _first_line(error)
        try:
            with self._under(policy, by_name) as windows:
                attempt, scale = self._finite(windows, self.subject.window, self._scale(policy))
        except Exception as error:
            return Trial(finite_once=None, outcome=f"it cannot run: {_first_line(error)}")
        if attempt.bad or attempt.odd:
            return Trial(finite_once=False, outcome=attempt.odd or "not finite", scale=scale)
        losses = (_mean(attempt.losses),)
        return Trial(finite_once=True, losses=losses, outcome=f"finite once: not trained: {why}", scale=scale)

    # ------------------------------------------------------------------ running

    @contextmanager
    def _under(self, policy: Policy | None, by_name: bool) -> Iterator[Windows]:
        """Return in a block what runs windows under `policy`; trial weights take their places inside it."""
        subject = self.subject
        with nullcontext() if policy is None else subject.under(policy), ExitStack() as stack:
            if not by_name:
                low = {p for p in subject.model.parameters() if p.dtype in LOW_DTYPES}
                made = {id(p): nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in low}
                stack.enter_context(in_place_of(subject.model, made))
                stack.enter_context(Tracer(_NothingLow()))
            wide = subject.wide if policy is None else policy.grads == "fp32"
            with replace(subject, wide=wide).windows() as windows:
                yield windows

    def _train(self, policy: Policy | None, windows: Windows, updates: bool) -> Trial:
        """Train, or run the same steps without updates; the outcome is "" unless it stopped, or shows no training."""
        subject, scale = self.subject, self._scale(policy)
        assert subject.optimizer is not None
        losses: list[float] = []
        found, absurd, first_scale = "", "", scale
        with _no_optimizer_hooks(), _placed(subject.model, self._trained) as weights:
            optimizer = _over(weights, unwrap_optimizer(subject.optimizer))
            finite = {name for name, buffer in subject.model.named_buffers() if extremes(buffer)[1]}
            for window in self._windows():
                attempt, scale = self._finite(windows, window, scale)
                first_scale = first_scale if losses else scale
                if attempt.bad or attempt.odd:
                    found = attempt.odd or (f"not finite in step {len(losses) + 1}" if losses else "not finite")
                    break
                losses.append(_mean(attempt.losses))
                buffers = subject.model.named_buffers()
                broken = [name for name, buffer in buffers if name in finite and not extremes(buffer)[1]]
                absurd = absurd or self._absurd(attempt.losses)
                if broken:
                    found = f"{broken[0]} is not finite afterwards"
                    break
                if updates:
                    self._update(optimizer, weights, attempt.gradients, 1.0 if subject.scaling == "none" else scale)
            fell = bool(losses) and losses[0] - _end(losses) > FELL * abs(losses[0])
            return Trial(
                finite_once=bool(losses),
                trained=len(losses),
                losses=tuple(losses),
                outcome=found or ("" if fell else absurd),
                scale=first_scale,
            )

    @torch.no_grad()
    def _update(
        self, optimizer: Optimizer, weights: Sequence[_Weight], gradients: dict[Tensor, Tensor], divisor: float
    ) -> None:
        for weight in weights:
            gradient = gradients.pop(weight.leaf, None)
            weight.precise.grad = None if gradient is None else gradient.to(weight.precise.dtype) / divisor
        precise = [weight.precise for weight in weights]
        if self.subject.clip_value is not None:
            nn.utils.clip_grad_value_(precise, self.subject.clip_value)
        for parameters, limit in clipped_together(optimizer, self.subject.clip_norm):
            if limit is not None:
                nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        for weight in weights:
            weight.precise.grad = None
            if weight.leaf is not weight.precise:
                weight.leaf.copy_(weight.precise)

    def _finite(self, windows: Windows, window: Sequence[MicroBatch], scale: float) -> tuple[Attempt, float]:
        """Return a replay at `scale` or, if that is dynamic, at the largest lower one at which gradients are finite."""
        subject = self.subject

        def at(scale: float) -> Attempt:
            return windows(window, factor=scale / subject.scale)

        attempt = at(scale)
        if not attempt.bad or subject.scaling != "dynamic" or any(not extremes(x)[1] for x in attempt.losses):
            return attempt, scale
        lower = highest(lambda scale: not at(scale).bad, scale, max(subject.floor, LOWEST))
        return (at(lower), lower) if lower else (attempt, scale)

    def _windows(self) -> Iterator[Sequence[MicroBatch]]:
        """Yield the micro-batches of each step: those of the bad step, then the ones given, then these again.

        The first begins with the state of the generators that it had, and each other with that of the first trial.
        """
        own = list(self.subject.window)
        yield own
        following = cycle([*self.subject.more.values(), *own])
        for number in range(STEPS - 1):
            self._random += [random_states()] if number == len(self._random) else []
            begin, *rest = (_following(m, first) for m, first in zip(islice(following, len(own)), own, strict=True))
            yield [replace(begin, random=self._random[number]), *rest]

    def _scale(self, policy: Policy | None) -> float:
        subject = self.subject
        if subject.scaling == "none" or policy is None or subject.policy is None:
            return subject.scale
        if policy.scale == "none":
            return 1.0
        changed = policy.scale != subject.policy.scale
        return policy.scale if changed and isinstance(policy.scale, float) else subject.scale

    # ------------------------------------------------------------------ weights

    @cached_property
    def _trained(self) -> dict[str, nn.Parameter]:
        optimizer = self.subject.optimizer
        stepped = set() if optimizer is None else {id(p) for p in stepped_by(unwrap_optimizer(optimizer))}
        named = self.subject.model.named_parameters()
        return {name: p for name, p in named if id(p) in stepped and p.requires_grad and not is_lazy(p)}

    @cached_property
    def _untrainable(self) -> str:
        """Why no training can be tried; "" if it can."""
        subject, trained = self.subject, self._trained
        if subject.optimizer is None:
            return "no optimizer is known; pass optimizer="
        if is_distributed(subject.model):
            return "the model's parameters are sharded"
        if not trained:
            return "the optimizer trains no parameter of the model"
        states = (unwrap_optimizer(subject.optimizer).state.get(p, {}) for p in trained.values())
        kept = sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and not v.is_sparse)
        need = kept + sum(p.numel() * BYTES for p in trained.values())
        return "" if fits(need, next(iter(trained.values())).device) else f"that takes {need / 2**30:.3g} GiB of memory"

    # ------------------------------------------------------------------ judging

    def _judged(self, policy: Policy | None, trial: Trial) -> Trial:
        if not trial.finite_once:
            return trial
        losses = trial.losses
        wrong = trial.outcome or self._astray(losses)
        if wrong:
            if not self.subject.normed and trial.trained > 1:
                wrong += "; a loop's own clipping is not known here"
            return replace(trial, outcome=f"finite once: {wrong}")
        words = f"trained {trial.trained} steps, loss {losses[0]:.4g} to {_end(losses):.4g}"
        base = self.subject.policy
        if base is None or policy is None or (policy.dtype == "fp32" and policy.scale == "none"):
            return replace(trial, trains=True, outcome=words)
        wide = self.wide
        if wide.finite_once is None or (wide.finite_once and not wide.trained):
            return replace(trial, trains=True, outcome=words)
        if not wide.trains:
            return replace(trial, outcome=f"{words}, but fp32 did not train ({wide.outcome})")
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
        bound = max(BEYOND, ABSURD * (self.usual or self._natural))
        before = "" if self.usual is None else f", and was {self.usual:.3g} before"
        return f"the loss is {loss:.3g}{before}" if abs(loss) > bound else ""

    def _astray(self, losses: Sequence[float]) -> str:
        """Return in words that the loss had risen before the step, and that the trial does not bring it back."""
        usual, latest, end = self.usual, self.before[-1] if self.before else 0.0, abs(_end(losses))
        if not usual or latest <= LOST * usual or end <= LOST * usual:
            return ""
        return f"the loss rose from {usual:.3g} to {latest:.3g} before, and is {end:.3g} after {len(losses)} steps"

    @cached_property
    def _natural(self) -> float:
        """A sum over the squares of the batch, as losses that are not divided by a count have it at first."""
        found = tensors([(micro.batch, micro.named) for micro in self.subject.window])
        return max((max(1.0, extremes(t)[0] ** 2) * t.numel() for t in found), default=1.0)


def more_batches(batches: Iterable[Any]) -> dict[int, MicroBatch]:
    """Return batches by number, from 1: as many as a trial can use, without those that are not finite themselves."""
    found = {}
    for number, (args, named) in enumerate(taken_from(batches, MOST_BATCHES, StepError), 1):
        if all(extremes(tensor)[1] for tensor in tensors((args, named))):
            found[number] = MicroBatch(args, named, {}, versions_of((args, named)))
    if not found:
        raise StepError("batches gave no batch of finite values: an iterator may be used up; pass a list, or a new one")
    return found


def refuse_wrong(subject: Subject) -> None:
    """Run each further batch of a step once, as the step was run; StepError if the loss function does not take it."""
    own = subject.window[0]
    for number, micro in subject.more.items():
        cause: Exception | None = None
        try:
            with subject.windows() as windows:
                why = windows([_following(micro, own)]).odd
        except Exception as error:  # of the loss function
            if lacks_memory(error):
                raise
            why, cause = _first_line(error).rstrip("."), error
        if why:
            raise StepError(
                f"explain(batches=...): batch {number} cannot be run as the batch of the step was: {why}. It holds "
                f"{_contents(micro)}; that of the step holds {_contents(own)}. Give batches like that one, each as a "
                "tuple of the positional arguments of the loss function after the model, or as a dict of named ones"
            ) from cause


def _following(micro: MicroBatch, first: MicroBatch) -> MicroBatch:
    """Return a batch as it runs after `first` or in its place: with its seed, from the present random numbers."""
    return replace(micro, random={}, seed=first.seed)


def _contents(micro: MicroBatch) -> str:
    words = [*map(_form, micro.batch), *(f"{name}={_form(value)}" for name, value in micro.named.items())]
    return ", ".join(words) or "nothing"


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


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


@dataclass(frozen=True, eq=False, slots=True)
class _Weight:
    """One parameter of a trial: note [trial weights]."""

    original: nn.Parameter  # the user's
    precise: nn.Parameter  # its fp32 value, which is updated
    leaf: nn.Parameter  # what is in the model's place; `precise` itself unless the policy has a low one there


@contextmanager
def _no_optimizer_hooks() -> Iterator[None]:
    """Call no hook that the program has for all optimizers in a block; one that is removed meanwhile stays removed."""
    kept: list[tuple[Any, dict[int, Any]]] = [
        (hooks, dict(hooks)) for hooks in (global_optimizer_pre_hooks, global_optimizer_post_hooks)
    ]
    try:
        for hooks, own in kept:
            hooks.update(dict.fromkeys(own, lambda *given: None))
        yield
    finally:
        for hooks, own in kept:
            hooks.update({key: hook for key, hook in own.items() if key in hooks})


@contextmanager
def _placed(model: nn.Module, trained: dict[str, nn.Parameter]) -> Iterator[list[_Weight]]:
    """Put trial weights in the places of the parameters `trained` in a block, in the formats that are there now."""
    store = store_of(model)
    weights: dict[int, _Weight] = {}
    for name, original in trained.items():
        value = store.read(original) if store is not None and original in store else Tensor.detach(original).clone()
        precise = nn.Parameter(value.float() if value.dtype in LOW_DTYPES else value)
        present = model.get_parameter(name)
        rounded = precise.detach().to(present.dtype)
        leaf = precise if present.dtype is precise.dtype else nn.Parameter(rounded)
        leaf._backward_hooks = backward_hooks(original)
        weights[id(present)] = _Weight(original, precise, leaf)
    with in_place_of(model, {key: weight.leaf for key, weight in weights.items()}):
        yield list(weights.values())


class _NothingLow(Sink):
    """Runs in fp32 what the program makes low by name."""

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if writes(func):
            return func(*args, **kwargs)
        args, kwargs = map_tensors((args, kwargs), lambda t: t.float() if t.dtype in LOW_DTYPES else t)
        func, args, kwargs = widened(func, args, kwargs, torch.float32)
        return func(*args, **kwargs)


@contextmanager
def in_place_of(model: nn.Module, made: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Put parameters in the places of others, given by their ids, in a block.

    Another format in `.data` would remove the hooks of a gradient.
    """
    with Snapshot(attributes(model.modules())).returning():
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in made:
                    setattr(module, name, made[id(parameter)])
        yield


def _over(weights: Sequence[_Weight], optimizer: Optimizer) -> Optimizer:
    """Return a copy of `optimizer` over trial weights, with fp32 values for low states."""
    memo: dict[int, Any] = {id(weight.original): weight.precise for weight in weights}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in memo:  # of another model
            memo[id(state)] = {}
            continue
        memo |= {id(v): v.float() for v in state.values() if isinstance(v, Tensor) and v.dtype in LOW_DTYPES}
    for parameter in stepped_by(optimizer):  # an empty one has no gradient
        memo.setdefault(id(parameter), nn.Parameter(torch.empty(0, device="cpu")))
    return copy_of(optimizer, memo)
