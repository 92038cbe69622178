"""The words `conv_mode` and `compute_mode` of MegEngine's products: one meaning each here."""

from __future__ import annotations

from halfstep.errors import StepError

__all__ = ["check_compute_mode", "check_conv_mode"]


def check_compute_mode(where: str, compute_mode: object) -> None:
    """Take "default" and "float32": products of low formats are summed in fp32 either way.

    Raises:
        StepError: another word.
    """
    if str(compute_mode).lower() not in ("default", "float32"):
        raise StepError(f"{where}(compute_mode={compute_mode!r}): expected 'default' or 'float32'")


def check_conv_mode(where: str, conv_mode: object) -> None:
    """Take "cross_correlation", the only mode MegEngine takes too.

    Raises:
        StepError: another word.
    """
    if str(conv_mode).lower() != "cross_correlation":
        raise StepError(f"{where}(conv_mode={conv_mode!r}): expected 'cross_correlation'; flip the kernel for others")
