"""Every tensor that the library makes names its device: `torch.set_default_device` is the user's.

What is asked of an accelerator names the device too: the current one may be another than the model's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

from tests.sources import nodes

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "halfstep"
FACTORIES = {function.__name__ for function in _device_constructors()}
OF_USERS = ("advise", "cli", "compat", "integrations", "tasks", "testing")
"""Parts that make tensors as a program of the user's does."""

ASKED = frozenset(
    {
        *("Stream", "current_stream", "default_stream", "synchronize", "get_rng_state", "set_rng_state", "manual_seed"),
        *("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats"),
        *("mem_get_info", "get_device_capability", "get_device_properties", "get_device_name", "current_device_index"),
    }
)
"""What torch's modules of accelerators answer for the current device, unless they are given another.

An event belongs to the device of the stream that it is recorded on. ``empty_cache`` has no device: it is for all.
"""

MODULES = ("torch.cuda", "torch.xpu", "torch.npu", "torch.accelerator", "module")


def without_device(text: str) -> Iterator[int]:
    """Yield the lines of calls of torch's factories that name no device."""
    for node in nodes(text):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not any(keyword.arg in {"device", None} for keyword in node.keywords):
                yield node.lineno


def test_every_factory_names_its_device() -> None:
    files = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in OF_USERS]
    found = {str(p.relative_to(PACKAGE)): [*without_device(p.read_text(encoding="utf-8"))] for p in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_factory_without_a_device_is_found() -> None:
    assert list(without_device("torch.zeros(2)\ntorch.ones(2, device=d)\nx.zeros(1)\ntorch.tensor(1, **more)")) == [1]


def of_current_device(text: str) -> Iterator[int]:
    """Yield the lines of calls that ask the current device: no argument names one, or no stream."""
    events = any(f"{module}.Event(" in text for module in MODULES)
    for node in nodes(text):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.args or node.keywords:
            continue
        asked = node.func.attr in ASKED and ast.unparse(node.func.value) in MODULES
        recorded = events and node.func.attr == "record"
        if asked or recorded or (node.func.attr == "Generator" and ast.unparse(node.func.value) == "torch"):
            yield node.lineno


def test_what_is_asked_of_an_accelerator_names_the_device() -> None:
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = {}
    for place in places:
        text = place.read_text(encoding="utf-8")
        if place.is_relative_to(PACKAGE) and place.relative_to(PACKAGE).parts[0] not in OF_USERS:
            lines = [*of_current_device(text)]
        else:  # their own generators are the CPU's, as those of a program of the user's
            lines = [*of_current_device(text.replace("torch.Generator()", "torch.Generator('cpu')"))]
        found[str(place.relative_to(ROOT))] = lines
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_question_to_the_current_device_is_found() -> None:
    text = "torch.cuda.synchronize()\nmodule.Event().record()\ntorch.cuda.synchronize(d)\nevent.synchronize()\n"
    text += "torch.Generator()\nmodule.current_stream()\nevent.record(module.current_stream(d))\n"
    assert list(of_current_device(text)) == [1, 2, 5, 6]
