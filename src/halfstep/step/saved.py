"""What the pieces of a saved state must be, checked by path before any of them is loaded.

Note [states of optimizers]: torch's `load_state_dict` looks at the number of parameters alone; whatever else is wrong
is an error, or a wrong update, at a later step. Which states there are, and in which shape, is known of torch's own
optimizers (2.13); of others, tensors are compared with those that they hold at the moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.errors import StepError, did_you_mean
from halfstep.kernels.sharded import local

__all__ = ["check_model", "check_optimizer", "check_scheduler", "check_step"]

MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
STATES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "Adam": (MOMENTS, frozenset({"max_exp_avg_sq"})),
    "AdamW": (MOMENTS, frozenset({"max_exp_avg_sq"})),
    "SparseAdam": (MOMENTS, frozenset()),
    "RAdam": (MOMENTS, frozenset()),
    "NAdam": (MOMENTS | {"mu_product"}, frozenset()),
    "Adamax": (frozenset({"step", "exp_avg", "exp_inf"}), frozenset()),
    "Adagrad": (frozenset({"step", "sum"}), frozenset()),
    "Adadelta": (frozenset({"step", "square_avg", "acc_delta"}), frozenset()),
    "RMSprop": (frozenset({"step", "square_avg"}), frozenset({"momentum_buffer", "grad_avg"})),
    "Rprop": (frozenset({"step", "prev", "step_size"}), frozenset()),
    "ASGD": (frozenset({"step", "eta", "mu", "ax"}), frozenset()),
    "SGD": (frozenset(), frozenset({"momentum_buffer"})),
    "Lion": (frozenset({"exp_avg"}), frozenset()),
}
"""Optimizer -> names of states that a parameter has if it has any, and of those that it may have."""

NEEDED = {
    "Adam": (("amsgrad", "max_exp_avg_sq"),),
    "AdamW": (("amsgrad", "max_exp_avg_sq"),),
    "RMSprop": (("momentum", "momentum_buffer"), ("centered", "grad_avg")),
}
"""Optimizer -> (option of a group, the state that it needs)."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})  # one number each; all others have their parameter's shape
LEGACY = frozenset({"verbose"})  # of schedulers, in states of older torch


def _refuse(path: str, got: object, expected: str) -> StepError:
    shown = repr(got) if isinstance(got, (str, int, float, type(None))) else f"a {type(got).__name__}"
    return StepError(f"{path}: {shown}, expected {expected}; nothing was loaded")


