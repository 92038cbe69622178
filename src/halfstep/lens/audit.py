"""Audit: a few training steps under a policy, looked at operator by operator.

The caller's model and optimizer are copied and never touched; random number generators are put back. Each batch runs
twice on the copy's weights: in fp32, and as the policy says. See `record` for what is compared with what.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from halfstep.cast.region import suspended
from halfstep.errors import AuditError
from halfstep.formats import FP32, format_of
from halfstep.lens.findings import AVERAGES
from halfstep.lens.record import LOWS, Recorder, Reference
from halfstep.lens.rows import Tally, form_of, row_of
from halfstep.lens.table import Audit
from halfstep.lens.updates import Intended, copied, stored_form, swallow
from halfstep.lens.watch import Call, Paths
from halfstep.policy.plan import Plan
from halfstep.policy.policy import DTYPES, Policy
from halfstep.policy.resolve import resolve
from halfstep.scale.scaler import GradScaler
from halfstep.step.bind import is_bound
from halfstep.step.prepare import prepared_policy, unprepare, unwrap
from halfstep.step.train_step import TrainStep
from halfstep.trees import map_tensors, tensors
from halfstep.weights.states import LowStates

__all__ = ["audit"]

SHADOWS = {"fp32": torch.float32, "fp64": torch.float64}
ATTEMPTS = 40
"""Steps that may be skipped until a dynamic loss scale fits: from its ceiling to its floor are 38."""


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[..., Any],
    policy: Policy | str | Path | None = None,
    optimizer: Optimizer | None = None,
    *,
    steps: int = 3,
    clip_norm: float | None = None,
    scaler: GradScaler | None = None,
    shadow: str = "fp32",
    reference: bool = True,
) -> Audit:
    """Run a few training steps under `policy` and return what precision did to every operator, weight and gradient.

    Works on a copy of model and optimizer: neither is changed, and random number generators are put back. Under dropout
    the fp32 run and every shadow draw the same random numbers. Memory: the copy, an fp32 twin of it, and the results of
    all operators of one step in fp32.

    Args:
        model: prepared or not; inside DistributedDataParallel or torch.compile the plain module is audited.
        batches: an iterable of batches as `TrainStep` takes them: a tuple or list of arguments, a dict of named ones,
            or one tensor. The first `steps` of them are used.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``.
        policy: preset name, TOML path or Policy; default: what the model was prepared with, else "mixed".
        optimizer: over the model's parameters, with the state it has; then rows of updates and states are made and the
            weights move from step to step. Without it all steps see the weights as they are.
        steps: how many.
        clip_norm: as in `TrainStep`.
        scaler: the GradScaler of the run, for its scale as it is now; it is copied. Default: a new one, as the policy
            says; then steps are repeated until its scale fits, as at the beginning of any run.
        shadow: "fp32" or "fp64": the format of the shadows that local errors are measured against.
        reference: whether the model also runs in fp32 as a whole, which gives accumulated errors.

    Returns:
        An `Audit`: rows, findings, what_if, records, and a printed form.

    Raises:
        AuditError: arguments that make no sense, or a model that cannot be copied.
        StepError, PolicyError, BindError: as `TrainStep`.
    """
    taken = _checked(model, batches, loss_fn, optimizer, steps, shadow)
    twin, stepper = _copies(unwrap(model), optimizer)
    wanted = Policy.of(policy if policy is not None else prepared_policy(model) or "mixed")
    if is_bound(twin):
        unprepare(twin)
    with torch.random.fork_rng(_devices(twin)):
        notes = _materialised(twin, taken[0], loss_fn)
        plan = resolve(wanted, twin)
        run = _Run(twin, stepper, loss_fn, wanted, plan, clip_norm, copy.deepcopy(scaler), SHADOWS[shadow], reference)
        run.notes += notes
        try:
            for batch in taken:
                run.step(batch)
        finally:
            run.close()
    return run.result(steps=len(taken), updates=optimizer is not None)


# ------------------------------------------------------------------ before it runs


def _checked(
    model: object, batches: Any, loss_fn: object, optimizer: object, steps: object, shadow: str
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the batches as (args, kwargs), or say what cannot be audited."""
    if not isinstance(model, nn.Module):
        raise AuditError(f"hs.audit takes a torch.nn.Module and got {type(model).__name__}")
    if not callable(loss_fn):
        raise AuditError(f"loss_fn must be callable as loss_fn(model, *batch) and is {loss_fn!r}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise AuditError(f"optimizer must be a torch optimizer or None and is {type(optimizer).__name__}")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise AuditError(f"steps must be a whole number from 1 and is {steps!r}")
    if shadow not in SHADOWS:
        raise AuditError(f"shadow={shadow!r}; expected 'fp32' or 'fp64'")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise AuditError(
            f"batches must be an iterable of batches and is a {type(batches).__name__}; for one batch write [batch]"
        )
    taken = [_arguments(batch) for batch in islice(batches, steps)]
    if not taken:
        raise AuditError("batches gave no batch: an iterator may be used up; pass a list, or make it anew")
    for args, kwargs in taken:
        _fits(model, loss_fn, args, kwargs)
    return taken


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def _fits(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a batch that loss_fn does not take, or that is on another device than the model."""
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
    if places and found and not places & found:
        raise AuditError(
            f"the batch is on {_listed(found)} and the model on {_listed(places)}; move one of them, e.g. "
            f"hs.map_tensors(batch, lambda t: t.to({str(next(iter(places)))!r}))"
        )


def _listed(devices: set[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))


def _copies(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    memo: dict[int, Any] = {}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # of the user's classes
        raise AuditError(
            f"hs.audit works on a copy of the model, and {type(model).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}; give it a __deepcopy__, or audit a model that has not run yet"
        ) from error
    for parameter in twin.parameters():
        parameter.grad = None
    if optimizer is None:
        return twin, None
    known = {id(p) for p in model.parameters()}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise AuditError(
            f"{type(optimizer).__name__} holds no parameter of the model; build it from model.parameters()"
        )
    return twin, copied(optimizer, memo)


def _devices(model: nn.Module) -> list[int]:
    """Return the CUDA devices whose generators must be put back."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _materialised(model: nn.Module, batch: tuple[Any, Any], loss_fn: Callable[..., Any]) -> list[str]:
    """Give lazily created parameters their values."""
    if not any(is_lazy(p) for p in model.parameters()):
        return []
    with torch.no_grad(), suspended():
        loss_fn(model, *batch[0], **batch[1])
    return ["parameters that are created by the first batch were created in the copy: the model's own will differ"]


# ------------------------------------------------------------------ the run


class _Run:
    """One audit while it runs."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_fn: Callable[..., Any],
        policy: Policy,
        plan: Plan,
        clip_norm: float | None,
        scaler: GradScaler | None,
        shadow: torch.dtype,
        reference: bool,
    ) -> None:
        self.loss_fn, self.plan, self.policy = loss_fn, plan, policy
        self.notes: list[str] = []
        self.skipped = 0
        self.unfinished: list[str] = []  # steps that were not finite for another reason than a scale on its way down
        self.operators = dict(plan.operators)
        closed = frozenset(self.operators)
        self.fp32 = _widened(copy.deepcopy(model)) if reference else None
        simulated = {}
        if plan.policy.dtype not in DTYPES:
            form = format_of(plan.policy.dtype)
            simulated = {op: form for op, decision in plan.operators if decision.rule == "low"}
        self.moves = optimizer is not None
        if optimizer is None:
            trained = [p for p in model.parameters() if p.requires_grad]
            if not trained:
                raise AuditError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to audit")
            optimizer = SGD(trained, lr=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "policy .* on ")  # the plan's notes say it
            self.train = _Step(
                model, optimizer, self._watched, policy=policy, clip_norm=clip_norm, scaler=scaler, blackbox=False
            )
        self.train.run = self
        self.paths = Paths(model)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.recorder = Recorder(
            self.paths,
            closed,
            shadow=shadow,
            parameters=self.names,
            simulated=simulated,
            devices=tuple(dict.fromkeys((plan.device, "cpu"))),
        )
        self.twin_paths = Paths(self.fp32) if self.fp32 is not None else None
        self.twin = Reference(self.twin_paths, closed) if self.twin_paths is not None else None
        self.scale = 1.0

    def close(self) -> None:
        self.paths.remove()

    def _watched(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.on():
            return self.loss_fn(model, *args, **kwargs)

    def step(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Run one batch; again while a dynamic loss scale is on its way down."""
        args, kwargs = batch
        for attempt in range(ATTEMPTS):
            random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            before = self.recorder.tallies
            self.recorder.tallies = copy.deepcopy(before) if self.train.scaler.is_enabled() else before
            self._run_twin(args, kwargs)
            torch.set_rng_state(random[0])
            if random[1]:
                torch.cuda.set_rng_state_all(random[1])
            self.recorder.start(self.twin.kept if self.twin is not None else {})
            buffers = self._low_buffers()
            result = self.train(*args, **kwargs).host()
            self._compare_buffers(buffers)
            self.scale = result.scale
            if not result.skipped:
                return
            self.skipped += 1
            if not self._falling(result.loss) or attempt == ATTEMPTS - 1:
                self.unfinished.append(
                    f"loss {result.loss:g}, loss scale {result.scale:g}, gradients of "
                    f"{', '.join(result.culprits[:3]) or 'no parameter'}"
                )
                return
            self.recorder.tallies = before

    def _falling(self, loss: float) -> bool:
        scaler = self.train.scaler
        return scaler.is_enabled() and math.isfinite(loss) and scaler.get_scale() < self.scale

    # ------------------------------------------------------------------ the fp32 twin

    def _run_twin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.fp32 is None or self.twin is None:
            return
        self._follow()
        self.twin.begin()
        self.twin.kept, self.twin.weights = {}, {}
        args, kwargs = map_tensors((args, kwargs), lambda t: t.clone())
        try:
            with suspended():
                with self.twin.on():
                    returned = self.loss_fn(self.fp32, *args, **kwargs)
                loss = returned[0] if isinstance(returned, tuple) else returned
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

    @torch.no_grad()
    def _follow(self) -> None:
        """Give the twin the audited model's precise weights and its buffers."""
        assert self.fp32 is not None
        own = dict(self.train.model.named_parameters())
        for name, parameter in self.fp32.named_parameters():
            parameter.copy_(self.train.precise(own[name]))
        buffers = dict(self.train.model.named_buffers())
        for name, buffer in self.fp32.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])

    def _low_buffers(self) -> dict[str, Tensor]:
        """Return copies of the low buffers of the audited model."""
        named = self.train.model.named_buffers()
        return {name: buffer.detach().clone() for name, buffer in named if buffer.dtype in LOWS}

    def _compare_buffers(self, before: dict[str, Tensor]) -> None:
        """Look at running averages in low formats: the fp32 twin has made the same step with them in fp32."""
        after = dict(self.fp32.named_buffers()) if self.fp32 is not None else {}
        found = dict(self.train.model.named_buffers()) if before else {}
        for name, old in before.items():
            wanted = after.get(name)
            if wanted is None or wanted.shape != old.shape or torch.equal(wanted, old.to(wanted.dtype)):
                continue
            module = name.rpartition(".")[0]
            tally = self.recorder.tally(Call(module, "buffer", 0, ""), "state", name)
            momentum = getattr(self.train.model.get_submodule(module), "momentum", None)
            tally.pace = momentum if isinstance(momentum, float) else 0.0
            swallow(tally, old.double(), wanted.double(), found[name], form_of(old))
            tally.whole.add(found[name], wanted, form_of(old))

    # ------------------------------------------------------------------ what a step calls

    def backward_ended(self, scale: float) -> None:
        named = dict(self.train.model.named_parameters())
        self.recorder.backward_ends(scale, named, self.twin.weights if self.twin is not None else {})
        for name, parameter in named.items():
            if parameter.is_floating_point() and parameter.numel():
                self._weigh(name, parameter)

    @torch.no_grad()
    def _weigh(self, name: str, parameter: nn.Parameter) -> None:
        """Look at a weight: as it is stored, and what is lost when its operator uses it."""
        module, op, line = self.recorder.users.get(name, (name.rpartition(".")[0], "", ""))
        tally = self.recorder.tally(Call(module, op, 0, line), "weight", name)
        tally.see(parameter.detach())
        precise = self.train.precise(parameter)
        used = self.recorder.forms.get(name, tally.form)
        form = min(used, tally.form, key=lambda form: form.bits)
        if form is FP32:
            tally.local.exact(parameter.numel())
        else:
            low = precise.to(form.torch_dtype) if form.torch_dtype is not None else form.round(precise)
            tally.local.add(low, precise, form)
            if form.exponent_bits < FP32.exponent_bits:
                tally.wide = tally.wide or tally.sketch

    def before_update(self, scale: float) -> Any:
        """Return what the step is meant to do, or None if it will be skipped or cannot be foreseen."""
        if not self.moves:
            return None
        step = self.train
        mine = [p for group in step.optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = {p: (p.grad.to_dense() if p.grad.is_sparse else p.grad).double() / scale for p in mine}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        if not math.isfinite(norm):
            return None
        if step.clip_norm is not None:
            factor = min(1.0, step.clip_norm / (norm + 1e-6))
            gradients = {p: g * factor for p, g in gradients.items()}
        try:
            return Intended(step.optimizer, {p: step.precise(p) for p in mine}, gradients)
        except Exception as error:  # of somebody's optimizer
            self.moves = False
            name, first = type(step.optimizer).__name__, (str(error).splitlines() or [""])[0]
            self.notes.append(f"no rows of updates: {name} cannot step in float64: {type(error).__name__}: {first}")
            return None

    def after_update(self, intended: Intended | None, bad: Tensor) -> None:
        if intended is None or bool(bad):
            return
        step = self.train
        kind = type(step.optimizer).__name__
        strategy = step.policy.master
        managed = LowStates.of(step.optimizer) is not None
        for p, before in intended.before.items():
            name = self.names.get(id(p), "")
            module = name.rpartition(".")[0]
            tally = self.recorder.tally(Call(module, kind, 0, ""), "update", name)
            low = step.is_low(p)
            form = stored_form(p, strategy if low else "none")
            tally.notes["stochastic"] = low and strategy == "stochastic"
            swallow(tally, before, intended.after[p], step.precise(p), form)
            old, new = intended.states[p]
            state = step.optimizer.state.get(p, {})
            for key, value in new.items():
                found = state.get(key)
                if isinstance(found, Tensor) and key in old and found.is_floating_point():
                    tally = self.recorder.tally(Call(module, kind, 0, ""), "state", f"{name}.{key}")
                    tally.notes["stochastic"] = managed
                    tally.pace = _pace(step.optimizer, p, key)
                    form = form_of(found)
                    if form.bits >= FP32.bits:  # nothing to lose
                        tally.see(found)
                    else:
                        swallow(tally, old[key], value, found, form)
                        tally.whole.add(found, value.float(), form)

    # ------------------------------------------------------------------ what comes out

    def result(self, *, steps: int, updates: bool) -> Audit:
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
        if self.recorder.skipped:
            self.notes.append(
                f"{self.recorder.skipped} calls have no local error: their operator does not take "
                f"{str(self.recorder.shadow).removeprefix('torch.')} arguments"
            )
        return Audit(
            rows=rows,
            policy=self.policy,
            plan=self.plan,
            steps=steps,
            skipped=self.skipped,
            scale=self.scale,
            notes=(*self.plan.notes, *dict.fromkeys(self.notes)),
        )

    def _why(self, tally: Tally) -> tuple[str, str]:
        if tally.role in {"update", "state"}:
            return "", "stochastic rounding" if tally.notes.get("stochastic") else ""
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


class _Step(TrainStep):
    """A training step that says when its backward pass is over, and when its update begins and ends."""

    run: _Run

    def precise(self, parameter: nn.Parameter) -> Tensor:
        """Return the precise value of `parameter` as a new tensor."""
        if self._store is not None and parameter in self._store:
            return self._store.read(parameter)
        value = parameter.detach().clone()
        return value.float() if value.dtype in {torch.float16, torch.bfloat16} else value

    def is_low(self, parameter: nn.Parameter) -> bool:
        """Return whether there are precise values behind `parameter`."""
        return self._store is not None and parameter in self._store

    def _backward(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        self.run.recorder.backward_begins()
        scale, seed = super()._backward(loss)
        self.run.backward_ended(float(scale))
        return scale, seed

    def _update(self, count: int) -> Any:
        intended = self.run.before_update(float(self._scale))
        verdict = super()._update(count)
        self.run.after_update(intended, verdict[1])
        return verdict


def _pace(optimizer: Optimizer, parameter: nn.Parameter, key: str) -> float:
    """Return how much of a moving average is new at each step; 0.0 if it is not known to be one."""
    option, place = AVERAGES.get(key, ("", None))
    for group in optimizer.param_groups:
        if option in group and any(p is parameter for p in group["params"]):
            factor = group[option] if place is None else group[option][place]
            return 1.0 - float(factor)
    return 0.0


def _widened(model: nn.Module) -> nn.Module:
    """Bring low parameters and buffers of `model` to fp32, in place."""
    for parameter in model.parameters():
        if parameter.dtype in {torch.float16, torch.bfloat16}:
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in {torch.float16, torch.bfloat16}:
                module._buffers[name] = buffer.float()
    return model
