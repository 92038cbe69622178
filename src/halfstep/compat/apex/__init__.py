"""Apex's mixed precision on halfstep: ``from halfstep.compat.apex import amp``, and the lines stay as they are.

NVIDIA Apex (https://github.com/NVIDIA/apex) removed ``apex.amp`` in May 2025. This package has its names, arguments and
defaults and maps them on `hs.prepare`, `hs.GradScaler` and `hs.autocast`; docs/compat_apex.md lists every name and what
differs. `install` makes ``from apex import amp`` itself work in this process.
"""

from halfstep.compat.apex import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel
from halfstep.compat.apex.install import DeprecatedFeatureWarning, install, uninstall

__all__ = [
    "DeprecatedFeatureWarning", "amp", "fp16_utils", "install", "multi_tensor_apply", "normalization", "optimizers",
    "parallel", "uninstall",
]  # fmt: skip
