"""Activation checkpointing recomputes without the TorchFunctionModes that were on in the forward pass."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class Tripled(TorchFunctionMode):
    """Let torch.sin give 3 sin."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Triple the results of torch.sin."""
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.sin else result


def main() -> int:
    """Differentiate sin(x)**2 under a mode, with and without a checkpoint; return 1 if gradients differ."""
    found = []
    for through in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False, determinism_check="none")):
        x = torch.ones((), requires_grad=True)
        with Tripled():
            y = through(lambda x: torch.sin(x) ** 2, x)
        y.backward()
        found.append(x.grad.item())
    print(f"expected: {found[0]:.6f}, the gradient without a checkpoint")
    print(f"found:    {found[1]:.6f} with one")
    return int(abs(found[0] - found[1]) > 1e-6)


if __name__ == "__main__":
    raise SystemExit(main())
