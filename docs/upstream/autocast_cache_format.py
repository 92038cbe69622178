"""Where regions of two formats nest, the weight cache of autocast hands the outer format's cast to the inner one."""

import torch
from torch.nn import functional as F


def main() -> int:
    """Use one weight in a bf16 region and in an fp16 region within; return 1 if that raises."""
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    print("expected: torch.float16 in the inner region")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.linear(x, weight)
            with torch.autocast("cpu", dtype=torch.float16):
                print(f"found:    {F.linear(x, weight).dtype}")
    except RuntimeError as error:
        print(f"found:    RuntimeError: {str(error).splitlines()[0]}")
        return 1
    finally:
        torch.clear_autocast_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
