"""Taking a trained model out of halfstep: plain fp32 or bf16 weights that need no halfstep to load.

`state_dict()` of a prepared model is fp32 and has the keys of the plain model. `hs.exported` makes a `torch.export`
program with the outputs of the model under its policy, `hs.lowered` a plain module with low weights. `hs.unprepare`
turns the model itself back into what it was before `prepare`, with the trained fp32 weights.
"""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs


class Net(nn.Module):
    """A classifier of points."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 2) to logits (batch, 2)."""
        out: Tensor = self.head(self.body(x))
        return out


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points, and whether they lie outside a circle."""
    x = torch.randn(128, 2, generator=generator)
    return x, (x.norm(dim=1) > 1.2).long()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy(model: nn.Module, dtype: torch.dtype = torch.float32) -> float:
    """Return the share of right answers on data the training has not seen."""
    x, y = make_batch(torch.Generator().manual_seed(2))
    return float((model.eval()(x.to(dtype)).argmax(dim=1) == y).float().mean())


def main() -> dict[str, float]:
    """Train under O2, export in four ways; return the accuracies and whether the exports agree."""
    torch.manual_seed(0)
    model = Net()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy="O2")
    data = torch.Generator().manual_seed(1)
    for _ in range(120):
        step(*make_batch(data))
    right = {"prepared": accuracy(model)}

    file = io.BytesIO()  # 1: weights alone, into a model that has never met halfstep
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(file))
    right["state_dict"] = accuracy(fresh)

    points, _ = make_batch(torch.Generator().manual_seed(2))  # 2: a program, and 3: a module with bf16 weights
    dynamic = ({0: torch.export.Dim("batch")},)
    file = io.BytesIO()
    torch.export.save(hs.exported(model, (points,), dynamic_shapes=dynamic), file)
    file.seek(0)
    program = torch.export.load(file).module()
    plain = hs.lowered(model)
    with torch.no_grad():
        expected = model.eval()(points)
        same = torch.equal(program(points), expected) and torch.equal(plain(points.bfloat16()).float(), expected)
    right["lowered"] = accuracy(plain, torch.bfloat16)

    hs.unprepare(model)  # 4: the model itself, fp32
    right["unprepared"] = accuracy(model)
    unprepared = type(model) is Net and all(p.dtype is torch.float32 for p in model.parameters())
    states = zip(model.state_dict().items(), fresh.state_dict().items(), strict=True)
    equal = all(name == other and torch.equal(a, b) for (name, a), (other, b) in states)
    print(f"accuracy: {', '.join(f'{name} {value:.3f}' for name, value in right.items())}")
    print(f"exported weights are {'equal' if equal else 'different'}, outputs {'equal' if same else 'different'}")
    return {**right, "equal": equal, "plain": unprepared, "same": same}


if __name__ == "__main__":
    main()
