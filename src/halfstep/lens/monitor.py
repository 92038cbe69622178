"""Monitor: on every N-th update it looks at gradients, weights and activations, and at nothing in between.

Between samples nothing is attached but one entry in `TrainStep.watchers` (or a step hook of an optimizer), which counts
updates. A sample is counted on the device and nobody waits for it; `poll` begins to copy what has gathered to the host
and hands it out once it has arrived. So sketches of a thousand steps take no more memory than those of one.

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

from halfstep.errors import StepError
from halfstep.formats import FORMATS, Format, format_of
from halfstep.lens.records import ActivationRecord, MonitorRecord, ParameterRecord
from halfstep.lens.sketch import ExponentSketch, Sketches
from halfstep.lens.symptoms import NAMES, Symptom, symptoms
from halfstep.policy.resolve import resolved
from halfstep.step.prepare import prepared_policy, store_of, unwrap
from halfstep.step.train_step import TrainStep
from halfstep.trees import tensors
from halfstep.weights.states import LowStates

__all__ = ["Finding", "Monitor"]

RATIO, GOOD, MOVABLE, UNMOVED, STATES = range(5)
"""Columns of what is summed for a parameter: update ratios; samples; elements with a gradient, those of them whose
weight did not change; then, for each of `KEPT` low states, elements that did not change."""

KEPT = 3
LOWS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that is wrong in a run.

    Attributes:
        kind: "underflow", "swallowed_update", "low_state", "saturating" or "bad_state".
        role: "gradient", "weight", "update", "state" or "activation": where the worst of it is.
        step: updates made when it was seen first.
        where: parameters or modules concerned, the worst first.
        text: what was seen in the worst place.
        remedy: what to change.
    """

    kind: str
    role: str
    step: int
    where: tuple[str, ...]
    text: str
    remedy: str

    def __str__(self) -> str:
        """Return two lines."""
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        return f"{self.kind} in {self.where[0]}{more} (step {self.step}): {self.text}\n  remedy: {self.remedy}"


@dataclass
class _Shelf:
    """What gathers on one device."""

    names: list[int]  # numbers of the parameters that live there
    gradients: Sketches
    weights: Sketches
    sums: Tensor
    activations: Sketches


@dataclass
class _Load:
    """A record on its way to the host."""

    step: int
    samples: int
    scale: Tensor | None
    parts: list[tuple[list[int], list[Tensor]]]
    paces: dict[int, tuple[float, float]]  # by parameter: weight decay, learning rate over the largest one
    events: list[Any] = field(default_factory=list)


