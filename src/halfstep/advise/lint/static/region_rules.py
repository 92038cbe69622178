"""Rules on regions: what stands in an autocast block that should not, and what an autocast is made with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.paths import MANAGERS
from halfstep.advise.lint.static.regions import Region, Site, all_sites, in_torch_regions, region_of
from halfstep.advise.lint.static.script import Script, argument, method, walked
from halfstep.advise.lint.static.values import PRODUCTS

IN_PLACE = re.compile(r"(addmm|addmv|addr|addbmm|baddbmm)_")
CROSS_ENTROPIES = frozenset({"torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"})

NO_DEVICE_TYPES = frozenset({"gpu", "nvidia", "tpu", "rocm"})
"""Words that no torch takes for a device type; a build may have types of its own, such as npu."""

DEPRECATED = re.compile(
    r"torch\.(cuda|cpu)\.amp\.(autocast|GradScaler|custom_fwd|custom_bwd)|torch\.cuda\.amp\.\w+\.GradScaler"
)


def _around_loop(site: Site, script: Script) -> bool:
    """Return whether a step of an optimizer is in a loop in a region of torch, which keeps low copies of weights."""
    region = site.place.torch_region
    if region is None or len(site.place.loops) <= region.loops or method(site.call) != "step":
        return False
    cached = argument(region.node, None, "cache_enabled")
    kept = not (isinstance(cached, ast.Constant) and not cached.value)
    return kept and script.owner(site.call) in script.optimizers | script.scalers.keys()


@check_of("HS019")
def _stale(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        if _around_loop(site, script):
            what = f"the region is around the loop whose line {site.call.lineno} steps the optimizer"
            yield Hit(site.place.regions[-1].node.lineno, what)


@check_of("HS018")
def _backward(script: Script) -> Iterator[Hit]:
    stale = {site.place.regions[-1] for site in all_sites(script) if _around_loop(site, script)}
    for region, site in in_torch_regions(script):
        call = site.call
        own = method(call) == "backward" and not call.args and not MANAGERS.search(script.owner(call))
        if region not in stale and (own or script.called(call) == "torch.autograd.backward"):
            yield Hit(call.lineno, f"the backward pass is in the region of line {region.node.lineno}")


@check_of("HS020")
def _no_grad(script: Script) -> Iterator[Hit]:
    first: dict[tuple[Region, str], int] = {}
    for region, site in in_torch_regions(script):
        name = script.called(site.call)
        if name not in script.models:
            continue
        if site.place.no_grad:
            first.setdefault((region, name), site.call.lineno)
        elif (region, name) in first:
            line = first.pop((region, name))
            yield Hit(line, f"`{name}` runs without gradients, then with them in line {site.call.lineno} of one region")


@check_of("HS023")
def _cross_entropy(script: Script) -> Iterator[Hit]:
    for region, site in in_torch_regions(script):
        if region.device != "cpu" and region.sure and script.operator(site.call) in CROSS_ENTROPIES:
            yield Hit(site.call.lineno, "binary_cross_entropy in a region raises on CUDA")


@check_of("HS024")
def _in_place(script: Script) -> Iterator[Hit]:
    for _, site in in_torch_regions(script):
        name, called = method(site.call), script.called(site.call)
        if IN_PLACE.fullmatch(name):
            yield Hit(site.call.lineno, f"`{name}` writes in place, and autocast leaves such operators alone")
        elif name and argument(site.call, None, "out") is not None and PRODUCTS.fullmatch(called):
            yield Hit(site.call.lineno, f"`{called}` with out=, which autocast leaves alone")


@check_of("HS025")
def _replicas(script: Script) -> Iterator[Hit]:
    for region, site in in_torch_regions(script):
        name = script.called(site.call)
        if region.dtype == "bf16" and region.device == "cuda" and script.makers(name) == {"torch.nn.DataParallel"}:
            yield Hit(site.call.lineno, f"`{name}` is a DataParallel, whose threads autocast to fp16")


@check_of("HS027")
def _function(script: Script) -> Iterator[Hit]:
    if not any(region_of(script, call) for call in script.calls):
        return
    for node in walked(script.tree):
        if isinstance(node, ast.ClassDef) and any(script.name(b) == "torch.autograd.Function" for b in node.bases):
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            decorators = [*node.decorator_list, *(d for m in methods.values() for d in m.decorator_list)]
            names = [script.called(decorator) or script.name(decorator) for decorator in decorators]
            cast = any(name.endswith(("custom_fwd", "custom_bwd", "halfstep.operator")) for name in names)
            if not cast and "backward" in methods and _multiplies(script, methods["backward"]):
                yield Hit(node.lineno, f"the backward pass of `{node.name}` multiplies, and nothing casts its operands")


def _multiplies(script: Script, backward: ast.FunctionDef) -> bool:
    if re.search(r"\.to\(|\.type_as\(|\.float\(|\.half\(|autocast", ast.unparse(backward)):
        return False
    nodes = walked(backward)
    by_call = any(PRODUCTS.fullmatch(script.called(n)) or method(n) in ("mm", "matmul", "bmm") for n in nodes)
    return by_call or any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for n in nodes)


@check_of("HS021")
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
    for inside, site in in_torch_regions(script):
        name = script.called(site.call)
        if inside.device == "cpu" and _on_cuda(script, name):
            what = f"`{name}` is on CUDA, and the region of line {inside.node.lineno} is for the CPU"
            yield Hit(site.call.lineno, what)


def _on_cuda(script: Script, name: str) -> bool:
    """Return whether the file moves a model to CUDA and nowhere else."""
    places = [
        "cuda" if method(call) == "cuda" else ast.unparse(call.args[0]).strip("'\"") if call.args else ""
        for call in (script.methods_of(name) if name in script.models else ())
        if method(call) in ("cuda", "to", "cpu")
    ]
    return bool(places) and all(re.fullmatch(r"cuda(:\d+)?", place) for place in places)


@check_of("HS022")
def _off(script: Script) -> Iterator[Hit]:
    for node in script.calls if script.uses_torch else ():
        region = region_of(script, node)
        if region is None or region.library != "torch" or not region.enabled or region.device not in ("cpu", "cuda"):
            continue
        if region.dtype in ("fp32", "fp64"):
            yield Hit(node.lineno, f"autocast to {region.dtype} is none: the block runs in the formats of its tensors")


@check_of("HS026")
def _deprecated(script: Script) -> Iterator[Hit]:
    tries = [node for node in walked(script.tree) if isinstance(node, ast.Try)]
    tries = [t for t in tries if any("torch.amp" in script.called(n) for s in t.body for n in walked(s))]
    fallback = {id(n) for block in tries for handler in block.handlers for n in walked(handler)}
    found: dict[str, list[int]] = {}
    for node in script.calls:
        if DEPRECATED.fullmatch(name := script.called(node)) and id(node) not in fallback:
            found.setdefault(name, []).append(node.lineno)
    for name, lines in found.items():
        first, *more = sorted(set(lines))
        also = f", also in line{'s' * (len(more) > 1)} {', '.join(map(str, more))}" if more else ""
        yield Hit(first, f"`{name}` is deprecated{also}")
