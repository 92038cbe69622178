"""Record: how an audit measures operators, and what it compares with what.

The fp32 twin (`Reference`) runs first, on the same weights, batch and random numbers; its results wait until the
audited run (`AuditRecorder`) reaches the same call. Every operator that touches a low format is run again by itself in
the shadow format and as the policy runs it, on the same inputs and random numbers, forward and backward (`Pair`): what
these differ by is that operator's own doing.

Note [order]: gradients arrive by hooks on results. They are compared after the backward pass and before the update,
because the update changes in place what the shadows have saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.cast.regions.recompute import no_saved_tensor_hooks
from halfstep.cast.state import STATE
from halfstep.formats import FP32, Format
from halfstep.lens.audit.rows import SUMS, Hidden, Integers, Tally, added_masks, form_of, is_index, note_signs
from halfstep.lens.calls import BELOW_FP32, Args, Kwargs, copied, storage, unruled, weak_storage, widened
from halfstep.lens.tracing import KernelMode, OperatorCall, OperatorSink, Sink
from halfstep.snapshot import same_numbers, torch_states
from halfstep.torch_private.autograd import base_of
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.torch_private.operators import CONVERSION
from halfstep.trees import map_tensors, tensors

STATEFUL = frozenset({"batch_norm", "instance_norm", "rrelu"})
"""Operators that write into their arguments though their names do not end in an underscore."""

CHOOSING = frozenset(  # operators that integers choose numbers in
    "embedding embedding_bag gather index_select index_add index_copy index_put take take_along_dim scatter "
    "scatter_add scatter_reduce".split()
)

RANDOM = frozenset(  # operators that may draw random numbers: their shadows draw the same
    "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu bernoulli normal "
    "multinomial poisson gumbel_softmax multi_head_attention_forward scaled_dot_product_attention lstm gru rnn_tanh "
    "rnn_relu fractional_max_pool2d fractional_max_pool3d uniform random exponential cauchy geometric".split()
)

SELECTING = frozenset("relu relu6 cat stack where masked_fill clamp abs neg hstack vstack".split())
"""Operators that choose and copy: their backward passes round nothing."""

CANCELLED = 2.0**-9
"""Size of a sum over that of its terms: the gradient of a key's bias is zero but for rounding, and so are others."""

Run = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
"""A function, what it was given, in its place and by name, and the states of random generators; None: it draws none."""

Key = tuple[str, str, int]  # module, operator, which call of it in that module


def floats_of(values: Any) -> list[Tensor]:
    """Return the floating tensors among `values` whose numbers can be read."""
    return [t for t in tensors(values) if t.is_floating_point() and t.layout is torch.strided and not t.is_nested]


def integers_key(sink: OperatorSink, call: OperatorCall) -> Key:
    """Return the key of the next conversion to integers: other conversions come and go with a policy's casts."""
    return call.module, "integers", sink.nth(call.module, "integers")


@dataclass(slots=True)
class TwinResult:
    """A result of the fp32 twin: its value, its version when it was made, and its gradient."""

    value: Tensor
    version: int
    gradient: Tensor | None = None


