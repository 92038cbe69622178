"""Parameters in every form and format, updated by an operator and by its meaning, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.reference import operators as reference
from halfstep.kernels.reference.operators import split_bf16

FP32, BF16, FP16, INT16 = torch.float32, torch.bfloat16, torch.float16, torch.int16
SIZES = (1, 1030)
"""Less than a block, and more than one."""

FORMS: tuple[tuple[str, torch.dtype], ...] = (
    ("plain", FP32),
    ("plain", BF16),
    ("plain", FP16),
    ("copy", BF16),  # here the format of the copy
    ("copy", FP16),
    ("split", BF16),
    ("kahan", BF16),
    ("kahan", FP16),
    ("stochastic", BF16),
)


class Options(NamedTuple):
    """An optimizer, and its options in the order of the operator's arguments."""

    method: str
    numbers: dict[str, Any]


KEEP, FLIP = {"maximize": False}, {"maximize": True}

OPTIONS = (
    Options("adam", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True} | KEEP),
    Options("adam", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "decoupled": False} | FLIP),
    Options("sgd", {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False} | KEEP),
    Options("sgd", {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True} | FLIP),
    Options("sgd", {"momentum": 0.0, "weight_decay": 0.01, "nesterov": False} | KEEP),
    Options("lion", {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1} | KEEP),
)

COMBINATIONS = [(*form, gradient, state) for form, gradient, state in product(FORMS, (FP32, BF16, FP16), (FP32, BF16))]


@dataclass(kw_only=True)
class Case:
    """What an operator is given.

    Attributes:
        lists: weights, beside, states and, for Adam, steps; what it changes.
    """

    form: str
    lists: list[list[Tensor]]
    gradients: list[Tensor]
    factor: Tensor
    bad: Tensor
    draws: Tensor = field(default_factory=lambda: torch.tensor([0x1234_5678_9ABC_DEF0, 3]))
    start: int = 5
    rate: Tensor | None = None
    lr: float = 1e-2

    def to(self, device: str) -> Case:
        """Return a copy of it on `device`."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, copy=True)

        return Case(
            form=self.form,
            lists=[list(map(moved, tensors)) for tensors in self.lists],
            gradients=list(map(moved, self.gradients)),
            factor=moved(self.factor),
            bad=moved(self.bad),
            draws=moved(self.draws),
            start=self.start,
            rate=None if self.rate is None else moved(self.rate),
            lr=self.lr,
        )


def case(
    method: str,
    form: str,
    low: torch.dtype,
    gradient: torch.dtype,
    state: torch.dtype,
    sizes: Sequence[int] = SIZES,
    *,
    momentum: bool = True,
) -> Case:
    """Return parameters of `sizes` elements, with states as after some steps."""
    weights, beside = [], []
    for size in sizes:
        value = torch.randn(size)
        if form == "copy":
            pair = value, torch.zeros(size, dtype=low)
        elif form == "split":
            pair = split_bf16(value)
        else:
            pair = value.to(low), (value - value.to(low).float()).to(low)
        weights.append(pair[0])
        if form in {"copy", "split", "kahan"}:
            beside.append(pair[1])
    lists = [weights, beside, [0.1 * torch.randn(size).to(state) for size in sizes]]
    if method == "adam":
        lists.append([0.1 * torch.rand(size).to(state) for size in sizes])
        lists.append([torch.tensor(float(3 * n)) for n, _ in enumerate(sizes)])
    elif not momentum:
        lists[-1] = []
    gradients = [torch.randn(size).to(gradient) for size in sizes]
    return Case(form=form, lists=lists, gradients=gradients, factor=torch.tensor(0.37), bad=torch.tensor(False))


def run(operator: Callable[..., None], given: Case, numbers: dict[str, Any]) -> None:
    """Call an operator, which changes `given`."""
    lr = given.lr if given.rate is None else 0.0
    common = (given.gradients, given.factor, given.bad, given.draws, given.start, given.form, given.rate, lr)
    operator(*given.lists, *common, *numbers.values())


def expect(method: str, given: Case, numbers: dict[str, Any]) -> None:
    """Do to `given` what `updates` says."""
    if bool(given.bad):
        return
    lr = given.lr if given.rate is None else float(given.rate)
    update = getattr(reference, f"{method}_")
    for n, gradient in enumerate(given.gradients):
        noises = [reference.noise(given.draws, given.start + n, stream, gradient.numel()) for stream in range(3)]
        own = [tensors[n] if tensors else None for tensors in given.lists]
        update(*own, gradient, given.factor, noises, given.form, lr, *numbers.values())


def bits(tensor: Tensor) -> Tensor:
    """Return the patterns of `tensor`, on the host."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.cpu().contiguous().view(words)


def assert_same(found: Case, expected: Case) -> None:
    """Fail if any bit differs."""
    for name, one, other in zip(
        ("weights", "beside", "first", "second", "steps"), found.lists, expected.lists, strict=False
    ):
        for n, (mine, wanted) in enumerate(zip(one, other, strict=True)):
            different = bits(mine) != bits(wanted)
            assert not different.any(), f"{name}[{n}]: {int(different.sum())} of {mine.numel()} numbers differ"


def assert_is_reference(
    operator: Callable[..., None], method: str, given: Case, numbers: dict[str, Any], device: str
) -> None:
    """Fail unless `operator` on `device` does what `updates` says."""
    expected, found = given.to("cpu"), given.to(device)
    expect(method, expected, numbers)
    run(operator, found, numbers)
    assert_same(found, expected)
