"""Seed common mistakes of mixed precision into training scripts and count which of them the linter finds.

    python -m benchmarks.lint_mistakes [--json benchmarks/results/lint_mistakes.json] [--show KIND]

A kind of mistake is written twice: `MINE` was there when the rules for it were written, `HELD` was written before them
and is scored apart. Each is put into the shapes of scripts of its half (`HALVES`): one function, a plain script, a
helper that builds the objects; held out: a class, a loop that is given the objects, a step in a function of its own.
A line that begins with "-" is in the script with the mistake, one that begins with "+" in the one without.

The files of `BLIND` hold whole scripts, in the style of people's: those of "first" were written before a rule was read,
those of "second" after the cures of what was missed in "first", those of "third" and later ones by people who had seen
no rule. `blind` in the report is what each scored then, once, before a rule was changed for it; `summary` is of today.
"fourth" and "fifth" were written together on 2026-11-29; "fifth" was scored after the changes that "fourth" led to.
"sixth" and "seventh" were written together on the same day, by one who then changed the rules for "sixth" without
seeing what was missed in "seventh"; random.Random(6).sample chose the halves. "before" is what "seventh" scored first.
Half of their mistakes are of kinds that the table of docs/lint.md claims ("of HS001"); kinds "none" have no mistake.

A mistake is found if the linter says something of the script with it that it does not say of the one without
(recall). A finding is right if only the script with the mistake has it; what it says of a script without is wrong
(precision).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stamp import stamped
from halfstep.advise.lint import lint

COMMAND = "python -m benchmarks.lint_mistakes --json benchmarks/results/lint_mistakes.json"
GOAL = {"recall": 0.90, "precision": 0.98}

FOLDER = Path(__file__).parent / "seeded"
REPORT = Path(__file__).parent / "results" / "lint_mistakes.json"
BLIND = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
"""The files of scripts that were written before a rule was read or changed for them."""

Slots = Mapping[str, str]

IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn"
TORCH: Slots = {
    "imports": IMPORTS,
    "model": "model = nn.Linear(8, 2).cuda()",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "scaler": 'scaler = torch.amp.GradScaler("cuda")',
    "forward": 'with torch.autocast("cuda", dtype=torch.float16):\n    loss = F.cross_entropy(model(x), y)',
    "backward": "scaler.scale(loss).backward()",
    "step": "scaler.step(optimizer)\nscaler.update()",
    "zero": "optimizer.zero_grad()",
}
APEX: Slots = {
    "imports": IMPORTS.replace("from torch", "from apex import amp\nfrom torch"),
    "model": "model = nn.Linear(8, 2).cuda()",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "scaler": 'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")',
    "forward": "loss = F.cross_entropy(model(x), y)",
    "backward": "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()",
    "step": "optimizer.step()",
    "zero": "optimizer.zero_grad()",
}
SETUP = ("before", "model", "optimizer", "scaler", "objects")
LOOP = ("forward", "backward", "middle", "step", "zero", "end")


@dataclass(frozen=True)
class Mistake:
    """One kind of mistake in one half: what stands in which slot of a base, or a file of its own.

    What rules of `also` find in the script without the mistake is right; `claimed` is the rule whose title is of it.
    """

    kind: str
    base: Slots
    slots: Slots
    also: frozenset[str] = frozenset()
    claimed: str = ""


def mistake(kind: str, base: Slots, /, **slots: str) -> Mistake:
    """Return a mistake whose slots replace those of `base`; ``file=`` is a script by itself."""
    return Mistake(kind, base, {name: textwrap.dedent(text).strip("\n") for name, text in slots.items()})


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
CHECKPOINT = '"model": model.state_dict(), "optimizer": optimizer.state_dict()'

MINE = (
    mistake("update() in each micro-batch", TORCH, step="""
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
+           scaler.update()
            optimizer.zero_grad()
-       scaler.update()
        """, zero=""),
    mistake("continue without update()", TORCH, middle=f"""
        scaler.unscale_(optimizer)
        if not torch.isfinite({CLIP}):
+           scaler.update()
            optimizer.zero_grad()
            continue
        """),
    mistake("error_if_nonfinite", TORCH, middle="""
        scaler.unscale_(optimizer)
-       nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
+       nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """),
    mistake("scaled .grad edited", TORCH, middle="""
+       scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.add_(p.data, alpha=0.01)
        """),
    mistake("scaled .grad read", TORCH, middle="""
