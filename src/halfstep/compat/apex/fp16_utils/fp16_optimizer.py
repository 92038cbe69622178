"""An optimizer that owns the fp32 masters of half parameters, and a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.compat.apex.fp16_utils.fp16util import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
)

__all__ = ["FP16_Optimizer"]

LOWS = (torch.float16, torch.bfloat16)


class FP16_Optimizer:
    """An optimizer that steps fp32 masters of half parameters, with a loss scale of its own.

    The masters take the places of half parameters in ``init_optimizer.param_groups``. fp32 parameters stay.

    Args:
        init_optimizer: any optimizer; changed in place.
        static_loss_scale: the scale, if it is not dynamic.
        dynamic_loss_scale: whether the scale finds itself.
        dynamic_loss_args: arguments of `amp.scaler.LossScaler` for a dynamic scale.
        verbose: say when a step is skipped.

    Raises:
        TypeError: a parameter that is neither fp32 nor low.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        for group in init_optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.dtype not in (torch.float32, *LOWS):
                    raise TypeError(
                        f"FP16_Optimizer takes float32, float16 and bfloat16 parameters and got {parameter.type()}"
                    )
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self._split(group)
        if dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.dynamic_loss_scale = dynamic_loss_scale
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm

    def _split(self, group: dict[str, Any]) -> None:
        """Replace the low parameters of `group` by masters."""
        low: list[Tensor] = []
        masters: list[Tensor] = []
        wide: list[Tensor] = []
        params: list[Tensor] = []
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if parameter.dtype in LOWS:
                master = nn.Parameter(parameter.detach().float().clone())
                if parameter in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(parameter)
                low.append(parameter)
                masters.append(master)
                params.append(master)
            else:
                wide.append(parameter)
                params.append(parameter)
        group["params"][:] = params  # the list itself: LBFGS holds on to it
        self.fp16_groups.append(low)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(wide)

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer cannot be pickled; save its state_dict()")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer cannot be unpickled; make one and use load_state_dict()")

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model and of the masters: zeros, or None."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        parameters += [p for group in self.fp16_groups for p in group]
        for parameter in parameters:
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss, and by default `update_master_grads`.

        Args:
            loss: unscaled.
            update_master_grads: False for all but the last of several losses or micro-batches.
            retain_graph: as in ``Tensor.backward``.
        """
        self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copy gradients to the masters, unscale them, and let the scale answer an overflow."""
        for low, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            model_grads_to_master_grads(low, masters)
        self.loss_scaler.clear_overflow_state()
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self.loss_scaler._scaler.scale_on(device)  # gradients may come from a loss that was scaled elsewhere
        self.loss_scaler.judge(self.optimizer.param_groups)
        self.overflow = self.loss_scaler.update_scale()

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients by group; None, with a message, after an overflow."""
        if self.overflow:
            print(
                "Warning:  FP16_Optimizer.inspect_master_grad_data after an overflow: the gradients are inf, nan or of "
                "an earlier pass, so None is returned"
            )
            return None
        return [[p.grad for p in group["params"]] for group in self.optimizer.param_groups]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients to `max_norm` and return their norm; -1 after an overflow."""
        if self.overflow:
            return -1
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.clip_grad_norm(parameters, max_norm, norm_type)

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model, unless the last backward pass overflowed.

        Args:
            closure: evaluates the model, calls ``backward`` of this object and returns the loss; evaluated again with
                a smaller scale as long as it overflows.
        """
        if closure is None and self.overflow:
            self._say(f"Gradient overflow.  Skipping step, loss scale {self.loss_scale}")
            return None
        result = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._masters_to_model()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        self.first_closure_call_this_step = True

        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                self._masters_to_model()  # the optimizer has moved the masters since
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                before = self.loss_scale
                self._say(f"OVERFLOW within closure! Evaluating again with loss scale {before}")
                loss = closure()
                if self.overflow and self.loss_scale >= before:
                    raise RuntimeError(
                        f"FP16_Optimizer.step(closure): gradients are not finite and the loss scale {before} does not "
                        "go lower; use a dynamic or a smaller static scale, or look for inf in batch and parameters"
                    )
            return loss

        result = self.optimizer.step(evaluate)
        self.first_closure_call_this_step = True
        return result

    def _masters_to_model(self) -> None:
        for low, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            master_params_to_model_params(low, masters)

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer, with masters for its half parameters."""
        self.optimizer.add_param_group(param_group)
        self._split(self.optimizer.param_groups[-1])

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to go on with the same bits, masters included."""
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; call it after the model's own weights were loaded."""
        self.loss_scaler = state_dict["loss_scaler"]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for mine, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
            for master, value in zip(mine, saved, strict=True):
                master.copy_(value)
        self._masters_to_model()

    @property
    def loss_scale(self) -> float:
        """The scale; may be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        """The optimizer's state, keyed by masters."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, which hold the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value
