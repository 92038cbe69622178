"""Errors that mixed formats cause: each is explained, of torch's kind, and torch's own words stay in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cast.regions.dtype_errors import explained
from halfstep.errors import ConversionError, HalfstepError, MissingKernelError, RegionError

FP32, BF16, HALF, LONG = torch.ones(4, 4), torch.ones(4, 4).bfloat16(), torch.ones(4, 4).half(), torch.ones(4, 4).long()
ROW = torch.tensor([0])

UNLIKE: dict[str, Callable[[], Any]] = {
    "matmul": lambda: BF16 @ FP32,
    "linear": lambda: F.linear(FP32, BF16, BF16[0]),
    "conv": lambda: F.conv2d(FP32[None, None], BF16[None, None], BF16[0, :1]),
    "bmm": lambda: torch.bmm(BF16[None], FP32[None]),
    "dot": lambda: torch.dot(BF16[0], FP32[0]),
    "einsum": lambda: torch.einsum("ij,jk", BF16, FP32),
    "index_put": lambda: BF16.clone().index_put_((ROW,), FP32[:1]),
    "index_add": lambda: BF16.clone().index_add_(0, ROW, FP32[:1]),
    "index_copy": lambda: BF16.clone().index_copy_(0, ROW, FP32[:1]),
    "scatter": lambda: BF16.clone().scatter_(0, LONG, FP32),
    "masked_scatter": lambda: BF16.clone().masked_scatter_(LONG.bool(), FP32),
    "attention": lambda: F.scaled_dot_product_attention(BF16[None], BF16[None], FP32[None]),
    "lerp": lambda: torch.lerp(BF16, FP32, 0.5),
    "layer_norm": lambda: F.layer_norm(FP32, (4,), BF16[0], BF16[0]),
    "prelu": lambda: F.prelu(FP32, BF16[0, :1]),
    "lstm cell": lambda: nn.LSTMCell(4, 4).bfloat16()(FP32),
}
INTEGERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(LONG, BF16, BF16[0]),
    "matmul": lambda: LONG @ BF16,
    "fp32": lambda: F.linear(LONG, FP32, FP32[0]),
    "conv": lambda: F.conv2d(LONG[None, None], BF16[None, None], BF16[0, :1]),
}
MISSING: dict[str, Callable[[], Any]] = {
    "svd": lambda: torch.linalg.svd(BF16),
    "inv": lambda: torch.linalg.inv(HALF),
    "fft": lambda: torch.fft.fft(BF16),
    "cdist": lambda: torch.cdist(BF16, BF16),
}
NONE: dict[str, Callable[[], Any]] = {  # a mistake in every format
    "shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "labels": lambda: F.cross_entropy(BF16, FP32[0]),
    "integer result": lambda: LONG.clone().add_(FP32),
    "integer activation": lambda: F.gelu(LONG),
    "size": lambda: torch.zeros(BF16[0, 0]),  # type: ignore[call-overload]
    "value": lambda: int("x"),
}


def raised(misuse: Callable[[], Any]) -> BaseException:
    try:
        misuse()
    except Exception as error:
        return error
    pytest.skip("this version of torch computes it")


def said(misuse: Callable[[], Any]) -> tuple[HalfstepError, BaseException]:
    error = raised(misuse)
    better = explained(error)
    assert better is not None, str(error)
    assert str(better).endswith(f"torch says: {error}")
    kinds = (TypeError, NotImplementedError, RuntimeError)
    assert [isinstance(better, kind) for kind in kinds if isinstance(error, kind)].count(False) == 0
    return better, error


@pytest.mark.parametrize("name", UNLIKE)
def test_two_formats_that_met(name: str) -> None:
    better, _ = said(UNLIKE[name])
    assert "met in an operator that takes one format" in str(better) and "y.to(x.dtype)" in str(better)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_met_weights(name: str) -> None:
    better, _ = said(INTEGERS[name])
    assert str(better).startswith("integers met weights") and "pass x.float()" in str(better)


@pytest.mark.parametrize("name", MISSING)
def test_an_operator_without_a_low_kernel(name: str) -> None:
    better, error = said(MISSING[name])
    assert "does not exist in the low format" in str(better) and "with_ops(fp32=" in str(better)
    assert isinstance(better, MissingKernelError) == isinstance(error, NotImplementedError)


def test_a_number_beyond_the_low_format() -> None:
    assert "torch.finfo(x.dtype).min" in str(said(lambda: HALF.masked_fill(LONG.bool(), -1e9))[0])


def test_a_low_tensor_for_numpy() -> None:
    better, _ = said(lambda: BF16.numpy())
    assert isinstance(better, ConversionError) and isinstance(better, TypeError)
    assert 'outputs="fp32"' in str(better) and "x.float().numpy()" in str(better)


def test_float64_weights_and_float64_inputs_have_messages_of_their_own() -> None:
    error = raised(lambda: F.linear(FP32.double(), BF16, BF16[0]))
    assert "if it came from numpy" in str(explained(error, FP32.double()))
    assert "model.float() if it is a weight" in str(explained(error, FP32))


@pytest.mark.parametrize("name", NONE)
def test_other_errors_stay_torchs(name: str) -> None:
    assert explained(raised(NONE[name])) is None


def test_an_explained_error_is_not_explained_again() -> None:
    better, _ = said(UNLIKE["matmul"])
    assert explained(better) is None


# ------------------------------------------------------------------ where errors are explained


class Uses(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.layer(x))


O3 = hs.Policy.of("O3", dtype="bf16", table="none")


@pytest.mark.parametrize("submodule", [False, True])
def test_in_the_region_of_a_bound_model(submodule: bool) -> None:
    inner = Uses(lambda h: h.detach().numpy())
    model = hs.prepare(nn.Sequential(inner) if submodule else inner, policy=O3)
    with pytest.raises(ConversionError, match="numpy has no bf16") as caught:
        model(FP32)
    assert isinstance(caught.value.__cause__, TypeError)
    assert not torch.is_autocast_enabled("cpu")


def test_an_integer_batch_in_a_training_step() -> None:
    model = nn.Linear(4, 4)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).float().mean(), policy="O2")
    with pytest.raises(RegionError, match=r"integers met.*x\.float\(\)"):
        step(LONG)
    assert step(FP32).host().updated


def test_what_loss_fn_hands_to_numpy() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = m(x)
        return out.float().mean() + float(out.detach().numpy().max())

    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy=O3)
    with pytest.raises(ConversionError, match="numpy has no bf16"):
        step(FP32)


@pytest.mark.parametrize("decorated", [False, True])
def test_in_a_region_opened_by_hand(decorated: bool) -> None:
    def work() -> Any:
        return (FP32 @ FP32).numpy()

    with pytest.raises(ConversionError, match="numpy has no bf16"):
        if decorated:
            hs.autocast("cpu", torch.bfloat16)(work)()
        else:
            with hs.autocast("cpu", torch.bfloat16):
                work()
    assert not torch.is_autocast_enabled("cpu")


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(HalfstepError, match="device_type 'gpu' is no device torch knows"):
        hs.autocast("gpu", torch.bfloat16)
