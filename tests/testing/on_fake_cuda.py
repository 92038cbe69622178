"""What `test_fake_cuda` runs in a process with the fake device: waits of every preset, and what a few loops do."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep as hs
from benchmarks.losses import HEADS, moved
from halfstep.kernels import triton
from halfstep.testing import Counter, CountError, Counts, count_step, fake_cuda
from halfstep.weights import store
from tests.testing.without_float64 import refused

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Lion": (hs.Lion, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
}


def net(device: str = "cuda") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batch() -> tuple[Tensor, Tensor]:
    return torch.empty(4, 8, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(name: str, form: str, optimizer: str, loss: Any = loss_fn) -> Counts:
    model = net()
    kind, options = OPTIMIZERS[optimizer]
    policy = hs.Policy.of(name, dtype=form)
    step = hs.TrainStep(model, kind(model.parameters(), **options), loss, policy=policy, clip_norm=1.0)
    return count_step(step, *batch(), warm=1)


def own_loop(form: str) -> Counts:
    """Count a loop with hs.prepare and torch's own clipping."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype=form))

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(loss_fn(model, x, y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return count_step(step, *batch())


class Ranked(DistributedDataParallel):
    """What a step asks of DistributedDataParallel, whose C++ reads the values of parameters."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        group: Any = torch.distributed.group.WORLD
        self.module, self.process_group, self.device = module, group, next(module.parameters()).device
        self.static_graph, self.mixed_precision, self.logger, self._comm_hooks = False, None, None, []
        self._join_config, self.parameters_to_ignore = SimpleNamespace(enable=False), set[str]()
        self.broadcast_bucket_size, self.require_forward_param_sync = 1, True

    def no_sync(self) -> Any:
        return nullcontext()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def register_comm_hook(self, *given: Any) -> None:
        pass


def averaged(reduce: str, accumulate: int) -> list[Any]:
    """Return the waits of a window whose gradients are averaged over two ranks, and how many of them were counted."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    policy = hs.Policy.of("O2", dtype="bf16", reduce=reduce)
    hs.prepare(model, optimizer, policy=policy)
    step = hs.TrainStep(Ranked(model), optimizer, loss_fn, policy=policy, accumulate=accumulate)
    for _ in range(2):  # the first window makes what stays
        before = step.host_reads
        with Counter() as counter:
            for _ in range(accumulate):
                step(*batch())
    return [[sync.where for sync in counter.counts().syncs], step.host_reads - before]


def ranks() -> dict[str, list[Any]]:
    """Train on one of two ranks, of which the other does not exist."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with mock.patch.object(store, "broadcast_coalesced"):
        found = {f"{reduce}, {n}": averaged(reduce, n) for reduce in ("grad", "fp32", "low") for n in (1, 2)}
    torch.distributed.destroy_process_group()
    return found


def without_triton() -> list[Any]:
    """Train where no Triton kernel can be launched: return why torch's operators updated, and how often it waited."""
    with mock.patch.object(triton, "refused", lambda: "no compiler"):
        model = net()
        step = hs.TrainStep(
            model,
            torch.optim.AdamW(model.parameters()),
            loss_fn,
            policy=hs.Policy.of("O2", dtype="fp16"),
            clip_norm=1.0,
        )
        counts = count_step(step, *batch(), warm=1)
        own = [row.operator for row in counts.rows if row.operator.startswith("halfstep")]
        return [step.generic, len(counts.syncs), own]


def made_inside() -> dict[str, list[Any]]:
    """Train modules that reach the device in the ways that programs use: return devices, waits, and what stays."""
    found = {}
    ways: dict[str, Callable[[], nn.Module]] = {
        "to": lambda: net("cpu").to("cuda"),
        "cuda": lambda: net("cpu").cuda(),
        "to_empty": lambda: net("meta").to_empty(device="cuda"),
        "deepcopy": lambda: copy.deepcopy(net("cpu").cuda()),
    }
    for name, make in ways.items():
        model = make()
        devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
        step = hs.TrainStep(
            model, torch.optim.AdamW(model.parameters()), loss_fn, policy=hs.Policy.of("O2", dtype="fp16")
        )
        found[name] = [*devices, len(count_step(step, *batch(), warm=1).syncs)]
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    sgd = torch.optim.SGD(tied.parameters(), lr=0.1)
    tied.to("cuda")
    (first, *_), weight = sgd.param_groups[0]["params"], tied[0].weight
    found["tied"] = [str(weight.device), tied[1].weight is weight, first is weight, copy.deepcopy(weight).is_leaf]
    return found


def moved_after() -> list[str]:
    """Move a model after its TrainStep was made, and train: return the formats of a layer's output in each step.

    At the end a prepared one whose parameters a device map replaces.
    """
    model, formats = net("cpu"), list[str]()
    step = hs.TrainStep(model, adamw(model), loss_fn, policy=hs.Policy.of("mixed", dtype="bf16"))
    model.get_submodule("4").register_forward_hook(lambda module, args, output: formats.append(str(output.dtype)))
    model.cuda()
    for _ in range(3):
        count_step(step, *batch())
    mapped = hs.prepare(net("cpu"), policy=hs.Policy.of("mixed", dtype="bf16"))
    mapped.get_submodule("4").register_forward_hook(lambda module, args, output: formats.append(str(output.dtype)))
    for part in mapped.modules():
        part._parameters.update(
            {n: nn.Parameter(p.detach().cuda()) for n, p in part._parameters.items() if p is not None}
        )
        part._buffers.update({name: buffer.cuda() for name, buffer in part._buffers.items() if buffer is not None})
    mapped(batch()[0])
    return formats


def moves(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Wait three times: a number from the host, a value to the host, and a flag."""
    weight = torch.tensor(1.0, device="cuda")
    y.sum().cpu()
    return loss_fn(model, x, y) * weight * (2 if bool((x > 0).any()) else 1)


def shapes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_fn(model, x[: len(y.nonzero())], y)


def plans() -> dict[str, Any]:
    """Plan a step on this device and on the CPU: bytes at the peak and between steps, and the parts of these."""
    given = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    found = {
        device: hs.plan(partial(net, device), given, loss_fn, adamw, policy="pure", device=device)
        for device in ("cpu", "cuda")
    }
    return {
        device: (plan.peak_bytes, plan.persistent_bytes, plan.by_part(peak=False), plan.notes)
        for device, plan in found.items()
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def main() -> None:
    with fake_cuda():
        presets, forms = ("torch", "O1", "mixed", "O2", "pure"), ("fp16", "bf16")
        found: dict[str, Any] = {
            f"{name} {form} {optimizer}": [sync.where for sync in train(name, form, optimizer).syncs]
            for name in presets
            for form in forms
            for optimizer in OPTIMIZERS
        }
        answer: dict[str, Any] = {"syncs": found}
        answer["loops"] = {form: len(own_loop(form).syncs) for form in forms}
        answer["moves"] = [s.operator for s in train("mixed", "fp16", "SGD", moves).syncs]
        try:
            train("mixed", "fp16", "SGD", shapes)
        except CountError as error:
            answer["shapes"] = str(error)
        answer["inside"] = made_inside()
        answer["moved after"] = moved_after()
        answer["float64"] = refused()
        answer["linear losses"] = [moved(size) for size in HEADS]
        answer["without triton"] = without_triton()
        answer["ranks"] = ranks()
        answer["auto"] = hs.Policy.of("mixed").dtype, hs.policy.units("cuda").reason
    answer["plans"] = plans()
    answer["after"] = torch.cuda.is_available()
    print(json.dumps(answer), file=sys.stdout)


if __name__ == "__main__":
    main()
