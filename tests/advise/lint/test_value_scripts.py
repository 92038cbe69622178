"""Losses, regions and arithmetic as they are written: what is right is left alone."""

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
    "where behind a root of data": ("", """
import torch
def features(x):
    return torch.where(x > 0, torch.log(x), 0.0)
"""),
    "device of a name": ("", """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.autocast(device):
    y = net(x)
with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
    y = net(x)
"""),
    "a device type that does not exist": ("HS021", """
import torch
with torch.autocast("gpu", dtype=torch.bfloat16):
    y = net(x)
"""),
    "a region for the CPU around a model on CUDA": ("HS021", """
import torch
model = Net().to("cuda")
model.eval()
with torch.autocast("cpu"):
    y = model(x)
"""),
    "autocast decorates forward and loss is inside": ("", """
import torch
import torch.nn.functional as F
class Net(torch.nn.Module):
    @torch.autocast("cuda")
    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y)
"""),
    "autocast decorates a function with BCE": ("HS023", """
import torch
criterion = torch.nn.BCELoss()
@torch.autocast("cuda")
def loss_fn(model, x, y):
    return criterion(torch.sigmoid(model(x)), y)
"""),
    "BCE in fp32 in a disabled region": ("", """
import torch
import torch.nn.functional as F
with torch.autocast("cuda"):
    p = torch.sigmoid(net(x))
    with torch.autocast("cuda", enabled=False):
        loss = F.binary_cross_entropy(p.float(), y)
"""),
    "attention by hand under fp16": ("HS044", """
import torch
def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = torch.matmul(q, k.transpose(-2, -1)) / 8
        scores = scores.masked_fill(mask == 0, -1e9)
        return scores.softmax(-1) @ v
"""),
    "attention by hand in unknown precision": ("", """
import torch
def attend(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-2, -1)) / 8
    scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v
"""),
    "probabilities clamped in fp16": ("HS045", """
import torch
with torch.autocast("cuda", dtype=torch.float16):
    p = torch.sigmoid(x @ w).clamp(1e-4, 1 - 1e-4)
"""),
    "a constant above the line of fp16": ("", """
import torch
with torch.autocast("cuda", dtype=torch.float16):
    p = torch.sigmoid(x @ w) + 1e-4
    q = torch.sigmoid((x @ w).float()) + 1e-8
"""),
    "a name that was low and is wide again": ("", """
import torch
with torch.autocast("cuda", dtype=torch.float16):
    p = x @ w
    p = p.float()
    q = p + 1e-8
    r = torch.softmax(x @ w, -1) + 1e-8
"""),
    "a penalty that is unscaled by hand": ("", """
import torch
inv_scale = 1.0 / scaler.get_scale()
grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
grads = [g * inv_scale for g in grads]
"""),
    "log of one minus sigmoid": ("HS040", """
import torch
def loss_fn(x):
    p = torch.sigmoid(x)
    return -torch.log(1 - p).mean()
"""),
    "distances with a small number under the root": ("", """
import torch
def loss_fn(a, b):
    d = torch.sqrt(((a - b) ** 2).sum(-1) + 1e-12)
    return d.mean()
"""),
    "distances without": ("HS042", """
import torch
def contrastive_loss(a, b):
    d = (a - b).pow(2).sum(-1).sqrt()
    return torch.relu(1 - d).mean()
"""),
}  # fmt: skip
"""What is written -> (the codes of the rules that find something, the script)."""


@pytest.mark.parametrize("name", CASES)
def test_a_script_has_these_findings(name: str) -> None:
    codes, text = CASES[name]
    assert found(text) == set(codes.split())
