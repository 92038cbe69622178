"""SyncBatchNorm: torch's with Apex's arguments, and the functions that make it and its process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


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
            self._check_input_dim(input)
            self._check_non_zero_input_channels(input)
            normal = nn.modules.batchnorm._BatchNorm.forward(self, input)
        if z is not None:
            normal = normal + z
        return F.relu(normal) if self.fuse_relu else normal


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Return `module` with every BatchNorm replaced by `SyncBatchNorm`; call it before ``amp.initialize``.

    Args:
        module: changed in place where it contains BatchNorms; is it one itself, a new one is returned.
        process_group: whose statistics are shared; default: all processes.
        channel_last: memory is channels-last; torch's kernels find out themselves, so nothing has to be told.
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
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if group_size < 0 or size < group_size or size % group_size:
        raise ValueError(f"group_size={group_size} does not divide the {size} processes into equal groups")
    mine = None
    for start in range(0, size, group_size):  # every process takes part in making every group
        ranks = list(range(start, start + group_size))
        group = torch.distributed.new_group(ranks=ranks)
        if rank in ranks:
            mine = group
    return mine
