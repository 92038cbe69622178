"""Accumulation: step and update once for several batches.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "gradient accumulation".
Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``. Without CUDA: emulated fp16.
"""
# ruff: noqa: B007 - the document's own lines
# mypy: ignore-errors
# fmt: off

import torch
from pictures import Net, device, epochs, error, loss_fn, make_data

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

# ---- what the document leaves out: a model and data (pictures.py beside this file), numbers

data = make_data()
iters_to_accumulate = 2

model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
before = error(model, data)

# ---- the document's code

scaler = GradScaler()

for epoch in epochs:
    for i, (input, target) in enumerate(data):
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
            # loss 根据 累加的次数归一一下
            loss = loss / iters_to_accumulate

        # scale 归一的loss 并backward
        scaler.scale(loss).backward()

        if (i + 1) % iters_to_accumulate == 0:
            # may unscale_ here if desired
            # (e.g., to allow clipping unscaled gradients)

            # step() and update() proceed as usual.
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

# ---- what came out

after = error(model, data)
print(f"loss {before:.4f} -> {after:.4f}, scale {scaler.get_scale():g}")
