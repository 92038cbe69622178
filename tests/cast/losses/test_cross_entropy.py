"""cross_entropy of low logits: torch's value, the fp32 gradient rounded once, and nothing in fp32 saved."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cast.losses.cross_entropy import cross_entropy
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.reference.cross_entropy import CHUNK
from halfstep.tasks.measure import SavedForBackward
from halfstep.testing import count_step
from tests.products import sampled

BF16, HALF = torch.bfloat16, torch.float16
SHAPES = [(6, 5), (1, 5), (6, 5, 3), (2, 5, 3, 2)]
OPTIONS: list[dict[str, Any]] = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "ignore_index": ignored}
    for reduction, smoothing, weight, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (None, torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])), (-100, 2)
    )
]
IDS = [f"{o['reduction']}-{o['label_smoothing']}-{o['weight'] is not None}-{o['ignore_index']}" for o in OPTIONS]


def batch(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = (torch.randn(shape, generator=generator) * 4).to(dtype)
    target = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=generator)
    target.view(-1)[0] = 0  # a mean over ignored targets alone is nan, there as here
    return logits, target


@pytest.fixture(autouse=True, params=[None, 1 << 20, 8], ids=["kernels", "one-chunk", "many-chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run with kernels, and without; return whether there are some."""
    if request.param is None:
        return not load_kernels("cpu")
    monkeypatch.setenv("HALFSTEP_NATIVE", "0")
    monkeypatch.setitem(CHUNK, "cpu", request.param)
    return False


@pytest.mark.parametrize(("options", "shape", "dtype"), sampled(OPTIONS, SHAPES, (BF16, HALF)))
def test_value_and_gradient_are_those_of_fp32_rounded_once(
    options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, chunk: bool
) -> None:
    logits, target = batch(shape, dtype)
    low, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    exact = {**options, "weight": None if options["weight"] is None else options["weight"].double()}
    loss, want = cross_entropy(low, target, **options), F.cross_entropy(wide, target, **exact)
    assert loss.dtype is torch.float32
    assert torch.allclose(loss.double(), want, rtol=2.0**-22, atol=2.0**-22)
    if options["reduction"] == "none" and not (chunk and len(shape) == 2):
        assert torch.equal(loss, F.cross_entropy(logits.float(), target, **options))
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad(loss, low, seed)
    (true,) = torch.autograd.grad(want, wide, seed.double())
    assert got.dtype is dtype and got.stride() == logits.stride()
    # half an ulp of the low format, and what fp32 itself loses where terms cancel
    assert ((got.double() - true).abs() <= true.abs() * torch.finfo(dtype).eps * 0.51 + 1e-7).all()


@pytest.mark.parametrize("options", OPTIONS[::3], ids=IDS[::3])
def test_second_derivatives_agree_with_fp64(options: dict[str, Any]) -> None:
    logits, target = batch((6, 5), HALF)
    exact = {**options, "weight": None if options["weight"] is None else options["weight"].double()}

    def penalty(function: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        loss = function(x, target, **options).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.to(torch.float64).square().sum(), x)[0]

    got = penalty(cross_entropy, logits.clone().requires_grad_(), options)
    want = penalty(F.cross_entropy, logits.double().requires_grad_(), exact)
    assert torch.allclose(got.double(), want, rtol=2e-2, atol=2e-3)


def test_transforms_of_functions(chunk: bool) -> None:
    logits, target = batch((6, 5), HALF)
    want = torch.func.vmap(lambda x: F.cross_entropy(x.float(), target, reduction="none"))(torch.stack([logits] * 3))
    got = torch.func.vmap(lambda x: cross_entropy(x, target, reduction="none"))(torch.stack([logits] * 3))
    assert torch.equal(got, want)
    gradient = torch.func.grad(lambda x: cross_entropy(x, target))(logits)
    leaf = logits.clone().requires_grad_()
    plain = torch.autograd.grad(cross_entropy(leaf, target), leaf)[0]
    assert torch.allclose(gradient, plain, rtol=torch.finfo(HALF).eps, atol=1e-7) if chunk else gradient.equal(plain)


