"""torch.cuda.amp without its deprecation warnings: calls that name no device.

Where torch finds no CUDA it switches itself off; here the same lines run on the CPU, with fp16 emulated, so that a
program written for a GPU can be tested anywhere with a GPU's numerics.
"""

from halfstep.compat.torch_amp.cuda.autocast_mode import autocast, custom_bwd, custom_fwd
from halfstep.compat.torch_amp.cuda.common import amp_definitely_not_available
from halfstep.compat.torch_amp.cuda.grad_scaler import GradScaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]
