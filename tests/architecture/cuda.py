"""The checker of device names: which files may name CUDA in their code, as data, and a reader of syntax.

All other code asks for a device by `torch.accelerator`, `torch.get_device_module` and `halfstep.accelerators`, so that
it works on any device that torch has a place for. Docstrings and messages are not code; ``cuda_graph`` is a name of
halfstep's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.sources import nodes

ALLOWED: Mapping[str, str] = {
    "accelerators.py": "graphs are captured on CUDA alone, and fake CUDA tensors have no device to ask",
    "advise/lint/static/": "scripts that are read name it",
    "advise/plan/": "plans are made for CPUs and for cards that run CUDA",
    "cast/losses/linear_loss.py": "products with out_dtype= exist on CUDA alone",
    "cast/regions/autocast.py": "torch.autocast switches itself off for this type alone where its device is missing",
    "cast/rules/custom.py": "one of torch's dispatch keys",
    "cast/rules/dispatch.py": "torch tells the number of a current stream without an object for CUDA alone",
    "cli/doctor.py": "versions of CUDA and cuDNN, and tf32",
    "cli/plan.py": "plans are made for CPUs and for cards that run CUDA",
    "compat/megengine/tensor.py": "MegEngine's names of devices",
    "compat/torch_amp/": "torch.cuda.amp, and defaults of torch.amp",
    "kernels/choose.py": "the Triton kernels are for CUDA",
    "kernels/eager/torch_fused.py": "fake CUDA tensors have no kernels to ask for",
    "kernels/reference/cross_entropy.py": "CUDA kernels round what they write to out=; others were not tried",
    "kernels/triton/": "the Triton kernels are for CUDA",
    "policy/engines.py": "engines' configurations are written for CUDA",
    "policy/explain.py": "torch has one table for CPUs and one for all others, CUDA's",
    "policy/resolve.py": "formats by compute capability and AMD's architectures; the name of torch's second table",
    "scale/scaler.py": "torch's GradScaler switches itself off for this type alone where its device is missing",
    "checkpoints/foreign.py": "accelerate's name of saved generators",
    "step/loss.py": "torch.compile's CUDA graphs",
    "update/optimizer_step.py": "torch's fused optimizers were compared with the other forms on CPUs and CUDA",
    "step/graphs.py": "CUDA graphs",
    "tasks/machine.py": "settings of CUDA, cuDNN and NVIDIA's drivers",
    "tasks/speed.py": "tf32",
    "testing/fake_cuda.py": "the fake CUDA device",
}
"""File, or folder with a slash, below ``src/halfstep`` -> why it names CUDA."""

NAME = re.compile(r"(is_)?cuda(:\d+)?|CUDA\w*|cudagraph\w*", re.IGNORECASE)


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each attribute and whole string of a program that names CUDA; docstrings are left out."""
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and NAME.fullmatch(node.attr) and node.attr != "cuda_graph":
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            if node.value != "cuda_graph":
                yield node.lineno, node.value


@cache
def found(root: Path) -> Mapping[str, list[str]]:
    """Return the names in each file that names CUDA, as "line name"."""
    read = {path: list(names(path.read_text(encoding="utf-8"))) for path in sorted(root.rglob("*.py"))}
    return {
        path.relative_to(root).as_posix(): [f"{n} {name}" for n, name in hits] for path, hits in read.items() if hits
    }


def _covers(place: str, file: str) -> bool:
    return file == place or (place.endswith("/") and file.startswith(place))


def violations(root: Path, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return where files that are not allowed to name CUDA do, as "file:line name"."""
    strange = {file: hits for file, hits in found(root).items() if not any(_covers(place, file) for place in allowed)}
    return [f"{file}:{hit}" for file, hits in strange.items() for hit in hits]


def unused(root: Path, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return the places of `allowed` that do not name CUDA."""
    return [place for place in allowed if not any(_covers(place, file) for file in found(root))]
