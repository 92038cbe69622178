"""What `test_host_state` runs on two ranks with the host device: `state="host"` over sharded parameters.

fully_shard runs there as on any accelerator. The device's memory is the host's, so gloo's own collectives for a CPU
serve it.
"""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.kernels.sharded import is_sharded, local
from halfstep.testing import host_device
from halfstep.torch_private.trees import tree_map_only
from tests.distributed.strategies import Net, batches, loss_of, policy

NAME = "npu"
STATES = ("device", "host")
POLICIES = ("torch:bf16", "O2:fp16", "pure:bf16", "pure:bf16:master=split,state=low", "mixed:bf16")
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9),
}
COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "allgather_", "broadcast_", "barrier")


def communicate() -> Iterator[torch.library.Library]:
    """Yield what gives the device collectives, as long as it is referred to."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own look for a backend of the device
        for name in COLLECTIVES:
            library.impl(name, partial(_collective, getattr(torch.ops.c10d, name)), "PrivateUse1")
    yield library


def _collective(operator: Any, *args: Any) -> Any:
    found = operator(*tree_map_only(Tensor, _memory, args))
    return (args[0], found[-1]) if isinstance(found, (tuple, list)) else found


def _memory(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor on the device as one on the CPU."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    assert tensor.is_contiguous()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def step_of(optimizer: str, name: str, state: str, device: str = NAME) -> hs.TrainStep:
    torch.manual_seed(0)
    model: nn.Module = hs.shard(Net().to(device), policy(name))
    return hs.TrainStep(model, OPTIMIZERS[optimizer](model), loss_of, clip_norm=1.0, state=state, blackbox=False)


def trained(step: hs.TrainStep, rank: int, numbers: range, bad: int = -1) -> str:
    """Return results, and the state after them, as text."""
    device, results = next(step.model.parameters()).device, []
    for number in numbers:
        for batch in batches(number, 0, 1, (rank, 2), float("inf") if number == bad else 1.0):
            results.append(step(*(tensor.to(device) for tensor in batch)).host())
    return str([(r.loss, r.scale, r.skipped, r.grad_norm) for r in results] + [plain(step.state_dict())])


def plain(value: Any) -> Any:
    """Return a state as plain values, of this rank's part."""
    if isinstance(value, Tensor):
        part = local(value.detach())
        return [is_sharded(value), str(part.dtype), list(value.shape), part.cpu().double().tolist()]
    if isinstance(value, dict):
        return {str(name): plain(value[name]) for name in sorted(value, key=str)}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def places(step: hs.TrainStep) -> list[str]:
    """Return where the parts of the states are."""
    tensors = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.numel() > 1]
    return sorted({f"{local(t).device.type} {t.device.type}" for t in tensors if is_sharded(t)})


def compared(rank: int, optimizer: str, name: str, device: str) -> dict[str, Any]:
    """Return whether a step with its states on the host has the bits of one with states on the device."""
    made = [step_of(optimizer, name, state, device) for state in STATES]
    ends = [trained(step, rank, range(4), bad=2) for step in made]
    return {"equal": ends[0] == ends[1], "skipped": "True" in ends[0].partition("{")[0], "places": [*map(places, made)]}


def resumed(rank: int, optimizer: str, name: str, folder: str, device: str) -> list[Any]:
    """Return whether a checkpoint of each kind of step is continued by the other, with its bits and states in place."""
    goes_on = step_of(optimizer, name, "device", device)
    trained(goes_on, rank, range(2))
    found, end = [], trained(goes_on, rank, range(2, 4))
    for state, other in zip(STATES, STATES[::-1], strict=True):
        path = Path(folder, state)
        step, again = (step_of(optimizer, name, one, device) for one in (state, other))
        trained(step, rank, range(2))
        trained(again, rank, range(1))
        hs.save(step, path)
        hs.load(again, path)
        found += [trained(again, rank, range(2, 4)) == end, places(again)]
        again.load_state_dict(copy.deepcopy(step.state_dict()))
        found += [trained(again, rank, range(2, 4)) == end, places(again)]
    return found


def run(rank: int, folder: str, pairs: list[tuple[str, str]], device: str = NAME) -> dict[str, Any]:
    """Return everything that the tests look at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in communicate() if host_device(NAME).type == device else ("a CPU has all of it",):
            found: dict[str, Any] = {f"{o} {p}": compared(rank, o, p, device) for o, p in pairs}
            found["resumed"] = resumed(rank, *pairs[-1], folder, device)
    return found
