"""GPUs by name: their memory and their low formats, read from `gpus.toml`. In: a name. Out: a `Gpu`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from halfstep.advise.plan.parts import PlanError
from halfstep.errors import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GIB", "Gpu", "gpu_named", "gpu_names"]

GIB = 2**30

CONTEXT = 0.6
"""GiB that a process takes besides what torch allocates: the driver's context and loaded kernels.

Seen: 0.25 GiB for a bare context on an RTX 3090 (https://github.com/invoke-ai/InvokeAI/issues/9413), 0.54 GiB on an
RTX PRO 6000 (https://github.com/ggml-org/llama.cpp/pull/23604), 0.6 GiB in logs of an H200. NCCL's buffers come on top.
"""

ALIASES = {"a100": "a100-80", "v100": "v100-32", "a10": "a10g"}
"""What a card of several sizes means without one: the larger; a verdict names the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        name: as `hs.plan` takes it.
        title: the maker's name.
        sold: gigabytes, as advertised; 0 for a size given by hand.
        total: GiB that the driver gives to a process.
        formats: low formats with matrix units.
        source: the maker's page.
        seen: where `total` was printed.
    """

    name: str
    title: str
    sold: float
    total: float
    formats: tuple[str, ...]
    source: str = ""
    seen: str = ""

    @property
    def usable(self) -> int:
        """Return the bytes that torch can allocate: the total without the driver's context."""
        return int((self.total - CONTEXT) * GIB)


@cache
def _table() -> dict[str, Gpu]:
    text = files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return {name: Gpu(name=name, **{**row, "formats": tuple(row["formats"])}) for name, row in rows.items()}


def gpu_names() -> tuple[str, ...]:
    """Return the names in the table."""
    return tuple(_table())


def gpu_named(name: str) -> Gpu:
    """Return the GPU called `name` in any case ("h200", "A100-80"), or one with a size given as "96GiB".

    Raises:
        PlanError: there is none; the message names the nearest, and all.
    """
    wanted = re.sub(r"^(nvidia|amd|geforce|rtx|tesla|instinct)[ -]*", "", name.strip().lower())
    wanted = re.sub(r"^(rtx)[ -]*", "", wanted).replace(" ", "-").removesuffix("gb")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in _table():
        return _table()[wanted]
    size = re.fullmatch(r"(\d+(?:\.\d+)?)-?gib", wanted)
    if size is not None and float(size[1]) > CONTEXT:
        return Gpu(name=name, title=f"a GPU with {size[1]} GiB", sold=0, total=float(size[1]), formats=("bf16", "fp16"))
    raise PlanError(
        f"unknown GPU {name!r}{did_you_mean(wanted, _table())}; there are {', '.join(_table())}, and a size such as "
        "96GiB for another one (what torch prints as its total capacity)"
    )
