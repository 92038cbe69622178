"""What `test_host_state` runs in a process with the host device: `state="host"` beside `state="device"`."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.testing import host_device

NAME = "npu"
FORMS: dict[str, Any] = {"foreach": False}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, **FORMS),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, **FORMS),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, **FORMS),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, **FORMS),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2, **FORMS),
    "Lion": lambda m: hs.Lion(m.parameters(), lr=1e-3),
    "list": lambda m: [torch.optim.SGD(_split(m)[0], lr=0.1, momentum=0.9), torch.optim.AdamW(_split(m)[1])],
    "dict": lambda m: {"muon": torch.optim.Muon(_split(m)[0]), "adam": torch.optim.AdamW(_split(m)[1])},
}
WIDE = {"fp32": ["layer_norm", "batch_norm"]}
POLICIES = {
    "O0": hs.Policy.of("O0"),
    "O1": hs.Policy.of("O1", dtype="bf16"),
    "torch": hs.Policy.of("torch", dtype="bf16").with_ops(**WIDE),
    "mixed": hs.Policy.of("mixed", dtype="bf16").with_ops(**WIDE),
    "O2": hs.Policy.of("O2", dtype="fp16", emulate="always").with_ops(**WIDE),
    "pure": hs.Policy.of("pure", dtype="bf16"),
    "lean": hs.Policy.of("lean", dtype="bf16"),
    "low states": hs.Policy.of("pure", dtype="bf16", state="low"),
}


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def net(device: Any) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16),
                         nn.GELU(), nn.Linear(16, 4))  # fmt: skip
    return made.to(device, memory_format=torch.channels_last)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batches(device: Any, count: int = 4, *, bad: int = -1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(count)]
    for n, (x, _) in enumerate(made):
        if n == bad:
            x[:] = torch.inf
    return [(x.to(device), y.to(device)) for x, y in made]


def step_of(device: Any, optimizer: str, policy: str, state: str, **more: Any) -> hs.TrainStep:
    """Return a step that clips."""
    model = net(device)
    given = {"clip_norm": 1.0, "policy": POLICIES[policy], "state": state} | more
    return hs.TrainStep(model, OPTIMIZERS[optimizer](model), loss_fn, **given)


def places(step: hs.TrainStep) -> set[str]:
    """Return where the states of the optimizer are that have more than one element."""
    tensors = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return {t.device.type for t in tensors if t.numel() > 1}


def plain(value: Any) -> Any:
    """Return a state as plain values without devices."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.detach().cpu().double().tolist()]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def trained(step: hs.TrainStep, data: list[Any]) -> Any:
    """Return results, and the state after them."""
    results = [step(*batch).host() for batch in data]
    return [(r.loss, r.scale, r.skipped, r.grad_norm) for r in results], plain(step.state_dict())


def differs(device: Any, optimizer: str, policy: str, **more: Any) -> str:
    """Return in what two steps differ with their states here and there, one of whose updates is skipped."""
    made = [step_of(device, optimizer, policy, state, **more) for state in ("device", "host")]
    data = batches(device, 6, bad=3)
    one, other = (trained(step, data) for step in made)
    where = [places(step) for step in made]
    expected = [{torch.device(device).type}, {"cpu"}]
    if where != expected:
        return f"states are on {where}"
    if str(one[0]) != str(other[0]):
        return f"results: {one[0]} and {other[0]}"
    return ", ".join(name for name in one[1] if str(one[1][name]) != str(other[1][name]))


def run() -> dict[str, Any]:
    """Return everything that the tests look at."""
    device = host_device(NAME)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"equal": {f"{o} {p}": differs(device, o, p) for o in OPTIMIZERS for p in POLICIES}}


if __name__ == "__main__":
    print(json.dumps(run()))
