"""Warnings name the line of the program that led to them, however deep they are given; so do regions."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch

import halfstep as hs
from halfstep.errors import warn
from tests.sources import nodes_of
from tests.two_processes import as_script

SCRIPT = """
import _thread, queue, warnings
import torch
from torch import nn
import halfstep as hs
from halfstep.cast.state import STATE

results = queue.Queue()

def loss_fn(model, x):
    results.put(STATE.frames[-1].place)
    return model(x).square().mean()

class Asking(nn.Linear):
    def forward(self, x):
        results.put(STATE.frames[-1].place)
        return super().forward(x)

model, x = nn.Linear(4, 4), torch.randn(2, 4)
step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="mixed")
region = hs.autocast("cpu", dtype=torch.bfloat16)
prepared = hs.prepare(Asking(4, 4), policy=hs.Policy.of("mixed", dtype="bf16"))
decorated = region(lambda: results.put(STATE.frames[-1].place))

def at(line):
    assert f"script.py:{line} " in (place := results.get(timeout=60)), (line, place)

step(x); at(28)
step.evaluate(x); at(29)
prepared(x); at(30)
prepared.forward(x); at(31)
decorated(); at(32)
with region:
    assert "script.py:33 " in STATE.frames[-1].place
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hs.autocast("cpu", dtype=torch.float64)
assert [one.filename.endswith("script.py") and one.lineno for one in caught] == [37]
# in these threads no frame of the program lies below
running = _thread._count()
for method in (prepared.forward, step.evaluate):
    _thread.start_new_thread(method, (x,))
    assert "(in " in results.get(timeout=60)
    while _thread._count() > running:
        pass
"""


def test_at_the_top_of_a_script_and_of_a_thread(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = as_script([script], tmp_path)
    assert not run.returncode and "Error" not in run.stderr, run.stderr


def test_a_warning_is_given_once_for_a_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("once for a line", RuntimeWarning)
    assert [(one.filename, one.category) for one in caught] == [(__file__, RuntimeWarning)]


BROAD = {"Exception", "BaseException", "RuntimeError"}  # what torch.OutOfMemoryError is an instance of
OWN = re.compile(r"^(\w*Error|refusal)\(")
NOT_OF_TENSORS = {
    "advise/plan/elsewhere.py": "pickling",
    "advise/plan/planner.py": "tensors without memory",
    "cast/regions/autocast.py": "the name of a device",
    "checkpoints/generators.py": "a few words of generators on the host",
    "meeting.py": "the store of the process group",
    "scale/scaler.py": "the name of a device",
    "step/loss.py": "the arguments of torch.compile, which compiles later",
    "tasks/task.py": "a file of the user's that is imported",
    "lens/box/stepbox.py": "a replay, of which `explain` raises the cause instead",
}
"""File -> what can fail there."""


def test_a_lack_of_memory_is_never_an_error_of_ours() -> None:
    """Programs that search for a batch size wait for torch.OutOfMemoryError."""
    found = set()
    package = Path(hs.__file__).parent
    for place in package.rglob("*.py"):
        for node in nodes_of(place):
            if not isinstance(node, ast.ExceptHandler) or node.type is None:
                continue
            caught = {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)}
            if not caught & BROAD:
                continue
            raised = [one.exc for one in ast.walk(node) if isinstance(one, ast.Raise) and one.exc is not None]
            ours = any(OWN.match(ast.unparse(one)) for one in raised)
            text = ast.unparse(node)
            if ours and "lacks_memory(" not in text and "OutOfMemoryError" not in text:
                found.add(str(place.relative_to(package)))
    assert found == set(NOT_OF_TENSORS)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, lacks: bool) -> None:
    assert hs.errors.lacks_memory(error) is lacks
