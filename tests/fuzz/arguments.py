"""Wrong arguments of public entries: each is refused in words of halfstep's, and none is taken in silence.

`ENTRIES` has every name of `hs.__all__` that can be called, methods of its objects and names of other public packages,
with arguments that are right and, for each argument, the labels of `POOL` that it may have besides. Every other value
of the pool is given to it alone, and a `HalfstepError` must come back. `make fuzz-arguments` tries all of them and
prints what went wrong.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import halfstep as hs

__all__ = ["ENTRIES", "POOL", "SAMPLE", "cases", "check", "missing", "problem", "refused"]

SAMPLE = 40

POOL: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "zero": lambda: 0,
    "one": lambda: 1,
    "minus": lambda: -1,
    "huge": lambda: 10**30,
    "half": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "text": lambda: "nonsense",
    "empty": lambda: "",
    "nul": lambda: "a\0b",
    "bytes": lambda: b"bf16",
    "list": list,
    "numbers": lambda: [1, 2],
    "texts": lambda: ["nonsense"],
    "dict": dict,
    "object": object,
    "class": lambda: int,
    "function": lambda: lambda: None,
    "module": lambda: nn.Linear(1, 1),
    "tensor": lambda: torch.ones(3, 3),
    "array": lambda: np.ones(2),
    "complex": lambda: 1j,
    "dtype": lambda: torch.int32,
    "generator": lambda: (None for _ in range(0)),
}

NUMBER = frozenset({"one", "half", "zero", "huge"})
COUNT = frozenset({"one"})
WHOLE = frozenset({"one", "zero"})
POSITIVE = frozenset({"one", "half", "huge"})
FLAG = frozenset({"true"})
PATH = frozenset({"text"})
TEXT = frozenset({"text", "empty", "nul"})
CALLS = frozenset({"function", "class", "module"})  # called later, with what they may not take
GIVEN = frozenset({"list", "numbers", "texts", "array"})  # the model is given them, and says itself what it takes
NONE = frozenset({"none"})
ANY = frozenset(POOL)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A public entry.

    Attributes:
        call: calls it with named arguments; what it returns is not looked at.
        right: returns arguments that it takes, new for each call.
        may: argument -> labels of `POOL` that it takes too.
    """

    call: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    may: Mapping[str, frozenset[str]]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _trained(**settings: Any) -> dict[str, Any]:
    model = _model()
    return {"model": model, "optimizer": _adam(model), "loss_fn": _loss, **settings}


def _step() -> hs.TrainStep:
    return hs.TrainStep(**_trained(policy="O0"))


def _task(**changed: Any) -> hs.Task:
    return hs.Task(**{**_task_arguments(), **changed})


def _task_arguments() -> dict[str, Any]:
    return {
        "name": "small",
        "model": _model,
        "batches": lambda seed, step: (torch.ones(2, 4),),
        "loss_fn": _loss,
        "optimizer": _adam,
        "steps": 2,
        "excerpt_steps": 2,
    }


def _entered(manager: Any) -> None:
    with manager:
        pass


def _decorated(**named: Any) -> None:
    hs.operator(**named)(lambda x: x)


def _prepared() -> nn.Module:
    return hs.prepare(_model(), policy="O2")


def _scaled() -> tuple[hs.GradScaler, torch.optim.Optimizer]:
    model, scaler = _model(), hs.GradScaler()
    scaler.scale(_loss(model, torch.ones(2, 4))).backward()
    return scaler, _adam(model)


class _Writer:
    def add_scalar(self, *args: Any, **named: Any) -> None:
        """Take a curve's value."""

    def add_histogram_raw(self, *args: Any, **named: Any) -> None:
        """Take a histogram."""


@cache
def _folder() -> str:
    return tempfile.mkdtemp()


def _scaler() -> dict[str, Any]:
    return {"device": "cpu", "init_scale": 4.0}


