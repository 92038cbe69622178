"""Rules on regions: what stands in an autocast block that should not, and what an autocast is made with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import BACKWARD, FORWARD, FORWARD_BF16, SCALED, STEP, UPDATE, ZERO, loop
from halfstep.advise.lint.static.low_values import PRODUCTS
from halfstep.advise.lint.static.ops import MANAGERS
from halfstep.advise.lint.static.regions import Region, Site, all_sites, argument, region_of
from halfstep.advise.lint.static.script import Script, walked

__all__ = ["AUTOCASTING_RULES"]

IN_PLACE = re.compile(r"(addmm|addmv|addr|addbmm|baddbmm)_")


def _is_backward(call: ast.Call, script: Script) -> bool:
    if script.called(call) == "torch.autograd.backward":
        return True
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward" or call.args:
        return False
    return not MANAGERS.search(script.name(call.func.value))


def _around_loop(site: Site, script: Script) -> bool:
    """Return whether a step of an optimizer is in a loop in a region of torch, which keeps low copies of weights."""
    region = site.place.torch_region
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
    for site in all_sites(script):
        if _around_loop(site, script):
            region = site.place.regions[-1]
            yield Hit(
                region.node.lineno, f"the region is around the loop whose line {site.call.lineno} steps the optimizer"
            )


def _backward(script: Script) -> Iterator[Hit]:
    stale = {site.place.regions[-1] for site in all_sites(script) if _around_loop(site, script)}
    for site in all_sites(script):
        region = site.place.torch_region
        if region is not None and region not in stale and _is_backward(site.call, script):
            yield Hit(site.call.lineno, f"the backward pass is in the region of line {region.node.lineno}")


def _no_grad(script: Script) -> Iterator[Hit]:
    first: dict[tuple[Region, str], int] = {}
    for site in all_sites(script):
        region, name = site.place.torch_region, script.called(site.call)
        if region is None or name not in script.models:
            continue
        if site.place.no_grad:
            first.setdefault((region, name), site.call.lineno)
        elif (region, name) in first:
            line = first.pop((region, name))
            yield Hit(line, f"`{name}` runs without gradients, then with them in line {site.call.lineno} of one region")


def _cross_entropy(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        region = site.place.torch_region
        if region is not None and region.device != "cpu" and region.sure:
            if script.operator(site.call) in ("torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"):
                yield Hit(site.call.lineno, "binary_cross_entropy in a region raises on CUDA")


def _in_place(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        if site.place.torch_region is None or not isinstance(site.call.func, ast.Attribute):
            continue
        method, out = site.call.func.attr, argument(site.call, None, "out")
        if IN_PLACE.fullmatch(method):
            yield Hit(site.call.lineno, f"`{method}` writes in place, and autocast leaves such operators alone")
        elif out is not None and PRODUCTS.fullmatch(script.called(site.call)):
            yield Hit(site.call.lineno, f"`{script.called(site.call)}` with out=, which autocast leaves alone")


def _replicas(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        region, name = site.place.torch_region, script.called(site.call)
        if region is not None and region.dtype == "bf16" and region.device == "cuda":
            if script.makers(name) == {"torch.nn.DataParallel"}:
                yield Hit(site.call.lineno, f"`{name}` is a DataParallel, whose threads autocast to fp16")


def _function(script: Script) -> Iterator[Hit]:
    if not any(region_of(script, call) for call in script.calls):
        return
    for node in walked(script.tree):
        if isinstance(node, ast.ClassDef) and any(script.name(b) == "torch.autograd.Function" for b in node.bases):
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            decorators = [*node.decorator_list, *(d for method in methods.values() for d in method.decorator_list)]
            cast = any(_casts(script, decorator) for decorator in decorators)
            if not cast and "backward" in methods and _multiplies(script, methods["backward"]):
                yield Hit(node.lineno, f"the backward pass of `{node.name}` multiplies, and nothing casts its operands")


def _casts(script: Script, decorator: ast.expr) -> bool:
    """Return whether a decorator gives a Function its formats."""
    name = script.called(decorator) or script.name(decorator)
    return name.endswith(("custom_fwd", "custom_bwd", "halfstep.operator"))


def _multiplies(script: Script, method: ast.FunctionDef) -> bool:
    """Return whether a backward pass multiplies its gradient with a saved tensor without a cast."""
    text = ast.unparse(method)
    if re.search(r"\.to\(|\.type_as\(|\.float\(|\.half\(|autocast", text):
        return False
    return any(
        (isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult))
        or (isinstance(n, ast.Call) and PRODUCTS.fullmatch(script.called(n)))
        or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("mm", "matmul", "bmm"))
        for n in walked(method)
    )


AUTOCASTING_RULES = (
    Rule(
        code="HS018",
        severity="warning",
        title="a backward pass inside of the region",
        why="Operators that a backward pass calls (double backward, custom Functions, hooks) autocast again, into "
        "other formats than those of the forward pass; torch advises against it.",
        fix="End the region after the loss is computed.",
        bad=loop(FORWARD + "\n        scaler.scale(loss).backward()", STEP, UPDATE, ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_backward,
    ),
    Rule(
        code="HS019",
        severity="error",
        title="one region around the whole loop",
        why="torch keeps the low copies of weights until the region ends: after the first step every forward pass "
        "uses those of the old weights.",
        fix="Enter the region anew in every iteration, around forward pass and loss.",
        bad="""