def check_step(value: object) -> int:
    """Return the saved number of micro-batches.

    Raises:
        StepError: it is no whole number from 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise _refuse("step", value, "a whole number of micro-batches from 0")
    return int(value)


# ---------------------------------------------------------------------- the model


def check_model(model: nn.Module, state: object) -> None:
    """Check the saved state of `model`: names, shapes, kinds of numbers, and that parameters are finite.

    Buffers may hold infinities: masks do.

    Raises:
        StepError: by the path of what is wrong.
    """
    if not isinstance(state, Mapping):
        raise _refuse("model", state, "a dict of tensors by name")
    have = model.state_dict()
    missing, unknown = [n for n in have if n not in state], [n for n in state if n not in have]
    if missing or unknown:
        what = [f"{missing[0]!r} is missing"] if missing else []
        what += [f"{unknown[0]!r} is unknown{did_you_mean(str(unknown[0]), missing)}"] if unknown else []
        raise StepError(f"model: {' and '.join(what)}: the saved model does not fit this one; nothing was loaded")
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    given: dict[str, Tensor] = {}
    for name, mine in have.items():
        value = state[name]
        if not isinstance(mine, Tensor) or is_lazy(mine):  # extra state, in the module's own format
            continue
        _check_tensor(f"model[{name!r}]", value, mine)
        if name in parameters:
            given[f"model[{name!r}]"] = value
    _check_finite(given)


def _check_tensor(path: str, value: object, like: Tensor) -> None:
    """Check shape and kind of a saved tensor."""
    if not isinstance(value, Tensor):
        raise _refuse(path, value, f"a tensor of shape {tuple(like.shape)}")
    if value.shape != like.shape:
        raise StepError(f"{path}: shape {tuple(value.shape)}, expected {tuple(like.shape)}; nothing was loaded")
    kinds = [(t.is_floating_point(), t.is_complex(), t.dtype is torch.bool) for t in (value, like)]
    if kinds[0] != kinds[1]:
        raise StepError(f"{path}: {value.dtype}, expected {like.dtype}; nothing was loaded")


def _check_finite(given: Mapping[str, Tensor], *, infinities: bool = False) -> None:
    """Refuse tensors that hold nan, or, unless `infinities` may be there, inf; one wait for each device."""
    flags: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for path, tensor in given.items():
        part = local(tensor).detach()
        if part.is_sparse:
            part = part.coalesce()._values()
        if (part.is_floating_point() or part.is_complex()) and not part.is_meta:
            wrong = part.isnan().any() if infinities else ~part.isfinite().all()
            flags.setdefault(part.device, []).append((path, wrong))
    for known in flags.values():
        for (path, _), wrong in zip(known, torch.stack([flag for _, flag in known]).tolist(), strict=True):
            if wrong:
                raise StepError(
                    f"{path} holds {'nan' if infinities else 'nan or inf'}: training from it would spread; load a "
                    "state from before; nothing was loaded"
                )


# ---------------------------------------------------------------------- the optimizer


def check_optimizer(optimizer: Optimizer, state: object) -> None:
    """Check the saved state of `optimizer`: its groups, their numbers, and what is kept for each parameter.

    Raises:
        StepError: by the path of what is wrong.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(groups, list) or "state" not in state:
        raise StepError(
            "optimizer: the saved optimizer is not what state_dict() of a torch optimizer returns, a dict of 'state' "
            "and 'param_groups'; nothing was loaded"
        )
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise _refuse(f"optimizer.param_groups[{i}]", group, "a dict with a list 'params'")
    have, want = ([len(group["params"]) for group in some] for some in (optimizer.param_groups, groups))
    if have != want:
        raise StepError(
            f"the saved optimizer does not fit this one: its groups have {want} parameters, and here they have {have}; "
            "build the optimizer with the groups it was saved with"
        )
    for i, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        _check_group(f"optimizer.param_groups[{i}]", mine, saved)
    if not isinstance(state["state"], Mapping):
        raise _refuse("optimizer.state", state["state"], "a dict by the number of a parameter")
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    options = [group for group in groups for _ in group["params"]]
    mine_by = dict(zip(numbers, zip(parameters, options, strict=True), strict=True))
    moments: dict[str, Tensor] = {}
    for number, entry in state["state"].items():
        path = f"optimizer.state[{number!r}]"
        if number not in mine_by:
            raise StepError(f"{path}: there is no such parameter in the saved groups; nothing was loaded")
        if not isinstance(entry, Mapping):
            raise _refuse(path, entry, "a dict of states by name")
        parameter, group = mine_by[number]
        _check_names(path, optimizer, group, entry)
        for name, value in entry.items():
            _check_state(f"{path}.{name}", name, value, parameter, optimizer)
            if isinstance(value, Tensor):
                moments[f"{path}.{name}"] = value
    _check_finite(moments, infinities=True)


