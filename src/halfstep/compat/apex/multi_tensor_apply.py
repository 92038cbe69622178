"""``apex.multi_tensor_apply``: the launcher of Apex's fused kernels, which are not here: `available` is False."""

from typing import Any

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Apex's launcher. Code asks `available` before it uses Apex's extension ``amp_C``, and finds that it is absent."""

    available = False
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise RuntimeError: there is nothing to launch."""
        raise RuntimeError(
            "multi_tensor_applier needs Apex's extension amp_C, which is not here; use torch._foreach_* functions on "
            "lists of tensors, or an optimizer of apex.optimizers, which works without it"
        )

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Raise RuntimeError, as Apex does without its extension."""
        self.check_avail()


multi_tensor_applier = MultiTensorApply(2048 * 32)
