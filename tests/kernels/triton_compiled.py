"""Compile the CUDA kernels for real devices, which takes no device, and print what is in the code, as JSON.

With the argument ``every``: kernels of counts and losses in all their formats, for every generation of devices.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfstep.kernels.reference.exponents import ROW
from halfstep.kernels.triton import exponents, loss, norms, updates
from halfstep.kernels.triton.tables import FAITHFUL

POINTERS = {
    **dict.fromkeys(("rows", "chunks", "draws", "ends", "out"), "*i64"),
    **dict.fromkeys(("corrections", "factor", "rate", "sums", "norms", "divisor", "norm_out", "factor_out"), "*fp32"),
    **dict.fromkeys(("bad", "bad_out"), "*i1"),
    **dict.fromkeys(("count", "first"), "i32"),
    **dict.fromkeys(("lr", "wide_decay", "beta1", "beta2", "cooling"), "i64"),
    **dict.fromkeys(("weight_decay", "a", "b", "c", "d", "clip_norm", "clip_eps"), "fp32"),
}
KINDS = {
    **{"METHOD": "adam", "FORM": "plain", "WEIGHT": "bf16", "BESIDE": "none", "GRADIENT": "bf16"},
    **{"FIRST": "fp32", "SECOND": "fp32", "VARIANT": True, "DECAYS": True, "MAXIMIZE": False},
    **{"ALIGNED": True, "CHUNK": 8 * updates.BLOCK, "BLOCK": updates.BLOCK, "rate": None},
}
SIMPLE = {"SECOND": "none", "corrections": None, "draws": None}
AMD = "gfx942"
CASES: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("adam", 80, 4, {"draws": None}),
    ("adam", 90, 4, {"draws": None}),
    ("adam split", 90, 5, {"FORM": "split", "BESIDE": "int16", "draws": None}),
    ("adam stochastic", 90, 4, {"FORM": "stochastic", "FIRST": "bf16", "SECOND": "bf16"}),
    ("nadam", 90, 4, {"METHOD": "nadam", "draws": None}),
    ("lion kahan", 90, 4, {"METHOD": "lion", "FORM": "kahan", **SIMPLE}),
    ("sgd", 90, 3, {"METHOD": "sgd", **SIMPLE}),
)
"""Name, compute capability, 8 or 16 byte loads of a thread for a block, and what differs from `KINDS`."""


def compiled(
    kernel: Any,
    capability: int | str,
    warps: int,
    constants: dict[str, Any],
    pointers: dict[str, str] = POINTERS,
    most: int = 0,
) -> dict[str, Any]:
    """Return what the compiler makes of `kernel`, in `most` registers, by stage: "ptx", "cubin" and others."""
    counts = {p.name for p in kernel.params if not p.do_not_specialize} & {"count", "first"}
    assert not counts, f"{kernel.__name__} is compiled again for other numbers of tensors: {counts}"
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": warps, **FAITHFUL, **({"maxnreg": most} if most else {})}
    target = GPUTarget("hip", capability, 64) if isinstance(capability, str) else GPUTarget("cuda", capability, 32)
    made: dict[str, Any] = triton.compile(source, target=target, options=options).asm
    return made


def report(made: dict[str, Any], wide_loads: int, *, exact: bool = True) -> dict[str, int]:
    """Count what matters in a kernel; the exponentials of those that are not `exact` are contracted."""
    ptx = made["ptx"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    return {
        "contracted": exact * (count(r"\bfma\.") + count(r"\bmad\.\w*\.?f(32|64)")),
        "approximate": exact * (count(r"\.approx\b") + count(r"\bdiv\.full\b") + count(r"\.ftz\b")),
        "wide loads": count(r"\bld\.global\S*\.v[24]\.b(32|64)\b"),
        "expected wide loads": wide_loads,
    }


def dumped(made: dict[str, Any], what: str) -> str:
    """Return what cuobjdump says of the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def shortest_loop(made: dict[str, Any]) -> int:
    """Return how many instructions the shortest loop of a kernel has."""
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", dumped(made, "-sass"))
    places = [int(place, 16) for place, _ in code]
    jumps = [(int(place, 16), re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for place, text in code]
    back = [(int(to[1], 16), place) for place, to in jumps if to is not None and int(to[1], 16) < place]
    return min(sum(to <= at <= place for at in places) for to, place in back)


def registers(made: dict[str, Any]) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that did not fit into them."""
    text = dumped(made, "-res-usage")
    (used, spilled), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(used), "spilled": int(spilled)}


def counts(kind: str, capability: int) -> dict[str, int]:
    """Report on the kernel that counts exponents."""
    size = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[kind]
    block, top = (2, exponents.INF64) if kind == "fp64" else (4, exponents.INF32)
    sizes = {"CHUNK": 8 * exponents.BLOCK, "BLOCK": block * exponents.THREADS, "THREADS": exponents.THREADS}
    constants = {"KIND": kind, **sizes, "BYTES": size, "ROW": ROW, "TOP": top.value}
    options = exponents.OPTIONS
    made = compiled(exponents.exponents_kernel, capability, options["num_warps"], constants, most=options["maxnreg"])
    return {**report(made, 2), **registers(made), "instructions": shortest_loop(made) * 128 // (32 * block)}


def losses(kind: str, capability: int, kernel: str, *, smoothed: bool) -> dict[str, int]:
    """Report on a kernel of losses whose rows begin anywhere; with smoothing also of class weights."""
    pointers = dict.fromkeys(("weight", "own", "every", "scale", "by_class"), "*fp32")
    pointers |= {"logits": f"*{kind}", "stride": "i32", "target": "*i64", "labels": "*i64"}
    pointers |= {**dict.fromkeys(("lse", "dot"), "*fp32"), "first": "i32", "into_stride": "i32", "CLASSES": "i32"}
    pointers |= {"out": f"*{kind}"}
    constants = {"KIND": kind, "BLOCK": loss.BLOCK, "ALIGNED": False}
    if not smoothed:
        constants["by_class"] = None
    made = compiled(getattr(loss, kernel), capability, loss.BLOCK // 256, constants, pointers)
    return {**report(made, 2, exact=False), **registers(made)}


def every() -> dict[str, dict[str, int]]:
    """Report on counts and losses in all formats, for all generations of devices."""
    found = {}
    for capability in (75, 80, 86, 89, 90, 100, 120):
        for kind in ("bf16", "fp16", "fp32", "fp64"):
            found[f"exponents {kind}, sm_{capability}"] = counts(kind, capability)
        for kind, kernel, smoothed in product(("bf16", "fp16"), ("sums_kernel", "gradient_kernel"), (False, True)):
            name = f"{kernel} {kind}{' smoothed, with class weights' if smoothed else ''}, sm_{capability}"
            found[name] = losses(kind, capability, kernel, smoothed=smoothed)
    return found


def some() -> dict[str, dict[str, int]]:
    """Report on each kernel."""
    found = {}
    for name, capability, wide_loads, kinds in CASES:
        made = compiled(updates.update_kernel, capability, 8, {**KINDS, **kinds})
        found[f"{name}, sm_{capability}"] = report(made, wide_loads)
    squares = {"KIND": "bf16", "ALIGNED": True, "CHUNK": 8 * norms.BLOCK, "BLOCK": norms.BLOCK}
    found["squares"] = report(compiled(norms.squares_kernel, 90, 8, squares), 1)
    for method in ("adam", "nadam"):
        step_counts = {"METHOD": method, "FEW": updates.FEW, "BITS": updates.BITS, "rate": None}
        found[f"count {method}"] = report(compiled(updates.count_kernel, 90, 4, step_counts), 0)
    found["norms"] = report(compiled(norms.norms_kernel, 90, 4, {"MANY": norms.MANY}), 0)
    found["check"] = report(compiled(norms.check_kernel, 90, 4, {"CLIPS": True, "MANY": norms.MANY}), 0)
    for kind in ("bf16", "fp32", "fp64"):
        found[f"exponents {kind}"] = counts(kind, 90)
    for kernel in ("sums_kernel", "gradient_kernel"):
        found[kernel] = losses("bf16", 120, kernel, smoothed=False)
    return found


def amd() -> list[str]:
    """Compile a kernel of each file for an AMD device; return the stages of one that all have."""
    made = [compiled(updates.update_kernel, AMD, 8, {**KINDS, **kinds}) for _, _, _, kinds in CASES]
    squares = {"KIND": "bf16", "ALIGNED": True, "CHUNK": 8 * norms.BLOCK, "BLOCK": norms.BLOCK}
    made.append(compiled(norms.squares_kernel, AMD, 8, squares))
    made.append(compiled(norms.norms_kernel, AMD, 4, {"MANY": norms.MANY}))
    made.append(compiled(norms.check_kernel, AMD, 4, {"CLIPS": True, "MANY": norms.MANY}))
    return sorted(set.intersection(*(set(stages) for stages in made)))


if __name__ == "__main__":
    print(json.dumps(amd() if "amd" in sys.argv else every() if "every" in sys.argv else some()))
