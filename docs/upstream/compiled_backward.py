"""The backward pass of a compiled model ignores an inner ``autocast(enabled=False)``."""

import torch
from torch import nn


class Island(nn.Module):
    """A part of a model that switches autocast off for itself."""

    def __init__(self, inner: nn.Module) -> None:
        """Wrap `inner`."""
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute in fp32."""
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


def main() -> int:
    """Compare the gradients of the fp32 part, eager and compiled; return 1 if they differ."""
    torch.manual_seed(0)
    head = nn.Linear(16, 16, bias=False)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), Island(head))
    x, weights, gradients = torch.randn(8, 16), torch.linspace(0, 1, 16), []
    for run in (model, torch.compile(model, backend="aot_eager")):
        head.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x)
        (out * weights).sum().backward()
        gradients.append(head.weight.grad.clone())
    torch._dynamo.reset()
    distance = ((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()).item()
    print("expected: equal gradients of the fp32 part (the backend runs torch's own kernels)")
    print(f"found:    they differ by {distance:.1e} of the largest; bf16's half ulp is 2e-3")
    return int(distance > 1e-6)


if __name__ == "__main__":
    raise SystemExit(main())
