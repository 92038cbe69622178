"""Optimizers with MindSpore's arguments: torch's, called with gradients (``optimizer(grads)``) or through `step`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.shared import WrittenOptimizer
from halfstep.torch_private import foreach

Params = Iterable[Any]

NOT_DECAYED = "_mindspore_not_decayed"
"""Mark of a parameter (gamma and beta of norms) that is decayed only if its group has a `weight_decay`."""


class Optimizer(torch.optim.Optimizer):
    """torch's optimizer with what MindSpore's optimizers have besides.

    Attributes:
        loss_scale: what a step divides the gradients by, for training cells that leave them scaled.
        parameters: the parameters, in the order gradients are given in.
    """

    loss_scale: float

    def _make(
        self, kind: type[torch.optim.Optimizer], params: Params, learning_rate: float, loss_scale: float, **named: Any
    ) -> None:
        name = type(self).__name__
        groups, self._order = _grouped(name, params, named["weight_decay"])
        construct: Any = kind.__init__
        construct(self, groups, lr=_rate(name, learning_rate), **named)
        self._set_loss_scale(loss_scale)

    def _set_loss_scale(self, loss_scale: float) -> None:
        where = f"{type(self).__name__}: loss_scale"
        self.loss_scale = checks.check_number(where, loss_scale)
        checks.check_value(where, loss_scale, 0.0 < self.loss_scale < float("inf"), "a number above 0")
        if self.loss_scale != 1.0:
            self.register_step_pre_hook(_divide)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters, in the order in which they were given (or of ``order_params``)."""
        found = [p for group in self.param_groups for p in group["params"]]
        place = {id(p): index for index, p in enumerate(self.__dict__.get("_order", ()))}
        return tuple(sorted(found, key=lambda p: place.get(id(p), len(place))))

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    learning_rate = property(get_lr, doc="The learning rate of the first group.")

    def __call__(self, gradients: Sequence[Tensor | None]) -> bool:
        """Step with these gradients, one for each of `parameters`; ``Parameter.grad`` is as before afterwards."""
        parameters, name, remedy = self.parameters, type(self).__name__, "differentiate by optimizer.parameters"
        if not isinstance(gradients, (tuple, list)):
            raise MindSporeTypeError(
                f"{name} was called with {type(gradients).__name__}; call it with the tuple of gradients, one for each "
                "of optimizer.parameters"
            )
        if len(gradients) != len(parameters):
            raise MindSporeValueError(
                f"{name} has {len(parameters)} parameters and was called with {len(gradients)} gradients; {remedy}"
            )
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient is not None and not isinstance(gradient, Tensor):
                raise MindSporeTypeError(
                    f"{name}: gradient {index} is {gradient!r}; expected tensors, one for each of optimizer.parameters"
                )
            if gradient is not None and gradient.shape != parameter.shape:
                raise MindSporeValueError(
                    f"{name}: gradient {index} has shape {tuple(gradient.shape)} and its parameter "
                    f"{tuple(parameter.shape)}; {remedy}"
                )
        kept = [p.grad for p in parameters]
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.detach().clone()
            self.step()
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loss_scale": self.loss_scale, "_order": self.__dict__.get("_order", [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "loss_scale" in state:  # the hook that divides comes back with it
            self._set_loss_scale(state["loss_scale"])


