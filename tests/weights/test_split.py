"""split: two halves of 16 bits that are the fp32 value, so training is that of masters bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.kernels.eager.low import join_bf16, split_bf16
from halfstep.weights.strategies import MasterWeights, SplitWeights

BF16 = torch.bfloat16
STEPS = 5_000


class HalfUpMasters(MasterWeights):
    """Masters whose low weights round as `split` does."""

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        super()._adopt(key, parameter)
        return split_bf16(self._masters[key])[0]

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        for key in keys:
            Tensor.detach(self._parameters[key]).copy_(split_bf16(self._masters[key])[0])
        return keys


def patterns(uppers: Tensor, lowers: Tensor) -> Tensor:
    """Return the finite fp32 numbers whose upper and lower 16 bits are any of these."""
    bits = ((uppers.to(torch.int64)[:, None] << 16) | lowers.to(torch.int64)).flatten()
    wide = bits.to(torch.int32).view(torch.float32)
    return wide[torch.isfinite(wide)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def stratified() -> Tensor:
    """Return the lower halves where something can go wrong, and 40 others, one out of each stretch."""
    edges = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF])
    generator = torch.Generator().manual_seed(0)
    others = torch.arange(40) * 1638 + torch.randint(0, 1638, (40,), generator=generator)
    return torch.cat([edges, others])


def test_every_upper_half_comes_back_with_a_stratified_set_of_lower_halves() -> None:
    wide = patterns(torch.arange(1 << 16), stratified())
    assert wide.numel() == (65_536 - 256) * 50  # 256 uppers are those of inf and nan
    low, remainder = split_bf16(wide)
    assert low.dtype is BF16 and remainder.dtype is torch.int16
    assert same_bits(join_bf16(low, remainder), wide)


def test_every_lower_half_comes_back_under_some_upper_halves() -> None:
    generator = torch.Generator().manual_seed(1)
    edges = torch.tensor([0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7F, 0x8000, 0x8001, 0xBF80, 0xFF7F])
    uppers = torch.cat([edges, torch.randint(0, 0x7F80, (10,), generator=generator)])
    wide = patterns(uppers, torch.arange(1 << 16))
    assert wide.numel() == 21 * 65_536
    assert same_bits(join_bf16(*split_bf16(wide)), wide)


def test_round_half_even_is_no_bijection() -> None:
    """The fault twin: where the low weight rounds half to even, a remainder of 16 bits does not tell which it was."""
    wide = patterns(torch.tensor([0x3F80, 0x3F81]), torch.arange(1 << 16))
    even = wide.to(BF16)
    joined = join_bf16(even, split_bf16(wide)[1])
    wrong = ~(joined.view(torch.int32) == wide.view(torch.int32))
    assert int(wrong.sum()) == 1 and float(wide[wrong]) == 1 + 2**-8


def train(store_type: type[MasterWeights | SplitWeights], make: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    """Train on gradients that depend on the low weights; return low and precise ones."""
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in ((16,), (4, 8))]
    target = [torch.randn(p.shape, generator=generator).to(BF16) for p in parameters]
    store = store_type([(str(i), p) for i, p in enumerate(parameters)], BF16)
    optimizer = make(parameters)
    store.attach(optimizer)
    noise = torch.randn(STEPS, generator=generator).tolist()
    for step in range(STEPS):
        for p, t in zip(parameters, target, strict=True):
            p.grad = (Tensor.detach(p) - t).mul_(1.0 + 0.5 * noise[step])
        optimizer.step()
    return [*(p.detach() for p in parameters), *(store.read(p) for p in parameters)]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
        lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True),
    ],
    ids=["adamw", "sgd"],
)
def test_bit_equal_to_masters_of_the_same_rounding_over_5000_steps(make: Callable[..., torch.optim.Optimizer]) -> None:
    split, masters = train(SplitWeights, make), train(HalfUpMasters, make)
    assert all(torch.equal(a, b) for a, b in zip(split, masters, strict=True))
    assert all(torch.isfinite(a).all() for a in split)


def test_a_tie_is_all_that_tells_it_from_master() -> None:
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 2**-8 - 2**-20, 1 + 2**-8 + 2**-20, -1 - 2**-8])
    a, b = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    split, master = SplitWeights([("a", a)], BF16), MasterWeights([("b", b)], BF16)
    assert (Tensor.detach(a) != Tensor.detach(b)).tolist() == [False, True, False, False, True]
    assert torch.equal(split.read(a), values) and torch.equal(master.read(b), values)


def test_fp16_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(WeightsError, match=r"for bfloat16.*torch.float16; use master='master' or 'kahan'"):
        SplitWeights([("p", parameter)], torch.float16)
    assert parameter.dtype is torch.float32
