"""What every test can rely on: a seeded generator, one thread, no region left open by the test before."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C import _pop_torch_function_stack
from torch.overrides import _get_current_function_mode_stack

from tests.slow import is_slow

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the core of those they wait for
ROOT = Path(__file__).parent.parent
gc.set_threshold(50_000, 20, 50)  # a syntax tree or a graph is thousands of new objects, none of them garbage

try:
    from hypothesis import settings
except ImportError:  # a machine with a GPU may have pytest alone, which is all that tests on it need
    pass
else:
    settings.register_profile("halfstep", deadline=None, derandomize=True, database=None, max_examples=50)
    settings.load_profile("halfstep")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `tests.slow` names; skip what needs a GPU where there is none."""
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        fixtures = tuple(getattr(item, "fixturenames", ()))
        if is_slow(file, getattr(item, "originalname", item.name), fixtures):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors on few cores: more threads only wait for each other, and sums keep one order."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def absent_devices_are_not_seeded() -> Iterator[None]:
    """Seed the CPU alone: for a device that is not there torch keeps the stack of every call, a millisecond each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.mtia, torch.xpu):
            if not module.is_available():
                patch.setattr(module, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_not_searched() -> None:
    """Let the garbage collector look at what the tests of a file make: torch and other tests are a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_start() -> Iterator[None]:
    """Seed torch before a test; after it, fail if it left a region or a mode open."""
    torch.manual_seed(0)
    yield
    left = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    modes = _get_current_function_mode_stack()
    for device in left:
        torch.set_autocast_enabled(device, False)  # so that one bad test does not fail the rest
    for _ in modes:
        _pop_torch_function_stack()
    assert not left, f"the test left torch.autocast on for {left}"
    assert not modes, f"the test left function modes on: {modes}"
