"""The typical step of torch.cuda.amp: autocast, scale, step, update.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "basic operations".
Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``,
``.cuda()`` into ``.to(device)``, the dots among SGD's arguments into numbers. Without CUDA: emulated fp16.
"""
# ruff: noqa: B007 - the document's own lines
# mypy: ignore-errors
# fmt: off

import torch
from pictures import Net, device, epochs, error, loss_fn, make_data
from torch import optim

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

# ---- what the document leaves out: a model and data (pictures.py beside this file), numbers

data = make_data()

# ---- the document's code

# amp依赖Tensor core架构,所以model参数必须是cuda tensor类型
model = Net().to(device)
optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
# GradScaler对象用来自动做梯度缩放
scaler = GradScaler()

for epoch in epochs:
    for input, target in data:
        optimizer.zero_grad()
        # 在autocast enable 区域运行forward
        with autocast():
            # model做一个FP16的副本,forward
            output = model(input)
            loss = loss_fn(output, target)
        # 用scaler,scale loss(FP16),backward得到scaled的梯度(FP16)
        # 先是loss = loss*s,再backward
        scaler.scale(loss).backward()
        # scaler 更新参数,会先自动unscale梯度
        # 如果有nan或inf,自动跳过
        scaler.step(optimizer)
        # scaler factor更新
        scaler.update() # 更新s

# ---- what came out

torch.manual_seed(0)
before = error(Net().to(device), data)
after = error(model, data)
print(f"loss {before:.4f} -> {after:.4f}, scale {scaler.get_scale():g}")
