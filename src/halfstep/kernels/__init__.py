"""Numeric primitives: one meaning (`reference`), fast twins, and `pick`, which chooses."""

from halfstep.kernels.choose import norms_for, total_norm

__all__ = ["norms_for", "total_norm"]
