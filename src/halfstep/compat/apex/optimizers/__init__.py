"""``apex.optimizers``: FusedAdam, FusedSGD, FusedLAMB and FusedNovoGrad with Apex's arguments, for any device.

FusedAdam and FusedSGD are torch's own, fused where torch has a kernel for the device. LAMB and NovoGrad are written
with torch's functions. The files have the names of Apex's.
"""

from halfstep.compat.apex.optimizers.fused_adam import FusedAdam
from halfstep.compat.apex.optimizers.fused_lamb import FusedLAMB
from halfstep.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from halfstep.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
