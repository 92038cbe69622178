"""Record: how an audit measures operators, and what it compares with what.

The fp32 twin (`Reference`) runs first, on the same weights, batch and random numbers. Its results wait until the
audited run (`AuditRecorder`) reaches the same call of the same operator. Every operator of the audited run that touches
a low format is run again by itself in the shadow format, on the same inputs, forward and backward (`Shadows`).

Note [order]: gradients arrive by hooks on results. They are compared after the backward pass and before the update,
because the update changes in place what the shadows have saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.formats import Format
from halfstep.lens.audit.comparison import added_masks
from halfstep.lens.audit.reference import BELOW_FP32, Key, TwinResult, floats_of, integers_key, is_index
from halfstep.lens.audit.rows import Tally, form_of
from halfstep.lens.audit.shadow import RANDOM, Pair, Shadows
from halfstep.lens.audit.signs import SUMS, Integers
from halfstep.lens.calls import copied, place
from halfstep.lens.tracing import KernelMode, OperatorCall, OperatorSink, Sink
from halfstep.snapshot import torch_states
from halfstep.torch_private.autograd import base_of
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.torch_private.operators import CONVERSION
from halfstep.trees import map_tensors, tensors

__all__ = ["AuditRecorder"]

STATEFUL = frozenset({"batch_norm", "instance_norm", "rrelu"})
"""Operators that write into their arguments though their names do not end in an underscore."""

CHOOSING = frozenset(
    "embedding embedding_bag gather index_select index_add index_copy index_put take take_along_dim scatter "
    "scatter_add scatter_reduce".split()
)
"""Operators that integers choose numbers in."""

CANCELLED = 2.0**-9
"""Size of a sum over that of its terms: the gradient of a key's bias is zero but for rounding, and so are others."""


