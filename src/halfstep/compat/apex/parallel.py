"""``apex.parallel``: DistributedDataParallel, Reducer, synchronised BatchNorm and LARC, on torch's own."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from halfstep.compat.shared import alias
from halfstep.torch_private.modules import BatchNormBase, check_input_dim, check_non_zero_input_channels

__all__ = [
    "LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
    "create_syncbn_process_group",
]  # fmt: skip

NEW_NAME = "forward_sync_buffers"  # of broadcast_buffers, since torch 2.13


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with Apex's arguments. Wrap after ``amp.initialize``.

    Args:
        module: the model, on its device.
        message_size: elements in a bucket; torch counts bytes of the widest parameter format.
        delay_allreduce: reduce once everything is there: parameters may then stay without gradients.
        shared_param: gone in Apex too; raises ValueError.
        allreduce_trigger_params: gradients that end a bucket; torch finds its buckets itself, so only their being
            parameters of the module is checked.
        retain_allreduce_buffers: keep gradients as views of the reduced buckets.
        allreduce_always_fp32: sum low gradients in fp32.
        num_allreduce_streams: at least 1; torch overlaps by itself.
        allreduce_communicators: (process groups, streams); the first group is used.
        gradient_average: divide by the number of processes; False leaves the sum.
        gradient_predivide_factor: divide by this before the sum, and by the rest after it.
        gradient_average_split_factor: gone in Apex too; raises ValueError.
        prof: mark the reduction in profiles; torch does so always.

    Raises:
        ValueError: an argument that Apex took away, or trigger parameters that are not the module's.
    """

    def __init__(
        self, module: nn.Module, message_size: int = 10_000_000, delay_allreduce: bool = False,
        shared_param: bool | None = None, allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False, allreduce_always_fp32: bool = False, num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None, gradient_average: bool = True, gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None, prof: bool = False,
    ) -> None:  # fmt: skip
        if shared_param is not None:
            raise ValueError(
                "shared_param is no option any more: shared parameters work as they are. To reduce at the end of the "
                "backward pass, use delay_allreduce=True"
            )
        if gradient_average_split_factor is not None:
            raise ValueError("gradient_average_split_factor was renamed; use gradient_predivide_factor")
        if num_allreduce_streams < 1:
            raise ValueError(f"num_allreduce_streams={num_allreduce_streams}; expected at least 1")
        mine = {id(p) for p in module.parameters()}
        if any(id(p) not in mine for p in allreduce_trigger_params or ()):
            raise ValueError("allreduce_trigger_params holds a tensor that is not a parameter of the module")
        widest = max((p.element_size() for p in module.parameters()), default=4)
        name = NEW_NAME if NEW_NAME in inspect.signature(TorchDDP).parameters else "broadcast_buffers"
        buffers: Any = {name: False}
        super().__init__(
            module,
            **buffers,  # Apex sends buffers once, when it wraps
            bucket_cap_mb=max(1, message_size * widest // 2**20),  # MiB
            find_unused_parameters=delay_allreduce,
            gradient_as_bucket_view=retain_allreduce_buffers,
            process_group=allreduce_communicators[0][0] if allreduce_communicators else None,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            size = torch.distributed.get_world_size(self.process_group)
            after = size / gradient_predivide_factor if gradient_average else 1.0 / gradient_predivide_factor
            hook = _reduction(self.process_group, allreduce_always_fp32, gradient_predivide_factor, after)
            self.register_comm_hook(None, hook)


def _reduction(group: Any, always_fp32: bool, before: float, after: float) -> Any:
    def reduce(state: object, bucket: Any) -> Any:
        gradients: Tensor = bucket.buffer()
        summed = gradients.float() if always_fp32 else gradients
        if before != 1.0:
            summed = summed.div(before)
        work = torch.distributed.all_reduce(summed, group=group, async_op=True)

        def finish(future: torch.futures.Future[Any]) -> Tensor:
            (total,) = future.value()
            gradients.copy_(total.div_(after))
            return gradients

        future: Any = work.get_future()
        return future.then(finish)

    reduce.__annotations__ = {}  # torch compares them with its own classes, and here they are text
    return reduce


class Reducer:
    """Average the gradients of a module, whose parameters are broadcast from the first process now, or some tensors."""

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        given = module_or_grads_list
        self.module = given if isinstance(given, nn.Module) else None
        self.grads = [] if isinstance(given, nn.Module) else list(given)
        for parameter in () if self.module is None else self.module.parameters():
            torch.distributed.broadcast(parameter.detach(), 0)

    def reduce(self) -> None:
        """Average over all processes, in place."""
        tensors = self.grads
        if self.module is not None:
            tensors = [p.grad for p in self.module.parameters() if p.grad is not None]
        size = torch.distributed.get_world_size()
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
            tensor.div_(size)


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation whose statistics are those of all processes; torch's.

    Without processes it is a BatchNorm, on a CPU too. Several processes need accelerators, as torch's does.

    Args:
        num_features: channels.
        eps: added to the variance.
        momentum: share of the new statistics; None: their mean over all batches.
        affine: whether there are a weight and a bias.
        track_running_stats: whether statistics are kept for evaluation.
        process_group: whose statistics are shared; default: all processes.
        channel_last: memory is channels-last; torch's kernels find out themselves.
        fuse_relu: clamp the result at 0.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Any = None, channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return `input` normalised, plus `z` if it is given, and clamped at 0 with `fuse_relu`."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size(self.process_group) > 1:
            normal = super().forward(input)
        else:  # torch's SyncBatchNorm refuses a CPU even then
            check_input_dim(self)(input)
            check_non_zero_input_channels(self)(input)
            normal = BatchNormBase.forward(self, input)
        if z is not None:
            normal = normal + z
        return F.relu(normal) if self.fuse_relu else normal


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return `module` with every BatchNorm replaced by `SyncBatchNorm`; call it before ``amp.initialize``.

    A module that contains BatchNorms is changed in place; is it one itself, a new one is returned. The other arguments
    are those of `SyncBatchNorm`.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    for inner in converted.modules():
        if type(inner) is nn.SyncBatchNorm:
            made: Any = inner
            made.__class__ = SyncBatchNorm
            made.fuse_relu, made.channel_last = False, bool(channel_last)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this process's group when all processes are cut into groups of `group_size`; None for 0: one group.

    Raises:
        ValueError: the number of processes is not a multiple of `group_size`.
    """
    if group_size == 0:
        return None
    size = torch.distributed.get_world_size()
    if group_size < 0 or size < group_size or size % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {size} processes into equal groups")
    mine, _ = torch.distributed.new_subgroups(group_size=group_size)
    return mine


class LARC:
    """Layer-wise adaptive rates around any optimizer: every gradient is scaled by the size of its parameter.

    The local rate is ``trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)``; with `clip` it only ever lowers
    the group's learning rate (LARC), otherwise it multiplies it (LARS). https://arxiv.org/abs/1708.03888

    Args:
        optimizer: wrapped; amp may have initialised it or initialise the LARC.
        trust_coefficient: as above.
        clip: whether the learning rate is an upper bound.
        eps: against division by zero.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"LARC wraps an optimizer and got {type(optimizer).__name__}")
        self.optim = optimizer
        self.trust_coefficient, self.eps, self.clip = trust_coefficient, eps, clip

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # copy and pickle look it up before it exists
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    param_groups = alias("param_groups", "The optimizer's groups.", of="optim")

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Scale the gradients and step the optimizer, which does no weight decay of its own meanwhile."""
        stash = getattr(self.optim, "_amp_stash", None)
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        skipping = stash is not None and stash.already_patched
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0.0
                for parameter in () if skipping else group["params"]:
                    if parameter.grad is not None:
                        value = parameter if stash is None else stash.master(parameter)
                        self._scale(value, parameter.grad, decay, group["lr"])
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale(self, value: Tensor, gradient: Tensor, decay: float, lr: float) -> None:
        size, grad_size = value.norm(), gradient.norm()
        rate = self.trust_coefficient * size / (grad_size + size * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        scaled = (size != 0) & (grad_size != 0)
        rate = torch.where(scaled, rate, torch.ones_like(rate))
        decayed = torch.where(scaled, torch.full_like(rate, decay), torch.zeros_like(rate))
        gradient.add_(value.to(gradient.dtype) * decayed.to(gradient.dtype)).mul_(rate.to(gradient.dtype))
