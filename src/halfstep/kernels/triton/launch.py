"""How kernels are launched: options, names of formats, the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["FAITHFUL", "KINDS", "on"]

FAITHFUL: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum stay two roundings, as they are in the reference."""

KINDS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int16: "int16",
    None: "none",
}


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: Triton launches on the current one. Nothing to do on CPU (the interpreter) or one GPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
