"""Record: what an audited step and its fp32 twin are seen doing, added up in tallies.

The fp32 twin (`Reference`) runs first, on the same weights, batch and random numbers, and its results wait for the
audited run (`Recorder`) to come by the same call of the same operator. Every operator of the audited run that touches
a low format is run again by itself in the shadow format, on the same inputs, forward and backward: what the two differ
by is that operator's own doing.

Note [order]: gradients arrive by hooks on results. What they are compared with is computed after the backward pass and
before the update, because the update changes in place what the shadows have saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.cast.cache import WeightCasts
from halfstep.cast.emulate import plain
from halfstep.cast.state import STATE
from halfstep.formats import FP32, Format
from halfstep.lens.rows import Tally, form_of, merged
from halfstep.lens.watch import Call, Paths, Watch, floats_of, tensors_in
from halfstep.trees import map_tensors

__all__ = ["LOWS", "Recorder", "Reference"]

LOWS = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
RANDOM = frozenset(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu bernoulli normal "
    "multinomial poisson gumbel_softmax multi_head_attention_forward scaled_dot_product_attention lstm gru rnn_tanh "
    "rnn_relu fractional_max_pool2d fractional_max_pool3d uniform random exponential cauchy geometric".split()
)
"""Operators that may draw random numbers: their shadows draw the same."""

STATEFUL = frozenset({"batch_norm", "instance_norm", "rrelu"})
"""Operators that write into their arguments though their name does not say so."""

SELECTING = frozenset("relu relu6 cat stack where masked_fill clamp abs neg hstack vstack".split())
"""Operators that choose and copy: their backward passes round nothing."""

SATURATING = {"softmax": "rows", "sigmoid": "elements", "tanh": "elements"}
NEAR_ONE = 2.0**-12
"""A number of fp32 this far below 1 is not yet 1: fp16 and bf16 may say it is."""

CANCELLED = 2.0**-9
"""Size of a sum over that of its terms: the gradient of a key's bias is zero but for rounding, and so are others."""

Key = tuple[str, str, int]


@dataclass(slots=True)
class Kept:
    """A result of the fp32 twin: its value, its version when it was made, and its gradient."""

    value: Tensor
    version: int
    gradient: Tensor | None = None


