"""One process with several devices: a side thread for each, and a model whose layers are on two of them.

Source: the article "Automatic Mixed Precision Using PyTorch", part on DistributedDataParallel with several devices in a
process (its text without its code): "The fix is the same: apply autocast as part of your model's forward method to
ensure it's enabled in side threads." Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``.

With fewer than two CUDA devices both devices are the same one; the threads are there all the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

if torch.cuda.device_count() > 1:
    DEVICES = [torch.device("cuda:0"), torch.device("cuda:1")]
else:
    DEVICES = [torch.device("cuda" if torch.cuda.is_available() else "cpu")] * 2


class Net(nn.Module):
    """Two layers; with `split`, each on a device of its own."""

    def __init__(self, *, split: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64).to(DEVICES[0])
        self.second = nn.Linear(64, 1).to(DEVICES[1] if split else DEVICES[0])

    @autocast()
    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row."""
        hidden = F.relu(self.first(x.to(self.first.weight.device)))
        output: Tensor = self.second(hidden.to(self.second.weight.device))
        return output


def in_threads() -> list[torch.dtype]:
    """Run a replica on each device in a thread of its own, as DataParallel does; return the formats."""
    net = Net(split=False)
    replicas = [deepcopy(net).to(device) for device in DEVICES]
    with ThreadPoolExecutor(len(DEVICES)) as threads:
        outputs = list(threads.map(lambda replica, x: replica(x), replicas, torch.randn(2, 16, 8)))
    return [output.dtype for output in outputs]


def across_devices() -> list[float]:
    """Train one model whose layers are on two devices; return the losses."""
    net = Net(split=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler()
    losses = []
    for _ in range(100):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        output = net(x)
        with autocast():
            loss = F.mse_loss(output, x.sum(1, keepdim=True).to(output.device) / 4)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def main() -> dict[str, object]:
    """Run both; return the formats and the first and the last loss."""
    torch.manual_seed(0)
    formats, losses = in_threads(), across_devices()
    print(f"formats in the threads: {formats}; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return {"formats": formats, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main()
