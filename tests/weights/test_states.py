"""States in bf16, under optimizers that keep states of other formats and kinds themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.weights.states import LowStates

Update = Callable[[Tensor, dict[str, Any]], Tensor]


class Packed(Tensor):
    """A tensor that calls itself fp32 and has none of fp32's operators, as quantized states do."""

    @staticmethod
    def __new__(cls, value: Tensor) -> Packed:
        packed: Packed = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=torch.float32)
        packed.inside = value.half()
        return packed

    inside: Tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(str(function))


def _of(dtype: torch.dtype) -> Update:
    def update(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        momentum: Tensor = state.setdefault("momentum", torch.zeros_like(gradient, dtype=dtype))
        assert momentum.dtype is dtype
        return momentum.mul_(0.9).add_(gradient.to(dtype))

    return update


def _made_anew(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    state["momentum"] = 0.9 * state.get("momentum", 0.0) + gradient.bfloat16()
    assert state["momentum"].dtype is torch.bfloat16
    momentum: Tensor = state["momentum"]
    return momentum


def _late(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    state["count"] = state.get("count", 0) + 1
    return gradient if state["count"] < 3 else _of(torch.bfloat16)(gradient, state)


def _beside(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return (_of(torch.bfloat16)(gradient, state) + _wide(gradient, state)) / 2


def _wide(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    mean: Tensor = state.setdefault("mean", torch.zeros_like(gradient))
    assert mean.dtype is torch.float32
    return mean.mul_(0.9).add_(gradient)


def _nested(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    moments = state.setdefault("moments", {"first": torch.zeros_like(gradient), "others": []})
    moments["others"] = [gradient.clone()]
    first: Tensor = moments["first"].mul_(0.9).add_(gradient)
    return first


def _packed(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    before = state["momentum"].inside.float() if state else torch.zeros_like(gradient)
    state["momentum"] = Packed(before.mul_(0.9).add_(gradient))
    return before


UPDATES: dict[str, Update] = {
    "bf16": _of(torch.bfloat16),
    "fp16": _of(torch.float16),
    "fp64": _of(torch.float64),
    "complex": lambda g, s: _of(torch.complex64)(g, s).real,
    "int": lambda g, s: s.setdefault("sign", torch.zeros_like(g, dtype=torch.int8)).copy_(g.sign()) * g.abs(),
    "made anew": _made_anew,
    "late": _late,
    "beside": _beside,
    "nested": _nested,
    "packed": _packed,
}


class Custom(torch.optim.Optimizer):
    def __init__(self, parameters: Any, update: Update) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.update(p.grad, self.state[p]).to(p.dtype), alpha=-group["lr"])


def _trained(policy: hs.Policy, update: Update) -> tuple[float, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(64, 16)
    optimizer = Custom(model.parameters(), update)
    step = hs.TrainStep(model, optimizer, lambda m, x: (m(x).float() - x).square().sum(-1).mean(), policy=policy)
    losses = [step(x).host().loss for _ in range(20)]
    return losses[-1], optimizer


@pytest.mark.parametrize("name", UPDATES)
def test_states_of_an_optimizer_stay_what_it_made_them(name: str) -> None:
    wanted, _ = _trained(hs.Policy.of("mixed", dtype="bf16"), UPDATES[name])
    for preset, more in (("lean", {}), ("pure", {}), ("O2", {}), ("O2", {"master": "split"}), ("mixed", {})):
        policy = hs.Policy.of(preset, dtype="bf16", state="low", **more)
        found, optimizer = _trained(policy, UPDATES[name])
        assert LowStates.of(optimizer) is not None
        assert found < 1.1 * wanted, (preset, found, wanted)
    if name == "beside":  # what it makes in fp32 is kept in bf16, between its steps
        assert all(state["mean"].dtype is torch.bfloat16 for state in optimizer.state.values())
