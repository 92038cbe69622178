"""Low tensors in few passes and temporaries: added to fp32 ones, and bf16 split off and joined again.

torch adds tensors of two formats on a CPU by casting one into a temporary of its own size, which is mapped page by
page: 58 ms for 16M bf16 elements on one core, and 12 in pieces whose cast stays in the cache. Accelerators' kernels
cast while they read. Of 1M elements on one core of an AMD EPYC `join_bf16` takes 0.3 ms, the reference 3.0.
"""

import torch
from torch import Tensor

from halfstep.kernels.reference.operators import HALF_ULP

PIECE = 1 << 17  # elements: half a MiB of fp32
QUIET_NAN = 0x7FC00000


def add_low_(total: Tensor, low: Tensor) -> None:
    """Add `low`, a dense fp16 or bf16 tensor, to `total`, fp32 of the same shape, in place; bit for bit as `add_`."""
    if total.device.type != "cpu" or total.numel() <= PIECE or total.stride() != low.stride():
        total.add_(low)
        return
    strides, sizes = total.stride(), total.shape
    order = sorted(range(total.dim()), key=lambda d: (-strides[d], -sizes[d]))
    total, low = total.permute(order), low.permute(order)
    if not total.is_contiguous():
        total.add_(low)
        return
    piece = torch.empty(PIECE, device="cpu")
    for into, part in zip(total.view(-1).split(PIECE), low.view(-1).split(PIECE), strict=True):
        wide = piece[: len(part)]
        wide.copy_(part)
        into.add_(wide)


def split_bf16(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into bf16, rounded half up, and int16: as the reference; NaN becomes the positive quiet one."""
    bits = wide.detach().view(torch.int32)
    upper = bits + HALF_ULP
    upper.bitwise_and_(~0xFFFF).masked_fill_(wide.isnan(), QUIET_NAN)
    return upper.view(torch.float32).to(torch.bfloat16), bits.to(torch.int16)  # exact: its lower half is zero


def join_bf16(low: Tensor, remainder: Tensor) -> Tensor:
    """Rebuild fp32 from both halves: as the reference; a NaN stays one.

    A remainder whose upper bit is set is negative as int16, and adding it takes back what rounding up has added.
    """
    bits = low.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)
