"""Rules on regions: what stands in an autocast block that should not, and what an autocast is made with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import BACKWARD, FORWARD, SCALED, STEP, UPDATE, ZERO, loop
from halfstep.advise.lint.static.low_values import PRODUCTS
from halfstep.advise.lint.static.paths import MANAGERS
from halfstep.advise.lint.static.regions import Region, Site, argument, region_of, sites
from halfstep.advise.lint.static.script import Script

__all__ = ["AUTOCASTING_RULES"]

NO_DEVICE_TYPES = frozenset({"gpu", "nvidia", "tpu", "rocm"})
"""Words that no torch takes for a device type; a build may have types of its own, such as npu."""

DEPRECATED = re.compile(
    r"torch\.(cuda|cpu)\.amp\.(autocast|GradScaler|custom_fwd|custom_bwd)|torch\.cuda\.amp\.\w+\.GradScaler"
)

IN_PLACE = re.compile(r"(addmm|addmv|addr|addbmm|baddbmm)_")


def _sites(script: Script) -> Iterator[Site]:
    for function in script.functions if script.uses_torch else ():
        yield from sites(script, function)


def _torch_region(site: Site) -> Region | None:
    """Return the innermost region of torch.autocast, if the site is in one that is on."""
    region = site.place.region
    return region if region is not None and region.library == "torch" else None


def _is_backward(call: ast.Call, script: Script) -> bool:
    if script.called(call) == "torch.autograd.backward":
        return True
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward" or call.args:
        return False
    return not MANAGERS.search(script.name(call.func.value))


def _around_loop(site: Site, script: Script) -> bool:
    """Return whether a step of an optimizer is in a loop in a region of torch, which keeps low copies of weights."""
    region = _torch_region(site)
    if region is None or len(site.place.loops) <= region.loops or not isinstance(site.call.func, ast.Attribute):
        return False
    cached = argument(region.node, None, "cache_enabled")
    owner = script.name(site.call.func.value)
    return (
        site.call.func.attr == "step"
        and owner in script.optimizers | script.scalers.keys()
        and not (isinstance(cached, ast.Constant) and not cached.value)
    )


def _stale(script: Script) -> Iterator[Hit]:
    for site in _sites(script):
        if _around_loop(site, script):
            region = site.place.regions[-1]
            yield Hit(
                region.node.lineno, f"the region is around the loop whose line {site.call.lineno} steps the optimizer"
            )


def _backward(script: Script) -> Iterator[Hit]:
    stale = {site.place.regions[-1] for site in _sites(script) if _around_loop(site, script)}
    for site in _sites(script):
        region = _torch_region(site)
        if region is not None and region not in stale and _is_backward(site.call, script):
            yield Hit(site.call.lineno, f"the backward pass is in the region of line {region.node.lineno}")


def _no_grad(script: Script) -> Iterator[Hit]:
    first: dict[tuple[Region, str], int] = {}
    for site in _sites(script):
        region, name = _torch_region(site), script.called(site.call)
        if region is None or name not in script.models:
            continue
        if site.place.no_grad:
            first.setdefault((region, name), site.call.lineno)
        elif (region, name) in first:
            line = first.pop((region, name))
            yield Hit(line, f"`{name}` runs without gradients, then with them in line {site.call.lineno} of one region")


def _device(script: Script) -> Iterator[Hit]:
    for node in ast.walk(script.tree) if script.uses_torch else ():
        region = region_of(script, node) if isinstance(node, ast.Call) else None
        if (
            region is None
            or region.library != "torch"
            or "cuda.amp" in script.called(node)
            or "cpu.amp" in script.called(node)
        ):
            continue
        device = argument(region.node, 0, "device_type")
        value = script.constant(device)
        if device is None and not any(keyword.arg is None for keyword in region.node.keywords) and not region.node.args:
            yield Hit(region.node.lineno, "torch.autocast is given no device type")
        elif region.device.lower().partition(":")[0] in NO_DEVICE_TYPES or region.device != region.device.lower():
            yield Hit(region.node.lineno, f"torch has no device type {region.device!r}")
        elif value is not None and script.called(value) == "torch.device":
            yield Hit(region.node.lineno, f"`{ast.unparse(device)}` is a torch.device, and autocast takes its `.type`")
    for site in _sites(script):
        region, name = _torch_region(site), script.called(site.call)
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
    for node in ast.walk(script.tree) if script.uses_torch else ():
        region = region_of(script, node) if isinstance(node, ast.Call) and script.called(node) else None
        if region is not None and region.library == "torch" and region.enabled and region.node is node:
            if region.dtype in ("fp32", "fp64") and region.device in ("cpu", "cuda"):
                yield Hit(
                    node.lineno, f"autocast to {region.dtype} is none: the block runs in the formats of its tensors"
                )


def _cross_entropy(script: Script) -> Iterator[Hit]:
    for site in _sites(script):
        region = _torch_region(site)
        if region is None or region.device == "cpu" or not region.sure:
            continue
        name = script.called(site.call)
        made = script.constant(site.call.func) if isinstance(site.call.func, (ast.Name, ast.Attribute)) else None
        if (
            name == "torch.nn.functional.binary_cross_entropy"
            or script.called(made or site.call.func) == "torch.nn.BCELoss"
        ):
            yield Hit(site.call.lineno, "binary_cross_entropy in a region raises on CUDA")


def _in_place(script: Script) -> Iterator[Hit]:
    for site in _sites(script):
        if _torch_region(site) is None or not isinstance(site.call.func, ast.Attribute):
            continue
        method, out = site.call.func.attr, argument(site.call, None, "out")
        if IN_PLACE.fullmatch(method):
            yield Hit(site.call.lineno, f"`{method}` writes in place, and autocast leaves such operators alone")
        elif out is not None and PRODUCTS.fullmatch(script.called(site.call)):
            yield Hit(site.call.lineno, f"`{script.called(site.call)}` with out=, which autocast leaves alone")


def _replicas(script: Script) -> Iterator[Hit]:
    for site in _sites(script):
        region, name = _torch_region(site), script.called(site.call)
        if region is not None and region.dtype == "bf16" and region.device == "cuda":
            if script.makers(name) == {"torch.nn.DataParallel"}:
                yield Hit(site.call.lineno, f"`{name}` is a DataParallel, whose threads autocast to fp16")


def _deprecated(script: Script) -> Iterator[Hit]:
    fallback = {
        id(n)
        for block in ast.walk(script.tree)
        if isinstance(block, ast.Try)
        and "torch.amp" in " ".join(script.called(n) for s in block.body for n in ast.walk(s))
        for handler in block.handlers
        for n in ast.walk(handler)
    }
    found: dict[str, list[int]] = {}
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.Call)
            and DEPRECATED.fullmatch(name := script.called(node))
            and id(node) not in fallback
        ):
            found.setdefault(name, []).append(node.lineno)
    for name, lines in found.items():
        first, *more = sorted(set(lines))
        also = f", also in line{'s' * (len(more) > 1)} {', '.join(map(str, more))}" if more else ""
        yield Hit(first, f"`{name}` is deprecated{also}")


def _function(script: Script) -> Iterator[Hit]:
    if not any(region_of(script, n) for n in ast.walk(script.tree) if isinstance(n, ast.Call)):
        return
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.ClassDef) or not any(
            script.name(b) == "torch.autograd.Function" for b in node.bases
        ):
            continue
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
        if (
            "backward" in methods
            and not _decorated(script, methods.values())
            and _multiplies(script, methods["backward"])
        ):
            yield Hit(node.lineno, f"the backward pass of `{node.name}` multiplies, and nothing casts its operands")


def _decorated(script: Script, methods: object) -> bool:
    names = [script.name(d.func if isinstance(d, ast.Call) else d) for m in methods for d in m.decorator_list]  # type: ignore[attr-defined]
    return any(name.endswith(("custom_fwd", "custom_bwd", "operator")) for name in names)


def _multiplies(script: Script, method: ast.FunctionDef) -> bool:
    """Return whether a backward pass multiplies its gradient with a saved tensor without a cast."""
    text = ast.unparse(method)
    if re.search(r"\.to\(|\.type_as\(|\.float\(|\.half\(|autocast", text):
        return False
    return any(
        (isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult))
        or (isinstance(n, ast.Call) and PRODUCTS.fullmatch(script.called(n)))
        or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("mm", "matmul", "bmm"))
        for n in ast.walk(method)
    )


AUTOCASTING_RULES = (
    Rule(
        code="HS018",
        severity="warning",
        title="a backward pass inside of the region",
        why="Operators that a backward pass calls (double backward, custom Functions, hooks) autocast again, into other "
        "formats than those of the forward pass; torch advises against it.",
        fix="End the region after the loss is computed.",
        bad=loop(FORWARD + "\n        scaler.scale(loss).backward()", STEP, UPDATE, ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_backward,
    ),
    Rule(
        code="HS019",
        severity="error",
        title="one region around the whole loop",
        why="torch keeps the low copies of weights until the region ends: after the first step every forward pass uses "
        "those of the old weights.",
        fix="Enter the region anew in every iteration, around forward pass and loss.",
        bad='import torch\n\nwith torch.autocast("cuda", torch.bfloat16):\n    for x, y in loader:\n'
        "        loss = loss_fn(model(x), y)\n        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()",
        good=loop(FORWARD.replace("float16", "bfloat16"), BACKWARD, "optimizer.step()", ZERO, before=""),
        check=_stale,
    ),
    Rule(
        code="HS020",
        severity="note",
        title="a forward pass without gradients before one with them, in one region",
        why="torch before 2.11 kept the low copies of weights made under no_grad and used them again: these weights got no "
        "gradient.",
        fix="Run the pass without gradients in a region of its own, or pass cache_enabled=False.",
        bad=loop(
            'with torch.autocast("cuda", torch.bfloat16):\n        with torch.no_grad():\n            target = model(x)\n'
            "        loss = loss_fn(model(x), target)", BACKWARD,
            "torch.optim.SGD(model.parameters(), 0.1).step()", "model.zero_grad()", before="",
        ),
        good=loop(
            'with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):\n        target = model(x)',
            'with torch.autocast("cuda", torch.bfloat16):\n        loss = loss_fn(model(x), target)', BACKWARD,
            "torch.optim.SGD(model.parameters(), 0.1).step()", "model.zero_grad()", before="",
        ),
        check=_no_grad,
    ),
    Rule(
        code="HS021",
        severity="error",
        title="autocast for a device that is not there",
        why="torch raises, or the region is for another device than the model's and changes nothing.",
        fix='Pass a device type: "cuda", "cpu", or `device.type` of a torch.device.',
        bad="import torch\n\ndevice = torch.device('cuda', 0)\nwith torch.autocast(device, torch.bfloat16):\n    model(x)",
        good="import torch\n\ndevice = torch.device('cuda', 0)\nwith torch.autocast(device.type, torch.bfloat16):\n    model(x)",
        check=_device,
    ),
    Rule(
        code="HS022",
        severity="warning",
        title="autocast to a format that turns it off",
        why="torch warns and runs the block without autocast.",
        fix="Write enabled=False for a block in the formats of its tensors, and cast the tensors with .float().",
        bad='import torch\n\nwith torch.autocast("cuda", dtype=torch.float32):\n    y = model(x)',
        good='import torch\n\nwith torch.autocast("cuda", enabled=False):\n    y = model(x.float())',
        check=_off,
    ),
    Rule(
        code="HS023",
        severity="error",
        title="binary_cross_entropy in a region",
        why="Its gradient overflows in fp16, so on CUDA torch raises.",
        fix="Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before the sigmoid.",
        bad='import torch\nimport torch.nn.functional as F\n\nwith torch.autocast("cuda"):\n'
        "    loss = F.binary_cross_entropy(model(x), y)",
        good='import torch\nimport torch.nn.functional as F\n\nwith torch.autocast("cuda"):\n'
        "    loss = F.binary_cross_entropy_with_logits(model(x), y)",
        check=_cross_entropy,
    ),
    Rule(
        code="HS024",
        severity="warning",
        title="an operator that cannot autocast",
        why="A product that writes in place or into out= is not cast: torch raises where its operands have two formats, and "
        "else it runs in fp32.",
        fix="Use the operator that returns its result: `addmm` for `addmm_`, no out=.",
        bad='import torch\n\nwith torch.autocast("cuda"):\n    total.addmm_(a, b)',
        good='import torch\n\nwith torch.autocast("cuda"):\n    total = total.addmm(a, b)',
        check=_in_place,
    ),
    Rule(
        code="HS025",
        severity="error",
        title="DataParallel under a bf16 region",
        why="DataParallel's threads are told that autocast is on, not in which format: replicas compute in fp16, without a "
        "loss scale.",
        fix="Use DistributedDataParallel, or enter the region inside of the model's forward.",
        bad="import torch\n\nmodel = torch.nn.DataParallel(net)\n"
        'with torch.autocast("cuda", torch.bfloat16):\n    y = model(x)',
        good="import torch\n\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n"
        'with torch.autocast("cuda", torch.bfloat16):\n    y = model(x)',
        check=_replicas,
    ),
    Rule(
        code="HS026",
        severity="note",
        title="names of torch.cuda.amp",
        why="torch warns and will remove them; they are for one device.",
        fix='Use torch.amp: autocast("cuda", ...), GradScaler("cuda"), custom_fwd(device_type="cuda").',
        bad="import torch\n\nscaler = torch.cuda.amp.GradScaler()",
        good='import torch\n\nscaler = torch.amp.GradScaler("cuda")',
        check=_deprecated,
    ),
    Rule(
        code="HS027",
        severity="warning",
        title="an autograd Function that handles no formats",
        why="Autocast casts in its forward pass and not in its backward pass: the gradient is low, the saved tensors are "
        "fp32, and their product raises.",
        fix="Decorate forward with torch.amp.custom_fwd(device_type=) and backward with custom_bwd, or use hs.operator.",
        bad="""
import torch

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad

with torch.autocast("cuda"):
    y = Product.apply(x, w)
""",
        good="""
import torch

class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad

with torch.autocast("cuda"):
    y = Product.apply(x, w)
""",
        check=_function,
    ),
)  # fmt: skip
