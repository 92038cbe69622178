"""The update: gradients of a window become new weights, in one pass or through ``optimizer.step()``.

In one pass is `fused`; `refusal` returns why an optimizer is stepped by its own ``step()`` instead (`optimizer_step`).
"""

import _signal  # type: ignore[import-not-found]  # below `signal`, which takes 3 us a call; typeshed does not have it
import logging
import math
import signal
import threading
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import attrgetter, is_
from types import FrameType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import StepError
from halfstep.formats import POLICY_DTYPES
from halfstep.kernels.choose import KERNEL_TYPES, cannot_update, check_norms
from halfstep.kernels.native import calls
from halfstep.kernels.optimizers import BY_TYPE, OptimizerSpec, optimizer_names
from halfstep.kernels.sharded import local
from halfstep.optim import Optimizers, members
from halfstep.torch_private.modules import (
    WRAPPED,
    global_optimizer_post_hooks,
    global_optimizer_pre_hooks,
    step_post_hooks,
    step_pre_hooks,
)
from halfstep.update.fused import PLAIN, FusedUpdate, GradientCheck, check_gradients, same
from halfstep.update.optimizer_step import Marks, clip_values_, prefer_fused, step_unless
from halfstep.weights import WeightStore
from halfstep.weights.draws import Draws
from halfstep.weights.states import LowStates

LOG = logging.getLogger("halfstep")

NO_GRADIENT = {NoneType}

ClipNorm = float | Mapping[str, float] | None
"""The largest norm of all gradients together, or those of several optimizers by name."""

Write = Callable[[Tensor, Tensor], None]
"""Updates from gradients times its first argument, unless the second, both 0-dim on the device."""