def _check_group(path: str, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check the numbers of a group; options that older versions of torch did not have may be missing."""
    for name, value in mine.items():
        if name == "params" or not _numbers(value):
            continue
        if name not in saved:
            if name == "initial_lr":  # schedulers put it there
                continue
            raise StepError(
                f"{path}: {name!r} is missing, expected as in this optimizer ({value!r}); nothing was loaded"
            )
        got = _numbers(saved[name])
        if len(got) != len(_numbers(value)):
            raise _refuse(f"{path}[{name!r}]", saved[name], "a number" if len(_numbers(value)) == 1 else "two numbers")
        if not all(math.isfinite(one) for one in got):
            raise _refuse(f"{path}[{name!r}]", saved[name], "finite numbers")


def _numbers(value: object) -> list[float]:
    """Return the numbers of an option; none if it is a switch, or a tensor that is not on the host."""
    if isinstance(value, (tuple, list)):
        parts = [_numbers(one) for one in value]
        return [part[0] for part in parts] if all(len(part) == 1 for part in parts) else []
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return [float(value)]
    return [] if isinstance(value, bool) or not isinstance(value, Real) else [float(value)]


def _check_names(path: str, optimizer: Optimizer, group: Mapping[str, Any], entry: Mapping[Any, Any]) -> None:
    """Check which states there are; those without a value count as missing."""
    there = {name for name, value in entry.items() if value is not None}
    kind = type(optimizer).__name__
    if not _is_known(optimizer):
        return
    needed, allowed = STATES[kind]
    needed = needed | {name for option, name in NEEDED.get(kind, ()) if group.get(option)}
    for name in entry:
        if name not in needed | allowed:
            raise StepError(
                f"{path}.{name}: {kind} has no such state, only {', '.join(sorted(needed | allowed))}; load the state "
                "of an optimizer of this kind; nothing was loaded"
            )
    if there and (missing := sorted(needed - there)):
        raise StepError(f"{path}: {missing[0]!r} is missing, which {kind} needs; nothing was loaded")


def _is_known(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__name__ in STATES and kind.__module__.startswith(("torch.optim", "halfstep.optim"))


def _check_state(path: str, name: object, value: object, parameter: Tensor, optimizer: Optimizer) -> None:
    """Check one state of a parameter."""
    mine = (optimizer.state.get(parameter) or {}).get(name)
    known = _is_known(optimizer)
    if not known and not isinstance(mine, Tensor):
        return
    if name in SCALARS or (isinstance(mine, Tensor) and mine.numel() == 1 and parameter.numel() != 1):
        if len(_numbers(value)) != 1:
            raise _refuse(path, value, "one number")
        if not math.isfinite(_numbers(value)[0]) or (name == "step" and _numbers(value)[0] < 0):
            raise _refuse(path, _numbers(value)[0], "a finite number" + (" from 0" if name == "step" else ""))
    elif value is not None:
        like = mine if isinstance(mine, Tensor) and not known else parameter
        _check_tensor(path, value, like)


# ---------------------------------------------------------------------- the scheduler


def check_scheduler(scheduler: Any, state: object) -> None:
    """Check the saved state of `scheduler`, or of none: its names, and the kinds of values under them.

    Names that begin with an underscore are of torch's inside and differ from version to version.

    Raises:
        StepError: by the path of what is wrong.
    """
    if (state is None) is not (scheduler is None):
        raise StepError("the state was saved with a scheduler and this TrainStep has none, or the other way round")
    if scheduler is not None:
        _check_fields("scheduler", scheduler.state_dict(), state)


def _check_fields(path: str, mine: Mapping[str, Any], saved: object) -> None:
    if not isinstance(saved, Mapping):
        raise _refuse(path, saved, "what state_dict() of a scheduler returns")
    public = [{n for n in some if not str(n).startswith("_") and n not in LEGACY} for some in (mine, saved)]
    if public[0] != public[1]:
        name = sorted(map(str, public[0] ^ public[1]))[0]
        where = "is missing" if name in public[0] else "is no field of this scheduler"
        raise StepError(f"{path}: {name!r} {where}; load the state of a scheduler of this kind; nothing was loaded")
    for name, value in mine.items():
        if name in saved:
            _check_field(f"{path}[{name!r}]", value, saved[name])


def _check_field(path: str, mine: object, saved: object) -> None:
    if not isinstance(mine, bool) and isinstance(mine, Real):
        numbers = [] if isinstance(saved, bool) else _numbers(saved)
        if len(numbers) != 1 or isinstance(saved, (list, tuple)):
            raise _refuse(path, saved, "a number")
        if math.isfinite(mine) and not math.isfinite(numbers[0]):
            raise _refuse(path, saved, "a finite number")
    elif isinstance(mine, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(saved) != len(mine):
            raise _refuse(path, saved, f"a list of {len(mine)}")
        for i, (one, other) in enumerate(zip(mine, saved, strict=True)):
            _check_field(f"{path}[{i}]", one, other)
    elif isinstance(mine, Mapping):
        if not isinstance(saved, Mapping):
            raise _refuse(path, saved, "a dict")
        if "last_epoch" in mine:
            _check_fields(path, mine, saved)
    elif isinstance(mine, (str, bool)) and not isinstance(saved, type(mine)):
        raise _refuse(path, saved, f"a {type(mine).__name__}")
