"""Cases: a model, its batches, its loss, and which candidates run it on which device.

Data is random and made of a few batches that come again and again, so that a net can learn it by heart and its loss
falls; speed depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks import models
from halfstep.tasks.gpt import GPT
from halfstep.tasks.images import LeNet5, ResNet

Batch = tuple[Tensor, ...]
LossFn = Callable[..., Tensor]

BATCHES = 4  # that come again and again
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}

AMP, AGAIN = "torch.amp", "torch.amp again"
PLAIN = ("fp32", AMP, AGAIN)
OURS = ("torch", "mixed", "O2", "pure")
COMPILED = ("torch.amp compiled", "mixed compiled", "pure compiled")
WRAPPERS = ("accelerate", "Lightning Fabric")
TORCHAO = ("torchao bf16 stochastic rounding", "torchao 8-bit AdamW")
LINEAR_LOSS = ("mixed, linear_cross_entropy", "pure, linear_cross_entropy")
EMPTY_MODE = "torch.amp in an empty function mode"
ON_CUDA = ("torch.amp compiled, CUDA graphs", "mixed captured", "pure captured")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model in one low format.

    Attributes:
        name: short name, for ``--only`` and the JSON.
        title: what tables call it.
        about: size of model and batch.
        dtype: the low format of every candidate, "bf16" or "fp16".
        model: returns a new fp32 model; its weights depend only on torch's global generator.
        batch: returns batch `step`, CPU tensors.
        loss_fn: ``loss_fn(model, *batch)``, a scalar.
        linear_loss: the same loss out of hidden states and the head's weight, for `hs.linear_cross_entropy`; or None.
        rate: of AdamW.
        cpu: candidates on a CPU, () if the case is for GPUs only. Those that compile take minutes there, so that not
            every case has them.
        cuda: candidates on a GPU.
        seconds: what rounds may take on a CPU.
        rounds: the most rounds.
        rare: candidates so slow that they run in only so many rounds.
    """

    name: str
    title: str
    about: str
    dtype: str = "bf16"
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: LossFn
    linear_loss: LossFn | None = None
    rate: float = 1e-3
    cpu: tuple[str, ...] = (*PLAIN, *WRAPPERS, *OURS)
    cuda: tuple[str, ...] = (*PLAIN, *WRAPPERS, *TORCHAO, *OURS, *COMPILED, *ON_CUDA)
    seconds: float = 20.0
    rounds: int = 300
    rare: tuple[tuple[str, int], ...] = ()

    @property
    def low(self) -> torch.dtype:
        """The low format as torch calls it."""
        return LOW[self.dtype]

    def candidates(self, device: str) -> tuple[str, ...]:
        """Return the labels of what runs on a device of this type."""
        return self.cpu if device == "cpu" else self.cuda


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step % BATCHES)


def images(count: int, channels: int, side: int) -> Callable[[int], Batch]:
    """Return a source of images and labels."""

    def batch(step: int) -> Batch:
        source = seeded(step)
        pixels = torch.randn(count, channels, side, side, generator=source)
        return pixels, torch.randint(0, models.CLASSES, (count,), generator=source)

    return batch


def vectors(count: int, width: int) -> Callable[[int], Batch]:
    """Return a source of vectors and labels."""

    def batch(step: int) -> Batch:
        source = seeded(step)
        return torch.randn(count, width, generator=source), torch.randint(0, 10, (count,), generator=source)

    return batch


def text(count: int, length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Return a source of token sequences and what follows each token."""

    def batch(step: int) -> Batch:
        tokens = torch.randint(0, vocabulary, (count, length + 1), generator=seeded(step))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of classes, or of next tokens."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def linear_cross_entropy(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    """Return the same loss without logits of the whole batch."""
    return hs.linear_cross_entropy(models.hidden(model, x), model.head.weight, y.flatten())


def gpt_case(name: str, title: str, width: int, count: int, length: int, **more: Any) -> Case:
    return Case(
        name=name,
        title=title,
        about=f"4 layers of {width}, vocabulary 4096, batch {count} x {length}",
        model=lambda: models.gpt(width, 4, 4, length),
        batch=text(count, length, 4096),
        loss_fn=cross_entropy,
        linear_loss=linear_cross_entropy,
        rate=3e-4,  # at 1e-3 its loss leaps in the first steps, in fp32 too
        **more,
    )


def mlp_case(name: str, *widths: int, **more: Any) -> Case:
    millions = sum((a + 1) * b for a, b in zip(widths, widths[1:], strict=False)) / 1e6
    return Case(
        name=name,
        title=f"MLP, {millions:.0f}M parameters",
        about=f"{'-'.join(map(str, widths))}, batch 32: bound by what is done to weights",
        model=lambda: models.mlp(*widths),
        batch=vectors(32, widths[0]),
        loss_fn=cross_entropy,
        rate=1e-4,
        **more,
    )


LENET = Case(
    name="lenet5",
    title="LeNet-5",
    about="61,706 parameters, 64 images of 32 x 32: bound by the interpreter",
    model=LeNet5,
    batch=images(64, 1, 32),
    loss_fn=cross_entropy,
    rate=1e-4,
    cpu=(*PLAIN, EMPTY_MODE, *WRAPPERS, *OURS, *COMPILED),
    seconds=25.0,
)
SMALL_RESNET = Case(
    name="resnet_small",
    title="ResNet, 9 norms",
    about="77,562 parameters, 64 images of 8 x 8: bound by the interpreter",
    model=ResNet,
    batch=images(64, 1, 8),
    loss_fn=cross_entropy,
    rate=3e-4,
    cpu=(*PLAIN, EMPTY_MODE, *WRAPPERS, *OURS),
)


def chain(layers: int) -> Case:
    """Return a case whose tensors are so small that a step's time is what the host does."""
    return Case(
        name=f"chain{2 * layers}",
        title=f"{2 * layers} tiny tensors",
        about=f"{layers} linear layers of 8, batch 4: bound by the host",
        model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))),
        batch=lambda step: (torch.randn(4, 8, generator=seeded(step)),),
        loss_fn=lambda model, x: model(x).square().mean(),
        rate=1e-5,
        cpu=(*PLAIN, *OURS, "lean"),
        rounds=2000,
        seconds=20.0,
    )


