"""What needs a GPU: no waits, a captured update, an alarm that arrives late."""

from __future__ import annotations

import pytest
import torch

from halfstep.policy.scale_rule import SCALE_RULES
from halfstep.scale import GradScaler
from halfstep.scale.alarm import DelayedFlag
from halfstep.scale.rule import advance_, initial_state
from tests.scale.loops import INF

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_fused_loop_never_waits() -> None:
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = GradScaler()
    flags = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bad in (False, True, False):
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale((weight * weight).sum()))
            assert weight.grad is not None
            if bad:
                weight.grad.fill_(INF)
            scaler.step(optimizer)
            flags.append(scaler.skipped(optimizer))
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [bool(flag) for flag in flags] == [False, True, False] and scaler.host_reads == 0
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("name", ["halfstep", "deepspeed", "fairseq"])
def test_a_captured_update_moves_the_scale_at_every_replay(name: str) -> None:
    rule = SCALE_RULES[name]
    state, found = initial_state(rule, "cuda"), torch.ones((), device="cuda")
    other = initial_state(rule, "cuda")
    advance_(rule, other, found)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance_(rule, state, found)
    expected = initial_state(rule, "cpu")
    for bad in (1.0, 1.0, 0.0, 1.0):
        found.fill_(bad)
        graph.replay()
        advance_(rule, expected, torch.tensor(bad))
        assert [field.item() for field in state] == [field.item() for field in expected]


def test_a_flag_is_read_late() -> None:
    watch, flag = DelayedFlag(), torch.ones((), dtype=torch.bool, device="cuda")
    assert not watch.read(flag)
    torch.cuda.synchronize()
    assert watch.read(flag) is True
