"""What a training step is given, and the parts that are made of it.

A setting is fixed when the step is built, or in effect from the next window on; none is ignored. Reading one costs no
Python call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.arguments import COUNT, check, fixed
from halfstep.auto.choose import Choice
from halfstep.binding.bind import Binding, binding_of
from halfstep.binding.fsdp import is_distributed
from halfstep.binding.prepare import prepare_with, prepared_policy, store_of, unchanged_on_failure
from halfstep.binding.wrappers import unwrap, unwrap_optimizer
from halfstep.cast.copies import Copies
from halfstep.errors import SettingError, StepError
from halfstep.events import StepResult
from halfstep.formats import DTYPES
from halfstep.optim import Optimizers
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.step import arguments
from halfstep.step.graphs import Graphs, refuse_graph
from halfstep.step.loss import CompiledLoss, compile_options
from halfstep.step.moments import Moments, Phase, Watchers, one_thread
from halfstep.step.part import Part
from halfstep.step.parts.gradients import KeptPages, Sums, Unfinished, Weights
from halfstep.step.parts.host_state import HostState
from halfstep.step.parts.in_backward import InBackward
from halfstep.step.parts.metrics import Metrics, MetricsLogger
from halfstep.step.parts.ranks import ranks_of
from halfstep.step.parts.record import Record
from halfstep.step.parts.scaling import Retry, Scaling
from halfstep.step.parts.statistics import Statistics
from halfstep.step.parts.verdicts import Verdicts
from halfstep.update import updater
from halfstep.update.updater import ClipNorm

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

P = TypeVar("P", bound=Part)
ANEW = "build the TrainStep anew"


class NotChosen(StepError, AttributeError):
    """Something that a step with policy="auto" does not have before its first call."""


def _assigned(name: str, assign: Callable[[Any, Any], None]) -> Any:
    return property(attrgetter(f"_given.{name}"), assign)


def _set_clip(name: str, step: Any, value: object) -> None:
    given = arguments.norm_limit(value, step.optimizer) if name == "clip_norm" else arguments.limit(name, value)
    whole = name == "clip_norm" and step.update_in_backward == arguments.TWICE and not isinstance(given, Mapping)
    if given is not None and step.update_in_backward and not whole:
        raise SettingError(
            f"TrainStep.{name}: update_in_backward={step.update_in_backward!r} sees one gradient at a time; {ANEW}"
        )
    setattr(step._given, name, given)


def _set_accumulate(step: Any, accumulate: int) -> None:
    check("TrainStep", StepError, accumulate=(accumulate, COUNT))
    if accumulate != step.accumulate:
        step._refuse_within("step.accumulate = ...")
        windows = step.cuda_graph or any(isinstance(part, Unfinished) for part in step.parts)
        if step.compile or not windows:
            raise SettingError(f"TrainStep.accumulate: the step is compiled, or built for windows of one; {ANEW}")
    step._given.accumulate = int(accumulate)


def _set_loss_fn(step: Any, loss_fn: Callable[..., Any]) -> None:
    arguments.check_loss_function(loss_fn)
    if loss_fn is not step.loss_fn and (step.compile or step.cuda_graph):
        raise SettingError(f"TrainStep.loss_fn: the one there was is compiled, or captured in a graph; {ANEW}")
    step._given.loss_fn = loss_fn


def _set_scheduler(step: Any, scheduler: LRScheduler | None) -> None:
    step._given.scheduler = arguments.one_scheduler(scheduler, step.optimizer)
    record = step.record
    record.scheduled = scheduler is not None
    if record.micro_batches:  # the verdict on the update before the window is not for it
        record.bad = None
    record.look()


class Settings:
    """The public attributes of a `TrainStep`, what happens when one is assigned, and the parts of the step."""

    _calls: threading.RLock
    _given: arguments.Given
    _moments: Any  # Moments, or `Undecided` under policy="auto" before the first call
    _in_backward: InBackward | None
    _graphs: Graphs | None

    model: nn.Module = fixed("model", ANEW, "_given.model")
    policy: Policy = fixed("policy", f"{ANEW}, after hs.unprepare(model)", "_binding.policy")
    compile: bool | Mapping[str, Any] | None = fixed("compile", ANEW, "_given.compile")
    cuda_graph: bool = fixed("cuda_graph", ANEW, "_given.cuda_graph")
    retry: int = fixed("retry", ANEW, "_given.retry")
    update_in_backward: bool | str = fixed("update_in_backward", ANEW, "_given.update_in_backward")
    state: str = fixed("state", ANEW, "_given.state")
    evidence: Path | None = fixed("evidence", f"{ANEW}: blackbox=folder", "_given.evidence")
    record: Record = fixed("record", "it counts what the step does; load a state by step.load_state_dict(...)")
    copies: Copies = fixed("copies", "step.copies.free() gives their memory back")
    choice: Choice | None = fixed("choice", f"{ANEW}: policy=...", "_given.choice")
    ordinal: int = fixed("ordinal", "it follows from the order in which steps are built", "_verdicts.ordinal")
    parts: tuple[object, ...] = fixed("parts", "step.add_part(...) and step.remove_part(...)", "_moments.parts")
    scaler: GradScaler = fixed("scaler", f"{ANEW}: scaler=..., or step.scaler.load_state_dict(...)")
    watchers: Watchers = fixed("watchers", "change the list in place: step.watchers[:] = [...], append or remove")
    generic: str = fixed("generic", "it says why the last update went through optimizer.step()", "_updater.reason")
    host_reads: int = fixed("host_reads", "it counts how often an update waited for the device", "_record.host_reads")

    clip_norm: ClipNorm = _assigned("clip_norm", partial(_set_clip, "clip_norm"))
    clip_value: float | None = _assigned("clip_value", partial(_set_clip, "clip_value"))
    accumulate: int = _assigned("accumulate", _set_accumulate)
    loss_fn: Callable[..., Any] = _assigned("loss_fn", _set_loss_fn)
    scheduler: LRScheduler | None = _assigned("scheduler", _set_scheduler)
    optimizer: Optimizer = _assigned("optimizer", lambda step, optimizer: step._replace_optimizer(optimizer))

    def __getattr__(self, name: str) -> Any:
        moments = vars(self).get("_moments")
        if name.startswith("__") or getattr(moments, "phase", None) is not Phase.UNDECIDED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise NotChosen(
            f"step.{name}: policy='auto' chooses in the first call of the step, which has not come yet; call "
            "step(*batch), or load a checkpoint, before"
        )

    def add_part(self, part: P, *, in_graphs: bool = False) -> P:
        """Call `part` too, after the others, from the next call of the step on; return it.

        A step that replays CUDA graphs, in which Python does not run, refuses it; with `in_graphs` it calls its
        `end_call` alone.

        Raises:
            StepError: it is no `hs.step.Part`, or the step replays CUDA graphs.
        """
        if not isinstance(part, Part):
            raise StepError(f"add_part({type(part).__name__}): expected an hs.step.Part")
        if self.cuda_graph and not in_graphs:
            raise StepError(
                f"add_part({type(part).__name__}): a captured step runs no Python; leave out cuda_graph, or, for a "
                "part with end_call alone, add_part(part, in_graphs=True)"
            )
        self._moments.add(part)
        return part

    def remove_part(self, part: Part) -> None:
        """Call `part` no longer; nothing happens if it was not added."""
        self._moments.remove(part)

    def metrics(self, *, every: int = 50, to: MetricsLogger | None = None) -> Metrics:
        """Begin to collect metrics, anew at a second call: a record every so many updates; return where to poll them.

        Each goes to ``to.add(record)`` instead, see `hs.integrations.loggers`. A wrong argument is a StepError.
        """
        made = Metrics(every, to=to)
        for part in self._moments.parts:
            if isinstance(part, Metrics):
                self._moments.remove(part)
        self._moments.add(made)
        return made

    def _weighing(self) -> Weights | None:
        return next((part for part in self.parts if isinstance(part, Weights)), None)

    def _weigh(self, reference: float | None = None) -> None:
        """Weigh micro-batches from now on, if windows have several of them or ranks take part."""
        weighing = self._weighing()
        if weighing is None:
            if self.accumulate == 1 and self._ranks.group is None and not is_distributed(self._given.model):
                return
            weighing = self._moments.add(Weights(self._given, self._record, self._ranks))
        weighing.reference = reference if weighing.reference is None else weighing.reference

    @one_thread
    def flush(self) -> StepResult | None:
        """Update with the micro-batches of an unfinished window (their mean); None if there are none.

        Also reads the last verdict and advances the scheduler. Under DistributedDataParallel with ``accumulate`` > 1 or
        in `join` it is collective and waits for the device: every rank calls it, also one that has none left. Windows
        may differ in length; each micro-batch of any rank counts the same.

        Raises:
            StepError: the window's gradients cannot be averaged over the ranks; on all of them alike.
        """
        if self._moments.phase is Phase.UNDECIDED:
            return None
        step, moments, record, ranks = cast("TrainStep", self), self._moments, self._record, self._ranks
        if moments.phase is not Phase.REST:
            moments.refuse(record.done)
        moments.grad = torch.is_grad_enabled()
        self._verdicts.settle(wait=True)
        count, scale = ranks.agree(self.accumulate)
        if not count:
            return None
        counts = [count]

        def finish() -> StepResult:  # other ranks run a window again too, and agree anew in a join
            number = counts.pop() if counts else ranks.agree(self.accumulate)[0] if ranks.joining else count
            norm, bad, culprits = step._update(number)
            loss = torch.full_like(norm, float("nan"))
            return StepResult(record.done, loss, None, record.scale, norm, bad, True, culprits)

        def run() -> StepResult:
            if not record.micro_batches:  # other ranks have micro-batches left
                moments.begin()
                record.scale = scale
            ranks.averaged = False
            return finish()

        try:
            return step._call(run, finish, None)
        finally:
            ranks.averaged = True

    def join(self) -> AbstractContextManager[None]:
        """Return a context for a loop over batches of which some ranks have fewer: ``with step.join(): ...``.

        A rank that leaves it makes the updates of the others with them, as `flush` does, until none has a micro-batch
        left; all ranks end with the same state. It takes the place of DistributedDataParallel's own `join`. Inside,
        gradients are averaged after the backward pass, and each update waits for the device.

        Raises:
            StepError, UnbuiltError: a model whose passes need all ranks: under fully_shard or with SyncBatchNorm; a
                static graph or a communication hook.
        """
        return self._ranks.join(self.flush)

    def _build(self) -> None:
        """Prepare model and optimizer, and make the parts of the step; if that fails, nothing has changed."""
        given: Any = self._given
        model, optimizer, step = given.model, given.optimizer, cast("TrainStep", self)
        options = compile_options(given.compile, accumulate=given.accumulate, cuda_graph=given.cuda_graph)
        device = refuse_graph(model, optimizer) if given.cuda_graph else None
        wanted = Policy.of(given.policy if given.policy is not None else prepared_policy(model) or "mixed")
        if options is not None and wanted.dtype not in {"auto", *DTYPES}:
            raise StepError(
                f"compile: format {wanted.dtype!r} is simulated, in Python, which torch.compile cannot trace; leave "
                "compile out, or choose a format that torch has"
            )
        self._ranks = ranks_of(model, wanted)
        self._compiled = None if options is None else CompiledLoss(given.loss_fn, options)
        with unchanged_on_failure(model, optimizer):
            # a graph repeats work that Python does not see and could not run again
            replayable = given.blackbox is not False and not given.cuda_graph
            self._record = Record(unwrap(model), replayable=replayable)
            one_pass = given.clip_value is None and not updater.unsuited(optimizer)
            _, _, own_scaler = prepare_with(model, optimizer, wanted, one_pass=one_pass)
            self._binding: Binding = binding_of(unwrap(model))  # type: ignore[assignment]
            self._scaler = own_scaler if given.scaler is None else given.scaler
            self._make_parts()
            self._graphs = None if device is None else Graphs(step, device)
            self._take_optimizer()
            if self._scaler.is_enabled():
                self._scaler.name_parameters(unwrap(model).named_parameters())

    def _make_parts(self) -> None:
        """Make the parts of the step: those that have something to do, in their order."""
        given, record, ranks = self._given, self._record, self._ranks
        model, optimizer = unwrap(given.model), given.optimizer
        wrapped = getattr(given.model, "no_sync", None) is not None  # its hooks read each gradient in its place
        names = {id(p): name for name, p in model.named_parameters()}
        store = store_of(given.model)
        several = isinstance(optimizer, Optimizers)
        self._updater = (updater.SeveralUpdaters if several else updater.Updater)(optimizer, store, names)
        windows = given.accumulate > 1 and not given.cuda_graph  # a graph does not repeat what is added by Python
        wide = self._updater.stepped_parameters() if store is None else ()
        self._copies = Copies(model, wide if windows else (), self._binding.recipe, sums=not wrapped)
        low = store.parameters() if store is not None and self._binding.policy.grads == "fp32" else ()
        self._watchers = Watchers(self._updater.parameters)
        self._moments = Moments((), self._updater.has_written)
        moments: Any = weakref.proxy(self._moments)  # parts do not keep what calls them
        alone = not wrapped and not is_distributed(model)
        self._verdicts = Verdicts(cast("TrainStep", self), moments, alone=alone)
        parts: list[object] = [] if alone else [self._verdicts]
        parts += [self._updater, record]
        if given.state == "host":  # its copies are queued before the record's verdict, and there before it is
            parts.append(HostState(self._updater, whole=not given.update_in_backward))
        if windows:
            parts.append(self._copies)
        if sums := Sums(low, hooked=(not wrapped or ranks.own) and not given.cuda_graph, windows=windows):
            parts.append(sums)
        ranks.take_part(store, record)
        parts += [ranks] if wrapped else []
        # watchers see complete gradients before the update and, in reverse order, those not yet dropped after it
        parts.append(self._watchers)
        self._scales = scales = self._scaler.is_enabled()
        if scales and given.retry:
            parts.append(Retry(given.retry, self._scaler, self._updater, record, ranks, moments))
        elif scales:
            parts.append(Scaling(self._scaler, self._updater))
        if windows:
            parts.append(Unfinished(self._updater, record))
        if record.history is not None:  # `Retry` may have made it
            parts.insert(parts.index(record), record.history)
        self._make_in_backward()
        self._moments.call(parts)
        record.scheduled = given.scheduler is not None
        record.signals.learning.watch(self, moments)
        self._statistics = Statistics(model, self._moments.add)
        self._moments.add(KeptPages(self, moments))

    def _make_in_backward(self) -> None:
        self._in_backward = None
        if self.update_in_backward:
            given, alone = self._given, self._verdicts.alone
            self._in_backward = InBackward(given, self._updater, self._scaler, self.record, self.watchers, alone=alone)
            self._moments.has_written = self._in_backward.has_written

    def _take_optimizer(self) -> None:
        self._updater.refuse_replaced_parameters()
        if not any(getattr(m, "sparse", False) for m in unwrap(self.model).modules()):  # fused forms take none of those
            self._updater.prefer_fused()

    def _replace_optimizer(self, optimizer: Optimizer) -> None:
        """Train with another optimizer over parameters of the model from the next window on."""
        optimizer, before = unwrap_optimizer(optimizer), self.optimizer
        arguments.check_optimizer(optimizer)
        if optimizer is before:
            return
        self._refuse_within("step.optimizer = ...")
        self._verdicts.settle(wait=True)
        if getattr(self.scheduler, "optimizer", optimizer) is not optimizer:
            raise StepError(
                "step.scheduler moves the learning rate of the optimizer that is replaced; assign step.scheduler = "
                "None, then step.optimizer, then a scheduler of the new one"
            )
        if isinstance(optimizer, Optimizers) is not isinstance(before, Optimizers):
            raise SettingError(f"TrainStep.optimizer: one optimizer does not take the place of several; {ANEW}")
        if self.cuda_graph:
            refuse_graph(self.model, optimizer)
        in_backward = self._in_backward
        with unchanged_on_failure(self.model, optimizer):
            try:
                prepare_with(self.model, optimizer, self._binding.wanted, one_pass=not updater.unsuited(optimizer))
                self._use(optimizer)
                self._take_optimizer()
                self._make_in_backward()
            except BaseException:
                self._use(before)
                self._in_backward = in_backward
                raise

    def _use(self, optimizer: Optimizer) -> None:
        self._given.optimizer = optimizer
        self._updater.use(optimizer)

    def _refuse_within(self, what: str) -> None:
        self._moments.refuse(self.record.done)
        self._refuse_window(what, "assign it")

    def _refuse_window(self, what: str, then: str = "save") -> None:
        """Refuse to save, copy or change the step while gradients of an accumulation window wait for their update."""
        if self.record.micro_batches:
            raise StepError(
                f"{what} after {self.record.micro_batches} of {self.accumulate} micro-batches would lose their "
                f"gradients; {then} between updates, or call step.flush() first"
            )
