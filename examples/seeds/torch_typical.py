"""The typical step of torch.cuda.amp: autocast, scale, step, update.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "basic operations".
Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``,
``.cuda()`` into ``.to(device)``, the dots among SGD's arguments into numbers. Without CUDA: emulated fp16.
"""
# ruff: noqa: B007 - the document's own lines
# mypy: ignore-errors
# fmt: off

import torch
from torch import nn, optim

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

# ---- what the document leaves out: a model, data, numbers

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Sequential):
    """A small convolutional network for images of 8 by 8."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1),
        )


def make_data(batches=10):
    """Return batches of noise and, for each image, the difference of its halves."""
    images = torch.randn(batches, 32, 1, 8, 8)
    targets = images[..., :4].mean((2, 3, 4)) - images[..., 4:].mean((2, 3, 4))
    return [(x.to(device), 4 * y[:, None].to(device)) for x, y in zip(images, targets, strict=True)]


def error(model):
    """Return the mean loss of a model in fp32."""
    with torch.no_grad():
        return sum(float(loss_fn(model(x), y)) for x, y in data) / len(data)


loss_fn = nn.MSELoss()
data = make_data()
epochs = range(12)

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
before = error(Net().to(device))
after = error(model)
print(f"loss {before:.4f} -> {after:.4f}, scale {scaler.get_scale():g}")
