"""Sampler: what `Monitor` gathers on the devices, and how: gradients, weights before and after an update, outputs.

Note [sampled update]: what an update did to a weight is seen by comparing it with a copy made before; that copy, and
those of low optimizer states, live for the sampled update alone (4 bytes a parameter, 2 or 4 a state). Compared is
what the optimizer moves: the fp32 value where halfstep keeps one behind a low weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.accelerators import Landing
from halfstep.cast.state import STATE
from halfstep.formats import FORMATS, LOW_DTYPES, Format, widest_dtype
from halfstep.kernels.sharded import local
from halfstep.lens.monitor.records import ActivationRecord, MonitorRecord, ParameterRecord
from halfstep.lens.sketch import ExponentSketch, Sketches
from halfstep.optim import members
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import tensors
from halfstep.weights import WeightStore
from halfstep.weights.states import LowStates

RATIO, GOOD, MOVABLE, UNMOVED, STATES = range(5)
"""Columns of what is summed for a parameter: update ratios; samples; elements with a gradient, those of them whose
weight did not change; then, for each of `KEPT` low states, elements that did not change."""

KEPT = 3


@dataclass
class Load:
    """The tensors of a record, while they are copied to the host."""

    step: int
    samples: int
    paces: dict[int, tuple[float, float]]
    parts: list[tuple[list[int], Landing]] = field(default_factory=list)


@dataclass(frozen=True)
class Shelf:
    """What has gathered on one device; what is not watched is empty."""

    numbers: list[int]  # of the device's parameters
    gradients: Sketches
    weights: Sketches
    sums: Tensor  # (parameters, STATES + KEPT) fp64, fp32 on a device without
    outputs: Sketches  # of each leaf module


class Sampler:
    """Gathers samples of one model and its optimizer, without a wait, and makes records of them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        store: WeightStore | None,
        format: Format,
        *,
        weights: bool,
        activations: bool,
    ) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.names, self.parameters = [*named], [*named.values()]
        self.leaves = [(n, m) for n, m in model.named_modules() if not any(True for _ in m.children())]
        self.dtypes = [""] * len(self.leaves)  # formats of their last outputs
        self.shelves: dict[torch.device, Shelf] = {}
        # By parameter: what the last sample's weight decay takes off relatively; learning rate over the largest so far.
        self.paces: dict[int, tuple[float, float]] = {}
        self.weights, self.activations = weights, activations
        self._optimizer, self._store, self._format = optimizer, store, format
        self._places = {id(p): n for n, p in enumerate(self.parameters)}
        self._before: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._tops: dict[int, float] = {}
        self._largest: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def _shelf(self, device: torch.device) -> Shelf:
        if device not in self.shelves:
            numbers = [n for n, p in enumerate(self.parameters) if p.device == device]
            self.shelves[device] = Shelf(
                numbers,
                Sketches(len(numbers), device),
                Sketches(len(numbers) if self.weights else 0, device),
                torch.zeros(len(numbers), STATES + KEPT, dtype=widest_dtype(device), device=device),
                Sketches(len(self.leaves) if self.activations else 0, device),
            )
        return self.shelves[device]

    def hooks(self) -> list[RemovableHandle]:
        """Hook every leaf module, so that what it returns is counted."""
        return [m.register_forward_hook(self._hook(n)) for n, (_, m) in enumerate(self.leaves)]

    def _hook(self, number: int) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or STATE.above is not None:  # a replay of the black box is not sampled
                return
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self.dtypes[number] = _format_name(tensor.dtype)
                    with DisableTorchFunction(), torch.no_grad():  # without the region's rules
                        self._shelf(tensor.device).outputs.add_([tensor], first=number)

        return look

    def before(self, parameters: Sequence[nn.Parameter], factor: Tensor | None) -> None:
        """Count gradients, times `factor`, and copy what the update will change."""
        gradients = {self._places[id(p)]: p.grad for p in parameters if id(p) in self._places and p.grad is not None}
        for number in gradients:
            self._shelf(self.parameters[number].device)
        self._before = {}
        states = self.low_states() if self.weights else {}
        for device, shelf in self.shelves.items():
            given = [gradients.get(number) for number in shelf.numbers]
            none = torch.empty(0, device=device)
            by = None if factor is None else factor.to(device, non_blocking=True)
            shelf.gradients.add_(none if g is None else g if by is None else g * by for g in given)
            if self.weights:
                for number in gradients.keys() & set(shelf.numbers):
                    value = self._precise(self.parameters[number])
                    self._before[number] = value, [state.clone() for state in states.get(number, ())]
                shelf.weights.add_(self._before.get(number, (none,))[0] for number in shelf.numbers)

    def after(self, bad: Tensor | None) -> None:
        """Compare with the copies, if the update was applied (not `bad`) and its learning rate is not 0."""
        if not self.weights:
            return
        states, rates = self.low_states(), self._rates()
        for device, shelf in self.shelves.items():
            zero = torch.zeros((), dtype=widest_dtype(device), device=device)
            none = zero.expand(STATES + KEPT)
            good = zero == 0 if bad is None else ~bad.to(device, non_blocking=True)
            rows = []
            for number in shelf.numbers:
                before, rate = self._before.pop(number, None), rates.get(number, 0.0)
                if before is None or (not isinstance(rate, Tensor) and rate == 0):
                    rows.append(none)
                    continue
                moving = good & (rate.to(device, non_blocking=True) != 0) if isinstance(rate, Tensor) else good
                row = self._row(number, before, states.get(number, []), zero)
                rows.append(torch.where(moving, row, none))
            if rows:
                shelf.sums.add_(torch.stack(rows))

    def _row(self, number: int, before: tuple[Tensor, list[Tensor]], states: list[Tensor], zero: Tensor) -> Tensor:
        value, gradient = self._precise(self.parameters[number]), self.parameters[number].grad
        assert gradient is not None
        gradient = local(gradient.to_dense() if gradient.is_sparse else gradient)
        old, old_states = before
        start = _parts(old).float()
        change = torch.linalg.vector_norm(_parts(value).float() - start)
        ratio = change / torch.linalg.vector_norm(start).clamp(min=torch.finfo(torch.float32).tiny)
        active = gradient != 0
        parts = [ratio, zero + 1, active.sum(), (active & (value == old)).sum()]
        parts += [(active & (one == other)).sum() for one, other in zip(states, old_states, strict=False)]
        parts += [zero] * (STATES + KEPT - len(parts))
        return torch.stack([part.to(zero.dtype) for part in parts])

    def _precise(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of the value that the optimizer moves."""
        if self._store is not None and parameter in self._store:
            return self._store.read(parameter)
        return local(parameter.detach()).clone()

    def low_states(self) -> dict[int, list[Tensor]]:
        """Return, by parameter, optimizer states that are low, in its shape, and rounded to nearest by torch."""
        if any(LowStates.of(one) is not None for one in members(self._optimizer)):
            return {}
        found = {}
        for parameter, state in self._optimizer.state.items():
            number = self._places.get(id(parameter))
            if number is not None:
                low = [v for v in state.values() if isinstance(v, Tensor) and v.dtype in LOW_DTYPES]
                found[number] = [local(v) for v in low if v.shape == parameter.shape][:KEPT]
        return found

    def _rates(self) -> dict[int, Any]:
        """Return learning rates by parameter, and note `paces`."""
        rates: dict[int, Any] = {}
        self.paces = {}
        for group in self._optimizer.param_groups:
            rate, decay = group.get("lr", 1.0), group.get("weight_decay", 0.0)
            for parameter in group["params"]:
                number = self._places.get(id(parameter))
                if number is not None:
                    rates[number] = rate
                    if not isinstance(rate, Tensor) and not isinstance(decay, Tensor):
                        top = self._tops[number] = max(self._tops.get(number, 0.0), rate)
                        self.paces[number] = float(rate * decay), rate / top if top else 0.0
        return rates

    def record(self, load: Load) -> MonitorRecord:
        """Return the record of `load`, whose tensors have arrived."""
        states = self.low_states()
        parameters: dict[int, ParameterRecord] = {}
        outputs: dict[int, ExponentSketch] = {}
        scale = 1.0
        for numbers, landing in load.parts:
            gradients, weights, sums, returned, *rest = landing.landed()
            seen: list[ExponentSketch | None] = [*ExponentSketch.from_rows(weights)] or [None] * len(numbers)
            found = zip(numbers, ExponentSketch.from_rows(gradients), seen, sums.tolist(), strict=True)
            for number, gradient, weight, totals in found:
                if gradient.count:
                    if not states.get(number):
                        totals[STATES:] = [math.nan]
                    parameters[number] = self._parameter(load, number, gradient, weight, totals)
            for number, sketch in enumerate(ExponentSketch.from_rows(returned)):
                outputs.setdefault(number, ExponentSketch()).merge_(sketch)
            scale = float(rest[0]) if rest else scale
        activations = []
        for number, sketch in sorted(outputs.items()):
            if sketch.count:
                (path, leaf), dtype = self.leaves[number], self.dtypes[number]
                activations.append(ActivationRecord(module=path, kind=type(leaf).__name__, dtype=dtype, sketch=sketch))
        return MonitorRecord(
            step=load.step,
            samples=load.samples,
            scale=scale,
            parameters=tuple(parameters[n] for n in sorted(parameters)),
            activations=tuple(activations),
        )

    def _parameter(
        self, load: Load, number: int, gradient: ExponentSketch, weight: ExponentSketch | None, sums: list[float]
    ) -> ParameterRecord:
        name, parameter = self.names[number], self.parameters[number]
        store = self._store if self._store is not None and parameter in self._store else None
        stochastic = store is not None and store.name == "stochastic"
        dtype = _format_name(parameter.dtype)
        before, now = self._largest.get(name, 0.0), gradient.largest
        self._largest[name] = now
        good, movable = sums[GOOD], sums[MOVABLE]
        applied = int(good) if self.weights else load.samples
        self._silent[name] = self._silent.get(name, 0) + applied if gradient.zeros == gradient.count else 0
        decay, pace = load.paces.get(number, (0.0, 1.0))
        return ParameterRecord(
            name=name,
            dtype=dtype,
            precise=dtype if store is None or stochastic else "fp32",
            gradient=gradient,
            weight=weight,
            format=self._format,
            update_ratio=sums[RATIO] / good if good else math.nan,
            swallowed=sums[UNMOVED] / movable if movable and not stochastic else math.nan,
            frozen_state=max(sums[STATES:]) / movable if movable else math.nan,
            decay=decay if good else 0.0,
            pace=pace,
            drift=math.log2(now / before) if now and before else math.nan,
            stochastic=stochastic,
            silent=self._silent[name],
        )


def _parts(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _format_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype's format: that of the parts of a complex one, and "fp32" for what is wider still."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    found = next((f.name for f in FORMATS.values() if f.torch_dtype is dtype), None)
    return "fp32" if found is None and dtype is torch.float64 else found or str(dtype).removeprefix("torch.")
