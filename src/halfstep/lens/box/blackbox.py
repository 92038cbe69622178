"""Black box: the box of a loop written by hand, and replays of evidence files; `stepbox` has what boxes share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields, replace
from functools import partial, wraps
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.arguments import NONE, PATH, check
from halfstep.binding.prepare import prepared_policy
from halfstep.binding.wrappers import unwrap
from halfstep.cast.regions.autocast import again, autocast
from halfstep.cast.rules.recipe import run_eagerly
from halfstep.errors import StepError
from halfstep.events import hook_weakly
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES
from halfstep.kernels.choose import native_kernels
from halfstep.kernels.eager.torch_fused import is_dense
from halfstep.kernels.native.calls import Columns, number
from halfstep.kernels.sharded import local
from halfstep.lens.box.cures import instead, rebound
from halfstep.lens.box.diagnose import AROUND, INSIDE, Subject, low_of
from halfstep.lens.box.evidence import SAME, load_evidence, restate_evidence, restored
from halfstep.lens.box.loop import Loop, poisoned
from halfstep.lens.box.stepbox import CALL, MOST_REPLAYS, NO_MORE, UPDATE, Box, SkippedStep, StepBox, Topic
from halfstep.lens.calls import autocasting, extremes, region_here
from halfstep.lens.verdict import Cure, Verdict
from halfstep.meeting import processes
from halfstep.policy.policy import Policy
from halfstep.scale.finite import values_of
from halfstep.step.arguments import LOSS
from halfstep.step.parts.record import History, MicroBatch, Window
from halfstep.step.parts.statistics import Statistics
from halfstep.step.train_step import TrainStep
from halfstep.torch_private.autograd import execution_engine
from halfstep.torch_private.foreach import foreach_norm

ORDINALS = count(1)  # numbers of the boxes of this process, by which ranks name them to each other

STUCK = 6  # bad steps after which a scale that stays counts as fixed: a dynamic one falls at every second, or sooner
LISTED_EVERY = 16  # calls after which the parameters are listed again: walking a model takes longer than all the rest
GOOD = torch.zeros((), dtype=torch.bool, device="cpu")  # the flag of gradients that the host has seen to be finite
PLAIN = frozenset({Tensor})

_grad, _version = attrgetter("grad"), attrgetter("_version")
_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


def _guarded(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of methods of a box: its first error is logged after `what`, and none reaches the loop."""

    def decorated(method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def guarded(box: BlackBox, *args: Any) -> None:
            try:
                method(box, *args)
            except Exception as error:
                box._warn_once("failed", f"{what.format(box.step)}: {type(error).__name__}: {error}")

        return guarded

    return decorated


class BlackBox(Box):
    """The black box of a loop written by hand, with halfstep's regions and scalers, with torch's, or with none.

    It calls the loss function in the loop's place, keeps the arguments of the call, and reads the gradients once when
    the backward pass of the loss ends. The result is read at the next call or, with `optimizer`, before that steps, so
    that weights are still those of the bad step.

    Args:
        model: the model, prepared or not.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``; a region may be inside it, or around
            the call of the box. Losses of a batch that are reduced later will do; None, and a loss without gradient,
            is ignored.
        optimizer: the optimizer of the loop; the box reads its verdict before each of its steps.
        evidence: a folder for evidence files; None for none.

    Attributes:
        verdict: the last one, or None.

    Raises:
        StepError: an argument of the wrong kind.

    Examples:
        >>> box = hs.BlackBox(model, loss_fn, optimizer)
        >>> for x, y in batches:
        ...     box(x, y).backward()  # loss_fn(model, x, y); a region and a scaler stay where they are in the loop
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> print(box.verdict)  # a Verdict once a step was not finite
        None
    """

    spelled = "box.explain()"
    explainable = (
        "the last one was finite, or has not run backward; call it after a step whose loss or gradients are not finite"
    )

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer | None = None,
        *,
        evidence: str | Path | None = None,
    ) -> None:
        given: Any = model
        if not isinstance(given, nn.Module):
            own = "; a TrainStep has a black box of its own: step.explain()" if isinstance(given, TrainStep) else ""
            raise StepError(f"BlackBox: model must be a torch.nn.Module and is {given!r}{own}")
        check("BlackBox", StepError, loss_fn=(loss_fn, LOSS), evidence=(evidence, PATH | NONE))
        if optimizer is not None and not callable(getattr(optimizer, "register_step_pre_hook", None)):
            raise StepError(f"BlackBox: optimizer must be a torch.optim.Optimizer or None and is {optimizer!r}")
        super().__init__(None if evidence is None else Path(evidence))
        self.model = model
        self.loss_fn = loss_fn
        self.step = 0
        self._memory = History(unwrap(model), watched=True)
        self._statistics = Statistics(unwrap(model))
        self._loop = Loop()
        self._judged = self._loop.judge
        self._flag: Tensor | bool | None = None  # whether the loss or a gradient is not finite; a bool once it was read
        self._bad: Tensor | None = None  # whether a gradient is not finite
        self._columns: Columns | None = None  # the gradients of a backward pass, as the CPU kernels read them
        self._read_step = 0  # the last step whose flag was read
        self._seen: SkippedStep | None = None  # a bad step that has not been reported yet
        self._lost = False  # the same of a step whose loss alone is not finite
        self._scales: list[float] = []  # of a streak of bad steps
        self._highest = 0.0  # scale of all bad steps
        self._carried = 0  # the bad step whose gradients were last found in a later one
        self._unsaid: Verdict | None = None  # the verdict on it that is to be logged
        self._ordinal = next(ORDINALS)
        self._synced = True  # whether ranks average the gradients of the last call in its backward pass
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._around: list[AbstractContextManager[Any]] = []  # regions that the last call was made in
        self._added = False  # whether gradients were there before the backward pass
        self.follow(optimizer)

    def follow(self, optimizer: Optimizer | None) -> None:
        """Read the verdict on each step before `optimizer` steps, and watch the order of its calls."""
        self.optimizer = self._loop.optimizer = optimizer
        if optimizer is not None:
            hook_weakly(optimizer.register_step_pre_hook, self._before_update)
            if callable(add := getattr(optimizer, "register_step_post_hook", None)):
                hook_weakly(add, self._after_update)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Return ``loss_fn(model, *batch, **named)`` and keep the call; StepError if what it returns has no loss."""
        kept = self.begin(batch, named)
        returned = self.loss_fn(self.model, *batch, **named)
        self.attach(kept, _loss_in(returned))
        return returned

    def begin(self, batch: tuple[Any, ...], named: dict[str, Any]) -> MicroBatch:
        """Report the step before, and keep a batch and what its forward pass may change, which begins."""
        self.read()
        self._flag = self._bad = None
        self.step += 1
        self._memory.judged = None
        self._memory.begin_window()
        self._statistics.begin_window()
        self._around = regions_here()
        self._synced = vars(self.model).get("require_backward_grad_sync", True)
        self._memory.begin_micro_batch(self.step, batch, named)
        return self._memory.window.batches[-1]

    def attach(self, kept: MicroBatch, loss: Tensor | None) -> None:
        """Have the gradients of a loss looked at when its backward pass ends."""
        if self.step % LISTED_EVERY == 1:  # after the call, which may have made lazy ones
            found = unwrap(self.model).parameters()
            self._parameters = [p for p in found if not is_lazy(p) and not p.is_inference()]
        if loss is not None and loss.requires_grad and loss.numel():
            kept.loss = loss.detach()
            self._versions = [*map(_version, self._parameters)]
            loss.register_hook(lambda gradient: self._begin(kept, gradient))

    def _wrong_window(self) -> Window | None:
        window = self._memory.window
        return window if self._known(window) is not None or self._is_wrong() else None

    @_guarded("the backward pass of step {} was not looked at")
    def _begin(self, kept: MicroBatch, gradient: Tensor) -> None:
        if self._memory.window.batches and self._memory.window.batches[0] is kept:
            kept.seed = gradient.detach()
            engine = execution_engine
            # from within a callback: after those of DistributedDataParallel and fully_shard, which complete gradients
            engine.queue_callback(lambda: engine.queue_callback(self._look))
            there = [values_of(local(g)) for g in map(_grad, self._parameters) if g is not None]
            self._added = bool(there)
            if self._loop.bad is not None:
                self._loop.carry(self._added and bool(_not_finite(there)), self._scale())
            self._loop.begin(self.step)

    @_guarded("the gradients of step {} were not looked at")
    def _look(self) -> None:
        """Note on the device whether loss and gradients are finite; raises nothing into the user's backward pass."""
        kept, recent = self._memory.window.batches[0], self._memory.signals.recent
        loss, seed = kept.loss, kept.seed
        assert loss is not None
        found = [g for g in map(_grad, self._parameters) if g is not None]
        norm, one = self._norm_here(found), loss.numel() == 1
        here = one and type(loss) is Tensor and loss.is_cpu and norm < math.inf
        if here and math.isfinite(value := number(loss)):
            self._bad = flag = GOOD
            scale = 1.0 if seed is None else number(seed) or 1.0
            recent.append((self.step, value, norm / scale, None, False, None))
        else:
            with torch.no_grad():
                norms = _norms([values_of(local(gradient)) for gradient in found])
                self._bad = _not_finite(norms)
                flag = self._bad | _not_finite(_norms([loss]))
            if one and norms:
                versions = loss._version, norms[0]._version
                recent.append((self.step, loss, norms[0], versions, self._bad, seed))
        self._memory.end(flag, None)
        self._loop.end()
        self._flag = flag

    def _norm_here(self, gradients: list[Tensor]) -> float:
        """Return the 2-norm of gradients that the CPU kernels take, which is finite only if they are; else inf."""
        plain = PLAIN.issuperset(map(type, gradients)) and all(map(_is_cpu, gradients))
        dense = plain and (all(map(Tensor.is_contiguous, gradients)) or all(map(is_dense, gradients)))
        kernels = native_kernels(gradients[0]) if gradients and dense else None
        if kernels is None or not POLICY_DTYPES.issuperset(map(_dtype, gradients)):
            return math.inf
        if self._columns is None or not self._columns.take(gradients):
            self._columns = Columns(gradients)
        return kernels.norm(self._columns)

    @_guarded("the update of step {} was not looked at")
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.read(updating=True)
        window = self._memory.window.batches
        bad, seed = self._is_wrong() and self._gradients_bad(), window[0].seed if window else None
        self._loop.before_update(bad=bad, scale=seed, closure=_closure(args, kwargs))
        first = self._loop.wrote is None and self._explained_step != self.step
        if first and self._loop.update is not None and self._replays < MOST_REPLAYS:
            self._replays += 1  # now: afterwards the weights are gone
            self._unsaid = self._explained(self._memory.window, UPDATE)

    @_guarded("the update of step {} was not looked at")
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        update = self._loop.after_update(closure=_closure(args, kwargs))
        if update is not None and self.verdict is not None and self._explained_step == self.step:
            self._unsaid = self.verdict = self._loop.applied(self.verdict, update)
            if self._written:
                restate_evidence(self._written[-1], self.verdict)
        self._report(applied=update is not None)

    def _is_wrong(self) -> bool:
        """Return whether the loss or a gradient of the last backward pass was not finite; waits for the device once."""
        if self._flag is not None:
            self._flag = bool(self._flag)
        return bool(self._flag)

    def read(self, *, updating: bool = False) -> None:
        """Read the flag of the last backward pass, once; under an update it is reported after that."""
        if self._flag is not None and self._read_step != self.step:
            self._read_step = self.step
            if self._is_wrong():
                self._see()
            else:
                self._streak.fine()
        if not updating:
            self._report(applied=False)

    @_guarded("step {} was not finite")
    def _see(self) -> None:
        model, window, loop = unwrap(self.model), self._memory.window, self._loop
        kept = window.batches[0]
        loss_finite = kept.loss is None or extremes(kept.loss)[1]
        if not loss_finite and not self._gradients_bad():
            self._lost = True
            if not self._streak.losses and self._replays < MOST_REPLAYS:
                self._replays += 1
                self._unsaid = self._explained(window, UPDATE)
            return
        scale = self._scale()
        loop.bad = loop.bad or (self.step, scale)
        if loop.same_window:
            return  # the first bad step of this window was examined
        self._streak.skipped()
        self._scales = [*self._scales, scale] if self._streak.streak > 1 else [scale]
        self._highest = max(self._highest, scale)
        self._seen = SkippedStep(
            loss_finite=loss_finite,
            scaling=self._scaling(),
            scale=scale,
            floor=0.0,  # not known here
            low=low_of(prepared_policy(model), model),
            state_finite=loss_finite or self._state_finite(model, self.optimizer),
        )
        carried = 0 < loop.carried != self._carried and self._replays < MOST_REPLAYS
        self._carried = loop.carried
        if carried or self._is_due(self._seen, window):
            self._replays += 1
            self._unsaid = self._explained(window, UPDATE)

    def _report(self, *, applied: bool) -> None:
        for name in self._loop.facts.keys() - self._warned:
            found = replace(self._loop.facts[name], step=self.step)
            self._warn_once(name, found.headline)
            if not self._is_wrong():
                self.verdict = found
        if not (self._seen or self._unsaid or self._lost):
            return
        seen, self._seen = self._seen, None
        verdict, self._unsaid = self._unsaid, None
        kept = () if seen is None else (*self._memory.window.buffers, *self._statistics.kept())
        spoiled = self._loop.spoil(poisoned(kept, unwrap(self.model)), self.step)
        if verdict is not None:
            notes = [spoiled] if spoiled else []
            if seen is not None and not self._is_written():
                notes.append("its update was not applied: the weights are as they were")
            verdict = self.verdict = replace(verdict, notes=(*verdict.notes, *notes))
            self._announce(verdict, dynamic=seen is not None and seen.scaling == "dynamic")
        if spoiled:
            self._warn_once("buffers", spoiled)
        if self._lost:
            self._lost = False
            updated = self._is_written() if self.optimizer is None else self._loop.updates > 0
            self._warn(self.step, self._streak.lost(applied=updated))
        if seen is not None:
            applied = applied or self._loop.wrote is not None
            self._warn(self.step, self._streak.see(replace(seen, applied=applied)))

    def _is_written(self) -> bool:
        return [*map(_version, self._parameters)] != self._versions

    def _scale(self) -> float:
        """Return the largest value of the backward pass's seed: inf if a low loss cannot hold it, 1.0 without one."""
        seed = self._memory.window.batches[0].seed
        if seed is None:
            return 1.0
        largest, finite, nan = extremes(seed)
        if finite:
            return largest
        return math.inf if seed.dtype in LOW_DTYPES and not nan else 1.0

    def _named_models(self) -> tuple[nn.Module, nn.Module, str]:
        return self.model, unwrap(self.model), f"box {self._ordinal}"

    def _topic(self, window: Window, place: str) -> Topic | None:
        if not (self._synced and self._gradients_bad()) or self.exchange is None:
            return None
        return Topic(self.exchange, str(window.last), place)

    def _gradients_bad(self) -> bool:
        return self._bad is not None and bool(self._bad)

    def _scaling(self) -> str:
        """Return how the loss of a bad step was scaled, as far as the steps before it in the streak show that."""
        last = self._scale()
        if len(self._scales) >= STUCK and self._scales[0] == last > 1:
            return "static"
        return "dynamic" if max(last, self._highest) > 1 else "none"

    def _explained(self, window: Window, place: str = CALL, more: Mapping[int, MicroBatch] = NO_MORE) -> Verdict:
        seed = window.batches[0].seed
        if seed is not None and not extremes(seed)[1]:  # a replay from it finds nothing that is this model's
            self._explained_step = window.last
            self.verdict = replace(_of_seed(seed, self._scale()), rank=processes()[0], step=window.last)
            return self.verdict
        verdict, scaling = super()._explained(window, place, more), self._scaling()
        notes = []
        if self._is_written():
            hint = "" if self.optimizer is not None else "; pass optimizer="
            notes.append(f"the weights have been written to since: the replay ran with others than the step{hint}")
        if len(self._scales) >= STUCK and scaling == "static":
            notes.append(
                f"the scale was the same in {len(self._scales)} bad steps in a row: call scaler.update() after each "
                "step, and make the scaler once, before the loop"
            )
        if self._added and verdict.kind == "not_reproducible":
            notes.append("its gradients were added to those of earlier passes, which were not finite or became so")
        self.verdict = verdict = replace(verdict, notes=(*verdict.notes, *notes))
        return verdict

    def _subject(self, window: Window) -> Subject:
        model = unwrap(self.model)

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
            with ExitStack() as stack:
                for region in self._around:
                    stack.enter_context(region)
                returned = self.loss_fn(model, *batch, **named)
            return returned[0] if isinstance(returned, tuple) else returned

        policy = prepared_policy(model)
        under = instead if policy is None else rebound
        return Subject(
            model=model,
            forward=forward,
            window=window.batches,
            buffers=[*window.buffers, *self._statistics.kept()],
            optimizer=self.optimizer,
            policy=policy,
            under=lambda tried: under(model, tried),
            scaling=self._scaling(),
            scale=self._scale(),
            step=window.last,
            rank=processes()[0],
            normed=False,
            foreign="" if policy is not None else AROUND if self._around else INSIDE,
            signals=self._memory.signals,
        )


