"""Trials: training steps on a user's own model that are taken back bit for bit.

Note [taken back]: steps write to copies (`Loan`), and a `Snapshot` with all of its parts restores the rest, also what
`loss_fn` changes in other modules that it calls. A trial gets a copy of the batch. What `loss_fn` changes elsewhere is
not known here.

Note [ranks]: under DistributedDataParallel each process measures the model in it, without averages over processes.
After each trial one reduction gives all of them the time of the slowest, so that they drop and choose alike.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.accelerators import empty_cache
from halfstep.binding.bind import binding_of
from halfstep.binding.prepare import bound
from halfstep.errors import StepError, lacks_memory
from halfstep.events import StepResult
from halfstep.kernels.pages import keep_pages
from halfstep.snapshot import (
    Loan,
    Modules,
    Snapshot,
    attributes,
    cloned,
    generators_of,
    gradients,
    noted,
    optimizer_state,
)
from halfstep.timing import Unfit, timed
from halfstep.update.updater import Deferral

STEPS = 3  # at each visit; the first makes memory, optimizer state and lists of tensors, and is not timed
TIMED = 0.05  # seconds; of shorter steps so many more are timed
MOST = 40  # of them
PATIENCE = 24  # steps: a loss scale of 2**24 is at 1 by then


class StepSnapshot(Snapshot):
    """Everything that training steps change of a model, not prepared, and its optimizer; see the note above."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        modules = list(model.modules())
        self.others = Modules(known=modules, gradients=True)  # that `loss_fn` calls besides; found in the first step
        self._loan = Loan(model, optimizer)
        super().__init__(
            noted(generators_of(modules)), self.others, optimizer_state(optimizer), gradients(model.parameters()),
            self._loan, attributes(modules), bound(model),
            partial(nn.Module.zero_grad, model),  # of low parameters, which the fp32 ones could not have
        )  # fmt: skip
        self.unwatched = True  # until the first step; later ones call the same modules

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give copies to a block, which may write to them, and return to what there was; signals wait meanwhile."""
        deferral = Deferral()
        with self.returning(deferral):
            with deferral:
                self._loan.lend()
            yield


class Team:
    """The processes that choose together, see note [ranks]; `ddp` None: this one alone."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self.ddp = ddp

    def largest(self, *values: float) -> list[float]:
        """Return each of the values as it is largest among the processes; collective."""
        if self.ddp is None:
            return list(values)
        given = torch.tensor(values, dtype=torch.float32, device=self.ddp.device)
        dist.all_reduce(given, dist.ReduceOp.MAX, self.ddp.process_group)
        return [float(value) for value in given]

    def together(self, measure: Callable[[str, int], float], name: str, number: int) -> float:
        """Return the seconds of `measure` in the slowest process; what fails in one process fails in all."""
        error: Exception | None = None
        seconds = 0.0
        try:
            with self._apart():
                seconds = measure(name, number)
        except Exception as own:
            error = own
        unfit = isinstance(error, Unfit)
        slowest, left, raised = self.largest(seconds, unfit, error is not None and not unfit)
        if raised and (error is None or unfit):
            raise StepError("policy='auto': the step raises in another process; look there for the error") from error
        if raised or left:
            raise error or Unfit("it cannot be chosen in another process")
        return slowest

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let the wrapper send nothing in a block, also where `loss_fn` calls it itself."""
        if self.ddp is None:
            yield
            return
        sending = self.ddp.require_forward_param_sync
        try:
            with self.ddp.no_sync():
                self.ddp.require_forward_param_sync = False
                yield
        finally:
            self.ddp.require_forward_param_sync = sending


class TimedSteps:
    """One candidate: training steps that `build` makes, with a scaler of before or None for its own."""

    def __init__(
        self, snapshot: StepSnapshot, build: Callable[[Any], Any], batch: tuple[tuple[Any, ...], Mapping[str, Any]],
        owner: object,
    ) -> None:  # fmt: skip
        self._snapshot, self._build, self._batch, self._owner = snapshot, build, batch, owner
        self._scaler: Any = None
        self.compiled: Any = None  # the compiled loss function, if the step has one; it stays from visit to visit
        self.first: float | None = None  # seconds of the first step of all, in which what compiles compiles
        self.seconds, self.calls = math.nan, 0  # the last time that was measured; calls of `loss_fn`

    def visit(self) -> float:
        """Return the seconds of one step, the lower quartile of some; nothing has changed afterwards."""
        try:
            with self._snapshot.lent():
                self.seconds = self._timed()
            return self.seconds
        except Exception as error:
            if not lacks_memory(error):
                raise
            problem = f"out of memory ({str(error).strip().splitlines()[0] if str(error) else type(error).__name__})"
        if self._snapshot.device.type != "cpu":  # the error is gone, and with it what its frames refer to
            empty_cache(self._snapshot.device.type)
        raise Unfit(problem)

    def _timed(self) -> float:
        step = self._build(self._scaler)
        self.compiled = step._compiled = step._compiled if self.compiled is None else self.compiled
        if self.compiled is not None:
            bindings = map(binding_of, step.model.modules())
            self.compiled.guarded = [binding.methods for binding in bindings if binding is not None]
        batch, named = cloned(self._batch)
        if self._snapshot.unwatched:
            step._compiled = None  # guards of compiled code would notice the hook
            with self._snapshot.others.watching():
                self._step(step, batch, named, check=True)
            self._snapshot.unwatched = False
            step._compiled = self.compiled
        taken = self._step(step, batch, named, check=self.first is None)
        self.first = taken if self.first is None else self.first
        if step.scaler.is_enabled():
            self._scaler = step.scaler
        if self._snapshot.device.type == "cpu":
            keep_pages(self._owner)
        times: list[float] = []
        while len(times) < STEPS - 1 or (len(times) < MOST and sum(times) < TIMED):
            times.append(self._step(step, batch, named))
        return sorted(times)[len(times) // 4]  # what disturbs some of a few short steps is not theirs

    def _step(self, step: Any, batch: Any, named: Any, *, check: bool = False) -> float:
        """Return the seconds of a step, all micro-batches; `check`: it is finite, if need be at a lower scale."""
        for _ in range(PATIENCE if check else 1):
            results: list[StepResult] = []

            def window(results: list[StepResult] = results) -> None:
                results += [step(*batch, **named) for _ in range(step.accumulate)]

            taken = timed(window, self._snapshot.device)
            self.calls += step.accumulate
            if not check:
                return taken
            losses = [float(result.loss) for result in results]
            if all(map(math.isfinite, losses)) and not bool(results[-1].skipped):
                return taken
            if not step.scaler.is_enabled() or not all(map(math.isfinite, losses)):
                break
        wrong = [loss for loss in losses if not math.isfinite(loss)]
        raise Unfit(f"its first step is not finite (loss {wrong[0]})" if wrong else "its gradients are not finite")
