"""timm-style loops: `NativeScaler`, with the call of `timm.utils.NativeScaler`, over the scaler of `hs.prepare`.

Scripts of timm, DeiT, Swin, MAE and others use it. timm itself is imported for adaptive gradient clipping only.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations.shared import checking, need, was_skipped

__all__ = ["NativeScaler"]

CLIPS = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}


class NativeScaler:
    """Runs backward and, at the end of an accumulation window, clips and steps: a scaler as timm's loops call it.

    Examples:
        >>> model, optimizer, scaler = hs.prepare(model, optimizer, policy="O2")
        >>> loss_scaler = hs.integrations.timm.NativeScaler(scaler)
        >>> loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=last)
        >>> if last and not loss_scaler.skipped:
        ...     num_updates += 1

    Args:
        scaler: what `hs.prepare` returned beside model and optimizer.

    Attributes:
        state_dict_key: where timm's checkpoints have its state.
        scaler: it skips steps whose gradients are not finite, also where the policy has no loss scale (then it is 1).
        skipped: whether the last update was skipped.

    Raises:
        IntegrationError: `scaler` is something else, such as a device.
    """

    state_dict_key = "amp_scaler"

    def __init__(self, scaler: hs.GradScaler) -> None:
        if not isinstance(scaler, hs.GradScaler):
            raise IntegrationError(
                f"hs.integrations.timm.NativeScaler: scaler={scaler!r}; expected the scaler of "
                "model, optimizer, scaler = hs.prepare(model, optimizer, policy=...)"
            )
        self.scaler = checking(scaler)
        self.skipped = False

    def __call__(
        self, loss: Tensor, optimizer: Optimizer, clip_grad: float | None = None, clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None, create_graph: bool = False, need_update: bool = True,
    ) -> None:  # fmt: skip
        """Run the backward pass of `loss`; with `need_update` also clip, step and update the scale.

        A step whose gradients are not finite is skipped, and logged with the names of the parameters. That waits for
        the device.

        Args:
            loss: of one micro-batch.
            optimizer: what `hs.prepare` was given.
            clip_grad: a norm, a value or, for "agc", a factor; None: gradients are not clipped.
            clip_mode: "norm", "value" or "agc".
            parameters: whose gradients are clipped.
            create_graph: for losses and optimizers that differentiate gradients.
            need_update: False in all micro-batches of a window but the last.

        Raises:
            IntegrationError: `clip_grad` without `parameters`, another mode, or "agc" without timm; before anything is
                done.
        """
        clip = None if clip_grad is None or not need_update else _clipping(clip_mode, parameters)
        self.scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip is not None:
            self.scaler.unscale_(optimizer)
            clip(list(parameters or ()), clip_grad)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.skipped = was_skipped(self.scaler, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its counters as plain numbers."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict`, or that of timm's NativeScaler, returned."""
        self.scaler.load_state_dict(state_dict)


def _clipping(mode: str, parameters: object) -> Any:
    if parameters is None:
        raise IntegrationError("NativeScaler(..., clip_grad=...): parameters=None; pass the parameters to clip")
    if mode in CLIPS:
        return CLIPS[mode]
    if mode != "agc":
        raise IntegrationError(f"NativeScaler(..., clip_mode={mode!r}); expected 'norm', 'value' or 'agc'")
    need("timm", "0.9.16")
    from timm.utils.agc import adaptive_clip_grad

    return adaptive_clip_grad
