"""TrainStep: one training step under a policy, from micro-batch to update.

Note [bad steps]: in every format, with or without scaling, an update whose gradient norm is not finite is not applied.
The verdict is a tensor on the device; fused optimizers read it there, others cost one counted host read. BatchNorm
statistics, which the forward pass has already changed, are put back by the same verdict, also those of other prepared
models that loss_fn calls. The host reads the verdict of update n before update n+1 begins (then the scheduler advances,
or does not), by which time the device has long produced it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.cast.copies.kept import Copies
from halfstep.cast.regions.dtype_errors import EXPLAINED, explained
from halfstep.cast.regions.opening import opened
from halfstep.cast.regions.recompute import backward
from halfstep.cast.rules.recipe import Recipe, run_eagerly
from halfstep.cast.state import STATE
from halfstep.errors import ScaleError, StepError
from halfstep.events import StepResult, StepWatcher, Verdict
from halfstep.kernels.pages import keep_pages
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import resolved
from halfstep.scale.scaler import GradScaler
from halfstep.step import fused, tail
from halfstep.step.arguments import RatesCheck, check_arguments, evidence_folder, limit
from halfstep.step.bind import binding_of
from halfstep.step.checkpoint import load_rounding, load_step, refuse_window, rounding, save_step
from halfstep.step.compiled import CompiledLoss, compile_options, refuse_untraceable
from halfstep.step.construct import unchanged_on_failure
from halfstep.step.culprits import Culprits
from halfstep.step.graph.capturable import refuse_graph
from halfstep.step.graph.graphs import Graphs
from halfstep.step.memory import Memory
from halfstep.step.metrics import Metrics
from halfstep.step.prepare import prepare_with, prepared_policy, store_of, unwrap
from halfstep.step.progress import ADVANCE, REST, UPDATE, WINDOW, Progress
from halfstep.step.ranks import ranks_of
from halfstep.step.statistics import Statistics
from halfstep.step.sums import Sums
from halfstep.step.undo import Marks, SchedulerCopy
from halfstep.step.wrappers import unwrap_optimizer
from halfstep.weights.states import LowStates

__all__ = ["TrainStep"]

LossFn = Callable[..., Any]
WHOLE = nullcontext()
LOG = logging.getLogger("halfstep")
KEPT = ("clip_norm", "clip_value", "accumulate", "scaler", "scheduler", "compile", "cuda_graph")  # of a copy


class TrainStep:
    """One training step under a policy: forward, scaled backward, accumulation, clipping, guarded update.

    ``result = step(x, y)`` runs ``loss_fn(model, x, y)`` in the policy's region and trains on it. It prepares what is
    not prepared, uses torch's fused form of the same optimizer where only speed changes, and never waits for the device
    unless a result is read. Inside it unscaling is folded into the update: `p.grad` is not meant to be read after it.

    Attributes:
        copies: the low copies of fp32 weights that it keeps from step to step: how many `bytes`, and `free()`.
        generic: why the last update went through ``optimizer.step()``; "" if halfstep's own operators made it.
        host_reads: how often an update had to wait for the device.
        watchers: who looks on at each update (`hs.Monitor` does).

    Args:
        model: the model, prepared or not; DistributedDataParallel, DataParallel or torch.compile around a prepared one.
        optimizer: a torch optimizer over the model's parameters.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``; loss a 0-dim tensor.
        policy: preset name, TOML path or Policy; default: what the model was prepared with, else "mixed".
        clip_norm: largest 2-norm of the (unscaled, accumulated) gradient; None: no clipping.
        clip_value: largest absolute value of a gradient element; None: no clipping.
        accumulate: micro-batches per update; gradients are their mean.
        scaler: a GradScaler, also one shared with other TrainSteps; default: what the policy's `scale` says.
        scheduler: a learning-rate scheduler to advance after each update that was applied.
        compile: whether `loss_fn` and its backward pass go through torch.compile; a dict: with these arguments of it.
        cuda_graph: whether to capture the whole step, update included, in a CUDA graph for each kind of batch.
        blackbox: whether a step that is not finite for another reason than a dynamic scale on its way down is replayed
            and explained, by one line of the logger "halfstep"; a folder: and its evidence kept there. See `explain`.

    Raises:
        StepError: arguments that make no sense together; later, a loss that is not a scalar, or no gradient at all.
        BindError, PolicyError: as `prepare`.
        UnbuiltError: as `prepare`; or the policy's `reduce` or `grads` cannot be carried out under this wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        policy: Policy | str | Path | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        compile: bool | Mapping[str, Any] = False,
        cuda_graph: bool = False,
        blackbox: bool | str | Path = True,
    ) -> None:
        optimizer = unwrap_optimizer(optimizer)
        accumulate = check_arguments(model, loss_fn, accumulate, scaler, scheduler, optimizer, cuda_graph=cuda_graph)
        self.clip_norm, self.clip_value = limit("clip_norm", clip_norm), limit("clip_value", clip_value)
        self._evidence = evidence_folder(blackbox)
        options = compile_options(compile, accumulate=accumulate, cuda_graph=cuda_graph)
        graph_device = refuse_graph(model, optimizer) if cuda_graph else None
        wanted = Policy.of(policy if policy is not None else prepared_policy(model) or "mixed")
        if options is not None:
            refuse_untraceable(wanted)
        self._ranks = ranks_of(model, wanted)
        self._compiled = None if options is None else CompiledLoss(loss_fn, options)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.scheduler, self.accumulate, self.compile, self.cuda_graph = scheduler, accumulate, compile, cuda_graph
        self.host_reads = 0
        self.watchers: list[StepWatcher] = []
        self.generic = ""
        self._progress = Progress()
        self._check_rates = RatesCheck(optimizer)
        self._no_sync = getattr(model, "no_sync", None)  # DistributedDataParallel: reduce in the last micro-batch only
        self._step = self._window = 0  # micro-batches of updates made, and of the window under way
        self._scale = torch.ones(())
        self._pending: Tensor | None = None
        self._metrics: Metrics | None = None
        self._box: Any = None  # made by the first step that is not finite
        with unchanged_on_failure(model, optimizer):
            self._prepare(wanted, scaler)
            # what a graph repeats is not seen by Python, which could not run it again
            self._memory = None if blackbox is False or cuda_graph else Memory(unwrap(model))
            self._graphs = None if graph_device is None else Graphs(self, graph_device)
            self._refuse_replaced_parameters()
            if not any(getattr(m, "sparse", False) for m in unwrap(model).modules()):  # fused forms take none of those
                tail.prefer_fused(optimizer, self._stepped_parameters())
            if self.scaler.is_enabled():
                self.scaler.name_parameters(unwrap(model).named_parameters())

    def _prepare(self, wanted: Policy, scaler: GradScaler | None) -> None:
        """Prepare model and optimizer, and what looks after their low weights, gradients and statistics."""
        model, optimizer = self.model, self.optimizer
        one_pass = self.clip_value is None and fused.suits(optimizer)
        _, _, own_scaler = prepare_with(model, optimizer, wanted, one_pass=one_pass)
        binding = binding_of(unwrap(model))
        assert binding is not None
        self.policy = resolved(wanted, binding.device_types[0])
        self.scaler = own_scaler if scaler is None else scaler
        self._binding = binding
        self._store = store_of(model)
        if self._store is not None:
            self.policy = self.policy.replace(master=self._store.name)
        self._states = LowStates.of(optimizer)
        self._names = {id(p): n for n, p in unwrap(model).named_parameters()}
        self._statistics = Statistics(unwrap(model))
        self._visit = self._statistics.visit
        wide = self._stepped_parameters() if self._store is None else ()
        windows = self.accumulate > 1 and not self.cuda_graph  # what is added by Python is not repeated by a graph
        self.copies = Copies(unwrap(model), wide, binding.recipe, windows=windows)
        low = self._store.parameters() if self._store is not None and self.policy.grads == "fp32" else ()
        # DistributedDataParallel's hooks want to find each gradient in its place; in no_sync they look at none
        hooked = (self._no_sync is None or (self._ranks is not None and self._ranks.own)) and not self.cuda_graph
        self._sums = Sums(low, hooked=hooked, windows=windows)

    # ------------------------------------------------------------------ one micro-batch

    def __call__(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one micro-batch and return a handle on what happened; waits for nothing.

        If it raises, the accumulation window it was in begins anew, with BatchNorm's statistics as they were before it.

        Raises:
            StepError: `loss_fn` returned something else than a scalar tensor with a gradient.
        """
        progress = self._progress
        if progress.phase:
            progress.refuse(self)
        progress.grad = torch.is_grad_enabled()
        self._settle()
        last = self._window + 1 == self.accumulate
        copies = STATE.copies if STATE.copies is not self.copies else None  # its own: left by a call that was cut off
        try:
            STATE.copies = self.copies  # in the backward pass too, which may compute forward again
            progress.phase = WINDOW
            result = self._micro(batch, named) if self._graphs is None else self._graphs(batch, named)
            progress.phase = REST
        except BaseException as error:
            progress.undo(self, error)
            raise
        finally:
            STATE.copies = copies
        if self._metrics is not None:
            self._metrics.see(result, (batch, named), updated=last)
        return result

    def _micro(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Do one micro-batch, and the update if it is due."""
        if self._window == 0:
            self._begin_window()
        number = self._step + self._window + 1
        kept = None if self._memory is None else self._memory.keep(number, batch, named)
        last = self._window + 1 == self.accumulate
        with self._gradient_sync(last):
            loss, aux = self._forward(self.model, batch, named)
            scale, seed = self.run_backward(loss)
        shown = loss.detach()
        if kept is not None:
            kept.loss, kept.seed = shown, seed
        if last:
            norm, bad, culprits = self._update(self.accumulate)
            return StepResult(number, shown, aux, scale, norm, bad, True, culprits)
        nothing = torch.zeros((), dtype=torch.bool, device=loss.device)
        unknown = torch.full((), float("nan"), device=loss.device)
        self._window += 1
        return StepResult(number, shown, aux, scale, unknown, nothing, False)

    def _begin_window(self) -> None:
        self._drop_gradients()
        self._statistics.keep()
        self.copies.begin()
        self._sums.begin()
        if self._memory is not None:
            self._memory.begin()

    def metrics(self, *, every: int = 50) -> Metrics:
        """Begin to collect metrics, a record every so many updates, and return where to poll them; nothing waits.

        A second call begins anew; the first object gets no more records.

        Raises:
            StepError: `every` is no whole number from 1.
        """
        self._metrics = Metrics(every)
        return self._metrics

    def _forward(
        self, model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any], recipe: Recipe | None = None
    ) -> tuple[Tensor, Any]:
        """Return (loss, aux), computed in the step's region or, by `recipe`, in another one."""
        recipe, visit = recipe or self._binding.recipe, STATE.visit
        with opened(recipe, depth=2):
            try:
                STATE.bound, STATE.visit = recipe, self._visit
                # a replay looks at operators one by one, which compiled code has none of
                run = self._compiled if self._compiled is not None and STATE.above is None else self.loss_fn
                returned = run(model, *batch, **named)
            except EXPLAINED as error:
                if (better := explained(error, (batch, named))) is None:
                    raise
                raise better from error
            finally:
                STATE.visit = visit
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got, remedy = type(loss).__name__, "return its loss"
            if isinstance(loss, Tensor):
                got, remedy = f"a tensor of shape {tuple(loss.shape)}", "reduce it with .mean() or .sum()"
            elif isinstance(loss, (int, float)):
                remedy = "return the tensor, without .item()"
            elif hasattr(loss, "loss"):
                remedy = "return its .loss"
            raise StepError(
                f"loss_fn must return a scalar tensor, or (scalar tensor, aux), and returned {got}; {remedy}"
            )
        if loss.is_complex():
            raise StepError(
                f"loss_fn returned a complex loss ({loss.dtype}), of which no direction is down; return a real number "
                "of it, such as loss.abs() or loss.real"
            )
        if not loss.requires_grad:
            raise StepError(
                "the loss has no gradient: no parameter that requires one took part in it, or loss_fn ran under "
                "torch.no_grad or detached its result"
            )
        return (loss.float() if loss.dtype in {torch.float16, torch.bfloat16} else loss), aux

    def run_backward(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Run the backward pass of `loss`; return the scale it ran with, one for all of a window, and its seed."""
        if self._window == 0:  # whatever becomes of the scaler's own meanwhile
            scale = self.scaler.scale_on(loss.device)
            self._scale = scale.clone() if self.scaler.is_enabled() else scale
        seed = self._scale if self.accumulate == 1 else self._scale / self.accumulate
        if loss.dtype is not seed.dtype or loss.dim():
            seed = seed.to(loss.dtype).reshape(loss.shape)
        if self._window and self.copies.layers and self._no_sync is None:  # DDP's hooks want to see what arrives
            self.copies.backward(loss, seed, self._run_backward)
        else:
            self._sums.backward(loss, seed, self._run_backward)
        return self._scale, seed

    def _run_backward(self, loss: Tensor, seed: Tensor) -> None:
        if self._compiled is None:
            backward(self._binding.recipe, loss, seed)
        else:  # what compiled code computes again is part of it
            loss.backward(gradient=seed)

    def _drop_gradients(self) -> None:
        """Forget what another step's loss, or one that failed, left in the gradients.

        Optimizer.zero_grad enters the profiler each time, which is 1 % of a step of LeNet-5.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None

    def _gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        put_off = not last if self._ranks is None else self._ranks.postpones(last=last)
        return self._no_sync() if put_off and self._no_sync is not None else WHOLE

    # ------------------------------------------------------------------ one update

    def flush(self) -> StepResult | None:
        """Update with the micro-batches of an unfinished window (their mean); None if there are none.

        Also reads the last verdict and advances the scheduler: after it, everything is up to date. Under
        DistributedDataParallel with ``accumulate`` > 1 it is collective: every rank calls it, also one that has none
        left. Windows may differ in length; each micro-batch of any rank counts the same. It waits for the device there.

        Raises:
            StepError: the window's gradients cannot be averaged over the ranks; on all of them alike.
        """
        progress = self._progress
        if progress.phase:
            progress.refuse(self)
        progress.grad = torch.is_grad_enabled()
        self._settle()
        count: float = self._window
        scale = self._scale
        if self._ranks is not None and self.accumulate > 1:
            count, scale = self._ranks.agree(self._window, self._scale)
            self.host_reads += 1
        elif count and self._no_sync is not None and torch.distributed.is_initialized():
            raise StepError(
                f"flush() of {self._window} of {self.accumulate} micro-batches: {type(self.model).__name__} has put "
                "the average of their gradients off, by its no_sync, and only DistributedDataParallel's can be made "
                "later; give every window all of its micro-batches"
            )
        if not count:
            return None
        try:
            progress.phase = WINDOW
            if not self._window:  # other ranks have micro-batches left
                self._begin_window()
                self._scale = scale
            norm, bad, culprits = self._update(count, averaged=False)
            progress.phase = REST
        except BaseException as error:
            progress.undo(self, error)
            raise
        loss = torch.full((), float("nan"), device=norm.device)
        return StepResult(self._step, loss, None, self._scale, norm, bad, True, culprits)

    def _update(self, count: float, *, averaged: bool = True) -> tuple[Tensor, Tensor, Callable[[], tuple[str, ...]]]:
        """Update with a window of `count` micro-batches; `averaged`: DDP's backward pass has seen its last one."""
        self._heed(wait=True)  # after this update the parameters are no longer those of the last one
        self._sums.finish()
        if self._ranks is not None and (self._ranks.own or not averaged):
            self.host_reads += self._ranks.average(self._store)
        parameters = self._with_gradients()
        self._check_rates()
        device = parameters[0].device
        divisor = self._scale.to(device) if self.scaler.is_enabled() else None
        if count != self.accumulate:  # the seeds of a short window assumed a whole one
            share = torch.full((), count / self.accumulate, device=device)  # a kernel argument, no copy
            divisor = share if divisor is None else divisor * share
        for watcher in self.watchers:
            watcher.before_update(parameters)
        if self._refused(parameters):
            verdict, carry_out = self._generic(parameters, divisor)
        else:
            verdict = tail.judge([p.grad for p in parameters], divisor, self.clip_norm)  # type: ignore[misc]
            carry_out = fused.Update(self.optimizer, self._store, self._states, verdict.factor, verdict.bad).carry_out
        self._apply(carry_out, verdict.bad, self._window + averaged)
        for watcher in self.watchers:
            watcher.after_update(verdict.bad)
        for parameter in parameters:
            parameter.grad = None
        self._sums.free()
        culprits = Culprits(norms=verdict.norms, parameters=parameters, names=self._names)
        if self._memory is not None:
            self._memory.end(verdict.bad, self._scale, watched=self._box is not None)
            if verdict.bad.device.type == "cpu":  # known at once, before anybody can write to weights or batch
                self._heed(wait=False)
        if device.type == "cpu":
            keep_pages(self)
        return verdict.norm, verdict.bad, culprits

    def _apply(self, carry_out: Callable[[], None], bad: Tensor, count: int) -> None:
        """Change weights, and all that says so: the critical part of a step, in which signals wait; note [cut off].

        Raises:
            ScaleError: the scale's alarm, if its rule raises: then all has been counted.
        """
        progress, alarm = self._progress, None
        with progress.critical:
            progress.phase = UPDATE
            carry_out()
            progress.marks = None  # what follows belongs to the update, also to one that was not applied
            self._statistics.put_back(bad)
            torch.clear_autocast_cache()  # low copies of weights in it, if a region is open around the step, are stale
            if self.scaler.is_enabled():
                self.scaler.record(bad, optimizer=self.optimizer)
                try:
                    self.scaler.update()
                except (ScaleError, Warning) as error:
                    alarm = error
            self._pending = bad
            self._step += count
            self._window = 0
            progress.phase = REST
        if alarm is not None:
            raise alarm

    def _refused(self, parameters: list[nn.Parameter]) -> bool:
        """Return whether the optimizer's own step must run, and keep why."""
        if self.clip_value is not None:
            reason = "clip_value clips gradients one by one before it"
        else:
            reason = fused.refusal(self.optimizer, self._store, parameters)
        if reason != self.generic:
            self.generic = reason
            LOG.debug("%s: %s", type(self.optimizer).__name__, reason or "updated by halfstep's own operators")
        return bool(reason)

    def _generic(
        self, parameters: list[nn.Parameter], divisor: Tensor | None
    ) -> tuple[tail.Verdict, Callable[[], None]]:
        """Judge gradients in fp32; return what steps through ``optimizer.step()``, which reads them."""
        if self._store is None:
            gradients = [p.grad for p in parameters if p.grad is not None]
        else:
            gradients = self._store.lift(self.optimizer)
        verdict = tail.judge(gradients, divisor, self.clip_norm)
        factor = None if divisor is None and self.clip_norm is None else verdict.factor
        if self.clip_value is not None:
            tail.clip_values_(gradients, divisor, self.clip_value)
            factor = factor * divisor if factor is not None and divisor is not None else factor
        if self._states is None:  # else its states are made anew around each step
            self._progress.marks = Marks(self.optimizer, self._store)

        def carry_out() -> None:
            self.host_reads += tail.apply(self.optimizer, gradients, factor, verdict.bad)
            if self._progress.marks is not None:
                self._progress.marks.end()
            if self._store is not None:
                self._store.heal()  # what an optimizer whose step does not call its hooks has left
                self._store.drop(self.optimizer)

        return verdict, carry_out

    def _abandon_update(self) -> None:
        """Put the host's side of an update that failed half way in order; nothing on the device was changed."""
        if self._store is not None:
            self._store.heal()
            self._store.drop(self.optimizer)
        self.scaler.forget()

    def _with_gradients(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters that have gradients."""
        parameters = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not parameters:
            raise StepError(
                "no parameter of the optimizer received a gradient; check that loss_fn uses the model and that its "
                "parameters require gradients"
            )
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.coalesce()  # a norm is one of sums
            elif type(gradient) is not Tensor and any(p.is_partial() for p in getattr(gradient, "placements", ())):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        return parameters

    def _stepped_parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer changes in a step: the model's parameters, or the precise ones behind them."""
        own = [p for g in self.optimizer.param_groups for p in g["params"]]
        store = self._store
        return own if store is None else [store.value(p) if p in store else p for p in own]

    def _refuse_replaced_parameters(self) -> None:
        """Refuse low parameters that took the place of prepared ones: they would be stepped without masters."""
        store = self._store
        for group in self.optimizer.param_groups if store is not None else ():
            for parameter in group["params"]:
                if store is not None and parameter.dtype is store.dtype and parameter not in store:
                    name = self._names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                    raise StepError(
                        f"parameter {name} is low and has no fp32 master: the model's parameters were replaced after "
                        "hs.prepare (fully_shard does that); shard under a policy with params='fp32', such as 'mixed'"
                    )

    def _settle(self) -> None:
        """Read the verdict of the last update and advance the scheduler if it was applied."""
        if self._no_sync is None:  # ranks look together: at one place of a step, never when one happens to know first
            self._heed(wait=False)
        bad, progress = self._pending, self._progress
        if bad is not None and self.scheduler is not None:
            self.host_reads += 1
            if not bool(bad):
                try:
                    progress.scheduler = SchedulerCopy(self.scheduler, self.optimizer)
                    progress.phase = ADVANCE
                    self.scheduler.step()
                    self._pending = None
                    progress.phase = REST
                except BaseException as error:
                    progress.undo(self)
                    if isinstance(error, MemoryError) or not isinstance(error, Exception):
                        raise  # the next call tries again
                    self._pending = None
                    raise StepError(
                        f"{type(self.scheduler).__name__}.step() raised {type(error).__name__}: {error}. It is where "
                        "it was before, one update behind; leave it out: step.scheduler = None"
                    ) from error
        self._pending = None

    # ------------------------------------------------------------------ explanations

    @property
    def record(self) -> Memory | None:
        """The micro-batches of the window under way and of the last update; None under ``blackbox=False``."""
        return self._memory

    @property
    def evidence(self) -> Path | None:
        """The folder of evidence files."""
        return self._evidence

    @property
    def scale(self) -> Tensor:
        """The loss scale of the last update, 0-dim."""
        return self._scale

    def run_forward(
        self, model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any], recipe: Recipe
    ) -> tuple[Tensor, Any]:
        """Return (loss, aux) of `loss_fn` on `model` in the region of `recipe`."""
        return self._forward(model, batch, named, recipe)

    def explain(self) -> Verdict:
        """Say why the last step that was not applied, or whose loss was not finite, was so; printing it is a report.

        Replays its micro-batches with instruments on, unless that has happened already: the same parameters, random
        states, buffers and scale. (A step whose gradients were finite was applied; it is replayed with the weights
        after it, and the verdict notes so.) Parameters, gradients, buffers, generators and optimizer are as before
        afterwards.

        Raises:
            StepError: no such step, or one that later steps have trained over, or ``blackbox=False``.
        """
        verdict: Verdict = self._black_box().explain()
        return verdict

    def _black_box(self) -> Any:
        if self._box is None:
            from halfstep.lens.box.stepbox import StepBox

            self._box = StepBox(self)
        return self._box

    def _heed(self, *, wait: bool) -> None:
        """Have the last update looked at if it was not applied or its loss was not finite, as soon as that is known."""
        window = None if self._memory is None else self._memory.arrived(wait=wait)
        if window is not None and (window.wrong or self._box is not None):
            copies, STATE.copies = STATE.copies, None  # a replay has its own
            try:
                self._black_box().see(window)
            finally:
                STATE.copies = copies

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs to continue bit for bit; fp32 weights. Reads the last verdict.

        Raises:
            StepError: in the middle of an accumulation window (gradients are not part of the state).
        """
        if self._progress.phase:
            self._progress.refuse(self)
        self._settle()
        return save_step(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle: a new step of the copied model and optimizer. Reads the last verdict.

        Raises:
            StepError: in the middle of an accumulation window.
        """
        if self._progress.phase:
            self._progress.refuse(self)
        self._settle()
        refuse_window(self, "a copy")
        named = {name: getattr(self, name) for name in KEPT}
        named["policy"] = prepared_policy(self.model)
        weights = rounding(self)
        return _rebuild, (self.model, self.optimizer, self.loss_fn, named, self._step, weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; all of it is validated before anything changes.

        A step that was cut off, and refuses to go on, goes on from there.

        Raises:
            StepError: a piece that is missing, unknown or malformed, by its path, or a state of another policy.
            ScaleError, WeightsError, PolicyError: what their pieces say of themselves.
        """
        if self._progress.phase:
            self._progress.undo(self)
        load_step(self, state)
        if self._graphs is not None:
            self._graphs.reset()


# A function given to torch.compile may call a step, which then runs as it does outside: it is no part of a graph.
run_eagerly(TrainStep.__call__)
vars(TrainStep)["__call__"]._torchdynamo_disable = True
vars(TrainStep)["__call__"]._torchdynamo_disable_msg = "a TrainStep compiles itself: hs.TrainStep(..., compile=True)"


def _rebuild(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    named: dict[str, Any],
    step: int,
    weights: dict[str, Any],
) -> TrainStep:
    made = TrainStep(model, optimizer, loss_fn, **named)
    if weights:
        load_rounding(made, weights)
    made._step = step
    return made