class AuditRecorder(OperatorSink):
    """Receives the operators of the audited run.

    Args:
        closed: composites with a rule of their own.
        shadow: dtype of the shadows.
        parameters: id -> (name, parameter) of the audited model.
        simulated: operator -> format, where the policy simulates one.
        devices: device types of the region.
    """

    def __init__(
        self,
        closed: frozenset[str],
        *,
        shadow: torch.dtype,
        parameters: Mapping[int, str],
        simulated: Mapping[str, Format],
        devices: tuple[str, ...],
    ) -> None:
        super().__init__(closed)
        self.shadows = Shadows(shadow, devices, parameters)
        self.parameters = parameters
        self.simulated = simulated
        self.tallies: dict[tuple[str, str, str, str, str], Tally] = {}
        self.users: dict[str, tuple[str, str, str]] = {}
        self.forms: dict[str, Format] = {}
        self.start({})

    def start(
        self, kept: dict[Key, TwinResult], integers: dict[Key, Tensor] | None = None, *, backward: bool = True
    ) -> None:
        """Begin a step.

        Args:
            kept: the results of the fp32 twin.
            integers: those that it has made of floating numbers.
            backward: whether shadows go backward too.
        """
        self.begin()
        self.shadows.backward = backward
        self.kept = kept
        self._kept: TwinResult | None = None  # of the call that is measured
        self._pairs: list[Pair] = []
        self._arrived: list[tuple[Tally, Tensor, TwinResult | None]] = []
        self._running: Tally | None = None
        self._mark = 0.0
        self.integers = integers or {}
        self._integers = Integers()
        self._chosen: set[int] = set()  # storages of numbers that were picked by an index
        self._off: dict[int, float] = {}  # storage -> how far its numbers are from the fp32 twin's

    def tally(self, call: OperatorCall, role: str, parameter: str = "") -> Tally:
        """Return the tally of a row."""
        line = "" if parameter else call.line
        key = (call.module, call.op, role, parameter, line)
        found = self.tallies.get(key)
        if found is None:
            found = self.tallies[key] = Tally(call.module, call.op, role, parameter, line=call.line)
        return found

    def tally_of(self, parameter: str, role: str) -> Tally:
        """Return the tally of a parameter's row, in the place of the operator that uses it first."""
        module, op, line = self.users.get(parameter, (parameter.rpartition(".")[0], "", ""))
        return self.tally(OperatorCall(module, op, 0, line), role, parameter)

    # ------------------------------------------------------------------ forward

    def operator(
        self, call: OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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
                    wanted = self.integers.pop(integers_key(self, call), None)
                    self._integers.converted(args[0] if args else None, result, wanted)
                return result
            if call.op == "to" and (found[0].dtype not in BELOW_FP32 or any(found[0] is tensor for tensor in given)):
                return result
            tally = self.tally(call, "activation")
            tally.seconds += took
            again = self._look(call, tally, (func, *before), given, found, casts, random)
        pair = None if again is None else again()
        if pair is not None:
            self._pairs.append(pair)
        if found[0].requires_grad:
            self._hook(call, found[0], self._kept, pair)
        return result

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow numbers through indexing, which copies them."""
        result = func(*args, **kwargs)
        with DisableTorchFunction():
            self._integers.follow((args, kwargs), result)
        if func is torch.Tensor.__getitem__ and isinstance(result, Tensor) and result.layout is torch.strided:
            with DisableTorchFunction():
                if any(is_index(t) for t in tensors(args[1:])):
                    self._off[place(result)] = self._off.get(place(args[0]), 0.0)
                    self._chosen.add(place(result))
                    self._integers.choose(tensors(args[1:]))
        return result

    def _look(
        self,
        call: OperatorCall,
        tally: Tally,
        run: tuple[Callable[..., Any], Any, Any],
        given: list[Tensor],
        found: list[Tensor],
        casts: _Casts,
        random: Any,
    ) -> Callable[[], Pair | None] | None:
        """Measure what an operator has given; return what runs it once more as the policy does, or None."""
        output = found[0]
        form = self.simulated.get(call.op) or form_of(output)
        made = casts.of_arguments(output)
        tally.casts += len(made)
        tally.cast_bytes += sum(made)
        hidden = [tally.see(tensor.detach(), form) for tensor in found][0]
        if call.op in SUMS and (added := added_masks(run[1])) is not None:
            hidden = added | hidden
        self._meet_weights(call, run[1:], form)
        taken = tensors(run[1:])
        tally.decides |= any(is_index(t) or place(t) in self._chosen for t in taken if t.layout is torch.strided)
        if call.op in CHOOSING:
            self._integers.choose(taken)
        self._integers.made(output, tally)
        again = None
        low = made or call.op in self.simulated or any(t.dtype in BELOW_FP32 for t in (output, *given))
        if low or self.shadows.dtype is torch.float64:
            tallies = tally, partial(self.tally, call, "activation gradient")
            again = self.shadows.run(call, tallies, *run, output, form, random, hidden)
        elif output.dtype is torch.float32:
            tally.local.exact(output.numel())
        self._chosen.discard(place(output))  # its memory has been freed and used again
        self._kept = self._twin_of(call, output)
        if self._kept is not None:
            off = tally.whole.add(output.detach(), self._kept.value, form, hidden=hidden)
            tally.given = max([tally.given, *(self._off.get(place(t), 0.0) for t in given)])
            self._off[place(output)] = off
        return again

    def _twin_of(self, call: OperatorCall, output: Tensor) -> TwinResult | None:
        kept = self.kept.pop((call.module, call.op, call.nth), None)
        if kept is None or kept.value.shape != output.shape or kept.value._version != kept.version:
            return None
        return kept

    def _meet_weights(self, call: OperatorCall, values: Any, form: Format) -> None:
        """Note which operator uses a parameter, and in which format."""
        for tensor in tensors(values):
            owner = tensor if id(tensor) in self.parameters else base_of(tensor)
            name = self.parameters.get(id(owner)) if owner is not None else None
            if name is not None and name not in self.users:
                self.users[name] = (call.module, call.op, call.line)
                self.forms[name] = form

    # ------------------------------------------------------------------ backward

    def _hook(self, call: OperatorCall, output: Tensor, kept: TwinResult | None, pair: Pair | None) -> None:
        tally = self.tally(call, "activation gradient")

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
        """Measure all gradients; before the update, which changes what the shadows have saved.

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
                if form.is_narrow:
                    tally.add_wanted(kept.gradient)
        for pair in self._pairs:
            self._compare_backward(pair)
        self._arrived, self._pairs = [], []
        for name, parameter in named.items():
            if parameter.grad is not None:
                self._weight_gradient(name, parameter.grad, scale, wanted.get(name))

    def _compare_backward(self, pair: Pair) -> None:
        form = self.simulated.get(pair.tally.op) or form_of(pair.low)
        for name, found, wanted in pair.gradients():
            tally = pair.tally
            if name:
                tally = self.tally_of(name, "weight gradient")
                assert pair.gradient is not None
                if wanted.dim() == 1 and pair.gradient.dim() > 1:
                    tally.cancels = float(wanted.abs().sum()) < CANCELLED * float(pair.gradient.float().abs().sum())
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


def _copy_statistics(tensor: Tensor) -> Tensor:
    """Copy statistics, which the operator writes into; what has gradients it only reads."""
    return tensor if tensor.requires_grad or isinstance(tensor, nn.Parameter) else copied(tensor)


class _Casts(Sink):
    """Counts the casts of the arguments of one call.

    Widening inside an emulated operator, and the rounding of its result, are how it is carried out here: no casts.
    """

    def __init__(self, given: list[Tensor]) -> None:
        self.places = {place(t) for t in given}
        self.made: list[tuple[torch.dtype, int]] = []

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel, and count it if it is such a cast."""
        result = func(*args, **kwargs)
        if func is CONVERSION and result.dtype is not args[0].dtype:
            if args[0].is_floating_point() and place(args[0]) in self.places:
                self.made.append((result.dtype, result.numel() * result.element_size()))
        return result

    def of_arguments(self, output: Tensor) -> list[int]:
        """Return the bytes of each cast of the policy; widening for a low result belongs to the operator."""
        return [size for dtype, size in self.made if not (output.dtype in BELOW_FP32 and dtype not in BELOW_FP32)]