+       scaler.unscale_(optimizer)
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        print(i, float(total))
        """),
    mistake("scaled .grad clipped", TORCH, middle=f"+       scaler.unscale_(optimizer)\n        {CLIP}"),
    mistake("half() under a scaler", TORCH, objects="-       model.half()",
            forward="""
-       loss = F.cross_entropy(model(x.half()).float(), y)
+       with torch.autocast("cuda", dtype=torch.float16):
+           loss = F.cross_entropy(model(x), y)
        """),
    mistake("half() trained unscaled", TORCH, scaler="", objects="-       model.half()",
            forward="""
-       loss = F.cross_entropy(model(x.half()).float(), y)
+       loss = F.cross_entropy(model(x), y)
        """, backward="loss.backward()", step="optimizer.step()"),
    mistake("no zero_grad()", TORCH, zero="+       optimizer.zero_grad()"),
    mistake("the scaler is not saved", TORCH, after=f"""
-       torch.save({{{CHECKPOINT}}}, "last.pt")
+       torch.save({{{CHECKPOINT}, "scaler": scaler.state_dict()}}, "last.pt")
        """),
    mistake("the scaler is not loaded", TORCH, objects="""
        saved = torch.load("last.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
+       scaler.load_state_dict(saved["scaler"])
        """),
    mistake("the schedule advances after skipped steps", TORCH,
            objects="scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 1000)",
            step="""
+       before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
-       if scheduler is not None:
+       if scaler.get_scale() >= before:
            scheduler.step()
        """),
    mistake("the loss is not scaled", TORCH, backward="""
-       loss.backward()
+       scaler.scale(loss).backward()
        """),
    mistake("a step beside the scaler", TORCH, step="""
-       optimizer.step()
+       scaler.step(optimizer)
        scaler.update()
        """),
    mistake("no update()", TORCH, step="scaler.step(optimizer)\n+scaler.update()"),
    mistake("a scaler for each batch", TORCH, scaler='+       scaler = torch.amp.GradScaler("cuda")',
            forward="""
-       scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        """),
    mistake("fp16 without a scaler", TORCH, scaler='+       scaler = torch.amp.GradScaler("cuda")',
            backward="-       loss.backward()\n+       scaler.scale(loss).backward()",
            step="-       optimizer.step()\n+       scaler.step(optimizer)\n+       scaler.update()"),
    mistake("a low running average", TORCH, before="import copy",
            objects="""
-       ema = copy.deepcopy(model).bfloat16()
+       ema = copy.deepcopy(model)
        """,
            end="""
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()):
                a.mul_(0.999).add_(b, alpha=0.001)
        """),
    mistake("eps of 1e-8 in fp16", {}, file="""
        import torch

        def norm(x):
-           x = x.half()
+           x = x.float()
            return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-8)
        """),
    mistake("squares summed in fp16", {}, file="""
        import torch

        def loss_fn(out, y):
-           return ((out.half() - y.half()) ** 2).sum() / out.numel()
+           return ((out.float() - y.float()) ** 2).sum() / out.numel()
        """),
    mistake("a mask beyond fp16", {}, file="""
        import torch

        def attend(q, k, v, mask):
            scores = (q.half() @ k.half().transpose(-2, -1)) / 8
            with torch.autocast("cuda", dtype=torch.float16):
                scores = q @ k.transpose(-2, -1)
-           return scores.masked_fill(mask, -1e9).softmax(-1) @ v
+           return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        """),
    mistake("the loss is read scaled", TORCH, backward="""
        scaled = scaler.scale(loss)
        scaled.backward()
-       if i % 100 == 0: print(scaled.item())
+       if i % 100 == 0: print(loss.item())
        """),
    mistake("Apex: no scale_loss", APEX, backward="""
-       loss.backward()
+       with amp.scale_loss(loss, optimizer) as scaled_loss:
+           scaled_loss.backward()
        """),
    mistake("Apex: O2 clips the model's parameters", APEX, middle="""
-       nn.utils.clip_grad_norm_(model.parameters(), 1.0)
+       nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        """),
    mistake("Apex: amp is not saved", APEX, after=f"""
