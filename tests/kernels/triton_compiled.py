"""Compile the CUDA kernels for real devices, which takes no device, and print what is in the code, as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfstep.kernels.reference.exponents import ROW, TOP
from halfstep.kernels.triton import exponents, norms, updates
from halfstep.kernels.triton.tables import FAITHFUL

POINTERS = {
    **dict.fromkeys(("rows", "chunks", "draws", "ends", "out"), "*i64"),
    **dict.fromkeys(("corrections", "factor", "rate", "sums", "norms", "divisor", "norm_out", "factor_out"), "*fp32"),
    **dict.fromkeys(("bad", "bad_out"), "*i1"),
    **dict.fromkeys(("count", "first"), "i32"),
    **dict.fromkeys(("lr", "wide_decay", "beta1", "beta2"), "i64"),
    **dict.fromkeys(("weight_decay", "a", "b", "c", "d", "clip_norm", "clip_eps"), "fp32"),
}
KINDS = {
    **{"METHOD": "adam", "FORM": "plain", "WEIGHT": "bf16", "BESIDE": "none", "GRADIENT": "bf16"},
    **{"FIRST": "fp32", "SECOND": "fp32", "VARIANT": True, "DECAYS": True, "MAXIMIZE": False},
    **{"ALIGNED": True, "CHUNK": 8 * updates.BLOCK, "BLOCK": updates.BLOCK, "rate": None},
}
SIMPLE = {"SECOND": "none", "corrections": None, "draws": None}
CASES: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("adam", 80, 4, {"draws": None}),
    ("adam", 90, 4, {"draws": None}),
    ("adam split", 90, 5, {"FORM": "split", "BESIDE": "int16", "draws": None}),
    ("adam stochastic", 90, 4, {"FORM": "stochastic", "FIRST": "bf16", "SECOND": "bf16"}),
    ("lion kahan", 90, 4, {"METHOD": "lion", "FORM": "kahan", **SIMPLE}),
    ("sgd", 90, 3, {"METHOD": "sgd", **SIMPLE}),
)
"""Name, compute capability, 8 or 16 byte loads of a thread for a block, and what differs from `KINDS`."""


def compiled(kernel: Any, capability: int, warps: int, constants: dict[str, Any]) -> str:
    """Return the PTX of `kernel`."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": warps, **FAITHFUL}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return ptx


def report(ptx: str, wide_loads: int) -> dict[str, int]:
    """Count what matters in `ptx`."""

    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    return {
        "contracted": count(r"\bfma\.") + count(r"\bmad\.\w*\.?f(32|64)"),
        "approximate": count(r"\.approx\b") + count(r"\bdiv\.full\b") + count(r"\.ftz\b"),
        "wide loads": count(r"\bld\.global\S*\.v[24]\.b32\b"),
        "expected wide loads": wide_loads,
    }


def main() -> None:
    found = {}
    for name, capability, wide_loads, kinds in CASES:
        ptx = compiled(updates.update_kernel, capability, 8, {**KINDS, **kinds})
        found[f"{name}, sm_{capability}"] = report(ptx, wide_loads)
    squares = {"KIND": "bf16", "ALIGNED": True, "CHUNK": 8 * norms.BLOCK, "BLOCK": norms.BLOCK}
    found["squares"] = report(compiled(norms.squares_kernel, 90, 8, squares), 1)
    counts = {"FEW": updates.FEW, "BITS": updates.BITS, "rate": None}
    found["count"] = report(compiled(updates.count_kernel, 90, 4, counts), 0)
    found["norms"] = report(compiled(norms.norms_kernel, 90, 4, {"MANY": norms.MANY}), 0)
    found["check"] = report(compiled(norms.check_kernel, 90, 4, {"CLIPS": True, "MANY": norms.MANY}), 0)
    for kind in ("fp32", "bf16", "fp64"):
        sizes = {"CHUNK": 8 * exponents.BLOCK, "BLOCK": exponents.BLOCK, "ROW": ROW, "TOP": TOP}
        ptx = compiled(exponents.exponents_kernel, 90, 8, {"KIND": kind, "ALIGNED": True, **sizes})
        found[f"exponents {kind}"] = {**report(ptx, 0), "wide loads": 0}  # of masked blocks
    print(json.dumps(found))


if __name__ == "__main__":
    main()
