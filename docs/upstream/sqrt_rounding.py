"""torch.sqrt of fp32 on a CPU is not correctly rounded, as IEEE 754 requires of a square root."""

import torch


def main() -> int:
    """Compare 100,003 roots with those of fp64, rounded once; return 1 if any differs."""
    x = torch.rand(100_003, generator=torch.Generator().manual_seed(0)) * 100
    wrong = int((x.sqrt() != x.double().sqrt().float()).sum())
    strided = x[::3].sqrt() != x[::3].double().sqrt().float()
    print("expected: 0 roots that differ in the last bit")
    print(f"found:    {wrong} of {x.numel()} in contiguous memory, {int(strided.sum())} of {strided.numel()} otherwise")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
