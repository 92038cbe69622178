"""clip_grad_norm_ sets finite gradients to zero when their squares overflow fp32 (above 1.8e19)."""

import torch


def main() -> int:
    """Clip a gradient of 3e19 and 4e19 to norm 1; return 1 if it becomes zero."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3e19, 4e19])
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    print("expected: norm 5e+19, gradient [0.6, 0.8] after clipping")
    print(f"found:    norm {norm.item():g}, gradient {[round(value, 4) for value in weight.grad.tolist()]}")
    return int(not torch.allclose(weight.grad, torch.tensor([0.6, 0.8])))


if __name__ == "__main__":
    raise SystemExit(main())
