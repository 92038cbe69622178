"""Rules on values that are low for certain: losses of them, masks and constants that their format does not have.

A value is low if it comes from a product in a region whose format is known, or was made low by hand; casts, views and
elementwise operators keep its format, any other operator ends what is known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.numerics import operand
from halfstep.advise.lint.static.regions import Placed, argument, placed
from halfstep.advise.lint.static.script import Function, Script, walked

__all__ = ["LOW_VALUE_RULES", "PRODUCTS"]

PRODUCTS = re.compile(
    r"torch\.(mm|matmul|bmm|mv|addmm|addmv|addbmm|baddbmm|einsum|chain_matmul|linalg\.multi_dot)"
    r"|torch\.nn\.functional\.(linear|conv\w*|bilinear)"
)
"""Functions that autocast runs in the low format."""

KEEPING = frozenset(
    "sigmoid tanh relu abs view reshape transpose permute squeeze unsqueeze contiguous clone detach masked_fill expand "
    "flatten mul div add sub neg clamp t mT T".split()
)
"""Methods and functions whose result has the format of their first operand."""

LOSSES = re.compile(
    r"torch\.nn\.functional\.(cross_entropy|nll_loss|mse_loss|l1_loss|smooth_l1_loss|huber_loss|kl_div|ctc_loss"
    r"|binary_cross_entropy_with_logits|cosine_embedding_loss|triplet_margin_loss|poisson_nll_loss)"
    r"|torch\.nn\.(CrossEntropy|NLL|MSE|L1|SmoothL1|Huber|KLDiv|CTC|BCEWithLogits|CosineEmbedding|TripletMargin|PoissonNLL)Loss"
)

BY_INDEX = re.compile(r"torch\.nn\.(functional\.)?(cross_entropy|nll_loss|CrossEntropyLoss|NLLLoss)")
"""Losses whose target is an index: they have the format of their first operand. Others promote it to the target's."""

FILLS = {"masked_fill": 1, "masked_fill_": 1, "fill_": 0}
"""Method that fills in a number -> the place of that argument."""

LARGEST_FP16 = 65504.0
ROUNDS_TO_ZERO = 2.0**-25
"""The largest number that fp16 rounds to 0."""


ROUNDS_TO_ONE = {"fp16": 1 - 2.0**-12, "bf16": 1 - 2.0**-9}
"""Format -> the smallest number that it rounds to 1."""


class _Formats:
    """The formats of a function's values, statement by statement."""

    def __init__(self, script: Script, function: Function) -> None:
        self.script = script
        self.function = function
        self.known: dict[str, str] = {}

    def of(self, node: ast.AST, where: Placed) -> str:
        """Return "fp16" or "bf16" for an expression that has this format for certain, else ""."""
        region = where.place.region
        low = region.dtype if region is not None and region.sure and region.enabled else ""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.MatMult):
                return low
            sides = [self.of(side, where) for side in (node.left, node.right) if not _is_number(side)]
            return sides[0] if len(set(sides)) == 1 else ""
        if isinstance(node, ast.Call):
            name = self.script.called(node)
            if PRODUCTS.fullmatch(name):
                return low
            if isinstance(node.func, ast.Attribute):
                method, owner = node.func.attr, node.func.value
                if method in ("matmul", "mm", "bmm") and not name.startswith("torch."):
                    return low
                if form := self.script.low_format(node):
                    return form
                if name.startswith("torch.") and method in KEEPING and node.args:
                    return self.of(node.args[0], where)
                if method in KEEPING and not name.startswith("torch."):
                    return self.of(owner, where)
        return ""

    def note(self, where: Placed) -> None:
        """Note what a statement assigns."""
        statement = where.node
        if isinstance(statement, ast.Assign):
            form = self.of(statement.value, where)
            for target in statement.targets:
                for name in walked(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        self.known[name.id] = form if name is target else ""
        elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)) and isinstance(statement.target, ast.Name):
            self.known.pop(statement.target.id, None)


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _number(script: Script, node: ast.expr | None) -> float | None:
    found = script.constant(node)
    if isinstance(found, ast.UnaryOp) and isinstance(found.op, ast.USub):
        value = _number(script, found.operand)
        return None if value is None else -value
    if isinstance(found, ast.BinOp) and isinstance(found.op, ast.Sub):
        left, right = _number(script, found.left), _number(script, found.right)
        return None if left is None or right is None else left - right
    if isinstance(found, ast.Constant) and isinstance(found.value, (int, float)) and not isinstance(found.value, bool):
        return float(found.value)
    return None


