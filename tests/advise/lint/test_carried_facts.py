"""Facts that a script states elsewhere: in tables, options, arguments, classes, and in calls of other files' kinds."""

from __future__ import annotations

import pytest

from tests.advise.lint.test_rules import found

LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""

CASES = {
    "a callback clips, and nothing unscales": ("HS001", """
import torch
class Clip:
    def on_gradients(self, loop):
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
class Loop:
    def run(self, loader, callbacks):
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            scaler.scale(self.loss(x, y)).backward()
            self.fire("on_gradients", callbacks)
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
""", "        torch.nn", "        loop.scaler.unscale_(loop.optimizer)\n        torch.nn"),
    "two optimizers of one model": ("HS005", """
import torch
one = torch.optim.SGD(model.a.parameters(), lr=0.1)
two = torch.optim.SGD(model.b.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    model.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(one)
    two.step()
    scaler.update()
""", "two.step()", "scaler.step(two)"),
    "an object with the optimizers' first step": ("HS005", """
import torch
def climb(sam, model, loader, scaler):
    for x, y in loader:
        scaler.scale(loss_fn(model(x), y)).backward()
        sam.first_step()
        model.zero_grad()
""", "scaler.scale(loss_fn(model(x), y)).backward()", "loss_fn(model(x), y).backward()"),
    "a table of states": ("HS012", f"""
import torch
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
{LOOP}
parts = {{"model": model, "optimizer": optimizer}}
torch.save({{name: part.state_dict() for name, part in parts.items()}}, "last.pt")
""", '"optimizer": optimizer}', '"optimizer": optimizer, "scaler": scaler}'),
    "the state of another": ("HS013", f"""
import torch
scaler = torch.amp.GradScaler("cuda")
optimizer.load_state_dict(saved["optimizer"])
scaler.load_state_dict(saved["optimizer"])
{LOOP}
""", 'scaler.load_state_dict(saved["optimizer"])', 'scaler.load_state_dict(saved["scaler"])'),
    "a forward that autocasts itself": ("HS014", """
import torch
class Net(torch.nn.Module):
    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        return self.body(x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
""", "torch.float16", "torch.bfloat16"),
    "a scaler that is off": ("HS014", f"""
import torch
scaler = torch.amp.GradScaler("cuda", enabled=False)
{LOOP}
""", ", enabled=False", ""),
    "a format by the name that all calls give": ("HS014", """
import torch
class Trainer:
    def __init__(self, model, precision):
        formats = {"half": torch.float16, "bf16": torch.bfloat16}
        self.context = torch.autocast("cuda", dtype=formats[precision])
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(self, x, y):
        with self.context:
            loss = loss_fn(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
Trainer(model, "half").step(x, y)
""", '(model, "half")', '(model, "bf16")'),
    "on where the format is not fp16": ("HS015", f"""
import torch
scaler = torch.amp.GradScaler("cuda", enabled=args.dtype != "float16")
{LOOP}
""", '!= "float16"', '!= "float32"'),
    "DataParallel on some machines": ("HS025", """
import torch
net = Net().cuda()
if torch.cuda.device_count() > 1:
    net = torch.nn.DataParallel(net)
with torch.autocast("cuda", torch.bfloat16):
    y = net(x)
""", "torch.nn.DataParallel", "torch.nn.parallel.DistributedDataParallel"),
    "a parameter in the format of a weight": ("HS030", f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.float16)
scaler = torch.amp.GradScaler("cuda")
def adapter(layer):
    given = {{"dtype": layer.weight.dtype}}
    return torch.nn.Parameter(torch.zeros(8, 8, **given))
{LOOP}
""", "layer.weight.dtype", "torch.float32"),
    "a table of averages": ("HS033", """
import torch
class Average:
    def __init__(self, model):
        self.shadow = {name: p.detach().half() for name, p in model.named_parameters()}
    def update(self, model):
        for name, p in model.named_parameters():
            old = self.shadow[name]
            old.mul_(0.999).add_(p, alpha=0.001)
""", "detach().half()", "detach().clone()"),
    "the least number of fp32": ("HS044", """
import torch
with torch.autocast("cuda", torch.float16):
    scores = (q @ k).masked_fill(mask, torch.finfo(torch.float32).min)
""", "torch.float32", "torch.float16"),
    "a function with a region of its own": ("HS045", """
import torch
def update(model, rewards):
    rewards = rewards.half()
    weights = rewards / (rewards.std() + 1e-8)
    with torch.autocast("cuda", torch.float16):
        return model(weights)
""", "rewards.half()", "rewards.float()"),
    "the default of an option": ("HS057", """
import argparse
import torch
from apex import amp
parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2")
args = parser.parse_args()
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
for x, y in loader:
    optimizer.zero_grad()
    with amp.scale_loss(loss_fn(model(x), y), optimizer) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""", '"O2"', '"O1"'),
    "an engine scales what is scaled": ("HS064", """
import torch
class Engine:
    def __init__(self, net):
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")
    def backward(self, loss):
        self.scaler.scale(loss).backward()
def train(engine: Engine, loader):
    for x, y in loader:
        engine.backward(engine.scaler.scale(loss_fn(x, y)))
""", "engine.scaler.scale(loss_fn(x, y))", "loss_fn(x, y)"),
    "a method of an object clips": ("HS001", """
import torch
class Clipper:
    def clip(self, parameters):
        torch.nn.utils.clip_grad_norm_(parameters, self.limit)
clipper = Clipper()
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    clipper.clip(model.parameters())
    scaler.step(optimizer)
    scaler.update()
""", "    clipper.clip", "    scaler.unscale_(optimizer)\n    clipper.clip"),
    "a scale by hand that is an argument": ("HS069", """
import torch
def step(model, optimizer, x, y, loss_scale=128.0):
    loss = loss_fn(model.half()(x), y)
    loss = loss * loss_scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""", "    optimizer.step()", "    for p in model.parameters():\n        p.grad.div_(loss_scale)\n    optimizer.step()"),
}  # fmt: skip
"""What is written -> (the code of the rule that finds it, the script, what is replaced in the right one, by what)."""


@pytest.mark.parametrize("name", CASES)
def test_a_fact_from_elsewhere_is_found_and_the_right_script_is_not(name: str) -> None:
    code, text, wrong, right = CASES[name]
    assert found(text) == {code}
    assert text.count(wrong) == 1 and found(text.replace(wrong, right)) == set()
