"""Cases for all backends: parameters in every form and format for updates, and tensors whose exponents are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.optimizers import BY_OPERATOR
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


SPECIAL = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e-40, -1e-42, 3.38e38, 65519.0, 65520.0, 6e-8, 1e-8])
"""Values at the edges of formats."""

KEEP, FLIP = {"maximize": False}, {"maximize": True}
BETAS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

OPTIONS = (
    Options("adam", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True} | KEEP),
    Options("adam", {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "decoupled": False} | FLIP),
    Options("sgd", {"momentum": 0.9, "weight_decay": 0.0, "nesterov": False} | KEEP),
    Options("sgd", {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True} | FLIP),
    Options("sgd", {"momentum": 0.0, "weight_decay": 0.01, "nesterov": False} | KEEP),
    Options("lion", {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1} | KEEP),
    Options("nadam", BETAS | {"weight_decay": 0.01, "momentum_decay": 4e-3, "decoupled": True} | KEEP),
    Options("nadam", BETAS | {"weight_decay": 0.1, "momentum_decay": 0.3, "decoupled": False} | FLIP),
)

COMBINATIONS = [(*form, gradient, state) for form, gradient, state in product(FORMS, (FP32, BF16, FP16), (FP32, BF16))]


@dataclass(kw_only=True)
class Case:
    """What an operator is given.

    Attributes:
        lists: weights, beside, states and counters; what it changes.
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
    special: bool = False,
) -> Case:
    """Return parameters of `sizes` elements, with states as after some steps; large ones begin with `SPECIAL` if so."""
    weights, beside = [], []
    for size in sizes:
        value = torch.randn(size)
        if special:
            value *= 10.0 ** (torch.rand(size) * 6 - 4)
            if size > 4 * len(SPECIAL):
                value[: len(SPECIAL)] = SPECIAL
        if form == "copy":
            pair = value, torch.zeros(size, dtype=low)
        elif form == "split":
            pair = split_bf16(value)
        else:
            pair = value.to(low), (value - value.to(low).float()).nan_to_num(0.0, 0.0, 0.0).to(low)
        weights.append(pair[0])
        if form in {"copy", "split", "kahan"}:
            beside.append(pair[1])
    lists = [weights, beside, [0.1 * torch.randn(size).to(state) for size in sizes]]
    if method in {"adam", "nadam"}:
        lists.append([0.1 * torch.rand(size).to(state) for size in sizes])
        lists.append([torch.tensor(float(3 * n)) for n, _ in enumerate(sizes)])
        if method == "nadam":
            lists.append([torch.tensor(0.4 ** (3 * n)) for n, _ in enumerate(sizes)])
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
    """Update `given` by the reference."""
    if bool(given.bad):
        return
    lr = given.lr if given.rate is None else float(given.rate)
    spec = BY_OPERATOR[f"{method}_"]
    for n, gradient in enumerate(given.gradients):
        place, size = given.start + n, gradient.numel()
        noises = [_noise(*given.draws.tolist(), place, stream, size) for stream in range(3)]
        (weight, beside), lists = (tensors[n] if tensors else None for tensors in given.lists[:2]), given.lists[2:]
        assert weight is not None
        states = [tensors[n] for tensors in lists[: len(spec.states)] if tensors]
        counters = [tensors[n] for tensors in lists[len(spec.states) :]]
        common = (gradient, given.factor, noises, given.form, lr)
        reference.update(spec.reference, weight, beside, states, counters, *common, **numbers)


@cache
def _noise(seed: int, count: int, tensor: int, stream: int, size: int) -> Tensor:
    return reference.noise(torch.tensor([seed, count]), tensor, stream, size)


def bits(tensor: Tensor) -> Tensor:
    """Return the patterns of `tensor`, on the host."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.cpu().contiguous().view(words)


def assert_same(found: Case, expected: Case, *, any_nan: bool = False) -> None:
    """Fail if any bit differs; under `any_nan` all NaN are equal."""
    names = ("weights", "beside", "first", "second", "steps", "products")
    for name, one, other in zip(names, found.lists, expected.lists, strict=False):
        for n, (mine, wanted) in enumerate(zip(one, other, strict=True)):
            different = bits(mine) != bits(wanted)
            if any_nan:
                different &= ~(mine.isnan() & wanted.isnan())
            assert not different.any(), f"{name}[{n}]: {int(different.sum())} of {mine.numel()} numbers differ"


def assert_is_reference(
    operator: Callable[..., None],
    method: str,
    given: Case,
    numbers: dict[str, Any],
    device: str = "cpu",
    *,
    any_nan: bool = False,
) -> None:
    """Fail unless `operator` on `device` does what the reference does."""
    expected, found = given.to("cpu"), given.to(device)
    expect(method, expected, numbers)
    run(operator, found, numbers)
    assert_same(found, expected, any_nan=any_nan)


# ------------------------------------------------------------------ exponents


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def counted_tensors(dtype: torch.dtype, size: int) -> list[Tensor]:
    """Return random bits, numbers with zeros among them, subnormals, powers of two, and strided ones, of `dtype`."""
    generator = torch.Generator().manual_seed(size)
    word = WORDS[dtype.itemsize]
    limits = torch.iinfo(word)
    bits = torch.randint(limits.min, limits.max, (size,), generator=generator, dtype=word)
    numbers = torch.randn(size, generator=generator).to(dtype)
    numbers[::7], numbers[::11] = 0.0, -0.0
    tiny = torch.randn(size, generator=generator, dtype=torch.float64) * torch.finfo(dtype).smallest_normal / 9
    powers = torch.ldexp(
        torch.ones(size, dtype=torch.float64), torch.randint(-1074, 1024, (size,), generator=generator)
    )
    strided = torch.randn(size, 2, generator=generator).to(dtype)[:, 1]
    return [bits.view(dtype), numbers, tiny.to(dtype), powers.to(dtype), strided, torch.full((size,), -1.5).to(dtype)]
