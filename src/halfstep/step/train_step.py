"""TrainStep: one training step under a policy, from micro-batch to update.

A call runs one micro-batch; a window is `accumulate` of them and ends with an update. Everything that must stay
consistent through a window is a `Part`, which `Moments` calls; what was done is in `Record`. `Settings`, a base class,
has the arguments and makes the parts.

Note [bad steps]: in every format, with or without scaling, an update whose gradient norm is not finite is not applied.
The verdict is a tensor on the device; fused optimizers read it there, others cost one counted host read. BatchNorm
statistics, which the forward pass has already changed, are restored by the same verdict, also those of other prepared
models that loss_fn calls. Where a scheduler or the black box needs the verdict of update n, the host waits for it when
the next forward and backward pass are queued, if it has not arrived before: the device does not idle meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.cast.regions.opening import opened
from halfstep.cast.regions.recompute import backward
from halfstep.cast.rules.recipe import Recipe, run_eagerly
from halfstep.cast.state import STATE
from halfstep.events import StepResult
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.watched import by_hand
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.step.arguments import Given
from halfstep.step.loss import EXPLAINED, Loss, check_loss, detached, evaluate, explained, run_by_hand
from halfstep.step.moments import Phase, one_thread
from halfstep.step.part import Batch, Run
from halfstep.step.state import Stateful
from halfstep.step.undecided import Undecided
from halfstep.torch_private.autograd import profiler_enabled
from halfstep.torch_private.compiler import keep_out
from halfstep.update.updater import ClipNorm, Culprits

if TYPE_CHECKING:
    from halfstep.lens.verdict import Verdict

NOTHING: Any = nullcontext()
PHASES = {"run_forward": "halfstep::forward", "run_backward": "halfstep::backward", "_update": "halfstep::tail"}
"""Method of a TrainStep -> its name in a trace of torch.profiler."""


class TrainStep(Stateful):
    """One training step under a policy: forward, scaled backward, accumulation, clipping, guarded update.

    It prepares what is not prepared, uses an optimizer's fused form where only speed changes, and waits for the work
    just queued only where a result is read. Unscaling is part of the update: `p.grad` is not meant to be read.

    Settings may be assigned between two windows where an argument below says so; others refuse it.

    Attributes:
        record: how far it has come: micro-batches, scale and verdict of the last update, waits for the device.
        ordinal: number of the step among those of this process that several ranks make together, from 1; 0 for a step
            that this process makes alone.
        copies: the low copies of fp32 weights in a window of several micro-batches: how many `bytes`, and `free()`.
        evidence: the folder for the evidence of bad steps, or None.
        choice: what policy="auto" has chosen by measuring in the first call, and why; None under any other.
        parts: what it calls at the moments of a step, in their order; see `add_part`.

    Args:
        model: the model, prepared or not; DistributedDataParallel, DataParallel or torch.compile around a prepared one.
        optimizer: a torch optimizer over the model's parameters, or a list or a dict of some (Muon and AdamW), all of
            which step or none. May be assigned, as may the next one.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``; loss a 0-dim tensor, aux any tree; or
            an `hs.Loss`, a sum and its weight.
        policy: preset name, TOML path or Policy; default: what the model was prepared with, else "mixed"; or "auto".
        clip_norm: largest 2-norm of the (unscaled, accumulated) gradient; None: no clipping; a dict: those of several
            optimizers, by name. May be assigned.
        clip_value: largest absolute value of a gradient element; None: no clipping. May be assigned.
        accumulate: micro-batches per update; gradients are their mean, or that of their tokens with `hs.Loss`. May be
            assigned where it was above 1.
        scaler: a GradScaler, also one shared with other TrainSteps; default: what the policy's `scale` says.
        scheduler: a learning-rate scheduler, or a list of some, to advance after each update that was applied. May be
            assigned.
        compile: whether torch.compile compiles `loss_fn` and its backward pass; a dict: its arguments; None: as "auto".
        cuda_graph: whether to capture the whole step, update included, in a CUDA graph for each kind of batch.
        blackbox: whether to replay a step that is not finite, and explain it in one line of the logger "halfstep"; see
            `explain`. Overflows of a dynamic scale on its way down are not explained. A folder: evidence is kept there.
        retry: whether a window that overflowed under a dynamic scale runs again at the lower one, so that no batch is
            lost; a number: so often at most (True: 16). `loss_fn` is called again. One wait for the device an update.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete, which is then freed:
            no memory for all gradients. Without accumulation and ranks; see `in_backward`. "two passes": a backward
            pass before it takes the norm of all gradients, for `clip_norm` and a loss scale.
        state: where the optimizer's states are between updates: "device", or "host", in pinned memory of the host, from
            which each update copies them and back. No bit changes; on a CPU it is the same.

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
        optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
        loss_fn: Callable[..., Any],
        *,
        policy: Policy | str | Path | None = None,
        clip_norm: ClipNorm = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        cuda_graph: bool = False,
        blackbox: bool | str | Path = True,
        retry: bool | int = False,
        update_in_backward: bool | str = False,
        state: str = "device",
    ) -> None:
        arguments = dict(locals())
        del arguments["self"]
        self._calls = threading.RLock()  # held by the thread that is inside of a call
        self._given = Given(**arguments)
        if isinstance(policy, str) and policy == "auto":
            self._moments: Any = Undecided(self, TrainStep)
        else:
            self._build()

    @one_thread
    def __call__(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one micro-batch and return a handle on what happened.

        If a forward or backward pass raises, the accumulation window begins anew, with BatchNorm's statistics as they
        were before it. The alarm of a loss scale and an error of a watcher are raised after an update that is complete.

        Raises:
            StepError: `loss_fn` returned something else than a scalar tensor with a gradient; another thread is inside.
        """
        if self._moments.phase is Phase.UNDECIDED:
            self._moments.choose(batch, named)
        elif self._moments.phase is not Phase.REST:
            self._moments.refuse(self.record.done)
        moments = self._moments
        moments.grad = torch.is_grad_enabled()
        if profiler_enabled():
            for method in PHASES:
                vars(self).setdefault(method, partial(_traced, weakref.ref(self), method))
        if self.cuda_graph or self.record.awaited:  # a graph reads its learning rate when it begins
            self._verdicts.settle(wait=self.cuda_graph)
        return self._call(partial(self._graphs or self._micro_batch, batch, named), None, (batch, named))

    def _call(
        self, run: Callable[[], StepResult], finish: Callable[[], StepResult] | None, batch: Batch | None
    ) -> StepResult:
        """Make the call of which `run` makes the result; `finish` and `batch` are those of `Part.again`, `end_call`."""
        moments, low = self._moments, self._binding.policy.params == "low"
        copies = STATE.copies if STATE.copies is not self.copies else None  # its own are there if a call was cut off
        try:
            if low:
                by_hand(False)
            STATE.copies = self.copies  # in the backward pass too, which may compute forward again
            moments.phase = Phase.MICRO_BATCH
            for begin in moments.begin_call:
                begin()
            result = run()
            for again in moments.again:
                result = again(result, self._micro_batch, finish)
            moments.phase = Phase.REST
        except BaseException as error:
            moments.cut_off(error)
            raise
        finally:
            STATE.copies = copies
            if low:
                by_hand(True)
        if result.due and self.record.awaited:
            self._verdicts.examine_at_once(result)
        for end in moments.end_call:
            end(result, batch)
        return result

    def _micro_batch(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Run one micro-batch, and the update if it is the last of its window."""
        record, moments = self.record, self._moments
        if record.micro_batches == 0:
            for begin_window in moments.begin_window:
                begin_window()
        number = record.done + record.micro_batches + 1
        for begin in moments.begin_micro_batch:
            begin(number, batch, named)
        kept = record.history.window.batches[-1] if record.history else None
        last = record.micro_batches + 1 == self.accumulate
        with ExitStack() if moments.passes else NOTHING as stack:
            for passes in moments.passes:
                stack.enter_context(passes(last=last))
            loss, aux = self.run_forward(self.model, batch, named)
            if aux is not None:
                aux = detached(aux, loss, check=not record.done)
            shown = loss.detach()
            if kept is not None:
                kept.loss = shown
            for see in moments.after_forward:
                see(shown)
            if self._in_backward is not None:
                self._verdicts.settle(wait=True)
                norm, bad, culprits = self._update(1, loss)
                if kept is not None:
                    kept.seed = record.scale
                return StepResult(number, shown, aux, record.scale, norm, bad, True, culprits)
            if record.weight is not None:
                self._weigh()
            scale, seed = self.run_backward(loss)
        if kept is not None:
            kept.seed = seed
        record.micro_batches += 1
        if record.awaited:
            self._verdicts.settle(wait=True)  # while the device has the passes to run
        for end in moments.end_micro_batch:
            end(seed, last=last)
        if last:
            joining, count = self._ranks.joining, self.accumulate
            norm, bad, culprits = self._update(self._ranks.agree(count)[0] if joining else count)
            return StepResult(number, shown, aux, scale, norm, bad, True, culprits)
        nothing = torch.zeros((), dtype=torch.bool, device=loss.device)
        unknown = torch.full((), float("nan"), device=loss.device)
        return StepResult(number, shown, aux, scale, unknown, nothing, False)

    def run_forward(
        self, model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any], recipe: Recipe | None = None
    ) -> tuple[Tensor, Any]:
        """Run the loss function on `model` in the step's region, or in that of `recipe`; return (loss, aux)."""
        recipe, statistics = recipe or self._binding.recipe, STATE.statistics
        with opened(recipe):
            try:
                STATE.bound, STATE.statistics = recipe, self._statistics
                # a replay traces operators one by one, and compiled code has none
                run = self.loss_fn if self._compiled is None or STATE.above is not None else self._compiled
                if run is self.loss_fn and recipe.policy.params == "low":
                    run = partial(run_by_hand, run, recipe)
                returned = run(model, *batch, **named)
            except EXPLAINED as error:
                if (better := explained(error, (batch, named))) is None:
                    raise
                raise better from error
            finally:
                STATE.statistics = statistics
                if recipe.policy.params == "low":
                    by_hand(False)
        returned, self.record.weight = returned.mean() if isinstance(returned, Loss) else (returned, None)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex() or not loss.requires_grad:
            check_loss(loss)
        return (loss.float() if loss.dtype in LOW_DTYPES else loss), aux

    def run_backward(self, loss: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
        """Run the backward pass of `loss`; return the scale it ran with, one for all of a window, and its seed.

        `keep`: another backward pass of `loss` follows.
        """
        record, moments = self.record, self._moments
        run: Run = partial(self._run_backward, keep=True) if keep else self._run_backward
        if record.micro_batches == 0:
            record.scale = moments.scale_on(loss.device)
        seed = record.scale if self.accumulate == 1 else record.scale / self.accumulate
        if loss.dtype is not seed.dtype or loss.dim():
            seed = seed.to(loss.dtype).reshape(loss.shape)
        for change in moments.seed:
            seed = change(seed)
        for around in moments.around_backward:
            run = partial(around, run=run)
        run(loss, seed)
        return record.scale, seed

    def _run_backward(self, loss: Tensor, seed: Tensor, *, keep: bool = False) -> None:
        if self._compiled is None:
            backward(self._binding.recipe, loss, seed, keep=keep)
        else:  # what compiled code computes again is part of it
            loss.backward(gradient=seed)

    def _update(self, count: float, loss: Tensor | None = None) -> tuple[Tensor, Tensor, Culprits]:
        """Update with `count` micro-batches; return norm, verdict, culprits. `loss`: its backward pass is to come."""
        record, moments, updater = self.record, self._moments, self._updater
        updater.check_optimizer()
        if self._in_backward is not None and loss is not None:
            return self._in_backward.update(moments, loss, self.run_backward)
        moments.complete()
        parameters, gradients = updater.gradients()
        device = parameters[0].device
        divisor = record.scale.to(device) if self._scales else None
        share = record.share
        if share is None and count != self.accumulate:  # the seeds of a short window assumed a whole one
            share = torch.full((), count / self.accumulate, device=device)  # a kernel argument, no copy
        if share is not None:
            divisor = share if divisor is None else divisor * share
        check, write = updater.plan(parameters, gradients, divisor, self.clip_norm, self.clip_value)
        culprits = Culprits(norms=check.norms, parameters=parameters, names=updater.names)
        found = check.norm, check.bad, culprits
        for repeats in moments.repeats:
            if repeats(check.bad):
                return found
        moments.update(partial(write, check.factor, check.bad), check.bad)
        del gradients, write  # their memory is free before anything else is done
        for parameter in parameters:
            parameter.grad = None
        record.host_reads += updater.host_read
        return found

    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """Return what `loss_fn` returns for a batch, as the step computes it, without gradients.

        In evaluation mode; nothing is trained or counted. One rank may call it alone, except under fully_shard. Before
        policy="auto" has chosen it computes in fp32.
        """
        return evaluate(self.model, self.loss_fn, self._binding.recipe, batch, named)

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
        verdict: Verdict = self._verdicts.black_box().explain(batches)
        return verdict


def _traced(found: Callable[[], Any], method: str, *args: Any, **named: Any) -> Any:
    """Run a method of a step in its phase; the first call after the profiler has stopped takes this out of the way."""
    step = found()
    run = getattr(type(step), method)
    if profiler_enabled():
        with record_function(PHASES[method]):
            return run(step, *args, **named)
    vars(step).pop(method, None)
    return run(step, *args, **named)


# A function given to torch.compile may call a step, which then runs as it does outside: it is no part of a graph.
run_eagerly(TrainStep.__call__)
keep_out(vars(TrainStep)["__call__"], "a TrainStep compiles itself: hs.TrainStep(..., compile=True)")
