"""linear_cross_entropy: what linear and cross_entropy give, exact to fp64, and no logits of all rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.cast.losses.cross_entropy import cross_entropy
from halfstep.errors import LossError
from halfstep.tasks.measure import SavedForBackward

BF16, HALF = torch.bfloat16, torch.float16
ROWS, CLASSES, FEATURES = 48, 5, 4  # so many rows that the gradients are smaller than the logits
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])
OPTIONS: list[dict[str, Any]] = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "ignore_index": ignored}
    for reduction, smoothing, weight, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (None, CLASS_WEIGHT), (None, 2)
    )
]
IDS = [f"{o['reduction']}-{o['label_smoothing']}-{o['weight'] is not None}-{o['ignore_index']}" for o in OPTIONS]
MIXED = hs.Policy.of("mixed", dtype="bf16")
in_mixed = hs.autocast("cpu", policy=MIXED)
in_mixed_fp32 = hs.autocast("cpu", policy=MIXED.with_ops(fp32=["linear"]))

theirs = getattr(F, "linear_cross_entropy", None)
ways = pytest.mark.parametrize("recompute", [False, True], ids=["ahead", "recomputed"])
has_theirs = pytest.mark.skipif(theirs is None, reason="torch has it from 2.13 on")


def batch(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input (*shape, FEATURES), weight, bias and targets (*shape)."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(s, generator=generator).to(dtype).requires_grad_()
        for s in ((*shape, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    ]
    target = torch.randint(0, CLASSES, shape, generator=generator)
    target.view(-1)[0] = 0  # a mean over ignored targets alone is nan, there as here
    return made[0], made[1], made[2], target


def by_parts(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The meaning, by torch's own operators on the logits of all rows."""
    options["ignore_index"] = -100 if options.get("ignore_index") is None else options["ignore_index"]
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **options)


def loss_of(tensors: list[Tensor], target: Tensor, reduction: str) -> Tensor:
    return hs.linear_cross_entropy(
        tensors[0], tensors[1], target, linear_bias=tensors[2], reduction=reduction, chunk=20
    )


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types


def ahead(loss: Tensor) -> bool:
    """Return whether the gradients of `loss`, not reshaped, were computed in its forward pass."""
    return type(loss.grad_fn).__name__ == "GradientsAheadBackward"


def wide(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "weight": None if options["weight"] is None else options["weight"].double()}


# ------------------------------------------------------------------ fp64: the formulas


