"""TrainStep: one training step under a policy, from micro-batch to update.

A call runs one micro-batch: the forward pass in the policy's region, then the scaled backward pass. A window is
`accumulate` of them and ends with an update: gradients are completed, read once for norm and verdict, and applied with
one factor that unscales and clips. Everything that must stay consistent through a window is a participant of `Moments`;
what was done is in `Record`.

Note [bad steps]: in every format, with or without scaling, an update whose gradient norm is not finite is not applied.
The verdict is a tensor on the device; fused optimizers read it there, others cost one counted host read. BatchNorm
statistics, which the forward pass has already changed, are restored by the same verdict, also those of other prepared
models that loss_fn calls. Where a scheduler or the black box needs the verdict of update n, the host waits for it when
the next forward and backward pass are queued, if it has not arrived before: the device does not idle meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.binding.bind import binding_of
from halfstep.binding.construct import unchanged_on_failure
from halfstep.binding.fsdp import is_distributed
from halfstep.binding.prepare import prepare_with, prepared_policy, store_of, unwrap
from halfstep.binding.wrappers import unwrap_optimizer
from halfstep.cast.copies import Copies
from halfstep.cast.regions.opening import opened
from halfstep.cast.regions.stack import backward
from halfstep.cast.rules.recipe import Recipe, run_eagerly
from halfstep.cast.state import STATE
from halfstep.events import StepResult
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.pages import keep_pages
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.step.arguments import (
    check_arguments,
    check_loss,
    evidence_folder,
    limit,
    retries,
)
from halfstep.step.batch_errors import EXPLAINED, explained
from halfstep.step.byproducts import detached
from halfstep.step.compiled import CompiledLoss, compile_options, refuse_untraceable
from halfstep.step.evaluate import evaluate
from halfstep.step.graph.capturable import refuse_graph
from halfstep.step.graph.graphs import Graphs
from halfstep.step.moments import MICRO_BATCH, REST, Moments, Watchers, one_thread
from halfstep.step.parts.metrics import Metrics, MetricsLogger
from halfstep.step.parts.ranks import join, ranks_of, refuse_flush
from halfstep.step.parts.record import Record
from halfstep.step.parts.retry import ENOUGH, Retry
from halfstep.step.parts.scaling import Scaling
from halfstep.step.parts.schedule import advance
from halfstep.step.parts.statistics import Statistics
from halfstep.step.parts.sums import Sums
from halfstep.step.parts.unfinished import Unfinished
from halfstep.step.settings import Settings
from halfstep.step.state import copied, load_step, save_step
from halfstep.update import updater as update
from halfstep.update.phases import profiler_runs, show_phases
from halfstep.update.updater import Culprits, Updater

if TYPE_CHECKING:
    from halfstep.auto.choose import Choice
    from halfstep.lens.verdict import Verdict

__all__ = ["TrainStep"]

WHOLE = nullcontext()
NO_GRADIENT = {type(None)}
ORDINALS = count(1)
_grad = attrgetter("grad")


class TrainStep(Settings):
    """One training step under a policy: forward, scaled backward, accumulation, clipping, guarded update.

    It prepares what is not prepared, uses an optimizer's fused form where only speed changes, and waits for the work
    just queued only where a result is read. Unscaling is part of the update: `p.grad` is not meant to be read.

    Settings may be assigned between two windows where an argument below says so; others refuse it.

    Attributes:
        record: how far it has come: micro-batches, scale and verdict of the last update, waits for the device.
        ordinal: its number among the steps of this process that several ranks make, from 1; 0: it is made by one.
        copies: the low copies of fp32 weights that it keeps from step to step: how many `bytes`, and `free()`.
        evidence: the folder for the evidence of bad steps, or None.
        choice: what policy="auto" has chosen by measuring in the first call, and why; None under any other.

    Args:
        model: the model, prepared or not; DistributedDataParallel, DataParallel or torch.compile around a prepared one.
        optimizer: a torch optimizer over the model's parameters. May be assigned, as may the next one.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``; loss a 0-dim tensor, aux any tree.
        policy: preset name, TOML path or Policy; default: what the model was prepared with, else "mixed"; or "auto".
        clip_norm: largest 2-norm of the (unscaled, accumulated) gradient; None: no clipping. May be assigned.
        clip_value: largest absolute value of a gradient element; None: no clipping. May be assigned.
        accumulate: micro-batches per update; gradients are their mean. May be assigned where it was above 1.
        scaler: a GradScaler, also one shared with other TrainSteps; default: what the policy's `scale` says.
        scheduler: a learning-rate scheduler to advance after each update that was applied. May be assigned.
        compile: whether torch.compile compiles `loss_fn` and its backward pass; a dict: its arguments; None: as "auto".
        cuda_graph: whether to capture the whole step, update included, in a CUDA graph for each kind of batch.
        blackbox: whether a step that is not finite for another reason than a dynamic scale on its way down is replayed
            and explained, by one line of the logger "halfstep"; a folder: and its evidence kept there. See `explain`.
        retry: whether a window that overflowed under a dynamic scale runs again at the lower one, so that no batch is
            lost; a number: so often at most (True: 16). `loss_fn` is called again. One wait for the device an update.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete, which is then freed:
            no memory for all gradients. Without clipping, scaling, accumulation and ranks; see `in_backward`.

    Raises:
        StepError: arguments that make no sense together; later, a loss that is not a scalar, or no gradient at all.
        BindError, PolicyError, UnbuiltError: as `prepare`; the last also if a wrapper cannot do `reduce` or `grads`.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn, policy="mixed", clip_norm=1.0)
        >>> result = step(x, y)  # result.host() waits, and returns loss, scale, grad_norm, skipped, ...
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        *,
        policy: Policy | str | Path | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        cuda_graph: bool = False,
        blackbox: bool | str | Path = True,
        retry: bool | int = False,
        update_in_backward: bool = False,
    ) -> None:
        self._calls = threading.RLock()  # held by the thread that is inside of a call
        optimizer = unwrap_optimizer(optimizer)
        check_arguments(model, loss_fn, accumulate, scaler, scheduler, optimizer, cuda_graph, update_in_backward)
        accumulate = int(accumulate)
        self._clip_norm, self._clip_value = limit("clip_norm", clip_norm), limit("clip_value", clip_value)
        self._evidence = evidence_folder(blackbox)
        self._attempts = retries(retry, ENOUGH, cuda_graph=cuda_graph)
        self._model, self._optimizer, self._loss_fn, self._scheduler = model, optimizer, loss_fn, scheduler
        self._accumulate, self._compile, self._cuda_graph = accumulate, compile, cuda_graph
        self._update_in_backward = update_in_backward
        self._choice: Choice | None = None
        if isinstance(policy, str) and policy == "auto":
            from halfstep.step import undecided as auto  # which makes training steps

            return auto.undecide(self, scaler, blackbox)
        options = compile_options(compile, accumulate=accumulate, cuda_graph=cuda_graph)
        graph_device = refuse_graph(model, optimizer) if cuda_graph else None
        wanted = Policy.of(policy if policy is not None else prepared_policy(model) or "mixed")
        if options is not None:
            refuse_untraceable(wanted)
        self._ranks = ranks_of(model, wanted)
        self._compiled = None if options is None else CompiledLoss(loss_fn, options)
        self._no_sync = getattr(model, "no_sync", None)  # DistributedDataParallel: reduce in the last micro-batch only
        # ranks that make steps together examine a bad one together: in `_update`
        self._alone = self._no_sync is None and not is_distributed(unwrap(model))
        self._ordinal = 0 if self._alone else next(ORDINALS)
        self._metrics: Metrics | None = None
        self._box: Any = None  # the black box, made by the first step that is not finite
        self._keeps_pages = False
        self._one: Tensor | None = None  # the scale of windows where nothing is scaled
        with unchanged_on_failure(model, optimizer):
            # a graph repeats work that Python does not see and could not run again
            self._record = Record(unwrap(model), replayable=blackbox is not False and not cuda_graph)
            self._prepare(wanted, scaler)
            parts = self._micro_batch, self._moments, self._statistics, self._updater
            self._graphs = None if graph_device is None else Graphs(self, graph_device, *parts)
            self._take_optimizer()
            if self._scales:
                self._scaler.name_parameters(unwrap(model).named_parameters())

    def _prepare(self, wanted: Policy, scaler: GradScaler | None) -> None:
        """Prepare model and optimizer, and make the participants of the step."""
        model, optimizer = self.model, self.optimizer
        one_pass = self.clip_value is None and update.suits(optimizer)
        _, _, own_scaler = prepare_with(model, optimizer, wanted, one_pass=one_pass)
        binding = binding_of(unwrap(model))
        assert binding is not None
        self._policy, self._recipe = binding.policy, binding.recipe
        self._scaler = own_scaler if scaler is None else scaler
        self._scales = self._scaler.is_enabled()
        store = store_of(model)
        self._updater = Updater(optimizer, store)
        self._names = {id(p): n for n, p in unwrap(model).named_parameters()}
        windows = self.accumulate > 1 and not self.cuda_graph  # what is added by Python is not repeated by a graph
        self._unfinished = Unfinished(optimizer, self._names) if windows else None
        wide = self._updater.stepped_parameters() if store is None else ()
        self._copies = Copies(unwrap(model), wide, binding.recipe, windows=windows)
        low = store.parameters() if store is not None and self.policy.grads == "fp32" else ()
        # DistributedDataParallel's hooks read each gradient in its place, except in no_sync
        hooked = (self._no_sync is None or (self._ranks is not None and self._ranks.own)) and not self.cuda_graph
        self._sums = Sums(low, hooked=hooked, windows=windows) or None
        if self._ranks is not None:
            self._ranks.take_part(store, self.record)
        self._watchers = Watchers(self._updater.parameters)
        # watchers see complete gradients before the update and, in reverse order, those not yet dropped after it
        parts = (self._updater, self.record, self.copies, self._sums, self._ranks, self._watchers)
        participants: list[object] = [part for part in parts if part is not None]
        self._scaling: Scaling | None = None
        if self._scales:
            self._scaling = Scaling(self._scaler, optimizer)
            participants.append(self._scaling)
        self._retry: Retry | None = None
        if self._scales and self.retry:
            self._retry = Retry(self.retry, self._scaler, optimizer, self.record, unwrap(model))
            participants.append(self._retry)
            self._watchers.discards = self._retry.discards_unseen
        self._in_backward = self._made_in_backward()
        self._moments = Moments(participants, (self._in_backward or self._updater).has_written)
        self._statistics = Statistics(unwrap(model), self._moments.add)

    # ------------------------------------------------------------------ one micro-batch

    @one_thread
    def __call__(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one micro-batch and return a handle on what happened.

        If a forward or backward pass raises, the accumulation window begins anew, with BatchNorm's statistics as they
        were before it. The alarm of a loss scale and an error of a watcher are raised after an update that is complete.

        Raises:
            StepError: `loss_fn` returned something else than a scalar tensor with a gradient; another thread is inside.
        """
        moments = self._moments
        if moments.phase:
            moments.refuse(self.record.done)
        moments.grad = torch.is_grad_enabled()
        if profiler_runs():
            show_phases(self)
        self._settle(wait=self._graphs is not None)  # a graph reads its learning rate when it begins
        copies = STATE.copies if STATE.copies is not self.copies else None  # its own are there if a call was cut off
        try:
            STATE.copies = self.copies  # in the backward pass too, which may compute forward again
            moments.phase = MICRO_BATCH
            if self._retry is not None:
                self._retry.begin()
            result = self._micro_batch(batch, named) if self._graphs is None else self._graphs(batch, named)
            while self._retry is not None and self._retry.due:
                result = self._retry.run(moments, self._ranks, self._begin_window, self._micro_batch) or result
                result.retries = self._retry.retries
            moments.phase = REST
        except BaseException as error:
            moments.abort(error)
            raise
        finally:
            STATE.copies = copies
        if self._metrics is not None:
            self._metrics.see(result, (batch, named), updated=result.due)
        if result.due:
            self.record.note(result)
            if self.record.preemption is not None:
                self.record.preemption.after_update()
        return result

    def _micro_batch(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Run one micro-batch, and the update if it is the last of its window."""
        record = self.record
        if record.micro_batches == 0:
            self._begin_window()
        elif self._unfinished is not None:
            self._unfinished.check()
        number = record.done + record.micro_batches + 1
        kept = None if record.history is None else record.history.keep(number, batch, named)
        last = record.micro_batches + 1 == self.accumulate
        with WHOLE if self._no_sync is None else self._gradient_sync(last=last):
            loss, aux = self.run_forward(self.model, batch, named)
            if aux is not None:
                aux = detached(aux, loss, check=not record.done)
            shown = loss.detach()
            if kept is not None:
                kept.loss = shown
            if self._in_backward is not None:
                self._settle(wait=True)
                norm, bad, culprits = self._update(1, loss)
                return StepResult(number, shown, aux, record.scale, norm, bad, True, culprits)
            scale, seed = self.run_backward(loss)
        if kept is not None:
            kept.seed = seed
        record.micro_batches += 1
        if record.bad is not None or (record.history is not None and record.history.judged is not None):
            self._settle(wait=True)  # while the device has the passes to run
        if last:
            count = self.accumulate if self._ranks is None else self._ranks.window(self.accumulate)
            norm, bad, culprits = self._update(count)
            return StepResult(number, shown, aux, scale, norm, bad, True, culprits)
        if self._unfinished is not None:
            self._unfinished.note()
        nothing = torch.zeros((), dtype=torch.bool, device=loss.device)
        unknown = torch.full((), float("nan"), device=loss.device)
        return StepResult(number, shown, aux, scale, unknown, nothing, False)

    def _begin_window(self) -> None:
        """Drop what another step's loss, or one that failed, left in the gradients, and begin a window."""
        for group in self.optimizer.param_groups:  # zero_grad enters the profiler: 1 % of a step of LeNet-5
            if {*map(type, map(_grad, group["params"]))} - NO_GRADIENT:
                for parameter in group["params"]:
                    parameter.grad = None
        self._moments.begin_window()

    def run_forward(
        self, model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any], recipe: Recipe | None = None
    ) -> tuple[Tensor, Any]:
        """Run the loss function on `model` in the step's region, or in that of `recipe`; return (loss, aux).

        Raises:
            StepError: the loss is no real scalar tensor with a gradient.
        """
        recipe, statistics = recipe or self._recipe, STATE.statistics
        with opened(recipe):
            try:
                STATE.bound, STATE.statistics = recipe, self._statistics
                # a replay traces operators one by one, and compiled code has none
                run = self._compiled if self._compiled is not None and STATE.above is None else self.loss_fn
                returned = run(model, *batch, **named)
            except EXPLAINED as error:
                if (better := explained(error, (batch, named))) is None:
                    raise
                raise better from error
            finally:
                STATE.statistics = statistics
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex() or not loss.requires_grad:
            check_loss(loss)
        return (loss.float() if loss.dtype in LOW_DTYPES else loss), aux

    def run_backward(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Run the backward pass of `loss`; return the scale it ran with, one for all of a window, and its seed."""
        record = self.record
        if record.micro_batches == 0:  # a window has one scale, also if another step moves the scaler's meanwhile
            if self._retry is not None:
                record.scale = self._retry.scale_on(loss.device)
            elif self._scales:
                record.scale = self._scaler.scale_on(loss.device).clone()
            else:
                if self._one is None or self._one.device != loss.device:
                    self._one = torch.ones((), dtype=torch.float32, device=loss.device)
                record.scale = self._one
        seed = record.scale if self.accumulate == 1 else record.scale / self.accumulate
        if loss.dtype is not seed.dtype or loss.dim():
            seed = seed.to(loss.dtype).reshape(loss.shape)
        if self._retry is not None and self._retry.poisoned:
            seed = seed * float("nan")
        if record.micro_batches and self.copies.layers and self._no_sync is None:  # DDP's hooks read what arrives
            self.copies.backward(loss, seed, self._run_backward)
        elif self._sums is not None:
            self._sums.backward(loss, seed, self._run_backward)
        else:
            self._run_backward(loss, seed)
        return record.scale, seed

    def _run_backward(self, loss: Tensor, seed: Tensor) -> None:
        if self._compiled is None:
            backward(self._recipe, loss, seed)
        else:  # what compiled code computes again is part of it
            loss.backward(gradient=seed)

    def _gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the wrapper's context in which this backward pass averages gradients over ranks, or does not."""
        postponed = not last if self._ranks is None else self._ranks.postpones(last=last)
        return self._no_sync() if postponed and self._no_sync is not None else WHOLE

    def metrics(self, *, every: int = 50, to: MetricsLogger | None = None) -> Metrics:
        """Begin to collect metrics, anew at a second call: a record every so many updates; return where to poll them.

        Each goes to ``to.add(record)`` instead, see `hs.integrations.loggers`. A wrong argument is a StepError.
        """
        self._metrics = Metrics(every, to=to)
        return self._metrics

    @one_thread
    def flush(self) -> StepResult | None:
        """Update with the micro-batches of an unfinished window (their mean); None if there are none.

        Also reads the last verdict and advances the scheduler. Under DistributedDataParallel with ``accumulate`` > 1 or
        in `join` it is collective and waits for the device: every rank calls it, also one that has none left. Windows
        may differ in length; each micro-batch of any rank counts the same.

        Raises:
            StepError: the window's gradients cannot be averaged over the ranks; on all of them alike.
        """
        moments, record, ranks = self._moments, self.record, self._ranks
        if moments.phase:
            moments.refuse(record.done)
        moments.grad = torch.is_grad_enabled()
        self._settle(wait=True)
        count, scale = float(record.micro_batches), record.scale
        if ranks is not None and (self.accumulate > 1 or ranks.joining):
            count, scale = ranks.agree(record.micro_batches, record.scale)
            record.host_reads += 1
        elif count and self._no_sync is not None and torch.distributed.is_initialized():
            refuse_flush(self.model, record.micro_batches, self.accumulate)
        if not count:
            return None
        try:
            moments.phase = MICRO_BATCH
            if not record.micro_batches:  # other ranks have micro-batches left
                self._begin_window()
                record.scale = scale
            elif self._unfinished is not None:
                self._unfinished.check()
            if ranks is not None:
                ranks.averaged = False
            if self._retry is not None:
                self._retry.begin()
            norm, bad, culprits = self._update(count)
            while self._retry is not None and self._retry.due:
                self._retry.run(moments, ranks, self._begin_window, self._micro_batch)
                if ranks is not None and ranks.joining:
                    count = ranks.window(self.accumulate)  # the others do so again
                norm, bad, culprits = self._update(count)
            moments.phase = REST
        except BaseException as error:
            moments.abort(error)
            raise
        finally:
            if ranks is not None:
                ranks.averaged = True
        if self.record.preemption is not None:
            self.record.preemption.after_update()
        loss, again = torch.full_like(norm, float("nan")), 0 if self._retry is None else self._retry.retries
        result = StepResult(record.done, loss, None, record.scale, norm, bad, True, culprits, again)
        if self._metrics is not None:
            self._metrics.count(result)
        return result

    def join(self) -> AbstractContextManager[None]:
        """Return a context for a loop over batches of which some ranks have fewer: ``with step.join(): ...``.

        A rank that leaves it makes the updates of the others with them, as `flush` does, until none has a micro-batch
        left; all ranks end with the same state. It takes the place of DistributedDataParallel's own `join`. Inside,
        gradients are averaged after the backward pass, and each update waits for the device.

        Raises:
            StepError, UnbuiltError: a model whose passes need all ranks: under fully_shard or with SyncBatchNorm; a
                static graph or a communication hook.
        """
        return join(self._ranks, self.model, self.flush)

    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """Return what `loss_fn` returns for a batch, as the step computes it, without gradients.

        In evaluation mode; nothing is trained or counted. One rank may call it alone, except under fully_shard.
        """
        return evaluate(self.model, self.loss_fn, self._recipe, batch, named)

    def _update(self, count: float, loss: Tensor | None = None) -> tuple[Tensor, Tensor, Culprits]:
        """Update with a window of `count` micro-batches; return the gradient's norm, the verdict and its culprits.

        If the window is to run again instead, nothing is written. With `loss` its backward pass is still to come.
        """
        record, moments, updater = self.record, self._moments, self._updater
        if not self._alone and record.history is not None and record.history.judged is not None:
            self._examine(wait=True, together=True)  # while the parameters are those of the last update
        updater.check_optimizer()
        if self._in_backward is not None and loss is not None:
            found = self._in_backward.update(moments, loss, self.run_backward)
        else:
            moments.before_update()
            parameters, gradients = updater.gradients()
            device = parameters[0].device
            divisor = record.scale.to(device) if self._scales else None
            if count != self.accumulate:  # the seeds of a short window assumed a whole one
                share = torch.full((), count / self.accumulate, device=device)  # a kernel argument, no copy
                divisor = share if divisor is None else divisor * share
            check, write = updater.plan(parameters, gradients, divisor, self.clip_norm, self.clip_value)
            found = check.norm, check.bad, Culprits(norms=check.norms, parameters=parameters, names=self._names)
            if self._retry is not None and self._retry.discards(check.bad):
                return found
            moments.update(write, check.bad)
            del gradients, write  # their memory is free before anything else is done
            for parameter in parameters:
                parameter.grad = None
            record.host_reads += updater.host_read
        if found[1].device.type == "cpu":
            if record.history is not None and record.history.judged is not None:
                self._examine(wait=False, together=True)  # known at once, before weights or batch can be written to
            if not self._keeps_pages:
                keep_pages(self)
                self._keeps_pages = True
        return found

    def _settle(self, *, wait: bool) -> None:
        """Give the verdict of the last update to black box and scheduler, if it is known or `wait`."""
        record = self.record
        record.scheduled = self.scheduler is not None
        if record.history is not None and record.history.judged is not None:
            self._examine(wait=wait, together=self._alone)
        if self.scheduler is None:
            record.bad = None
        elif record.bad is not None:
            advance(self.scheduler, self.optimizer, self._moments, record, wait=wait)

    # ------------------------------------------------------------------ explanations

    @one_thread
    def explain(self, batches: Iterable[Any] | None = None) -> Verdict:
        """Say why the last step that was not applied, or whose loss was not finite, was so; printing it is a report.

        Replays its micro-batches with instruments on, unless that has happened already; all is as before afterwards. (A
        step whose gradients were finite was applied; the verdict notes that its replay has the weights after it.) On
        several ranks it names the rank with the fault, on all of them alike; called on one alone for a step that was
        not explained by itself, it waits some seconds. `batches`, such as a data loader: verified cures train on them.

        Raises:
            StepError: no such step, or one that later steps have trained over, or ``blackbox=False``.
        """
        verdict: Verdict = self._black_box().explain(batches)
        return verdict

    def _black_box(self) -> Any:
        if self._box is None:
            from halfstep.lens.box.stepbox import StepBox

            self._box = StepBox(self)
            if self.record.history is not None:
                self.record.history.watched = True
        return self._box

    def _examine(self, *, wait: bool, together: bool) -> None:
        """Give the last update to the black box once its verdict is known; a bad one only with `together`.

        Ranks that make steps together exchange verdicts: each comes to the same place of a step with `together`.
        """
        history = self.record.history
        assert history is not None
        if (window := history.arrived(wait=wait)) is None or (window.wrong and not together):
            return
        window.seen = True
        if window.wrong or self._box is not None:
            copies, STATE.copies = STATE.copies, None  # a replay has its own
            try:
                self._black_box().see(window)
            finally:
                STATE.copies = copies
        if self.record.micro_batches:
            history.judged = None

    # ------------------------------------------------------------------ state

    @one_thread
    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs to continue bit for bit; fp32 weights. Reads the last verdict.

        Raises:
            StepError: in the middle of an accumulation window (gradients are not part of the state).
        """
        self._moments.refuse(self.record.done)
        self._settle(wait=True)
        return save_step(self, self._updater)

    @one_thread
    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle: a new step of the copied model and optimizer. Reads the last verdict.

        Raises:
            StepError: in the middle of an accumulation window.
        """
        self._moments.refuse(self.record.done)
        self._settle(wait=True)
        return copied(self, self._updater)

    @one_thread
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; all of it is validated before anything changes.

        A step that was cut off, and refuses to go on, goes on from there.

        Raises:
            StepError: a piece that is missing, unknown or malformed, by its path, or a state of another policy.
            ScaleError, WeightsError, PolicyError: what their pieces say of themselves.
        """
        self._moments.abort()
        load_step(self, state, self._updater, self._moments, self._statistics)
        if self._graphs is not None:
            self._graphs.reset()


# A function given to torch.compile may call a step, which then runs as it does outside: it is no part of a graph.
run_eagerly(TrainStep.__call__)
vars(TrainStep)["__call__"]._torchdynamo_disable = True
vars(TrainStep)["__call__"]._torchdynamo_disable_msg = "a TrainStep compiles itself: hs.TrainStep(..., compile=True)"
