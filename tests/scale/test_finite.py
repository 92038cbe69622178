"""The passes over gradients, against float64, for every dtype, layout and kind of value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.scale import finite

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def pair(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a parameter with this gradient."""
    shape = gradient.shape
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter, gradient


def dense(values: list[float], dtype: torch.dtype) -> Tensor:
    """A gradient of these values, complex ones with the values as imaginary part."""
    real = torch.tensor(values)
    return torch.complex(torch.ones_like(real), real).to(dtype) if dtype.is_complex else real.to(dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.reshape(2, -1).t(),
    "0-dim": lambda x: x[0].clone(),
    "strided": lambda x: torch.stack([x, torch.zeros_like(x)], dim=1)[:, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_unscale_rounds_once(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    values = (torch.randn(8, dtype=torch.float64) * 1000).tolist()
    gradient = LAYOUTS[layout](dense(values, dtype))
    before = gradient.clone()
    parameter, _ = pair(gradient)
    scale = torch.tensor(3.0)
    found = finite.unscale_([(parameter, gradient)], scale)
    assert found is not None and found.dtype == torch.float32 and found.shape == () and found.item() == 0.0
    assert parameter.grad is gradient
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    inverse = torch.tensor(1.0 / 3.0, dtype=torch.float32)  # 1/scale is rounded to fp32, then one product
    assert torch.equal(gradient, (before.to(wide) * inverse.to(wide)).to(dtype))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    for position in (0, 6):
        values = [1.0] * 7
        values[position] = value
        clean = pair(dense([1.0] * 7, dtype))
        for run in (finite.unscale_, finite.check):
            found = run([clean, pair(dense(values, dtype))], torch.tensor(2.0))
            assert found is not None and found.item() != 0.0
    found = finite.check([clean], torch.tensor(2.0))
    assert found is not None and found.item() == 0.0


@pytest.mark.parametrize("dtype", REAL)
def test_extremes_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (info.max, -info.max, info.tiny, info.smallest_normal, 0.0, -0.0):
        parameter, gradient = pair(torch.tensor([value], dtype=dtype))
        found = finite.check([(parameter, gradient)], torch.tensor(1.0))
        assert found is not None and found.item() == 0.0
        assert torch.equal(gradient, torch.tensor([value], dtype=dtype))


def test_check_changes_no_value_of_any_fp16_pattern() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    fine = patterns[patterns.isfinite()].clone()
    found = finite.check([pair(fine)], torch.tensor(1.0))
    assert found is not None and found.item() == 0.0
    assert torch.equal(fine.view(torch.int16), patterns[patterns.isfinite()].view(torch.int16))


def test_without_gradients_there_is_no_verdict() -> None:
    assert finite.unscale_([], torch.tensor(2.0)) is None
    assert finite.check([], torch.tensor(2.0)) is None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert list(finite.gradients(optimizer)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_gradients_become_fp32_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([3.0, 2.0**-14, 1000.0]).to(dtype)
    plain, wide = pair(values.clone()), pair(torch.ones(3))
    found = finite.unscale_([plain, wide], torch.tensor(2.0**16), into_fp32=True)
    assert found is not None and found.item() == 0.0
    parameter = plain[0]
    assert parameter.dtype == dtype and parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert torch.equal(parameter.grad, values.to(torch.float32) / 2.0**16)
    assert wide[1][0].item() == 2.0**-16
    # The next backward works, whether gradients were dropped or zeroed.
    for drop in (True, False):
        torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=drop)
        torch.autograd.backward((parameter * 2).sum())
        assert torch.equal(parameter.grad.float(), torch.full((3,), 2.0))


def test_kept_low_they_underflow_as_the_format_does() -> None:
    """The twin of the test above: without fp32 gradients a small fp16 one is lost."""
    parameter, gradient = pair(torch.tensor([2.0**-10], dtype=torch.float16))
    finite.unscale_([(parameter, gradient)], torch.tensor(2.0**16))
    assert gradient.dtype == torch.float16 and gradient.item() == 0.0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex32])
def test_a_scale_below_one_cannot_smuggle_an_overflow(dtype: torch.dtype) -> None:
    """60000 / 2**-2 fits no fp16; torch's kernel looks only before it multiplies."""
    gradient = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    parameter, gradient = pair(torch.view_as_complex(gradient) if dtype.is_complex else gradient)
    found = finite.unscale_([(parameter, gradient)], torch.tensor(0.25))
    assert found is not None and found.item() != 0.0


def test_a_dead_scale_is_found() -> None:
    parameter, gradient = pair(torch.zeros(3))
    found = finite.unscale_([(parameter, gradient)], torch.tensor(0.0), check_scale=True)
    assert found is not None and found.item() != 0.0
    parameter, gradient = pair(torch.zeros(3))
    found = finite.unscale_([(parameter, gradient)], torch.tensor(0.0))
    assert found is not None and found.item() == 0.0 and gradient.isnan().all()  # what torch does


def sparse(values: list[float], dtype: torch.dtype) -> Tensor:
    """A gradient of shape (4, 1) with indices 1, 1, 2, ...: the first two values belong together."""
    indices = torch.tensor([[1, 1, *range(2, len(values))]])
    return torch.sparse_coo_tensor(indices, dense(values, dtype).reshape(-1, 1), (4, 1), check_invariants=True)


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_sparse_gradients(dtype: torch.dtype) -> None:
    parameter, gradient = pair(sparse([8.0, 4.0, 2.0], dtype))
    expected = gradient.to_dense() / 4.0
    found = finite.unscale_([(parameter, gradient)], torch.tensor(4.0))
    assert found is not None and found.item() == 0.0
    assert parameter.grad is not None and parameter.grad.is_sparse and parameter.grad.dtype == dtype
    assert torch.equal(parameter.grad.to_dense(), expected)
    for bad in (float("inf"), float("nan")):
        for run in (finite.unscale_, finite.check):
            found = run([pair(sparse([1.0, 1.0, bad], dtype))], torch.tensor(4.0))
            assert found is not None and found.item() != 0.0


def test_sparse_fp16_is_summed_in_fp32() -> None:
    """40000 + 40000 overflows fp16 while scaled and fits once unscaled; without unscaling room it does not."""
    parameter, gradient = pair(sparse([40000.0, 40000.0], torch.float16))
    found = finite.unscale_([(parameter, gradient)], torch.tensor(16.0))
    assert found is not None and found.item() == 0.0
    assert parameter.grad is not None and parameter.grad.to_dense()[1].item() == 5000.0
    parameter, gradient = pair(sparse([40000.0, 40000.0], torch.float16))
    found = finite.unscale_([(parameter, gradient)], torch.tensor(1.0))
    assert found is not None and found.item() != 0.0
    parameter, gradient = pair(sparse([40000.0, 40000.0], torch.float16))
    found = finite.unscale_([(parameter, gradient)], torch.tensor(1.0), into_fp32=True)
    assert found is not None and found.item() == 0.0
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert parameter.grad.to_dense()[1].item() == 80000.0


def test_conjugated_gradients_are_resolved() -> None:
    parameter, gradient = pair(torch.tensor([1 + 2j, 3 - 4j]).conj())
    finite.unscale_([(parameter, gradient)], torch.tensor(2.0))
    assert parameter.grad is not None and torch.equal(parameter.grad, torch.tensor([0.5 - 1j, 1.5 + 2j]))
    found = finite.check([pair(torch.tensor([complex(1, float("inf"))]).conj())], torch.tensor(2.0))
    assert found is not None and found.item() != 0.0


def test_mixed_dtypes_share_one_verdict() -> None:
    everything = [pair(dense([2.0, 4.0], dtype)) for dtype in REAL + COMPLEX]
    everything.append(pair(sparse([2.0, 2.0], torch.float32)))
    found = finite.unscale_(everything, torch.tensor(2.0))
    assert found is not None and found.item() == 0.0
    for (_, gradient), dtype in zip(everything, REAL + COMPLEX, strict=False):
        values = gradient.imag if dtype.is_complex else gradient
        assert values.tolist() == [1.0, 2.0]


def test_culprits_are_named_with_counts() -> None:
    first, second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
    model = torch.nn.Sequential(OrderedDict(a=first, b=second))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    anonymous = torch.optim.SGD(model.parameters(), lr=0.1)
    assert finite.describe_non_finite([named]) == ()
    assert first.weight.grad is not None
    first.weight.grad[0, 0] = float("inf")
    first.weight.grad[2, 1] = float("nan")
    second.bias.grad = None
    assert finite.describe_non_finite([named]) == ("a.weight (2 of 6 values)",)
    assert finite.describe_non_finite([anonymous]) == ("param_groups[0]['params'][0] of shape (3, 2) (2 of 6 values)",)
    names = WeakTensorKeyDictionary()
    names[first.weight] = "encoder.a.weight"
    assert finite.describe_non_finite([anonymous], names) == ("encoder.a.weight (2 of 6 values)",)


def test_a_long_list_of_culprits_is_cut() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(9)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), float("nan"))
    described = finite.describe_non_finite([torch.optim.SGD(parameters, lr=0.1)])
    assert len(described) == finite.NAMES_SHOWN + 1 and described[-1] == "and 4 more"
