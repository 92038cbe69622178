"""A stand-in for Triton's driver: kernels are specialised as for a GPU and noted, and neither compiled nor launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}


class Driver:
    """What a launch asks of the driver."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"of {__name__}"  # a key of Triton's caches

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def launched(kind: str = "cuda") -> Iterator[set[tuple[str, str]]]:
    """Yield the set of what Triton compiles in the block: name of a kernel; types, constants, alignments, options."""
    found: set[tuple[str, str]] = set()
    own: list[JITFunction[Any]] = []

    def note(kernel: JITFunction[Any], key: str, *args: Any) -> None:
        found.add((kernel.__name__, key))
        own.append(kernel)

    with mock.patch.object(JITFunction, "_do_compile", note), mock.patch.object(driver, "_active", None):
        driver.set_active(Driver(TARGETS[kind]))
        try:
            yield found
        finally:
            for kernel in own:
                kernel.device_caches.pop(f"of {__name__}", None)
