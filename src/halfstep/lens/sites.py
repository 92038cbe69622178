"""Sites: where an operator was called, and by which public name the user knows it."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from halfstep.cast.regions.autocast import autocast, decorated
from halfstep.cast.state import STATE
from halfstep.errors import PolicyError
from halfstep.policy.operators import canonical, known, operator_name
from halfstep.policy.policy import Policy

__all__ = [
    "RUNS_BACKWARD",
    "TAG",
    "Site",
    "line_of",
    "name_of_node",
    "ours",
    "pointwise",
    "public",
    "region_here",
    "spelled",
    "tag",
    "user_frame",
]

TAG = "halfstep.site"
TORCH = str(Path(torch.__file__).parent) + os.sep
HERE = str(Path(__file__).parent.parent) + os.sep
OWN = tuple(HERE + part for part in ("cast", "compat", "kernels", "lens", "policy", "scale", "step", "weights"))
ENGINE = "_engine_run_backward"

RUNS_BACKWARD = frozenset({"backward", "grad"})
"""Functions of torch.autograd that report themselves to modes as operators do, and call everything else."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operator was called: its public short name, the module, the user's line, the phase."""

    op: str
    module: str
    line: str
    phase: str = "forward"
    call: int = 0  # how often the module had been entered, for modules called several times


@lru_cache(maxsize=4096)
def spelled(func: Callable[..., Any]) -> str:
    """Return the public short name of a function that a mode received."""
    name = operator_name(func)
    if name is not None:
        return name
    raw = getattr(func, "__name__", str(func))
    if raw.startswith("__i") and raw.endswith("__"):
        raw = raw[3:-2]
    return public(raw)


def public(raw: str) -> str:
    """Return the operator that an in-place, private or aten name belongs to."""
    for word in (raw, raw.strip("_"), raw.strip("_").removesuffix("_backward")):
        if word in known():
            return word
        try:
            return canonical(word)
        except PolicyError:  # no operator of this name
            continue
    return raw.strip("_") or raw


@lru_cache(maxsize=1024)
def pointwise(op: str) -> bool:
    """Return whether each element of the operator's result comes from the elements in its place alone."""
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def region_here() -> Policy | None:
    """Return the policy of the `hs.autocast` that is the innermost region here, None if another is or none."""
    owner = STATE.frames[-1].owner() if STATE.frames else None
    return owner.recipe.policy if isinstance(owner, (autocast, decorated)) else None


@cache
def ours(filename: str) -> bool:
    """Return whether a file is torch's or of halfstep's machinery."""
    return filename.startswith((TORCH, "<frozen")) or filename.startswith(OWN) or filename == HERE + "trees.py"


def user_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Return the innermost frame of the user above `frame`, and whether the autograd engine lies between."""
    engine = False
    while frame is not None:
        name = frame.f_code.co_filename
        if not ours(name):
            return frame, engine
        engine = engine or frame.f_code.co_name == ENGINE
        frame = frame.f_back
    return None, engine


def line_of(frame: FrameType | None) -> str:
    """Return where a frame is: "file.py:12 text"."""
    if frame is None:
        return ""
    filename, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(filename, number).strip()
    return f"{os.path.basename(filename)}:{number} {text}".rstrip()


def name_of_node(name: str) -> str:
    """Return what an autograd node belongs to: "MulBackward0" -> "mul"; a custom Function's name stays."""
    stem = name.rsplit("::", 1)[-1].rstrip("0123456789")
    stem = stem.removesuffix("Backward")
    word = "".join(("_" if c.isupper() and i else "") + c.lower() for i, c in enumerate(stem))
    name = public(word)
    return name if name in known() else stem


def tag(tensor: Tensor, site: Site) -> None:
    """Write `site` into the autograd nodes that lead to `tensor` and that no earlier call made."""
    todo: list[Any] = [tensor.grad_fn]  # torch types a node's metadata as a method
    while todo:
        node = todo.pop()
        if node is None or TAG in node.metadata or node.name().endswith("AccumulateGrad"):
            continue
        node.metadata[TAG] = site
        todo += [following for following, _ in node.next_functions]
