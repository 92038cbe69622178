"""``apex.optimizers``: the fused optimizers with Apex's arguments, for any device.

`FusedAdam` and `FusedSGD` are torch's own, fused where torch has a kernel for the device. LAMB, NovoGrad and Adagrad
are written with torch's functions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import required

from halfstep.compat.shared import WrittenOptimizer, listed
from halfstep.kernels.eager.torch_fused import fused_here, fused_works
from halfstep.torch_private import foreach

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]


class FusedOptimizer(WrittenOptimizer):
    """Base of all, whose `zero_grad` is Apex's."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; `set_to_none` wins over the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def fuses(params: list[Any], kind: type[Optimizer]) -> bool:
    """Return whether torch's fused form of `kind` works on all of `params`."""
    tensors = [t for entry in params for t in (entry["params"] if isinstance(entry, dict) else [entry])]
    return bool(tensors) and all(
        isinstance(t, Tensor) and t.is_floating_point() and fused_here(kind, t.device.type) and fused_works(kind, t)
        for t in tensors
    )


def materialised(params: Any) -> list[Any]:
    """Return `params` as a list, groups with their parameters as lists: an iterator could be read only once."""
    if params is None or isinstance(params, Tensor):
        what = "None" if params is None else "a single tensor"
        raise TypeError(f"params is {what}; an optimizer takes a list of tensors or of groups, as model.parameters()")
    return [{**p, "params": listed(p["params"])} if isinstance(p, dict) else p for p in params]


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant; use torch.optim.Adam(amsgrad=True)")


def count_step(group: dict[str, Any]) -> tuple[float, float]:
    """Count a step of `group`; return ``1 - beta**step`` for both betas, or 1 without bias correction."""
    group["step"] = group.get("step", 0) + 1
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


