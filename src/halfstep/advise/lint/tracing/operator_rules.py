"""Rules on operators: the formats they get and give, sizes, and formulas that torch has an operator for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.tracing.calls import TracedCall
from halfstep.advise.lint.tracing.examples import example
from halfstep.advise.lint.tracing.trace import Trace
from halfstep.advise.lint.tracing.value_rules import hits
from halfstep.advise.lint.tracing.weight_rules import listed
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES, format_of

__all__ = ["OPERATOR_RULES"]

LAYERS = {"linear": (0, 1), "conv1d": (0, 1), "conv2d": (0, 1), "conv3d": (0, 1)}
"""Operator with a weight -> the dimensions of the weight that are outputs and inputs of a product."""
SMALL = 8
"""Sizes below this belong to data (channels of an image, coordinates); padding them is not for the model to decide."""


def _sizes(trace: Trace) -> Iterator[Hit]:
    narrow = format_of(trace.policy.dtype).bits <= 8 if trace.policy.dtype != "auto" else False
    unit = 16 if narrow else 8
    found: dict[tuple[str, int, tuple[int, int]], list[str]] = {}
    for call in trace.calls:
        if call.op not in LAYERS or trace.rules.get(call.op) != "low" or not call.outputs:
            continue
        if call.outputs[0].dtype not in LOW_DTYPES and not narrow:
            continue
        for tensor in call.inputs[1:2]:
            out, into = (tensor.shape[dimension] for dimension in LAYERS[call.op])
            if any(size >= SMALL and size % unit for size in (out, into)):
                names = found.setdefault((call.file, call.line, (into, out)), [])
                name = trace.names.get(id(tensor), call.module)
                names += [name] if name not in names else []
    for (file, line, (into, out)), names in found.items():
        yield Hit(line, f"{listed(names)} with {into} inputs and {out} outputs: no multiples of {unit}", file)


def _functions(trace: Trace) -> Iterator[Hit]:
    inside = {c.function for c in trace.calls if any(t.dtype in LOW_DTYPES for t in (*c.inputs, *c.outputs))}
    for function in trace.functions:
        if not function.ruled and (function.low or function.name in inside):
            yield Hit(
                function.place.line,
                f"autograd.Function {function.name} runs with low tensors and has no rule for formats",
                function.place.file,
            )


def _in_place_wide(trace: Trace) -> Iterator[Hit]:
    return hits(
        (call, f"{call.op}_ writes into a fp32 tensor: the operator is not cast to the low format")
        for call in trace.calls
        if call.in_place
        and trace.rules.get(call.op) == "low"
        and call.inputs[:1]
        and call.inputs[0].dtype is torch.float32
    )


def _in_place_low(trace: Trace) -> Iterator[Hit]:
    return hits(
        (call, f"{call.op}_ rounds fp32 values into a {DTYPE_NAMES[call.inputs[0].dtype]} tensor")
        for call in trace.calls
        if call.in_place
        and call.inputs[:1]
        and call.inputs[0].dtype in LOW_DTYPES
        and any(t.dtype is torch.float32 and t.dim() for t in call.inputs[1:])
    )


def _widened(trace: Trace) -> Iterator[Hit]:
    def found() -> Iterator[tuple[TracedCall, str]]:
        for call in trace.calls:
            if (
                call.in_place
                or trace.rules.get(call.op)
                or not call.outputs
                or call.outputs[0].dtype is not torch.float32
            ):
                continue
            low = [t for t in call.inputs if t.dtype in LOW_DTYPES and t.requires_grad and t.dim()]
            wide = [t for t in call.inputs if t.dtype is torch.float32 and t.dim()]
            if low and wide and not any(t.requires_grad for t in wide):
                named = [trace.names[id(t)] for t in wide if id(t) in trace.names]
                what = f"buffer {named[0]!r}" if named else "a tensor without gradient"
                yield call, f"{call.op} widens {DTYPE_NAMES[low[0].dtype]} values to fp32, because {what} is fp32"

    yield from hits(found())


def _float64(trace: Trace) -> Iterator[Hit]:
    return hits(
        (call, f"{call.op} computes in float64{f' in module {call.module!r}' if call.module else ''}")
        for call in trace.calls
        if any(t.dtype is torch.float64 for t in call.outputs)
    )


def _softmax_by_hand(trace: Trace) -> Iterator[Hit]:
    powers: dict[int, TracedCall] = {}
    sums: dict[int, TracedCall] = {}
    shifted = {id(t) for c in trace.calls if c.op == "sub" for t in c.outputs}

    def found() -> Iterator[tuple[TracedCall, str]]:
        for call in trace.calls:
            origins = [trace.origin(t) for t in call.inputs]
            if call.op == "exp" and call.outputs:
                powers[trace.origin(call.outputs[0])] = call
            elif call.op == "sum" and origins[:1] and origins[0] in powers:
                sums[id(call.outputs[0])] = powers[origins[0]]
            elif call.op in ("div", "log") and origins and origins[-1] in sums:
                power = sums[origins[-1]]
                safe = any(id(t) in shifted for t in power.inputs)
                low = power.outputs[0].dtype in LOW_DTYPES
                if low or not safe:
                    name = "softmax" if call.op == "div" else "logsumexp"
                    how = (
                        f"in {DTYPE_NAMES[power.outputs[0].dtype]}" if low else "without subtracting the largest value"
                    )
                    yield call, f"{name} written as exp, sum and {call.op}, {how}"

    yield from hits(found())


def _norm_by_hand(trace: Trace) -> Iterator[Hit]:
    squares: dict[int, TracedCall] = {}
    means: dict[int, TracedCall] = {}

    def found() -> Iterator[tuple[TracedCall, str]]:
        for call in trace.calls:
            origins = [trace.origin(t) for t in call.inputs]
            squared = call.op in ("pow", "square") or (call.op == "mul" and len(set(origins)) == 1 < len(origins))
            # a fp32 square that comes out low is the policy's choice, not the model's
            if squared and call.outputs and {call.inputs[0].dtype, call.outputs[0].dtype} <= LOW_DTYPES:
                squares[trace.origin(call.outputs[0])] = call
            elif call.op in ("mean", "sum") and origins[:1] and origins[0] in squares:
                means[id(call.outputs[0])] = squares[origins[0]]
            elif call.op in ("rsqrt", "sqrt") and origins[:1] and origins[0] in means:
                form = DTYPE_NAMES[means[origins[0]].outputs[0].dtype]
                yield call, f"a norm written as squares, {call.op} and their mean or sum, in {form}"

    yield from hits(found())


def _first_without_gradients(trace: Trace) -> Iterator[Hit]:
    first: dict[str, TracedCall] = {}
    told: set[str] = set()
    for call in trace.calls:
        if trace.rules.get(call.op) != "low":
            continue
        for tensor in call.inputs:
            name = trace.names.get(id(tensor))
            if name is None or not tensor.requires_grad or not tensor.is_leaf:
                continue
            if not call.gradients:
                first.setdefault(name, call)
            elif name in first and name not in told and first[name].gradients is False:
                told.add(name)
                yield Hit(
                    first[name].line, f"{name!r} is used under no_grad first and with gradients later", first[name].file
                )
            if call.gradients:
                told.add(name)


FUNCTION = """
class Swish(torch.autograd.Function):
    @staticmethod{}
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod{}
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))
"""
RULED = (
    '\n    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)',
    '\n    @torch.amp.custom_bwd(device_type="cpu")',
)
SUM = "e = self.body(x).exp()\nreturn e / e.sum(-1, keepdim=True)"

OPERATOR_RULES = (
    Rule(
        code="HS111", severity="note", title="layer sizes that are no multiples of 8 (fp8: 16)",
        why="Matrix units take low numbers 16 bytes at a time: other sizes are padded or take slower kernels, and fp8 "
        "products refuse them.",
        fix="Round hidden sizes, heads and vocabularies up to a multiple of 8, of 16 for fp8 (64 where it costs "
        "little).",
        bad=example("return self.head(self.body(x))", init="self.head = nn.Linear(16, 101)"),
        good=example("return self.head(self.body(x))", init="self.head = nn.Linear(16, 104)"), check=_sizes,
    ),
    Rule(
        code="HS112", severity="warning", title="an autograd.Function without a rule for formats",
        why="Its forward computes in whatever format arrives and its backward runs outside the region: the two can "
        "differ in format, and low tensors reach code that was written for fp32.",
        fix='Decorate forward and backward with torch.amp.custom_fwd and custom_bwd, or the class with '
        'hs.operator("fp32").',
        bad=example("return Swish.apply(self.body(x))", before=FUNCTION.format("", "")),
        good=example("return Swish.apply(self.body(x))", before=FUNCTION.format(*RULED)), check=_functions,
    ),
    Rule(
        code="HS113", severity="note", title="an in-place product that cannot be cast",
        why="An in-place operator keeps the format of its destination; autocast leaves it in fp32, without matrix "
        "units.",
        fix="Use the form that returns a new tensor: torch.addmm(x, a, b) instead of x.addmm_(a, b).",
        bad=example("y = torch.zeros(8, 16)\nreturn y.addmm_(x, self.body.weight) + self.body(x)"),
        good=example("y = torch.zeros(8, 16)\nreturn torch.addmm(y, x, self.body.weight) + self.body(x)"),
        check=_in_place_wide,
    ),
    Rule(
        code="HS114", severity="warning", title="an in-place operator that rounds fp32 values",
        why="The result takes the format of the destination, not of the wider argument: y += z in bf16 drops what z "
        "has more, without a warning.",
        fix="Write y = y + z, or make the destination fp32.",
        bad=example("y = self.body(x)\ny += x\nreturn y"), good=example("y = self.body(x)\nreturn y + x"),
        check=_in_place_low,
    ),
    Rule(
        code="HS115", severity="note", title="a fp32 constant widens low values",
        why="low and fp32 together give fp32: everything behind it takes twice the memory until the next cast.",
        fix="Cast the constant: x * self.scale.to(x.dtype), or register it in the format of x.",
        bad=example("return self.body(x) * self.factor", init='self.register_buffer("factor", torch.ones(16))'),
        good=example("y = self.body(x)\nreturn y * self.factor.to(y.dtype)",
                     init='self.register_buffer("factor", torch.ones(16))'), check=_widened,
    ),
    Rule(
        code="HS116", severity="warning", title="float64 in the forward pass",
        why="float64 comes from numpy arrays and from torch.tensor(..., dtype=float64); it is 2 to 64 times slower "
        "than fp32 on GPUs and widens what it meets.",
        fix="Cast to fp32 where the data enters: torch.as_tensor(array, dtype=torch.float32).",
        bad=example("return self.body(x) * torch.ones(16, dtype=torch.float64)"),
        good=example("return self.body(x) * torch.ones(16)"), check=_float64,
    ),
    Rule(
        code="HS117", severity="warning", title="a softmax or logsumexp written by hand",
        why="exp overflows at 11 in fp16 and at 88 in bf16 and fp32, and a low sum loses its small terms; "
        "torch.softmax subtracts the largest value and sums in fp32.",
        fix="Use torch.softmax, torch.log_softmax or torch.logsumexp.",
        bad=example(SUM), good=example("return self.body(x).softmax(-1)"), check=_softmax_by_hand,
    ),
    Rule(
        code="HS118", severity="warning", title="a norm written by hand in a low format",
        why="Squares overflow in fp16 from 256 on and underflow below 2e-4; a low mean loses digits. F.rms_norm and "
        "F.layer_norm compute them in fp32.",
        fix="Use F.rms_norm or F.layer_norm, or cast up before the square.",
        bad=example("y = self.body(x)\nreturn y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)"),
        good=example("y = self.body(x)\nreturn F.rms_norm(y, (16,))"), check=_norm_by_hand, under="O3",
    ),
    Rule(
        code="HS119", severity="note", title="a weight is used under no_grad first",
        why="torch.autocast before torch 2.11 keeps the cast of its first use, which has no gradient: the weight gets "
        "none in the rest of the region. Newer torch and halfstep cast again.",
        fix="Run the part without gradients after the other, in a region of its own, or with cache_enabled=False.",
        bad=example("with torch.no_grad():\n    target = self.body(x)\nreturn self.body(x) - target"),
        good=example("y = self.body(x)\nwith torch.no_grad():\n    target = self.body(x)\nreturn y - target"),
        check=_first_without_gradients,
    ),
)  # fmt: skip
