"""OptimWrapper: the old API's optimizer, which scales each of its losses itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.compat.apex.amp._amp_state import maybe_print
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.errors import UnbuiltError

if TYPE_CHECKING:
    from halfstep.compat.apex.amp.handle import AmpHandle, NoOpHandle

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer whose losses are scaled one after the other, each by its own scaler.

    All else (state_dict, zero_grad, add_param_group, ...) is the wrapped optimizer's.

    Args:
        optimizer: wrapped.
        amp_handle: where it was made; nothing is scaled while it is not active.
        num_loss: how many times `scale_loss` is called before `step`.
        loss_scale: "dynamic" or a number.
    """

    def __init__(
        self, optimizer: Optimizer, amp_handle: AmpHandle | NoOpHandle, num_loss: int,
        loss_scale: str | float = "dynamic",
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler(loss_scale) for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the loss scaled by the next scaler; gradients are unscaled and added up at the end of the block.

        Raises:
            RuntimeError: called more often than `num_loss` times since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._loss_idx + 1} times since the last step() and the optimizer was wrapped "
                f"for {self._num_loss}: wrap_optimizer(optimizer, num_loss={self._loss_idx + 1})"
            )
        scaler = self._loss_scaler[self._loss_idx]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        kept = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield scaler.scale(loss)
        except BaseException:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
            raise
        scaler.clear_overflow_state()
        scaler.unscale_and_check(self._optimizer.param_groups)
        self._skip_next[self._loss_idx] = scaler.update_scale()
        self._loss_idx += 1
        for parameter, gradient in zip(parameters, kept, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer with O1's casts off, unless a loss since the last step overflowed."""
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure)
        if closure is not None:
            raise UnbuiltError(
                "step(closure) is not supported by the old API's optimizer wrapper: run forward and backward before "
                "step(), or use amp.initialize with opt_level='O1'"
            )
        self._loss_idx = 0
        skip, self._skip_next = any(self._skip_next), [False] * self._num_loss
        if skip:
            maybe_print("Gradient overflow, skipping update")
            return None
        with self._amp_handle._disable_casts():
            return self._optimizer.step()

    def __getattr__(self, attr: str) -> Any:
        if attr == "_optimizer":  # copy and pickle look it up before it exists
            raise AttributeError(attr)
        return getattr(self._optimizer, attr)

    def __getstate__(self) -> Any:
        raise RuntimeError("this wrapper cannot be pickled; save its state_dict()")

    def __repr__(self) -> str:
        return repr(self._optimizer)