def _of_seed(seed: Tensor, scale: float) -> Verdict:
    """Return the verdict on a step whose backward pass began with a gradient that is not finite."""
    if math.isinf(scale):
        name = str(seed.dtype).removeprefix("torch.")
        return Verdict(
            kind="scale_too_high", cause="scale", sure="shown", phase="backward",
            because=f"the loss is {name}, which cannot hold it once it is scaled",
            shown="the gradient that backward() began with is infinite",
            cures=(Cure(text="return loss.float(); a dynamic scale adapts by itself"),),
        )  # fmt: skip
    return Verdict(
        kind="bad_batch", phase="backward", parameter="the gradient that backward() was given",
        detail="not all of it is finite",
        cures=(Cure(text="look at what computed that gradient"),),
        notes=("the loop has computed it, or the next stage of a pipeline, whose own verdict has the place",),
    )  # fmt: skip


def _closure(args: Any, kwargs: Any) -> bool:
    return any(map(callable, args[1:])) or callable(kwargs.get("closure"))


# An optimizer's step that is compiled calls these hooks as they are.
for _hook in (BlackBox._before_update, BlackBox._after_update):
    run_eagerly(_hook)
    vars(_hook)["_torchdynamo_disable"] = True
    vars(_hook)["_torchdynamo_disable_msg"] = "a hook of hs.BlackBox"


