"""What a CUDA graph of a training step can hold: models, optimizers, batches; and where a capture failed."""

from __future__ import annotations

import linecache
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.binding.prepare import unwrap
from halfstep.errors import StepError
from halfstep.kernels.eager.torch_fused import WITH_KERNELS
from halfstep.kernels.optimizers import optimizer_names
from halfstep.step.recorder import recorder_for
from halfstep.trees import opened
from halfstep.update.optimizer_step import can_fuse, is_fused, takes_predicate
from halfstep.update.updater import unsuited

__all__ = ["REMEDY", "kind_of", "place_of", "refuse_graph"]

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
REMEDY = "leave cuda_graph out"


def refuse_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Refuse what cannot be captured, before anything is changed; return the model's device."""
    wrapper = type(model).__name__
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise StepError(
            f"cuda_graph=True captures one process on one device, and the model is in {wrapper}, which reduces "
            f"gradients over several; {REMEDY}"
        )
    inner = unwrap(model)
    for name, parameter in inner.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise StepError(f"cuda_graph=True and parameter {name} is sharded (DTensor); {REMEDY}")
    devices = sorted({str(p.device) for p in inner.parameters()})
    if len(devices) != 1 or recorder_for(torch.device(devices[0])) is None:
        raise StepError(
            f"cuda_graph=True needs a model on one CUDA device and this one is on {', '.join(devices) or 'none'}; "
            f"move it with model.to('cuda') before the optimizer is made, or {REMEDY}"
        )
    for name, module in inner.named_modules():
        if getattr(module, "sparse", False):
            raise StepError(f"cuda_graph=True and module {name} has sparse gradients, whose size the host must read")
    if unsuited(optimizer) and not any(able(optimizer) for able in (is_fused, can_fuse, takes_predicate)):
        raise StepError(
            f"cuda_graph=True needs an optimizer that skips a bad step on the device, and {type(optimizer).__name__} "
            f"as it is here does not: use {optimizer_names('or', WITH_KERNELS)}, with fused=True or with no form "
            f"chosen (foreach, capturable, differentiable) and without dampening, or {REMEDY}"
        )
    return torch.device(devices[0])


def kind_of(tree: Any, found: list[Tensor], generators: list[torch.Generator]) -> Hashable:
    """Return what distinguishes kinds of batches; put their tensors into `found`."""
    if isinstance(tree, Tensor):
        if tree.grad_fn is not None:
            raise StepError(
                f"cuda_graph=True: a tensor of the batch, shape {tuple(tree.shape)}, was computed with gradients, and "
                f"its history is outside the graph; pass it detached, compute it in loss_fn, or {REMEDY}"
            )
        found.append(tree)
        return tree.shape, tree.dtype, tree.requires_grad
    if isinstance(tree, torch.Generator):
        generators.append(tree)
    node = opened(tree)
    if node is not None:
        return type(tree), tuple([(name, kind_of(item, found, generators)) for name, item in node[0]])
    try:
        hash(tree)
    except TypeError:
        raise StepError(
            f"cuda_graph=True: the batch holds a {type(tree).__name__}, which cannot be compared from call to call; "
            f"pass tensors (torch.from_numpy), numbers or text, or {REMEDY}"
        ) from None
    return type(tree), tree


def place_of(error: BaseException) -> str:
    """Return " at file:line `text`" for the user's innermost line in the traceback of `error`, or ""."""
    place, at = "", error.__traceback__
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if not name.startswith((*OURS, "<")):
            place = f" at {name}:{at.tb_lineno} `{linecache.getline(name, at.tb_lineno).strip()}`"
        at = at.tb_next
    return place
