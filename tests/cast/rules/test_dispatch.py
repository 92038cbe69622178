"""Operator rules: casts, composites, eligibility; the modes' list of composites against torch.overrides."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.cast.rules import dispatch, handlers
from halfstep.cast.rules.recipe import composites
from halfstep.errors import BannedOperatorError

BF16, HALF, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NONE = hs.Policy(name="bare", dtype="bf16", table="none", loss="keep")
MIXED = hs.Policy.of("mixed", dtype="bf16")
O1 = hs.Policy.of("O1", dtype="bf16")
X = torch.randn(4, 8)


@contextmanager
def _silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def under(policy: hs.Policy, call: Callable[[], Any]) -> Any:
    with hs.autocast("cpu", policy=policy):
        return call()


SOFTMAXES: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.softmax(x, -1),
    lambda x: torch.softmax(x, -1),
    lambda x: x.softmax(-1),
    lambda x: nn.Softmax(-1)(x),
]


@pytest.mark.parametrize("spelling", SOFTMAXES)
def test_every_spelling_of_softmax(spelling: Callable[[Tensor], Tensor]) -> None:
    assert under(NONE.with_ops(low=["softmax"]), lambda: spelling(X)).dtype is BF16
    assert under(NONE.with_ops(fp32=["softmax"]), lambda: spelling(X.bfloat16())).dtype is FP32
    assert under(NONE.with_ops(keep=["softmax"]), lambda: spelling(X.bfloat16())).dtype is BF16


MATMULS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a @ b,
    lambda a, b: torch.matmul(a, b),
    lambda a, b: a.matmul(b),
    lambda a, b: b.__rmatmul__(a),
]


@pytest.mark.parametrize("spelling", MATMULS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_spelling_of_matmul(spelling: Callable[[Tensor, Tensor], Tensor], dtype: str) -> None:
    policy = hs.Policy.of("mixed", dtype=dtype)
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    out = under(policy, lambda: spelling(a, b))
    assert out.dtype is (BF16 if dtype == "bf16" else HALF)
    low = out.dtype
    assert torch.equal(out, (a.to(low).float() @ b.to(low).float()).to(low)) or low is BF16


def test_rules_of_a_single_operator() -> None:
    a, b, h = torch.randn(3), torch.randn(3).bfloat16(), torch.randn(3).half()
    widest = NONE.with_ops(widest=["add"])
    assert under(widest, lambda: a + b).dtype is FP32
    assert under(widest, lambda: b + h).dtype is FP32
    assert under(widest, lambda: b + b).dtype is BF16
    assert under(NONE.with_ops(keep=["add"]), lambda: b + a).dtype is BF16
    assert under(NONE.with_ops(keep=["add"]), lambda: nn.Parameter(a) + b).dtype is BF16
    assert under(NONE.with_ops(low=["add"]), lambda: a + a).dtype is BF16
    assert under(NONE.with_ops(low=["add"]), lambda: 1 + a).dtype is BF16
    assert under(NONE.with_ops(fp32=["add"]), lambda: b + b).dtype is FP32
    with pytest.raises(BannedOperatorError, match="exp was called with bfloat16.*with_ops"):
        under(NONE.with_ops(banned=["exp"]), lambda: torch.exp(b))
    assert under(NONE.with_ops(banned=["exp"]), lambda: torch.exp(a)).dtype is FP32


def test_the_last_rule_wins() -> None:
    assert under(NONE.with_ops(low=["exp"]).with_ops(fp32=["exp"]), lambda: torch.exp(X.bfloat16())).dtype is FP32
    assert under(NONE.with_ops(fp32=["exp"]).with_ops(low=["ex*"]), lambda: torch.exp(X)).dtype is BF16


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_ineligible_tensors_are_never_cast(dtype: torch.dtype) -> None:
    x = torch.ones(3, 3).to(dtype)
    policy = NONE.with_ops(low=["matmul", "add"])
    assert under(policy, lambda: x @ x).dtype is dtype
    assert under(policy, lambda: x + x).dtype is dtype


def test_tensors_in_lists_keywords_and_namedtuples() -> None:
    policy = NONE.with_ops(low=["cat", "linear"])
    assert under(policy, lambda: torch.cat([X, X])).dtype is BF16
    assert under(policy, lambda: torch.cat(tensors=(X, X))).dtype is BF16
    assert under(policy, lambda: F.linear(X, weight=torch.randn(3, 8), bias=torch.randn(3))).dtype is BF16


def test_destinations_are_never_cast() -> None:
    out = torch.empty(4, 8)
    policy = NONE.with_ops(low=["exp", "add"])
    assert under(policy, lambda: torch.exp(X, out=out)) is out
    assert out.dtype is FP32 and torch.equal(out, X.exp())
    y = X.clone()
    under(policy, lambda: y.add_(1))
    assert y.dtype is FP32


def test_an_explicit_dtype_wins() -> None:
    assert under(NONE.with_ops(low=["softmax", "sum"]), lambda: F.softmax(X, -1, dtype=FP32)).dtype is FP32
    assert under(NONE.with_ops(low=["softmax", "sum"]), lambda: torch.softmax(X, -1, FP64)).dtype is FP64
    assert under(NONE.with_ops(fp32=["sum"]), lambda: X.bfloat16().sum(dtype=BF16)).dtype is BF16


def test_tensors_that_have_the_format_of_a_rule_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cast: list[Any] = []

    def noted(value: Any, dtype: torch.dtype, mode: Any) -> Any:
        cast.append(value)
        return dispatch.cast(value, dtype, mode)

    monkeypatch.setattr(handlers, "cast", noted)
    rules = NONE.with_ops(fp32=["pow", "rsqrt"], low=["softmax"])
    for call in (lambda: X.pow(2), lambda: torch.rsqrt(X.exp()), lambda: torch.softmax(input=X.bfloat16(), dim=-1)):
        under(rules, call)
    assert not cast
    assert under(rules, lambda: torch.softmax(X, -1)).dtype is BF16 and cast[0] is X


def test_an_embedding_gathers_then_casts() -> None:
    layer = nn.Embedding(1000, 8)
    sizes: list[int] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Casts():  # type: ignore[no-untyped-call]
        out = under(NONE.with_ops(low=["embedding"]), lambda: layer(torch.tensor([1, 2])))
    assert out.dtype is BF16 and sizes == [16]
    assert torch.equal(out, layer.weight[1:3].bfloat16())


def test_residual_low_lowers_the_stream() -> None:
    policy = hs.Policy.of("mixed", dtype="bf16", residual="low")
    layer, position = nn.Embedding(10, 8), nn.Parameter(torch.randn(2, 8))
    assert under(policy, lambda: layer(torch.tensor([1, 2])) + position).dtype is BF16
    assert under(MIXED, lambda: layer(torch.tensor([1, 2])) + position).dtype is FP32


# ---------------------------------------------------------------------------------------------- composites


def test_rules_reach_inside_multihead_attention() -> None:
    mha = nn.MultiheadAttention(8, 2, batch_first=True)
    seen: dict[str, torch.dtype] = {}
    x = torch.randn(2, 5, 8)
    for policy, want in ((NONE.with_ops(low=["linear"]), BF16), (NONE.with_ops(fp32=["linear"]), FP32)):
        out, _ = under(policy, lambda: mha(x, x, x, need_weights=False))
        seen[str(want)] = out.dtype
        assert out.dtype is want
    weights = under(NONE.with_ops(fp32=["softmax"], low=["linear", "baddbmm", "bmm"]), lambda: mha(x, x, x))[1]
    assert weights.dtype is FP32
    assert under(NONE.with_ops(low=["linear", "baddbmm", "bmm"]), lambda: mha(x, x, x))[1].dtype is BF16


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rules_reach_inside_an_encoder_layer(training: bool, dtype: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).train(training)
    x = torch.randn(2, 5, 8)
    low = BF16 if dtype == "bf16" else HALF
    policy = hs.Policy.of("mixed", dtype=dtype)
    dtypes: list[torch.dtype] = []
    handle = layer.linear1.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    out = under(policy, lambda: layer(x))
    handle.remove()
    assert dtypes == [low]
    assert torch.allclose(out.float(), layer(x), atol=5e-2)


def test_cross_entropy() -> None:
    logits, target = torch.randn(4, 8).bfloat16(), torch.tensor([1, 2, 3, 4])
    assert under(MIXED, lambda: F.cross_entropy(logits, target)).dtype is FP32
    own = under(MIXED.with_ops(keep=["cross_entropy"]), lambda: F.cross_entropy(logits, target))
    assert own.dtype is BF16
    inside = under(NONE.with_ops(fp32=["log_softmax"]), lambda: F.cross_entropy(logits, target))
    assert inside.dtype is FP32 and torch.equal(inside, F.cross_entropy(logits.float(), target))


@pytest.mark.parametrize(("name", "part"), [("normalize", "norm"), ("gumbel_softmax", "softmax")])
def test_composites_of_torch_are_found(name: str, part: str) -> None:
    """The list is computed from what the functions call, so each of these must be in it under a rule for its parts."""
    assert getattr(F, name) in composites(frozenset({part}))
    assert getattr(F, name) not in composites(frozenset({"conv2d"}))


def test_the_list_of_composites_against_torch_overrides() -> None:
    overridable = set(torch.overrides.get_overridable_functions()[F])
    found = set(composites(frozenset({"linear", "norm", "softmax", "dropout", "conv2d"})))
    assert F.multi_head_attention_forward in found and F.normalize in found
    public = {f for f in found if not f.__name__.startswith("_")}  # private: behind boolean dispatch
    assert public <= overridable


def test_normalize_follows_the_rule_of_norm() -> None:
    x = torch.randn(3, 8).bfloat16()
    policy = NONE.with_ops(fp32=["norm"])
    assert under(policy, lambda: F.normalize(x)).dtype is FP32
    assert under(NONE, lambda: F.normalize(x)).dtype is BF16


# ---------------------------------------------------------------------------------------------- presets


def test_mixed_gives_low_to_the_next_product_and_keeps_the_stream() -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    assert under(MIXED, lambda: norm(X)).dtype is BF16
    assert under(MIXED, lambda: X + linear(norm(X))).dtype is FP32
    assert under(MIXED, lambda: F.gelu(linear(X))).dtype is BF16
    assert under(MIXED, lambda: F.mse_loss(linear(X), X)).dtype is FP32
    assert under(MIXED, lambda: X.bfloat16().sum()).dtype is FP32


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_norms_keep_fp32_weights_on_cpu(dtype: str) -> None:
    """More precise than lowering them: bit-equal to the low kernel only where the weights are low values."""
    policy = hs.Policy.of("mixed", dtype=dtype)
    low = BF16 if dtype == "bf16" else HALF
    x, w, b = torch.randn(4, 8, 6), torch.rand(8) + 0.5, torch.randn(8)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda t: F.layer_norm(t.mT, (8,), w, b),
        lambda t: torch.layer_norm(t.mT, (8,), w, b),
        lambda t: F.group_norm(t, 2, w, b),
        lambda t: F.layer_norm(input=t.mT, normalized_shape=(8,), weight=w, bias=b),
    ]
    for call in calls:
        with hs.autocast("cpu", policy=policy):
            out = call(x)
        assert out.dtype is low and torch.equal(out, call(x.to(low)))


NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x.mT, (8,), w, b),
    "layer_norm, named": lambda x, w, b: F.layer_norm(input=x.mT, normalized_shape=(8,), bias=b, weight=w),
    "native_layer_norm": lambda x, w, b: torch.native_layer_norm(x.mT, (8,), w, b, 1e-5)[0],
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "running": lambda x, w, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), w, b, training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x.mT, (8,), w),
}


@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", ""])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("low", [BF16, HALF])
def test_a_norm_trains_whichever_of_its_parameters_it_has(low: torch.dtype, name: str, given: str) -> None:
    """Also with parameters in the region's format, and in the other low one."""
    policy = hs.Policy.of("mixed", dtype="bf16" if low is BF16 else "fp16")
    for dtype in (FP32, BF16, HALF):
        x = torch.randn(4, 8, 6).to(dtype)
        w, b = ((torch.ones(8).to(dtype).requires_grad_() if one in given else None) for one in ("weight", "bias"))
        try:
            with torch.autocast("cpu", low):
                NORMS[name](x, w, b).float().square().sum().backward()
        except RuntimeError:
            continue
        with hs.autocast("cpu", policy=policy):
            out = NORMS[name](x, w, b)
        out.float().square().sum().backward()
        assert all(one.grad is None or one.grad.dtype is dtype for one in (w, b) if one is not None)


