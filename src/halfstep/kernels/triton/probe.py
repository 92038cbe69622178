# mypy: ignore-errors
"""One launch of an empty kernel, to find out before training whether Triton works on a device.

Triton compiles C code when it is first used, and some versions (3.6) again for every combination of argument types.
Without a C compiler each of these raises, which would be in the middle of a step. So the probe is compiled in an empty
cache: a cache that another machine has filled in part does not hide that a compiler is missing.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
import triton
from triton.runtime import driver

from halfstep.kernels.triton.tables import FAITHFUL, on


@triton.jit
def probe_kernel(number):
    """Do nothing: what a CUDA graph would replay has no memory to write to."""


def launch(device: torch.device) -> None:
    """Compile and launch `probe_kernel`, or raise what Triton raises; do nothing while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return
    driver.active.get_current_target()  # the driver's own C code may come from the user's cache
    with TemporaryDirectory() as folder, triton.knobs.cache.scope(), on(device):
        triton.knobs.cache.dir = folder
        probe_kernel[(1,)](2, **FAITHFUL)
