"""Fused SGD with momentum: after a first step that was skipped, the next one reads uninitialised memory."""

import torch


def main() -> int:
    """Skip the first step by found_inf, apply the second; return 1 if the weights come from unset memory."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with nan, so that reading it shows
    try:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
        for overflow in (1.0, 0.0):  # as GradScaler sets it: a skipped step, then a good one
            optimizer.found_inf = torch.tensor(overflow)
            weight.grad = torch.ones(4)
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(before)
    print("expected: 1 - 0.5 * 1 = [0.5, 0.5, 0.5, 0.5] after a skipped and a good step")
    print(f"found:    {weight.tolist()}")
    return int(not torch.equal(weight, torch.full((4,), 0.5)))


if __name__ == "__main__":
    raise SystemExit(main())