def test_a_layer_with_a_bias_alone_trains() -> None:
    layer = nn.LayerNorm(8)
    layer.weight = None  # type: ignore[assignment]
    model = hs.prepare(layer, policy=MIXED)
    model(X).float().square().sum().backward()
    assert layer.bias.grad is not None


def test_floats_that_are_made_of_whole_numbers_are_fp32() -> None:
    whole = torch.randint(9, (4, 8))
    for found in under(MIXED, lambda: (torch.cov(whole), torch.corrcoef(whole), whole.cov(), torch.cov(input=whole))):
        assert found.dtype is FP32


@pytest.mark.parametrize("low", [BF16, HALF])
def test_what_copies_values_takes_the_low_format_that_is_not_the_region_s(low: torch.dtype) -> None:
    """torch.autocast raises for most of these: each calls cat inside."""
    x = torch.randn(4, 8).to(low)
    calls: list[Callable[[], Any]] = [
        lambda: torch.roll(x, 1),
        lambda: x.roll((1, 2), (0, 1)),
        lambda: torch.fft.fftshift(x),
        lambda: torch.fft.ifftshift(x),
        lambda: torch.combinations(x[0]),
        lambda: torch.gradient(x, dim=1)[0],
        lambda: torch.isin(x, x[0]),
        lambda: torch.cat([x, x]),
        lambda: torch.hstack([x, x]),
        lambda: torch.cartesian_prod(x[0], x[1]),
    ]
    for call in calls:
        plain = call()
        for policy in (MIXED, hs.Policy.of("mixed", dtype="fp16")):
            found = under(policy, call)
            assert found.dtype is plain.dtype and torch.equal(found, plain)


