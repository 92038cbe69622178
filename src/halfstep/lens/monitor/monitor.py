"""Monitor: samples gradients, weights and activations of every N-th update of a run.

Between samples nothing is attached but one entry in `TrainStep.watchers` (or a step hook of an optimizer), which counts
updates. A sample is counted on the device, without a wait; `poll` begins to copy the counts to the host and returns
them once they have arrived. Sketches of a thousand steps take no more memory than those of one.

Note [sampled update]: what an update did to a weight is seen by comparing it with a copy made before; that copy, and
those of low optimizer states, live for the sampled update alone (4 bytes a parameter, 2 or 4 a state). Compared is
what the optimizer moves: the fp32 value where halfstep keeps one behind a low weight.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.accelerators import Landing
from halfstep.arguments import COUNT, FLAG, NONE, Kind, check
from halfstep.binding.prepare import prepared_policy, store_of
from halfstep.binding.wrappers import unwrap
from halfstep.cast.state import STATE
from halfstep.errors import StepError
from halfstep.events import hook_weakly
from halfstep.formats import FORMATS, LOW_DTYPES, Format, format_of, widest_dtype
from halfstep.kernels.sharded import local
from halfstep.lens.finding import Finding
from halfstep.lens.monitor.records import ActivationRecord, MonitorRecord, ParameterRecord, of_rise, symptoms
from halfstep.lens.rise import EARLY, learning_rate, outlier, rise
from halfstep.lens.sketch import ExponentSketch, Sketches
from halfstep.optim import members, stepped_by
from halfstep.policy.resolve import resolved
from halfstep.step.train_step import TrainStep
from halfstep.torch_private.compiler import is_compiled, original_of
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import tensors
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


def _parts(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _format_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype's format: that of the parts of a complex one, and "fp32" for what is wider still."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    found = next((f.name for f in FORMATS.values() if f.torch_dtype is dtype), None)
    return "fp32" if found is None and dtype is torch.float64 else found or str(dtype).removeprefix("torch.")


TARGET = Kind("a TrainStep or a model", lambda target: isinstance(target, (TrainStep, nn.Module)))
SCALER = Kind("the loop's GradScaler, halfstep's or torch's", lambda s: hasattr(s, "scale_on") or hasattr(s, "_scale"))
MOST_RECORDS = 512  # records of which the largest gradient and weight are remembered


class Monitor:
    """Samples a long run: sketches of gradients, weights and activations, and what updates did to weights.

    Between samples it costs a count. A sample costs a pass over the gradients, and with `weights` a copy of the weights
    and some passes over them. It changes nothing in training and waits for the device only where it is read.

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

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> monitor = hs.Monitor(step, every=2)
        >>> for x, y in batches:
        ...     result = step(x, y)
        ...     for record in monitor.poll():
        ...         print("sampled at step", record.step)
        sampled at step 2
        >>> monitor.findings()
        ()
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
        check("Monitor", StepError, target=(target, TARGET), every=(every, COUNT), weights=(weights, FLAG))
        check("Monitor", StepError, activations=(activations, FLAG), scaler=(scaler, SCALER | NONE))
        self._step = target if isinstance(target, TrainStep) else None
        model = target.model if isinstance(target, TrainStep) else target
        self._optimizer = _trained_by(optimizer, model) if self._step is None else self._step.optimizer
        if self._step is not None and (optimizer is not None or scaler is not None):
            raise StepError("Monitor(step) knows the step's own optimizer and scaler; leave these arguments out")
        whole = unwrap(model) is not model and original_of(model) is not None
        if activations and (whole or any(is_compiled(m) or original_of(m) is not None for m in model.modules())):
            raise StepError(
                "activations=True watches modules by hooks, and code that torch.compile has made calls none (or is "
                "compiled again for each sample); watch the model before it is compiled, or leave activations out"
            )
        self.every = every
        self.format = format_of(format) if format is not None else _low_format(model)
        self._store, self._scaler, self._weights = store_of(model), scaler, weights
        named = {n: p for n, p in unwrap(model).named_parameters() if p.requires_grad}
        self._names, self._parameters = [*named], [*named.values()]
        self._places = {id(p): n for n, p in enumerate(self._parameters)}
        modules = unwrap(model).named_modules() if activations else ()
        self._leaves = [(n, m) for n, m in modules if not any(True for _ in m.children())]
        self._dtypes = [""] * len(self._leaves)  # formats of their last outputs
        self._updates = self._samples = 0
        self._scale: Tensor | None = None  # of the last sample
        self._shelves: dict[torch.device, Shelf] = {}
        # By parameter: its value and low states before the sampled update; what the last sample's weight decay takes
        # off relatively, and its learning rate over the largest so far, which is kept too.
        self._before: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._paces: dict[int, tuple[float, float]] = {}
        self._tops: dict[int, float] = {}
        self._largest: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self._loads: list[Load] = []
        self._records: list[MonitorRecord] = []
        self._course: deque[tuple[int, float, float, int]] = deque(maxlen=MOST_RECORDS)
        self._found: dict[str, tuple[int, dict[str, Finding]]] = {}
        self._handles: list[RemovableHandle] = []
        self._hooks: list[RemovableHandle] = []
        if self._step is not None:
            self._step.watchers.append(self)
        else:
            before = hook_weakly(self._optimizer.register_step_pre_hook, self._before_step)
            self._handles = [before, hook_weakly(self._optimizer.register_step_post_hook, self._after_step)]
        self._arm()

    def close(self) -> None:
        """Take the monitor off; what it has seen can still be read."""
        if self._step is not None and self in self._step.watchers:
            self._step.watchers.remove(self)
        for handle in (*self._handles, *self._hooks):
            handle.remove()
        self._handles, self._hooks = [], []

    # ------------------------------------------------------------------ moments of a run

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.wants_update():
            self.before_update([p for p in self._parameters if p.grad is not None])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = getattr(optimizer, "found_inf", None) if self.wants_update() else None
        self.after_update(None if found is None else found.reshape(()) != 0)

    def wants_update(self) -> bool:
        """Return whether the next update is one to sample."""
        return (self._updates + 1) % self.every == 0

    def pass_update(self) -> None:
        """Count an update that ran where Python sees nothing: a replay of a CUDA graph."""
        self._updates += 1
        self._arm()

    def _arm(self) -> None:
        """Hook every leaf module for the steps of a sampled update, so that what it returns is counted."""
        if not self._leaves or bool(self._hooks) == self.wants_update():
            return
        for handle in self._hooks:
            handle.remove()
        leaves = enumerate(self._leaves) if self.wants_update() else ()
        self._hooks = [m.register_forward_hook(self._hook(n)) for n, (_, m) in leaves]

    def _hook(self, number: int) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or STATE.above is not None:  # a replay of the black box is not sampled
                return
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._dtypes[number] = _format_name(tensor.dtype)
                    with DisableTorchFunction(), torch.no_grad():  # without the region's rules
                        self._shelf(tensor.device).outputs.add_([tensor], first=number)

        return look

    @torch.no_grad()
    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients, and copy what the update will change, if this update is one to sample."""
        if not self.wants_update():
            return
        scale = getattr(self._scaler, "_scale", None)  # torch's
        if self._step is not None:
            scale = self._step.record.scale
        elif hasattr(self._scaler, "scale_on"):
            scale = self._scaler.scale_on(self._parameters[0].device)
        self._scale = scale.clone() if isinstance(scale, Tensor) else None  # None without scaling
        unscaled = self._step is None and getattr(self._optimizer, "grad_scale", None) is None
        factor = self._scale if unscaled else None
        gradients = {self._places[id(p)]: p.grad for p in parameters if id(p) in self._places and p.grad is not None}
        for number in gradients:
            self._shelf(self._parameters[number].device)
        self._before = {}
        states = self._low_states() if self._weights else {}
        for device, shelf in self._shelves.items():
            given = [gradients.get(number) for number in shelf.numbers]
            none = torch.empty(0, device=device)
            by = None if factor is None else factor.to(device, non_blocking=True)
            shelf.gradients.add_(none if g is None else g if by is None else g * by for g in given)
            if self._weights:
                for number in gradients.keys() & set(shelf.numbers):
                    value = self._precise(self._parameters[number])
                    self._before[number] = value, [state.clone() for state in states.get(number, ())]
                shelf.weights.add_(self._before.get(number, (none,))[0] for number in shelf.numbers)

    @torch.no_grad()
    def after_update(self, bad: Tensor | None) -> None:
        """Compare what the update has changed with the copies, if this was one to sample; `bad`: it was not applied."""
        self._updates += 1
        if self._updates % self.every == 0:
            self._samples += 1
            if self._weights:
                self._compare(bad)
        self._arm()

    # ------------------------------------------------------------------ on the device

    def _shelf(self, device: torch.device) -> Shelf:
        if device not in self._shelves:
            numbers = [n for n, p in enumerate(self._parameters) if p.device == device]
            self._shelves[device] = Shelf(
                numbers,
                Sketches(len(numbers), device),
                Sketches(len(numbers) if self._weights else 0, device),
                torch.zeros(len(numbers), STATES + KEPT, dtype=widest_dtype(device), device=device),
                Sketches(len(self._leaves), device),
            )
        return self._shelves[device]

    def _compare(self, bad: Tensor | None) -> None:
        """Compare with the copies, if the update was applied (not `bad`) and its learning rate is not 0."""
        states, rates = self._low_states(), self._rates()
        for device, shelf in self._shelves.items():
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
        value, gradient = self._precise(self._parameters[number]), self._parameters[number].grad
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

    def _low_states(self) -> dict[int, list[Tensor]]:
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
        rates: dict[int, Any] = {}
        self._paces = {}
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

    def _record(self, load: Load) -> MonitorRecord:
        """Return the record of `load`, whose tensors have arrived."""
        states = self._low_states()
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
                (path, leaf), dtype = self._leaves[number], self._dtypes[number]
                activations.append(ActivationRecord(module=path, kind=type(leaf).__name__, dtype=dtype, sketch=sketch))
        return MonitorRecord(
            step=load.step, samples=load.samples, scale=scale,
            parameters=tuple(parameters[n] for n in sorted(parameters)), activations=tuple(activations),
        )  # fmt: skip

    def _parameter(
        self, load: Load, number: int, gradient: ExponentSketch, weight: ExponentSketch | None, sums: list[float]
    ) -> ParameterRecord:
        name, parameter = self._names[number], self._parameters[number]
        store = self._store if self._store is not None and parameter in self._store else None
        stochastic = store is not None and store.name == "stochastic"
        dtype = _format_name(parameter.dtype)
        before, now = self._largest.get(name, 0.0), gradient.largest
        self._largest[name] = now
        good, movable = sums[GOOD], sums[MOVABLE]
        applied = int(good) if self._weights else load.samples
        self._silent[name] = self._silent.get(name, 0) + applied if gradient.zeros == gradient.count else 0
        decay, pace = load.paces.get(number, (0.0, 1.0))
        return ParameterRecord(
            name=name,
            dtype=dtype,
            precise=dtype if store is None or stochastic else "fp32",
            gradient=gradient,
            weight=weight,
            format=self.format,
            update_ratio=sums[RATIO] / good if good else math.nan,
            swallowed=sums[UNMOVED] / movable if movable and not stochastic else math.nan,
            frozen_state=max(sums[STATES:]) / movable if movable else math.nan,
            decay=decay if good else 0.0,
            pace=pace,
            drift=math.log2(now / before) if now and before else math.nan,
            stochastic=stochastic,
            silent=self._silent[name],
        )

    # ------------------------------------------------------------------ on the host

    def poll(self) -> list[MonitorRecord]:
        """Return the records that have arrived since the last call, oldest first; never waits.

        A call after a sample begins to copy the counts to the host; on a CPU they have arrived at once.
        """
        self._receive(wait=False)
        records, self._records = self._records, []
        return records

    def flush(self) -> list[MonitorRecord]:
        """Return all records, also those still being copied; waits for the device. For the end of a run."""
        self._receive(wait=True)
        return self.poll()

    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong, each kind once, in the order in which they were seen first; waits for the device.

        Of a `TrainStep` this looks at the losses of its last updates too: training that runs away is found before its
        loss is not finite.

        Records that `poll` has not handed out yet stay for it.
        """
        self._receive(wait=True)
        if self._step is not None:
            signals = self._step.record.signals
            history = signals.read()
            risen = rise(history.updates(), partial(signals.growth, unwrap(self._step.model)), EARLY)
            if risen is not None:
                batch = outlier(history.inputs, risen, risen.last + 1)
                self._add(of_rise(risen, batch, learning_rate(self._optimizer)), self._updates)
        made = []
        for step, places in self._found.values():
            worst = sorted(places.values(), key=lambda f: (-f.severity, f.place))
            _, *also = dict.fromkeys(f.place for f in worst)
            made.append(replace(worst[0], step=step, also=tuple(also)))
        return tuple(made)

    def _receive(self, *, wait: bool) -> None:
        if self._samples and (wait or not self._loads):
            self._send()
        while self._loads:
            load = self._loads[0]
            if not wait and not all(landing.there() for _, landing in load.parts):
                return
            self._loads.pop(0)
            record = self._record(load)
            self._records.append(record)
            for finding in symptoms(record, self.format):
                self._add(finding, record.step)
            self._see_course(record)

    def _add(self, finding: Finding, step: int) -> None:
        _, places = self._found.setdefault(finding.kind, (step, {}))
        key = f"{finding.role} {finding.place}"
        if key not in places or places[key].severity < finding.severity:
            places[key] = finding

    def _see_course(self, record: MonitorRecord) -> None:
        """Find out from the records whether training runs away; a loop of one's own shows no losses."""
        if any(p.nonfinite for p in record.parameters) or not record.parameters:
            return
        weights = [p.weight.largest for p in record.parameters if p.weight is not None]
        largest = max(p.amax for p in record.parameters) / record.scale
        self._course.append((record.step, largest, max(weights, default=math.nan), len(weights)))

        def growth(step: int) -> tuple[int, float, float] | None:
            before = [seen for seen in self._course if seen[0] <= step][-1]
            return (before[0], before[2], self._course[-1][2]) if before[3] == len(weights) else None

        found = rise([(step, math.nan, gradient) for step, gradient, *_ in self._course], growth, EARLY)
        if found is not None:
            self._add(of_rise(found, "", learning_rate(self._optimizer)), record.step)

    def _send(self) -> None:
        load = Load(self._updates - self._updates % self.every, self._samples, dict(self._paces))
        taken, self._shelves = self._shelves, {}
        for device, shelf in taken.items():
            gathered = [shelf.gradients.rows, shelf.weights.rows, shelf.sums, shelf.outputs.rows]
            if self._scale is not None and self._scale.device == device:
                gathered.append(self._scale)
            landing = Landing()
            landing.take(gathered)
            load.parts.append((shelf.numbers, landing))
        self._samples = 0
        self._loads.append(load)


def _trained_by(optimizer: object, model: nn.Module) -> Optimizer:
    """Return the optimizer of a loop; StepError if it is none, or trains another model."""
    if not isinstance(optimizer, Optimizer):
        raise StepError(
            "Monitor(model) counts the steps of an optimizer; pass the one that trains the model, "
            f"Monitor(model, optimizer), not {type(optimizer).__name__}"
        )
    stepped = {id(p) for p in stepped_by(optimizer)}
    if not any(id(p) in stepped for p in unwrap(model).parameters()):
        raise StepError(
            f"{type(optimizer).__name__} holds no parameter of {type(unwrap(model)).__name__}, so its steps would "
            "say nothing; pass the optimizer that trains this model"
        )
    return optimizer


def _low_format(model: nn.Module) -> Format:
    policy, parameters = prepared_policy(model), list(unwrap(model).parameters())
    if policy is not None:
        return format_of(resolved(policy, parameters[0].device.type if parameters else "cpu").dtype)
    for parameter in parameters:
        if parameter.dtype in LOW_DTYPES:
            return format_of(parameter.dtype)
    raise StepError("which low format? The model is not prepared and its parameters are fp32: pass format='fp16'")
