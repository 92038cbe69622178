"""Gradient penalty: a loss that contains a gradient, unscaled in between.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "gradient penalty".
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
        # 防止溢出,在不是autocast 区域,先用scaled loss 得到 scaled 梯度
        scaled_grad_params = torch.autograd.grad(outputs=scaler.scale(loss),
                                                 inputs=model.parameters(),
                                                 create_graph=True)
        # 梯度unscale
        inv_scale = 1./scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        # 在autocast 区域,loss 加上梯度惩罚项
        with autocast():
            grad_norm = 0
            for grad in grad_params:
                grad_norm += grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm

        scaler.scale(loss).backward()

        # may unscale_ here if desired
        # (e.g., to allow clipping unscaled gradients)

        # step() and update() proceed as usual.
        scaler.step(optimizer)
        scaler.update()

# ---- what came out

after = error(model, data)
print(f"loss {before:.4f} -> {after:.4f}, scale {scaler.get_scale():g}")