class Reference(Watch):
    """Watches the fp32 twin: low formats that the user's code asks for are fp32 in it, and its results are kept."""

    def __init__(self, paths: Paths, closed: frozenset[str]) -> None:
        super().__init__(paths, closed)
        self.kept: dict[Key, Kept] = {}
        self.weights: dict[str, Tensor] = {}

    def seen(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the first floating result."""
        if call.in_place:
            self._rescue(args[:1])
        result = self._wide(func, args, kwargs)
        found = floats_of(result)
        if found and found[0].numel():
            kept = Kept(found[0].detach(), found[0]._version)
            self.kept[call.module, call.op, call.nth] = kept
            if found[0].requires_grad:

                def arrive(gradient: Tensor) -> None:
                    kept.gradient = gradient.detach()

                found[0].register_hook(arrive)
        return result

    def unseen(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let no low format come about."""
        return self._wide(func, args, kwargs)

    def _wide(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in {"half", "bfloat16"} and args:
            return args[0].to(torch.float32)
        if any(type(a) is torch.dtype for a in args) or "dtype" in kwargs:
            args, kwargs = widened_dtypes(args, kwargs, torch.float32)
        return func(*args, **kwargs)

    def _rescue(self, destinations: tuple[Any, ...]) -> None:
        """Copy kept results that an operator is about to write into."""
        places = {t.untyped_storage().data_ptr() for t in tensors_in(destinations)}
        for kept in self.kept.values():
            if kept.value.untyped_storage().data_ptr() in places:
                kept.value = kept.value.clone()
                kept.version = kept.value._version


def widened_dtypes(
    args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which low dtypes are `wide`."""
    return (
        tuple(wide if type(a) is torch.dtype and a in LOWS else a for a in args),
        {k: wide if type(v) is torch.dtype and v in LOWS else v for k, v in kwargs.items()},
    )


@dataclass(slots=True)
class _Twin:
    """One operator call of its own: as the policy runs it and as the shadow does, both ready to go backward."""

    tally: Tally
    low: Tensor
    wide: Tensor
    low_leaves: list[Tensor]
    wide_leaves: list[Tensor]
    names: list[str]
    gradient: Tensor | None = None


class Recorder(Watch):
    """Watches the audited run.

    Args:
        paths: knows the module that runs.
        closed: composites with a rule of their own.
        shadow: dtype of the shadows.
        parameters: id -> (name, parameter) of the audited model.
        simulated: operator -> format, where the policy simulates one.
        devices: device types of the region.
    """

    def __init__(
        self,
        paths: Paths,
        closed: frozenset[str],
        *,
        shadow: torch.dtype,
        parameters: Mapping[int, str],
        simulated: Mapping[str, Format],
        devices: tuple[str, ...],
    ) -> None:
        super().__init__(paths, closed)
        self.shadow = shadow
        self.parameters = parameters
        self.simulated = simulated
        self.devices = devices
        self.tallies: dict[tuple[str, str, str, str], Tally] = {}
        self.users: dict[str, tuple[str, str, str]] = {}
        self.forms: dict[str, Format] = {}
        self.skipped = 0
        self.start({})

    def start(self, kept: dict[Key, Kept]) -> None:
        """Begin a step; `kept` are the results of the fp32 twin."""
        self.begin()
        self.kept = kept
        self._twins: list[_Twin] = []
        self._arrived: list[tuple[Tally, Tensor, Kept | None]] = []
        self._running: Tally | None = None
        self._mark = 0.0
        self._off: dict[int, float] = {}  # storage -> how far its numbers are from the fp32 twin's

    def tally(self, call: Call, role: str, parameter: str = "") -> Tally:
        """Return the tally of a row."""
        key = (call.module, call.op, role, parameter)
        found = self.tallies.get(key)
        if found is None:
            found = self.tallies[key] = Tally(call.module, call.op, role, parameter, line=call.line)
        return found

    # ------------------------------------------------------------------ forward

    def seen(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, measure it, and compare it with its shadow and its fp32 twin."""
        random = self._random_state() if call.op in RANDOM else None
        given = floats_of((args, kwargs))
        before = (args, kwargs)
        if call.in_place:
            before = (map_tensors(args[:1], _copy) + args[1:], kwargs)
        elif call.op in STATEFUL:
            before = map_tensors(before, _copy_statistics)
        with _Casts(given) as casts:
            began = time.perf_counter()
            result = func(*args, **kwargs)
            took = time.perf_counter() - began
        found = floats_of(result)
        if not found or not found[0].numel():
            return result
        output = found[0]
        if call.op == "to" and (output.dtype not in LOWS or any(output is tensor for tensor in given)):
            return result
        form = self.simulated.get(call.op) or form_of(output)
        tally = self.tally(call, "activation")
        tally.seconds += took
        made = casts.of_arguments(output)
        tally.casts += len(made)
        tally.cast_bytes += sum(made)
        for tensor in found:
            tally.see(tensor.detach(), form)
        self._meet_weights(call, (args, kwargs), form)
        twin = None
        low = made or output.dtype in LOWS or call.op in self.simulated or any(t.dtype in LOWS for t in given)
        if low or self.shadow is torch.float64:
            twin = self._shadow(call, tally, func, *before, output, form, random)
        elif output.dtype is torch.float32:
            tally.local.exact(output.numel())
        kept = self._twin_of(call, output)
        if kept is not None:
            off = tally.whole.add(output.detach(), kept.value, form)
            tally.given = max([tally.given, *(self._off.get(_place(t), 0.0) for t in given)])
            self._off[_place(output)] = off
        if output.requires_grad:
            self._hook(call, output, kept, twin)
        return result

    def _twin_of(self, call: Call, output: Tensor) -> Kept | None:
        kept = self.kept.pop((call.module, call.op, call.nth), None)
        if kept is None or kept.value.shape != output.shape or kept.value._version != kept.version:
            return None
        return kept

    def _meet_weights(self, call: Call, values: Any, form: Format) -> None:
        """Note which operator uses a parameter, and in which format."""
        for tensor in tensors_in(values):
            owner = tensor if id(tensor) in self.parameters else tensor._base
            name = self.parameters.get(id(owner)) if owner is not None else None
            if name is not None and name not in self.users:
                self.users[name] = (call.module, call.op, call.line)
                self.forms[name] = form

    def _random_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    @contextmanager
    def _same_numbers(self, state: Any) -> Iterator[None]:
        """Draw the random numbers of `state` in a block, and go on as if nothing had been drawn."""
        if state is None:
            yield
            return
        now = self._random_state()
        try:
            _set_random(state)
            yield
        finally:
            _set_random(now)

    def _shadow(
        self,
        call: Call,
        tally: Tally,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
        form: Format,
        random: Any,
    ) -> _Twin | None:
        """Run the operator again in the shadow format; with gradients also once more as the policy does."""
        differentiable = output.requires_grad and not call.in_place and call.op not in SELECTING
        leaves: list[tuple[Tensor, Tensor, str]] = []

        def wide_leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or tensor.is_nested:
                return tensor.detach() if tensor.is_complex() else tensor
            made = tensor.detach().to(self.shadow)
            made = made.clone() if made.data_ptr() == tensor.data_ptr() and call.in_place else made
            if differentiable and tensor.requires_grad:
                made.requires_grad_()
                leaves.append((tensor, made, self.parameters.get(id(tensor), "")))
            return made

        wide_args, wide_kwargs = map_tensors((args, kwargs), wide_leaf)
        wide_args, wide_kwargs = widened_dtypes(wide_args, wide_kwargs, self.shadow)
        name = getattr(func, "__name__", "")
        if name in {"half", "bfloat16"}:
            func, wide_args = torch.Tensor.to, (wide_args[0], self.shadow)
        try:
            with (
                _unseen_by_checkpointing(),
                self._same_numbers(random),
                torch.set_grad_enabled(differentiable),
                _without_rules(self.devices),
            ):
                wide = floats_of(func(*wide_args, **wide_kwargs))[0]
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            self.skipped += 1
            return None
        if wide.shape != output.shape:
            return None
        tally.local.add(output.detach(), wide.detach(), form)
        if form.exponent_bits < FP32.exponent_bits:
            tally.wide = merged(tally.wide, wide)
        if call.op in SATURATING and form.mantissa_bits < FP32.mantissa_bits:
            _saturation(tally, call.op, output.detach(), wide.detach())
        if differentiable and leaves and wide.requires_grad and len(floats_of(output)) == 1:
            return self._twin(call, func, args, kwargs, wide, leaves, random)
        return None

    def _twin(
        self,
        call: Call,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        wide: Tensor,
        leaves: list[tuple[Tensor, Tensor, str]],
        random: Any,
    ) -> _Twin | None:
        made: dict[int, Tensor] = {}
        wanted = {id(tensor) for tensor, _, _ in leaves}

        def leaf(tensor: Tensor) -> Tensor:
            if id(tensor) not in wanted:
                return tensor.detach()
            if id(tensor) not in made:
                detached = tensor.detach()
                made[id(tensor)] = (
                    nn.Parameter(detached) if isinstance(tensor, nn.Parameter) else detached.requires_grad_()
                )
            return made[id(tensor)]

        low_args, low_kwargs = map_tensors((args, kwargs), leaf)
        with _unseen_by_checkpointing(), self._same_numbers(random), torch.enable_grad(), _own_casts():
            low = floats_of(func(*low_args, **low_kwargs))[0]
        if not low.requires_grad:
            return None
        tensors, wide_leaves, names = zip(*leaves, strict=True)
        low_leaves = [made[id(tensor)] for tensor in tensors]
        twin = _Twin(self.tally(call, "activation gradient"), low, wide, low_leaves, list(wide_leaves), list(names))
        self._twins.append(twin)
        return twin

    # ------------------------------------------------------------------ backward

    def _hook(self, call: Call, output: Tensor, kept: Kept | None, twin: _Twin | None) -> None:
        tally = self.tally(call, "activation gradient")

        def arrive(gradient: Tensor) -> None:
            self._clock(tally)
            if gradient.layout is torch.strided and not gradient.is_complex():
                self._arrived.append((tally, gradient.detach(), kept))
                if twin is not None:
                    twin.gradient = gradient.detach()
            self._mark = time.perf_counter()

        output.register_hook(arrive)

    def _clock(self, following: Tally | None) -> None:
        """Give the time since the last gradient arrived to the operator it arrived at."""
        now = time.perf_counter()
        if self._running is not None:
            self._running.seconds += now - self._mark
        self._running = following

    def backward_begins(self) -> None:
        """Start the clock of the backward pass."""
        self._running, self._mark = None, time.perf_counter()

    def backward_ends(self, scale: float, named: Mapping[str, nn.Parameter], wanted: Mapping[str, Tensor]) -> None:
        """Look at all gradients; before the update, which changes what the shadows have saved.

        Args:
            scale: the factor that gradients carry.
            named: parameters of the audited model, with their gradients.
            wanted: gradients of the fp32 twin.
        """
        self._clock(None)
        for tally, gradient, kept in self._arrived:
            form = self.simulated.get(tally.op) or form_of(gradient)
            tally.see(gradient, form)
            tally.scale = scale
            if kept is not None and kept.gradient is not None and kept.gradient.shape == gradient.shape:
                tally.whole.add(gradient, kept.gradient, form, scale)
                if form.exponent_bits < FP32.exponent_bits:
                    tally.wide = merged(tally.wide, kept.gradient)
        for twin in self._twins:
            if twin.gradient is not None:
                self._compare_backward(twin, twin.gradient)
        self._arrived, self._twins = [], []
        for name, parameter in named.items():
            if parameter.grad is not None:
                self._weight_gradient(name, parameter.grad, scale, wanted.get(name))

    def _compare_backward(self, twin: _Twin, gradient: Tensor) -> None:
        low = torch.autograd.grad(twin.low, twin.low_leaves, gradient.to(twin.low.dtype), allow_unused=True)
        wide = torch.autograd.grad(twin.wide, twin.wide_leaves, gradient.to(twin.wide.dtype), allow_unused=True)
        for name, found, wanted in zip(twin.names, low, wide, strict=True):
            if found is None or wanted is None or found.layout is not torch.strided:
                continue
            form = self.simulated.get(twin.tally.op) or form_of(twin.low)
            tally = twin.tally
            if name:
                module, op, line = self.users.get(name, (tally.module, tally.op, tally.line))
                tally = self.tally(Call(module, op, 0, line), "weight gradient", name)
                if wanted.dim() == 1 and gradient.dim() > 1:
                    tally.cancels = float(wanted.abs().sum()) < CANCELLED * float(gradient.float().abs().sum())
            tally.local.add(found, wanted, form)

    def _weight_gradient(self, name: str, gradient: Tensor, scale: float, wanted: Tensor | None) -> None:
        module, op, line = self.users.get(name, (name.rpartition(".")[0], "", ""))
        tally = self.tally(Call(module, op, 0, line), "weight gradient", name)
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not values.is_floating_point() or not values.numel():
            return
        tally.see(values)
        tally.scale = scale
        if wanted is not None and not gradient.is_sparse and wanted.shape == gradient.shape:
            made_in = self.forms.get(name, tally.form)  # an fp32 gradient may have been low on its way
            tally.whole.add(gradient, wanted, min(made_in, tally.form, key=lambda f: f.exponent_bits), scale)
            if scale != 1.0 or made_in.exponent_bits < FP32.exponent_bits:
                tally.wide = merged(tally.wide, wanted)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copy_statistics(tensor: Tensor) -> Tensor:
    """Copy statistics, which the operator writes into; what has gradients it only reads."""
    return tensor if tensor.requires_grad or isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _set_random(state: Any) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


def _unseen_by_checkpointing() -> AbstractContextManager[Any]:
    """Keep what a block saves for backward from hooks that count it, as those of activation checkpointing do."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


@contextmanager
def _own_casts() -> Iterator[None]:
    """Leave the low copies alone that the audited run shares between its operators."""
    shared, STATE.casts = STATE.casts, WeightCasts()
    try:
        yield
    finally:
        STATE.casts = shared


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _without_rules(devices: tuple[str, ...]) -> Iterator[None]:
    """Run operators as they are: no autocast, no rule, no mode."""
    if not devices:
        with torch._C.DisableTorchFunction():
            yield
        return
    with plain(devices[0]), _without_rules(devices[1:]):
        yield


def _saturation(tally: Tally, op: str, output: Tensor, wide: Tensor) -> None:
    """Count what the format alone makes 1: rows of a softmax, elements of a sigmoid or tanh."""
    if op == "softmax":
        found, wanted = output.amax(-1), wide.amax(-1)
    else:
        found, wanted = output.abs(), wide.abs()
    tally.saturated += int(((found == 1) & (wanted < 1 - NEAR_ONE)).sum())
    tally.notes["rows"] = tally.notes.get("rows", 0) + found.numel()


class _Casts(TorchDispatchMode):
    """Counts the casts of the arguments of one call.

    Widening inside an emulated operator, and the rounding of its result, are how it is carried out here: no casts.
    """

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.places = {t.untyped_storage().data_ptr() for t in given}
        self.made: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is not args[0].dtype:
            if args[0].is_floating_point() and args[0].untyped_storage().data_ptr() in self.places:
                self.made.append((result.dtype, result.numel() * result.element_size()))
        return result

    def of_arguments(self, output: Tensor) -> list[int]:
        """Return the bytes of each cast that the policy asked for; widening for a low result is how it is made."""
        return [size for dtype, size in self.made if not (output.dtype in LOWS and dtype not in LOWS)]
