"""SGD(fused=True) on a CPU leaves most elements of a bf16 or fp16 parameter unchanged."""

import torch


def main() -> int:
    """Step a parameter of ones by a gradient of ones; return 1 if elements were left as they were."""
    wrong = 0
    print("expected: SGD(lr=0.5, fused=True) takes all 1000 elements from 1 to 0.5")
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5, fused=True).step()
        unchanged = int((weight == 1).sum())
        print(f"found:    {unchanged} of 1000 elements of {dtype} are still 1")
        wrong |= unchanged > 0
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
