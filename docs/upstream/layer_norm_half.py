"""layer_norm in fp16 on a CPU keeps mean and 1 / deviation in fp16: a constant row gives infinite gradients."""

import torch
from torch.nn import functional as F


def main() -> int:
    """Normalise a row of zeros with eps = 1e-12; return 1 if the gradient in fp16 is not finite and in fp32 is."""
    found = {}
    for dtype in (torch.float32, torch.float16):
        weight = torch.ones(8, dtype=dtype, requires_grad=True)
        row = torch.zeros(1, 8, dtype=dtype, requires_grad=True)
        F.layer_norm(row, (8,), weight, eps=1e-12).sum().backward()
        found[dtype] = row.grad.tolist(), weight.grad.tolist()
    print(
        "expected: in fp16 as in fp32 (and as in fp16 on CUDA, which keeps statistics in fp32):", found[torch.float32]
    )
    print("found:   ", found[torch.float16])
    return int(not all(torch.tensor(g).isfinite().all() for g in found[torch.float16]))


if __name__ == "__main__":
    raise SystemExit(main())
