"""Checkpoints of others: torch.amp's recipe, Apex, accelerate and Lightning, as a state of a training step.

Files are read by ``torch.load(weights_only=True)``; none of these libraries is needed. What each has of a state is
collected into a `Found`, which `_state` makes a state of the step. The rest is returned as `extra`, and notes list what
was taken and what is missing. A checkpoint from which a run cannot go on is refused with the reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.arguments import Kind, whole
from halfstep.binding.wrappers import unwrap
from halfstep.checkpoints.files import read_state, refusal
from halfstep.checkpoints.generators import plain_states
from halfstep.errors import CheckpointError, lacks_memory
from halfstep.formats import LOW_DTYPES
from halfstep.schema import Each, check, packaged_toml, regular
from halfstep.step.saved import NUMBER, STATE

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

NAMES, WHY, FOLDERS = packaged_toml("checkpoints/foreign.toml").values()
"""Part -> keys under which loops save it; why a run cannot go on; what the name of a file begins with -> which why."""

SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Format -> dtype: https://huggingface.co/docs/safetensors (1 January 2026)."""

TENSOR = {
    "dtype": Kind("a format", lambda name: isinstance(name, str) and name in SAFETENSORS),
    "shape": [whole(), ...],
    "data_offsets": [whole(), whole()],
}


FOUND = {
    "kind": str,  # whose it is, for messages
    "model": Each(str, Any),  # weights by name
    # the state of a torch optimizer
    "optimizer": {"state": Each(Any, {"step?": NUMBER, ...: Any}), "param_groups": [Each(str, Any), ...], ...: Any},
    "scaler": (None, {}, {"scale": NUMBER, ...: Any}),  # the state of a torch.amp.GradScaler
    "scheduler": (None, Each(str, Any)),
    "updates": (None, whole()),
    "masters": (None, [[Tensor, ...], ...]),  # fp32 parameters by group: those that are low in `model`, or all
    "random": Any,  # as `generators.saved_states` returns them
    "extra": Any,  # all else
    "notes": [str, ...],  # what was left out
}


