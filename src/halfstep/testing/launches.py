"""How many kernels torch's multi-tensor functions launch on CUDA: one for as many tensors as fit a kernel's arguments.

The packing of `MultiTensorApply.cuh` (torch 2.10 to 2.13, the header comes with torch): a launch holds at most 110, 64,
48, 36 or 30 tensors, by the number of lists it walks, and at most 320 chunks of 65,536 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["multi_tensor_launches"]

CHUNK = 65536
CHUNKS = 320
TENSORS = (110, 64, 48, 36, 30)  # for 1, 2, ... lists


def multi_tensor_launches(sizes: Sequence[int], lists: int) -> int:
    """Return the launches for tensors of `sizes` elements.

    Args:
        sizes: elements of each tensor of one list; empty ones are left out, as torch leaves them out.
        lists: how many lists the kernel walks side by side, results that it writes to included.
    """
    most = TENSORS[min(max(lists, 1), len(TENSORS)) - 1]
    launches = tensors = chunks = 0
    for size in filter(None, sizes):
        tensors += 1
        needed = -(-size // CHUNK)
        for chunk in range(1, needed + 1):
            chunks += 1
            last = chunk == needed
            if chunks == CHUNKS or (last and tensors == most):
                launches += 1
                chunks, tensors = 0, 0 if last else 1  # a tensor cut in two goes on in the next launch
    return launches + (chunks > 0)
