"""Clipping: unscale, clip, step.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "gradient clipping".
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
max_norm = 1.0

model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
before = error(model, data)

# ---- the document's code

scaler = GradScaler()

for epoch in epochs:
    for input, target in data:
        optimizer.zero_grad()
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()

        # unscale 梯度,可以不影响clip的threshold
        scaler.unscale_(optimizer)

        # clip梯度
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

        # unscale_()已经被显式调用了,scaler正常执行step更新参数,有nan/inf也会跳过
        scaler.step(optimizer)
        scaler.update()

# ---- what came out

after = error(model, data)
print(f"loss {before:.4f} -> {after:.4f}, scale {scaler.get_scale():g}")
