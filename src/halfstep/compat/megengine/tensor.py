"""Tensors: torch's, made with MegEngine's words and defaults; and its device names.

"xpux" is the accelerator if there is one, else the CPU; "cpu0", "gpu0" name one.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from halfstep.compat.shared import Factory
from halfstep.errors import RegionError, did_you_mean

__all__ = ["Parameter", "Tensor", "device_of", "dtype_of", "get_default_device", "set_default_device", "tensor"]

_default = ["xpux"]
"""The name new tensors and models go by; a list because it is set for the process."""


def get_default_device() -> str:
    """Return the name of the device that new tensors and models are made on."""
    return _default[0]


def set_default_device(device: str = "xpux") -> None:
    """Make new tensors and models on `device`."""
    device_of(device)
    _default[0] = device


def device_of(name: str | torch.device | None = None) -> torch.device:
    """Return torch's device for one of MegEngine's (or torch's) names; None: the default."""
    name = _default[0] if name is None else name
    if isinstance(name, torch.device):
        return name
    found = re.fullmatch(r"(xpu|gpu|cuda|cpu)(x|:?\d+)?(?::\d+)?", name) if isinstance(name, str) else None
    if found is None:
        raise RegionError(f"device={name!r}; expected 'xpux' (the accelerator or the CPU), 'gpu0', 'cpu0' or the like")
    kind, number = found.group(1), (found.group(2) or "").strip(":x")
    if kind == "cpu" or (kind == "xpu" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(number)) if number else torch.device("cuda")


TENSOR_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
}


def tensor(
    data: Any, dtype: Any = None, device: str | torch.device | None = None, is_const: bool = False,
    no_cache: bool = False, name: str | None = None, format: str = "default",
) -> torch.Tensor:  # fmt: skip
    """Return `data` as a tensor of its own.

    Args:
        data: a number, nested lists, a numpy array or a tensor.
        dtype: a name such as "float32", or numpy's or torch's dtype. Default: that of `data`, but fp32 for fp64 and
            int32 for int64, as MegEngine has neither.
        device: "xpux", "cpu0", "gpu0", ...; default: the default device.
        is_const: kept for MegEngine's signature; a tensor that is not attached is a constant.
        no_cache: kept for MegEngine's signature; there is no cache of small tensors.
        name: kept for MegEngine's signature.
        format: "default", or "nhwc" for torch.channels_last.
    """
    if format not in ("default", "nchw", "nhwc"):
        raise RegionError(f"tensor(format={format!r}): expected 'default', 'nchw' or 'nhwc'")
    try:
        made = torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        text = repr(data) if len(repr(data)) < 60 else repr(data)[:57] + "..."
        raise RegionError(
            f"tensor(data={text}): {error}; expected a number, nested lists of one length each, an array or a tensor"
        ) from None
    default = {torch.float64: torch.float32, torch.int64: torch.int32}.get(made.dtype, made.dtype)
    wanted = default if dtype is None else dtype_of(dtype)
    made = made.detach().to(device=device_of(device), dtype=wanted, copy=True)
    return made.contiguous(memory_format=torch.channels_last) if format == "nhwc" and made.dim() == 4 else made


def dtype_of(dtype: Any) -> torch.dtype:
    """Return torch's dtype for a name, numpy's or torch's dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name: str = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "") or getattr(dtype, "name", "")
    if name not in TENSOR_DTYPES:
        near = did_you_mean(str(name), TENSOR_DTYPES)
        raise RegionError(f"dtype={dtype!r}; expected one of {', '.join(TENSOR_DTYPES)}{near}")
    return TENSOR_DTYPES[name]


class Tensor(metaclass=Factory):
    """``Tensor(data, dtype=None, device=None, ...)``: the same as `tensor`; what it makes is a torch.Tensor."""

    _made = torch.Tensor

    def __new__(cls, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[misc]  # a factory
        """Return a torch.Tensor."""
        return tensor(data, *args, **kwargs)


class Parameter(metaclass=Factory):
    """``Parameter(data, dtype=None, device=None, ...)``: as `tensor`, and what it makes is a torch.nn.Parameter."""

    _made = torch.nn.Parameter

    def __new__(cls, data: Any, *args: Any, **kwargs: Any) -> torch.nn.Parameter:  # type: ignore[misc]  # a factory
        """Return a torch.nn.Parameter; integers have no gradient."""
        made = tensor(data, *args, **kwargs)
        return torch.nn.Parameter(made, requires_grad=made.is_floating_point() or made.is_complex())
