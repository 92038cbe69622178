"""What the pieces of a saved state must be, checked by path before any of them is loaded.

torch's `load_state_dict` looks at the number of parameters alone. Which states there are, and in which shape, is known
of torch's own optimizers (2.13); of others, tensors are compared with those that they hold at the moment.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.arguments import LARGEST, Kind, number, shown, whole
from halfstep.binding.bindable import first_wrong
from halfstep.errors import StepError
from halfstep.kernels.optimizers import BY_TYPE, OptimizerSpec
from halfstep.optim import check_names, members
from halfstep.scale.rule import OWN_COUNTERS
from halfstep.schema import Each, check, text
from halfstep.weights.draws import ROUNDING as DRAWN

FP32 = torch.finfo(torch.float32).max


def _numbers(value: Any) -> list[float]:
    """Return the numbers of an option; none if it is a switch, or a tensor of several elements or without values."""
    if isinstance(value, (tuple, list)):
        parts = [_numbers(one) for one in value]
        return [part[0] for part in parts] if all(len(part) == 1 for part in parts) else []
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 and not value.is_complex() and not value.is_meta else []
    try:
        return [] if isinstance(value, bool) or not isinstance(value, Real) else [float(value)]
    except OverflowError:
        return [math.inf]


NUMBER = Kind("a number", lambda value: len(_numbers(value)) == 1 and not isinstance(value, (list, tuple)))
FINITE_NUMBER = Kind("a finite number", lambda value: NUMBER.has(value) and abs(_numbers(value)[0]) <= FP32)
INDEX = Kind("a finite number from -1", lambda value: FINITE_NUMBER.has(value) and -1 <= _numbers(value)[0] <= LARGEST)
COUNT = Kind("a finite number from 0", lambda value: FINITE_NUMBER.has(value) and 0 <= _numbers(value)[0] <= LARGEST)

INT64 = whole(-LARGEST - 1)
ROUNDING = {"seed": INT64, "counts": Each(text(r"[a-z]+(:\d{1,4})?", "a device"), [INT64, whole()])}
SCALER = {
    "scale": NUMBER,
    **dict.fromkeys(("growth_factor", "backoff_factor"), FINITE_NUMBER),
    **dict.fromkeys(("growth_interval", "_growth_tracker"), FINITE_NUMBER),
    "halfstep?": dict.fromkeys(OWN_COUNTERS, whole()),
}
STATE: dict[Any, Any] = {
    "model": Each(str, Any),
    "optimizer": {
        "state": Each(Any, Any),
        "param_groups": [{"params": [whole(), ...], ...: Any}, ...],
        f"{DRAWN}?": [ROUNDING, ...],
        ...: Any,
    },
    "scaler": (SCALER, {}),
    "scheduler": (None, Each(Any, Any)),
    "policy": text(words="the text that state_dict() saves (TOML)"),
    "step": whole(of="micro-batches"),
    "weights?": (ROUNDING, {}),  # only there where a weight strategy has a state besides the fp32 weights
    "reference?": (None, FINITE_NUMBER),  # of weights of micro-batches: `parts.gradients.Weights`
    "choice?": (None, {"compiled": bool, "line": str}),  # under policy="auto": what it chose besides the policy
}
"""A state of a training step, whose parts the functions below compare with those of the step."""

NUMPY = {"keys": Tensor, "place": whole(0, 624), "has_gauss": whole(0, 1), "cached": number()}
PYTHON = {"version": whole(), "words": Tensor, "gauss": (None, number())}
RANDOM = {"torch": Tensor, "python": PYTHON, "numpy?": NUMPY, ...: [Tensor, ...]}
NAMES = [[str, ...], ...]
REST = {
    "model": Each(str, Any), "groups": [Each(Any, Any), ...], "names": NAMES, "other": Each(Any, Any),
    "more?": Each(str, Any),
}  # fmt: skip
RANKS = [{"random": RANDOM, "extra": Any, "weights": (ROUNDING, {})}, ...]
PLAIN: dict[Any, Any] = {"state": STATE, "ranks": RANKS, "names": NAMES}
SHARDED: dict[Any, Any] = {
    "state": {key: kind for key, kind in STATE.items() if key not in {"model", "optimizer"}},
    "ranks": RANKS,
    "rests": [REST, ...],
    "shards": Any,
}
"""The file that `hs.save` writes: with all of the state, or with what `shards.read` makes its large parts of."""

MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})


def _states(spec: OptimizerSpec) -> tuple[frozenset[str], frozenset[str]]:
    own, others = frozenset((*spec.states, *spec.counters)), frozenset(spec.other_states.values())
    return (frozenset(), own | others) if spec.states_under else (own, others)


STATES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "SparseAdam": (MOMENTS, frozenset()),
    "RAdam": (MOMENTS, frozenset()),
    "Adamax": (frozenset({"step", "exp_avg", "exp_inf"}), frozenset()),
    "Adagrad": (frozenset({"step", "sum"}), frozenset()),
    "Adadelta": (frozenset({"step", "square_avg", "acc_delta"}), frozenset()),
    "RMSprop": (frozenset({"step", "square_avg"}), frozenset({"momentum_buffer", "grad_avg"})),
    "Rprop": (frozenset({"step", "prev", "step_size"}), frozenset()),
    "ASGD": (frozenset({"step", "eta", "mu", "ax"}), frozenset()),
    **{optimizer.__name__: _states(spec) for optimizer, spec in BY_TYPE.items()},
}
"""Optimizer -> names of states that a parameter has if it has any, and of those that it may have."""

NEEDED = {
    "RMSprop": (("momentum", "momentum_buffer"), ("centered", "grad_avg")),
    **{optimizer.__name__: tuple(spec.other_states.items()) for optimizer, spec in BY_TYPE.items()},
}
"""Optimizer -> (option of a group, the state that it needs)."""

FINITE = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay", "momentum"})  # in every optimizer
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})  # one number each; all others have their parameter's shape
LEGACY = frozenset({"verbose"})  # of schedulers, in states of older torch
UNBOUNDED = frozenset({"best", "mode_worse"})  # of schedulers: infinite until there was a metric


def check_model(model: nn.Module, state: object) -> None:
    """Check the saved state of `model`; parameters must be finite, and buffers may hold infinities: masks do."""
    have = model.state_dict()
    wrong = "the saved model does not fit this one; nothing was loaded"
    check(state, dict.fromkeys(have, Any), "model", StepError, wrong)
    assert isinstance(state, Mapping)
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    given: dict[str, Tensor] = {}
    for name, mine in have.items():
        value = state[name]
        if not isinstance(mine, Tensor) or is_lazy(mine):  # extra state, in the module's own format
            continue
        _check_tensor(f"model[{name!r}]", value, mine)
        if name in parameters:
            given[f"model[{name!r}]"] = value.to(mine.dtype)
    _check_finite(given)


def _check_tensor(path: str, value: object, like: Tensor) -> None:
    check(value, Tensor, path, StepError, f"its shape is {tuple(like.shape)} here; nothing was loaded")
    assert isinstance(value, Tensor)
    if value.shape != like.shape:
        raise StepError(f"{path}: shape {tuple(value.shape)}, expected {tuple(like.shape)}; nothing was loaded")
    if _number_kind(value) != _number_kind(like):
        raise StepError(f"{path}: {value.dtype}, expected {like.dtype}; nothing was loaded")
    if value.layout is not like.layout or value.is_meta > like.is_meta:
        found = "no values" if value.is_meta else value.layout
        raise StepError(f"{path}: {found}, expected {like.layout}; nothing was loaded")


def _number_kind(tensor: Tensor) -> object:
    real = tensor.is_floating_point()
    return "real" if real else "complex" if tensor.is_complex() else tensor.dtype


def _check_finite(given: Mapping[str, Tensor], *, infinities: bool = False) -> None:
    """Refuse tensors that hold nan, or, unless `infinities` may be there, inf."""
    if path := first_wrong(given.items(), infinities=infinities):
        raise StepError(
            f"{path} holds {'nan' if infinities else 'nan or inf'}: training from it would spread; load a state from "
            "before; nothing was loaded"
        )


def check_optimizer(optimizer: Optimizer, state: object, *, groups_alone: bool = False) -> None:
    """Check the saved state of `optimizer`: its groups, their numbers, and what is kept for each parameter."""
    check(state, STATE["optimizer"], "optimizer", StepError, "it is not what state_dict() of a torch optimizer returns")
    assert isinstance(state, Mapping)
    check_names(optimizer, state)
    groups, owners = state["param_groups"], [one for one in members(optimizer) for _ in one.param_groups]
    have, want = ([len(group["params"]) for group in some] for some in (optimizer.param_groups, groups))
    if have != want:
        raise StepError(
            f"the saved optimizer does not fit this one: its groups have {want} parameters, and here they have {have}; "
            "build the optimizer with the groups it was saved with"
        )
    for i, (mine, saved, owner) in enumerate(zip(optimizer.param_groups, groups, owners, strict=True)):
        _check_group(f"optimizer.param_groups[{i}]", mine, saved, known=_is_known(owner))
    numbers = [number for group in groups for number in group["params"]]
    if len(set(numbers)) < len(numbers):
        raise StepError("optimizer.param_groups: a parameter is there twice; nothing was loaded")
    if groups_alone:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    options = [(group, owner) for group, owner in zip(groups, owners, strict=True) for _ in group["params"]]
    mine_by = dict(zip(numbers, zip(parameters, options, strict=True), strict=True))
    moments: dict[str, Tensor] = {}
    for key, entry in state["state"].items():
        path = f"optimizer.state[{shown(key)}]"
        if key not in mine_by:
            if not isinstance(key, int) and not all(map(_is_known, owners)):  # what an optimizer keeps for all of them
                continue
            raise StepError(f"{path}: there is no such parameter in the saved groups; nothing was loaded")
        check(entry, Each(Any, Any), path, StepError)
        parameter, (group, owner) = mine_by[key]
        _check_names(path, owner, group, entry)
        for name, value in entry.items():
            _check_state(f"{path}.{name}", name, value, parameter, owner)
            if isinstance(value, Tensor):
                moments[f"{path}.{name}"] = value
    _check_finite(moments, infinities=True)


def _check_group(path: str, mine: Mapping[str, Any], saved: Mapping[str, Any], *, known: bool) -> None:
    """Check the options of a group; switches that older versions of torch did not have may be missing."""
    table: dict[Any, Any] = {...: Any}
    for name, value in mine.items():
        if not isinstance(name, str) or name == "params":
            continue
        optional = name == "initial_lr" or not _numbers(value)  # a scheduler's, a switch
        table[f"{name}{'?' * optional}"] = _like(value, strict=known, finite=known or name in FINITE)
    check(saved, table, path, StepError)


def _like(value: object, *, strict: bool, finite: bool) -> Any:
    """Return the schema of what a saved option may be where this optimizer or scheduler has `value`."""
    if len(_numbers(value)) == 1 and not isinstance(value, (list, tuple)):
        counts = finite and isinstance(value, int) and value >= -1
        return INDEX if counts else FINITE_NUMBER if finite else NUMBER if strict else (NUMBER, None)
    if isinstance(value, (list, tuple)) and (strict or finite):
        return [_like(one, strict=strict, finite=finite) for one in value]
    if not strict:
        return Any
    if isinstance(value, bool):
        return (bool, None)
    if value is None:
        return (None, bool, NUMBER, Each(Any, Any))
    return next((kind for kind in (str, Mapping, Tensor) if isinstance(value, kind)), Any)


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
    mine = (optimizer.state.get(parameter) or {}).get(name)
    known = _is_known(optimizer)
    if not known and not isinstance(mine, Tensor):
        return
    if name in SCALARS or (isinstance(mine, Tensor) and mine.numel() == 1 and parameter.numel() != 1):
        check(value, COUNT if name == "step" else FINITE_NUMBER, path, StepError)
    elif value is not None:
        like = mine if isinstance(mine, Tensor) and not known else parameter
        _check_tensor(path, value, like)


def check_scheduler(scheduler: Any, state: object) -> None:
    """Check the saved state of `scheduler`; names with an underscore differ from version to version of torch."""
    if (state is None) is not (scheduler is None):
        raise StepError("the state was saved with a scheduler and this TrainStep has none, or the other way round")
    if scheduler is not None:
        own = type(scheduler).__module__.startswith("torch.optim")
        table = _table(scheduler.state_dict(), strict=own)
        check(state, table, "scheduler", StepError, "load the state of a scheduler of this kind; nothing was loaded")


def _table(mine: Mapping[Any, Any], *, strict: bool) -> dict[Any, Any]:
    """Return the schema of a scheduler's state; one that is not torch's may come to have more fields."""
    table: dict[Any, Any] = {} if strict else {...: Any}
    for name, value in mine.items():
        if isinstance(value, Mapping) and "last_epoch" in value:
            kind: Any = _table(value, strict=strict)
        elif strict and isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            kind = [_table(one, strict=strict) if isinstance(one, Mapping) else Any for one in value]
        else:
            kind = _like(value, strict=strict, finite=strict and name not in UNBOUNDED)
        optional = (str(name).startswith("_") and not isinstance(kind, list)) or name in LEGACY
        table[f"{name}?" if optional else name] = kind
    return table
