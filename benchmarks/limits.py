"""The limit of a step: low forward and backward without a cast, and a tail that moves each byte once.

The tail's bytes a parameter, with AdamW in fp32 behind a 16-bit weight: the gradient is read for its norm (2) and for
the update (2), weight and both moments are read (12) and written (12), and the low weight is written (2): 30. They move
at the bandwidth of a copy between buffers larger than every cache.
"""

from __future__ import annotations

import statistics
import time

import torch

from halfstep.timing import wait_for

TAIL_BYTES = 30
BUFFER_BYTES = {"cpu": 2**27, "cuda": 2**30}
TIMES = 15


def copy_bandwidth(device: str) -> float:
    """Return bytes read and written a second by a copy, the median of several."""
    source = torch.ones(BUFFER_BYTES[device] // 4, device=device)
    target = torch.zeros_like(source)
    taken = []
    for _ in range(TIMES):
        wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        taken.append(time.perf_counter() - start)
    return 2 * BUFFER_BYTES[device] / statistics.median(taken)


def ideal_tail(parameters: int, bandwidth: float) -> float:
    """Return the seconds of a tail that reads and writes each byte once."""
    return TAIL_BYTES * parameters / bandwidth