CHAINS = (chain(5), chain(74))
RESNET18 = Case(
    name="resnet18",
    title="ResNet-18",
    about="11.2M parameters, 8 images of 32 x 32: bound by convolutions",
    model=models.ResNet18,
    batch=images(8, 3, 32),
    loss_fn=cross_entropy,
    rate=1e-4,
    seconds=60.0,
)
CONVNEXT = Case(
    name="convnext",
    title="ConvNeXt",
    about="1.2M parameters, 16 images of 32 x 32: bound by norms and activations",
    model=models.ConvNeXt,
    batch=images(16, 3, 32),
    loss_fn=cross_entropy,
    seconds=40.0,
)
GPT256 = gpt_case(
    "gpt256",
    "GPT, d = 256",
    256,
    8,
    256,
    cpu=(*PLAIN, "mixed", "O2", "pure", *COMPILED, *LINEAR_LOSS),
    cuda=(*PLAIN, *WRAPPERS, *TORCHAO, *OURS, *COMPILED, *LINEAR_LOSS, *ON_CUDA),
    seconds=60.0,
)
GPT512 = gpt_case("gpt512", "GPT, d = 512, one sequence", 512, 1, 64, seconds=40.0)
MLP21 = mlp_case(
    "mlp21m", 1024, 4096, 4096, 10, seconds=50.0, cpu=(*PLAIN, *WRAPPERS, *TORCHAO, *OURS, "lean", *COMPILED)
)
MLP25 = mlp_case("mlp25m", 1024, 4096, 4096, 1024, seconds=25.0, cpu=(*PLAIN, *OURS))
GPT124M = Case(
    name="gpt124m",
    title="GPT-2, 124M",
    about="12 layers of 768, vocabulary 50304, batch 8 x 1024",
    model=models.gpt124m,
    batch=text(8, 1024, 50304),
    loss_fn=cross_entropy,
    linear_loss=linear_cross_entropy,
    rate=3e-4,
    cpu=(),
    cuda=(*PLAIN, *WRAPPERS, *TORCHAO, *OURS, "lean", *COMPILED, *LINEAR_LOSS, *ON_CUDA),
)

# torch's fp16 kernels on a CPU without fp16 units take ten and more times as long as fp32: few rounds are enough, and
# torch.amp in bf16 gives the spread that loss curves are compared with (`curves.py`).
HALF = ("fp32", "fp32 again", "torch.amp bf16", AMP, "torch", "mixed", "O2", "pure")
LENET_FP16 = replace(LENET, name="lenet5_fp16", dtype="fp16", cpu=HALF, cuda=(), seconds=12.0)
RESNET_FP16 = Case(
    name="resnet18_fp16",
    title="ResNet-18 of width 16",
    about="0.7M parameters, 64 images of 32 x 32: bound by convolutions",
    dtype="fp16",
    model=lambda: models.ResNet18(16),
    batch=images(64, 3, 32),
    loss_fn=cross_entropy,
    rate=1e-4,
    cpu=HALF,
    cuda=(),
    seconds=30.0,
    rare=((AMP, 4),),
)
GPT_FP16 = replace(
    GPT256,
    name="gpt256_fp16",
    dtype="fp16",
    cpu=("fp32", "fp32 again", "torch.amp bf16", AMP, "mixed", "pure"),
    cuda=(),
    seconds=40.0,
    rare=((AMP, 2),),
)

CASES = {
    case.name: case
    for case in (
        *CHAINS,
        LENET,
        SMALL_RESNET,
        RESNET18,
        CONVNEXT,
        GPT256,
        GPT512,
        MLP21,
        MLP25,
        GPT124M,
        LENET_FP16,
        RESNET_FP16,
        GPT_FP16,
    )
}