ENTRIES: Mapping[str, Entry] = {
    "hs.BlackBox": Entry(
        call=hs.BlackBox,
        right=_trained,
        may={"model": frozenset({"module"}), "loss_fn": CALLS - {"class"}, "optimizer": NONE, "evidence": NONE | PATH},
    ),
    "hs.ExponentSketch": Entry(
        call=hs.ExponentSketch,
        right=dict,
        may={
            "exponents": frozenset({"dict"}), "powers": frozenset({"dict"}), "zeros": WHOLE, "infs": WHOLE,
            "nans": WHOLE, "negatives": WHOLE, "largest": NUMBER, "smallest": NUMBER | {"inf"},
        },
    ),
    "hs.GradScaler": Entry(
        call=hs.GradScaler,
        right=_scaler,
        may={
            "device": NONE, "init_scale": POSITIVE, "growth_factor": frozenset({"huge"}),
            "backoff_factor": frozenset({"half"}),
            "growth_interval": COUNT, "enabled": FLAG | WHOLE, "rule": NONE, "floor": NONE | NUMBER,
            "ceiling": NONE | POSITIVE, "hysteresis": COUNT,
        },
    ),
    "hs.Lion": Entry(
        call=hs.Lion,
        right=lambda: {"params": _model().parameters()},
        may={
            "params": frozenset({"tensor"}), "lr": NUMBER, "betas": frozenset(), "weight_decay": NUMBER,
            "maximize": FLAG,
        },
    ),
    "hs.Loss": Entry(
        call=lambda **given: hs.Loss(**given).mean(),
        right=lambda: {"sum": torch.ones((), requires_grad=True), "weight": 3},
        may={"sum": frozenset(), "weight": NUMBER, "aux": ANY},
    ),
    "hs.mismatch": Entry(
        call=hs.mismatch,
        right=lambda: {"trainer": _model(), "batch": (torch.ones(2, 4),), "log_probs": lambda model, x: model(x)},
        may={
            "trainer": frozenset({"module"}), "batch": frozenset({"list"}), "log_probs": frozenset(),
            "sampler": frozenset(), "clip": POSITIVE,
        },
    ),
    "hs.warm": Entry(
        call=hs.warm,
        right=lambda: {"model": (m := _model()), "optimizer": _adam(m), "policy": "O0"},
        may={"model": frozenset(), "optimizer": frozenset(), "policy": frozenset(), "clip_norm": NONE | POSITIVE},
    ),
    "hs.Monitor": Entry(
        call=hs.Monitor,
        right=lambda: {"target": (m := _model()), "optimizer": _adam(m), "format": "bf16"},
        may={
            "target": frozenset(), "optimizer": frozenset(), "every": COUNT, "weights": FLAG, "activations": FLAG,
            "format": frozenset(), "scaler": NONE,
        },
    ),
    "hs.Policy": Entry(
        call=hs.Policy,
        right=dict,
        may={"name": TEXT, **dict.fromkeys(
            ("dtype", "params", "norms", "master", "grads", "table", "residual", "loss", "outputs", "inputs"),
            frozenset(),
        )},
    ),
    "hs.Policy.of": Entry(
        call=lambda spec: hs.Policy.of(spec), right=lambda: {"spec": "mixed"}, may={"spec": frozenset()}
    ),
    "hs.ScaleRule": Entry(
        call=hs.ScaleRule,
        right=dict,
        may={
            "init": POSITIVE, "growth": frozenset({"one", "huge"}), "backoff": frozenset({"half", "one"}),
            "interval": COUNT, "floor": NUMBER,
            "ceiling": frozenset({"huge"}), "hysteresis": COUNT, "refill": frozenset(), "divide": FLAG, "delay": WHOLE,
            "tolerance": NUMBER, "at_floor": frozenset(), "patience": WHOLE, "guard": FLAG, "kept": frozenset(),
        },
    ),
    "hs.SketchWriter": Entry(call=hs.SketchWriter, right=lambda: {"target": _Writer()}, may={"target": PATH}),
    "hs.Task": Entry(
        call=hs.Task,
        right=_task_arguments,
        may={
            "name": TEXT - {"empty"}, "model": CALLS, "batches": CALLS, "loss_fn": CALLS, "optimizer": CALLS,
            "metric": NONE, "scheduler": NONE | CALLS, "metric_name": TEXT, "higher_is_better": FLAG,
            "margin": NONE, "relative_margin": FLAG, "steps": COUNT, "excerpt_steps": COUNT,
            "clip_norm": NONE | POSITIVE, "about": TEXT,
        },
    ),
    "hs.TrainStep": Entry(
        call=hs.TrainStep,
        right=_trained,
        may={
            "model": frozenset(), "optimizer": frozenset(), "loss_fn": CALLS - {"class"}, "policy": NONE,
            "clip_norm": NONE | POSITIVE, "clip_value": NONE | POSITIVE, "accumulate": COUNT, "scaler": NONE,
            "scheduler": NONE, "compile": NONE | {"dict", "true"}, "cuda_graph": frozenset(), "blackbox": FLAG | PATH,
            "retry": FLAG | WHOLE, "update_in_backward": FLAG, "state": frozenset(),
        },
    ),
    "hs.audit": Entry(
        call=hs.audit,
        right=lambda: {**_trained(), "batches": [(torch.ones(2, 4),)], "steps": 1},
        may={
            "model": frozenset(), "batches": GIVEN - {"list"}, "loss_fn": frozenset({"module"}), "policy": NONE,
            "optimizer": NONE,
            "steps": COUNT, "clip_norm": NONE | POSITIVE, "accumulate": COUNT, "scaler": NONE, "shadow": frozenset(),
            "reference": FLAG,
        },
    ),
    "hs.autocast": Entry(
        call=lambda **named: _entered(hs.autocast(**named)),
        right=lambda: {"device_type": "cpu"},
        may={
            "device_type": frozenset(), "dtype": NONE, "enabled": FLAG | WHOLE, "policy": NONE,
            "cache_enabled": NONE | FLAG | WHOLE,
        },
    ),
    "hs.edit_weights": Entry(
        call=lambda **named: _entered(hs.edit_weights(**named)),
        right=lambda: {"model": _prepared()},
        may={"model": frozenset()},
    ),
    "hs.exported": Entry(
        call=hs.exported,
        right=lambda: {"model": _model(), "args": (torch.ones(2, 4),), "policy": "O0"},
        may={
            "model": frozenset({"module"}), "args": GIVEN, "kwargs": NONE | {"dict"}, "policy": frozenset(),
            "dynamic_shapes": ANY,
        },
    ),
    "hs.linear_cross_entropy": Entry(
        call=hs.linear_cross_entropy,
        right=lambda: {
            "input": torch.ones(2, 4), "linear_weight": torch.ones(3, 4), "target": torch.zeros(2, dtype=torch.long),
        },
        may={
            "input": frozenset(), "linear_weight": frozenset(), "target": frozenset(), "linear_bias": NONE,
            "weight": NONE, "reduction": frozenset(), "ignore_index": NONE | {"one", "zero", "minus"},
            "label_smoothing": NUMBER - {"huge"}, "chunk": NONE | COUNT, "recompute": FLAG,
        },
    ),
    "hs.lint": Entry(
        call=hs.lint,
        right=lambda: {"target": __file__},
        may={"target": frozenset(), "policy": frozenset(), "ignore": frozenset({"list", "dict", "generator"})},
    ),
    "hs.load": Entry(
        call=hs.load,
        right=lambda: {"step": _step(), "path": _folder(), "missing_ok": True},
        may={"step": frozenset(), "path": PATH, "missing_ok": FLAG},
    ),
    "hs.lowered": Entry(
        call=hs.lowered,
        right=lambda: {"model": _model(), "policy": "pure"},
        may={"model": frozenset({"module"}), "policy": frozenset()},
    ),
    "hs.on_preemption": Entry(
        call=lambda **named: _entered(hs.on_preemption(**named)),
        right=lambda: {"step": _step(), "path": _folder()},
        may={
            "step": frozenset(), "path": PATH, "keep": NONE | COUNT, "extra": NONE | CALLS,
            "signals": frozenset({"one", "numbers"}),
        },
    ),
    "hs.operator": Entry(
        call=_decorated,
        right=lambda: {"rule": "fp32"},
        may={"rule": frozenset(), "backward": frozenset({"empty"}), "name": frozenset({"empty"})},
    ),
    "hs.plan": Entry(
        call=hs.plan,
        right=lambda: {"what": _model, "batch": (torch.ones(2, 4),), "loss_fn": _loss, "optimizer": _adam},
        may={
            "what": frozenset({"module"}), "batch": frozenset(), "loss_fn": frozenset(), "optimizer": frozenset(),
            "policy": frozenset(), "device": frozenset(), "devices": COUNT, "shard": frozenset(),
        },
    ),
    "hs.prepare": Entry(
        call=hs.prepare,
        right=lambda: {"models": _model()},
        may={"models": frozenset({"module"}), "optimizers": NONE | {"list"}, "policy": frozenset()},
    ),
    "hs.prepared_policy": Entry(
        call=hs.prepared_policy, right=lambda: {"model": _model()}, may={"model": frozenset({"module"})}
    ),
    "hs.resolve": Entry(
        call=hs.resolve,
        right=lambda: {"policy": hs.Policy.of("mixed"), "model": _model()},
        may={
            "policy": frozenset(), "model": frozenset({"module"}), "device_type": NONE, "one_pass": NONE | FLAG,
        },
    ),
    "hs.save": Entry(
        call=hs.save,
        right=lambda: {"step": _step(), "path": _folder()},
        may={
            "step": frozenset(), "path": PATH, "keep": NONE | COUNT, "wait": FLAG,
            "extra": frozenset({
                "none", "true", "zero", "one", "minus", "huge", "half", "nan", "inf", "text", "empty", "nul", "bytes",
                "list", "numbers", "texts", "dict", "tensor", "complex", "dtype",
            }),
        },
    ),
    "hs.shard": Entry(
        call=hs.shard,
        right=lambda: {"model": _model(), "policy": "pure"},
        may={"model": frozenset(), "policy": frozenset(), "units": frozenset(), "init": frozenset()},
    ),
    "hs.suspended": Entry(call=lambda **named: _entered(hs.suspended(**named)), right=dict, may={}),
    "hs.tune": Entry(
        call=hs.tune,
        right=lambda: {"task": _task(), "minutes": 1e-9, "compile": False},
        may={
            "task": frozenset(), "target": frozenset(), "max_loss_rise": NONE | POSITIVE, "minutes": frozenset(),
            "device": frozenset({"empty"}), "seed": WHOLE | {"minus"}, "seeds": WHOLE,
            "dtypes": frozenset({"list", "generator"}),
            "compile": FLAG, "resume": NONE | PATH, "on_progress": CALLS, "clock": CALLS,
        },
    ),
    "hs.unprepare": Entry(call=hs.unprepare, right=lambda: {"model": _prepared()}, may={"model": frozenset()}),
    "TrainStep.metrics": Entry(
        call=lambda **named: _step().metrics(**named), right=dict, may={"every": COUNT, "to": NONE | {"tensor"}}
    ),
    "TrainStep.load_state_dict": Entry(
        call=lambda **named: _step().load_state_dict(**named),
        right=lambda: {"state": _step().state_dict()},
        may={"state": frozenset()},
    ),
    "GradScaler.scale": Entry(
        call=lambda **named: hs.GradScaler().scale(**named),
        right=lambda: {"outputs": torch.ones(())},
        may={"outputs": frozenset({"tensor", "list", "dict", "generator"})},
    ),
    "GradScaler.unscale_": Entry(
        call=lambda **named: _scaled()[0].unscale_(**{"optimizer": _scaled()[1], **named}),
        right=dict,
        may={"optimizer": frozenset()},
    ),
    "GradScaler.load_state_dict": Entry(
        call=lambda **named: hs.GradScaler().load_state_dict(**named),
        right=lambda: {"state_dict": hs.GradScaler().state_dict()},
        may={"state_dict": frozenset()},
    ),
    "Policy.with_ops": Entry(
        call=lambda **named: hs.Policy.of("mixed").with_ops(**named),
        right=dict,
        may={"fp32": frozenset({"list", "dict", "generator"}), "low": frozenset({"list", "dict", "generator"})},
    ),
    "Policy.with_modules": Entry(
        call=lambda **named: hs.Policy.of("mixed").with_modules(**named),
        right=lambda: {"rules": {"head": "fp32"}},
        may={"rules": frozenset({"dict"})},
    ),
    "Policy.from_toml": Entry(
        call=hs.Policy.from_toml,
        right=lambda: {"text": hs.Policy.of("mixed").to_toml()},
        may={"text": frozenset({"empty"})},
    ),
    "hs.policy.units": Entry(
        call=hs.policy.units,
        right=lambda: {"device_type": "cpu"},
        may={"device_type": frozenset({"list", "numbers", "texts", "dict", "array"})},  # which its cache cannot hash
    ),
    "hs.policy.operator_names": Entry(
        call=hs.policy.operator_names, right=lambda: {"pattern": "softmax"}, may={"pattern": frozenset()}
    ),
    "hs.policy.operator_name": Entry(
        call=hs.policy.operator_name, right=lambda: {"function": torch.softmax}, may={"function": ANY}
    ),
    "hs.lens.replay": Entry(
        call=hs.lens.replay,
        right=lambda: {"file": "evidence", "task": _task()},
        may={"file": frozenset(), "task": frozenset()},
    ),
    "hs.lens.Tracer": Entry(
        call=partial(hs.lens.Tracer, hs.lens.Sink()),
        right=lambda: {"model": _model()},
        may={"model": frozenset({"module", "none"})},
    ),
    "hs.formats.format_of": Entry(
        call=hs.formats.format_of, right=lambda: {"what": "bf16"}, may={"what": frozenset()}
    ),
    "hs.formats.float64_of": Entry(
        call=hs.formats.float64_of,
        right=lambda: {"tensor": torch.ones(2)},
        may={"tensor": frozenset({"tensor"}), "copy": FLAG},
    ),
}  # fmt: skip
"""Public entry -> how to call it, and what it takes."""


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield every (entry, argument, label of a wrong value)."""
    for name, entry in ENTRIES.items():
        for argument, fine in entry.may.items():
            yield from ((name, argument, label) for label in POOL if label not in fine)


def problem(name: str, argument: str, label: str) -> str:
    """Return "" if the wrong value is refused in words, else what happened."""
    entry, where = ENTRIES[name], f"{name}({argument}={label})"
    try:
        arguments = {**entry.right(), argument: POOL[label]()}
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            entry.call(**arguments)
    except hs.HalfstepError as error:
        return "" if str(error) else f"{where} gives an empty {type(error).__name__}"
    except Exception as error:  # what a user would see
        return f"{where} gives {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return f"{where} is accepted"


def refused(name: str) -> str:
    """Return "" if the entry takes the arguments that are right, else the error."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            ENTRIES[name].call(**ENTRIES[name].right())
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    return ""