class Monitor:
    """Samples a long run: sketches of gradients, weights and activations, and what updates did to weights.

    Between samples it costs a count. A sample costs a pass over the gradients, and with `weights` a copy of the weights
    and some passes over them. It changes nothing in training and never waits for the device, but where it is read.

    Attributes:
        every: updates from one sample to the next.
        format: the low format that shares are shares in.

    Args:
        target: a `TrainStep`; or a model, prepared or not, that is trained by a loop of one's own.
        optimizer: the optimizer of that loop, whose steps are counted; not for a `TrainStep`.
        every: sample each so many updates.
        weights: also sketch weights and see what updates do to them.
        activations: also sketch what leaf modules return, by forward hooks that are there for sampled steps only.
        format: the low format; default: that of the policy, or of low parameters.
        scaler: the loop's scaler (halfstep's or torch's), so that unscaled gradients are seen as they were computed.

    Raises:
        StepError: arguments that make no sense together.

    Example:
        >>> monitor = hs.Monitor(step, every=100)
        >>> for x, y in batches:
        ...     step(x, y)
        ...     for record in monitor.poll():
        ...         writer.add(record)
        >>> for finding in monitor.findings():
        ...     print(finding)
    """

    def __init__(
        self,
        target: TrainStep | nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every: int = 100,
        weights: bool = True,
        activations: bool = False,
        format: Format | str | torch.dtype | None = None,
        scaler: Any = None,
    ) -> None:
        _validate(target, optimizer, every, scaler)
        model = target.model if isinstance(target, TrainStep) else target
        self.every = every
        self._root = unwrap(model)
        if activations and _is_compiled(model):
            raise StepError(
                "activations=True watches modules by hooks, and code that torch.compile has made calls none (or is "
                "compiled again for each sample); watch the model before it is compiled, or leave activations out"
            )
        self.format = format_of(format) if format is not None else _low_format(model)
        self._step = target if isinstance(target, TrainStep) else None
        self._optimizer = optimizer if self._step is None else self._step.optimizer
        self._scaler = scaler if self._step is None else self._step.scaler
        self._store = store_of(model)
        self._weights, self._activations = weights, activations
        named = [(n, p) for n, p in self._root.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in named]
        self._parameters = [p for _, p in named]
        self._places = {id(p): n for n, p in enumerate(self._parameters)}
        self._leaves = [(n, m) for n, m in self._root.named_modules() if not any(True for _ in m.children())]
        self._dtypes = [""] * len(self._leaves)
        self._shelves: dict[torch.device, _Shelf] = {}
        self._updates = self._samples = 0
        self._hooks: list[RemovableHandle] = []
        self._before: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._paces: dict[int, tuple[float, float]] = {}
        self._tops: dict[int, float] = {}
        self._sampled_scale: Tensor | None = None
        self._loads: list[_Load] = []
        self._records: list[MonitorRecord] = []
        self._largest: dict[str, float] = {}
        self._found: dict[str, tuple[int, dict[str, Symptom]]] = {}
        self._handles: list[RemovableHandle] = []
        self._attach()
        self._arm()

    # ------------------------------------------------------------------ attaching

    def _attach(self) -> None:
        if self._step is not None:
            self._step.watchers.append(self)
            return
        assert self._optimizer is not None
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Take the monitor off; what it has seen can still be read."""
        if self._step is not None and self in self._step.watchers:
            self._step.watchers.remove(self)
        for handle in (*self._handles, *self._hooks):
            handle.remove()
        self._handles, self._hooks = [], []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_due():
            self.before_update([p for p in self._parameters if p.grad is not None])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = getattr(optimizer, "found_inf", None) if self._is_due() else None
        self.after_update(None if found is None else found.reshape(()) != 0)

    def _is_due(self) -> bool:
        return (self._updates + 1) % self.every == 0

    def _arm(self) -> None:
        """Put hooks on leaf modules if the next update is one to sample, take them off if not."""
        if not self._activations or bool(self._hooks) == self._is_due():
            return
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._is_due():
            self._hooks = [m.register_forward_hook(self._hook(n)) for n, (_, m) in enumerate(self._leaves)]

    def _hook(self, number: int) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._dtypes[number] = _name(tensor.dtype)
                    with torch._C.DisableTorchFunction(), torch.no_grad():
                        self._shelf(tensor.device).activations.add_([tensor], first=number)

        return look

    # ------------------------------------------------------------------ a sample

    @torch.no_grad()
    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients, and copy what the update will change, if this update is one to sample."""
        if not self._is_due():
            return
        self._before, self._paces = {}, {}
        gradients = {self._places[id(p)]: p.grad for p in parameters if id(p) in self._places and p.grad is not None}
        factor = self._factor()
        self._shelves_for(gradients)
        for device, shelf in self._shelves.items():
            given = [gradients.get(n) for n in shelf.names]
            if factor is not None:
                some = [None if g is None else g * factor.to(device) for g in given]
                given = list(some)
            shelf.gradients.add_(torch.empty(0, device=device) if g is None else g for g in given)
        if self._weights:
            self._copy(gradients)

    @torch.no_grad()
    def after_update(self, bad: Tensor | None) -> None:
        """Compare what the update has changed with the copies, if this update was one to sample.

        Args:
            bad: 0-dim bool: the update was not applied; None: it was.
        """
        self._updates += 1
        if self._updates % self.every == 0:
            self._samples += 1
            if self._weights:
                self._compare(bad)
            self._sampled_scale = self._scale()
            self._before = {}
        if self._activations:
            self._arm()

    def _factor(self) -> Tensor | None:
        """Return what gradients must be multiplied by to be as they were computed; None for nothing."""
        if self._step is not None or self._scaler is None or getattr(self._optimizer, "grad_scale", None) is not None:
            return None
        return self._scale()

    def _scale(self) -> Tensor | None:
        if self._step is not None:
            return self._step._scale.clone()
        scale = getattr(self._scaler, "_scale", None)
        if isinstance(scale, Tensor):
            return scale.clone()
        if self._scaler is not None and hasattr(self._scaler, "scale_on"):
            on: Tensor = self._scaler.scale_on(self._parameters[0].device)
            return on.clone()
        return None

    def _shelf(self, device: torch.device) -> _Shelf:
        """Return what gathers on `device`, made at its first use."""
        if device not in self._shelves:
            names = [n for n, p in enumerate(self._parameters) if p.device == device]
            self._shelves[device] = _Shelf(
                names,
                Sketches(len(names), device),
                Sketches(len(names) if self._weights else 0, device),
                torch.zeros(len(names), STATES + KEPT, dtype=torch.float64, device=device),
                Sketches(len(self._leaves) if self._activations else 0, device),
            )
        return self._shelves[device]

    def _shelves_for(self, gradients: dict[int, Tensor]) -> None:
        for gradient in gradients.values():
            self._shelf(gradient.device)

    def _precise(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of the value that the optimizer moves."""
        if self._store is not None and parameter in self._store:
            return self._store.read(parameter)
        return _local(parameter).detach().clone()

    def _copy(self, gradients: dict[int, Tensor]) -> None:
        states = self._low_states()
        for device, shelf in self._shelves.items():
            values = []
            for number in shelf.names:
                if number in gradients:
                    value = self._precise(self._parameters[number])
                    self._before[number] = value, [state.clone() for state in states.get(number, ())]
                    values.append(value)
                else:
                    values.append(torch.empty(0, device=device))
            shelf.weights.add_(values)

    def _low_states(self) -> dict[int, list[Tensor]]:
        """Return optimizer states that are low in the shape of their parameter and that torch rounds to nearest."""
        assert self._optimizer is not None
        if LowStates.of(self._optimizer) is not None:
            return {}
        found = {}
        for parameter, state in self._optimizer.state.items():
            number = self._places.get(id(parameter))
            if number is not None:
                low = [v for v in state.values() if isinstance(v, Tensor) and v.dtype in LOWS]
                found[number] = [_local(v) for v in low if v.shape == parameter.shape][:KEPT]
        return found

    def _compare(self, bad: Tensor | None) -> None:
        states, rates = self._low_states(), self._rates()
        for device, shelf in self._shelves.items():
            zero = torch.zeros((), dtype=torch.float64, device=device)
            none = zero.expand(STATES + KEPT)
            good = zero == 0 if bad is None else ~bad.to(device, non_blocking=True)
            rows = []
            for number in shelf.names:
                before = self._before.get(number)
                rate = rates.get(number, 0.0)
                if before is None or (not isinstance(rate, Tensor) and rate == 0):
                    rows.append(none)
                    continue
                moved = good if not isinstance(rate, Tensor) else good & (rate.to(device, non_blocking=True) != 0)
                row = self._row(number, before, states.get(number, []), zero)
                rows.append(torch.where(moved, row, none))
            shelf.sums.add_(torch.stack(rows) if rows else shelf.sums)

    def _row(self, number: int, before: tuple[Tensor, list[Tensor]], states: list[Tensor], zero: Tensor) -> Tensor:
        parameter = self._parameters[number]
        value, gradient = self._precise(parameter), parameter.grad
        assert gradient is not None
        gradient = _local(gradient.to_dense() if gradient.is_sparse else gradient)
        old, held = before
        change = torch.linalg.vector_norm(value.float() - old.float())
        ratio = change / torch.linalg.vector_norm(old.float()).clamp(min=torch.finfo(torch.float32).tiny)
        active = gradient != 0
        parts = [ratio, zero + 1, active.sum(), (active & (value == old)).sum()]
        parts += [(active & (one == other)).sum() for one, other in zip(states, held, strict=False)]
        parts += [zero] * (STATES + KEPT - len(parts))
        return torch.stack([part.to(torch.float64) for part in parts])

    def _rates(self) -> dict[int, Any]:
        """Return learning rates by parameter, and note what weight decay takes off."""
        assert self._optimizer is not None
        rates: dict[int, Any] = {}
        for group in self._optimizer.param_groups:
            rate, decay = group.get("lr", 1.0), group.get("weight_decay", 0.0)
            for parameter in group["params"]:
                number = self._places.get(id(parameter))
                if number is not None:
                    rates[number] = rate
                    if not isinstance(rate, Tensor) and not isinstance(decay, Tensor):
                        top = self._tops[number] = max(self._tops.get(number, 0.0), rate)
                        self._paces[number] = float(rate * decay), rate / top if top else 0.0
        return rates

    # ------------------------------------------------------------------ reading

    def poll(self) -> list[MonitorRecord]:
        """Return the records that have arrived since the last call, oldest first; never waits.

        A call after a sample sends what has gathered on its way; on a CPU it has arrived at once.
        """
        return self._read(wait=False)

    def flush(self) -> list[MonitorRecord]:
        """Return all there is, also what is still on its way; waits for the device. For the end of a run."""
        return self._read(wait=True)

    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong, each kind once, in the order in which they were seen first; waits for the device.

        Records that `poll` has not handed out yet stay for it.
        """
        self._receive(wait=True)
        made = []
        for kind, (step, places) in self._found.items():
            worst = sorted(places.values(), key=lambda s: (-s.share, s.where))
            first = worst[0]
            made.append(
                Finding(
                    kind=kind,
                    role=first.role,
                    step=step,
                    where=tuple(dict.fromkeys(s.where for s in worst)),
                    text=f"{NAMES[kind]}: {first.text}",
                    remedy=first.remedy,
                )
            )
        return tuple(made)

    def _read(self, *, wait: bool) -> list[MonitorRecord]:
        self._receive(wait=wait)
        records, self._records = self._records, []
        return records

    def _receive(self, *, wait: bool) -> None:
        if self._samples and (wait or not self._loads):
            self._send()
        while self._loads:
            load = self._loads[0]
            for event in load.events:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            self._loads.pop(0)
            record = self._record(load)
            self._records.append(record)
            for symptom in symptoms(record, self.format):
                _, places = self._found.setdefault(symptom.kind, (record.step, {}))
                key = f"{symptom.role} {symptom.where}"
                if key not in places or places[key].share < symptom.share:
                    places[key] = symptom

    def _send(self) -> None:
        load = _Load(self._updates - self._updates % self.every, self._samples, None, [], dict(self._paces))
        for device, shelf in self._shelves.items():
            gathered = [shelf.gradients.rows, shelf.weights.rows, shelf.sums, shelf.activations.rows]
            scale = self._sampled_scale
            if scale is not None and load.scale is None and scale.device == device:
                gathered.append(scale)
            if device.type == "cuda":
                copies = [torch.empty_like(t, device="cpu", pin_memory=True) for t in gathered]
                for copy, tensor in zip(copies, gathered, strict=True):
                    copy.copy_(tensor, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                load.events.append(event)
                gathered = copies
            else:
                gathered = [t.cpu() for t in gathered]
            if len(gathered) == 5:
                load.scale = gathered.pop()
            load.parts.append((shelf.names, gathered))
        self._shelves, self._samples = {}, 0
        self._loads.append(load)

    def _record(self, load: _Load) -> MonitorRecord:
        states = self._low_states()
        parameters: dict[int, ParameterRecord] = {}
        activations: dict[int, ExponentSketch] = {}
        for names, (gradients, weights, sums, outputs) in load.parts:
            for place, number in enumerate(names):
                sketch = ExponentSketch.from_row(gradients[place].tolist())
                if sketch.count:
                    weight = ExponentSketch.from_row(weights[place].tolist()) if self._weights else None
                    totals, pace = sums[place].tolist(), load.paces.get(number, (0.0, 1.0))
                    parameters[number] = self._parameter(number, (sketch, weight), totals, pace, bool(states.get(number)))
            for number, row in enumerate(outputs.tolist()):
                activations.setdefault(number, ExponentSketch()).merge_(ExponentSketch.from_row(row))
        return MonitorRecord(
            step=load.step,
            samples=load.samples,
            scale=1.0 if load.scale is None else float(load.scale),
            parameters=tuple(parameters[n] for n in sorted(parameters)),
            activations=tuple(
                ActivationRecord(
                    module=self._leaves[n][0],
                    kind=type(self._leaves[n][1]).__name__,
                    dtype=self._dtypes[n],
                    sketch=sketch,
                )
                for n, sketch in sorted(activations.items())
                if sketch.count
            ),
        )

    def _parameter(
        self,
        number: int,
        sketches: tuple[ExponentSketch, ExponentSketch | None],
        sums: list[float],
        pace: tuple[float, float],
        low_state: bool,
    ) -> ParameterRecord:
        gradient, weight = sketches
        name, parameter = self._names[number], self._parameters[number]
        store = self._store if self._store is not None and parameter in self._store else None
        stochastic = store is not None and store.name == "stochastic"
        dtype = _name(parameter.dtype)
        before, now = self._largest.get(name, 0.0), gradient.largest
        self._largest[name] = now
        good, movable = sums[GOOD], sums[MOVABLE]
        return ParameterRecord(
            name=name,
            dtype=dtype,
            precise=dtype if store is None or stochastic else "fp32",
            gradient=gradient,
            weight=weight,
            format=self.format,
            update_ratio=sums[RATIO] / good if good else math.nan,
            swallowed=sums[UNMOVED] / movable if movable and not stochastic else math.nan,
            frozen_state=max(sums[STATES:]) / movable if movable and low_state else math.nan,
            decay=pace[0] if good else 0.0,
            pace=pace[1],
            drift=math.log2(now / before) if now and before else math.nan,
            stochastic=stochastic,
        )


# ---------------------------------------------------------------------- what it is given


def _validate(target: object, optimizer: object, every: object, scaler: object) -> None:
    if not isinstance(target, (TrainStep, nn.Module)):
        raise StepError(f"Monitor watches a TrainStep or a model and was given {type(target).__name__}")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise StepError(f"Monitor(every={every!r}): expected a whole number of updates from 1")
    if isinstance(target, TrainStep) and (optimizer is not None or scaler is not None):
        raise StepError("Monitor(step) knows the step's own optimizer and scaler; leave these arguments out")
    if isinstance(target, nn.Module) and not isinstance(optimizer, Optimizer):
        raise StepError(
            "Monitor(model) counts the steps of an optimizer; pass the one that trains the model, "
            f"Monitor(model, optimizer), not {type(optimizer).__name__}"
        )


def _low_format(model: nn.Module) -> Format:
    policy = prepared_policy(model)
    if policy is not None:
        first = next(unwrap(model).parameters(), None)
        return format_of(resolved(policy, "cpu" if first is None else first.device.type).dtype)
    for parameter in unwrap(model).parameters():
        if parameter.dtype in LOWS:
            return format_of(parameter.dtype)
    raise StepError("which low format? The model is not prepared and its parameters are fp32: pass format='fp16'")


def _is_compiled(model: nn.Module) -> bool:
    if unwrap(model) is not model and hasattr(model, "_orig_mod"):
        return True
    return any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in model.modules())


def _local(tensor: Tensor) -> Tensor:
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def _name(dtype: torch.dtype) -> str:
    return next((f.name for f in FORMATS.values() if f.torch_dtype is dtype), str(dtype).removeprefix("torch."))
