"""Several models, losses and optimizers under one scaler.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "several models".
Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``,
and ``torch.cuda.amp.GradScaler`` into its bare name. Without CUDA: emulated fp16.
"""
# ruff: noqa: B007 - the document's own lines
# mypy: ignore-errors
# fmt: off

import torch
from pictures import Net, device, epochs, loss_fn, make_data

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

# ---- what the document leaves out: a model and data (pictures.py beside this file), numbers

data = make_data()

model0, model1 = Net().to(device), Net().to(device)
optimizer0 = torch.optim.SGD(model0.parameters(), lr=0.002, momentum=0.9)
optimizer1 = torch.optim.SGD(model1.parameters(), lr=0.002, momentum=0.9)


def errors():
    """Return both losses in fp32."""
    with torch.no_grad():
        return [
            sum(float(loss_fn(a * model0(x) + b * model1(x), y)) for x, y in data) / len(data)
            for a, b in ((2, 3), (3, -5))
        ]


before = errors()

# ---- the document's code

scaler = GradScaler()

for epoch in epochs:
    for input, target in data:
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with autocast():
            output0 = model0(input)
            output1 = model1(input)
            loss0 = loss_fn(2 * output0 + 3 * output1, target)
            loss1 = loss_fn(3 * output0 - 5 * output1, target)

        # (retain_graph here is unrelated to amp, it's present because in this
        # example, both backward() calls share some sections of graph.)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()

        # You can choose which optimizers receive explicit unscaling, if you
        # want to inspect or modify the gradients of the params they own.
        scaler.unscale_(optimizer0)

        scaler.step(optimizer0)
        scaler.step(optimizer1)

        scaler.update()

# ---- what came out

after = errors()
print(f"losses {before} -> {after}, scale {scaler.get_scale():g}")