class Found(SimpleNamespace):
    """What a checkpoint has, by the names of `FOUND`; None: not there."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**dict.fromkeys(FOUND), "notes": [], **given})


def converted(
    step: TrainStep, place: Path, rank: int, ranks: int
) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any] | None, Any]:
    """Return (state of the step, notes, states of generators or None, extra) from a checkpoint of another library."""
    if place.is_dir():
        found = _folder(place, rank, ranks)
    else:
        content = read_state(place)
        if isinstance(content, Mapping) and {key for key in STATE if not key.endswith("?")} <= set(content):
            return dict(content), (), None, None  # what torch.save(step.state_dict(), path) wrote
        found = _file(place, content)
    return _state(step, found), tuple(found.notes), found.random, found.extra


def _file(place: Path, content: Any) -> Found:
    if not isinstance(content, Mapping):
        raise refusal(place, f"it holds a {type(content).__name__}, and a checkpoint is a dict")
    if "ds_version" in content or "ds_config" in content:
        raise refusal(place, WHY["deepspeed"])
    if "pytorch-lightning_version" in content:
        return _lightning(place, content)
    parts = {part: next((key for key in keys if key in content), None) for part, keys in NAMES.items()}
    taken = {part: content[key] for part, key in parts.items() if key is not None}
    if content and all(isinstance(value, Tensor) for value in content.values()):
        raise refusal(place, WHY["weights_alone"])
    if not isinstance(taken.get("model"), Mapping):
        known = ", ".join(NAMES["model"])
        keys = sorted(map(str, content))
        raise refusal(place, f"it has the keys {keys}, and none of them is the model's state_dict ({known})")
    if not isinstance(taken.get("optimizer"), Mapping):
        raise refusal(place, WHY["weights_alone"])
    others = {key: value for key, value in content.items() if key not in parts.values()}
    if type(taken.get("updates")) is not int:
        taken["updates"] = None
    found = Found(kind="torch.amp's recipe", **taken, extra=others)
    amp = others.get("amp")
    if isinstance(amp, Mapping) and any(re.fullmatch(r"loss_scaler\d+", str(key)) for key in amp):
        _apex(place, found, amp)
    if "fp32_from_fp16" in found.optimizer:
        _apex_fp16_optimizer(place, found)
    return found


def _apex(place: Path, found: Found, amp: Mapping[str, Any]) -> None:
    """Take what `amp.state_dict()` returned, and what loops save of the masters."""
    found.kind = "Apex"
    found.extra = {key: value for key, value in found.extra.items() if key != "amp"}
    first = amp.get("loss_scaler0")
    if not isinstance(first, Mapping) or "loss_scale" not in first:
        raise refusal(place, f"its 'amp' has no loss scale: {first!r}")
    found.scaler = {"scale": first["loss_scale"], "_growth_tracker": first.get("unskipped", 0)}
    if more := sorted(key for key in amp if key != "loss_scaler0"):
        found.notes.append(f"dropped: {', '.join(more)} (a TrainStep has one loss)")
    for key in ("master_params", "masters"):
        if isinstance(found.extra.get(key), (list, tuple)):
            found.masters = [list(found.extra.pop(key))]


def _apex_fp16_optimizer(place: Path, found: Found) -> None:
    """Take what `state_dict()` of apex.fp16_utils.FP16_Optimizer returned."""
    found.kind = "Apex (FP16_Optimizer)"
    outer = found.optimizer
    found.masters = [list(group) for group in outer["fp32_from_fp16"]]
    found.optimizer = outer["optimizer_state_dict"]
    scaler = outer.get("loss_scaler")
    if isinstance(scaler, Mapping) and "cur_scale" in scaler:
        found.scaler = {"scale": scaler["cur_scale"], "_growth_tracker": 0}
    else:
        found.notes.append("dropped: the loss scale, an object of Apex")


def _lightning(place: Path, content: Mapping[str, Any]) -> Found:
    optimizers, schedulers = content.get("optimizer_states") or [], content.get("lr_schedulers") or []
    if not optimizers:
        raise refusal(place, WHY["weights_alone"])
    for what, some in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len(some) > 1:
            raise refusal(place, f"it has {len(some)} {what}, and a TrainStep has one; load each by hand")
    taken = {"state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision", "global_step"}
    return Found(
        kind="Lightning",
        model=content["state_dict"],
        optimizer=optimizers[0],
        scaler=content.get("MixedPrecision"),
        scheduler=schedulers[0] if schedulers else None,
        updates=content.get("global_step"),
        extra={key: value for key, value in content.items() if key not in taken},
    )


MODEL, OPTIMIZER = r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)", r"optimizer(_\d+)?\.bin"


def _names(place: Path) -> list[str]:
    return sorted(path.name for path in (*place.glob("*"), *place.glob("*/*")))


def is_foreign(place: Path) -> bool:
    """Return whether a folder has files as checkpoints of other libraries have."""
    return any(re.match(pattern, name) for pattern in (*FOLDERS, MODEL, OPTIMIZER) for name in _names(place))


def _folder(place: Path, rank: int, ranks: int) -> Found:
    """Return what a folder has: one that accelerate's `save_state` wrote."""
    names = _names(place)
    for pattern, reason in FOLDERS.items():
        if any(re.match(pattern, name) for name in names):
            raise refusal(place, WHY[reason])
    models = [name for name in names if re.fullmatch(MODEL, name)]
    optimizers = [name for name in names if re.fullmatch(OPTIMIZER, name)]
    if not models or not optimizers:
        raise refusal(place, WHY["weights_alone"] if models else f"it has {', '.join(optimizers)} and no weights")
    if len(models) > 1 or len(optimizers) > 1:
        raise refusal(
            place, f"it has {len(models)} models and {len(optimizers)} optimizers, and a TrainStep has one of each"
        )
    weights = place / models[0]
    found = Found(
        kind="accelerate",
        model=_safetensors(weights) if weights.suffix == ".safetensors" else read_state(weights),
        optimizer=read_state(place / optimizers[0]),
        scaler=read_state(place / "scaler.pt") if "scaler.pt" in names else None,
        scheduler=read_state(place / "scheduler.bin") if "scheduler.bin" in names else None,
    )
    saved = sum(bool(re.fullmatch(r"random_states_\d+\.pkl", name)) for name in names)
    if saved == ranks:
        _accelerate_random(place / f"random_states_{rank}.pkl", found)
    elif saved:
        found.notes.append(f"dropped: the random states of {saved} processes, here there are {ranks}")
    known = re.compile(r"model.*|pytorch_model.*|optimizer.*|scaler\.pt|scheduler\.bin|random_states_.*")
    if others := [name for name in names if not known.fullmatch(name)]:
        found.notes.append(f"not read: {', '.join(others)}")
    return found


