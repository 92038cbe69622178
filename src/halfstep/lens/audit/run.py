"""Run: the steps of one audit: an fp32 twin, the audited step with its instruments, and the update that was meant.

Of a window of micro-batches the first is measured operator by operator; of the others only the gradients they add.
Shadows run backward in the last step alone, because they take half of the time of an audit.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from halfstep.cast.regions.autocast import suspended
from halfstep.errors import AuditError
from halfstep.events import HostStepResult
from halfstep.formats import DTYPES, FP32, LOW_DTYPES, float64_of, format_of
from halfstep.lens.audit.record import AuditRecorder
from halfstep.lens.audit.reference import BELOW_FP32, Reference
from halfstep.lens.audit.rows import Tally, form_of, row_of
from halfstep.lens.audit.table import Audit
from halfstep.lens.audit.updates import AuditedStep, Meter, swallow
from halfstep.lens.calls import copied
from halfstep.lens.tracing import OperatorCall, Tracer
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.snapshot import Snapshot, generators_of, noted
from halfstep.trees import map_tensors

__all__ = ["Batch", "Run"]

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and named arguments of one micro-batch."""

SAME = 1e-3
"""Relative difference of losses that order of summation alone does not make in fp32."""

ATTEMPTS = 40
"""Steps that may be skipped until a dynamic loss scale fits: from its ceiling to its floor are 38."""


