"""An audit: fp16 without a loss scale trains a deep network badly without an error; the audit names place and cure.

Nothing here is ever inf or nan: gradients of the first layers are too small for fp16 and become zero. The audit runs a
few steps on a copy, names the layers, and hands over a policy without the fault.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs


class Deep(nn.Module):
    """Eight sigmoid layers: each makes the gradient about five times smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16) to scores (B, 4)."""
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return self.head(x)  # type: ignore[no-any-return]  # module calls are Any


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of points and the quarter of the plane they lie in."""
    generator = torch.Generator().manual_seed(1)
    points = [torch.randn(64, 16, generator=generator) for _ in range(count)]
    return [(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()) for x in points]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(x), y)


def main() -> dict[str, int]:
    """Audit, take the remedy, audit again; return how many findings there were before and after."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = hs.Policy.of("mixed", dtype="fp16", scale="none")

    audit = hs.audit(model, batches(3), loss_fn, policy, optimizer)
    print(audit)
    first = audit.findings()[0]

    print("\nwhat other formats and scales would do to the gradient of the first layer, without another run:")
    for form, scale in (("fp16", 1.0), ("fp16", 2.0**16), ("bf16", 1.0), ("fp8_e5m2", 2.0**16)):
        (answer,) = [
            a for a in audit.what_if(form, scale) if a.parameter == "layers.0.weight" and a.role == "weight gradient"
        ]
        print(f"  {form} at scale {scale:g}: {100 * answer.underflow[0]:.0f} % would be zero")

    assert first.policy is not None
    cured = hs.audit(model, batches(3), loss_fn, first.policy, optimizer)
    print(f"\n{cured}")
    return {"before": len(audit.findings()), "after": len(cured.findings())}


if __name__ == "__main__":
    main()
