"""A training script of torch.amp that does not import halfstep.

``halfstep run --policy mixed examples/frameworks/torch_amp_script.py`` trains it under a policy. The loop is that of
torch's recipe: autocast around forward and loss, a scaler, clipping, a scheduler that waits while a step is skipped.
One batch overflows.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
parser.add_argument("--bad", type=int, default=5, help="the step whose batch overflows")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, args.dtype)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
data = torch.Generator().manual_seed(1)

for step in range(args.steps):
    inputs = torch.randn(32, 8, generator=data)
    targets = inputs[:, :4].argmax(dim=1).to(device)
    if step == args.bad:
        inputs[0] = float("inf")
    with torch.autocast(device_type=device, dtype=dtype):
        outputs = net(inputs.to(device))
        loss = F.cross_entropy(outputs, targets)
        with torch.autocast(device_type=device, enabled=False):
            accuracy = (outputs.float().argmax(dim=1) == targets).float().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if scaler.get_scale() >= before:
        scheduler.step()
    print(f"{step} {float(loss.item()).hex()} {scaler.get_scale():g} {accuracy.item():.3f}")
