"""Leaving a region of autocast in another thread empties the weight cache of this thread's open region."""

import threading

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Count casts to bf16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count a cast, and run it."""
        self.count += func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def elsewhere() -> None:
    """Open and close a region that casts nothing."""
    with torch.autocast("cpu", enabled=False):
        pass


def main() -> int:
    """Use a weight before and after another thread leaves a region; return 1 if it is cast twice."""
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), Casts() as casts:
        F.linear(x, weight)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        F.linear(x, weight)
    print("expected: the weight is cast once in this thread's region")
    print(f"found:    {casts.count} casts")
    return int(casts.count != 1)


if __name__ == "__main__":
    raise SystemExit(main())
