"""Rules on what an autocast is made with: its device type, its format, the name of its constructor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.regions import all_sites, argument, region_of
from halfstep.advise.lint.static.script import Script, walked

__all__ = ["REGION_ARGUMENT_RULES"]

NO_DEVICE_TYPES = frozenset({"gpu", "nvidia", "tpu", "rocm"})
"""Words that no torch takes for a device type; a build may have types of its own, such as npu."""

DEPRECATED = re.compile(
    r"torch\.(cuda|cpu)\.amp\.(autocast|GradScaler|custom_fwd|custom_bwd)|torch\.cuda\.amp\.\w+\.GradScaler"
)


def _device(script: Script) -> Iterator[Hit]:
    for node in script.calls if script.uses_torch else ():
        region = region_of(script, node)
        if region is None or region.library != "torch" or re.search(r"(cuda|cpu)\.amp", script.called(node)):
            continue
        device = argument(region.node, 0, "device_type")
        value = script.constant(device)
        if device is None and not any(keyword.arg is None for keyword in region.node.keywords) and not region.node.args:
            yield Hit(region.node.lineno, "torch.autocast is given no device type")
        elif region.device.lower().partition(":")[0] in NO_DEVICE_TYPES or region.device != region.device.lower():
            yield Hit(region.node.lineno, f"torch has no device type {region.device!r}")
        elif device is not None and value is not None and script.called(value) == "torch.device":
            yield Hit(region.node.lineno, f"`{ast.unparse(device)}` is a torch.device, and autocast takes its `.type`")
    for site in all_sites(script):
        region, name = site.place.torch_region, script.called(site.call)
        if region is not None and region.device == "cpu" and _on_cuda(script, name):
            yield Hit(
                site.call.lineno, f"`{name}` is on CUDA, and the region of line {region.node.lineno} is for the CPU"
            )


def _on_cuda(script: Script, name: str) -> bool:
    """Return whether the file moves a model to CUDA and nowhere else."""
    places = [
        "cuda" if call.func.attr == "cuda" else ast.unparse(call.args[0]).strip("'\"") if call.args else ""
        for call in (script.methods_of(name) if name in script.models else ())
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("cuda", "to", "cpu")
    ]
    return bool(places) and all(re.fullmatch(r"cuda(:\d+)?", place) for place in places)


def _off(script: Script) -> Iterator[Hit]:
    for node in script.calls if script.uses_torch else ():
        region = region_of(script, node)
        if region is not None and region.library == "torch" and region.enabled:
            if region.dtype in ("fp32", "fp64") and region.device in ("cpu", "cuda"):
                yield Hit(
                    node.lineno, f"autocast to {region.dtype} is none: the block runs in the formats of its tensors"
                )


def _deprecated(script: Script) -> Iterator[Hit]:
    fallback = {
        id(n)
        for block in walked(script.tree)
        if isinstance(block, ast.Try)
        and "torch.amp" in " ".join(script.called(n) for s in block.body for n in walked(s))
        for handler in block.handlers
        for n in walked(handler)
    }
    found: dict[str, list[int]] = {}
    for node in script.calls:
        if DEPRECATED.fullmatch(name := script.called(node)) and id(node) not in fallback:
            found.setdefault(name, []).append(node.lineno)
    for name, lines in found.items():
        first, *more = sorted(set(lines))
        also = f", also in line{'s' * (len(more) > 1)} {', '.join(map(str, more))}" if more else ""
        yield Hit(first, f"`{name}` is deprecated{also}")


REGION_ARGUMENT_RULES = (
    Rule(
        code="HS021",
        severity="error",
        title="autocast for a device that is not there",
        why="torch raises, or the region is for another device than the model's and changes nothing.",
        fix='Pass a device type: "cuda", "cpu", or `device.type` of a torch.device.',
        bad="""
import torch

device = torch.device('cuda', 0)
with torch.autocast(device, torch.bfloat16):
    model(x)
""",
        good="""
import torch

device = torch.device('cuda', 0)
with torch.autocast(device.type, torch.bfloat16):
    model(x)
""",
        check=_device,
    ),
    Rule(
        code="HS022",
        severity="warning",
        title="autocast to a format that turns it off",
        why="torch warns and runs the block without autocast.",
        fix="Write enabled=False for a block in the formats of its tensors, and cast the tensors with .float().",
        bad="""
import torch

with torch.autocast("cuda", dtype=torch.float32):
    y = model(x)
""",
        good="""
import torch

with torch.autocast("cuda", enabled=False):
    y = model(x.float())
""",
        check=_off,
    ),
    Rule(
        code="HS026",
        severity="note",
        title="names of torch.cuda.amp",
        why="torch warns at each of them; its new names are for all devices.",
        fix='Use torch.amp: autocast("cuda", ...), GradScaler("cuda"), custom_fwd(device_type="cuda").',
        bad="""
import torch

scaler = torch.cuda.amp.GradScaler()
""",
        good="""
import torch

scaler = torch.amp.GradScaler("cuda")
""",
        check=_deprecated,
    ),
)
