"""Apex's DistributedDataParallel and Reducer, on torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["DistributedDataParallel", "Reducer"]

MIB = 1024 * 1024

FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(TorchDDP).parameters
"""Whether torch has the newer name of broadcast_buffers (2.13)."""


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
        buffers: Any = {"forward_sync_buffers" if FORWARD_SYNC else "broadcast_buffers": False}
        super().__init__(
            module,
            **buffers,  # Apex sends buffers once, when it wraps
            bucket_cap_mb=max(1, message_size * widest // MIB),
            find_unused_parameters=delay_allreduce,
            gradient_as_bucket_view=retain_allreduce_buffers,
            process_group=allreduce_communicators[0][0] if allreduce_communicators else None,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            size = torch.distributed.get_world_size(self.process_group)
            after = size / gradient_predivide_factor if gradient_average else 1.0 / gradient_predivide_factor
            before = gradient_predivide_factor
            hook = _reduction(self.process_group, always_fp32=allreduce_always_fp32, before=before, after=after)
            self.register_comm_hook(None, hook)


def _reduction(group: Any, *, always_fp32: bool, before: float, after: float) -> Any:
    """Return a hook that divides a bucket, sums it over the processes and divides again; in fp32 if wanted."""

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
    """Average parameters or gradients over all processes when asked.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from the first process now and whose gradients
            `reduce` averages; or a list of tensors, which `reduce` averages.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        if isinstance(module_or_grads_list, nn.Module):
            self.module: nn.Module | None = module_or_grads_list
            self.grads: list[Tensor] = []
            for parameter in self.module.parameters():
                torch.distributed.broadcast(parameter.detach(), 0)
        else:
            self.module, self.grads = None, list(module_or_grads_list)

    def reduce(self) -> None:
        """Average over all processes, in place."""
        tensors = self.grads
        if self.module is not None:
            tensors = [p.grad for p in self.module.parameters() if p.grad is not None]
        size = torch.distributed.get_world_size()
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
            tensor.div_(size)
