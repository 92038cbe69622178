"""Which implementation of an operator runs: the table `OPERATORS`, and the functions that choose by device and tensor.

The functions take tensors and call an operator of `kernels.ops` where its kernels can be used, else torch's operators.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.arguments import check, one_of
from halfstep.errors import FormatError, UnbuiltError
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES
from halfstep.kernels import ops, triton
from halfstep.kernels.eager.torch_fused import is_dense
from halfstep.kernels.native.calls import Kernels
from halfstep.kernels.native.compiler import Unavailable, library
from halfstep.kernels.optimizers import BY_OPERATOR
from halfstep.kernels.reference import cross_entropy, exponents
from halfstep.kernels.reference import operators as reference
from halfstep.kernels.sharded import is_sharded, local, sharded_norms
from halfstep.kernels.watched import WatchedParameter
from halfstep.torch_private.fake import FakeTensor
from halfstep.torch_private.foreach import foreach_norm
from halfstep.torch_private.modes import are_functorch_transforms_active

OPERATORS: Mapping[str, tuple[str, str]] = {
    "norms": ("norms", "triton.norms.norms"),
    "judge": ("check_norms", "triton.norms.check_norms"),
    "advance_": ("advance_", "triton.norms.advance_"),
    **dict.fromkeys(BY_OPERATOR, ("update", "triton.updates.update")),
    "exponents_": ("exponents_", "triton.exponents.exponents_"),
    "row_sums_": ("row_sums_", "triton.loss.row_sums_"),
    "slope": ("logits_gradient", "triton.loss.gradient"),
}
"""Operator of torch.ops.halfstep -> the method of `native.calls.Kernels` on a CPU, the function in Triton on CUDA."""

KERNEL_TYPES = frozenset({Tensor, nn.Parameter, WatchedParameter, FakeTensor})
"""Exact tensor types that kernels take; other subclasses may be sharded, or consist of several tensors."""

_LOCK = threading.RLock()


def load_kernels(device: str, index: int | None = None) -> str:
    """Register the kernels of a device type; return "" if device `index` can use them, else why not, in one sentence.

    On a CPU the first call may compile them, which takes some seconds. On CUDA the first call for a device (default:
    the current one) launches an empty kernel (`triton.unsupported`).
    """
    if device == "cpu" and (wanted := os.environ.get("HALFSTEP_NATIVE")):
        if wanted == "0":
            return "the environment variable HALFSTEP_NATIVE is 0"
        check("the environment", UnbuiltError, HALFSTEP_NATIVE=(wanted, one_of("0", "1", "build")))
    return _loaded(device, index)


@cache
def _loaded(device: str, index: int | None) -> str:
    with _LOCK:  # only here: an interrupt at the end of a `with` can leave its lock taken
        return _registered(device, index)


@cache
def _registered(device: str, index: int | None) -> str:
    if device == "cpu":
        try:
            kernels, _ = _kernels()
        except Unavailable as error:
            return str(error)
        except OSError as error:  # a full disk, a file taken away
            return f"the kernels could not be compiled: {error}"
        for operator, (method, _) in OPERATORS.items():
            ops.LIBRARY.impl(operator, _of(operator, getattr(kernels, method)), "CPU")
        return ""
    if device == "cuda":
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        if reason := triton.unsupported(torch.device(device, torch.cuda.current_device() if index is None else index)):
            return reason
        _register_triton()
        return ""
    return f"there are no kernels for the device type {device!r}"


def _of(operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation of an operator; all updates have one function, which is given the spec first."""
    spec = BY_OPERATOR.get(operator)
    return function if spec is None else partial(function, spec)


@cache
def _kernels() -> tuple[Kernels, str]:
    """Return the kernels for the CPU, and where they are from."""
    found, origin = library(torch.backends.cpu.get_cpu_capability())
    return Kernels(found), origin


def cpu_kernels() -> str:
    """Return where the compiled CPU kernels are from: shipped or compiled; 'none: ' and why if there are none.

    Examples:
        >>> origin = hs.step.cpu_kernels()
    """
    reason = load_kernels("cpu")
    return f"none: {reason}" if reason else _kernels()[1]


def native_kernels(tensor: Tensor) -> Kernels | None:
    """Return the kernels for the CPU, to be called without torch's dispatcher; None for a tensor elsewhere."""
    return None if tensor.device.type != "cpu" or load_kernels("cpu") else _kernels()[0]


@cache
def _register_triton() -> None:
    for operator, (_, path) in OPERATORS.items():
        module, _, name = path.rpartition(".")
        ops.LIBRARY.impl(operator, _of(operator, getattr(import_module(f"halfstep.kernels.{module}"), name)), "CUDA")


def why_no_kernels(tensor: Tensor) -> str:
    """Return why there are no kernels on the device of `tensor`, in one sentence; "" if there are, loaded."""
    device = tensor.device
    if type(tensor) is FakeTensor and device.type == "cuda":  # nothing runs: the machine that will has Triton
        return triton.refused()
    return load_kernels(device.type, device.index)


