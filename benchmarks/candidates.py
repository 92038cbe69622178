"""Candidates by label: how each trains a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from benchmarks import instruments, loops, peers
from benchmarks.cases import AGAIN, AMP, EMPTY_MODE, LINEAR_LOSS, OURS, TORCHAO, WRAPPERS, Case
from benchmarks.loops import Absent, Run

Loop = Callable[[Case, nn.Module], Run]
LIMIT = "low forward and backward alone"

LOOPS: Mapping[str, Loop] = {
    "fp32": loops.fp32,
    "fp32 again": loops.fp32,
    AMP: loops.amp,
    AGAIN: loops.amp,
    "torch.amp bf16": partial(loops.amp, dtype=torch.bfloat16),
    EMPTY_MODE: loops.amp_in_empty_mode,
    "torch.amp compiled": partial(loops.amp, compile="default"),
    "torch.amp compiled, CUDA graphs": partial(loops.amp, compile="reduce-overhead"),
    WRAPPERS[0]: peers.accelerate,
    WRAPPERS[1]: peers.fabric,
    TORCHAO[0]: partial(peers.torchao, optimizer="_AdamW"),
    TORCHAO[1]: partial(peers.torchao, optimizer="AdamW8bit"),
    **{preset: partial(loops.policy, preset=preset) for preset in (*OURS, "lean")},
    **{f"{preset} compiled": partial(loops.policy, preset=preset, compile=True) for preset in ("mixed", "pure")},
    **{f"{preset} captured": partial(loops.policy, preset=preset, cuda_graph=True) for preset in ("mixed", "pure")},
    **{name: partial(loops.linear_loss, preset=name.partition(",")[0]) for name in LINEAR_LOSS},
    LIMIT: loops.low,
    **instruments.LOOPS,
}
"""Every candidate's loop. LIMIT is none: it trains nothing, and its time is the floor of a step's."""

FOREIGN = {*WRAPPERS, *TORCHAO}


def start(case: Case, label: str, device: str) -> Run:
    """Return candidate `label` in training of `case`, from the same weights as every other.

    Raises:
        Absent: it cannot run here. What another library raises is an absence, with its words; what halfstep or torch
            raises is an error.
    """
    torch.manual_seed(0)
    model = case.model().to(device)
    try:
        return LOOPS[label](case, model)
    except Absent:
        raise
    except Exception as error:
        if label in FOREIGN:
            raise Absent(f"{type(error).__name__}: {error}") from error
        raise
