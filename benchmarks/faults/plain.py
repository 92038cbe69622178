"""A fault without halfstep: torch.autocast in the same format, a static scale, an ordinary loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from benchmarks.faults.case import Case

__all__ = ["plain_bad_steps"]

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def plain_bad_steps(case: Case) -> Iterator[int]:
    """Train a case as torch alone does; yield the calls whose loss or gradients are not finite."""
    policy = case.policy
    scale = policy.scale if isinstance(policy.scale, float) else 1.0
    count = case.options.get("accumulate", 1)
    low = LOW.get(policy.dtype)
    if policy.params == "low" and policy.master == "none":
        case.model.to(low)
    region = torch.autocast("cpu", dtype=low) if low is not None else contextlib.nullcontext()
    for number in range(1, case.steps + 1):
        case.before(number)
        with region:
            loss = case.loss_fn(case.model, *case.batch(number))
        (loss.float() * scale / count).backward()
        grads = [p.grad for p in case.model.parameters() if p.grad is not None]
        if not all(bool(torch.isfinite(t).all()) for t in (loss.detach(), *grads)):
            yield number
        elif number % count == 0:
            torch._foreach_div_(grads, scale)
            case.optimizer.step()
        if number % count == 0:
            case.optimizer.zero_grad()
