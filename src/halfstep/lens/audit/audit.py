"""Audit: a few training steps under a policy, measured operator by operator.

The caller's model and optimizer are copied and not changed; random number generators are restored. Each batch runs
twice on the copy's weights: in fp32, and under the policy. `record` describes what is compared with what.

Of a window of micro-batches the first is measured operator by operator; of the others only the gradients they add.
Shadows run backward in the last step alone, because they take half of the time of an audit.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from halfstep.arguments import COUNT, FLAG, MODEL, NONE, OPTIMIZER, Kind, check, one_of
from halfstep.binding.bind import is_bound
from halfstep.binding.prepare import prepared_policy, unprepare
from halfstep.binding.wrappers import unwrap, unwrap_optimizer
from halfstep.cast.regions.autocast import suspended
from halfstep.errors import AuditError, first_line, lacks_memory
from halfstep.events import HostStepResult
from halfstep.formats import DTYPES, FP32, LOW_DTYPES, float64_of, format_of
from halfstep.lens.audit.record import AuditRecorder, Reference
from halfstep.lens.audit.rows import Tally, form_of
from halfstep.lens.audit.table import Audit
from halfstep.lens.audit.updates import Meter, precise_of, swallow
from halfstep.lens.calls import BELOW_FP32, Batch, copied, taken_from
from halfstep.lens.tracing import Tracer
from halfstep.optim import copy_of, stepped_by
from halfstep.policy.plan import resolve
from halfstep.policy.policy import Policy
from halfstep.report import listed
from halfstep.scale.scaler import GradScaler
from halfstep.snapshot import Snapshot, generators_of, noted
from halfstep.step.arguments import LOSS, norm_limit
from halfstep.step.train_step import TrainStep
from halfstep.trees import map_tensors, tensors
from halfstep.update.updater import ClipNorm

META = torch.device("meta")
SHADOWS = {"fp32": torch.float32, "fp64": torch.float64}
SCALER = Kind("a GradScaler", lambda scaler: callable(getattr(scaler, "get_scale", None)))

SAME = 1e-3  # relative difference of losses that order of summation alone does not make in fp32

LAZY = "parameters that are created by the first batch were created in the copy: the model's own will differ"

ATTEMPTS = 40  # steps that may be skipped until a dynamic loss scale fits: from its ceiling to its floor are 38


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[..., Any],
    policy: Policy | str | Path | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
    *,
    steps: int = 3,
    clip_norm: ClipNorm = None,
    accumulate: int = 1,
    scaler: GradScaler | None = None,
    shadow: str = "fp32",
    reference: bool = True,
) -> Audit:
    """Run a few training steps under `policy` and return what precision did to every operator, weight and gradient.

    Works on a copy of model and optimizer: neither is changed, and random number generators are restored. Under dropout
    the fp32 run and every shadow draw the same random numbers. Memory: the copy, an fp32 twin of it, and the results of
    all operators of one step in fp32.

    Args:
        model: prepared or not; inside DistributedDataParallel or torch.compile the plain module is audited.
        batches: an iterable of batches as `TrainStep` takes them: a tuple or list of arguments, a dict of named ones,
            or one tensor. The first ``steps * accumulate`` of them are used.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``.
        policy: preset name, TOML path or Policy; default: what the model was prepared with, else "mixed".
        optimizer: as in `TrainStep`, with the state it has; then rows of updates and states are made and the weights
            move from step to step. Without it all steps see the weights as they are.
        steps: how many.
        clip_norm: as in `TrainStep`.
        accumulate: micro-batches per update, as in `TrainStep`. The first one of a step is measured operator by
            operator; of the others only the sum of their gradients.
        scaler: the GradScaler of the run, for its scale as it is now; it is copied. Default: a new one of the policy;
            then steps are repeated until its scale fits, as at the beginning of any run.
        shadow: "fp32" or "fp64": the format of the shadows that local errors are measured against.
        reference: whether the model also runs in fp32 as a whole, which gives accumulated errors.

    Returns:
        An `Audit`: rows, findings, what_if, records, and a printed form.

    Raises:
        AuditError: arguments that make no sense, or a model that cannot be copied.
        StepError, PolicyError, BindError: as `TrainStep`.

    Examples:
        >>> found = hs.audit(model, batches, loss_fn, hs.Policy.of("mixed", dtype="fp16"), optimizer, steps=1)
        >>> found.findings()
        ()
    """
    stepped = unwrap_optimizer(optimizer)
    check(
        "hs.audit",
        AuditError,
        model=(model, MODEL),
        loss_fn=(loss_fn, LOSS),
        optimizer=(stepped, OPTIMIZER | NONE),
        steps=(steps, COUNT),
        accumulate=(accumulate, COUNT),
        scaler=(scaler, SCALER | NONE),
        shadow=(shadow, one_of(*SHADOWS)),
        reference=(reference, FLAG),
    )
    norm_limit(clip_norm, stepped)
    with Snapshot(noted(generators_of(model.modules()))).returning():  # a loader may draw its order
        taken = _checked(model, batches, loss_fn, steps, accumulate)
        windows = [taken[i : i + accumulate] for i in range(0, len(taken), accumulate)]
        twin, stepper = _copies(unwrap(model), stepped)
        wanted = Policy.of(policy if policy is not None else prepared_policy(model) or "mixed")
        if is_bound(twin):
            unprepare(twin)
        lazy = any(is_lazy(p) for p in twin.parameters())
        if lazy:  # gives parameters their values
            with torch.no_grad(), suspended():
                loss_fn(twin, *taken[0][0], **taken[0][1])
        settings = {"clip_norm": clip_norm, "accumulate": accumulate, "scaler": copy.deepcopy(scaler)}
        run = Run(twin, stepper, loss_fn, wanted, settings, shadow=SHADOWS[shadow], reference=reference)
        if lazy:
            run.notes.append(LAZY)
        for number, window in enumerate(windows, 1):
            run.step(window, last=number == len(windows))
        return run.result(steps=len(windows))


class AuditedStep(TrainStep):
    """A training step that reports the begin and end of backward passes to an audit while that looks."""

    audit: Run

    def run_backward(self, loss: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
        """Run the backward pass as a TrainStep does."""
        if not self.audit.looks:
            return super().run_backward(loss, keep=keep)
        self.audit.recorder.backward_begins()
        scale, seed = super().run_backward(loss, keep=keep)
        self.audit.backward_ended(float(scale) / self.accumulate)
        return scale, seed


class Run:
    """One audit while it runs; `settings` are those of its `TrainStep`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, loss_fn: Callable[..., Any], policy: Policy,
        settings: Mapping[str, Any], *, shadow: torch.dtype, reference: bool,
    ) -> None:  # fmt: skip
        self.loss_fn, self.policy = loss_fn, policy
        self.plan = plan = resolve(policy, model)
        self.notes: list[str] = []
        self.skipped = 0
        self.unfinished: list[str] = []  # steps that were not finite for another reason than a falling scale
        self.bad_in_fp32 = 0  # of these, those that are not finite in fp32 either
        self.operators = dict(plan.operators)
        closed = frozenset(self.operators)
        self.twin = Reference(closed, _widened(copy.deepcopy(model))) if reference else None
        simulated = {}
        if plan.policy.dtype not in DTYPES:
            form = format_of(plan.policy.dtype)
            simulated = {op: form.carrier for op, decision in plan.operators if decision.rule == "low"}
        moves = optimizer is not None
        if optimizer is None:
            trained = [p for p in model.parameters() if p.requires_grad]
            if not trained:
                raise AuditError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to audit")
            optimizer = SGD(trained, lr=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "policy .* on ")  # it is among the plan's notes
            self.train = AuditedStep(model, optimizer, self._watched, policy=policy, blackbox=False, **settings)
        self.train.audit = self
        self.looks = True  # at this micro-batch
        self.recorder = AuditRecorder(
            closed, shadow=shadow, parameters={id(p): name for name, p in model.named_parameters()}, simulated=simulated
        )
        self.meter = Meter(self.train, self.recorder, moves=moves)
        self.tracer = Tracer(self.recorder, model)
        self.scale = 1.0
        self._twice = False  # whether the twin has run the same batch twice

    def _watched(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.tracer if self.looks else nullcontext():
            return self.loss_fn(model, *args, **kwargs)

    def step(self, window: list[Batch], *, last: bool) -> None:
        """Run one window of micro-batches; again while a dynamic loss scale is falling."""
        for attempt in range(ATTEMPTS):
            before = self.recorder.tallies
            self.recorder.tallies = copy.deepcopy(before) if self.train.scaler.is_enabled() else before
            result = self._window(window, last=last)
            self.scale = result.scale
            if not result.skipped and math.isfinite(result.loss):
                return
            scaler = self.train.scaler
            falling = scaler.is_enabled() and math.isfinite(result.loss) and scaler.get_scale() < self.scale
            if not falling or attempt == ATTEMPTS - 1:
                self.unfinished.append(
                    f"loss {result.loss:g}, loss scale {result.scale:g}, gradients of "
                    f"{', '.join(result.culprits[:3]) or 'no parameter'}"
                )
                if self.twin is not None:
                    first = torch.tensor(self.twin.loss, device="cpu"), *self.twin.weights.values()
                    self.bad_in_fp32 += not all(bool(t.isfinite().all()) for t in first)
                return
            self.skipped += 1
            self.recorder.tallies = before

    def _window(self, window: list[Batch], *, last: bool) -> HostStepResult:
        args, kwargs = window[0]
        with Snapshot(noted()).returning():
            self._run_twin(args, kwargs)
        self.recorder.start(self.twin, backward=last)
        self.looks = True
        found = _averages(self.train.model).items()
        low = {name: copied(value) for name, value in found if value.dtype in BELOW_FP32}
        result = self.train(*args, **kwargs)
        self._compare_averages(low)
        self.looks = False
        for args, kwargs in window[1:]:
            result = self.train(*args, **kwargs)
        if len(window) < self.train.accumulate:
            loss, result = result.loss, self.train.flush() or result
            return replace(result.host(), loss=float(loss))
        return result.host()

    def _run_twin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        twin = self.twin
        if twin is None:
            return
        before = math.nan if self._twice else self._first_loss(twin.model, args, kwargs)
        self._twice = True
        self._follow(twin.model)
        twin.begin()
        try:
            with suspended():
                with Tracer(twin, twin.model):
                    loss = self._loss(twin.model, args, kwargs)
                now = twin.loss = float(loss.detach())
                if abs(now - before) > SAME * abs(before):
                    self.twin = None
                    self.notes.append(
                        f"no accumulated errors: the same batch and random numbers gave the losses {before:.6g} and "
                        f"{now:.6g} in fp32; what differs from call to call (a counter, a generator that no module "
                        "holds) would pass for an error"
                    )
                    return
                loss.backward()
        except Exception as error:  # of the user's model, which may insist on a low format
            self.twin = None
            first = first_line(error)
            self.notes.append(f"no accumulated errors: the model does not run in fp32: {type(error).__name__}: {first}")
            return
        for name, parameter in twin.model.named_parameters():
            if parameter.grad is not None:
                twin.weights[name] = parameter.grad
                parameter.grad = None

    def _loss(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        args, kwargs = map_tensors((args, kwargs), lambda t: t.clone())
        returned = self.loss_fn(model, *args, **kwargs)
        loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return loss

    def _first_loss(self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        self._follow(twin)
        try:
            with Snapshot(noted()).returning(), suspended(), torch.no_grad():
                return float(self._loss(twin, args, kwargs))
        except Exception:  # the following run reports it
            return math.nan

    @torch.no_grad()
    def _follow(self, twin: nn.Module) -> None:
        model = self.train.model
        for other, generator in zip(generators_of(twin.modules()), generators_of(model.modules()), strict=True):
            other.set_state(generator.get_state())
        own = dict(model.named_parameters())
        for name, parameter in twin.named_parameters():
            parameter.copy_(precise_of(model, own[name]))
        buffers = dict(model.named_buffers())
        for name, buffer in twin.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])

    def _compare_averages(self, before: dict[str, Tensor]) -> None:
        """Compare running averages in low formats with those of the fp32 twin, which has made the same step."""
        after = _averages(self.twin.model) if self.twin is not None else {}
        found = _averages(self.train.model) if before else {}
        for name, old in before.items():
            wanted = after.get(name)
            if wanted is None or wanted.shape != old.shape or torch.equal(wanted, old.to(wanted.dtype)):
                continue
            module = name.rpartition(".")[0]
            tally = self.recorder.tally(module, "buffer", "state", name)
            momentum = getattr(self.train.model.get_submodule(module), "momentum", None)
            tally.pace = momentum if isinstance(momentum, float) else 0.0
            swallow(tally, float64_of(old), float64_of(wanted), found[name], form_of(old))
            tally.whole.add(found[name], wanted, form_of(old))

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
        tally.see(Tensor.detach(parameter))
        used = self.recorder.forms.get(name, tally.form)
        form = min(used, tally.form, key=lambda form: form.bits)
        if form is FP32:
            tally.local.count += parameter.numel()
        else:
            precise = precise_of(self.train.model, parameter)
            low = precise.to(form.torch_dtype) if form.torch_dtype is not None else form.round(precise)
            tally.local.add(low, precise, form)
            if form.is_narrow:
                tally.wide = tally.wide or tally.sketch

    def result(self, *, steps: int) -> Audit:
        """Return the audit of `steps` steps."""
        seconds = sum(tally.seconds for tally in self.recorder.tallies.values())
        tallies = [tally for tally in self.recorder.tallies.values() if tally.sketch is not None]
        if self.unfinished:
            self.notes.append(
                f"{len(self.unfinished)} of {steps} steps were not finite, the first with {self.unfinished[0]}: rows "
                "show where; hs.TrainStep(...).explain() says why"
            )
        if self.recorder.skipped:
            self.notes.append(
                f"{self.recorder.skipped} calls have no local error: their operator does not take "
                f"{str(self.recorder.shadow).removeprefix('torch.')} arguments"
            )
        return Audit(
            rows=tuple(tally.row(steps, seconds, *self._why(tally)) for tally in tallies),
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
        for module in self.plan.modules:
            if module.path == tally.module and module.rule:
                return module.rule, module.reason
        if tally.role == "weight":
            reasons = {name: p.reason for p in self.plan.parameters for name in (p.name, *p.aliases)}
            return "", reasons.get(tally.parameter, "")
        decision = self.operators.get(tally.op)
        if decision is None:
            return "", "no rule: runs in its inputs' format"
        by = f"table {self.policy.table!r}" if decision.origin == "table" else f"field {decision.origin!r}"
        return decision.rule, f"{by}: {decision.reason}"


def _averages(model: nn.Module) -> dict[str, Tensor]:
    """Return what a forward pass may average in: buffers, and parameters that no gradient trains (a teacher's)."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {**dict(model.named_buffers()), **frozen}


def _widened(model: nn.Module) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in LOW_DTYPES:
            tensor.data = tensor.data.float()
    return model


def _checked(model: nn.Module, batches: Any, loss_fn: object, steps: int, accumulate: int) -> list[Batch]:
    taken = taken_from(batches, steps * accumulate, AuditError)
    if not taken:
        raise AuditError("batches gave no batch: an iterator may be used up; pass a list, or make it anew")
    for args, kwargs in taken:
        if any(isinstance(value, Iterator) for value in (*args, *kwargs.values())):
            raise AuditError(
                "a batch holds an iterator or a generator, which can be read once, and a batch is run several times; "
                "make a list or a tuple of it"
            )
        _fits(model, loss_fn, args, kwargs)
    return taken


def _fits(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(loss_fn).bind(model, *args, **kwargs)
    except TypeError as error:
        given = ", ".join(kwargs) if kwargs else f"{len(args)} argument{'s' * (len(args) != 1)}"
        raise AuditError(
            f"loss_fn cannot be called with the model and this batch ({given}): {error}; batches is an iterable of "
            "batches, each a tuple of arguments or a dict of named ones; for one batch write [batch]"
        ) from None
    except ValueError:  # no signature to be had
        return
    places = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    found = {t.device for t in tensors((args, kwargs))}
    empty = [name for name, p in model.named_parameters() if p.device.type == "meta" and not is_lazy(p)]
    if empty:
        raise AuditError(
            f"parameter {empty[0]} is on the meta device and has no values; materialise the model first (to_empty and "
            "load_state_dict)"
        )
    if places and found and (not places & found or (META in found and META not in places)):
        batch, own = (listed(sorted(map(str, devices))) for devices in (found, places))
        raise AuditError(
            f"the batch is on {batch} and the model on {own}; move one of them, e.g. "
            f"hs.trees.map_tensors(batch, lambda t: t.to({str(next(iter(places)))!r}))"
        )


def _copies(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    memo: dict[int, Any] = {}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # of the user's classes
        if lacks_memory(error):
            raise
        raise AuditError(
            f"hs.audit works on a copy of the model, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}; give it a __deepcopy__, or audit a model that has not run yet"
        ) from error
    for parameter in twin.parameters():
        parameter.grad = None
    if optimizer is None:
        return twin, None
    known = {id(p) for p in model.parameters()}
    if not any(id(p) in known for p in stepped_by(optimizer)):
        raise AuditError(
            f"{type(optimizer).__name__} holds no parameter of the model; build it from model.parameters()"
        )
    return twin, copy_of(optimizer, memo)