def _with_formats(script: Script) -> Iterator[tuple[_Formats, Placed, ast.expr]]:
    """Yield every expression of the file in the order of the source, with the formats known before its statement."""
    for function in script.functions if script.uses_torch else ():
        formats = _Formats(script, function)
        for where in placed(script, function):
            yield from ((formats, where, node) for node in walked(where.node) if isinstance(node, ast.expr))
            formats.note(where)


def _large_fill(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in FILLS:
            continue
        value = _number(script, argument(node, FILLS[node.func.attr], "value"))
        large = value is not None and LARGEST_FP16 < abs(value) < float("inf")
        if large and formats.of(node.func.value, where) == "fp16":
            yield Hit(node.lineno, f"{value:g} is filled into fp16 values, whose largest number is 65504")


def _lost_constant(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        small: ast.expr | None
        large: ast.expr | None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            value, small, large = node.left, node.right, None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clamp":
            value, small, large = node.func.value, argument(node, 0, "min"), argument(node, 1, "max")
        else:
            continue
        form = formats.of(value, where)
        low, high = (None if each is None else _number(script, each) for each in (small, large))
        if form == "fp16" and low is not None and 0 < low <= ROUNDS_TO_ZERO:
            yield Hit(node.lineno, f"{low:g} is 0 in fp16, the format of `{ast.unparse(value)}`")
        if form and high is not None and ROUNDS_TO_ONE[form] <= high < 1:
            yield Hit(node.lineno, f"{high:g} is 1 in {form}, the format of `{ast.unparse(value)}`")


def _low_squares(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        inner = operand(script, node, "mean")
        if inner is None:
            inner = operand(script, node, "sum")
        base = operand(script, inner, "square") if inner is not None else None
        if base is None and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mult):
            base = inner.left if ast.unparse(inner.left) == ast.unparse(inner.right) else None
        if base is not None and formats.of(base, where) == "fp16":
            yield Hit(node.lineno, f"`{ast.unparse(node)}` squares fp16 values")


def _loss(script: Script, node: ast.AST) -> str:
    """Return the name of torch's loss that a call computes; "" if it is none."""
    name = script.operator(node) if isinstance(node, ast.Call) and node.args else ""
    return name if LOSSES.fullmatch(name) else ""


def _low_loss(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        name = _loss(script, node) if where.place.region is None and not where.place.no_grad else ""
        if name and isinstance(node, ast.Call):
            operands = node.args[: 1 if BY_INDEX.fullmatch(name) else 2]
            form = formats.of(node.args[0], where)
            if form and all(formats.of(operand, where) == form for operand in operands):
                yield Hit(node.lineno, f"the loss is computed from {form} values, outside of a region")


def _loss_outside(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        outputs: dict[str, tuple[str, int]] = {}  # result of a model in a region -> its format, the region's line
        for where in placed(script, function):
            region, node = where.place.region, where.node
            for call in [n for n in walked(node) if isinstance(n, ast.Call)]:
                if region is None and not where.place.no_grad and BY_INDEX.fullmatch(_loss(script, call)):
                    first = call.args[0]
                    if isinstance(first, ast.Name) and first.id in outputs:
                        form, line = outputs[first.id]
                        yield Hit(
                            call.lineno,
                            f"`{first.id}` leaves the region of line {line} in {form}, and so does the loss of it",
                        )
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in [n.id for target in targets for n in walked(target) if isinstance(n, ast.Name)]:
                    outputs.pop(name, None)
                if region is not None and region.sure and region.enabled and region.dtype in ("fp16", "bf16"):
                    model = script.called(node.value) if node.value is not None else ""
                    if (
                        model in script.models
                        and isinstance(node, ast.Assign)
                        and isinstance(node.targets[0], ast.Name)
                    ):
                        if region.library == "torch":
                            outputs[node.targets[0].id] = (region.dtype, region.node.lineno)


LOW_VALUE_RULES = (
    Rule(
        code="HS043",
        severity="warning",
        title="a norm by hand in fp16",
        why="Squares overflow from 256 on and are 0 below 2e-4; autocast leaves square() and x * x in their format.",
        fix="Use layer_norm, rms_norm or torch.linalg.vector_norm, which sum in fp32, or compute it on x.float().",
        bad="""
import torch

with torch.autocast("cuda", torch.float16):
    x = x @ w
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
""",
        good="""
import torch

with torch.autocast("cuda", torch.float16):
    x = x @ w
    y = torch.nn.functional.rms_norm(x, x.shape[-1:])
""",
        check=_low_squares,
    ),
    Rule(
        code="HS044",
        severity="error",
        title="a mask's number that fp16 does not have",
        why="torch raises where a number above 65504 is filled into an fp16 tensor.",
        fix="Fill in float('-inf') or torch.finfo(scores.dtype).min.",
        bad="""
import torch

with torch.autocast("cuda", torch.float16):
    scores = q @ k.transpose(-2, -1)
    weights = scores.masked_fill(mask, -1e9).softmax(-1)
""",
        good="""
import torch

with torch.autocast("cuda", torch.float16):
    scores = q @ k.transpose(-2, -1)
    weights = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)
""",
        check=_large_fill,
    ),
    Rule(
        code="HS045",
        severity="warning",
        title="a constant that a low format rounds away",
        why="fp16's smallest number is 6e-8, and just below 1 its numbers are 5e-4 apart: the constant changes "
        "nothing, and the logarithm, root or quotient that it protects is not finite.",
        fix="Compute on x.float(), or in fp16 use 1e-4 beside 0 and 1e-3 beside 1.",
        bad="""
import torch

with torch.autocast("cuda", torch.float16):
    p = torch.sigmoid(x @ w)
    loss = -torch.log(p + 1e-8).mean()
""",
        good="""
import torch

with torch.autocast("cuda", torch.float16):
    p = torch.sigmoid(x @ w)
    loss = -torch.log(p.float() + 1e-8).mean()
""",
        check=_lost_constant,
    ),
    Rule(
        code="HS046",
        severity="warning",
        title="a loss in low precision by hand",
        why="The loss and its first gradients have 8 (bf16) or 11 (fp16) significant bits, and squares in fp16 "
        "overflow from 256 on.",
        fix="Compute the loss on .float() values, or in a region, which does so.",
        bad="""
import torch
import torch.nn.functional as F

loss = F.mse_loss(model(x).half(), y.half())
loss.backward()
""",
        good="""
import torch
import torch.nn.functional as F

loss = F.mse_loss(model(x).float(), y)
loss.backward()
""",
        check=_low_loss,
    ),
    Rule(
        code="HS047",
        severity="warning",
        title="the loss is computed behind the region",
        why="The output has the region's low format (unless the model ends in an fp32 operator), and outside "
        "nothing casts it: log-probabilities and loss are rounded to it.",
        fix="Move the loss into the region, or pass `output.float()`.",
        bad="""
import torch
import torch.nn.functional as F

model.train()
with torch.autocast("cuda", torch.float16):
    output = model(x)
loss = F.cross_entropy(output, y)
""",
        good="""
import torch
import torch.nn.functional as F

model.train()
with torch.autocast("cuda", torch.float16):
    output = model(x)
    loss = F.cross_entropy(output, y)
""",
        check=_loss_outside,
    ),
)
