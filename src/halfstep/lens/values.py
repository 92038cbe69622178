"""Values: what the numbers in a tensor are, and what an operator would have made of them in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from halfstep.step.record import put_random, random_states
from halfstep.trees import map_tensors, tensors

__all__ = [
    "LOWS",
    "PLAIN",
    "constants",
    "copied",
    "described",
    "extremes",
    "floats",
    "held",
    "in_float64",
    "local",
    "place",
    "read",
    "storage",
    "writes",
]

LOWS = frozenset({torch.float16, torch.bfloat16})

PLAIN = (int, float, bool, str, bytes, type(None), Tensor)
"""Types of plain values: what is kept as it is."""

STATISTICS = ("running_mean", "running_var")
BUILTIN_NORM = ("input", "weight", "bias", *STATISTICS, "training")


def extremes(tensor: Tensor) -> tuple[float, bool, bool]:
    """Return (largest finite magnitude, all finite, any nan) of a tensor's values; integers are finite and 0.0."""
    if is_functorch_wrapped_tensor(tensor):  # inside torch.func; the kernels below see what is in it
        return 0.0, True, False
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
    values = local(values)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or not values.numel():
        return 0.0, True, False
    if values.element_size() == 1:
        values = values.float()
    low, high = (float(v) for v in torch.aminmax(values))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high) + 0.0, True, False  # no -0.0
    nan = math.isnan(low)
    finite = values[torch.isfinite(values)]
    return (float(finite.abs().max()) if finite.numel() else 0.0), False, nan


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank has; of any other all of it."""
    own = None if type(tensor) is Tensor else getattr(tensor, "to_local", None)
    return tensor if own is None else own()


def floats(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that may hold what is not finite."""
    return [t for t in tensors(tree) if t.is_floating_point() or t.is_complex()]


def read(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating tensors among the arguments of `func` that its result depends on.

    That is all of them but the running statistics of a norm in training, which are written to alone.
    """
    found = floats((args, kwargs))
    name = str(func) if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", "")
    if "batch_norm" not in name and "instance_norm" not in name:
        return found
    if isinstance(func, torch._ops.OpOverload):
        names: Sequence[str] = [argument.name for argument in func._schema.arguments]
    else:
        names = tuple(inspect.signature(func).parameters) if isinstance(func, FunctionType) else BUILTIN_NORM
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    training = "cudnn" in name or any(given.get(flag) is True for flag in ("training", "train", "use_input_stats"))
    unread = {id(given.get(statistic)) for statistic in STATISTICS} if training else set()
    return [tensor for tensor in found if id(tensor) not in unread]


def described(found: list[Tensor]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the formats and the shapes of tensors."""
    return tuple(str(t.dtype).removeprefix("torch.") for t in found), tuple(tuple(t.shape) for t in found)


def constants(values: Iterable[Any]) -> Iterator[float]:
    """Iterate over the plain floats among arguments, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, float):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from constants(value)


def held(tensor: Tensor) -> bool:
    """Return whether `tensor` has a storage of its own, by which its values are known."""
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def storage(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common, as long as one of them, or a weak reference, lives."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return int(tensor.untyped_storage()._cdata) if held(tensor) else id(tensor)


def place(tensor: Tensor) -> int:
    """Return the address of the memory of a dense tensor; another one may get it when nobody holds this one."""
    return tensor.untyped_storage().data_ptr()


def writes(func: Callable[..., Any]) -> bool:
    """Return whether `func` changes an argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    return name.endswith("_")


def copied(tensor: Tensor) -> Tensor:
    """Return a copy outside autograd."""
    return tensor.detach().clone()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach()


def in_float64(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what `func` gives in float64 without casts, or None if it cannot; generators go on as if it had not."""
    saved = random_states()
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in devices:
        torch.set_autocast_enabled(device, False)
    try:
        with torch.no_grad():
            wide_args = map_tensors(list(args), _widened)
            wide_kwargs = {k: map_tensors(v, _widened) for k, v in kwargs.items() if k != "dtype"}
            wide_args = [torch.float64 if isinstance(a, torch.dtype) else a for a in wide_args]
            return func(*wide_args, **wide_kwargs)
    except Exception:  # no float64 kernel, or an argument that says which format
        return None
    finally:
        put_random(saved)
        for device in devices:
            torch.set_autocast_enabled(device, True)
