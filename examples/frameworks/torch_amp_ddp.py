"""A training script of torch.cuda.amp for torchrun that does not import halfstep.

``torchrun --nproc-per-node 2 -m halfstep run --policy mixed examples/frameworks/torch_amp_ddp.py`` trains it under a
policy, as ``halfstep run --policy mixed torchrun --nproc-per-node 2 examples/frameworks/torch_amp_ddp.py`` does. One
batch of the second rank overflows, and both ranks skip.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(rank: int) -> None:
    """Train this rank's share, and print what the weights are at the end."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    inputs = torch.randn(128, 8)
    inputs[127] = float("inf")
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) / 4)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    for input, target in loader:
        optimizer.zero_grad()
        with autocast():
            loss = F.mse_loss(model(input.to(device)), target.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    total = torch.cat([p.detach().double().flatten() for p in model.parameters()]).sum().item()
    print(f"rank {rank}: weights {float(total).hex()}, scale {scaler.get_scale():g}", flush=True)


def main() -> None:
    """Join the ranks that torchrun has started, and train."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