class Reference(OperatorSink):
    """Receives the operators of the fp32 run: low formats in the user's code are fp32 in it, and results are kept."""

    def __init__(self, closed: frozenset[str], model: nn.Module) -> None:
        self.model, self.loss = model, 0.0
        super().__init__(closed)

    def begin(self) -> None:
        """Begin a step."""
        super().begin()
        self.kept: dict[Key, TwinResult] = {}
        self.integers: dict[Key, Tensor] = {}  # made of floating numbers
        self.weights: dict[str, Tensor] = {}  # their gradients

    def line(self) -> str:
        """Return "": results are found by module, operator and number."""
        return ""

    def operator(self, call: OperatorCall, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Keep the first floating result."""
        if call.in_place:
            written = {storage(t) for t in tensors(args[:1])}
            for kept in self.kept.values():
                if storage(kept.value) in written:
                    kept.value = kept.value.clone()
                    kept.version = kept.value._version
        result = self.other(func, args, kwargs)
        found = floats_of(result)
        if not found and call.op == "to" and isinstance(result, Tensor) and is_index(result):
            self.integers[integers_key(self, call)] = result.clone()
        if found and found[0].numel():
            kept = TwinResult(found[0].detach(), found[0]._version)
            self.kept[call.module, call.op, call.nth] = kept
            if found[0].requires_grad:
                found[0].register_hook(lambda gradient: setattr(kept, "gradient", gradient.detach()))
        return result

    def other(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run it with fp32 in place of low formats."""
        func, args, kwargs = widened(func, args, kwargs, torch.float32)
        return func(*args, **kwargs)


@dataclass(slots=True)
class Pair:
    """One operator call on leaves of its own: as the policy runs it and as the shadow does, ready to go backward."""

    tally: Tally
    low: Tensor
    wide: Tensor
    leaves: list[tuple[Tensor, Tensor, str]]  # low, wide, the name of the parameter that it is or ""
    gradient: Tensor | None = None


class AuditRecorder(OperatorSink):
    """Receives the operators of the audited run; `simulated`: operator -> format, where the policy simulates one."""

    def __init__(
        self, closed: frozenset[str], *, shadow: torch.dtype, parameters: Mapping[int, str],
        simulated: Mapping[str, Format],
    ) -> None:  # fmt: skip
        super().__init__(closed)
        self.shadow, self.parameters, self.simulated = shadow, parameters, simulated
        self.tallies: dict[tuple[str, str, str, str, str], Tally] = {}
        self.users: dict[str, tuple[str, str, str]] = {}
        self.forms: dict[str, Format] = {}
        self.skipped = 0  # calls whose operator does not take arguments of the shadow format
        self.start(None)

    def start(self, twin: Reference | None, *, backward: bool = True) -> None:
        """Begin a step that `twin` has run in fp32; `backward`: shadows go backward too."""
        self.begin()
        self._backward = backward
        self._kept = {} if twin is None else twin.kept
        self._pairs: list[Pair] = []
        self._arrived: list[tuple[Tally, Tensor, TwinResult | None]] = []
        self._running: Tally | None = None
        self._mark = 0.0
        self._wanted_integers = {} if twin is None else twin.integers
        self._integers = Integers()
        self._chosen: set[StorageWeakRef] = set()  # of numbers that were picked by an index
        self._off: dict[StorageWeakRef, float] = {}  # how far numbers are from the fp32 twin's

    def tally(self, module: str, op: str, role: str, parameter: str = "", line: str = "") -> Tally:
        """Return the tally of a row."""
        key = (module, op, role, parameter, "" if parameter else line)
        if key not in self.tallies:
            self.tallies[key] = Tally(module, op, role, parameter, line=line)
        return self.tallies[key]

    def tally_of(self, parameter: str, role: str) -> Tally:
        """Return the tally of a parameter's row, in the place of the operator that uses it first."""
        module, op, line = self.users.get(parameter, (parameter.rpartition(".")[0], "", ""))
        return self.tally(module, op, role, parameter, line)

    def operator(self, call: OperatorCall, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run the operator, measure it, and compare it with its shadow and its fp32 twin."""
        with DisableTorchFunction():  # measurements do not follow the region's rules, and cost less without them
            random = torch_states() if call.op in RANDOM else None
            given = floats_of((args, kwargs))
            before = (args, kwargs)
            if call.in_place:
                before = (map_tensors(args[:1], copied) + args[1:], kwargs)
            elif call.op in STATEFUL:
                before = map_tensors(before, _copy_statistics)
            casts = _Casts(given)
        with KernelMode(casts):
            began = time.perf_counter()
            result = func(*args, **kwargs)
            took = time.perf_counter() - began
        with DisableTorchFunction():
            found = floats_of(result)
            if not found or not found[0].numel():
                self._integers.follow((args, kwargs), result)
                if call.op == "to" and isinstance(result, Tensor) and is_index(result):
                    wanted = self._wanted_integers.pop(integers_key(self, call), None)
                    self._integers.converted(args[0] if args else None, result, wanted)
                return result
            output = found[0]
            if call.op == "to" and (output.dtype not in BELOW_FP32 or any(output is tensor for tensor in given)):
                return result
            tally = self.tally(call.module, call.op, "activation", line=call.line)
            tally.seconds += took
            form = self.simulated.get(call.op) or form_of(output)
            made = casts.made
            if output.dtype in BELOW_FP32:  # widening for a low result belongs to the operator
                made = [(dtype, size) for dtype, size in made if dtype in BELOW_FP32]
            tally.casts += len(made)
            tally.cast_bytes += sum(size for _, size in made)
            hidden = self._measure(call, tally, before, found, form)
            again = None
            low = made or call.op in self.simulated or any(t.dtype in BELOW_FP32 for t in (output, *given))
            if low or self.shadow is torch.float64:
                again = self._compare(call, tally, (func, *before, random), output, form, hidden)
            elif output.dtype is torch.float32:
                tally.local.count += output.numel()  # what it should be by definition
            self._chosen.discard(weak_storage(output))  # written in place
            kept = self._kept.pop((call.module, call.op, call.nth), None)
            if kept is not None and (kept.value.shape != output.shape or kept.value._version != kept.version):
                kept = None
            if kept is not None:
                tally.given = max([tally.given, *(self._off.get(weak_storage(t), 0.0) for t in given)])
                self._off[weak_storage(output)] = tally.whole.add(output.detach(), kept.value, form, hidden=hidden)
        pair = None if again is None else again()
        if pair is not None:
            self._pairs.append(pair)
        if output.requires_grad:
            self._hook(call, output, kept, pair)
        return result

    def other(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Follow numbers through indexing, which copies them."""
        result = func(*args, **kwargs)
        with DisableTorchFunction():
            self._integers.follow((args, kwargs), result)
            if func is torch.Tensor.__getitem__ and isinstance(result, Tensor) and result.layout is torch.strided:
                if any(is_index(t) for t in tensors(args[1:])):
                    self._off[weak_storage(result)] = self._off.get(weak_storage(args[0]), 0.0)
                    self._chosen.add(weak_storage(result))
                    self._integers.choose(tensors(args[1:]))
        return result

    def _measure(
        self, call: OperatorCall, tally: Tally, values: Any, found: list[Tensor], form: Format
    ) -> Hidden | None:
        """Add results of `form` that an operator has made of `values`; return the masks in the first of them."""
        hidden = [tally.see(tensor.detach(), form) for tensor in found][0]
        if call.op in SUMS and (added := added_masks(values[0])) is not None:
            hidden = added | hidden
        taken = tensors(values)
        for tensor in taken:  # which operator uses a parameter, and in which format
            owner = tensor if id(tensor) in self.parameters else base_of(tensor)
            name = self.parameters.get(id(owner)) if owner is not None else None
            if name is not None and name not in self.users:
                self.users[name] = (call.module, call.op, call.line)
                self.forms[name] = form
        tally.decides |= any(is_index(t) or weak_storage(t) in self._chosen for t in taken if t.layout is torch.strided)
        if call.op in CHOOSING:
            self._integers.choose(taken)
        self._integers.made(found[0], tally)
        return hidden

    def _compare(
        self, call: OperatorCall, tally: Tally, run: Run, output: Tensor, form: Format, hidden: Hidden | None
    ) -> Callable[[], Pair | None] | None:
        """Compare `output`, which `run` has given in `form`, with what the shadow format gives, under no rule.

        Returned is what makes the `Pair`; None where a backward pass rounds nothing, or shadows do not go backward.
        """
        func, args, kwargs, random = run
        differentiable = self._backward and output.requires_grad and not call.in_place and call.op not in SELECTING
        leaves: list[tuple[Tensor, Tensor, str]] = []
        known: dict[int, Tensor] = {}  # h * h has one leaf, here and in the run under the rules

        def wide_leaf(tensor: Tensor) -> Tensor:
            if id(tensor) in known:
                return known[id(tensor)]
            if not tensor.is_floating_point() or tensor.is_nested:
                return tensor.detach() if tensor.is_complex() else tensor
            made = tensor.detach().to(self.shadow)
            made = made.clone() if made.data_ptr() == tensor.data_ptr() and call.in_place else made
            if differentiable and tensor.requires_grad:
                made.requires_grad_()
                known[id(tensor)] = made
                leaves.append((tensor, made, self.parameters.get(id(tensor), "")))
            return made

        wide_args, wide_kwargs = map_tensors((args, kwargs), wide_leaf)
        wide_func, wide_args, wide_kwargs = widened(func, wide_args, wide_kwargs, self.shadow)
        try:
            # a checkpoint around must not count what a shadow saves
            with no_saved_tensor_hooks(), same_numbers(random), torch.set_grad_enabled(differentiable), unruled():
                wide = floats_of(wide_func(*wide_args, **wide_kwargs))[0]
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            self.skipped += 1
            return None
        if wide.shape != output.shape:
            return None
        tally.local.add(output.detach(), wide.detach(), form, hidden=hidden)
        if form.is_narrow:
            tally.add_wanted(wide.detach() if hidden is None else wide.detach()[~hidden.of(wide.detach())])
        if form.mantissa_bits < FP32.mantissa_bits:
            note_signs(tally, call.op, args, kwargs, output, wide.detach())
        if differentiable and leaves and wide.requires_grad and len(floats_of(output)) == 1:
            owner = self.tally(call.module, call.op, "activation gradient", line=call.line)
            return partial(_pair, owner, run, wide, leaves)
        return None

    def _hook(self, call: OperatorCall, output: Tensor, kept: TwinResult | None, pair: Pair | None) -> None:
        tally = self.tally(call.module, call.op, "activation gradient", line=call.line)

        def arrive(gradient: Tensor) -> None:
            self._clock(tally)
            if gradient.layout is torch.strided and not gradient.is_complex():
                self._arrived.append((tally, gradient.detach(), kept))
                if pair is not None:
                    pair.gradient = gradient.detach()
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
        """Measure all gradients, which carry the factor `scale`; `wanted` are the fp32 twin's. See note [order]."""
        self._clock(None)
        for tally, gradient, kept in self._arrived:
            form = self.simulated.get(tally.op) or form_of(gradient)
            tally.see(gradient, form)
            tally.scale = scale
            if kept is not None and kept.gradient is not None and kept.gradient.shape == gradient.shape:
                tally.whole.add(gradient, kept.gradient, form, scale)
                if form.is_narrow:
                    tally.add_wanted(kept.gradient)
        for pair in self._pairs:
            if pair.gradient is not None:
                self._compare_backward(pair, pair.gradient)
        self._arrived, self._pairs = [], []
        for name, parameter in named.items():
            if parameter.grad is not None:
                self._weight_gradient(name, parameter.grad, scale, wanted.get(name))

    def _compare_backward(self, pair: Pair, gradient: Tensor) -> None:
        form = self.simulated.get(pair.tally.op) or form_of(pair.low)
        lows, wides, names = zip(*pair.leaves, strict=True)
        low = torch.autograd.grad(pair.low, lows, gradient.to(pair.low.dtype), allow_unused=True)
        wide = torch.autograd.grad(pair.wide, wides, gradient.to(pair.wide.dtype), allow_unused=True)
        for name, found, wanted in zip(names, low, wide, strict=True):
            if found is None or wanted is None or found.layout is not torch.strided:
                continue
            tally = self.tally_of(name, "weight gradient") if name else pair.tally
            if name and wanted.dim() == 1 and gradient.dim() > 1:
                tally.cancels = float(wanted.abs().sum()) < CANCELLED * float(gradient.float().abs().sum())
            tally.local.add(found, wanted, form)

    def _weight_gradient(self, name: str, gradient: Tensor, scale: float, wanted: Tensor | None) -> None:
        tally = self.tally_of(name, "weight gradient")
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not values.is_floating_point() or not values.numel():
            return
        tally.see(values)
        tally.scale = scale
        if wanted is not None and not gradient.is_sparse and wanted.shape == gradient.shape:
            made_in = self.forms.get(name, tally.form)  # an fp32 gradient may have been computed in a low format
            tally.whole.add(gradient, wanted, min(made_in, tally.form, key=lambda f: f.exponent_bits), scale)
            if scale != 1.0 or made_in.is_narrow:
                tally.add_wanted(wanted)


def _pair(tally: Tally, run: Run, wide: Tensor, leaves: list[tuple[Tensor, Tensor, str]]) -> Pair | None:
    """Run an operator under the rules, on leaves in place of the first of each of `leaves`."""
    func, args, kwargs, random = run
    made: dict[int, Tensor] = {}
    wanted = {id(tensor) for tensor, _, _ in leaves}

    def leaf(tensor: Tensor) -> Tensor:
        detached = tensor.detach()
        if id(tensor) not in wanted:
            return detached
        if id(tensor) not in made:
            made[id(tensor)] = nn.Parameter(detached) if isinstance(tensor, nn.Parameter) else detached.requires_grad_()
        return made[id(tensor)]

    low_args, low_kwargs = map_tensors((args, kwargs), leaf)
    with no_saved_tensor_hooks(), same_numbers(random), torch.enable_grad(), ExitStack() as after:
        after.callback(setattr, STATE, "casts", STATE.casts)  # which the operators of the audited run share
        STATE.casts = {}
        low = floats_of(func(*low_args, **low_kwargs))[0]
    if not low.requires_grad:
        return None
    return Pair(tally, low, wide, [(made[id(tensor)], shadow, name) for tensor, shadow, name in leaves])


def _copy_statistics(tensor: Tensor) -> Tensor:
    """Copy statistics, which the operator writes into; what has gradients it only reads."""
    return tensor if tensor.requires_grad or isinstance(tensor, nn.Parameter) else copied(tensor)


class _Casts(Sink):
    """Counts the casts of the arguments of one call.

    Widening inside an emulated operator, and the rounding of its result, are how it is carried out here: no casts.
    """

    def __init__(self, given: list[Tensor]) -> None:
        self.places = {storage(t) for t in given}
        self.made: list[tuple[torch.dtype, int]] = []

    def kernel(self, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        result = func(*args, **kwargs)
        if func is CONVERSION and result.dtype is not args[0].dtype:
            if args[0].is_floating_point() and storage(args[0]) in self.places:
                self.made.append((result.dtype, result.numel() * result.element_size()))
        return result
