"""MegEngine's document "Automatic mixing accuracy (AMP)", run by halfstep.

Source: the page of that title in MegEngine's user guide. Changed: the six import lines, ``megengine`` into
``halfstep.compat.megengine``. Nothing else: the code below the imports is the document's, in its order, comments
included. `tests/compat/megengine/test_seed.py` runs it.
"""
# ruff: noqa: D103, E402, I001 - the document's own lines: functions without docstrings, imports as they come
# mypy: ignore-errors
# fmt: off

import numpy as np
import halfstep.compat.megengine as mge
from halfstep.compat.megengine import amp
from halfstep.compat.megengine.hub import load
net = load("megengine/models", "resnet18", pretrained=False)
inp = mge.tensor(np.random.normal(size=(1, 3, 224, 224)), dtype="float32")

with amp.autocast():    # 使用 autocast context 接口
    oup = net(inp)
print(oup.dtype)

@amp.autocast()
def train_func(inp):    # 使用 autocast 装饰器
    oup = net(inp)
    return oup

oup = train_func(inp)
print(oup.dtype)

amp.enabled = True
oup = net(inp)
amp.enabled = False
print(oup.dtype)

import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine.autodiff import GradManager
from halfstep.compat.megengine.optimizer import SGD

gm = GradManager().attach(net.parameters())
opt = SGD(net.parameters(), lr=0.01)
scaler = amp.GradScaler()           # 使用 GradScaler 进行梯度缩放

image = mge.tensor(np.random.normal(size=(1, 3, 224, 224)), dtype="float32")
label = mge.tensor(np.zeros(1), dtype="int32")

@amp.autocast()
def train_step(image, label):
    with gm:
        logits = net(image)
        loss = F.nn.cross_entropy(logits, label)
        scaler.backward(gm, loss)   # 通过 GradScaler 修改反传行为
    opt.step().clear_grad()
    return loss

train_step(image, label)

@amp.autocast()
def train_step(image, label):
    with gm:
        logits = net(image)
        loss = F.nn.cross_entropy(logits, label)
        gm.backward(loss, dy=mge.tensor(scaler.scale_factor))   # 对应步骤一
    # 这里可以插入对梯度的自定义操作
    scaler.unscale(gm.attached_tensors())                       # 对应步骤二
    scaler.update()                                             # 对应步骤三
    opt.step().clear_grad()
    return loss

train_step(image, label)
