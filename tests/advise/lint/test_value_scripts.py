"""Models, losses and regions as they are written: what is right is left alone."""

from __future__ import annotations

import pytest

from tests.advise.lint.test_rules import found

CASES = {
    "evaluation loop in one region": ("", """
import torch
with torch.no_grad(), torch.autocast("cuda"):
    for x in loader:
        y = model(x)
"""),
    "fp16 inference": ("", """
import torch
model = Net().half()
with torch.no_grad():
    model(x)
"""),
    "half of inputs and a frozen teacher": ("", """
import torch
teacher = Net().half()
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    with torch.no_grad():
        t = teacher(x.half())
    loss = model(x, t.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
    "optimizer made again after a new head": ("", """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model.fc = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""),
    "loss in a disabled region on fp32": ("", """
import torch
import torch.nn.functional as F
model.train()
with torch.autocast("cuda"):
    out = model(x)
    with torch.autocast("cuda", enabled=False):
        loss = F.cross_entropy(out.float(), y)
"""),
    "loss in a disabled region on low": ("HS047", """
import torch
import torch.nn.functional as F
model.train()
with torch.autocast("cuda"):
    out = model(x)
    with torch.autocast("cuda", enabled=False):
        loss = F.cross_entropy(out, y)
"""),
    "regression loss promotes": ("", """
import torch
import torch.nn.functional as F
model.train()
with torch.autocast("cuda"):
    out = model(x)
loss = F.mse_loss(out, y)
"""),
    "numpy and math logs and roots": ("", """
import torch, math
import numpy as np
def loss_fn(x):
    p = np.exp(x) / np.exp(x).sum()
    return math.sqrt(sum(x ** 2)) + np.log(p)
"""),
    "softmax by hand with maximum": ("", """
import torch
def attend(s):
    e = torch.exp(s - s.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)
"""),
    "log of clamped probability": ("", """
import torch
def loss_fn(x):
    p = torch.softmax(x, -1).clamp(min=1e-6)
    return -torch.log(p).mean()
"""),
    "causal mask of -inf": ("", """
import torch
def mask(n):
    a = torch.triu(torch.ones(n, n) * float("-inf"), diagonal=1)
    b = torch.full((n, n), float("-inf")).triu(1)
    return a + b + torch.zeros(n, n).masked_fill(c, float("-inf"))
"""),
    "triu times -inf": ("HS041", """
import torch
def mask(n):
    return torch.triu(torch.ones(n, n), diagonal=1) * float("-inf")
"""),
    "rmse as a metric": ("", """
import torch
import torch.nn.functional as F
@torch.no_grad()
def evaluate(model, x, y):
    return torch.sqrt(F.mse_loss(model(x), y))
def loss_and_metric(model, x, y):
    loss = F.mse_loss(model(x), y)
    rmse = torch.sqrt(F.mse_loss(model(x), y))
    return loss, rmse.item()
"""),
    "rmse as a loss": ("HS042", """
import torch
import torch.nn.functional as F
for x, y in loader:
    loss = torch.sqrt(F.mse_loss(model(x), y))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
    "eps large enough": ("HS028", """
import torch
model = Net().half()
optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
"""),
    "fp32 master weights by hand": ("", """
import torch
model = Net().half()
master_params = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.Adam(master_params)
"""),
}  # fmt: skip
"""What is written -> (the codes of the rules that find something, the script)."""


@pytest.mark.parametrize("name", CASES)
def test_a_script_has_these_findings(name: str) -> None:
    codes, text = CASES[name]
    assert found(text) == set(codes.split())