class FusedAdam(FusedOptimizer, torch.optim.Adam):
    """Adam and AdamW.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the moments.
        eps: added to the square root.
        adam_w_mode: decoupled weight decay (AdamW) instead of L2.
        weight_decay: its factor.
        amsgrad: not supported, as in Apex.
        set_grad_none: whether `zero_grad` sets gradients to None.
        capturable: the step can be captured in a CUDA graph.
        master_weights: masters without amp; raises RuntimeError: ``amp.initialize(opt_level="O2")`` has them.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True, capturable: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        _refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights:
            raise RuntimeError(
                "FusedAdam(master_weights=True): masters belong to the model here; use "
                "amp.initialize(model, optimizer, opt_level='O2'), or hs.prepare(model, optimizer, policy='O2')"
            )
        params = materialised(params)
        self.set_grad_none, self.adam_w_mode = set_grad_none, adam_w_mode
        own = [p.get("bias_correction", bias_correction) if isinstance(p, dict) else bias_correction for p in params]
        fused = True if all(own) and not capturable and fuses(params, torch.optim.Adam) else None
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=capturable,
            decoupled_weight_decay=adam_w_mode, fused=fused,
        )  # fmt: skip
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    # Whether torch's own step runs, which takes scaled gradients; groups that are added or loaded later count too.
    _step_supports_amp_scaling = property(
        lambda self: all(group["fused"] and group.get("bias_correction", True) for group in self.param_groups),
        lambda self, value: None,
    )

    def step(
        self, closure: Callable[[], Any] | None = None, grads: Any = None, output_params: Any = None,
        scale: Any = None, grad_norms: Any = None,
    ) -> Any:  # fmt: skip
        """Update the parameters; `grads` and the arguments after it raise RuntimeError, as in Apex."""
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step takes no gradients, output parameters, scale or norms any more: make it as you would "
                "make torch.optim.Adam, and call step()"
            )
        if all(group.get("bias_correction", True) for group in self.param_groups):
            return torch.optim.Adam.step(self, closure)
        return super().step(closure)

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        for parameter in params:
            state, gradient = self.state[parameter], parameter.grad
            number = state.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1).item()
            if group["decoupled_weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            corrected = group["bias_correction"]
            bias1, bias2 = (1 - beta**number if corrected else 1.0 for beta in group["betas"])
            parameter.add_(self._adam(group, [parameter], [gradient], (bias1, bias2))[0], alpha=-group["lr"])


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """SGD with momentum.

    Args:
        params: parameters or groups.
        lr: learning rate; may be left out if every group has its own.
        momentum: its factor.
        dampening: of the momentum.
        weight_decay: L2 factor.
        nesterov: Nesterov's momentum.
        wd_after_momentum: add the decay after the momentum instead of before.
        materialize_master_grads: kept for Apex's signature; masters' fp32 gradients exist during every step.
        set_grad_none: whether `zero_grad` sets gradients to None.
    """

    def __init__(
        self, params: Any, lr: Any = required, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        params = materialised(params)
        self.set_grad_none, self.wd_after_momentum = set_grad_none, wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        for entry in params if lr is required else ():
            if not isinstance(entry, dict) or "lr" not in entry:
                raise ValueError("FusedSGD: no lr; pass lr=, or give every parameter group one of its own")
        fused = True if not wd_after_momentum and fuses(params, torch.optim.SGD) else None
        super().__init__(
            params, lr=0.0 if lr is required else lr, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, fused=fused,
        )  # fmt: skip
        self.defaults["lr"] = lr  # `required` makes add_param_group ask for one

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        if not self.wd_after_momentum:
            for group in self.param_groups:  # parameters may have been lowered since, and a state brings its own form
                if group["fused"] and not fuses([group], torch.optim.SGD):
                    group["fused"] = None
            return torch.optim.SGD.step(self, closure)
        return super().step(closure)

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        for parameter in params:
            update = parameter.grad
            if group["momentum"]:
                state = self.state[parameter]
                buffer = state.get("momentum_buffer")
                if buffer is None:
                    buffer = state["momentum_buffer"] = update.clone()
                else:
                    buffer.mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
                update = update.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
            parameter.add_(update.add(parameter, alpha=group["weight_decay"]), alpha=-group["lr"])


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's direction, scaled for every parameter by its size.

    https://arxiv.org/abs/1904.00962

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, set_grad_none: as for `FusedAdam`.
        grad_averaging: the first moment averages gradients (``1 - beta1``) instead of summing them.
        max_grad_norm: all gradients are scaled down to this norm together; 0 leaves them.
        use_nvlamb: adapt the rate of parameters without weight decay too.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False, adam_w_mode: bool = True,
        grad_averaging: bool = True, set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        _refuse_amsgrad("FusedLAMB", amsgrad)
        self.set_grad_none, self.adam_w_mode, self.use_nvlamb = set_grad_none, adam_w_mode, use_nvlamb
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        every = [p.grad.float() for each in self.param_groups for p in each["params"] if p.grad is not None]
        norm = torch.stack([norm.to(every[0].device) for norm in foreach.foreach_norm(every)]).norm()
        decay, lr, limit = group["weight_decay"], group["lr"], group["max_grad_norm"]
        shrink = (norm / limit).clamp(min=1.0) if limit and limit > 0 else torch.ones_like(norm)
        grads = [p.grad.float() / shrink.to(p.device) for p in params]
        values = [p.float() for p in params]
        if not self.adam_w_mode and decay:
            foreach.foreach_add_(grads, values, alpha=decay)
        share = None if group["grad_averaging"] else 1.0
        updates = self._adam(group, params, grads, count_step(group), share)
        if self.adam_w_mode and decay:
            foreach.foreach_add_(updates, values, alpha=decay)
        norms = (foreach.foreach_norm(values), foreach.foreach_norm(updates))
        for parameter, value, update, size, change in zip(params, values, updates, *norms, strict=True):
            ratio = ones = torch.ones_like(size)
            if self.use_nvlamb or decay:
                ratio = torch.where((size != 0) & (change != 0), size / change, ones)
            parameter.copy_(value - lr * ratio * update)


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: one second moment for every parameter, of its gradient's norm.

    https://arxiv.org/abs/1905.11286

    Args:
        params, lr, bias_correction, betas, weight_decay, amsgrad, set_grad_none: as for `FusedAdam`.
        eps: added to the norm.
        reg_inside_moment: weight decay goes into the first moment instead of beside it.
        grad_averaging: the first moment averages gradients (``1 - beta1``) instead of summing them.
        norm_type: 2, or 0 for the largest element.
        init_zero: the second moment starts at 0 instead of at the first norm.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, reg_inside_moment: bool = False,
        grad_averaging: bool = True, norm_type: int = 2, init_zero: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type={norm_type}; expected 2, or 0 for the largest element")
        self.set_grad_none, self.reg_inside_moment = set_grad_none, reg_inside_moment
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        beta1, beta2 = group["betas"]
        bias1, bias2 = count_step(group)
        root = bias2**0.5
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        for parameter in params:
            gradient, value = parameter.grad.float(), parameter.float()
            size = gradient.norm() if group["norm_type"] == 2 else gradient.abs().max()
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(value)
                state["exp_avg_sq"] = torch.zeros_like(size) if group["init_zero"] else size.clone()
            norm = state["exp_avg_sq"]
            if group["norm_type"] == 2:
                norm.copy_((beta2 * norm.square() + (1 - beta2) * size.square()).sqrt())
            else:
                norm.copy_(beta2 * norm + (1 - beta2) * size)
            below = norm / root + group["eps"]
            first = state["exp_avg"]
            if self.reg_inside_moment:
                first.mul_(beta1).add_(gradient / below + group["weight_decay"] * value, alpha=share)
                update = first / bias1
            else:
                first.mul_(beta1).add_(gradient, alpha=share)
                update = first / bias1 / below + group["weight_decay"] * value
            parameter.copy_(value - group["lr"] * update)


class FusedAdagrad(FusedOptimizer):
    """Adagrad: gradients divided by the root of the sum of their squares so far.

    https://jmlr.org/papers/v12/duchi11a.html

    Args:
        params, lr, weight_decay, set_grad_none: as for `FusedAdam`.
        eps: added to the root.
        adagrad_w_mode: decoupled weight decay instead of L2.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:  # fmt: skip
        self.set_grad_none, self.adagrad_w_mode = set_grad_none, bool(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        for parameter in params:
            if parameter.grad.is_sparse:
                raise RuntimeError("FusedAdagrad takes no sparse gradients; use torch.optim.Adagrad")
            value, gradient = parameter.float(), parameter.grad.float()
            state = self.state[parameter]
            if not state:
                state["sum"] = torch.zeros_like(value)
            if not self.adagrad_w_mode:
                gradient = gradient + group["weight_decay"] * value
            state["sum"].addcmul_(gradient, gradient)
            update = gradient / (state["sum"].sqrt() + group["eps"])
            if self.adagrad_w_mode:
                update = update + group["weight_decay"] * value
            parameter.copy_(value - group["lr"] * update)
