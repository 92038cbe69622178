"""``apex.optimizers``: the fused optimizers with Apex's arguments, for any device."""

from halfstep.compat.apex.optimizers.fused import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
