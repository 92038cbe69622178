"""Triton's interpreter converts fp32 to bf16 by cutting off bits, where a GPU rounds to the nearest, ties to even."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

try:
    import triton
    from triton import language as tl
except ImportError:
    triton = None
import torch


def main() -> int:
    """Store three numbers as bf16 in the interpreter; return 1 if they are not rounded to the nearest."""
    if triton is None:
        print("not applicable: no triton")
        return 2

    @triton.jit
    def copy(source, target, count: tl.constexpr):
        places = tl.arange(0, count)
        tl.store(target + places, tl.load(source + places).to(tl.bfloat16))

    source = torch.tensor([1.0, 1 + 2**-8 * 1.5, 1 + 2**-7 * 0.75, 3.0])
    target = torch.empty(4, dtype=torch.bfloat16)
    copy[(1,)](source, target, 4)
    print(f"expected: {source.bfloat16().tolist()}")
    print(f"found:    {target.tolist()}")
    return int(not torch.equal(target, source.bfloat16()))


if __name__ == "__main__":
    raise SystemExit(main())
