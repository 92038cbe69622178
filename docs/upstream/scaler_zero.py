"""GradScaler's scale falls to 0 in a series of overflows; the next good batch makes the weights NaN."""

import torch


def main() -> int:
    """Give a scaler 200 bad batches and a good one; return 1 if the weights are not finite."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for batch in range(201):
        optimizer.zero_grad()
        factor = torch.tensor(float("inf") if batch < 200 else 1.0)
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    print("expected: 200 skipped steps and a good one: [0.9, 0.9], or an error")
    print(f"found:    {weight.tolist()}, scale {scaler.get_scale():g}")
    return int(not weight.isfinite().all())


if __name__ == "__main__":
    raise SystemExit(main())