def _accelerate_random(place: Path, found: Found) -> None:
    numpy = sys.modules.get("numpy")
    allowed: AbstractContextManager[Any] = nullcontext()
    if numpy is not None:
        rebuild = numpy.empty(0).__reduce__()[0]  # what a pickled array is made by
        kinds = [numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32)), rebuild]
        allowed = torch.serialization.safe_globals(kinds)
    try:
        saved = read_state(place, allowed)
        own, numpy_state = saved["torch_manual_seed"], saved["numpy_random_seed"][1:]
        found.random = plain_states(own, saved["random_state"], numpy_state)
        if "torch_cuda_manual_seed" in saved:
            found.random["cuda"] = list(saved["torch_cuda_manual_seed"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        found.random = None
        found.notes.append(f"dropped: random states ({type(error).__name__}: {str(error).splitlines()[0]})")


def _safetensors(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a file in the format of safetensors: a length, a header in JSON, and their bytes."""
    try:
        regular(place, CheckpointError)
        data = bytearray(place.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        check(header, Each(str, Each(str, Any)), str(place), CheckpointError)
        check({**header, "__metadata__": {}}, Each(str, ({}, TENSOR)), str(place), CheckpointError)
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            dtype, shape = SAFETENSORS[entry["dtype"]], entry["shape"]
            part = data[begin + first : begin + last]
            raw = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, device="cpu")
            tensors[name] = raw.to(dtype).view(shape)
    except (OSError, ValueError, RuntimeError) as error:
        if lacks_memory(error):
            raise
        raise refusal(place, f"it is no file of safetensors, or damaged ({type(error).__name__}: {error})") from error
    return tensors


def _state(step: TrainStep, found: Found) -> dict[str, Any]:
    """Return a state of `step` with what was found, and its own values where nothing was; add notes."""
    check(vars(found), FOUND, "what was found", CheckpointError)
    taken, own = ["weights", "the optimizer's state"], step.state_dict()
    model, left = _fitted(found.model, own["model"], unwrap(step.model))
    masters = _masters(step, found, model)
    low = sorted({str(v.dtype) for v in model.values() if isinstance(v, Tensor) and v.dtype in LOW_DTYPES})
    if low and not masters:
        found.notes.append(
            f"weights were saved in {', '.join(low)}: what their fp32 values had beyond that is not there"
        )
    state = {**own, "model": model, "optimizer": _optimizer(step, found)}
    if step.scaler.is_enabled() and found.scaler:
        known = {key: value for key, value in own["scaler"].items() if key != "halfstep"}
        state["scaler"] = known | {key: value for key, value in found.scaler.items() if key in known}
        taken.append(f"the loss scale ({found.scaler['scale']:g})")
    elif step.scaler.is_enabled():
        found.notes.append(f"not there: a loss scale; it begins at {step.scaler.get_scale():g}")
    elif found.scaler:
        found.notes.append("dropped: the loss scale, which this policy has none of")
    if step.scheduler is not None and found.scheduler is not None:
        state["scheduler"] = dict(found.scheduler)
        taken.append("the scheduler")
    elif step.scheduler is not None:
        found.notes.append("not there: the state of the scheduler, which stays where it is")
    elif found.scheduler is not None:
        found.notes.append("dropped: the state of a scheduler, since the step has none")
    counted = [entry.get("step", 0) for entry in state["optimizer"]["state"].values()]
    updates = found.updates if found.updates is not None else max((int(one) for one in counted), default=0)
    state["step"] = updates * step.accumulate
    taken.append(f"{updates} updates, which is {state['step']} micro-batches")
    if masters:
        taken[0] = "weights (their fp32 masters)"
    if found.random is not None:
        taken.append("random states")
    if left:
        found.notes.append(f"dropped: {', '.join(left[:3])}{' and more' if len(left) > 3 else ''}, not of this model")
    if found.extra:
        found.notes.append(f"in `extra`: {', '.join(map(str, found.extra))}")
    found.notes.insert(0, f"a checkpoint of {found.kind}; taken: {', '.join(taken)}")
    return state


def _fitted(saved: Mapping[str, Any], own: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return the saved weights under the model's names, and the names of others.

    Wrappers put a prefix before all names ("module.", "model."); libraries save tied weights under one of their names.
    """
    first = next(iter(own), "")
    prefixes = sorted({name[: len(name) - len(first)] for name in saved if str(name).endswith(first)}, key=len)
    prefix = max(prefixes, key=lambda prefix: sum(prefix + name in saved for name in own), default="")
    fitted = {name: saved[prefix + name] for name in own if prefix + name in saved}
    tied = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name in fitted}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in own and name not in fitted and id(parameter) in tied:
            fitted[name] = fitted[tied[id(parameter)]]
    taken = {prefix + name for name in fitted}
    left = [str(name) for name in saved if name not in taken]
    if len(fitted) < len(own):  # it is another model: the checks of the state name what is missing
        return {str(name).removeprefix(prefix): value for name, value in saved.items()}, []
    return fitted, left


def _masters(step: TrainStep, found: Found, model: dict[str, Any]) -> bool:
    """Put fp32 masters in the place of weights; return whether there were any."""
    if found.masters is None:
        return False
    names = {id(p): name for name, p in unwrap(step.model).named_parameters()}
    groups = [[names[id(p)] for p in group["params"] if id(p) in names] for group in step.optimizer.param_groups]
    low = [[n for n in group if n in model and model[n].dtype in LOW_DTYPES] for group in groups]
    if len(found.masters) == 1 != len(groups):
        groups, low = [sum(groups, [])], [sum(low, [])]
    for wanted in (groups, low):
        if [len(group) for group in wanted] == [len(group) for group in found.masters]:
            for group, values in zip(wanted, found.masters, strict=True):
                model.update(zip(group, values, strict=True))
            return True
    raise CheckpointError(
        f"masters: {[len(group) for group in found.masters]} fp32 weights by group, and the optimizer has "
        f"{[len(group) for group in groups]} parameters, {[len(group) for group in low]} of them saved low; nothing "
        "was loaded"
    )


def _optimizer(step: TrainStep, found: Found) -> dict[str, Any]:
    saved = found.optimizer
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(step.optimizer.param_groups):
        return dict(saved)  # the checks of the state name what is wrong
    made, state = [], {number: dict(entry) for number, entry in saved.get("state", {}).items()}
    for own, group in zip(step.optimizer.param_groups, groups, strict=True):
        made.append({**{key: value for key, value in own.items() if key != "params"}, **group})
        if "step" in group and "step" not in own:  # Apex's fused optimizers count once for a group
            count = made[-1].pop("step")
            for number in group["params"]:
                if number in state:
                    state[number].setdefault("step", torch.tensor(float(count), device="cpu"))
        for key in [key for key in made[-1] if key not in own and key not in ("params", "initial_lr")]:
            del made[-1][key]
    return {"state": state, "param_groups": made}
