"""torch.amp's names and signatures, carried out by halfstep: replacing the import is the whole migration.

``torch.amp`` is this package, ``torch.cuda.amp`` is `cuda` and ``torch.cpu.amp`` is `cpu`, without their deprecation
warnings. What differs from torch, and why, is in docs/compat_torch.md.

Examples:
    >>> from halfstep.compat.torch_amp import autocast, GradScaler  # was: from torch.amp import ...
"""

from halfstep.compat.torch_amp import cpu, cuda
from halfstep.compat.torch_amp.autocast_mode import autocast, custom_bwd, custom_fwd, is_autocast_available
from halfstep.compat.torch_amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "cpu", "cuda", "custom_bwd", "custom_fwd", "is_autocast_available"]