def test_o1_is_apex() -> None:
    assert under(O1, lambda: F.softmax(X.bfloat16(), -1)).dtype is FP32
    assert under(O1, lambda: F.layer_norm(X.bfloat16(), (8,))).dtype is FP32
    assert under(O1, lambda: X.bfloat16() + X).dtype is FP32
    assert under(O1, lambda: F.relu(X.bfloat16())).dtype is BF16
    with pytest.raises(BannedOperatorError):
        under(O1, lambda: F.binary_cross_entropy(torch.rand(3).bfloat16(), torch.rand(3).bfloat16()))


def test_an_operator_without_a_rule_keeps_its_input_where_torch_would_not() -> None:
    bare = NONE
    assert under(bare, lambda: F.mse_loss(X.bfloat16(), X.bfloat16())).dtype is BF16
    assert under(bare, lambda: X @ X.mT).dtype is FP32


def test_fp16_is_emulated_bit_for_bit_without_units() -> None:
    policy = hs.Policy.of("mixed", dtype="fp16", emulate="always")
    layer = nn.Linear(8, 4)
    x = X.clone().requires_grad_()
    out = under(policy, lambda: layer(x))
    assert out.dtype is HALF
    want = F.linear(X.half().float(), layer.weight.half().float(), layer.bias.half().float()).half()
    assert torch.equal(out, want)
    out.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is FP32
    assert torch.equal(x.grad, (torch.ones(4, 4) @ layer.weight.half().float()).half().float())


