from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.cli.doctor import HostReads, host_reads, optimizer_classes


class Refuses(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("not today\nnor tomorrow")


def test_every_optimizer_of_torch_is_asked() -> None:
    names = [kind.__name__ for kind in optimizer_classes()]
    assert {"Adam", "AdamW", "SGD", "LBFGS", "Muon", "SparseAdam"} <= set(names)
    assert "Optimizer" not in names and len(names) == len(set(names))


def test_fused_optimizers_take_the_verdict_on_the_device() -> None:
    assert host_reads("cpu", torch.optim.AdamW) == HostReads(optimizer="AdamW", first=0, later=0)
    assert host_reads("cpu", torch.optim.SGD) == HostReads(optimizer="SGD, momentum=0.9", first=0, later=0)


def test_others_cost_a_read_a_step() -> None:
    for kind in (torch.optim.RMSprop, torch.optim.SparseAdam):
        reason = f"{kind.__name__} is none of Adam, AdamW, SGD, Lion and NAdam"
        assert host_reads("cpu", kind) == HostReads(optimizer=kind.__name__, first=1, later=1, generic=reason)


def test_why_no_kernel_of_halfstep_updates_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_NATIVE", "0")
    assert host_reads("cpu", torch.optim.AdamW).generic == "the environment variable HALFSTEP_NATIVE is 0"


def test_what_an_optimizer_objects_to_is_the_answer() -> None:
    assert "closure" in host_reads("cpu", torch.optim.LBFGS).problem
    assert host_reads("cpu", Refuses).problem == "RuntimeError: not today"