import torch

with torch.autocast("cuda", torch.bfloat16):
    for x, y in loader:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        good=loop(FORWARD_BF16, BACKWARD, "optimizer.step()", ZERO, before=""),
        check=_stale,
    ),
    Rule(
        code="HS020",
        severity="note",
        title="a forward pass without gradients before one with them, in one region",
        why="torch before 2.11 kept the low copies of weights made under no_grad and used them again: these "
        "weights got no gradient.",
        fix="Run the pass without gradients in a region of its own, or pass cache_enabled=False.",
        bad="""
import torch

model.train()
with torch.autocast("cuda", torch.bfloat16):
    with torch.no_grad():
        target = model(x)
    loss = loss_fn(model(x), target)
""",
        good="""
import torch

model.train()
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    target = model(x)
with torch.autocast("cuda", torch.bfloat16):
    loss = loss_fn(model(x), target)
""",
        check=_no_grad,
    ),
    Rule(
        code="HS023",
        severity="error",
        title="binary_cross_entropy in a region",
        why="Its gradient overflows in fp16, so on CUDA torch raises.",
        fix="Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before the sigmoid.",
        bad="""
import torch
import torch.nn.functional as F

with torch.autocast("cuda"):
    loss = F.binary_cross_entropy(model(x), y)
""",
        good="""
import torch
import torch.nn.functional as F

with torch.autocast("cuda"):
    loss = F.binary_cross_entropy_with_logits(model(x), y)
""",
        check=_cross_entropy,
    ),
    Rule(
        code="HS024",
        severity="warning",
        title="an operator that cannot autocast",
        why="A product that writes in place or into out= is not cast: torch raises where its operands have two "
        "formats, and else it runs in fp32.",
        fix="Use the operator that returns its result: `addmm` for `addmm_`, no out=.",
        bad="""
import torch

with torch.autocast("cuda"):
    total.addmm_(a, b)
""",
        good="""
import torch

with torch.autocast("cuda"):
    total = total.addmm(a, b)
""",
        check=_in_place,
    ),
    Rule(
        code="HS025",
        severity="error",
        title="DataParallel under a bf16 region",
        why="DataParallel's threads are told that autocast is on, not in which format: replicas compute in fp16, "
        "without a loss scale.",
        fix="Use DistributedDataParallel, or enter the region inside of the model's forward.",
        bad="""
import torch

model = torch.nn.DataParallel(net)
with torch.autocast("cuda", torch.bfloat16):
    y = model(x)
""",
        good="""
import torch

model = torch.nn.parallel.DistributedDataParallel(net)
with torch.autocast("cuda", torch.bfloat16):
    y = model(x)
""",
        check=_replicas,
    ),
    Rule(
        code="HS027",
        severity="warning",
        title="an autograd Function that handles no formats",
        why="Autocast casts in its forward pass and not in its backward pass: the gradient is low, the saved "
        "tensors are fp32, and their product raises.",
        fix="Decorate forward with torch.amp.custom_fwd(device_type=) and backward with custom_bwd, or use "
        "hs.operator.",
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
