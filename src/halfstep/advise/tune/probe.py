"""Probe: which exceptions bring a policy's gradients back to fp32's, each measured by one forward and backward pass.

Local errors do not rank exceptions: every bf16 product loses two thousandths, whether a cancellation behind it makes
that the whole result or nothing. A probe has everything in it that comes after.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration, applied
from halfstep.advise.tune.result import Change
from halfstep.tasks.machine import generators_kept
from halfstep.tasks.task import Task

WORTH = 0.75  # of the error: an exception that leaves more is not worth its casts
MOST = 4  # exceptions of a chain

CLOSE = 1.1
"""Times the least error: exceptions within it count as equally good; the one that concerns the least time is taken."""

ENOUGH = 0.05  # error that the rounding of low products may leave in a healthy model
LARGE = 0.5  # share of the time of all operators: a rule that concerns more makes another preset of the policy
PATTERNS = 12  # rules that are probed, the shares of the time falling
SCALE = 2.0**10  # of the loss of a probe in fp16, whose small gradients would be zero
BACK = {"inputs": "keep", "residual": "fp32", "norms": "fp32"}  # fields and the values that keep digits


class _GradientsAreThereError(Exception):
    """Ends a step after its gradients are known: it is to change nothing."""


def gradient_error(
    task: Task, model: nn.Module, batch: tuple[Any, ...], policy: hs.Policy, reference: Sequence[Tensor]
) -> float:
    """Return how far the gradients of `model` under `policy` are from `reference`, from 0 to 1.

    The mean over the parameters of the relative error, where one that is wrong altogether, or not finite, counts as 1:
    gradients that are nearly zero, such as those of a bias before a norm, weigh no more than others. `model` has fp32
    parameters and stays as it is; `reference` is what `gradients` returns without a policy.
    """
    found = gradients(task, model, batch, policy)
    errors = []
    for own, wide in zip(found, reference, strict=True):
        size = float(wide.double().norm())
        if size > 0.0:
            error = float((own.double() - wide.double()).norm()) / size
            errors.append(min(error, 1.0) if math.isfinite(error) else 1.0)
    return sum(errors) / len(errors) if errors else math.nan


def gradients(task: Task, model: nn.Module, batch: tuple[Any, ...], policy: hs.Policy | None) -> list[Tensor]:
    """Return the gradients of one batch, fp32: under `policy` as a TrainStep computes them, None: without a region."""
    own = copy.deepcopy(model)
    scale = SCALE if policy is not None and policy.dtype == "fp16" else 1.0
    found: list[Tensor] = []

    def loss_fn(model: nn.Module, *batch: Any) -> Any:
        returned = task.loss_fn(model, *batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        kept = [p for p in model.parameters() if p.requires_grad]
        made = torch.autograd.grad(loss * scale, kept, allow_unused=True)
        found.extend(torch.zeros(()) if g is None else g.detach().float() / scale for g in made)
        raise _GradientsAreThereError

    with generators_kept(), suppress(_GradientsAreThereError):
        torch.manual_seed(0)
        if policy is None:
            loss_fn(own, *batch)
        else:
            hs.TrainStep(own, task.optimizer(own), loss_fn, policy=policy, blackbox=False)(*batch)
    return found


def options(calibration: Calibration, policy: hs.Policy, remedies: Sequence[Change]) -> list[tuple[float, Change]]:
    """Return (share of the time that is concerned, change) of `remedies` and of what else may bring the error down."""
    total = sum(spot.time for spot in calibration.spots) or 1.0
    rules = [r for r in remedies if r.field in {"ops", "modules"} and r.value == "fp32"]
    fields = {(r.field, r.value): r for r in remedies if r not in rules}
    for field, value in BACK.items():
        fields.setdefault((field, value), Change(field=field, value=value, why=""))
    found = [(0.0, remedy) for remedy in fields.values()]
    outermost = (spot.module.partition(".")[0] for spot in calibration.spots if spot.module)
    patterns = dict.fromkeys([*((r.field, r.pattern) for r in rules), *calibration.places(outermost)])
    shares = [(sum(spot.time for spot in calibration.covered(*place)) / total, *place) for place in patterns]
    small = sorted((s for s in shares if s[0] <= LARGE), reverse=True)[:PATTERNS]
    found += [(share, Change(field=field, pattern=pattern, value="fp32", why="")) for share, field, pattern in small]
    return [(share, change) for share, change in found if applied(policy, [change]) != policy]


def chain(
    error: Callable[[hs.Policy], float], policy: hs.Policy, found: Sequence[tuple[float, Change]]
) -> list[Change]:
    """Return changes of `policy`, each the one that brings `error` down most, as long as it falls by a quarter.

    Where no single change does, pairs with a change of a field are tried: a digit that the inputs have lost is not
    brought back behind them, and one that an operator loses is not kept by its inputs. `found`: (cost, change).
    """
    made: list[Change] = []
    least = error(policy)
    while len(made) < MOST and least > ENOUGH:
        left = [(cost, (change,)) for cost, change in found]
        best = _best(error, policy, left, WORTH * least)
        if best is None:
            fields = [(cost, change) for cost, change in found if not change.pattern]
            rules = [(cost, change) for cost, change in found if change.pattern]
            pairs = [(a + b, (r, s)) for (a, r), (b, s) in itertools.product(fields, rules)]
            best = _best(error, policy, pairs, WORTH * least)
        if best is None:
            break
        after, changes = best
        why = f"brings the error of the gradients from {least:.2g} to {after:.2g}"
        made += [replace(change, why=why) for change in changes]
        policy, least = applied(policy, changes), after
        found = [(cost, change) for cost, change in found if change not in changes]
    return made


def _best(
    error: Callable[[hs.Policy], float], policy: hs.Policy, found: Sequence[tuple[float, tuple[Change, ...]]],
    limit: float,
) -> tuple[float, tuple[Change, ...]] | None:  # fmt: skip
    """Return (error, changes) of the cheapest change whose error is close to the least; None if all exceed `limit`."""
    measured = [(error(applied(policy, changes)), cost, changes) for cost, changes in found]
    good = [m for m in measured if m[0] < limit]  # nan is not
    if not good:
        return None
    near = CLOSE * min(m[0] for m in good)
    after, _, changes = min((m for m in good if m[0] <= near), key=lambda m: m[1])
    return after, changes
