"""Simulated formats: rounded numbers in, fp32 compute, one rounding out, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.cast.arithmetic.emulate import simulated
from halfstep.errors import PolicyError, RegionError
from halfstep.formats import format_of

NAMES = ["fp8_e4m3", "fp8_e5m2", "e3m4", "fp4_e2m1", "tf32", "e4m3-nosub"]


@pytest.mark.parametrize("name", NAMES)
def test_a_product_takes_and_gives_numbers_of_the_format(name: str) -> None:
    form = format_of(name)
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    with hs.autocast(policy=hs.Policy.of("mixed", dtype=name)):
        out = F.linear(x, w)
    assert torch.equal(out, form.round(F.linear(form.round(x), form.round(w))))
    grad = torch.randn(5, 3)
    out.backward(grad)
    arriving = form.round(grad)
    assert x.grad is not None and torch.equal(x.grad, form.round(arriving @ form.round(w)))
    assert w.grad is not None and torch.equal(w.grad, form.round(arriving.t() @ form.round(x)))


def test_a_simulated_fp16_is_the_emulated_one() -> None:
    x, w = torch.randn(5, 7), torch.randn(3, 7)

    def run(dtype: str) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        with hs.autocast(policy=hs.Policy.of("mixed", dtype=dtype, emulate="auto" if dtype != "fp16" else "always")):
            out = F.linear(*leaves)
        out.float().square().sum().backward()
        return [out.float(), *(t.grad for t in leaves if t.grad is not None)]

    for a, b in zip(run("e5m10"), run("fp16"), strict=True):
        assert torch.equal(a, b)


def test_operators_that_stay_fp32_are_left_alone() -> None:
    x, y = torch.randn(4, 3), torch.randint(0, 3, (4,))
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp4_e2m1")):
        assert torch.equal(F.cross_entropy(x, y), F.cross_entropy(x, y))
        assert F.cross_entropy(x, y).item() == pytest.approx(
            float(-F.log_softmax(x, 1)[torch.arange(4), y].mean()), rel=1e-6
        )
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(x @ x.t(), torch.mm(x, x.t()))
            product = x @ x.t()
    assert torch.equal(product, x @ x.t())


def test_an_embedding_rounds_the_rows_it_gathers() -> None:
    table = nn.Embedding(5, 4)
    with hs.autocast(policy=hs.Policy(dtype="e3m2", residual="low", table="mixed")):
        rows = table(torch.tensor([1, 3]))
    assert torch.equal(rows, format_of("e3m2").round(table.weight[[1, 3]]))


@pytest.mark.parametrize(("name", "worst"), [("tf32", 0.02), ("fp8_e4m3", 0.1), ("e3m2", 0.4)])
def test_a_model_trains_with_the_error_of_the_format(name: str, worst: float) -> None:
    def train(dtype: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = hs.TrainStep(
            model, optimizer, lambda m, x, y: F.mse_loss(m(x), y), policy=hs.Policy.of("mixed", dtype=dtype)
        )
        x = torch.randn(64, 6)
        y = x[:, :1] * x[:, 1:2]
        for _ in range(60):
            loss = step(x, y).loss
        return float(loss)

    exact = train("fp32")
    assert exact < 0.5
    found = train(name)
    assert found != exact and found < exact + worst


def test_a_prepared_model_is_simulated_under_checkpointing_too() -> None:
    def gradient(*, recompute: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model = hs.prepare(layer, policy=hs.Policy.of("mixed", dtype="fp8_e4m3"))
        x = torch.ones(2, 4, requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        assert isinstance(out, Tensor)
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(recompute=True), gradient(recompute=False))


def test_its_scale_follows_its_exponents() -> None:
    net = nn.Linear(1, 1)
    assert hs.resolve(hs.Policy.of("mixed", dtype="fp8_e5m2"), net).policy.scale != "none"
    plan = hs.resolve(hs.Policy.of("mixed", dtype="tf32"), net)
    assert plan.policy.scale == "none"
    assert any("tf32 is simulated" in note for note in plan.notes)


def test_what_cannot_be_done_says_so() -> None:
    with pytest.raises(NotImplementedError, match="parameters cannot be held in 'e3m4'.*params='fp32'"):
        hs.prepare(nn.Linear(1, 1), policy=hs.Policy.of("O2", dtype="e3m4"))
    with pytest.raises(PolicyError, match="dtype='fp8_e4m4'; expected one of .*did you mean 'fp8_e4m3'"):
        hs.Policy(dtype="fp8_e4m4")
    with pytest.raises(PolicyError, match="e12m3.*12 exponent bits; expected 2 to 8"):
        hs.Policy(dtype="e12m3")
    run = hs.autocast(policy=hs.Policy.of("mixed", dtype="e3m4"))(lambda x: x @ x)
    with pytest.raises(Exception, match="'e3m4' is simulated, which torch.compile cannot trace") as caught:
        torch.compile(run, fullgraph=True, backend="eager")(torch.ones(2, 2))
    assert RegionError.__name__ in repr(caught.getrepr())


@pytest.mark.skipif(torch.__version__ < "2.12", reason="view(dtype) has no rule under vmap before torch 2.12")
def test_second_derivatives_and_transforms() -> None:
    form = format_of("e4m3")
    square = simulated(lambda x: x * x, form)
    x = torch.tensor([1.5, 0.3], requires_grad=True)
    (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, form.round(torch.full((2,), 2.0)))
    assert torch.equal(torch.vmap(square)(x.detach()), square(x.detach()))
