"""Audit: a few training steps under a policy, measured operator by operator.

The caller's model and optimizer are copied and not changed; random number generators are restored. Each batch runs
twice on the copy's weights: in fp32, and under the policy. `record` describes what is compared with what.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.arguments import COUNT, FLAG, MODEL, NONE, OPTIMIZER, Kind, check, one_of
from halfstep.binding.bind import is_bound
from halfstep.binding.prepare import prepared_policy, unprepare, unwrap
from halfstep.cast.regions.autocast import suspended
from halfstep.errors import AuditError
from halfstep.lens.audit.run import Batch, Run
from halfstep.lens.audit.table import Audit
from halfstep.lens.audit.updates import copy_of_optimizer
from halfstep.policy.plan import resolve
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.snapshot import Snapshot, generators_of, noted
from halfstep.step.arguments import LOSS, limit
from halfstep.trees import tensors

__all__ = ["audit"]

META = torch.device("meta")
SHADOWS = {"fp32": torch.float32, "fp64": torch.float64}


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[..., Any],
    policy: Policy | str | Path | None = None,
    optimizer: Optimizer | None = None,
    *,
    steps: int = 3,
    clip_norm: float | None = None,
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
        optimizer: over the model's parameters, with the state it has; then rows of updates and states are made and the
            weights move from step to step. Without it all steps see the weights as they are.
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
    check(
        "hs.audit",
        AuditError,
        model=(model, MODEL),
        loss_fn=(loss_fn, LOSS),
        optimizer=(optimizer, OPTIMIZER | NONE),
        steps=(steps, COUNT),
        accumulate=(accumulate, COUNT),
        scaler=(scaler, SCALER | NONE),
        shadow=(shadow, one_of(*SHADOWS)),
        reference=(reference, FLAG),
    )
    limit("clip_norm", clip_norm)
    with Snapshot(noted(generators_of(model.modules()))).returning():  # a loader may draw its order
        taken = _checked(model, batches, loss_fn, steps, accumulate)
        windows = [taken[i : i + accumulate] for i in range(0, len(taken), accumulate)]
        twin, stepper = _copies(unwrap(model), optimizer)
        wanted = Policy.of(policy if policy is not None else prepared_policy(model) or "mixed")
        if is_bound(twin):
            unprepare(twin)
        notes = _materialised(twin, taken[0], loss_fn)
        plan = resolve(wanted, twin)
        run = Run(
            twin,
            stepper,
            loss_fn,
            wanted,
            plan,
            clip_norm=clip_norm,
            accumulate=accumulate,
            scaler=copy.deepcopy(scaler),
            shadow=SHADOWS[shadow],
            reference=reference,
        )
        run.notes += notes
        for number, window in enumerate(windows, 1):
            run.step(window, last=number == len(windows))
        return run.result(steps=len(windows))


# ------------------------------------------------------------------ before it runs

SCALER = Kind("a GradScaler", lambda scaler: callable(getattr(scaler, "get_scale", None)))


def _checked(model: nn.Module, batches: Any, loss_fn: object, steps: int, accumulate: int) -> list[Batch]:
    """Return the batches as (args, kwargs), or raise for what cannot be audited."""
    if isinstance(batches, (Tensor, Mapping, str, bytes, nn.Module)) or not isinstance(batches, Iterable):
        raise AuditError(
            f"batches must be an iterable of batches and is a {type(batches).__name__}; for one batch write [batch]"
        )
    taken = [_arguments(batch) for batch in islice(batches, min(steps * accumulate, sys.maxsize))]
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


def _arguments(batch: Any) -> Batch:
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
    empty = [name for name, p in model.named_parameters() if p.device.type == "meta" and not is_lazy(p)]
    if empty:
        raise AuditError(
            f"parameter {empty[0]} is on the meta device and has no values; materialise the model first (to_empty and "
            "load_state_dict)"
        )
    if places and found and (not places & found or (META in found and META not in places)):
        raise AuditError(
            f"the batch is on {_listed(found)} and the model on {_listed(places)}; move one of them, e.g. "
            f"hs.trees.map_tensors(batch, lambda t: t.to({str(next(iter(places)))!r}))"
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
    return twin, copy_of_optimizer(optimizer, memo)


def _materialised(model: nn.Module, batch: tuple[Any, Any], loss_fn: Callable[..., Any]) -> list[str]:
    """Give lazily created parameters their values."""
    if not any(is_lazy(p) for p in model.parameters()):
        return []
    with torch.no_grad(), suspended():
        loss_fn(model, *batch[0], **batch[1])
    return ["parameters that are created by the first batch were created in the copy: the model's own will differ"]