class Run:
    """One audit while it runs."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_fn: Callable[..., Any],
        policy: Policy,
        plan: Plan,
        *,
        clip_norm: float | None,
        accumulate: int,
        scaler: GradScaler | None,
        shadow: torch.dtype,
        reference: bool,
    ) -> None:
        self.loss_fn, self.plan, self.policy = loss_fn, plan, policy
        self.notes: list[str] = []
        self.skipped = 0
        self.unfinished: list[str] = []  # steps that were not finite for another reason than a falling scale
        self.bad_in_fp32 = 0  # of these, those that are not finite in fp32 either
        self.operators = dict(plan.operators)
        closed = frozenset(self.operators)
        self.fp32 = _widened(copy.deepcopy(model)) if reference else None
        simulated = {}
        if plan.policy.dtype not in DTYPES:
            form = format_of(plan.policy.dtype)
            simulated = {op: form for op, decision in plan.operators if decision.rule == "low"}
        moves = optimizer is not None
        if optimizer is None:
            trained = [p for p in model.parameters() if p.requires_grad]
            if not trained:
                raise AuditError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to audit")
            optimizer = SGD(trained, lr=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "policy .* on ")  # it is among the plan's notes
            self.train = AuditedStep(
                model,
                optimizer,
                self._watched,
                policy=policy,
                clip_norm=clip_norm,
                accumulate=accumulate,
                scaler=scaler,
                blackbox=False,
            )
        self.train.listener = self
        self.looks = True  # at this micro-batch
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.recorder = AuditRecorder(
            closed,
            shadow=shadow,
            parameters=self.names,
            simulated=simulated,
            devices=tuple(dict.fromkeys((plan.device, "cpu"))),
        )
        self.meter = Meter(self.train, self.recorder, self.names, moves=moves)
        self.tracer = Tracer(self.recorder, model)
        self.twin = Reference(closed) if self.fp32 is not None else None
        self.scale = 1.0
        self._twin_loss = 0.0
        self._twice = False  # whether the twin has run the same batch twice

    def _watched(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.looks:
            return self.loss_fn(model, *args, **kwargs)
        with self.tracer:
            return self.loss_fn(model, *args, **kwargs)

    def step(self, window: list[Batch], *, last: bool) -> None:
        """Run one window of micro-batches; again while a dynamic loss scale is falling.

        Args:
            window: at least one.
            last: whether it is the last one, in which shadows go backward.
        """
        for attempt in range(ATTEMPTS):
            before = self.recorder.tallies
            self.recorder.tallies = copy.deepcopy(before) if self.train.scaler.is_enabled() else before
            result = self._window(window, last=last)
            self.scale = result.scale
            if not result.skipped and math.isfinite(result.loss):
                return
            if not self._falling(result.loss) or attempt == ATTEMPTS - 1:
                self.unfinished.append(
                    f"loss {result.loss:g}, loss scale {result.scale:g}, gradients of "
                    f"{', '.join(result.culprits[:3]) or 'no parameter'}"
                )
                self.bad_in_fp32 += self._twin_is_bad()
                return
            self.skipped += 1
            self.recorder.tallies = before

    def _window(self, window: list[Batch], *, last: bool) -> HostStepResult:
        """Run the micro-batches of a window, and the update."""
        self.meter.begin()
        args, kwargs = window[0]
        with Snapshot(noted()).returning():
            self._run_twin(args, kwargs)
        kept, integers = ({}, {}) if self.twin is None else (self.twin.kept, self.twin.integers)
        self.recorder.start(kept, integers, backward=last)
        self.looks = True
        low = self._low_averages()
        result = self.train(*args, **kwargs)
        self._compare_averages(low)
        self.looks = False
        for args, kwargs in window[1:]:
            result = self.train(*args, **kwargs)
        if len(window) < self.train.accumulate:
            loss, result = result.loss, self.train.flush() or result
            return replace(result.host(), loss=float(loss))
        return result.host()

    def _twin_is_bad(self) -> bool:
        """Return whether the first micro-batch is not finite in fp32 either."""
        if self.twin is None or self.fp32 is None:
            return False
        gradients = self.twin.weights.values()
        return not math.isfinite(self._twin_loss) or not all(bool(g.isfinite().all()) for g in gradients)

    def _falling(self, loss: float) -> bool:
        scaler = self.train.scaler
        return scaler.is_enabled() and math.isfinite(loss) and scaler.get_scale() < self.scale

    # ------------------------------------------------------------------ the fp32 twin

    def _run_twin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.fp32 is None or self.twin is None:
            return
        before = self._first_loss(args, kwargs)
        self._follow()
        self.twin.begin()
        self.twin.kept, self.twin.integers, self.twin.weights = {}, {}, {}
        args, kwargs = map_tensors((args, kwargs), lambda t: t.clone())
        try:
            with suspended():
                with Tracer(self.twin, self.fp32):
                    loss = _loss_of(self.loss_fn(self.fp32, *args, **kwargs))
                now = self._twin_loss = float(loss.detach())
                if before is not None and abs(now - before) > SAME * abs(before):
                    self.fp32, self.twin.kept = None, {}
                    self.notes.append(
                        f"no accumulated errors: the same batch and random numbers gave the losses {before:.6g} and "
                        f"{now:.6g} in fp32; what differs from call to call (a counter, a generator that no module "
                        "holds) would pass for an error"
                    )
                    return
                loss.backward()
        except Exception as error:  # of the user's model, which may insist on a low format
            self.fp32 = None
            self.twin.kept = {}
            first = (str(error).splitlines() or [""])[0]
            self.notes.append(f"no accumulated errors: the model does not run in fp32: {type(error).__name__}: {first}")
            return
        for name, parameter in self.fp32.named_parameters():
            if parameter.grad is not None:
                self.twin.weights[name] = parameter.grad
                parameter.grad = None

    def _first_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """Return the loss of the fp32 twin, once: the loss that a second run is compared with."""
        if self._twice:
            return None
        self._twice = True
        self._follow()
        args, kwargs = map_tensors((args, kwargs), lambda t: t.clone())
        try:
            with Snapshot(noted()).returning(), suspended(), torch.no_grad():
                loss = float(_loss_of(self.loss_fn(self.fp32, *args, **kwargs)))
        except Exception:  # the following run reports it
            return None
        return loss if math.isfinite(loss) else None

    @torch.no_grad()
    def _follow(self) -> None:
        """Give the twin the audited model's precise weights, its buffers and the states of its generators."""
        assert self.fp32 is not None
        own_generators = generators_of(self.train.model.modules())
        for twin, generator in zip(generators_of(self.fp32.modules()), own_generators, strict=True):
            twin.set_state(generator.get_state())
        own = dict(self.train.model.named_parameters())
        for name, parameter in self.fp32.named_parameters():
            parameter.copy_(self.train.precise(own[name]))
        buffers = dict(self.train.model.named_buffers())
        for name, buffer in self.fp32.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])

    def _averages(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what a forward pass may average in: buffers, and parameters that no gradient trains (a teacher's)."""
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        return {**dict(model.named_buffers()), **frozen}

    def _low_averages(self) -> dict[str, Tensor]:
        """Return copies of those of them that are low."""
        found = self._averages(self.train.model).items()
        return {name: copied(value) for name, value in found if value.dtype in BELOW_FP32}

    def _compare_averages(self, before: dict[str, Tensor]) -> None:
        """Compare running averages in low formats with those of the fp32 twin, which has made the same step."""
        after = self._averages(self.fp32) if self.fp32 is not None else {}
        found = self._averages(self.train.model) if before else {}
        for name, old in before.items():
            wanted = after.get(name)
            if wanted is None or wanted.shape != old.shape or torch.equal(wanted, old.to(wanted.dtype)):
                continue
            module = name.rpartition(".")[0]
            tally = self.recorder.tally(OperatorCall(module, "buffer", 0, ""), "state", name)
            momentum = getattr(self.train.model.get_submodule(module), "momentum", None)
            tally.pace = momentum if isinstance(momentum, float) else 0.0
            swallow(tally, float64_of(old), float64_of(wanted), found[name], form_of(old))
            tally.whole.add(found[name], wanted, form_of(old))

    # ------------------------------------------------------------------ what a step calls

    def backward_begins(self) -> None:
        """Start the clock of the backward pass."""
        self.recorder.backward_begins()

    def backward_ended(self, scale: float) -> None:
        """Measure gradients, which carry the factor `scale`, and weights."""
        named = dict(self.train.model.named_parameters())
        self.recorder.backward_ends(scale, named, self.twin.weights if self.twin is not None else {})
        for name, parameter in named.items():
            if parameter.is_floating_point() and parameter.numel():
                self._weigh(name, parameter)

    @torch.no_grad()
    def _weigh(self, name: str, parameter: nn.Parameter) -> None:
        """Measure a weight as it is stored, and what is lost when its operator uses it."""
        tally = self.recorder.tally_of(name, "weight")
        tally.see(parameter.detach())
        used = self.recorder.forms.get(name, tally.form)
        form = min(used, tally.form, key=lambda form: form.bits)
        if form is FP32:
            tally.local.exact(parameter.numel())
        else:
            precise = self.train.precise(parameter)
            low = precise.to(form.torch_dtype) if form.torch_dtype is not None else form.round(precise)
            tally.local.add(low, precise, form)
            if form.is_narrow:
                tally.wide = tally.wide or tally.sketch

    # ------------------------------------------------------------------ what comes out

    def result(self, *, steps: int) -> Audit:
        """Return the audit of `steps` steps."""
        seconds = sum(tally.seconds for tally in self.recorder.tallies.values())
        rows = tuple(
            row_of(tally, steps, seconds, *self._why(tally))
            for tally in self.recorder.tallies.values()
            if tally.sketch is not None
        )
        if self.unfinished:
            self.notes.append(
                f"{len(self.unfinished)} of {steps} steps were not finite, the first with {self.unfinished[0]}: rows "
                "show where; hs.TrainStep(...).explain() says why"
            )
        if self.recorder.shadows.skipped:
            self.notes.append(
                f"{self.recorder.shadows.skipped} calls have no local error: their operator does not take "
                f"{str(self.recorder.shadows.dtype).removeprefix('torch.')} arguments"
            )
        return Audit(
            rows=rows,
            policy=self.policy,
            plan=self.plan,
            steps=steps,
            skipped=self.skipped,
            bad=len(self.unfinished),
            bad_in_fp32=self.bad_in_fp32,
            scale=self.scale,
            notes=(*self.plan.notes, *dict.fromkeys((*self.notes, *self.meter.notes))),
        )

    def _why(self, tally: Tally) -> tuple[str, str]:
        if tally.role in {"update", "state"}:
            return "", "stochastic rounding" if tally.stochastic else ""
        modules = {module.path: module for module in self.plan.modules}
        ruled = modules.get(tally.module)
        if ruled is not None and ruled.rule:
            return ruled.rule, ruled.reason
        if tally.role == "weight":
            reasons = {name: p.reason for p in self.plan.parameters for name in (p.name, *p.aliases)}
            return "", reasons.get(tally.parameter, "")
        decision = self.operators.get(tally.op)
        if decision is None:
            return "", "no rule: runs in its inputs' format"
        by = f"table {self.policy.table!r}" if decision.origin == "table" else f"field {decision.origin!r}"
        return decision.rule, f"{by}: {decision.reason}"


def _loss_of(returned: Any) -> Tensor:
    loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return loss


def _widened(model: nn.Module) -> nn.Module:
    """Bring low parameters and buffers of `model` to fp32, in place."""
    for parameter in model.parameters():
        if parameter.dtype in LOW_DTYPES:
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in LOW_DTYPES:
                module._buffers[name] = buffer.float()
    return model
