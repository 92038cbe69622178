"""GradScaler.step raises AssertionError for an optimizer whose parameters got no gradient."""

import torch


def main() -> int:
    """Step an optimizer whose parameter took no part in the loss; return 1 if that raises."""
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(used.sum()).backward()
    print("expected: nothing, as optimizer.step() without a scaler does nothing")
    try:
        scaler.step(torch.optim.SGD([unused], lr=0.1))
    except AssertionError as error:
        print(f"found:    AssertionError: {error}")
        return 1
    print("found:    nothing")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
