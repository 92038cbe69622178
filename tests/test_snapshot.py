"""Snapshots: every part brings back what a block changes, and the list of who takes one is complete."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.snapshot import (
    Loan,
    Modules,
    Snapshot,
    attributes,
    generators_of,
    gradients,
    noted,
    optimizer_state,
    same_numbers,
    scheduler_state,
    torch_states,
)
from tests.sources import nodes_of

PACKAGE = Path(hs.__file__).parent

USERS = {
    "lens/audit/audit.py": {"Snapshot", "generators_of", "noted"},
    "lens/audit/record.py": {"same_numbers", "torch_states"},
    "lens/box/replay.py": {"Modules", "Snapshot", "contents", "gradients", "noted", "put_buffers"},
    "lens/box/trials.py": {"Snapshot", "attributes"},
    "lens/calls.py": {"same_numbers", "torch_states"},
    "step/state.py": {"Snapshot", "optimizer_state", "scheduler_state"},
    "binding/prepare.py": {"Snapshot", "optimizer_state"},
    "step/graphs.py": {"Snapshot", "cloned", "gradients", "noted"},
    "step/moments.py": {"Snapshot"},
    "step/parts/record.py": {"generators_of", "noted", "put_buffers"},
    "step/parts/verdicts.py": {"Snapshot", "scheduler_state"},
    "step/warming.py": {"Snapshot", "optimizer_state"},
    "auto/trial.py": {
        "Loan", "Modules", "Snapshot", "attributes", "cloned", "generators_of", "gradients", "noted", "optimizer_state",
    },
}  # fmt: skip
"""File -> what it takes from `halfstep.snapshot`."""


def test_who_takes_a_snapshot() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module == "halfstep.snapshot":
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).update(a.name for a in node.names)
    assert found == USERS


class Net(nn.Module):
    """Dropout's generator, BatchNorm's buffers, plain attributes and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.noise, self.calls, self.seen = torch.Generator().manual_seed(1), 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.extra = x.mean()
        x = x + torch.rand(x.shape) + torch.rand(x.shape, generator=self.noise) + random.random() + np.random.rand()
        y: Tensor = self.norm(self.layer(x))
        return y


def parts() -> tuple[Net, Any, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def facts(net: Net, optimizer: Any, scheduler: Any) -> dict[str, str]:
    """Return everything that `trained` changes."""
    torch.set_printoptions(precision=10)
    own = {name: value for name, value in vars(net).items() if not name.startswith("_") and name != "noise"}
    return {
        "noted": repr((torch.get_rng_state().sum(), random.getstate(), list(np.random.get_state()))),
        "Modules": repr((own, list(net.buffers()), net.noise.get_state().sum())),
        "gradients": repr([p.grad for p in net.parameters()]),
        "Loan": repr((list(net.parameters()), optimizer.state_dict()["state"])),
        "optimizer_state": repr((sorted(vars(optimizer)), optimizer.defaults)),
        "scheduler_state": repr((scheduler.state_dict(), [g["lr"] for g in optimizer.param_groups])),
    }


def trained(net: Net, optimizer: Any, scheduler: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    optimizer.defaults["lr"] = optimizer.mark = 7


def noters(net: Net, optimizer: Any, scheduler: Any) -> dict[str, Callable[[], None]]:
    return {
        "noted": noted(),
        "Modules": Modules(net),
        "scheduler_state": scheduler_state(scheduler, optimizer),
        "optimizer_state": optimizer_state(optimizer),
        "gradients": gradients(net.parameters()),
        "Loan": Loan(net, optimizer),
    }


def test_all_parts_bring_everything_back() -> None:
    net, optimizer, scheduler = parts()
    before, made = facts(net, optimizer, scheduler), noters(net, optimizer, scheduler)
    addresses = [p.data_ptr() for p in net.parameters()]
    with Snapshot(*made.values()).returning():
        made["Loan"].lend()  # type: ignore[attr-defined]
        trained(net, optimizer, scheduler)
        assert all(facts(net, optimizer, scheduler)[name] != before[name] for name in before)
    assert facts(net, optimizer, scheduler) == before
    assert [p.data_ptr() for p in net.parameters()] == addresses and not hasattr(optimizer, "mark")


@pytest.mark.parametrize("left_out", ["noted", "Modules", "gradients", "Loan", "optimizer_state"])
def test_what_a_part_brings_back_stays_changed_without_it(left_out: str) -> None:
    net, optimizer, scheduler = parts()
    before, made = facts(net, optimizer, scheduler), noters(net, optimizer, scheduler)
    with Snapshot(*(part for name, part in made.items() if name != left_out)).returning():
        made["Loan"].lend()  # type: ignore[attr-defined]
        trained(net, optimizer, scheduler)
    assert facts(net, optimizer, scheduler)[left_out] != before[left_out]


def test_the_scheduler_and_a_rate_in_a_tensor_come_back_alone() -> None:
    net, optimizer, scheduler = parts()
    before, restore = facts(net, optimizer, scheduler), scheduler_state(scheduler, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    restore()
    assert facts(net, optimizer, scheduler)["scheduler_state"] == before["scheduler_state"]
    assert optimizer.param_groups[0]["lr"] is rate


def test_the_other_parts_are_restored_if_one_raises() -> None:
    def fails() -> None:
        raise MemoryError

    net, optimizer, scheduler = parts()
    before = facts(net, optimizer, scheduler)
    snapshot = Snapshot(noted(), fails, Modules(net))
    net(torch.ones(2, 3))
    with pytest.raises(MemoryError):
        snapshot.restore()
    after = facts(net, optimizer, scheduler)
    assert (after["noted"], after["Modules"]) == (before["noted"], before["Modules"])


def test_a_buffer_that_was_not_written_to_is_not_written_when_it_is_restored() -> None:
    net, _, _ = parts()
    modules, version = Modules(net), net.norm.running_mean._version  # type: ignore[union-attr]
    modules()
    assert net.norm.running_mean._version == version  # type: ignore[union-attr]


def test_modules_that_are_called_in_a_block_are_noted_before_their_first_call() -> None:
    net, critic = nn.Linear(3, 3), Net()
    before = copy.deepcopy((list(critic.buffers()), critic.calls, critic.noise.get_state()))
    modules = Modules(net)
    with modules.watching():
        critic(net(torch.ones(2, 3)))
    modules()
    assert repr((list(critic.buffers()), critic.calls, critic.noise.get_state())) == repr(before)
    critic(torch.ones(2, 3))
    assert repr((list(critic.buffers()), critic.calls)) != repr(before[:2])


def test_attributes_bring_back_objects_and_the_order_of_containers() -> None:
    net = Net()
    layer, order = net.layer, list(net._modules)
    restore = attributes(net.modules())
    del net.layer
    net.layer = nn.Linear(1, 1)
    restore()
    assert net.layer is layer and list(net._modules) == order


def test_the_same_numbers_are_drawn_and_afterwards_it_goes_on() -> None:
    generator = torch.Generator().manual_seed(5)
    states = torch_states([generator])
    first = torch.rand(1, generator=generator)
    torch.manual_seed(1)
    here = torch.rand(1)
    torch.manual_seed(1)
    with same_numbers(states):
        assert torch.equal(torch.rand(1, generator=generator), first)
    assert torch.equal(torch.rand(1), here)
    holder = Net()
    holder.noise = generator
    assert generators_of([holder]) == [generator]
