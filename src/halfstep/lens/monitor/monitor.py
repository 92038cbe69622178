"""Monitor: samples gradients, weights and activations of every N-th update of a run.

Between samples nothing is attached but one entry in `TrainStep.watchers` (or a step hook of an optimizer), which counts
updates. A sample is counted on the device, without a wait; `poll` begins to copy the counts to the host and returns
them once they have arrived. Sketches of a thousand steps take no more memory than those of one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.accelerators import Landing
from halfstep.arguments import COUNT, FLAG, check
from halfstep.binding.prepare import prepared_policy, store_of
from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError
from halfstep.events import hook_weakly
from halfstep.formats import LOW_DTYPES, Format, format_of
from halfstep.lens.finding import Finding
from halfstep.lens.monitor.records import MonitorRecord
from halfstep.lens.monitor.sampler import Load, Sampler
from halfstep.lens.monitor.symptoms import of_rise, symptoms
from halfstep.lens.rise import EARLY, learning_rate, outlier, rise
from halfstep.policy.resolve import resolved
from halfstep.step.train_step import TrainStep
from halfstep.torch_private.compiler import is_compiled, original_of

MOST_RECORDS = 512
"""Records of which the largest gradient and weight are remembered."""


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
        _validate(target, optimizer, scaler)
        check("Monitor", StepError, every=(every, COUNT), weights=(weights, FLAG), activations=(activations, FLAG))
        model = target.model if isinstance(target, TrainStep) else target
        self.every = every
        whole = unwrap(model) is not model and original_of(model) is not None
        if activations and (whole or any(is_compiled(m) or original_of(m) is not None for m in model.modules())):
            raise StepError(
                "activations=True watches modules by hooks, and code that torch.compile has made calls none (or is "
                "compiled again for each sample); watch the model before it is compiled, or leave activations out"
            )
        self.format = format_of(format) if format is not None else _low_format(model)
        self._step = target if isinstance(target, TrainStep) else None
        trained = optimizer if self._step is None else self._step.optimizer
        assert trained is not None
        self._optimizer = trained
        self._scaler = scaler
        self._sampler = Sampler(
            unwrap(model), trained, store_of(model), self.format, weights=weights, activations=activations
        )
        self._updates = self._samples = 0
        self._scale: Tensor | None = None  # of the last sample
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

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.wants_update():
            self.before_update([p for p in self._sampler.parameters if p.grad is not None])

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
        if not self._sampler.activations or bool(self._hooks) == self.wants_update():
            return
        for handle in self._hooks:
            handle.remove()
        self._hooks = self._sampler.hooks() if self.wants_update() else []

    @torch.no_grad()
    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients, and copy what the update will change, if this update is one to sample."""
        if self.wants_update():
            scale = getattr(self._scaler, "_scale", None)  # torch's
            if self._step is not None:
                scale = self._step.record.scale
            elif hasattr(self._scaler, "scale_on"):
                scale = self._scaler.scale_on(self._sampler.parameters[0].device)
            self._scale = scale.clone() if isinstance(scale, Tensor) else None  # None without scaling
            unscaled = self._step is None and getattr(self._optimizer, "grad_scale", None) is None
            self._sampler.before(parameters, self._scale if unscaled else None)

    @torch.no_grad()
    def after_update(self, bad: Tensor | None) -> None:
        """Compare what the update has changed with the copies, if this was one to sample; `bad`: it was not applied."""
        self._updates += 1
        if self._updates % self.every == 0:
            self._samples += 1
            self._sampler.after(bad)
        self._arm()

    # ------------------------------------------------------------------ reading

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
            record = self._sampler.record(load)
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
        load = Load(self._updates - self._updates % self.every, self._samples, dict(self._sampler.paces))
        taken, self._sampler.shelves = self._sampler.shelves, {}
        for device, shelf in taken.items():
            gathered = [shelf.gradients.rows, shelf.weights.rows, shelf.sums, shelf.outputs.rows]
            if self._scale is not None and self._scale.device == device:
                gathered.append(self._scale)
            landing = Landing()
            landing.take(gathered)
            load.parts.append((shelf.numbers, landing))
        self._samples = 0
        self._loads.append(load)


def _validate(target: object, optimizer: object, scaler: object) -> None:
    if not isinstance(target, (TrainStep, nn.Module)):
        raise StepError(f"Monitor watches a TrainStep or a model and was given {type(target).__name__}")
    if isinstance(target, TrainStep) and (optimizer is not None or scaler is not None):
        raise StepError("Monitor(step) knows the step's own optimizer and scaler; leave these arguments out")
    if isinstance(target, nn.Module):
        if not isinstance(optimizer, Optimizer):
            raise StepError(
                "Monitor(model) counts the steps of an optimizer; pass the one that trains the model, "
                f"Monitor(model, optimizer), not {type(optimizer).__name__}"
            )
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in stepped for p in unwrap(target).parameters()):
            raise StepError(
                f"{type(optimizer).__name__} holds no parameter of {type(unwrap(target)).__name__}, so its steps would "
                "say nothing; pass the optimizer that trains this model"
            )
    if scaler is not None and not hasattr(scaler, "scale_on") and not hasattr(scaler, "_scale"):
        raise StepError(f"scaler must be the loop's GradScaler, halfstep's or torch's, and is {type(scaler).__name__}")


def _low_format(model: nn.Module) -> Format:
    policy, parameters = prepared_policy(model), list(unwrap(model).parameters())
    if policy is not None:
        return format_of(resolved(policy, parameters[0].device.type if parameters else "cpu").dtype)
    for parameter in parameters:
        if parameter.dtype in LOW_DTYPES:
            return format_of(parameter.dtype)
    raise StepError("which low format? The model is not prepared and its parameters are fp32: pass format='fp16'")