_grad, _layout = attrgetter("grad"), attrgetter("layout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprits:
    """The norms of an update's gradients and whose they are; calling it returns names and reads the device."""

    norms: Tensor  # (number of parameters,) fp32, on the device
    parameters: Sequence[Tensor]
    names: Mapping[int, str]  # of the model's parameters, by id

    def __call__(self) -> tuple[str, ...]:
        """Return the names of the parameters whose norm is not finite."""
        finite = torch.isfinite(self.norms).tolist()
        return tuple(self.names.get(id(p), "?") for p, ok in zip(self.parameters, finite, strict=True) if not ok)


# ------------------------------------------------------------------ the updates of one training step


class Updater:
    """Makes the updates of one training step; a part of it."""

    def __init__(self, optimizer: Optimizer, store: WeightStore | None, names: Mapping[int, str]) -> None:
        self.store, self.names = store, names
        self.use(optimizer)

    def use(self, optimizer: Optimizer) -> None:
        """Update through `optimizer` from now on."""
        self.optimizer = optimizer
        self.states = LowStates.of(optimizer)  # what keeps its states in bf16, or None
        self.reason = ""  # why the last update went through ``optimizer.step()``
        self.host_read = 0  # how often it had to wait for the device
        self._marks: Marks | None = None
        self._fused: FusedUpdate | None = None  # the tables of the last update, if they can be used again
        self._seen: list[object] = []  # options and hooks of the optimizer that were found to be in order
        self._unknown = ""  # what of it the operators do not implement

    @property
    def draws(self) -> Draws | None:
        """Return where the random bits of stochastic rounding come from, of states or of weights."""
        return getattr(self.store, "draws", None) if self.states is None else self.states.draws

    def stepped_parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer changes in a step: the model's parameters, or the precise ones behind them."""
        own = [p for g in self.optimizer.param_groups for p in g["params"]]
        store = self.store
        return own if store is None else [store.value(p) if p in store else p for p in own]

    def refuse_replaced_parameters(self) -> None:
        """Refuse low parameters that took the place of prepared ones: they would be stepped without masters."""
        store = self.store
        for parameter in [p for g in self.optimizer.param_groups for p in g["params"]] if store is not None else ():
            if store is not None and parameter.dtype is store.dtype and parameter not in store:
                name = self.names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                raise StepError(
                    f"parameter {name} is low and has no fp32 master: the model's parameters were replaced after "
                    "hs.prepare, as fully_shard and parallelize_module do; call these first, or hs.shard(model, policy)"
                )

    def prefer_fused(self) -> None:
        """Use torch's fused form of the optimizer where it has one."""
        prefer_fused(self.optimizer, self.stepped_parameters())

    def check_optimizer(self) -> None:
        """Do what `check_rates` and `_unknown` do, if one of the optimizer's options or hooks has changed."""
        groups = self.optimizer.param_groups
        found = [*chain.from_iterable(map(dict.values, groups)), *_other_code(self.optimizer)]
        if same(found, self._seen):
            return
        check_rates(self.optimizer)
        self._unknown = _unknown(self.optimizer)
        # a tensor or a list may change in its place
        changing = any(isinstance(v, (Tensor, list)) for g in groups for name, v in g.items() if name != "params")
        self._seen = [] if changing else found

    def gradients(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the optimizer's parameters that have gradients, and these: none partial or with repeated indices."""
        groups = self.optimizer.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else [p for g in groups for p in g["params"]]
        gradients = [*map(_grad, parameters)]
        kinds = {*map(type, gradients)}
        if NoneType in kinds:
            parameters = [p for p, g in zip(parameters, gradients, strict=True) if g is not None]
            gradients = [g for g in gradients if g is not None]
        if not parameters:
            raise StepError(
                "no parameter of the optimizer received a gradient; check that loss_fn uses the model and that its "
                "parameters require gradients"
            )
        if kinds - PLAIN or torch.sparse_coo in map(_layout, gradients):
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is not None and gradient.is_sparse:
                    parameter.grad = gradient.coalesce()  # a norm is one of sums
                elif type(gradient) is not Tensor and any(p.is_partial() for p in getattr(gradient, "placements", ())):
                    parameter.grad = gradient.redistribute(placements=parameter.placements)
            gradients = [*map(_grad, parameters)]
        return list(parameters), gradients

    def parameters(self) -> list[nn.Parameter]:
        """Return the first of `gradients`."""
        return self.gradients()[0]

    def begin_window(self) -> None:
        """Drop what another step's loss, or one that failed, left in the gradients."""
        for group in self.optimizer.param_groups:  # zero_grad enters the profiler: 1 % of a step of LeNet-5
            if {*map(type, map(_grad, group["params"]))} - NO_GRADIENT:
                for parameter in group["params"]:
                    parameter.grad = None

    def plan(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        divisor: Tensor | None,
        clip_norm: ClipNorm,
        clip_value: float | None,
        *,
        part: int | None = None,
    ) -> tuple[GradientCheck, Write]:
        """Read the gradients; return what was found, and the function that updates unless they are bad."""
        assert not isinstance(clip_norm, Mapping)
        fused = self._fitting(parameters, gradients) if clip_value is None and part is None else None
        if fused is None:
            by_value = "clip_value clips gradients one by one before it" if clip_value is not None else ""
            reason = by_value or refusal(self.optimizer, self.store, parameters)
            if reason != self.reason:
                self.reason = reason
                LOG.debug("%s: %s", type(self.optimizer).__name__, reason or "updated by halfstep's own operators")
            if not reason:
                fused = FusedUpdate(self.optimizer, self.store, self.states, parameters, gradients, part)
                self._fused = fused if fused.stays else None
        if fused is not None:
            self.host_read = 0
            return fused.check(gradients, divisor, clip_norm), fused.write
        if self.store is not None:
            gradients = self.store.attached[id(self.optimizer)].widen_gradients(self.optimizer)
        check = check_gradients(gradients, divisor, clip_norm)
        scaled = divisor is not None or clip_norm is not None
        if self.states is None:  # else its states are made anew around each step
            self._marks = Marks(self.optimizer, self.store)

        def write(factor: Tensor, bad: Tensor) -> None:
            if clip_value is not None:
                clip_values_(gradients, divisor, clip_value)
                factor = factor if divisor is None else factor * divisor
            self._step_optimizer(gradients, factor if scaled else None, bad)

        return check, write

    def _fitting(self, parameters: Sequence[nn.Parameter], gradients: list[Tensor]) -> FusedUpdate | None:
        """Return the tables of the last update if they are those of the next one too."""
        fused, self._fused = self._fused, None
        if fused is None or self._unknown or (self.store is not None and self.store.cannot_update()):
            return None
        self._fused = fused if fused.fits(parameters, gradients) else None
        return self._fused

    def forget_tables(self) -> None:
        """Find out anew at the next update which tensors take part, and hold none until then."""
        self._fused = None

    def _step_optimizer(self, gradients: list[Tensor], factor: Tensor | None, bad: Tensor) -> None:
        self.host_read = int(step_unless(bad, self.optimizer, gradients, factor))
        if self._marks is not None:
            self._marks.end()
        if self.store is not None:
            self.store.restore()  # what an optimizer whose step does not call its hooks has left
            self.store.attached[id(self.optimizer)].drop_gradients()
        torch.clear_autocast_cache()
        self._marks = None

    def has_written(self) -> bool:
        """Return whether an update that was begun and not ended has changed anything, as far as is known."""
        return self._marks is None or self._marks.moved()

    def abort(self, *, written: bool) -> None:
        """Put the host's side of an update that was cut off in order."""
        if self.store is not None:
            self.store.restore(write_back=written)
            self.store.attached[id(self.optimizer)].drop_gradients()
        if self._marks is not None:
            self._marks.end() if written else self._marks.restore()
        if not written:
            self._marks = None


# ------------------------------------------------------------------ several optimizers: all of them step or none


class SeveralUpdaters(Updater):
    """An `Updater` for each of several optimizers, as one."""

    def use(self, optimizer: Optimizers) -> None:  # type: ignore[override]
        """Update through `optimizer` from now on."""
        self.optimizer = optimizer
        self.host_read = 0
        self.members = {name: Updater(own, self.store, self.names) for name, own in optimizer.optimizers.items()}

    @property
    def reason(self) -> str:  # type: ignore[override]
        """Why the last update of some of them went through ``optimizer.step()``."""
        return "; ".join(member.reason for member in self.members.values() if member.reason)

    @property
    def draws(self) -> Draws | None:
        """Return where the random bits of stochastic rounding come from."""
        return next((found for member in self.members.values() if (found := member.draws) is not None), None)

    def forget_tables(self) -> None:
        """Hold no tensors of any of them."""
        for member in self.members.values():
            member.forget_tables()

    def check_optimizer(self) -> None:
        """Check the options and hooks of each of them."""
        for member in self.members.values():
            member.check_optimizer()

    def prefer_fused(self) -> None:
        """Use the fused form of each of them that has one."""
        for member in self.members.values():
            member.prefer_fused()

    def plan(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        divisor: Tensor | None,
        clip_norm: ClipNorm,
        clip_value: float | None,
        *,
        part: int | None = None,
    ) -> tuple[GradientCheck, Write]:
        """Read the gradients; return what was found in all of them, and the function that updates unless it is bad."""
        given = {id(p): n for n, p in enumerate(parameters)}
        plans: list[tuple[GradientCheck, Write]] = []
        places: list[int] = []
        for name, member in self.members.items():
            own = [p for group in member.optimizer.param_groups for p in group["params"] if id(p) in given]
            if own:
                limit = clip_norm.get(name) if isinstance(clip_norm, Mapping) else clip_norm
                some = [gradients[given[id(p)]] for p in own]
                plans.append(member.plan(own, some, divisor, limit, clip_value, part=part))
                places += [given[id(p)] for p in own]
        norms = torch.cat([check.norms for check, _ in plans])
        if places != sorted(places):  # gradients that come in a backward pass
            of = dict(zip(places, norms.unbind(), strict=True))
            norms = torch.stack([of[n] for n in sorted(places)])
        together = None if isinstance(clip_norm, Mapping) else clip_norm
        check = GradientCheck(norms, *check_norms(norms, divisor, together))

        def write(factor: Tensor, bad: Tensor) -> None:
            for own, write_own in plans:
                write_own(own.factor if isinstance(clip_norm, Mapping) else factor, bad)
            self.host_read = sum(member.host_read for member in self.members.values())

        return check, write

    def has_written(self) -> bool:
        """Return whether an update that was begun and not ended has changed anything, as far as is known."""
        return any(member.has_written() for member in self.members.values())

    def abort(self, *, written: bool) -> None:
        """Put the host's side of an update that was cut off in order."""
        for member in self.members.values():
            member.abort(written=written)


# ------------------------------------------------------------------ signals

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGBREAK")
NUMBERS = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

Handler = Callable[[int, "FrameType | None"], Any]


class Deferral:
    """A context manager that defers signals whose handlers are Python functions to its end; it can be entered again.

    A second signal of the same number is not deferred: a part that hangs can still be interrupted.

    Note [left behind]: an exception in the middle of entering or leaving can leave `_defer` installed. Outside of the
    block it restores the handler it stands for and calls it, so no signal is lost.
    """

    __slots__ = ("_found", "_handlers", "_mine", "_on", "_waiting")

    def __init__(self) -> None:
        self._mine = self._defer  # one object, by which it is recognised
        self._found: list[Any] = []  # the handlers there were when it was entered last
        self._handlers: dict[int, Handler] = {}  # those of them that `_defer` stands for
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._on = False

    def __enter__(self) -> None:
        if get_ident() != threading.main_thread().ident:
            return
        found = [*map(_signal.getsignal, NUMBERS)]
        if len(found) != len(self._found) or not all(map(is_, found, self._found)):
            known = self._handlers  # also for what is left behind
            self._handlers = {
                number: known[number] if handler is self._mine else handler
                for number, handler in zip(NUMBERS, found, strict=True)
                if callable(handler)
            }
            self._found = found
        for number in self._handlers:
            _signal.signal(number, self._mine)
        self._on = True

    def __exit__(self, *raised: object) -> None:
        if not self._on:
            return
        self._on = False
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is self._mine:
                _signal.signal(number, handler)
        if self._waiting:
            self._deliver()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if not self._on:  # note [left behind]
            _signal.signal(number, handler)
        elif all(known != number for known, _ in self._waiting):
            self._waiting.append((number, frame))
            return
        handler(number, frame)

    def _deliver(self) -> None:
        """Call the handlers of the deferred signals, all of them, also if one raises."""
        if self._waiting:
            number, frame = self._waiting.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()


# ------------------------------------------------------------------ which optimizers


def refusal(optimizer: Optimizer, store: WeightStore | None, parameters: Sequence[nn.Parameter]) -> str:
    """Return why `optimizer` must be stepped by its own ``step()``; "" if `FusedUpdate` does it."""
    if reason := _unknown(optimizer):
        return reason
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and type(gradient) not in KERNEL_TYPES:
            gradient = local(gradient)
        if (
            gradient is None
            or type(gradient) not in KERNEL_TYPES
            or gradient.layout is not torch.strided
            or gradient.dtype not in POLICY_DTYPES
        ):
            return "a gradient is sparse, or in no format of fp32, bf16 and fp16"
        if parameter.dtype is not torch.float32 and (store is None or parameter not in store):
            behind = "its fp32 value in another prepared model" if WeightStore.behind(parameter) else "no fp32 value"
            return f"a {parameter.dtype} parameter has {behind}"
    if store is not None and (reason := store.cannot_update()):
        return reason
    return cannot_update(parameters)


def unsuited(optimizer: Optimizer) -> str:
    """Return why `FusedUpdate` will not step `optimizer`, as far as can be told before there are gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = next(filter(None, map(_unknown, members(optimizer))), "")
    return unknown or (cannot_update(parameters) if parameters else "it has no parameters")


def _unknown(optimizer: Optimizer) -> str:
    """Return what of `optimizer` the operators do not implement; "" for nothing."""
    spec = BY_TYPE.get(type(optimizer))
    if spec is None:
        return f"{type(optimizer).__name__} is none of {optimizer_names('and')}"
    return _hooked(optimizer) or next(filter(None, (_special(spec, group) for group in optimizer.param_groups)), "")


def _hooked(optimizer: Optimizer) -> str:
    """Return which other code depends on ``optimizer.step`` being called; "" for none."""
    step, scale, found, *hooks = _other_code(optimizer)
    if step is not None and not hasattr(step, WRAPPED):
        return "its step was replaced by another function"
    if scale is not None or found is not None:
        return "its grad_scale or found_inf was set by hand"
    if all((getattr(hook, "__module__", None) or "").startswith("halfstep.") for hook in hooks):
        return ""
    return "it has hooks that run before or after its step"


def _other_code(optimizer: Optimizer) -> list[Any]:
    """Return a `step` of the object's own, torch's two attributes for scaled steps, then all hooks around its step."""
    own = vars(optimizer)
    return [
        own.get("step"),
        own.get("grad_scale"),
        own.get("found_inf"),
        *step_pre_hooks(optimizer).values(),
        *step_post_hooks(optimizer).values(),
        *global_optimizer_pre_hooks.values(),
        *global_optimizer_post_hooks.values(),
    ]


def _special(spec: OptimizerSpec, group: dict[str, Any]) -> str:
    """Return which option of a group the operator does not implement; "" for none."""
    for option in spec.refused:
        if group.get(option):
            return f"{option}={group[option]!r}"
    for option in ("fused", "foreach"):
        if group.get(option) is not None and not group.get("fused"):
            return f"{option}={group[option]!r}"
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return "its betas are tensors"
    rate = group["lr"]
    if isinstance(rate, Tensor) and rate.numel() != 1:
        return f"lr has {rate.numel()} elements"
    return ""


# ------------------------------------------------------------------ numbers that enter every update

RATES = ("lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho", "lambd", "lr_decay")
"""Names under which torch's optimizers keep numbers that enter every update; other names may hold infinities."""


def check_rates(optimizer: Optimizer) -> None:
    """Refuse numbers of an optimizer's groups that no weight survives; waits for nothing."""
    for group in optimizer.param_groups:
        for name in RATES:
            value: Any = group.get(name)
            kind = type(value)
            if kind is float:
                sound = value * 0.0 == 0.0  # nan and infinities, times 0, are nan
            elif kind is tuple and all(type(one) is float for one in value):
                sound = sum(value) * 0.0 == 0.0
            else:
                sound = kind is int or value is None
            if not sound:
                _check_rate(optimizer, group, name, value)


def _check_rate(optimizer: Optimizer, group: dict[str, Any], name: str, value: Any) -> None:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if type(one) is Tensor and one.device.type == "cpu" and one.numel() == 1 and not one.is_complex():
            one = calls.number(one)
        if isinstance(one, Real) and not math.isfinite(one):
            place = next(i for i, other in enumerate(optimizer.param_groups) if other is group)
            raise StepError(
                f"{type(optimizer).__name__}.param_groups[{place}]['{name}'] is {value!r}, and an update with it would "
                "leave no weight finite; set it to a finite number, and look at what has changed it (a scheduler?)"
            )
