"""Block formats: against a table made from the specifications, and torchao's own quantizers where it is installed."""

from __future__ import annotations

import importlib
import math
from bisect import bisect_left
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cast.arithmetic.emulate import SIGNS, _spread
from halfstep.errors import FormatError
from halfstep.formats import BLOCK_FORMATS, E4M3, BlockFormat, format_of

MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")
TABLE = {
    "mxfp8_e4m3": (4, 3, 8, 448.0),
    "mxfp8_e5m2": (5, 2, 15, 57344.0),
    "mxfp6_e3m2": (3, 2, 4, 28.0),
    "mxfp6_e2m3": (2, 3, 2, 7.5),
    "mxfp4": (2, 1, 2, 6.0),
}
"""Of OCP Microscaling Formats v1.0, tables 1 to 5: exponent bits, mantissa bits, largest exponent, largest number."""


def numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> list[Fraction]:
    """Return the magnitudes of an element format, from its bit patterns."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            leading = int(exponent > 0)
            power = max(exponent, 1) - bias - mantissa_bits
            found.append((leading * 2**mantissa_bits + mantissa) * Fraction(2) ** power)
    return sorted(number for number in found if number <= largest)


def nearest(value: Fraction, table: list[Fraction]) -> Fraction:
    """Round to the nearest number of a table, ties to the even one, and saturate."""
    above = bisect_left(table, abs(value))
    around = {n: abs(abs(value) - table[n]) for n in (above - 1, above) if 0 <= n < len(table)}
    near = [n for n, distance in around.items() if distance == min(around.values())]
    chosen = table[near[0] if len(near) == 1 else next(n for n in near if n % 2 == 0)]
    return chosen if value >= 0 else -chosen


def by_hand(values: list[float], name: str) -> list[float]:
    """Return one block of an MX format, computed exactly."""
    exponent_bits, mantissa_bits, most, largest = TABLE[name]
    table = numbers(exponent_bits, mantissa_bits, largest)
    top = max(abs(value) for value in values)
    if not top:
        return values
    scale = Fraction(2) ** (math.frexp(top)[1] - 1 - most)
    return [float(nearest(Fraction(value) / scale, table) * scale) for value in values]


def sample(seed: int, rows: int = 24, columns: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-60, 60, (rows, 1), generator=generator)
    spread = torch.randint(-12, 1, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp2((powers + spread).float())


@pytest.mark.parametrize("name", MX)
def test_a_block_is_that_of_the_specification(name: str) -> None:
    x = sample(MX.index(name))
    x[0] = 0.0
    x[1, :32] = torch.tensor([(-1) ** n * n / 8 for n in range(32)])  # ties
    found = format_of(name).round(x)
    for row in range(len(x)):
        for first in range(0, x.shape[1], 32):
            block = slice(first, first + 32)
            assert found[row, block].tolist() == by_hand(x[row, block].tolist(), name), (row, first)


def test_nvfp4_is_an_element_times_a_rounded_scale_times_one_for_the_tensor() -> None:
    x = sample(9) / 2.0**40
    form = format_of("nvfp4")
    assert isinstance(form, BlockFormat)
    whole = x.abs().amax() / (448 * 6)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = x.unflatten(-1, (-1, 16))
    scale = E4M3.round((blocks.abs().amax(-1, keepdim=True) / 6 / whole).clamp(2.0**-6, 448))
    found = form.round(x).unflatten(-1, (-1, 16)) / (scale * whole)
    assert torch.isclose(found.abs().unsqueeze(-1), table, rtol=1e-5, atol=1e-6).any(-1).all()
    assert ((found * scale * whole - blocks).abs() <= 1.01 * scale * whole).all()  # half of the largest distance


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
def test_blocks_lie_along_any_dimension_and_the_last_may_be_short(name: str) -> None:
    form, x = format_of(name), sample(5, 50, 40) / 2.0**50
    assert isinstance(form, BlockFormat)
    assert torch.equal(form.round(x, dim=0), form.round(x.T.contiguous()).T)
    assert torch.equal(form.round(form.round(x)), form.round(x)) or name == "nvfp4"
    assert form.round(torch.tensor(3.0)).shape == () and form.round(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_block_with_inf_or_nan_is_nan_and_no_other(name: str, value: float) -> None:
    x = torch.ones(2, 64)
    x[0, 3] = value
    form = format_of(name)
    assert isinstance(form, BlockFormat)
    found = form.round(x)
    assert found[0, : form.block].isnan().all()
    if form.scale == "e8m0":
        assert found[0, form.block :].isfinite().all() and found[1].isfinite().all()


def test_stochastic_rounding_has_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((4000, 32), 0.3)
    x[:, 0] = 1.0
    found = format_of("mxfp4").round(x, mode="stochastic", generator=generator)[:, 1:]
    assert sorted(found.unique().tolist()) == [0.25, 0.375] and abs(float(found.mean()) - 0.3) < 1e-3


def test_names() -> None:
    form = format_of("mxfp8_e4m3/mxfp8_e5m2-stochastic-hadamard")
    assert isinstance(form, BlockFormat) and form.gradient is BLOCK_FORMATS["mxfp8_e5m2"]
    assert (form.stochastic, form.hadamard, form.block, form.bits, form.is_narrow) == (True, True, 32, 8.25, False)
    assert format_of("nvfp4").bits == 4.5
    for wrong in ("mxfp8", "mxfp4/bf16", "nvfp4-hadamard-stochastic", "bf16-stochastic"):
        with pytest.raises(FormatError, match=r"or a block format with that of its gradients"):
            format_of(wrong)


@pytest.mark.parametrize("name", [*MX, "nvfp4"])
def test_torchao_has_the_same_bits(name: str) -> None:
    try:
        prototype: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        constants: Any = importlib.import_module("torchao.prototype.mx_formats.constants")
        nvfp4: Any = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    except ImportError:
        pytest.skip("no torchao")
    x = sample(3) / 2.0**20
    if name == "nvfp4":
        whole = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=whole).dequantize(torch.float32)
    else:
        dtype = {
            "mxfp8_e4m3": torch.float8_e4m3fn,
            "mxfp8_e5m2": torch.float8_e5m2,
            "mxfp6_e3m2": constants.DTYPE_FP6_E3M2,
            "mxfp6_e2m3": constants.DTYPE_FP6_E2M3,
            "mxfp4": torch.float4_e2m1fn_x2,
        }[name]
        scale, data = prototype.to_mx(x, dtype, 32, prototype.ScaleCalculationMode.FLOOR)
        theirs = prototype.to_dtype(data, scale, dtype, 32, torch.float32)
    assert torch.equal(format_of(name).round(x), theirs)


# ---------------------------------------------------------------------- products


def test_the_hadamard_matrix_leaves_the_product() -> None:
    a, b = sample(1, 40, 8) / 2.0**50, sample(1, 40, 4) / 2.0**50
    for left, right in ((a, a), (b, b)):
        assert (_spread(left).T @ _spread(right) - left.T @ right).norm() < 1e-5 * (left.T @ right).norm()
    matrix = _spread(torch.eye(16))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25)) and int(SIGNS.sum()) != 16


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4/mxfp8_e5m2", "nvfp4"])
def test_a_linear_layer_rounds_along_what_each_product_sums_over(name: str) -> None:
    form = format_of(name)
    assert isinstance(form, BlockFormat)
    torch.manual_seed(0)
    x, weight = torch.randn(3, 20, 48, requires_grad=True), torch.randn(40, 48, requires_grad=True)
    bias, grad = torch.randn(40, requires_grad=True), torch.randn(3, 20, 40).bfloat16().float()
    with hs.autocast("cpu", policy=hs.Policy.of("mixed", dtype=name)):
        y = F.linear(x, weight, bias)
    y.backward(grad)
    rows, of = x.detach().flatten(0, 1), form.gradient or form
    made = form.round(rows) @ form.round(weight.detach()).T + bias.detach()
    assert torch.equal(y.flatten(0, 1), made.bfloat16().float())
    flat = grad.flatten(0, 1)
    of_x = of.round(flat) @ form.round(weight.detach(), dim=0)
    of_weight = of.round(flat, dim=0).T @ form.round(rows, dim=0)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1), of_x)
    torch.testing.assert_close(weight.grad, of_weight)
    torch.testing.assert_close(bias.grad, flat.sum(0))


@pytest.mark.parametrize("name", [*MX, "nvfp4", "nvfp4-stochastic-hadamard", "mxfp8_e4m3/mxfp8_e5m2"])
def test_a_step_trains(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    policy = hs.Policy.of("mixed", dtype=name)
    assert hs.Policy.from_toml(policy.to_toml()) == policy
    x = torch.randn(64, 32)
    y = (x @ torch.randn(32, 4)).argmax(-1)
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        lambda m, x, y: F.cross_entropy(m(x).float(), y),
        policy=policy,
    )
    losses = [step(x, y).host().loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0] and not step.scaler.is_enabled()


def test_an_audit_sees_the_loss_of_a_block_format() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))
    batch = (torch.randn(64, 32), torch.randint(0, 4, (64,)))

    def errors(name: str) -> float:
        policy = hs.Policy.of("mixed", dtype=name)
        found = hs.audit(model, [batch], lambda m, x, y: F.cross_entropy(m(x).float(), y), policy, steps=1)
        return max(row.error for row in found.rows if row.op == "linear" and row.role == "activation")

    assert errors("mxfp4") > 3 * errors("mxfp8_e4m3") > 3 * errors("bf16")


def test_a_sketch_bounds_what_would_underflow() -> None:
    x = sample(2)
    sketch, form = hs.ExponentSketch.of(x), format_of("mxfp4")
    least, most = sketch.underflow("mxfp4")
    lost = ((form.round(x) == 0) & (x != 0)).float().mean()
    assert least == 0.0 and float(lost) <= most and sketch.best_scale("mxfp4") == 1.0
    one = torch.tensor([1.0, 0.3, 0.1, 0.01])  # one block
    share = ((form.round(one) == 0) & (one != 0)).float().mean()
    assert hs.ExponentSketch.of(one).underflow("mxfp4")[1] == float(share) == 0.25
