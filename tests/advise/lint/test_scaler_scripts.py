"""Training loops with a loss scaler as they are written: aliases, branches, helpers, several optimizers."""

from __future__ import annotations

import pytest

from tests.advise.lint.test_rules import found

CASES = {
    "alias of torch.cuda.amp, method scaler, clip before unscale": ("HS001 HS026", """
from torch.cuda import amp
from torch import nn
class Trainer:
    def __init__(self):
        self.scaler = amp.GradScaler()
    def step(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""),
    "unscale and clip under the same condition": ("", """
import torch
from torch.nn.utils import clip_grad_norm_
def train(model, loader, optimizer, scaler, clip, amp):
    for x, y in loader:
        optimizer.zero_grad()
        loss = model(x, y)
        if amp:
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
        else:
            loss.backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        if amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""),
    "scaler None in place of amp": ("", """
import torch
def train(model, loader, optimizer, args):
    scaler = torch.amp.GradScaler() if args.amp else None
    for x, y in loader:
        loss = model(x, y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
        optimizer.zero_grad()
"""),
    "conditions that differ in words are undecided": ("", """
import torch
def train(model, loader, optimizer, args):
    scaler = torch.amp.GradScaler() if args.amp else None
    for x, y in loader:
        loss = model(x, y)
        if args.amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if scaler:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
"""),
    "a helper unscales": ("", """
import torch
def clip(optimizer, scaler, model):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
def train(model, loader, optimizer, scaler):
    for x, y in loader:
        scaler.scale(model(x, y)).backward()
        prepare(optimizer, scaler)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""),
    "a method unscales": ("", """
import torch
class T:
    def unscale(self):
        self.scaler.unscale_(self.optimizer)
    def train(self, loader):
        for x in loader:
            self.scaler.scale(self.model(x)).backward()
            self.unscale()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
"""),
    "gradients divided by hand": ("", """
import torch
def train(model, loader, optimizer, scaler):
    for x, y in loader:
        scaler.scale(model(x, y)).backward()
        for p in model.parameters():
            p.grad.div_(scaler.get_scale())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""),
    "GAN: two optimizers, each unscaled, one update": ("", """
import torch
def train(g, d, loader, optim_g, optim_d, scaler):
    for x in loader:
        optim_d.zero_grad()
        scaler.scale(d(g(x).detach())).backward()
        scaler.unscale_(optim_d)
        torch.nn.utils.clip_grad_norm_(d.parameters(), 1)
        scaler.step(optim_d)
        optim_g.zero_grad()
        scaler.scale(d(g(x))).backward()
        scaler.unscale_(optim_g)
        torch.nn.utils.clip_grad_norm_(g.parameters(), 1)
        scaler.step(optim_g)
        scaler.update()
"""),
    "GAN: update after each loss of its own": ("", """
import torch
def train(g, d, loader, optim_g, optim_d, scaler):
    for x in loader:
        optim_d.zero_grad()
        scaler.scale(d(g(x).detach())).backward()
        scaler.step(optim_d)
        scaler.update()
        optim_g.zero_grad()
        scaler.scale(d(g(x))).backward()
        scaler.step(optim_g)
        scaler.update()
"""),
    "GAN: the second clip is not unscaled": ("", """
import torch
def train(g, d, loader, optim_g, optim_d, scaler):
    for x in loader:
        optim_d.zero_grad()
        optim_g.zero_grad()
        scaler.scale(d(g(x))).backward()
        scaler.step(optim_d)
        scaler.unscale_(optim_g)
        torch.nn.utils.clip_grad_norm_(g.parameters(), 1)
        scaler.step(optim_g)
        scaler.update()
"""),
    "a loop over optimizers": ("", """
import torch
def train(model, loader, optimizers, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
"""),
    "accumulation, right": ("", """
import torch
def train(model, loader, optimizer, scaler, n):
    for i, x in enumerate(loader):
        scaler.scale(model(x) / n).backward()
        if (i + 1) % n == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""),
    "accumulation: unscale_ in each micro-batch": ("HS003 HS036", """
import torch
def train(model, loader, optimizer, scaler, n):
    for i, x in enumerate(loader):
        scaler.scale(model(x) / n).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        if (i + 1) % n == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""),
    "loss scaler of timm": ("", """
import torch
def train(model, loader, optimizer, loss_scaler):
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x)
        loss_scaler(loss, optimizer, parameters=model.parameters())
        optimizer.zero_grad()
"""),
    "timm's NativeScaler itself": ("", """
import torch
class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler()
    def __call__(self, loss, optimizer, clip=None, parameters=None, update=True):
        self._scaler.scale(loss).backward()
        if update:
            if clip is not None:
                self._scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            else:
                self._scaler.unscale_(optimizer)
                norm = get_norm(parameters)
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            norm = None
        return norm
    def state_dict(self):
        return self._scaler.state_dict()
"""),
    "skip of bad batches": ("", """
import torch
def train(model, loader, optimizer, scaler):
    for x in loader:
        optimizer.zero_grad()
        loss = model(x)
        if not torch.isfinite(loss):
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""),
    "update at the top of the next iteration": ("", """
import torch
def train(model, loader, optimizer, scaler):
    for i, x in enumerate(loader):
        if i > 0:
            scaler.update()
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
"""),
    "step in a method, update in another": ("", """
import torch
class T:
    def __init__(self):
        self.scaler = torch.amp.GradScaler()
    def optimizer_step(self):
        self.scaler.step(self.optimizer)
    def after(self):
        self.scaler.update()
        self.optimizer.zero_grad()
    def train(self):
        for x in self.loader:
            self.scaler.scale(self.model(x)).backward()
            self.optimizer_step()
            self.after()
"""),
    "bf16 scaler that is off": ("", """
import torch
scaler = torch.amp.GradScaler(enabled=False)
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()
"""),
    "dtype chosen by a flag": ("", """
import torch
dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
scaler = torch.amp.GradScaler(enabled=(dtype == torch.float16))
for x in loader:
    with torch.autocast("cuda", dtype=dtype):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""),
    "paddle": ("", """
import paddle
scaler = paddle.amp.GradScaler()
for x in loader:
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optimizer)
"""),
    "scaler steps under TrainStep's own way": ("", """
import torch
import halfstep as hs
model, optimizer, scaler = hs.prepare(model, optimizer, policy="O2")
for x in loader:
    scaler.scale(model(x)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""),
    "two losses, one scaled and one not, each with its optimizer": ("", """
import torch
def train(a, b, loader, optimizer, other_opt, scaler):
    for x in loader:
        scaler.scale(a(x)).backward()
        b(x).backward()
        other_opt.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        other_opt.zero_grad()
"""),
    "SAM two steps on scaled gradients": ("HS002 HS005", """
import torch
def train(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        optimizer.first_step(zero_grad=True)
        scaler.scale(model(x)).backward()
        optimizer.second_step(zero_grad=True)
        scaler.update()
"""),
    "scaled loss kept under its own name": ("", """
import torch
def train(model, loader, optimizer, scaler):
    for x in loader:
        loss = model(x)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if x[0] == 0:
            print(loss.item())
"""),
    "a scheduler by the epoch": ("", """
import torch
def train(model, loader, optimizer, scaler, scheduler):
    for epoch in range(3):
        for x in loader:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scheduler.step()
"""),
    "checkpoint helper saves the scaler": ("", """
import torch
def train(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = {"optimizer": optimizer.state_dict()}
    state["scaler"] = scaler.state_dict()
    torch.save(state, "last.pt")
"""),
    "conditional expression statement": ("", """
import torch
def train(model, loader, optimizer, scaler, amp):
    for x in loader:
        loss = model(x)
        scaler.scale(loss).backward() if amp else loss.backward()
        scaler.step(optimizer) if amp else optimizer.step()
        if amp: scaler.update()
        optimizer.zero_grad()
"""),
    "early return for the other mode": ("", """
import torch
def step(loss, optimizer, scaler):
    if scaler is None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
"""),
    "a scaler for each fold, whose optimizer is new too": ("", """
import torch
for fold in folds:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler()
    for x in fold:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""),
    "a scaler for each epoch": ("HS011", """
import torch
def train(model, optimizer, loader):
    for epoch in range(3):
        scaler = torch.amp.GradScaler()
        for x in loader:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""),
    "the loss is read after it was scaled and divided again": ("", """
import torch
def train(model, loader, optimizer, scaler):
    for x in loader:
        loss = scaler.scale(model(x))
        loss.backward()
        scaler.step(optimizer)
        if x[0] == 0:
            print(loss.item() / scaler.get_scale())
        scaler.update()
        optimizer.zero_grad()
"""),
    "names of torch.cuda.amp as a fallback": ("", """
import torch
try:
    scaler = torch.amp.GradScaler("cuda")
except AttributeError:
    scaler = torch.cuda.amp.GradScaler()
"""),
    "a window's end that has a name": ("", """
import torch
def train(model, loader, optimizer, scaler, n):
    for i, x in enumerate(loader):
        scaler.scale(model(x)).backward()
        update = (i + 1) % n == 0
        if update:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % n == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""),
    "unscale_ in each micro-batch under an option": ("HS003 HS036", """
import torch
def train(model, loader, optimizer, scaler, n, clip):
    for i, x in enumerate(loader):
        scaler.scale(model(x)).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if (i + 1) % n == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""),
    "halfstep's scaler starts anew after a step that was left out": ("", """
import torch
import halfstep as hs
def train(model, loader, optimizer):
    scaler = hs.GradScaler("cpu")
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        if torch.isfinite(norm(model)):
            scaler.step(optimizer)
            scaler.update()
"""),
    "a second model whose backward pass is elsewhere": ("", """
import torch
def train(model, critic, loader, optimizer, critic_opt, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        critic.learn(x)
        critic_opt.step()
        optimizer.zero_grad()
        critic_opt.zero_grad()
"""),
}  # fmt: skip
"""What is written -> (the codes of the rules that find something, the script)."""


@pytest.mark.parametrize("name", CASES)
def test_a_script_has_these_findings(name: str) -> None:
    codes, text = CASES[name]
    assert found(text) == set(codes.split())
