"""Overflow: a run in fp16 that breaks while it trains, its explanation, and the same run continued under the cure.

Two blocks of attention whose logits are divided after the product instead of before it. The weights of the second
block grow until a logit passes 65504, fp16's largest number: the loss is NaN from then on.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs

WIDTH, POSITIONS, BATCH, CLASSES = 16, 8, 16, 4
BATCHES = 4  # that come again and again
LARGE = 40.0  # times the usual weights in the second block
RATE = 0.03
FP16 = hs.Policy.of("mixed", dtype="fp16").replace(scale=hs.ScaleRule(init=2.0**8))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescue:
    """A broken run, why it broke, and its continuation."""

    broken_at: int  # the first step that was not applied, from 1
    broken: tuple[float, ...]  # loss of every step in fp16; nan where it was not finite
    skipped: int  # how many of the steps from `broken_at` on were not applied
    verdict: hs.lens.Verdict  # what `step.explain()` returned
    cure: hs.lens.Cure  # its first cure
    cured: tuple[float, ...]  # loss of every step from `broken_at` on, from the same weights, under the cure's policy
    cured_skipped: int  # how many of them were not applied


class Attention(nn.Module):
    """One head of attention that divides its logits after the product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.transpose(-2, -1)
        return x + self.out(torch.softmax(logits / WIDTH**0.5, -1) @ v)  # type: ignore[no-any-return]


def rescue(*, device: str = "cpu", steps: int, on_share: Callable[[float], None] = lambda share: None) -> Rescue:
    """Train in fp16 until a step breaks, explain it, and train on twice: as before, and under the first cure."""
    batches = [tuple(t.to(device) for t in batch) for batch in _batches(steps)]
    model, optimizer = _start(device)
    step = hs.TrainStep(model, optimizer, _loss_fn, policy=FP16, clip_norm=1.0)
    losses: list[float] = []
    verdict, saved, at = None, None, 0
    skipped = 0
    log = logging.getLogger("halfstep")
    with ExitStack() as quiet:  # the verdict on the broken steps is printed in full
        quiet.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for number, batch in enumerate(batches):
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if verdict is None else None
            result = step(*batch).host()
            losses.append(result.loss)
            skipped += result.skipped and verdict is not None
            if result.skipped and verdict is None:
                found = step.explain()
                if found.cause != "scale":
                    verdict, saved, at, skipped = found, before, number, 1
            on_share(0.6 * (number + 1) / steps)
        if verdict is None or saved is None or not verdict.cures or verdict.cures[0].policy is None:
            raise hs.HalfstepError(f"the run of {steps} steps did not break as it should have")
        cure = verdict.cures[0]
        model, optimizer = _start(device)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step = hs.TrainStep(model, optimizer, _loss_fn, policy=cure.policy, clip_norm=1.0)
        results = [step(*batch).host() for batch in batches[at:]]
    on_share(1.0)
    return Rescue(
        broken_at=at + 1, broken=tuple(losses), skipped=skipped, verdict=verdict, cure=cure,
        cured=tuple(result.loss for result in results), cured_skipped=sum(result.skipped for result in results),
    )  # fmt: skip


def _start(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        model.get_parameter("1.qkv.weight").mul_(LARGE)
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def _batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sequences whose class is the largest of the first features of their mean."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(BATCH, POSITIONS, WIDTH, generator=generator) for _ in range(BATCHES)]
    for number in range(steps):
        x = inputs[number % BATCHES]
        yield x, x.mean(1)[:, :CLASSES].argmax(1)


def _loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), y)
