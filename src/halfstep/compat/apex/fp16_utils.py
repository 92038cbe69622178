"""``apex.fp16_utils``: the tools by hand: half networks, masters in lists, loss scales, and `FP16_Optimizer`.

Everything here is explicit, as in Apex: parameters are half because these functions were called. The scales are
`hs.GradScaler`'s.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.compat.apex.amp.scaler import LossScaler as AmpLossScaler
from halfstep.compat.shared import alias
from halfstep.torch_private.modules import BatchNormBase, apply_of, flatten_dense_tensors, unflatten_dense_tensors

__all__ = [
    "BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler", "clip_grad_norm",
    "convert_module", "convert_network", "master_params_to_model_params", "model_grads_to_master_grads",
    "network_to_half", "prep_param_lists", "to_python_float", "tofp16",
]  # fmt: skip

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """Cast the input to half."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` in half."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make every BatchNorm with weights in `module` fp32, in place, and return `module`."""
    for inner in module.modules():
        if isinstance(inner, BatchNormBase) and inner.affine:
            inner.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return a network that casts its input to half and runs `network`, made half except for BatchNorm."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating parameters, gradients and buffers that `module` itself owns to `dtype`, in place."""
    apply_of(nn.Module)(module, lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert `network` to `dtype`, in place, except for BatchNorm with weights; return it."""
    for module in network.modules():
        if not (isinstance(module, BatchNormBase) and module.affine):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network, converted to half in place except for BatchNorm, that takes inputs of any format."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Run the network on `inputs`, floating ones cast to half."""
        return self.network(*hs.trees.map_tensors(inputs, lambda t: t.half() if t.is_floating_point() else t))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of `model`, and fp32 masters of them for an optimizer.

    Args:
        model: all parameters of one format if `flat_master`.
        flat_master: one flat master for all, which optimizers step in one piece.

    Raises:
        TypeError: a flat master was asked for and the parameters have several formats.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return parameters, [nn.Parameter(p.detach().float().clone()) for p in parameters]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    if len(kinds) > 1:
        raise TypeError(
            f"prep_param_lists(flat_master=True): the parameters are {' and '.join(kinds)}, and a flat master needs "
            "one format; use flat_master=False"
        )
    master = nn.Parameter(flatten_dense_tensors([p.detach() for p in parameters]).float())
    master.grad = torch.zeros_like(master)
    return parameters, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of `model_params` to `master_params`, in fp32; where there is none, None (flat: 0)."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = flatten_dense_tensors(grads).to(master_params[0].dtype)
        return
    for model, master in zip(model_params, master_params, strict=True):
        master.grad = None if model.grad is None else model.grad.detach().to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round `master_params` into `model_params`, in place."""
    values: Iterable[Tensor] = master_params
    if flat_master:
        values = unflatten_dense_tensors(master_params[0].detach(), list(model_params))
    for model, value in zip(model_params, values, strict=True):
        model.copy_(value)


def to_python_float(t: Any) -> float:
    """Return a one-element tensor, or the first of a sequence, as a number."""
    return float(t.item()) if hasattr(t, "item") else float(t[0])


class LossScaler:
    """A scale that stays."""

    def __init__(self, scale: float = 1) -> None:
        self._scaler = AmpLossScaler(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a scale that stays ignores overflows."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the scale stays."""

    cur_scale = alias("_loss_scale", "The scale; may be set.", of="_scaler")
    loss_scale = property(lambda self: self.cur_scale)

    def scale_gradient(self, module: nn.Module, grad_in: Sequence[Tensor | None], grad_out: Any) -> tuple[Any, ...]:
        """Return the gradients `grad_in` multiplied by the scale: a backward hook for a module."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        self._scaler.scale(loss).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale times `scale_factor` after `scale_window` good steps in a row, and divided by it after a bad one.

    It begins at `init_scale` and never falls below 1.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self.scale_factor, self.scale_window = float(scale_factor), scale_window
        self.cur_iter, self.last_overflow_iter = 0, -1
        floor = min(1.0, float(init_scale))
        self._scaler = AmpLossScaler("dynamic", init_scale, scale_factor, scale_window, floor, hs.formats.FP32.max)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of `params` is not finite."""
        return any(p.grad is not None and self._has_inf_or_nan(p.grad) for p in params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not bool(x.isfinite().all())

    def update_scale(self, overflow: bool) -> None:
        """Update the scale after a step."""
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self._scaler._has_overflow = overflow
        self._scaler.update_scale()
        self.cur_iter += 1


SAVED = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step")


class FP16_Optimizer:
    """An optimizer that steps fp32 masters of half parameters, with a loss scale of its own.

    The masters take the places of half parameters in ``init_optimizer.param_groups``. fp32 parameters stay.

    Args:
        init_optimizer: any optimizer; changed in place.
        static_loss_scale: the scale, if it is not dynamic.
        dynamic_loss_scale: whether the scale is dynamic.
        dynamic_loss_args: arguments of `amp.scaler.LossScaler` for a dynamic scale.
        verbose: print when a step is skipped.

    Raises:
        TypeError: a parameter that is neither fp32 nor low.
    """

    def __init__(
        self, init_optimizer: Optimizer, static_loss_scale: float = 1.0, dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None, verbose: bool = True,
    ) -> None:  # fmt: skip
        for parameter in (p for group in init_optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter.dtype not in hs.formats.POLICY_DTYPES:
                raise TypeError(
                    f"FP16_Optimizer takes float32, float16 and bfloat16 parameters and got {parameter.type()}"
                )
        self.optimizer, self.verbose = init_optimizer, verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            self._split(group)
        arguments = dynamic_loss_args or {} if dynamic_loss_scale else {}
        self.loss_scaler = AmpLossScaler("dynamic" if dynamic_loss_scale else static_loss_scale, **arguments)
        self.dynamic_loss_scale = dynamic_loss_scale
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm

    def _split(self, group: dict[str, Any]) -> None:
        trained = [p for p in group["params"] if p.requires_grad]
        low = [p for p in trained if p.dtype in hs.formats.LOW_DTYPES]
        masters = {p: nn.Parameter(p.detach().float().clone()) for p in low}
        for parameter, master in masters.items():
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        group["params"][:] = [masters.get(p, p) for p in trained]  # the list itself: LBFGS holds on to it
        self.fp16_groups.append(low)
        self.fp32_from_fp16_groups.append(list(masters.values()))
        self.fp32_from_fp32_groups.append([p for p in trained if p not in masters])

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer cannot be pickled; save its state_dict()")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer cannot be unpickled; make one and use load_state_dict()")

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model and of the masters: zeros, or None."""
        held = [group["params"] for group in self.optimizer.param_groups] + self.fp16_groups
        for parameter in (p for group in held for p in group):
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss, and `update_master_grads`.

        That is False for all but the last of several losses or micro-batches.
        """
        self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copy gradients to the masters, unscale them, and update the scale."""
        for low, masters in zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            model_grads_to_master_grads(low, masters)
        self.loss_scaler.clear_overflow_state()
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        self.loss_scaler._scaler.scale_on(device)  # gradients may come from a loss that was scaled elsewhere
        self.loss_scaler.unscale_and_check(self.optimizer.param_groups)
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model, unless the last backward pass overflowed.

        Args:
            closure: evaluates the model, calls ``backward`` of this object and returns the loss; evaluated again with
                a smaller scale as long as it overflows.
        """
        if closure is None and self.overflow:
            if self.verbose:
                print(f"Gradient overflow.  Skipping step, loss scale {self.loss_scale}")
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
                if self.verbose:
                    print(f"OVERFLOW within closure! Evaluating again with loss scale {before}")
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer, with masters for its half parameters."""
        self.optimizer.add_param_group(param_group)
        self._split(self.optimizer.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to go on with the same bits, masters included."""
        return {
            **{name: getattr(self, name) for name in SAVED},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; call it after the model's own weights were loaded."""
        for name in SAVED:
            setattr(self, name, state_dict[name])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for mine, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
            for master, value in zip(mine, saved, strict=True):
                master.copy_(value)
        self._masters_to_model()

    loss_scale = alias("_loss_scale", "The scale; may be set.", of="loss_scaler")
    state = alias("state", "The optimizer's state, keyed by masters.", of="optimizer")
    param_groups = alias("param_groups", "The optimizer's groups, which hold the masters.", of="optimizer")
