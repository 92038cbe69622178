"""Every tensor that the library makes names its device: `torch.set_default_device` is the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parent.parent.parent / "src" / "halfstep"
FACTORIES = {function.__name__ for function in _device_constructors()}
OF_USERS = ("advise", "cli", "compat", "integrations", "tasks", "testing")
"""Parts that make tensors as a program of the user's does."""


def without_device(text: str) -> Iterator[int]:
    """Yield the lines of calls of torch's factories that name no device."""
    for node in ast.walk(ast.parse(text)):
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