@pytest.mark.parametrize("policy", ["mixed", "O1"])
def test_in_a_region_only_the_low_logits_are_saved(policy: str) -> None:
    model = nn.Linear(8, 1024)
    x, target = torch.randn(1024, 8), torch.randint(0, 1024, (1024,))
    with SavedForBackward(model) as kept, hs.autocast(policy=hs.Policy.of(policy, dtype="bf16")):
        loss = F.cross_entropy(model(x), target)
    assert loss.dtype is torch.float32
    logits = 1024 * 1024 * 2
    assert logits <= kept.bytes < 1.05 * logits
    with SavedForBackward(model) as theirs, torch.autocast("cpu", dtype=BF16):
        F.cross_entropy(model(x), target)
    assert theirs.bytes > 1.9 * kept.bytes


def test_few_logits_go_torchs_way(chunk: bool) -> None:
    for rows, ours in ((64, False), (256, chunk), (1024, True)):  # a quarter as many are few for kernels
        logits, target = torch.randn(rows, 1024, dtype=BF16, requires_grad=True), torch.randint(0, 10, (rows,))
        with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
            loss = F.cross_entropy(logits, target)
        assert torch.allclose(loss, F.cross_entropy(logits.float(), target))
        assert ("CrossEntropy" in type(loss.grad_fn).__name__) is ours


def test_what_it_does_not_know_goes_torchs_way() -> None:
    logits, target = batch((6, 5))
    shares = torch.softmax(torch.randn(6, 5), 1)
    for args, options in (
        ((logits, shares), {}),
        ((logits, shares.to(BF16)), {"label_smoothing": 0.1}),
        ((logits[0], target[0]), {}),
        ((logits.float(), target), {}),
        ((logits, target), {"size_average": False}),
    ):
        x, y = args
        wide = y.float() if y.is_floating_point() else y
        with pytest.warns(UserWarning, match="size_average") if "size_average" in options else nullcontext():
            got, want = cross_entropy(x, y, **options), F.cross_entropy(x.float(), wide, **options)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("x", "y", "options", "words"),
    [
        (torch.ones(2, 3), torch.tensor([0, 3]), {}, "Target 3 is out of bounds"),
        (torch.ones(2, 3), torch.tensor([0]), {}, "batch_size"),
        (torch.ones(2, 3), torch.tensor([0, 1]), {"reduction": "most"}, "most"),
        (torch.ones(2, 3), torch.tensor([0, 1]), {"weight": torch.ones(4)}, "weight tensor should be defined"),
    ],
)
def test_errors_are_torchs(x: Tensor, y: Tensor, options: dict[str, Any], words: str) -> None:
    for function, logits in ((F.cross_entropy, x), (cross_entropy, x.to(BF16))):
        with pytest.raises((IndexError, ValueError, RuntimeError), match=words):
            function(logits, y, **options)


def test_pure_computes_the_loss_in_fp32_from_the_low_logits_it_keeps(
    chunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if CHUNK["cpu"] == 8:
        monkeypatch.setitem(CHUNK, "cpu", 1 << 15)  # many chunks here too, of 32 rows each
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1024))
    x, target = torch.randn(1024, 8), torch.randint(0, 1024, (1024,))
    seen: list[Tensor] = []

    def loss_fn(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(net(x))
        return F.cross_entropy(seen[-1], y)

    policy = hs.Policy.of("pure", dtype="bf16")
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, policy=policy)
    assert all(p.dtype is BF16 for p in model.parameters())
    with SavedForBackward(model) as kept:
        loss = step(x, target).loss
    assert seen[0].dtype is BF16 and loss.dtype is torch.float32
    want = F.cross_entropy(seen[0].float(), target, reduction="none").sum() / 1024
    assert torch.allclose(loss, want) if chunk else torch.equal(loss, want)
    assert kept.bytes < 1.1 * 1024 * 1024 * 2
    counts = count_step(step, x.bfloat16(), target)
    assert chunk == (counts.casts() == 0)