@ways
@pytest.mark.parametrize("chunk", [None, 20, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_in_fp64_value_and_gradients_are_those_of_its_parts(
    options: dict[str, Any], chunk: int | None, recompute: bool
) -> None:
    *tensors, target = batch(torch.float64, ROWS)
    x, w, b = tensors
    got = hs.linear_cross_entropy(x, w, target, linear_bias=b, chunk=chunk, recompute=recompute, **wide(options))
    assert ahead(got) == (not recompute and options["reduction"] != "none")
    want = by_parts(x, w, target, b, **wide(options))
    assert got.dtype is torch.float64 and torch.allclose(got, want, rtol=1e-13, atol=1e-13)
    seed = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, exact in zip(grad(got, tensors, seed), grad(want, tensors, seed), strict=True):
        assert torch.allclose(mine, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS[::5], ids=IDS[::5])
def test_second_derivatives(options: dict[str, Any]) -> None:
    *tensors, target = batch(torch.float64, 4)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return hs.linear_cross_entropy(x, w, target, linear_bias=b, chunk=3, recompute=True, **wide(options))

    assert gradcheck(loss, tensors) and gradgradcheck(loss, tensors)


def test_a_gradient_that_will_be_differentiated_is_that_of_the_first_pass() -> None:
    *tensors, target = batch(torch.float64, ROWS)
    loss = hs.linear_cross_entropy(tensors[0], tensors[1], target, linear_bias=tensors[2], chunk=5, recompute=True)
    once = grad(loss, tensors, retain_graph=True)
    for mine, again in zip(once, grad(loss, tensors, create_graph=True), strict=True):
        assert torch.allclose(mine, again, rtol=1e-13, atol=1e-14)


# ------------------------------------------------------------------ low formats


@ways
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_low_losses_are_those_of_low_logits_in_fp32(
    options: dict[str, Any], dtype: torch.dtype, recompute: bool
) -> None:
    *tensors, target = batch(dtype, ROWS)
    x, w, b = tensors
    got = hs.linear_cross_entropy(x, w, target, linear_bias=b, chunk=20, recompute=recompute, **options)
    assert ahead(got) == (not recompute and options["reduction"] != "none" and dtype is BF16)
    assert got.dtype is torch.float32
    logits = F.linear(x.float(), w.float(), b.float()).to(dtype).float()  # a product in fp32, rounded once
    want = F.cross_entropy(
        logits, target, **{**options, "ignore_index": -100 if options["ignore_index"] is None else 2}
    )
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    seed = torch.ones_like(want)
    true = grad(by_parts(exact[0], exact[1], target, exact[2], **wide(options)), exact, seed.double())
    for mine, tensor, right in zip(grad(got, tensors, seed), tensors, true, strict=True):
        assert mine.dtype is dtype and mine.shape == tensor.shape
        assert (mine.double() - right).norm() <= 2 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_the_weight_are_summed_in_fp32_over_the_parts(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4096, 32, generator=generator) + 1, torch.randn(16, 32, generator=generator) / 8
    target = torch.randint(0, 2, (4096,), generator=generator)  # gradients of one sign: a low sum would stop growing
    exact = w.double().requires_grad_()
    (want,) = grad(by_parts(x.double(), exact, target), exact)
    error: dict[int, float] = {}
    w.requires_grad_()
    for chunk in (8, 4096):
        with hs.autocast("cpu", policy=hs.Policy.of("mixed", dtype=dtype)):
            (got,) = grad(hs.linear_cross_entropy(x, w, target, chunk=chunk), w)
        error[chunk] = float((got.double() - want).norm() / want.norm())
    assert error[8] < 1.2 * error[4096] + 1e-6, error


def test_fp16_gradients_do_not_vanish_under_a_loss_scale() -> None:
    x, w, _, target = batch(HALF, ROWS)
    loss = hs.linear_cross_entropy(x, w, target) * 2.0**-24  # a small share of a larger loss
    assert grad(loss, x, retain_graph=True)[0].count_nonzero() < x.numel() // 2
    assert grad(loss * 2.0**20, x)[0].count_nonzero() == x.numel()


# ------------------------------------------------------------------ gradients in the forward pass


@pytest.mark.parametrize("factor", [1.0, 2.0**-3, 2.0**10, 1 / 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_either_way_are_scaled_by_the_one_that_arrives(reduction: str, factor: float) -> None:
    *tensors, target = batch(BF16, ROWS)
    found = {}
    for recompute in (False, True):
        loss = hs.linear_cross_entropy(
            tensors[0], tensors[1], target, linear_bias=tensors[2], reduction=reduction, chunk=20, recompute=recompute
        )
        found[recompute] = grad(loss, tensors, torch.tensor(factor), retain_graph=True)
        again = grad(loss, tensors, torch.tensor(factor))  # nothing was changed by the first time
        assert all(torch.equal(a, b) for a, b in zip(found[recompute], again, strict=True))
        once = found[False] if factor == 1.0 else grad(loss_of(tensors, target, reduction), tensors)
    for mine, right, plain in zip(found[False], found[True], once, strict=True):
        assert torch.equal(mine, (plain.float() * torch.tensor(factor)).to(BF16))  # rounded once more by 1/3
        assert (mine - right).float().norm() <= torch.finfo(BF16).eps * right.float().norm()


def test_only_the_products_that_are_needed_are_computed() -> None:
    x, w, b, target = batch(BF16, ROWS)
    products = 0

    class Products(Watch):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            products += func in {torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default}
            return func(*args, **(kwargs or {}))

    def count(*needed: Tensor, recompute: bool = False) -> int:
        nonlocal products
        products = 0
        given = [t if any(t is n for n in needed) else t.detach() for t in (x, w, b)]
        with Products():
            loss = hs.linear_cross_entropy(given[0], given[1], target, linear_bias=given[2], recompute=recompute)
            if loss.requires_grad:
                loss.backward()
        return products

    assert [count(x, w, b), count(x, w, b, recompute=True)] == [3, 4]
    assert [count(x), count(w), count(b), count()] == [2, 2, 1, 1]
    with torch.no_grad():
        assert count(x, w, b) == 1


def test_gradients_larger_than_the_logits_are_not_kept() -> None:
    x, w, _, target = batch(torch.float32, 4)
    assert not ahead(hs.linear_cross_entropy(x, w, target))
    assert ahead(hs.linear_cross_entropy(x, w.detach(), target))  # the input's gradient alone is smaller


def test_a_second_derivative_without_recompute_is_refused() -> None:
    x, w, _, target = batch(torch.float32, ROWS)
    loss = hs.linear_cross_entropy(x, w, target)
    with pytest.raises(LossError, match=r"computed its gradients in the forward pass.* recompute=True .*create_graph"):
        loss.backward(create_graph=True)
    assert x.grad is None and w.grad is None


# ------------------------------------------------------------------ what is kept and what is held


@ways
def test_neither_logits_nor_their_gradients_are_kept_or_held(recompute: bool) -> None:
    x, w = torch.randn(1024, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    target = torch.randint(0, 512, (1024,))
    largest = 0

    class Sizes(Watch):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    with Sizes(), SavedForBackward(nn.Linear(1, 1)) as kept:
        with in_mixed:
            loss = hs.linear_cross_entropy(x, w, target, chunk=64, recompute=recompute)
        loss.backward()
    low = 2 * (x.numel() + w.numel()) + 8 * target.numel()
    sums = 8 * len(x) if recompute else 0  # of each row's exponentials
    assert kept.bytes <= low + sums + 64 and ahead(loss) != recompute
    assert largest <= max(64 * 512 * 4, 4 * x.numel())  # one part's logits in fp32, or the input


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_of_any_number_of_dimensions(shape: tuple[int, ...], reduction: str) -> None:
    x, w, b, target = batch(torch.float64, *(shape or (1,)))
    if not shape:
        x, target = x[0], target[0]
    got = hs.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
    want = by_parts(x.reshape(-1, FEATURES), w, target.reshape(-1), b, reduction="none").reshape(shape)
    assert got.shape == (shape if reduction == "none" else ())
    assert torch.allclose(got, want if reduction == "none" else want.mean())
    assert grad(got.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("shape", [(ROWS,), (3, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_probabilities(shape: tuple[int, ...], reduction: str) -> None:
    x, w, b, _ = batch(torch.float64, *shape)
    shares = torch.softmax(torch.randn(*shape, CLASSES, dtype=torch.float64), -1)
    got = hs.linear_cross_entropy(x, w, shares, linear_bias=b, reduction=reduction, label_smoothing=0.1)
    flat = by_parts(x.flatten(0, -2), w, shares.flatten(0, -2), b, reduction=reduction, label_smoothing=0.1)
    assert torch.allclose(got, flat.reshape(got.shape)) and got.shape == (shape if reduction == "none" else ())


@has_theirs
def test_a_weight_of_more_dimensions_is_torchs() -> None:
    x, target = torch.randn(6, FEATURES), torch.randint(0, CLASSES, (6, 3, 2))
    w, b = torch.randn(CLASSES, 3, 2, FEATURES), torch.randn(CLASSES, 3, 2)
    assert theirs is not None
    for options in ({}, {"reduction": "none"}, {"ignore_index": 2}):
        got = hs.linear_cross_entropy(x, w, target, linear_bias=b, **options)
        assert torch.allclose(got, theirs(x, w, target, linear_bias=b, **options))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_targets_ignored_and_no_rows(reduction: str) -> None:
    for rows in (3, 0):
        x, w = torch.randn(rows, FEATURES, dtype=BF16, requires_grad=True), torch.randn(CLASSES, FEATURES, dtype=BF16)
        target = torch.full((rows,), -100)
        got = hs.linear_cross_entropy(x, w, target, reduction=reduction)
        want = by_parts(x.float(), w.float(), target, reduction=reduction)
        assert torch.allclose(got, want, equal_nan=True)  # a mean of nothing is nan
        assert grad(hs.linear_cross_entropy(x, w, target, reduction="sum"), x)[0].count_nonzero() == 0


def test_a_class_weight_that_learns() -> None:
    x, w, _, target = batch(torch.float64, ROWS)
    each = CLASS_WEIGHT.double().requires_grad_()
    shares = F.one_hot(target, CLASSES).double()
    got, want = (f(x, w, shares, weight=each) for f in (hs.linear_cross_entropy, by_parts))
    assert torch.allclose(grad(got, each)[0], grad(want, each)[0])
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):  # torch's words
        hs.linear_cross_entropy(x, w, target, weight=each)


# ------------------------------------------------------------------ regions


@pytest.mark.parametrize("spelling", ["ours", pytest.param("torch's", marks=has_theirs)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", ["torch", "O1", "mixed"])
def test_in_a_region_it_is_the_regions_linear_and_cross_entropy(preset: str, dtype: str, spelling: str) -> None:
    function: Any = hs.linear_cross_entropy if spelling == "ours" else theirs
    *tensors, target = batch(torch.float32, ROWS)
    x, w, b = tensors
    with hs.autocast("cpu", policy=hs.Policy.of(preset, dtype=dtype)):
        got = function(x, w, target, linear_bias=b)
        want = F.cross_entropy(F.linear(x, w, b), target)
    assert got.dtype is torch.float32 and torch.allclose(got, want, rtol=1e-6)
    for mine, exact in zip(grad(got, tensors), grad(want, tensors), strict=True):
        assert mine.dtype is torch.float32 and (mine - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize(
    ("policy", "product"),
    [
        (MIXED, BF16),
        (MIXED.with_ops(fp32=["linear"]), torch.float32),
        (MIXED.with_ops(fp32=["linear_cross_entropy"]), torch.float32),
        (MIXED.with_ops(keep=["linear"]), torch.float32),
        (hs.Policy(table="none", dtype="bf16").with_ops(low=["linear"]), BF16),
    ],
)
def test_the_product_follows_the_rule_of_linear(policy: hs.Policy, product: torch.dtype) -> None:
    x, w, b, target = batch(torch.float32, ROWS)
    with hs.autocast("cpu", policy=policy):
        got = hs.linear_cross_entropy(x, w, target, linear_bias=b)
    logits = F.linear(x.to(product), w.to(product), b.to(product))
    assert torch.allclose(got, F.cross_entropy(logits.float(), target), rtol=1e-6)


def test_a_loss_that_is_not_fp32_and_a_simulated_format_go_by_their_parts() -> None:
    x, w, _, target = batch(torch.float32, ROWS)
    for policy in (MIXED.replace(dtype="e4m3"), MIXED.with_ops(low=["cross_entropy"])):
        with hs.autocast("cpu", policy=policy):
            got, want = hs.linear_cross_entropy(x, w, target), F.cross_entropy(F.linear(x, w), target)
        assert torch.equal(got, want) and got.dtype is want.dtype


def test_a_weight_is_cast_once_in_a_region() -> None:
    x, w, _, target = batch(torch.float32, ROWS)
    casts = 0

    class Casts(Watch):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal casts
            casts += func is torch.ops.aten._to_copy.default and args[0].shape == w.shape
            return func(*args, **(kwargs or {}))

    with Casts(), in_mixed:
        for _ in range(2):
            hs.linear_cross_entropy(x, w, target)
    assert casts == 1


def test_autocast_switched_off_inside_a_region_switches_it_off() -> None:
    x, w, _, target = batch(torch.float32, ROWS)
    with in_mixed, torch.autocast("cpu", enabled=False):
        off = hs.linear_cross_entropy(x, w, target)
    assert torch.equal(off, hs.linear_cross_entropy(x, w, target))


@has_theirs
def test_torchs_rows_of_a_chunk_are_taken() -> None:
    x, w, _, target = batch(torch.float32, ROWS)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=5, chunking_method=None)
    assert theirs is not None
    with in_mixed:
        got = theirs(x, w, target, options=options)
        assert torch.equal(got, hs.linear_cross_entropy(x, w, target, chunk=5))
        got = theirs(x, w, target)
    (first,) = grad(got, w, create_graph=True)  # with options torch's own has no second derivative
    assert grad(first.sum(), w)[0].isfinite().all()


class Model(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(64, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, *, in_one: bool, recompute: bool) -> Tensor:
        x = self.norm(self.tokens(tokens))
        if in_one:
            return hs.linear_cross_entropy(x, self.head.weight, targets, recompute=recompute)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("preset", ["mixed:bf16", "mixed:fp16", "O2:bf16", "pure:bf16", "pure:fp16", "O3:bf16"])
def test_a_training_step_learns_the_same_with_it(preset: str) -> None:
    name, dtype = preset.split(":")
    losses: dict[tuple[bool, bool], list[float]] = {}
    for way in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        model = Model()
        tokens, targets = torch.randint(0, 64, (8, 8)), torch.randint(0, 64, (8, 8))
        step = hs.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            lambda net, x, y, way=way: net(x, y, in_one=way[0], recompute=way[1]),
            policy=hs.Policy.of(name, dtype=dtype),
        )
        losses[way] = [step(tokens, targets).host().loss for _ in range(8)]
    assert losses[True, False][-1] < losses[True, False][0] - 0.2
    assert losses[True, False] == losses[True, True] == pytest.approx(losses[False, False], rel=1e-2)


# ------------------------------------------------------------------ transforms


def plain(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return hs.linear_cross_entropy(x, w, target, chunk=5)


@in_mixed
def ruled(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return hs.linear_cross_entropy(x, w, target)


@in_mixed_fp32
def ruled_fp32(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return hs.linear_cross_entropy(x, w, target, chunk=5)


@in_mixed
def ruled_theirs(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    assert theirs is not None
    loss: Tensor = theirs(x, w, target)
    return loss


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # Dynamo does it
@pytest.mark.parametrize(
    "function",
    [
        plain,
        ruled,
        pytest.param(ruled_fp32, marks=pytest.mark.hours),
        pytest.param(ruled_theirs, marks=[has_theirs, pytest.mark.slow]),
    ],
)
def test_compiles_without_a_graph_break(function: Callable[..., Tensor]) -> None:
    x, w, _, target = batch(torch.float32, ROWS)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x, w, target)
    eager = function(x, w, target)
    assert torch.allclose(compiled, eager, rtol=1e-6)
    for mine, exact in zip(grad(compiled, (x, w)), grad(eager, (x, w)), strict=True):
        assert torch.allclose(mine, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own derivatives
def test_transforms_of_functions() -> None:
    x, w, _, target = batch(torch.float64, ROWS)
    x, w = x.detach(), w.detach()

    def each(x: Tensor) -> Tensor:
        return hs.linear_cross_entropy(x, w, target, chunk=5, reduction="none")

    def want(x: Tensor) -> Tensor:
        return by_parts(x, w, target, reduction="none")

    several = torch.stack([x, 2 * x, -x])
    assert torch.allclose(torch.func.vmap(each)(several), torch.func.vmap(want)(several))
    assert torch.allclose(torch.func.jacrev(each)(x), torch.func.jacrev(want)(x))
    assert torch.allclose(torch.func.jvp(each, (x,), (x,))[1], torch.func.jvp(want, (x,), (x,))[1])
    mean = torch.func.vmap(torch.func.grad(lambda x: each(x).mean()))(several)
    assert torch.allclose(mean, torch.func.vmap(torch.func.grad(lambda x: want(x).mean()))(several))
    hessian = torch.func.hessian(lambda x: each(x).mean())(x[:, :2].repeat(1, 2))
    assert torch.allclose(hessian, torch.func.hessian(lambda x: want(x).mean())(x[:, :2].repeat(1, 2)))


def test_gradients_in_a_batch_and_under_hooks_on_what_is_saved() -> None:
    x, w, _, target = batch(torch.float64, ROWS)
    each = hs.linear_cross_entropy(x, w, target, chunk=5, reduction="none")
    rows = grad(each, x, torch.eye(ROWS, dtype=torch.float64), is_grads_batched=True, retain_graph=True)[0]
    assert torch.allclose(rows.sum(0), grad(each.sum(), x)[0])
    with torch.autograd.graph.save_on_cpu():
        (first,) = grad(hs.linear_cross_entropy(x, w, target, recompute=True), x, create_graph=True)
        assert grad(first.square().sum(), x)[0].isfinite().all()


def test_cross_entropy_of_low_logits_takes_gradients_in_a_batch_too() -> None:
    logits = torch.randn(6, CLASSES).to(BF16).requires_grad_()
    each = cross_entropy(logits, torch.randint(0, CLASSES, (6,)), reduction="none")
    rows = grad(each, logits, torch.eye(6), is_grads_batched=True, retain_graph=True)[0]
    assert torch.equal(rows.sum(0), grad(each.sum(), logits)[0])


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.ones(())}, r"input \(\.\.\., F\) and linear_weight \(C, F\).* got \(\) and \(5, 4\)"),
        ({"linear_weight": torch.ones(4)}, r"got \(3, 4\) and \(4,\)"),
        ({"linear_weight": torch.ones(5, 3)}, r"input \(3, 4\) and linear_weight \(5, 3\) are the features"),
        ({"linear_bias": torch.ones(4)}, r"linear_bias must have the shape \(5,\).* got \(4,\)"),
        ({"input": torch.ones(3, 4, dtype=BF16)}, r"one floating format; got bfloat16, float32; call it inside"),
        ({"input": torch.ones(3, 4).long(), "linear_weight": torch.ones(5, 4).long()}, r"got int64"),
        ({"target": torch.zeros(2).long()}, r"int64 of shape \(3,\), or class .* got int64 of shape \(2,\)"),
        ({"target": torch.zeros(3).int()}, r"got int32 of shape \(3,\)"),
        ({"target": torch.ones(3, 5), "ignore_index": 1}, r"ignore_index=1 is a class index"),
        ({"weight": torch.ones(4)}, r"one value a class, shape \(5,\); got \(4,\)"),
        ({"reduction": "most"}, r"one of 'mean', 'sum', 'none' and is 'most'"),
        ({"label_smoothing": 1.5}, r"from 0 to 1 and is 1.5"),
        ({"chunk": 0}, r"a whole number from 1 or None and is 0"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"input": torch.ones(3, 4), "linear_weight": torch.ones(5, 4), "target": torch.zeros(3).long()}
    with pytest.raises(LossError, match=words):
        hs.linear_cross_entropy(**{**arguments, **change})


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        hs.linear_cross_entropy(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 9, 1]))
