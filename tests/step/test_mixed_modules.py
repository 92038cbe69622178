"""The module rule "mixed": parameters in fp32, each operator by its own rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import PolicyError


class LoRA(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_down, self.lora_up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = self.base(x)
        right: Tensor = self.lora_up(self.lora_down(x))
        self.formats = left.dtype, right.dtype
        return left + right


def saved_bytes(rule: str) -> tuple[int, nn.Module, hs.TrainStep]:
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(32, 64), nn.GELU(), LoRA(64, 64), nn.GELU(), LoRA(64, 8))
    trained = [p for p in model.parameters() if p.requires_grad]
    policy = hs.Policy.of("O2", dtype="bf16").with_modules({"*lora_*": rule})
    step = hs.TrainStep(model, torch.optim.AdamW(trained, 1e-2), loss_fn, policy=policy)
    parameters = {p.data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(*batch())
    return sum(sizes.values()), model, step


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).float() - y).square().mean()


def test_adapters_have_fp32_parameters_and_low_operators() -> None:
    _, model, step = saved_bytes("mixed")
    part = model[0]  # type: ignore[index]
    assert part.lora_up.weight.dtype is torch.float32 and part.base.weight.dtype is torch.bfloat16
    assert part.formats == (torch.bfloat16, torch.bfloat16)
    before = part.lora_up.weight.detach().clone()
    first = step(*batch()).host().loss
    for _ in range(20):
        last = step(*batch()).host().loss
    assert last < first and not torch.equal(part.lora_up.weight.detach(), before)
    assert part.lora_up.weight.grad_fn is None and step.policy.master != "none"


def test_it_saves_fewer_bytes_than_the_rule_fp32() -> None:
    assert saved_bytes("mixed")[0] < 0.8 * saved_bytes("fp32")[0]


def test_a_plan_says_so() -> None:
    policy = hs.Policy.of("O2", dtype="bf16").with_modules({"0": "mixed"})
    plan = hs.resolve(policy, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert [(p.name, p.format) for p in plan.parameters][:3] == [
        ("0.weight", "fp32"),
        ("0.bias", "fp32"),
        ("1.weight", "bf16"),
    ]
    assert next(m for m in plan.modules if m.path == "0").rule == "mixed"
    assert hs.Policy.from_toml(policy.to_toml()) == policy


def test_no_operator_has_it() -> None:
    with pytest.raises(PolicyError, match="'mixed'"):
        hs.Policy(ops=(("softmax", "mixed"),))
    with pytest.raises(PolicyError, match="backward"):
        hs.operator("fp32", backward="mixed")
