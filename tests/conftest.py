"""What every test can rely on: a seeded generator, one thread, no region left open by the test before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch.overrides import _get_current_function_mode_stack

settings.register_profile("halfstep", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("halfstep")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors on few cores: more threads only wait for each other, and sums keep one order."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_start() -> Iterator[None]:
    """Seed torch before a test; after it, fail if it left a region or a mode open."""
    torch.manual_seed(0)
    yield
    left = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    modes = _get_current_function_mode_stack()
    for device in left:
        torch.set_autocast_enabled(device, False)  # so that one bad test does not fail the rest
    assert not left, f"the test left torch.autocast on for {left}"
    assert not modes, f"the test left function modes on: {modes}"
