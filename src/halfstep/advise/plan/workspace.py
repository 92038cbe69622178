"""Workspace: memory that kernels of the CPU take while they run and give back before they return.

oneDNN's convolutions copy what they read and write into layouts of channels in blocks of 16. The sums below were found
by counting (torch 2.13, oneDNN 3.x with AVX-512) and hold within some per cent there; other operators take so little
that a plan leaves it out. Kernels of a GPU take theirs from cuDNN and cuBLAS, which choose it while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["KERNELS"]

BLOCK = 16  # channels


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of (N, C, ...) with channels in whole blocks."""
    channels = -(-tensor.shape[1] // BLOCK) * BLOCK
    return tensor.numel() // max(1, tensor.shape[1]) * channels * tensor.element_size()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reads(tensor: Tensor) -> int:
    """Return the bytes of an input's copy; one of few channels is read where it is."""
    return _blocked(tensor) if tensor.shape[1] >= BLOCK else 0


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    input, weight = args[:2]
    if input.dim() < 3:
        return 0
    copied = _bytes(weight) if input.shape[1] >= BLOCK else 0
    return copied + max(_reads(input), _blocked(result)) + _bytes(result)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    gradient, input, weight, mask = args[0], args[1], args[2], args[-1]
    if input.dim() < 3:
        return 0
    made, kernel = _bytes(input) if mask[0] else 0, _bytes(weight)
    by_input = by_weight = 0
    if mask[0]:
        by_input = _blocked(input) + _blocked(gradient) + kernel
        if input.shape[1] >= BLOCK:
            strided = gradient.shape[2:].numel() < input.shape[2:].numel()
            by_input += made + (_blocked(gradient) if strided else 0)
    if mask[1]:
        read = _reads(input) + _blocked(gradient)
        low = weight.element_size() < 4  # the gradient of a low weight is summed in fp32
        by_weight = made + (read + 3 * kernel if low else max(read + kernel, 2 * kernel))
    return max(by_input, by_weight)


def _batch_norm_backward(args: tuple[Any, ...], result: Any) -> int:
    return 2 * _bytes(args[1])


KERNELS: Mapping[str, Callable[[tuple[Any, ...], Any], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
}
"""Operator -> the most bytes that its kernel has at one time, results included."""
