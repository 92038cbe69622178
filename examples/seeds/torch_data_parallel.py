"""DataParallel: one process, a thread for each device; the region is open in every one of them.

Source: the article "Automatic Mixed Precision Using PyTorch", part on DataParallel (its text without its code). Both
ways it describes: autocast around the call, and autocast as part of the model's forward. Changed: torch.cuda.amp in the
import into ``halfstep.compat.torch_amp.cuda``. Without several devices DataParallel calls the model itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    """A small network that notes in which format it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        self.formats: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row."""
        output: Tensor = self.layers(x)
        self.formats.add(output.dtype)
        return output


class OwnRegion(Net):
    """The same with autocast as part of its forward."""

    @autocast()
    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row."""
        return super().forward(x)


def train(net: Net) -> dict[str, object]:
    """Train for 100 steps; return the first and the last loss and the formats."""
    torch.manual_seed(0)
    net = net.to(DEVICE)
    dp_model = nn.DataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler()
    losses = []
    for _ in range(100):
        input = torch.randn(32, 8, device=DEVICE)
        optimizer.zero_grad()
        # Sets autocast in the main thread; for OwnRegion this is not needed
        with autocast(enabled=not isinstance(net, OwnRegion)):
            output = dp_model(input)
        with autocast():
            loss = F.mse_loss(output, input.sum(1, keepdim=True) / 4)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return {"first": losses[0], "last": losses[-1], "formats": net.formats}


def main() -> dict[str, dict[str, object]]:
    """Train both ways; return what came out."""
    torch.manual_seed(0)
    out = {"around": train(Net()), "inside": train(OwnRegion())}
    print(out)
    return out


if __name__ == "__main__":
    main()
