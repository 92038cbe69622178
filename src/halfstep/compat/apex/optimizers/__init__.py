"""``apex.optimizers``: the fused optimizers with Apex's arguments, for any device.

FusedAdam and FusedSGD are torch's own, fused where torch has a kernel for the device. LAMB, NovoGrad and Adagrad are
written with torch's functions. The files have the names of Apex's.
"""

from halfstep.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from halfstep.compat.apex.optimizers.fused_adam import FusedAdam
from halfstep.compat.apex.optimizers.fused_lamb import FusedLAMB
from halfstep.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from halfstep.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