def _divide(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Unscale the gradients, in place, before a step; weight decay comes after it and is not scaled."""
    closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer
    if closure is not None:
        raise MindSporeValueError(
            f"{type(optimizer).__name__} has loss_scale={optimizer.loss_scale!r} and was stepped with a closure, whose "
            "gradients come too late to be divided; use loss_scale=1.0"
        )
    factor = 1.0 / optimizer.loss_scale
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _rate(name: str, learning_rate: Any) -> float:
    if isinstance(learning_rate, Tensor) and learning_rate.numel() == 1:
        return float(learning_rate.detach())
    expected = "a number or a tensor of one; for a schedule wrap the optimizer in one of torch.optim.lr_scheduler"
    return checks.check_number(f"{name}: learning_rate", learning_rate, expected)


def _grouped(name: str, params: Params, weight_decay: float) -> tuple[list[Any], list[Any]]:
    """Return groups for torch, and the parameters in the order in which they were given.

    A plain list of parameters is cut in two where MindSpore leaves gamma and beta out of weight decay.
    """
    checks.check_type(f"{name}: params", params, Iterable, "parameters or groups, as net.trainable_params()")
    given = [params] if isinstance(params, dict) else list(params)
    if not given:
        raise MindSporeValueError(f"{name}: no parameters; pass net.trainable_params()")
    if not isinstance(given[0], dict):
        norms = [p for p in given if getattr(p, NOT_DECAYED, False)]
        if not (weight_decay and norms):
            return given, given
        rest = [p for p in given if not getattr(p, NOT_DECAYED, False)]
        return [{"params": rest}, {"params": norms, "weight_decay": 0.0}], given
    groups, order = [], []
    for group in given:
        if "order_params" in group and len(group) == 1:
            order = list(group["order_params"])
            continue
        if group.get("grad_centralization"):
            raise MindSporeValueError(f"{name}: a group asks for grad_centralization, which does not exist here")
        made = {key: value for key, value in group.items() if key not in ("grad_centralization", "order_params")}
        made["params"] = list(made["params"])
        if "lr" in made:
            made["lr"] = _rate(name, made["lr"])
        groups.append(made)
    grouped = [p for group in groups for p in group["params"]]
    if order and {id(p) for p in order} != {id(p) for p in grouped}:
        raise MindSporeValueError(f"{name}: order_params must hold the parameters of all groups, once each")
    return groups, order or grouped


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent."""

    def __init__(
        self, params: Params, learning_rate: float = 0.1, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, loss_scale: float = 1.0,
    ) -> None:  # fmt: skip
        self._make(
            torch.optim.SGD, params, learning_rate, loss_scale, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov,
        )  # fmt: skip


class Momentum(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum: v = momentum * v + g; p = p - learning_rate * v."""

    def __init__(
        self, params: Params, learning_rate: float, momentum: float, weight_decay: float = 0.0,
        loss_scale: float = 1.0, use_nesterov: bool = False,
    ) -> None:  # fmt: skip
        self._make(
            torch.optim.SGD, params, learning_rate, loss_scale, momentum=momentum, weight_decay=weight_decay,
            nesterov=use_nesterov,
        )  # fmt: skip


class Adam(Optimizer, torch.optim.Adam):
    """Adam; epsilon is added where torch adds it (after the bias correction). Locks belong to MindSpore's kernels."""

    def __init__(
        self, params: Params, learning_rate: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
        use_locking: bool = False, use_nesterov: bool = False, weight_decay: float = 0.0, loss_scale: float = 1.0,
        use_amsgrad: bool = False,
    ) -> None:  # fmt: skip
        checks.check_bool("Adam: use_locking", use_locking, "; weight_decay= comes after use_nesterov")
        if use_nesterov:
            raise MindSporeValueError("Adam(use_nesterov=True) does not exist here; use torch.optim.NAdam")
        self._make(
            torch.optim.Adam, params, learning_rate, loss_scale, betas=(beta1, beta2), eps=eps,
            weight_decay=weight_decay, amsgrad=use_amsgrad,
        )  # fmt: skip


class AdamWeightDecay(Optimizer, WrittenOptimizer):
    """Adam with decoupled weight decay and, as in MindSpore (and BERT), without bias correction."""

    def __init__(
        self, params: Params, learning_rate: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        groups, self._order = _grouped("AdamWeightDecay", params, weight_decay)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            checks.check_value(f"AdamWeightDecay: {name}", beta, 0.0 < beta < 1.0, "a number between 0 and 1")
        rate = _rate("AdamWeightDecay", learning_rate)
        defaults = {"lr": rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        torch.optim.Optimizer.__init__(self, groups, defaults)
        self._set_loss_scale(1.0)

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        updates = self._adam(group, params, [p.grad for p in params])
        if group["weight_decay"]:
            foreach.foreach_add_(updates, params, alpha=group["weight_decay"])
        foreach.foreach_add_(params, updates, alpha=-group["lr"])
