"""Whether offsets of compiled Triton kernels are right beyond 2^31 elements; print what is wrong, by kernel, as JSON.

Read in Triton's own intermediate code (TTIR). An offset from the address of a tensor must have 64 bits, and no product
of it may be one of 32 bits that was widened afterwards. Tables (`TABLES`) have an entry for each tensor, chunk or row,
and the numbers in a row of logits, or of counts, are fewer than 2^30 (`ROWS`, once its beginning was found): 32 bits
suffice.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import triton
import triton.language as tl
from triton.runtime import JITFunction

from halfstep.kernels.reference.exponents import ROW
from halfstep.kernels.triton import exponents, loss, norms, updates
from tests.kernels.triton_compiled import CASES, KINDS, POINTERS, compiled

TABLES = frozenset("rows chunks corrections sums norms ends by_class norm_out bad_out factor_out".split())
ROWS = frozenset({"logits", "out"})
LOSSES = frozenset({"sums_kernel", "gradient_kernel"})  # their addresses are those of a row
FILES = ("exponents", "loss", "norms", "tables", "updates", "words")
LINE = re.compile(r"^\s*(?:scf\.for )?%([\w#]+)(?::\d+)? = ([\w.]*)\s*(.*?)(?: loc\(.*)?$")


@triton.jit
def narrow_kernel(address, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fault: a product of 32 bits, widened when it is too late."""
    base = tl.cast(address, tl.pointer_type(tl.float32))
    places = (tl.program_id(0) * stride).to(tl.int64) + tl.arange(0, BLOCK)
    tl.store(base + places, tl.load(base + tl.arange(0, BLOCK) + stride))


def faults(text: str, kernel: str) -> list[str]:
    """Return the offsets of a kernel's TTIR that end at 2^31."""
    made: dict[str, tuple[str, str]] = {}  # a name is given again after its region: what stands above counts
    entry = re.search(r"tt\.func public @\w+\((.*)\) attributes", text)
    assert entry is not None
    parameters = re.findall(r"%(\w+): !tt\.ptr", entry[1])

    def operands(name: str) -> list[str]:
        return re.findall(r"%([\w#]+)", made[name][1].partition(" : ")[0])

    def root(name: str) -> tuple[str, bool]:
        """Return the parameter that a pointer begins from, "" for an address, and whether an offset was added."""
        if name in parameters:
            return name, False
        op, _ = made[name]
        if op == "tt.int_to_ptr":
            return "", False
        found, moved = root(operands(name)[0])
        return found, moved or op == "tt.addptr"

    def narrow_product(name: str, seen: set[str]) -> bool:
        if name in seen or name not in made:
            return False
        seen.add(name)
        op, rest = made[name]
        if op in {"tt.load", "tt.get_program_id", "tt.int_to_ptr", "tt.ptr_to_int"}:
            return False
        if op == "arith.muli" and re.search(r"\bi32\b|xi32>", rest):
            return True
        return any(narrow_product(one, seen) for one in operands(name))

    wrong = []
    for found in filter(None, map(LINE.match, text.splitlines())):
        name, op, rest = found.groups()
        made[name] = op, rest
        if op != "tt.addptr":
            continue
        base, offset = operands(name)
        begin, moved = root(base)
        if begin in TABLES or (begin in ROWS and moved) or (begin == "" and kernel in LOSSES):
            continue
        wide = rest.rpartition(", ")[2]
        if offset.startswith("cst") or re.match(r"c\d+_i32", offset):
            continue
        if not re.search(r"\bi64\b|xi64>", wide) or narrow_product(offset, set()):
            wrong.append(f"{begin or 'an address'} + %{offset}: {wide}")
    return wrong


def logits(kernel: str) -> dict[str, Any]:
    """Return how a kernel of losses is compiled; its strides are 32 bits where the host's numbers fit."""
    pointers = dict.fromkeys(("own", "every", "scale", "by_class", "lse", "dot"), "*fp32")
    pointers |= {"logits": "*bf16", "out": "*bf16", "target": "*i64", "labels": "*i64"}
    pointers |= dict.fromkeys(("stride", "into_stride", "first", "CLASSES"), "i32")
    constants = {"KIND": "bf16", "BLOCK": loss.BLOCK, "ALIGNED": False}
    return compiled(getattr(loss, kernel), 90, loss.BLOCK // 256, constants, pointers)


def every() -> dict[str, list[dict[str, Any]]]:
    """Compile each kernel of halfstep, those of updates in all their forms."""
    squares = {"KIND": "bf16", "ALIGNED": True, "CHUNK": 8 * norms.BLOCK, "BLOCK": norms.BLOCK}
    sizes = {"CHUNK": 8 * exponents.BLOCK, "BLOCK": 4 * exponents.THREADS, "THREADS": exponents.THREADS}
    counted = {"KIND": "bf16", **sizes, "BYTES": 2, "ROW": ROW, "TOP": exponents.INF32.value}
    steps = {"METHOD": "nadam", "FEW": updates.FEW, "BITS": updates.BITS, "rate": None}
    scale = {"GROWTH": 2.0, "BACKOFF": 0.5, "FLOOR": 0.0, "CEILING": 1e9}
    state = {"scale": "*fp32", "good": "*i32", "total": "*i32", "alarm": "*i1", "found": "*i1", "interval": "i32"}
    words = import_module("halfstep.kernels.triton.words")
    return {
        "update_kernel": [compiled(updates.update_kernel, 90, 8, {**KINDS, **kinds}) for _, _, _, kinds in CASES[1:]],
        "count_kernel": [compiled(updates.count_kernel, 90, 4, steps)],
        "squares_kernel": [compiled(norms.squares_kernel, 90, 8, squares)],
        "norms_kernel": [compiled(norms.norms_kernel, 90, 4, {"MANY": norms.MANY})],
        "check_kernel": [compiled(norms.check_kernel, 90, 4, {"CLIPS": True, "MANY": norms.MANY})],
        "advance_kernel": [compiled(norms.advance_kernel, 90, 4, scale, state)],
        "exponents_kernel": [compiled(exponents.exponents_kernel, 90, 8, counted)],
        "sums_kernel": [logits("sums_kernel")],
        "gradient_kernel": [logits("gradient_kernel")],
        "probe_kernel": [compiled(words.probe_kernel, 90, 4, {}, {**POINTERS, "number": "i32"})],
        "narrow_kernel": [compiled(narrow_kernel, 90, 4, {"BLOCK": 128}, {"address": "i64", "stride": "i32"})],
    }


def names() -> list[str]:
    """Return the names of all kernels in the package's files; other functions of Triton are inlined into them."""
    found = [vars(import_module(f"halfstep.kernels.triton.{file}")) for file in FILES]
    return sorted({n for one in found for n, v in one.items() if isinstance(v, JITFunction) and n.endswith("_kernel")})


if __name__ == "__main__":
    report = {name: sorted({f for one in made for f in faults(one["ttir"], name)}) for name, made in every().items()}
    print(json.dumps({"names": names(), "faults": report}))
