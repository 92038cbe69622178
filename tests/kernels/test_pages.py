"""Pages are counted in processes of their own: what malloc keeps is a matter of a whole process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.kernels.pages import _glibc

SOURCE = Path(__file__).resolve().parents[2] / "src"

PROGRAM = """
import gc, resource, sys, torch
import halfstep as hs
from halfstep.kernels import pages

kept = sys.argv[1] == "kept"
if not kept:
    pages._glibc = lambda: None
torch.set_num_threads(1)

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def made():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4))
    policy = hs.Policy.of("mixed", dtype="bf16")
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean(), policy=policy)

step, x = made(), torch.randn(4608, 4)
for _ in range(3):
    step(x)
print(min(faults(lambda: step(x)) for _ in range(5)))

def alone():
    torch.empty(2**27)[:2**24].fill_(1.0)  # 64 MiB of a block of 512 MiB, which no hole of the heap can hold

del step
gc.collect()
alone()
print(faults(alone))
"""
"""Its activations take 36 MiB in bf16; malloc gives such blocks back by default."""


def counts(kept: str) -> tuple[int, int]:
    """Return the page faults of a step and those of other work after it is gone.

    Of a step, the fewest of five: a system may take pages of a process that waits for the processor.
    """
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, kept],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    in_step, after = map(int, made.stdout.split())
    return in_step, after


@pytest.mark.skipif(_glibc() is None, reason="malloc is not glibc's")
def test_a_step_faults_no_pages_in_and_malloc_gives_back_after_it() -> None:
    in_step, after = counts("kept")
    assert in_step < 300
    assert after > 10_000  # pages of 4 KiB in 64 MiB: 16,384


@pytest.mark.skipif(_glibc() is None, reason="malloc is not glibc's")
def test_without_it_every_step_faults_them_in() -> None:
    assert counts("given back")[0] > 9_000  # pages of 4 KiB in 36 MiB: 9,216


HELD = """
import gc, json, os, sys, torch
import halfstep as hs
from halfstep.kernels import pages

calls = []
pages._glibc = lambda: type("Library", (), {"mallopt": lambda self, *setting: calls.append(setting) or 1})()
before = dict(os.environ)
for setting in json.loads(sys.argv[1]):
    os.environ.update(setting)
    pages._is_set.cache_clear(), pages._users.clear(), calls.clear()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy="O0")
    step(torch.randn(2, 4))
    print(len(calls))
    del step
    gc.collect()
    os.environ.clear(), os.environ.update(before)
"""


@pytest.mark.skipif(_glibc() is None, reason="malloc is not glibc's")
def test_settings_of_the_user_stay() -> None:
    free: list[dict[str, str]] = [{}, {"MALLOC_ARENA_MAX": "2"}]
    held = [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}]
    made = subprocess.run(
        [sys.executable, "-c", HELD, json.dumps(free + held)],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.split() == ["2", "2", "0", "0"]