def regions_here() -> list[AbstractContextManager[Any]]:
    """Return contexts that open the region that is open here again: halfstep's or torch's."""
    if (recipe := region_here()) is not None:
        return [again(recipe)]
    return [torch.autocast(device, torch.get_autocast_dtype(device)) for device in autocasting()]


def _loss_in(returned: Any) -> Tensor | None:
    loss = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if loss is None or isinstance(loss, Tensor):
        return loss
    got = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, (tuple, list)) else "")
    raise StepError(f"BlackBox: loss_fn must return the loss, a tensor, or (loss, aux), and returned a {got}")


def _norms(found: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitudes of tensors, in one tensor for each device and format."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in found:
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            kinds.setdefault((real.device, real.dtype), []).append(real)
    return [torch.stack(foreach_norm(some, math.inf)) for some in kinds.values()]


def _not_finite(norms: list[Tensor]) -> Tensor:
    """Return a 0-dim bool: whether a value is not finite. Largest magnitudes show it, and cannot overflow."""
    flags = [~torch.isfinite(some).all() for some in norms]
    if len(flags) < 2:  # none: a pipeline gives its parameters their gradients later
        return flags[0] if flags else GOOD
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()


def _as_loop(known: dict[str, Any], verdict: Verdict) -> Verdict:
    """Return `verdict`; where the run's own, `known`, blames the order of its calls, which no replay has, with that."""
    if known.get("cause") != "loop":
        return verdict
    own = {f.name: known[f.name] for f in fields(Verdict) if type(known.get(f.name)) is str}
    cures = tuple(Cure(text=str(cure["text"])) for cure in known["cures"])
    note = "the order of calls was seen in the run; this replay has the step alone"
    return replace(verdict, **own, cures=cures, notes=(*verdict.notes, note))


def replay(file: str | Path, task: Any) -> Verdict:
    """Replay the evidence in `file` on a new model of `task` and return the verdict.

    Args:
        file: a ``halfstep-blackbox-STEP.pt``.
        task: an `hs.Task`, whose model, loss function and optimizer are those of the run.

    Raises:
        StepError: no evidence, no task, or weights that do not fit the task's model.

    Examples:
        >>> verdict = hs.lens.replay("evidence/halfstep-blackbox-7.pt", task)  # doctest: +SKIP
    """
    if not all(callable(getattr(task, needed, None)) for needed in ("model", "optimizer", "loss_fn")):
        raise StepError(f"replay takes an hs.Task of the run and got {type(task).__name__}")
    content = load_evidence(file)
    model = task.model()
    policy = None if content["policy"] is None else Policy.from_toml(content["policy"])
    optimizer = task.optimizer(model)
    box: BlackBox | StepBox
    if content["region"]:
        box = BlackBox(model, task.loss_fn, optimizer)
        signals = box._memory.signals
        box._around = [autocast(policy=policy)] if policy is not None and content["region"] == AROUND else []
    else:
        step = TrainStep(model, optimizer, task.loss_fn, policy=policy or "O0")
        box, signals = StepBox(step), step.record.signals
    window = restored(content, file, model, optimizer)
    signals.restore(content["signals"])
    same = {name: content[name] for name in (*SAME, "clip_norm")}
    if isinstance(box, BlackBox):
        box._memory.window = window
    subject = replace(box._subject(window), notes=tuple(content["notes"]), **same)
    box._judged = partial(_as_loop, content["verdict"])
    verdict = box.explain_subject(subject)
    if verdict.kind == "not_reproducible" and not verdict.detail:
        other = "give the model and the loss of that run: the task's code may be another than the run's was"
        verdict = replace(verdict, cures=(Cure(text=other), *verdict.cures))
    if content["model"]:
        return verdict
    note = "the evidence holds no weights: the replay ran with those that the task's model begins with"
    return replace(verdict, notes=(*verdict.notes, note))