-       torch.save({{{CHECKPOINT}}}, "last.pt")
+       torch.save({{{CHECKPOINT}, "amp": amp.state_dict()}}, "last.pt")
        """),
    mistake("Apex: amp is not loaded", APEX, objects="""
        saved = torch.load("last.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
+       amp.load_state_dict(saved["amp"])
        """),
    mistake("Apex: half() by hand", APEX, model="""
-       model = nn.Linear(8, 2).cuda().half()
+       model = nn.Linear(8, 2).cuda()
        """),
    mistake("Apex: clips inside scale_loss", APEX, backward="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
-           nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
+       nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        """),
    mistake("Apex: the model's wrapper comes first", APEX, model="""
        model = nn.Linear(8, 2).cuda()
-       model = nn.parallel.DistributedDataParallel(model)
        """, objects="+       model = nn.parallel.DistributedDataParallel(model)"),
    mistake("Apex: the optimizer is made later", APEX, optimizer="""
+       optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        """, scaler="""
-       model = amp.initialize(model, opt_level="O2")
-       optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
+       model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        """),
)  # fmt: skip
"""The half that was there when the rules were written."""

HELD = (
    mistake("update() in each micro-batch", TORCH, backward="scaler.scale(loss / 8).backward()", step="""
        last = (i + 1) % 8 == 0 or i + 1 == len(loader)
        if last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
+           scaler.update()
-       scaler.update()
        """, zero=""),
    mistake("continue without update()", TORCH, middle="""
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 100 or norm.isnan():
            print("skipped", i)
            optimizer.zero_grad(set_to_none=True)
+           scaler.update()
            continue
        """),
    mistake("error_if_nonfinite", TORCH, middle="""
        scaler.unscale_(optimizer)
-       norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0, norm_type=2, error_if_nonfinite=True)
+       norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0, norm_type=2, error_if_nonfinite=False)
        """),
    mistake("scaled .grad edited", TORCH, middle="""
+       scaler.unscale_(optimizer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    parameter.grad += 1e-4 * parameter.sign()
        """),
    mistake("scaled .grad edited (clamp)", TORCH, middle="""
+       scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.data.clamp_(-1.0, 1.0)
        """),
    mistake("scaled .grad read", TORCH, middle="""
+       scaler.unscale_(optimizer)
        norms = {n: p.grad.abs().max().item() for n, p in model.named_parameters() if p.grad is not None}
        if max(norms.values()) > 10: print(norms)
        """),
    mistake("scaled .grad clipped", TORCH, middle="""
+       scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        """),
    mistake("half() under a scaler", TORCH, model="""
-       model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda().half()
+       model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
        """),
    mistake("half() trained unscaled", TORCH, scaler="", model="""
-       model = nn.Linear(8, 2).to("cuda", dtype=torch.float16)
+       model = nn.Linear(8, 2).to("cuda", dtype=torch.float32)
        """, forward="loss = F.cross_entropy(model(x), y)", backward="loss.backward()", step="optimizer.step()"),
    mistake("no zero_grad()", TORCH, middle=f"scaler.unscale_(optimizer)\n{CLIP}", zero="""
+       optimizer.zero_grad(set_to_none=True)
        """),
    mistake("the scaler is not saved", TORCH, after=f"""
        checkpoint = {{{CHECKPOINT}, "epoch": 1}}
+       checkpoint["scaler"] = scaler.state_dict()
        torch.save(checkpoint, "checkpoint.pth")
        """),
    mistake("the scaler is not loaded", TORCH, objects="""
        checkpoint = torch.load("checkpoint.pth", map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
+       if "scaler" in checkpoint:
+           scaler.load_state_dict(checkpoint["scaler"])
        """),
    mistake("the schedule advances after skipped steps", TORCH,
            objects="scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
            step="""
+       scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
-       if i < 1000:
+       if scale <= scaler.get_scale():
            scheduler.step()
        """),
    mistake("the loss is not scaled", TORCH, middle=f"scaler.unscale_(optimizer)\n{CLIP}", backward="""
-       loss.backward()
+       scaler.scale(loss).backward()
        """),
    mistake("a step beside the scaler", TORCH, step="""
        if (i + 1) % 2 == 0:
-           optimizer.step()
+           scaler.step(optimizer)
+           scaler.update()
            optimizer.zero_grad()
        """, zero=""),
    mistake("no update()", TORCH, middle=f"scaler.unscale_(optimizer)\n{CLIP}",
            step="scaler.step(optimizer)\n+scaler.update()"),
    mistake("a scaler for each batch", TORCH, scaler='+       scaler = torch.amp.GradScaler("cuda")',
            zero="""
        optimizer.zero_grad()
        """, backward="""
-       scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        scaler.scale(loss).backward()
        """),
    mistake("fp16 without a scaler", TORCH, scaler='+       scaler = torch.amp.GradScaler("cuda")',
            forward='with torch.amp.autocast(device_type="cuda"):\n    loss = F.mse_loss(model(x), y)',
            backward="-       loss.backward()\n+       scaler.scale(loss).backward()",
            step="-       optimizer.step()\n+       scaler.step(optimizer)\n+       scaler.update()"),
    mistake("a low running average", TORCH, before="import copy",
            model="""
-       model = nn.Linear(8, 2).cuda().bfloat16()
+       model = nn.Linear(8, 2).cuda()
        """, scaler="",
            forward='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = F.mse_loss(model(x), y)',
            backward="loss.backward()", step="optimizer.step()",
            objects="ema = copy.deepcopy(model)",
            end="""
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.parameters()):
                old.lerp_(new, 0.001)
        """),
    mistake("eps of 1e-8 in fp16", {}, file="""
        import torch

        class RMSNorm(torch.nn.Module):
            def __init__(self, dim, eps=1e-8):
                super().__init__()
                self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(dim))

            def forward(self, x):
-               y = x.to(torch.float16)
+               y = x.to(torch.float32)
                return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-8)).to(x.dtype)
        """),
    mistake("squares summed in fp16", {}, file="""
        import torch

        def criterion(prediction, target):
-           prediction, target = prediction.half(), target.half()
+           prediction, target = prediction.float(), target.float()
            difference = prediction - target
            return torch.mean(difference.pow(2))
        """),
    mistake("a mask beyond fp16", {}, file="""
        import torch

        class Attention(torch.nn.Module):
            def forward(self, q, k, v, mask):
                with torch.autocast("cuda", dtype=torch.float16):
                    scores = torch.matmul(q, k.transpose(-2, -1)) / 8.0
-                   scores = scores.masked_fill(mask == 0, -1e10)
+                   scores = scores.masked_fill(mask == 0, -1e4)
                    return torch.matmul(torch.softmax(scores, dim=-1), v)
        """),
    mistake("the loss is read scaled", TORCH, backward="""
-       loss = scaler.scale(loss)
-       loss.backward()
+       scaler.scale(loss).backward()
        if i % 10 == 0:
            print("loss", loss.item())
        """),
    mistake("Apex: no scale_loss", APEX, forward="loss = F.cross_entropy(model(x), y) / 4", backward="""
-       loss.backward()
+       with amp.scale_loss(loss, optimizer) as scaled_loss:
+           scaled_loss.backward()
        """, middle="nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)"),
    mistake("Apex: O2 clips the model's parameters", APEX, middle="""
-       norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
+       norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=0.5)
        print(norm)
        """),
    mistake("Apex: amp is not saved", APEX, after=f"""
        state = {{{CHECKPOINT}, "epoch": 3}}
+       state["amp"] = amp.state_dict()
        torch.save(state, "epoch3.pt")
        """),
    mistake("Apex: amp is not loaded", APEX, objects="""
        checkpoint = torch.load("epoch3.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
+       amp.load_state_dict(checkpoint["amp"])
        """),
    mistake("Apex: half() by hand", APEX, model="model = nn.Linear(8, 2).cuda()",
            optimizer="-       model.half()\n        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"),
    mistake("Apex: steps inside scale_loss", APEX, backward="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
-           optimizer.step()
+       optimizer.step()
        """, step=""),
    mistake("Apex: the model's wrapper comes first", APEX, model="""
        model = nn.Linear(8, 2).cuda()
-       model = nn.DataParallel(model)
        """, objects="+       model = nn.DataParallel(model)"),
    mistake("Apex: the optimizer is made later", APEX, objects="""
-       optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        """),
)  # fmt: skip
"""The half that was written before the rules, and is scored apart."""


# ------------------------------------------------------------------ shapes of scripts


def _at(slots: Slots, names: tuple[str, ...], depth: int) -> str:
    """Return the code of some slots, indented; a line of one script alone keeps its sign in front."""
    lines = [line for name in names for line in slots.get(name, "").splitlines() if line.strip()]
    return "\n".join(lines_at(lines, depth))


def lines_at(lines: list[str], depth: int) -> Iterator[str]:
    """Yield lines with another indentation behind their sign."""
    for line in lines:
        sign, code = (line[0], line[1:]) if line[0] in "+-" else (" ", line)
        yield f"{sign}{'    ' * depth}{code}"


def normal(text: str) -> str:
    """Return a slot whose code begins in the first column behind the sign."""
    lines = [line for line in text.splitlines() if line.strip()]
    signs = [line[0] if line[0] in "+-" else "" for line in lines]
    bare = [(" " if line[1:2] == " " else "") + line[1:] if line[0] in "+-" else line for line in lines]
    code = textwrap.dedent("\n".join(bare))
    return "\n".join(f"{sign}{line}" for sign, line in zip(signs, code.splitlines(), strict=True))


def joined(s: Slots, *parts: str) -> str:
    """Return a script of the imports and some parts."""
    return "\n".join([_at(s, ("imports",), 0), "", *parts, ""])


LOADER = "     for i, (x, y) in enumerate(loader):"


def function(s: Slots) -> str:
    parts = (" def train(loader):", _at(s, SETUP, 1), LOADER, _at(s, LOOP, 2), _at(s, ("after",), 1))
    return joined(s, *parts)


def script(s: Slots) -> str:
    parts = (" from data import loader", _at(s, SETUP, 0), LOADER[4:], _at(s, LOOP, 1), _at(s, ("after",), 0))
    return joined(s, *parts)


def helper(s: Slots) -> str:
    scaler = s.get("scaler", "")
    made = "model, optimizer" + (", scaler" if scaler.startswith("scaler =") else "")
    kept = () if made.endswith("scaler") or "initialize" in scaler else ("scaler",)
    first = _at(s, tuple(name for name in SETUP if name not in ("objects", *kept)), 1)
    make = (" def make():", first, f"     return {made}\n")
    parts = (" def train(loader):", f"     {made} = make()", _at(s, (*kept, "objects"), 1))
    return joined(s, *make, *parts, LOADER, _at(s, LOOP, 2), _at(s, ("after",), 1))


def owned(text: str) -> str:
    """Return code in which the objects are attributes of self, under other names."""
    names = {"model": "net", "optimizer": "opt", "scaler": "grad_scaler", "scheduler": "lr_scheduler", "ema": "ema"}
    return re.sub(
        r"(?<![\w.\"])(model|optimizer|scaler|scheduler|ema)\b(?![\"'])", lambda m: f"self.{names[m[1]]}", text
    )


def class_(s: Slots) -> str:
    first, second, after = (owned(_at(s, names, 2 + (names == LOOP))) for names in (SETUP, LOOP, ("after",)))
    head = (" class Trainer:", "     def __init__(self):", first, "     def fit(self, loader):")
    return joined(s, *head, f"    {LOADER}", second, after)


def objects(s: Slots) -> str:
    """Return the names of the objects of a script; "" if one of them is in one of its two texts alone."""
    setup = _at(s, SETUP, 0)
    names = ["model", "optimizer", *(n for n in ("scaler", "scheduler", "ema") if f"{n} = " in setup)]
    return "" if "+" in s.get("scaler", "") and "scaler" in names else ", ".join(names)


def arguments(s: Slots) -> str:
    given = objects(s)
    if not given:
        return function(s)
    epoch = (f" def train_one_epoch({given}, loader):", LOADER, _at(s, LOOP, 2), _at(s, ("after",), 1))
    return joined(s, *epoch, " def main(loader):", _at(s, SETUP, 1), f"     train_one_epoch({given}, loader)")


def step_apart(s: Slots) -> str:
    given = f"i, x, y, loader, {objects(s)}"
    if not objects(s) or "continue" in _at(s, LOOP, 0):
        return script(s)
    step = (f" def training_step({given}):", _at(s, LOOP, 1), " def run(loader):", _at(s, SETUP, 1))
    return joined(s, *step, LOADER, f"         training_step({given})", _at(s, ("after",), 1))


def scripts(name: str) -> tuple[Mistake, ...]:
    """Return the mistakes of a file of whole scripts; each begins with ``=== KIND | of CODE | also CODES``."""
    made = []
    for part in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("=== ")[1:]:
        head, text = part.split("\n", 1)
        names, _, also = head.partition(" | also ")
        kind, _, claimed = names.partition(" | of ")
        made.append(Mistake(kind, {}, {"whole": text}, frozenset(also.split()), claimed))
    return tuple(made)


HALVES: dict[str, tuple[tuple[Mistake, ...], tuple[Callable[[Slots], str], ...]]]
HALVES = {"mine": (MINE, (function, script, helper)), "held out": (HELD, (class_, arguments, step_apart))}
HALVES |= {name: (scripts(name), ()) for name in BLIND}


def texts(one: Mistake, shapes: tuple[Callable[[Slots], str], ...]) -> Iterator[tuple[str, str]]:
    """Yield the name of a shape and the text with signs in it."""
    if "whole" in one.slots:
        yield "file", one.slots["whole"]
        return
    if "file" in one.slots:
        yield "file", "\n".join(lines_at(normal(one.slots["file"]).splitlines(), 0)) + "\n"
        return
    slots = {name: normal(text) for name, text in {**one.base, **one.slots}.items()}
    for shape in shapes:
        yield shape.__name__.strip("_"), shape(slots)


def side(text: str, sign: str) -> str:
    """Return the script of the lines with a sign and of those with none."""
    return "".join(f"{line[1:]}\n" for line in text.splitlines() if line[:1] in ("", " ", sign))


def findings(text: str) -> list[tuple[str, int]]:
    """Return code and line of each finding in a script."""
    compile(text, "train.py", "exec")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(text, encoding="utf-8")
        return [(finding.code, finding.line) for finding in lint(path)]


def run(every: int = 1) -> list[dict[str, Any]]:
    """Return a row for each script with a mistake, or for one of `every` so many."""
    rows: list[dict[str, Any]] = []
    number = itertools.count()
    for name, (half, shapes) in HALVES.items():
        for one in half:
            for shape, text in texts(one, shapes):
                if next(number) % every:
                    continue
                good, bad = findings(side(text, "+")), findings(side(text, "-"))
                new = [code for code, _ in bad if code not in {c for c, _ in good}]
                wrong = sorted(code for code, _ in good if code not in one.also)
                rows.append({"half": name, "kind": one.kind, "shape": shape, "found": sorted(set(new)),
                             "right": len(new), "wrong": wrong})  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return recall and precision of each half and of both, and the kinds that are missed."""
    made: dict[str, Any] = {}
    for half in (*HALVES, "both"):
        some = [row for row in rows if half in (row["half"], "both")]
        some, every = [row for row in some if not row["kind"].startswith("none, ")], some
        found, right = sum(bool(row["found"]) for row in some), sum(row["right"] for row in some)
        wrong = sum(len(row["wrong"]) for row in every)
        missed: dict[str, list[str]] = {}
        for row in some:
            if not row["found"]:
                missed.setdefault(row["kind"], []).append(row["shape"])
        made[half] = {"scripts": len(some), "found": found, "recall": found / len(some), "right": right, "wrong": wrong,
                      "precision": right / max(right + wrong, 1), "missed": missed}  # fmt: skip
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", help="print the scripts of this kind instead; + and - in front")
    given = parser.parse_args()
    if given.show:
        for half, shapes in HALVES.values():
            for one in half:
                if one.kind == given.show:
                    print(*(f"# {shape}\n{text}" for shape, text in texts(one, shapes)), sep="\n")
        return 0
    rows = run()
    found = summary(rows)
    for name, numbers in found.items():
        print(f"{name}: recall {numbers['found']}/{numbers['scripts']} = {numbers['recall']:.2f}, precision "
              f"{numbers['right']}/{numbers['right'] + numbers['wrong']} = {numbers['precision']:.3f}")  # fmt: skip
    for kind, shapes in found["both"]["missed"].items():
        print(f"missed: {kind}: {', '.join(shapes)}")
    for row in rows:
        if row["wrong"]:
            print(f"wrong: {row['kind']}, {row['shape']}: {', '.join(row['wrong'])}")
    if given.json:
        blind = json.loads(REPORT.read_text(encoding="utf-8"))["blind"]
        report = {"command": COMMAND, "goal": GOAL, "blind": blind, "summary": found, "rows": rows}
        given.json.write_text(json.dumps(stamped(report), indent=1) + "\n", encoding="utf-8")
    return int(any(found["both"][name] < goal for name, goal in GOAL.items()))


if __name__ == "__main__":
    sys.exit(main())
