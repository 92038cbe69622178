"""Programs that read or write weights between passes do with low weights what they do with fp32 weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm, parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import halfstep as hs

Program = Callable[[Any], Any]
SMALL = 2.0**-13


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def prepared(master: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hs.prepare(model, optimizer, policy=hs.Policy.of("pure", dtype="bf16").replace(master=master))
    return model


def without(program: Program) -> Program:
    return torch.no_grad()(program)


READS: dict[str, Program] = {
    "a norm": lambda m: m[0].weight.norm(),
    "a penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "a function": lambda m: F.normalize(m[0].weight, dim=1),
    "a number": lambda m: torch.tensor(m[0].weight[0, 1].item()),
    "a text": lambda m: torch.tensor(float(f"{m[0].weight[3, 2]:.7f}")),
    "a cast": lambda m: m[0].weight.float(),
    "a product with itself": lambda m: m[0].weight @ m[0].weight.T,
    "a product with fp32": lambda m: torch.ones(2, 16) @ m[0].weight.T + m[0].bias,
    "a layer of fp32": lambda m: F.linear(torch.ones(2, 16), m[0].weight, m[0].bias),
    "a layer of fp32, not recorded": without(lambda m: F.linear(torch.ones(2, 16), m[0].weight, m[0].bias)),
    "beside fp32": without(lambda m: torch.cat([m[0].weight, torch.ones(2, 16)])),
    "where": without(lambda m: torch.where(m[0].weight.abs() < 0.05, torch.zeros(()), m[0].weight)),
    "a comparison": without(lambda m: (m[0].weight < m[0].weight.detach().clone().roll(1)).float()),
    "a mask": lambda m: (m[0].weight > m[0].weight.mean()).float(),
    "places": without(lambda m: m[0].weight.flatten().argsort()),
    "torch.clone": lambda m: torch.clone(m[0].weight),
    "a vector": lambda m: parameters_to_vector(m.parameters()),
    "a norm of all": lambda m: get_total_norm(m.parameters()),
    "NumPy": lambda m: torch.from_numpy(m[0].weight.detach().cpu().numpy().copy()),
    "inference": lambda m: torch.inference_mode()(lambda: m[0].weight.data.float().clone())(),
    "a difference": lambda m: m[0].weight - m[0].weight.detach().clone() * 1.001,
}


@pytest.mark.parametrize("master", ["master", "split"])
@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_fp32_also_where_gradients_are_recorded(name: str, master: str) -> None:
    plain, model = READS[name](net()).detach(), prepared(master)
    read = READS[name](model).detach()
    assert type(read) is not nn.Parameter and read.dtype is plain.dtype
    torch.testing.assert_close(read.as_subclass(Tensor), plain, rtol=1e-6, atol=1e-7)


def test_gradients_flow_to_the_weight_and_a_second_time() -> None:
    plain, model = net(), prepared("split")
    for m in (plain, model):
        penalty = m[0].weight.T.pow(3).sum() + m[0].weight[1:].norm() + (m[0].weight.float() * 2).sum()
        (first,) = torch.autograd.grad(penalty, m[0].weight, create_graph=True)
        (first.float().square().sum() + penalty).backward()
    assert torch.allclose(model[0].weight.grad.float(), plain[0].weight.grad, rtol=2e-2, atol=2e-2)
    again = checkpoint(lambda w: (w.T @ w).square().sum(), model[0].weight, use_reentrant=False)
    again.backward()  # computes it again, in fp32 again
    node = model[0].weight.expand_as(model[0].weight).grad_fn.next_functions[0][0]
    assert type(node).__name__ == "AccumulateGrad"  # what wrappers register their hooks on


def test_what_a_pass_reads_is_low() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = [(1 * self.weight).dtype, self.weight.T.dtype, torch.flip(self.weight, [0]).dtype]
            return F.linear(x, self.weight)

    layer = Reads(4, 4)
    hs.prepare(layer, policy=hs.Policy.of("pure", dtype="bf16"))
    layer(torch.ones(1, 4)).sum().backward()
    assert set(layer.seen) == {torch.bfloat16}


def swapped(m: Any) -> None:
    means = [p.detach().clone() * 0.5 for p in m.parameters()]
    for _ in range(2):  # in, and out again
        for p, mean in zip(m.parameters(), means, strict=True):
            kept = p.data
            p.data = mean.data
            mean.data = kept


def copied_with_gradients(m: Any) -> None:
    for p in m.parameters():
        p.data.copy_(0.999 * p)
        p.data = (p - SMALL).detach()


def through_a_vector(m: Any) -> None:
    vector_to_parameters(parameters_to_vector(m.parameters()).detach() + SMALL, m.parameters())


def rotated(m: Any) -> None:
    m[0].weight.copy_(m[0].weight @ (1.001 * torch.eye(16)))
    m[0].weight.T.add_(SMALL)
    m[0].weight[m[0].weight > 0] += SMALL


def inplace(m: Any) -> None:
    F.relu(m[0].weight, inplace=True)


def inference(m: Any) -> None:
    with torch.inference_mode():
        m[0].weight.data.add_(SMALL)


WRITES: dict[str, Program] = {
    "swapped": swapped,
    "copied with gradients": copied_with_gradients,
    "through a vector": through_a_vector,
    "rotated": without(rotated),
    "in place": without(inplace),
    "inference": inference,
    "loaded from parameters": lambda m: m.load_state_dict(dict(m.named_parameters())),
    "orthogonal": lambda m: nn.init.orthogonal_(m[0].weight),
}


@pytest.mark.parametrize("master", ["master", "split"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_kept_in_fp32(name: str, master: str) -> None:
    plain, model = net(), prepared(master)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (plain, model):
            torch.manual_seed(1)
            WRITES[name](m)
        state = model.state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key].as_subclass(Tensor), value, rtol=1e-6, atol=1e-7)
    assert torch.equal(Tensor.detach(model[0].weight), state["0.weight"].bfloat16())


def test_an_array_that_cannot_reach_the_weight_is_not_written() -> None:
    model = prepared("split")
    with pytest.raises(ValueError, match="read-only"):
        model[0].weight.detach().numpy()[0, 0] = 1.0
    model[0].weight.detach().clone().numpy()[0, 0] = 1.0  # of a copy it can
