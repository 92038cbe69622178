"""Inference with a prepared model: between two updates, after training, and without any training.

A prepared model is in its policy's region whenever it is called, so evaluation needs no extra lines, and training goes
on after it as if it had not happened. For inference alone there is `hs.prepare(model, policy=...)` without an
optimizer. `hs.exported` makes a program with the same outputs that needs no halfstep, and `hs.lowered` a plain module
with low weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

POLICY = hs.Policy.of("O2", dtype="bf16")


def make_model() -> nn.Module:
    """Return the same network every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))


@torch.inference_mode()
def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the model's answers, without dropout; leaves the model in the mode it was in."""
    training = model.training
    out: Tensor = model.eval()(x)
    model.train(training)
    return out.clone()


def train(*, evaluate: bool) -> tuple[nn.Module, list[float]]:
    """Train for 100 updates, with or without an evaluation after each; return the model and the losses."""
    model = make_model()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, policy=POLICY)
    data = torch.Generator().manual_seed(1)
    held_out = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(100):
        losses.append(float(step(torch.randn(64, 8, generator=data)).loss))
        if evaluate:
            predict(model, held_out)
    return model, losses


def main() -> dict[str, float]:
    """Train with and without evaluations, then load the weights for inference alone."""
    model, losses = train(evaluate=False)
    _, losses_evaluated = train(evaluate=True)

    served = make_model()
    served.load_state_dict(model.state_dict())
    reference = make_model()
    reference.load_state_dict(model.state_dict())
    plain_bytes = sum(p.nbytes for p in served.parameters())
    hs.prepare(served, policy=POLICY)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    answer, trained, exact = predict(served, x), predict(model, x), predict(reference, x)
    program, plain = hs.exported(served, (x,)), hs.lowered(served)
    outcome = {
        "first": losses[0],
        "last": losses[-1],
        "evaluation_changes_nothing": losses == losses_evaluated,
        "served_equals_trained": torch.equal(answer, trained),
        "program_equals_trained": torch.equal(program.module()(x), trained),
        "plain_equals_trained": torch.equal(plain(x.bfloat16()).float(), trained),
        "error": float((answer - exact).norm() / exact.norm()),
        "bytes": sum(p.nbytes for p in served.parameters()) / plain_bytes,
    }
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the same with evaluations: {losses == losses_evaluated}")
    print(f"served with {outcome['bytes']:.0%} of the bytes, {answer.dtype}, {outcome['error']:.2%} from fp32")
    return outcome


if __name__ == "__main__":
    main()
