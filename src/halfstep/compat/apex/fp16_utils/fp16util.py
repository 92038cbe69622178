"""Networks made half by hand, and fp32 masters of their parameters by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import halfstep as hs

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

BATCHNORM = nn.modules.batchnorm._BatchNorm

clip_grad_norm = nn.utils.clip_grad_norm_


# ---------------------------------------------------------------------- networks


class tofp16(nn.Module):
    """Cast the input to half."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` in half."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make every BatchNorm with weights in `module` fp32, in place, and return `module`."""
    for inner in module.modules():
        if isinstance(inner, BATCHNORM) and inner.affine:
            inner.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return a network that casts its input to half and runs `network`, made half except for BatchNorm."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating parameters, gradients and buffers that `module` itself owns to `dtype`, in place."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            gradient = parameter.grad
            parameter.data = parameter.data.to(dtype)
            if gradient is not None:
                parameter.grad = gradient.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert `network` to `dtype`, in place, except for BatchNorm with weights; return it."""
    for module in network.modules():
        if isinstance(module, BATCHNORM) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network converted to half, except for BatchNorm, that takes inputs of any format.

    Args:
        network: converted in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Run the network on `inputs`, floating ones cast to half."""
        return self.network(*hs.trees.map_tensors(inputs, lambda t: t.half() if t.is_floating_point() else t))


# ---------------------------------------------------------------------- masters


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of `model`, and fp32 masters of them for an optimizer.

    Args:
        model: all parameters of one format if `flat_master`.
        flat_master: one flat master for all, which optimizers step in one piece.

    Raises:
        TypeError: a flat master was asked for and the parameters have several formats.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return parameters, [nn.Parameter(p.detach().float().clone()) for p in parameters]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    if len(kinds) > 1:
        raise TypeError(
            f"prep_param_lists(flat_master=True): the parameters are {' and '.join(kinds)}, and a flat master needs "
            "one format; use flat_master=False"
        )
    master = nn.Parameter(_flatten_dense_tensors([p.detach() for p in parameters]).float())
    master.grad = torch.zeros_like(master)
    return parameters, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of `model_params` to `master_params`, in fp32; where there is none, None (flat: 0)."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = _flatten_dense_tensors(grads).to(master_params[0].dtype)
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.detach().to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round `master_params` into `model_params`, in place."""
    values: Iterable[Tensor] = master_params
    if flat_master:
        values = _unflatten_dense_tensors(master_params[0].detach(), list(model_params))
    for model, value in zip(model_params, values, strict=True):
        model.copy_(value)


def to_python_float(t: Any) -> float:
    """Return a one-element tensor, or the first of a sequence, as a number."""
    return float(t.item()) if hasattr(t, "item") else float(t[0])
