"""GradScaler.step passes a positional closure on, whose scaled gradients the optimizer then takes as they are."""

import torch


def main() -> int:
    """Step LBFGS with a closure that scales its loss; return 1 if it moved by scaled gradients."""
    weight = torch.nn.Parameter(torch.full((1,), 3.0))
    optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = scaler.scale(weight.square().sum())
        loss.backward()
        gradients.append(weight.grad.item())
        return loss

    scaler.scale(weight.square().sum()).backward()
    print("expected: the optimizer gets the gradient 6 (or the call raises, as step(optimizer, closure=closure) does)")
    try:
        scaler.step(optimizer, closure)
    except RuntimeError as error:
        print(f"found:    RuntimeError: {error}")
        return 0
    print(f"found:    it got {gradients[0]:g}, 1024 times that")
    return int(gradients[0] != 6)


if __name__ == "__main__":
    raise SystemExit(main())