def cannot_update(parameters: Sequence[Tensor]) -> str:
    """Return why the update operators cannot take `parameters`, at least one, or their parts; "" if they can."""
    device = parameters[0].device
    for parameter in parameters:
        if type(parameter) not in KERNEL_TYPES:
            parameter = local(parameter)
        if (
            type(parameter) not in KERNEL_TYPES
            or parameter.layout is not torch.strided
            or parameter.dtype not in POLICY_DTYPES
        ):
            return f"a parameter is a {type(parameter).__name__} of {parameter.dtype}, {parameter.layout}"
        if parameter.device != device:
            return f"parameters are on {device} and on {parameter.device}"
        if not parameter.is_contiguous() and not is_dense(parameter):
            return "a parameter has gaps in memory, or shares elements with itself"
    return why_no_kernels(parameter)


def by_foreach(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor in fp32: `reference.norms` for dense real tensors of one device.

    A CPU runs one loop a tensor, and converts low ones element by element: 21M elements in 21 ms, 2.4 ms in fp32.
    """
    return torch.stack(foreach_norm(list(tensors), 2.0, dtype=torch.float32))


def norms_for(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, (len(tensors),) fp32 on the first tensor's device, in one reading pass.

    Of a sharded tensor (DTensor) the norm of the whole; with one among them the call is collective over its mesh, and
    what is not finite on one rank is not finite on the others.
    """
    if not tensors:
        return reference.norms(tensors)
    device = tensors[0].device
    uniform = kernels = True  # uniform: torch's multi-tensor operators take them
    for tensor in tensors:
        if (
            tensor.device != device
            or tensor.layout is not torch.strided
            or tensor.dtype not in POLICY_DTYPES
            or not tensor.numel()
        ):
            uniform = kernels = False
            break
        if type(tensor) not in KERNEL_TYPES or not (tensor.is_contiguous() or is_dense(tensor)):
            kernels = False
    if kernels and not why_no_kernels(tensors[0]):
        norms: Tensor = ops.norms(list(tensors))
        return norms
    if any(is_sharded(t) for t in tensors):
        return sharded_norms(tensors, norms_for)
    return by_foreach(tensors) if uniform else reference.norms(tensors)


def check_norms(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return total norm, whether it is not finite, and the factor of the update: `reference.operators.check_norms`."""
    if type(norms) not in KERNEL_TYPES or norms.dtype is not torch.float32 or why_no_kernels(norms):
        return reference.check_norms(norms, divisor, clip_norm)
    found: tuple[Tensor, Tensor, Tensor] = ops.check_norms(norms, divisor, clip_norm)
    return found


def count_exponents_(rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the exponents of the n-th tensor to the n-th of contiguous rows (`reference.exponents`), without a wait."""
    found = [exponents.parts(tensor) for tensor in tensors]
    for tensor in found:
        if (at := tensor.device) != rows.device:
            raise FormatError(f"a tensor on {at} cannot be counted in rows on {rows.device}; move one of them")
    if not found:
        return
    if all(type(tensor) in KERNEL_TYPES for tensor in found) and not (why_no_kernels(rows) and rows.is_cuda):
        ops.exponents_(rows, found)  # without kernels the operator runs the reference, but another GPU may have them
    else:
        exponents.count_(rows, found)


def kernels_take_logits(logits: Tensor) -> bool:
    """Return whether the loss kernels take these logits: low ones (N, C) whose classes are contiguous."""
    return (
        not torch.compiler.is_compiling()
        and type(logits) in KERNEL_TYPES
        and logits.dtype in LOW_DTYPES
        and logits.dim() == 2
        and logits.stride(1) == 1
        and not are_functorch_transforms_active()
        and not why_no_kernels(logits)
    )


def losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of every target, fp32 or fp64, and what its gradient needs: `RowSums.lse`, or nothing."""
    if not kernels_take_logits(logits):
        each = cross_entropy.losses(logits, target, weight, ignored, smoothing)
        return each, each.new_empty(0)
    by_class = cross_entropy.smoothed(smoothing, weight, logits.shape[1], logits)
    cross_entropy.refuse_no_class(target, logits.shape[1], ignored)
    sums = row_sums(logits, target, by_class)
    return cross_entropy.losses_of_sums(sums, target, weight, ignored, smoothing, by_class)


def row_sums(
    logits: Tensor, target: Tensor, by_class: Tensor | None, first: int = 0, before: cross_entropy.RowSums | None = None
) -> cross_entropy.RowSums:
    """Return the sums of rows: `reference.cross_entropy.row_sums`; kernels write into those `before`."""
    if not kernels_take_logits(logits):
        return cross_entropy.row_sums(logits, target, by_class, first, before)
    wide = torch.float64 if logits.device.type == "cpu" else torch.float32
    sums = before or cross_entropy.RowSums(*(logits.new_empty(len(logits), dtype=wide) for _ in range(3)))
    ops.row_sums_(*sums, logits, target, by_class, first)
    return sums


def gradient_into(out: Tensor, logits: Tensor, share: cross_entropy.Shares, lse: Tensor, first: int = 0) -> Tensor:
    """Write the gradient of `logits`, of the classes from `first` on, into `out`, rounded once, and return it.

    `lse` is that of `losses`; `out` may be `logits`.
    """
    if lse.numel() and kernels_take_logits(logits):
        ops.logits_gradient(logits, lse, *share, first, out=out)
        return out
    return cross_entropy.gradient_into(out, logits, share, lse if lse.numel() else None, first)
