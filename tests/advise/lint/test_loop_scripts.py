"""Training loops, models and optimizers as they are written: what is right is left alone."""

from __future__ import annotations

import pytest

from tests.advise.lint.test_rules import found

CASES = {
    "sklearn's scaler": ("", """
import torch
from sklearn.preprocessing import StandardScaler
scaler = StandardScaler()
x = scaler.fit_transform(x)
for i in range(3):
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
    "backward in region through a context variable": ("HS018", """
import torch
ctx = torch.autocast("cuda", torch.bfloat16)
for x in loader:
    with ctx:
        loss = model(x)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
    "region disabled around backward": ("", """
import torch
for x in loader:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x)
        with torch.autocast("cuda", enabled=False):
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
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
    "a model moved after the optimizer keeps its parameters": ("", """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model.cuda()
model.to(torch.device("cuda"))
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
    "accelerate": ("", """
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16")
for x in loader:
    with accelerator.accumulate(model):
        loss = model(x)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""),
    "fabric": ("", """
import torch
for x in loader:
    loss = model(x)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""),
    "zero_grad by a helper, by None, and by the model": ("", """
import torch
for x in loader:
    for p in model.parameters():
        p.grad = None
    model(x).backward()
    optimizer.step()
"""),
    "no zero_grad": ("HS034", """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in loader:
    model(x).backward()
    optimizer.step()
"""),
    "no zero_grad but a helper has the optimizer": ("", """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in loader:
    reset(optimizer)
    model(x).backward()
    optimizer.step()
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
    "a scaler's class as annotation, aliased": ("HS004", """
import torch
from torch.amp import GradScaler as GS
def fit(model, opt, data):
    s = GS()
    amp = s
    for x in data:
        opt.zero_grad()
        amp.scale(model(x)).backward()
        amp.step(opt)
"""),
    "half for export after training": ("", """
import torch
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for x in loader:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
model.half()
torch.save(model.state_dict(), "small.pt")
"""),
    "half for export after a call that trains": ("", """
import torch
def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    fit(model, optimizer)
    model.half()
    export(model)
"""),
    "half under a flag": ("", """
import torch
def main(args):
    model = Net()
    if args.half:
        model.half()
    optimizer = torch.optim.AdamW(model.parameters())
    fit(model, optimizer)
"""),
    "half in the chain that makes the model": ("HS028 HS029 HS030", """
import torch
from torch import optim
model = Net().half().cuda()
opt = optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler()
for x in loader:
    scaler.scale(model(x).float().mean()).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
"""),
    "a pretrained model loaded in bf16 and fine-tuned": ("HS028", """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""),
    "a pretrained model loaded in bf16 with adapters": ("", """
import torch
from transformers import AutoModelForCausalLM
from peft import get_peft_model
model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.bfloat16)
model = get_peft_model(model, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
"""),
    "eps of fp16 Adam that is not zero": ("HS028", """
import torch
model = Net()
model.to(torch.float16)
optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
train(model, optimizer)
"""),
    "adapters after the optimizer": ("HS031", """
import torch
from peft import get_peft_model
optimizer = torch.optim.AdamW(model.parameters())
model = get_peft_model(model, config)
train(model, optimizer)
"""),
    "embeddings that keep their parameter and linear layers that keep theirs": ("", """
import torch
from torchao.float8 import convert_to_float8_training
optimizer = torch.optim.AdamW(model.parameters())
model.resize_token_embeddings(1000)
convert_to_float8_training(model)
train(model, optimizer)
"""),
    "new parameters that are added to the optimizer": ("", """
import torch
optimizer = torch.optim.AdamW(model.parameters())
model.head = torch.nn.Linear(3, 3)
optimizer.add_param_group({"params": model.head.parameters()})
"""),
    "fully_shard after the optimizer": ("HS031", """
import torch
from torch.distributed.fsdp import fully_shard
optimizer = torch.optim.AdamW(model.parameters())
fully_shard(model)
"""),
    "fp16 by default without a scaler": ("HS014", """
import torch
def train(model, optimizer, loader):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x)
        loss.backward()
        optimizer.step()
"""),
    "bf16 by default on a CPU": ("", """
import torch
def train(model, optimizer, loader):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = model(x)
        loss.backward()
        optimizer.step()
"""),
    "a running average in half, and one that is only saved": ("HS033", """
import copy, torch
ema = copy.deepcopy(model).half()
saved = {"ema": copy.deepcopy(ema).half()}
for x in loader:
    for a, b in zip(ema.parameters(), model.parameters()):
        a.mul_(0.999).add_(b, alpha=0.001)
"""),
    "a scaler's step beside TrainStep in another branch": ("", """
import halfstep as hs
step = hs.TrainStep(model, optimizer, loss_fn, policy="mixed")
for x in loader:
    if fast:
        step(x)
    else:
        loss_fn(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
"""),
    "an apex model wrapped first": ("HS032", """
import torch
from apex import amp
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(model)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
"""),
    "many micro-batches under no_sync": ("", """
import contextlib, torch
def train(model, loader, optimizer, n):
    for i, x in enumerate(loader):
        last = (i + 1) % n == 0
        with contextlib.nullcontext() if last else model.no_sync():
            model(x).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""),
    "gradients skipped where they are not finite, cleared always": ("", """
import torch
for x in loader:
    model(x).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
"""),
    "a loss that is checked before its backward pass": ("", """
import torch
for x in loader:
    loss = model(x)
    if torch.isfinite(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""),
}  # fmt: skip
"""What is written -> (the codes of the rules that find something, the script)."""


@pytest.mark.parametrize("name", CASES)
def test_a_script_has_these_findings(name: str) -> None:
    codes, text = CASES[name]
    assert found(text) == set(codes.split())