def check(seed: int) -> str:
    """Return what is wrong with one case."""
    chosen = random.Random(seed).choice(_cases())
    return problem(*chosen)


@cache
def _cases() -> list[tuple[str, str, str]]:
    return list(cases())


def missing() -> list[str]:
    """Return the names of `hs.__all__` that can be called and have no entry, and the arguments that have no kinds."""
    found = [f"hs.{name}" for name in hs.__all__ if f"hs.{name}" not in ENTRIES and name != "HalfstepError"]
    for name, entry in ENTRIES.items():
        if name.startswith("hs.") and name.count(".") == 1:
            named = inspect.signature(getattr(hs, name[3:])).parameters.values()
            wanted = {p.name for p in named if p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL}}
            if name not in {"hs.Policy", "hs.plan"}:
                found += [f"{name}({one})" for one in sorted(wanted - set(entry.may))]
    return found


def main() -> int:
    """Try every case; return 1 if something is wrong."""
    torch.set_num_threads(1)
    only = sys.argv[1:]
    tried, raw, accepted = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("evidence").mkdir()
        for name, argument, label in _cases():
            if only and not any(one in name for one in only):
                continue
            found = problem(name, argument, label)
            tried += 1
            accepted += found.endswith("accepted")
            raw += bool(found) and not found.endswith("accepted")
            if found:
                print(found, flush=True)
    print(f"{tried} wrong arguments of {len(ENTRIES)} public entries: {raw} raw errors, {accepted} accepted")
    return 1 if raw or accepted else 0


if __name__ == "__main__":
    sys.exit(main())
