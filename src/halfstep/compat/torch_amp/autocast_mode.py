"""torch.amp.autocast_mode: regions, and the decorators for autograd.Functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp import is_autocast_available

import halfstep as hs
from halfstep.compat.torch_amp.served import installed
from halfstep.torch_private.trees import tree_map

__all__ = ["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"]

F = TypeVar("F", bound=Callable[..., Any])
DATA_PARALLEL = "torch.nn.parallel.parallel_apply"


class autocast(hs.autocast):
    """`hs.autocast` with exactly torch.autocast's arguments: preset ``torch``, or the policy that is installed.

    Args:
        device_type: "cpu", "cuda", ...
        dtype: torch.float16 or torch.bfloat16; None: as torch.autocast would take here and now.
        enabled: False opens a region in which nothing is cast.
        cache_enabled: whether torch may keep low copies of weights until the outermost region ends.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a region; while installed, for code of torch, one of torch: note [what stays torch's] in `install`."""
        caller = str(sys._getframe(1).f_globals.get("__name__")) if installed else ""
        if caller.partition(".")[0] == "torch" and caller != DATA_PARALLEL:
            return torch.amp.autocast_mode.autocast(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:  # fmt: skip
        _check_device_type(device_type)
        super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        if not installed:
            return
        policy = installed[0].policy
        formats = [format for _, format, on in self.recipe.devices if on]
        if formats:  # else it is off for torch's reasons, such as a machine without CUDA
            format = formats[0] if policy.dtype == "auto" else None
            super().__init__(device_type, format, enabled, cache_enabled, policy=policy.replace(scale="auto"))
        installed[0].region(self)


def autocast_decorator(autocast_instance: hs.autocast, func: F) -> F:
    """Return `func` running in a region: what ``autocast_instance(func)`` returns."""
    return autocast_instance(func)  # type: ignore[return-value]


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate ``forward`` of an autograd.Function so that `custom_bwd` finds the region it ran in.

    Args:
        fwd: the method; None returns the decorator.
        device_type: the device whose region counts.
        cast_inputs: in a region, cast floating tensors of that device (never fp64), in nested containers too, and run
            with the region off. Outside of regions it has no effect.
    """
    _check_device_type(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        ctx = args[0]
        ctx._dtype = torch.get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = torch.is_autocast_enabled(device_type)
        if cast_inputs is None or not ctx._fwd_used_autocast:
            return fwd(*args, **kwargs)
        ctx._fwd_used_autocast = False
        args, kwargs = tree_map(functools.partial(_cast, device_type, cast_inputs), (args, kwargs))
        with autocast(device_type, enabled=False):
            return fwd(*args, **kwargs)

    return decorated


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Any:
    """Decorate ``backward`` of an autograd.Function to run in the region its forward ran in, emulated where that was.

    Args:
        bwd: the method; None returns the decorator.
        device_type: as for `custom_fwd`.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        ctx = args[0]
        if not hasattr(ctx, "_fwd_used_autocast"):
            raise hs.errors.PolicyError(
                f"custom_bwd on {bwd.__qualname__}: its forward is not decorated, so the region it ran in is unknown; "
                f"put @custom_fwd(device_type={device_type!r}) on forward"
            )
        with autocast(device_type, dtype=ctx._dtype, enabled=ctx._fwd_used_autocast):
            return bwd(*args, **kwargs)

    return decorated


def _cast(device_type: str, dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.device.type == device_type and value.dtype is not torch.float64:
            return value.to(dtype)
    return value


def _check_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise hs.errors.PolicyError(
            f"device_type={device_type!r} is a {type(device_type).__name__}; expected a string such as 'cuda' or 'cpu' "
            "(torch.cuda.amp's autocast(), without a device, is halfstep.compat.torch_amp.cuda.autocast())"
        )
