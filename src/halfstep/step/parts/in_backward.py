"""Update in backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed.

Weights and optimizer state have the bits of the whole update (`update.Updater.plan`). Two things differ: there is
memory for one gradient in the place of all of them, and a step that is not finite may have updated some parameters.

Note [not finite]: the verdict on all gradients comes too late for the parameters that have been updated by then. So it
is one flag on the device, to which each gradient adds: parameters that come before the first gradient that is not
finite are updated, that one and all after it are not. Where the loss is not finite that is none of them, as in a normal
step. Everything else (BatchNorm's statistics, the scheduler, `StepResult.skipped`) treats such a step as not applied.

Note [two passes]: the factor of clipping and the verdict of a loss scale need all gradients. With ``"two passes"`` a
first backward pass takes the norm of each gradient, which is then freed, and keeps the graph; a second one updates by
the factor and the verdict of the first, as the whole update does. Where kernels add in any order its gradients may
differ in their last bits. The first pass writes nothing: a window may be taken back after it, and run again.

Note [torn]: an exception in the pass that updates leaves a mixed state once a parameter was updated; the step then
refuses to go on until a checkpoint is loaded, as after an update that was cut off (note [cut off] in `moments`). That
pass belongs to the critical part: signals are deferred to its end.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError
from halfstep.events import hook_weakly
from halfstep.kernels.choose import check_norms, norms_for
from halfstep.scale.scaler import GradScaler
from halfstep.step.arguments import TWICE, Given
from halfstep.step.loss import RECOMPUTES
from halfstep.step.moments import Moments, Watchers
from halfstep.step.parts.host_state import HostState
from halfstep.step.parts.record import Record
from halfstep.torch_private.autograd import current_graph_task_id
from halfstep.trees import graph_of
from halfstep.update.updater import Culprits, Updater, unsuited

TOGETHER = 1 << 20
"""Bytes of gradients that wait for each other, so that small parameters are updated in one call."""

REENTRANT = (
    "update_in_backward=True needs each gradient complete when it arrives, and re-entrant checkpoints hand over parts; "
    "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class InBackward:
    """The updates of one training step, made inside its backward passes."""

    def __init__(
        self, given: Given, updater: Updater, scaler: GradScaler, record: Record, watchers: Watchers, *, alone: bool
    ) -> None:
        _refuse(given, updater, scaler, alone=alone)
        self._given, self._updater, self._record, self._watchers = given, updater, record, watchers
        self._scales = scaler.is_enabled()
        self._draws = updater.draws
        self._written = self._looked = False
        self._task = -1  # of autograd's engine: the backward pass of the step; -1: none is under way
        self._bad = torch.zeros((), device="cpu")
        self._factor: Tensor | None = None  # 0-dim fp32: what all gradients are multiplied by; note [two passes]
        self._untouched: Tensor | None = None  # 0-dim: no parameter was updated
        self._use: Callable[[int], None] = self._apply  # what is done with gradients that wait
        self._waiting: list[nn.Parameter] = []
        self._bytes = 0
        self._found: list[tuple[nn.Parameter, Tensor]] = []  # parameters, and the norms of their gradients
        self._aside: dict[nn.Parameter, Tensor] = {}  # gradients of a backward pass inside loss_fn
        self._places: dict[nn.Parameter, int] = {}  # of random bits, as in an update of all parameters
        self._watch()

    def _watch(self) -> None:
        """Have gradients handed over: of all parameters, and of groups that were added since."""
        store = self._updater.store
        for group in self._updater.optimizer.param_groups:
            new = [p for p in group["params"] if p.requires_grad and p not in self._places]
            for parameter in sorted(new, key=lambda p: store is None or p not in store):
                self._places[parameter] = len(self._places)
                hook_weakly(parameter.register_post_accumulate_grad_hook, self.take)

    def has_written(self) -> bool:
        """Return whether the update under way has changed a parameter."""
        return self._written

    def update(self, moments: Moments, loss: Tensor, run: Callable[..., Any]) -> tuple[Tensor, Tensor, Culprits]:
        """Run the backward pass of `loss` and update; return the gradients' norm, the verdict and its culprits."""
        if self._watchers:
            raise StepError(
                f"update_in_backward={self._given.update_in_backward!r} frees each gradient when it has been used, and "
                f"a watcher ({type(self._watchers[0]).__name__}) is shown all of them; leave one of the two out"
            )
        moments.complete()
        if not self._looked and any(node.name() == RECOMPUTES for node in graph_of(loss)):
            raise StepError(REENTRANT)
        self._looked = True
        self._watch()
        self._host = next((part for part in moments.parts if isinstance(part, HostState)), None)
        device = self._updater.optimizer.param_groups[0]["params"][0].device
        self._written, self._found, self._untouched, self._factor = False, [], None, None
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        if self._given.update_in_backward == TWICE:
            self._run(self._measure, loss, partial(run, keep=True))
            divisor = self._record.scale.to(device) if self._scales else None
            norm, self._bad, self._factor = check_norms(self._norms(), divisor, self._given.clip_norm)  # type: ignore[arg-type]  # one number
            for repeats in moments.repeats:
                if repeats(self._bad):
                    return norm, self._bad, self._culprits()
        moments.update(partial(self._write, loss, run), self._bad)
        if self._factor is None:
            norm, _, _ = check_norms(self._norms(), None, None)
        return norm, self._bad, self._culprits()

    def _norms(self) -> Tensor:
        """Return the norms of the gradients; that of all has its bits from their order, the optimizer's."""
        every = [p for group in self._updater.optimizer.param_groups for p in group["params"]]
        order = {id(p): i for i, p in enumerate(every)}
        self._found.sort(key=lambda pair: order[id(pair[0])])
        return torch.stack([norm for _, norm in self._found])

    def _culprits(self) -> Culprits:
        found, self._found = self._found, []
        norms = torch.stack([norm for _, norm in found])
        return Culprits(norms=norms, parameters=[p for p, _ in found], names=self._updater.names)

    def _write(self, loss: Tensor, run: Callable[..., Any]) -> None:
        self._run(self._apply, loss, run)
        if self._draws is not None and self._untouched is not None:
            self._draws.advance(self._bad.device, ~self._untouched)
        self._record.micro_batches = 1

    def _run(self, use: Callable[[int], None], loss: Tensor, run: Callable[..., Any]) -> None:
        """Run a backward pass, and `use` the gradients that it makes, in the end those that were there before it."""
        self._use, self._waiting, self._bytes = use, [], 0
        before = {p: p.grad for p in self._places if p.grad is not None}
        self._aside = dict(before)
        for parameter in before:
            parameter.grad = None
        handle = loss.register_hook(self._begin)
        try:
            run(loss)
        finally:
            handle.remove()
            self._task = -1
        use(0)
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient
        self._waiting = self._updater.parameters() if self._aside or not self._found else []
        use(len(self._places))
        if use == self._measure:  # the second pass begins from them too
            for parameter, gradient in before.items():
                parameter.grad = gradient

    def _begin(self, gradient: Tensor) -> None:
        self._task = current_graph_task_id()

    def take(self, parameter: Any) -> None:
        """Take the gradient that `parameter` has just got."""
        if self._task < 0:
            return
        if current_graph_task_id() != self._task:
            raise StepError(REENTRANT)
        if parameter in self._aside:
            parameter.grad = self._aside.pop(parameter) + parameter.grad
        self._waiting.append(parameter)
        self._bytes += parameter.grad.nbytes
        if self._draws is not None or self._bytes >= TOGETHER:
            self._use(self._places[parameter])

    def _taken(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        parameters, self._waiting, self._bytes = self._waiting, [], 0
        return parameters, [p.grad for p in parameters]  # type: ignore[misc]

    def _measure(self, place: int) -> None:
        parameters, gradients = self._taken()
        if parameters:
            self._found += zip(parameters, norms_for(gradients).unbind(), strict=True)
        for parameter in parameters:
            parameter.grad = None

    def _apply(self, place: int) -> None:
        """Update the parameters that wait, unless a gradient was not finite, and drop their gradients."""
        parameters, gradients = self._taken()
        if not parameters:
            return
        if self._host is not None:
            self._host.bring(parameters)
        check, write = self._updater.plan(parameters, gradients, None, None, None, part=place)
        del gradients
        if self._updater.reason:
            raise StepError(f"update_in_backward=True needs halfstep's own update: {self._updater.reason}")
        if self._factor is None:
            with torch.no_grad():
                check.bad.copy_(self._bad.logical_or_(check.bad))
            self._found += zip(parameters, check.norms.unbind(), strict=True)
        if self._untouched is None:
            self._untouched = self._bad.clone()
        self._written = True
        write(check.factor if self._factor is None else self._factor, self._bad)
        if self._host is not None:
            self._host.send(parameters)
        for parameter in parameters:
            parameter.grad = None


def _refuse(given: Given, updater: Updater, scaler: GradScaler, *, alone: bool) -> None:
    """Refuse what an update needs more than one gradient at a time for; `alone`: no other ranks take part."""
    reason = unsuited(updater.optimizer) or ("" if updater.store is None else updater.store.cannot_update())
    sparse = any(getattr(m, "sparse", False) for m in unwrap(given.model).modules())
    whole = given.update_in_backward == TWICE
    named = f"clip_norm={given.clip_norm!r} needs a norm for each of several optimizers"
    first = f"use update_in_backward={TWICE!r}, with one number for clip_norm"
    other = "leave one of the two out"
    for refused, why, remedy in (
        (given.clip_norm is not None and not whole, "clip_norm needs the norm of all of them", first),
        (isinstance(given.clip_norm, Mapping), named, other),
        (given.clip_value is not None, "clip_value clips in a pass of its own", other),
        (given.accumulate > 1, "accumulate adds those of several micro-batches first", other),
        (scaler.is_enabled() and not whole, "a loss scale skips a step by the verdict on all of them", first),
        (given.cuda_graph, "cuda_graph captures one update of all parameters", other),
        (bool(given.compile), "compile makes all gradients of a graph at once, so that none is freed early", other),
        (not alone, "ranks average them, or have parts of them", other),
        (sparse, "an embedding of the model makes sparse ones", other),
        (bool(reason), f"this needs halfstep's own update: {reason}", other),
    ):
        if refused:
            raise StepError(
                f"update_in_backward={given.update_in_backward!r} updates each parameter when its gradient is there, "
                f"and {why}; {remedy}"
            )
