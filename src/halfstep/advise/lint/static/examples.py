"""The lines of which the examples of rules are made."""

from __future__ import annotations

__all__ = ["BACKWARD", "CLIP", "FORWARD", "FORWARD_BF16", "SCALED", "STEP", "UNSCALE", "UPDATE", "ZERO", "loop"]

FORWARD = 'with torch.autocast("cuda", torch.float16):\n        loss = loss_fn(model(x), y)'
FORWARD_BF16 = FORWARD.replace("float16", "bfloat16")
BACKWARD = "loss.backward()"
SCALED = "scaler.scale(loss).backward()"
UNSCALE = "scaler.unscale_(optimizer)"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
STEP = "scaler.step(optimizer)"
UPDATE = "scaler.update()"
ZERO = "optimizer.zero_grad()"


def loop(*lines: str, before: str = "scaler = torch.amp.GradScaler()") -> str:
    """Return a script with a training loop of these lines."""
    head = "for i, (x, y) in enumerate(loader):" if any("i + 1" in line for line in lines) else "for x, y in loader:"
    return "\n".join(["import torch", "", *([before] if before else []), head, *(f"    {line}" for line in lines)])
