"""Tests make some of their tensors with torch itself, so models and MegEngine's tensors go to the CPU too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import halfstep.compat.megengine as mge


@pytest.fixture(autouse=True)
def everything_on_the_cpu() -> Iterator[None]:
    mge.set_default_device("cpu0")
    yield
    mge.set_default_device()
