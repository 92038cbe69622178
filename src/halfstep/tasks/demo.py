"""The demo's models: three whose steps are bound by different things, and one whose run in fp16 breaks and is cured.

Of those to time, `products` is bound by matrix products, `tail` by what is done to each weight after the backward pass
(casts, clipping, the optimizer), `tiny` by the interpreter. Data is random, a few batches that come again and again:
speed and bytes depend on shapes alone, and no metric is needed.

The run that breaks is two blocks of attention whose logits are divided after the product instead of before it. The
weights of the second block grow until a logit passes 65504, fp16's largest number: the loss is NaN from then on.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import halfstep as hs
from halfstep.tasks.gpt import GPT
from halfstep.tasks.task import Task

BATCHES = 4  # that come again and again
CLASSES, VOCABULARY = 10, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model to time, and what its step is bound by."""

    task: Task
    bound_by: str  # what takes most of a step, in a few words
    lesson: str  # what that means for low formats, in one sentence


def workloads(device: str, *, units: bool) -> tuple[Workload, ...]:
    """Return the three models in sizes for a device; on an accelerator the first two are larger.

    Without units for bf16, torch's own bf16 kernels can take a hundred times fp32's time, so that the model bound by
    products gets a batch of a sixteenth.
    """
    large = device != "cpu"
    width, layers, length, rows = (1024, 8, 512, 8) if large else (384, 2, 128, 8 if units else 1)
    hidden, positions = (8192 if large else 2048), length if units else length // 2
    gpt_heads = 6 if width == 384 else 16

    def gpt() -> nn.Module:
        return GPT(vocabulary=VOCABULARY, width=width, layers=layers, heads=gpt_heads, length=positions)

    about = f"GPT, {layers} layers of {width}, batch {rows} x {positions}"
    deep = f"MLP, 1024-{hidden}-{hidden}-{hidden}-{CLASSES}, batch 32"
    return (
        Workload(
            task=_task("products", gpt, (rows, positions), about, 3e-4, text=True),
            bound_by="matrix products",
            lesson="a low format pays by the speed of its units for products",
        ),
        Workload(
            task=_task("tail", lambda: _mlp(1024, hidden, hidden, hidden, CLASSES), (32, 1024), deep, 1e-4),
            bound_by="its tail (casts, clipping, optimizer)",
            lesson="low weights pay by the bytes that casts and optimizer do not move",
        ),
        Workload(
            task=_task("tiny", lambda: _mlp(32, 32, 32, CLASSES), (16, 32), "MLP, 32-32-32-10, batch 16", 1e-3),
            bound_by="the interpreter",
            lesson="its tensors are too small for a format to matter, and each cast adds to the step",
        ),
    )


def _task(
    name: str, model: Callable[[], nn.Module], shape: tuple[int, int], about: str, rate: float, *, text: bool = False
) -> Task:
    """Return a task with inputs of `shape`: numbers with a class a row, or words with a word each."""

    def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(step % BATCHES)
        if text:
            return tuple(torch.randint(0, VOCABULARY, (2, *shape), generator=source))
        return torch.randn(shape, generator=source), torch.randint(0, CLASSES, shape[:1], generator=source)

    return Task(
        name=name, model=model, batches=batches, about=about, clip_norm=1.0,
        loss_fn=lambda model, x, y: F.cross_entropy(model(x).flatten(0, -2), y.flatten()),
        optimizer=lambda net: AdamW(net.parameters(), lr=rate),
    )  # fmt: skip


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------ the run that breaks

WIDTH, POSITIONS, BATCH, GROUPS = 16, 8, 16, 4
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
    model = nn.Sequential(Attention(), Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, GROUPS))
    with torch.no_grad():
        model.get_parameter("1.qkv.weight").mul_(LARGE)
    model.to(device)
    return model, AdamW(model.parameters(), lr=RATE)


def _batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sequences whose class is the largest of the first features of their mean."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(BATCH, POSITIONS, WIDTH, generator=generator) for _ in range(BATCHES)]
    for number in range(steps):
        x = inputs[number % BATCHES]
        yield x, x.mean(1)[:, :GROUPS].argmax(1)


def _loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), y)
