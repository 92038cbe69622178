"""The peak memory of a step under the recommended preset, beside torch.amp's, and what stays between steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.candidates import start
from benchmarks.cases import AMP, CASES, Case, mlp_case
from benchmarks.counts import allocations
from halfstep.tasks.measure import state_bytes

MLP = mlp_case("mlp", 256, 1024, 1024, 10)  # with weights that are larger than its activations
SCALARS = 16  # bytes: loss scale, flag of the last update, formats of the loss and of what backward begins with


def case_of(name: str) -> Case:
    return MLP if name == "mlp" else CASES[name]


@cache
def counted(name: str, label: str) -> tuple[int, int]:
    """Return the bytes between steps and those at the peak of one, past the steps that the black box samples."""
    case = case_of(name)
    run = start(case, label, "cpu")
    for number in range(4):
        run.step(case.batch(number))
    state = state_bytes(*run.holds)
    return state, state + allocations(lambda: run.step(case.batch(0)))[1]


def statistics(case: Case) -> int:
    """Return the bytes of BatchNorm's statistics, which a step copies to restore them."""
    torch.manual_seed(0)
    named = case.model().named_buffers()
    return sum(b.nbytes for name, b in named if name.endswith(("running_mean", "running_var", "num_batches_tracked")))


@pytest.mark.parametrize(
    "name",
    ["mlp", "chain10", "lenet5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("chain148", "resnet_small"))],
)
@pytest.mark.parametrize("preset", ["torch", "mixed"])
def test_a_step_needs_at_most_the_memory_of_torch_amp(name: str, preset: str) -> None:
    case = case_of(name)
    least, _ = counted(name, "fp32")
    _, theirs = counted(name, AMP)
    state, peak = counted(name, preset)
    assert peak <= theirs + statistics(case) + SCALARS
    assert round(peak / theirs, 2) <= 1.0
    assert state <= least + statistics(case) + SCALARS
