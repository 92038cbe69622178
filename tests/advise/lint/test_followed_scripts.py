"""What classes, helpers and frameworks do, followed through a file: what is right is left alone."""

from __future__ import annotations

import pytest

from tests.advise.lint.test_rules import found

CASES = {
    "two flags for one scaler": (
        "",
        """
scaler = torch.amp.GradScaler("cuda")
opt = torch.optim.SGD(model.parameters(), lr=.1)
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", enabled=amp):
        loss = f(model(x), y)
    if amp:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if scaler is not None:
        scaler.step(opt)
        scaler.update()
    else:
        opt.step()
""",
    ),
    "loss divided by the window": (
        "HS014",
        """
opt = torch.optim.SGD(model.parameters(), lr=.1)
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = f(model(x), y)
    (loss / 4).backward()
    opt.step()
""",
    ),
    "norm taken behind the step": (
        "",
        """
scaler = torch.amp.GradScaler("cuda")
opt = torch.optim.SGD(model.parameters(), lr=.1)
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = f(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
""",
    ),
    "hooks of Lightning": (
        "",
        """
import lightning as L
class M(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def backward(self, loss):
        loss.backward()
    def training_step(self, batch, i):
        self.manual_backward(self.net(batch).sum())
    def on_after_backward(self):
        print(self.net.weight.grad.norm())
L.Trainer(precision="16-mixed").fit(M(), loader)
""",
    ),
    "accelerate in bf16": (
        "",
        """
from accelerate import Accelerator
acc = Accelerator(mixed_precision="bf16")
model, opt = acc.prepare(model, opt)
for x in loader:
    loss = model(x)
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    "accelerate in a branch": (
        "",
        """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16") if use else None
for x in loader:
    loss = model(x)
    if accelerator:
        accelerator.backward(loss)
    else:
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    "region on a stack, short ranges": (
        "",
        """
stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16))
torch.autocast("cuda", dtype=torch.bfloat16).__enter__()
ids = torch.arange(10).half()
w = torch.arange(0, dim, 2, dtype=torch.float16)
""",
    ),
    "criterion outside of the region": (
        "",
        """
class Net(nn.Module):
    def forward(self, x):
        return self.out(x)
class Contrast(nn.Module):
    def forward(self, a, b):
        s = a @ b.t()
        return s.masked_fill(m, -1e9).logsumexp(1).mean()
net = Net(); crit = Contrast()
opt = torch.optim.SGD(net.parameters(), lr=.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        z = net(x)
    loss = crit(z.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
    ),
    "scaled loss of a helper is scaled again": (
        "HS064",
        """
scaler = torch.amp.GradScaler("cuda")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def compute(x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = f(model(x), y)
    return scaler.scale(loss)
for x, y in loader:
    opt.zero_grad()
    loss = compute(x, y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
    ),
    "two losses, one is scaled": (
        "HS007",
        """
scaler = torch.amp.GradScaler("cuda")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        first, second = model(x)
        loss = f(first, y)
        other = f(second, y)
    scaler.scale(other).backward()
    scaler.step(opt_2)
    loss.backward()
    scaler.step(opt)
    scaler.update()
""",
    ),
    "hook of Lightning clips": (
        "HS067",
        """
import lightning as L
class M(L.LightningModule):
    def training_step(self, batch, i):
        return self.net(batch).sum()
    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
L.Trainer(precision="16-mixed").fit(M(), loader)
""",
    ),
    "default dtype": (
        "HS028",
        """
torch.set_default_dtype(torch.bfloat16)
model = nn.Linear(8, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    opt.zero_grad()
    f(model(x), y).backward()
    opt.step()
""",
    ),
    "Trainer with fp16 and a model in fp16": (
        "HS030",
        """
from transformers import AutoModel, Trainer, TrainingArguments
def load():
    return AutoModel.from_pretrained("a", torch_dtype=torch.float16)
def args():
    return TrainingArguments("out", fp16=True)
Trainer(model=load(), args=args(), train_dataset=data).train()
""",
    ),
    "validation under no_grad halves what is trained": (
        "HS028",
        """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.no_grad()
def validate(model):
    model.half()
    score = model(data.half()).mean()
    return score.item()
model.train()
for epoch in range(9):
    for x, y in loader:
        opt.zero_grad()
        f(model(x), y).backward()
        opt.step()
    print(validate(model))
""",
    ),
    "mask in a forward that a region calls": (
        "HS044",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(8, 16)
    def forward(self, x):
        q, k = self.qk(x).chunk(2)
        return (q @ k.t()).masked_fill(self.mask, -1e9).softmax(1)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = f(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_of_the_rules_only_that_of_the_mistake_finds_something(name: str) -> None:
    code, text = CASES[name]
    assert found(f"import torch\nfrom torch import nn\n{text}") == ({code} if code else set())
