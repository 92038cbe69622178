"""The weight cache of autocast returns the cast of an older value after a weight was changed in place."""

import torch
from torch.nn import functional as F


def main() -> int:
    """Double a weight within one region; return 1 if the next product still has the old value."""
    weight, x = torch.nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        found = F.linear(x, weight).item()
    print("expected: 2, the product with the weight as it is (its version counter has changed)")
    print(f"found:    {found:g}")
    return int(found != 2)


if __name__ == "__main__":
    raise SystemExit(main())
