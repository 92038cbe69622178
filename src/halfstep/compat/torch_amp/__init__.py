"""torch.amp's names and signatures, carried out by halfstep: replacing the import is the whole migration.

``torch.amp`` is this package, ``torch.cuda.amp`` is `cuda` and ``torch.cpu.amp`` is `cpu`, without their deprecation
warnings. What differs from torch, and why, is in docs/compat_torch.md.

Examples:
    >>> from halfstep.compat.torch_amp import autocast, GradScaler  # was: from torch.amp import ...
"""

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from halfstep.compat.torch_amp import cpu, cuda
from halfstep.compat.torch_amp.autocast_mode import autocast, custom_bwd, custom_fwd, is_autocast_available
from halfstep.compat.torch_amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "cpu", "cuda", "custom_bwd", "custom_fwd", "is_autocast_available"]

SUBMODULES: Mapping[ModuleType, Mapping[str, Sequence[str]]] = {
    cuda: {
        "autocast_mode": ["autocast", "custom_bwd", "custom_fwd"], "common": ["amp_definitely_not_available"],
        "grad_scaler": ["GradScaler"],
    },
    cpu: {"autocast_mode": ["autocast"], "grad_scaler": ["GradScaler"]},
}  # fmt: skip
"""Where torch defines the names of torch.cuda.amp and torch.cpu.amp, and scripts import them from."""

for _package, _submodules in SUBMODULES.items():
    for _name, _names in _submodules.items():
        _module = sys.modules[f"{_package.__name__}.{_name}"] = ModuleType(f"{_package.__name__}.{_name}")
        vars(_module).update({name: getattr(_package, name) for name in _names}, __all__=_names)
        setattr(_package, _name, _module)