def test_never_emulated_means_torchs_own_kernels() -> None:
    policy = hs.Policy.of("torch", dtype="fp16", emulate="never")
    with _silence(), hs.autocast("cpu", policy=policy) as region:
        assert region.recipe.mode is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e3m4"])
@pytest.mark.parametrize("rule", ["low", "fp32", "keep", "widest"])
def test_no_rule_keeps_a_norm_from_its_running_statistics(rule: str, dtype: str) -> None:
    policy = hs.Policy(dtype=dtype, table="none").with_ops(**{rule: ["batch_norm", "instance_norm"]})
    batch, instance = nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
    for norm, x in ((batch, X + 3), (instance, torch.stack((X + 3, X), -1))):
        out = under(policy, lambda norm=norm, x=x: norm(x))  # type: ignore[misc]
        assert out.dtype is ({"bf16": BF16, "fp16": HALF}.get(dtype, FP32) if rule == "low" else FP32)
        assert norm.running_mean is not None and bool((norm.running_mean != 0).all())
        assert norm.running_mean.dtype is FP32


def test_a_norm_in_fp32_takes_low_inputs_and_low_weights() -> None:
    policy = hs.Policy(dtype="bf16", table="none").with_ops(fp32=["batch_norm"])
    norm = nn.BatchNorm1d(8)
    norm.weight.data, norm.bias.data = norm.weight.data.bfloat16(), norm.bias.data.bfloat16()
    plain = F.batch_norm(X.bfloat16().float(), None, None, torch.ones(8), torch.zeros(8), training=True)
    assert torch.equal(under(policy, lambda: norm(X.bfloat16())), plain)
    weight, bias, mean, variance = torch.ones(8).bfloat16(), torch.zeros(8), torch.zeros(8), torch.ones(8)
    low = under(policy, lambda: torch.batch_norm(X.bfloat16(), weight, bias, mean, variance, True, 0.1, 1e-5, False))
    assert torch.equal(low, plain) and bool((mean != 0).all())


@pytest.mark.parametrize("policy", [MIXED, O1], ids=lambda policy: policy.name)
def test_dynamo_finds_the_rules_of_operators_that_python_writes(policy: hs.Policy) -> None:
    layer = nn.Linear(8, 8)

    def loss(x: Tensor) -> tuple[Tensor, ...]:
        low = layer(x)
        return low**2, 2**low, 1 / low, low.norm(), low ** low.detach().abs(), 1 - low, low.exp()

    with hs.autocast("cpu", policy=policy):
        eager, compiled = loss(X), torch.compile(loss, fullgraph=True, backend="eager")(X)
    assert [value.dtype for value in compiled] == [value.dtype for value in eager]
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(compiled, eager, strict=True))
    assert compiled[0].dtype is FP32
