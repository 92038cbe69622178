"""Training cells: one call is one training step of hs.TrainStep, with MindSpore's arguments and results.

Unlike MindSpore's, these unscale gradients whatever the optimizer's `loss_scale` is, change nothing (BatchNorm's
statistics included) in a step whose gradients are not finite, and run the forward pass once.
"""

import inspect
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.loss import as_fp32
from halfstep.compat.mindspore.nn.loss_scale import DynamicLossScaleUpdateCell, all_finite, check_scale
from halfstep.compat.mindspore.ops.grad import GradOperation, HyperMap
from halfstep.compat.mindspore.precision import bind_for_training
from halfstep.formats import FP32


class _OneStep(Cell):
    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        name = type(self).__name__
        checks.check_network(name, network)
        checks.check_optimizer(name, optimizer)
        self.network, self.optimizer = network, optimizer
        grouped = tuple(p for group in optimizer.param_groups for p in group["params"])
        self.weights: tuple[Any, ...] = getattr(optimizer, "parameters", grouped)  # in MindSpore's order if it has one
        call = getattr(type(network), "construct" if isinstance(network, Cell) else "forward")
        kinds = [p.kind for p in list(inspect.signature(call).parameters.values())[1:]]
        positional = [k for k in kinds if k in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
        self._most = None if Parameter.VAR_POSITIONAL in kinds else len(positional)  # inputs; None: any number
        bind_for_training(network)
        moved_by_hand = hs.ScaleRule(init=1.0, growth=1.0, backoff=1.0, interval=1, floor=0.0, ceiling=FP32.max)
        self._scaler = hs.GradScaler(rule=moved_by_hand)
        self._step = hs.TrainStep(network, optimizer, self._loss, scaler=self._scaler)
        self._by_optimizer = 1.0

    def _loss(self, network: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Return (what is differentiated, the network's loss in fp32)."""
        loss = network(*inputs, **named)
        if not isinstance(loss, Tensor):
            raise MindSporeTypeError(
                f"{type(self).__name__}: the network returned a {type(loss).__name__} and not its loss; wrap it "
                "in WithLossCell(network, loss_fn)"
            )
        loss = as_fp32(loss)
        # As in MindSpore, a loss of several elements is differentiated as their sum.
        return loss.sum() * self._by_optimizer, loss.detach()

    def _train(self, scale: Tensor, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Train with a scale; return the loss and whether the step was left out."""
        self._by_optimizer = float(getattr(self.optimizer, "loss_scale", 1.0))  # what its step divides gradients by
        # The loss is multiplied by `scale` in all, the gradients are divided by the rest here and by the optimizer.
        self._scaler.update(scale / self._by_optimizer)
        result = self._step(*inputs, **named)
        return result.aux, result.skipped

    def _sens_of(self, inputs: tuple[Any, ...], sens: Any) -> tuple[tuple[Any, ...], Any]:
        """Split off the trailing `sens` of a call: one argument more than the network takes."""
        if sens is None and self._most is not None and len(inputs) == self._most + 1:
            return inputs[:-1], inputs[-1]
        return inputs, sens


class TrainOneStepCell(_OneStep):
    """One training step: ``cell(*inputs)`` trains and returns the loss.

    Args:
        network: returns the loss, as `WithLossCell` does.
        optimizer: a torch optimizer over the network's parameters.
        sens: loss scale, above 0; gradients are unscaled by it before the update.
        return_grad: whether to return (loss, {parameter's name: gradient}), gradients unscaled.

    A call may end with one argument more than the network takes, or ``sens=``: a scale for this step.
    """

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, sens: float | None = None, return_grad: bool = False
    ) -> None:
        if isinstance(sens, (int, float)) and not isinstance(sens, bool) and sens == 0:
            raise MindSporeValueError("TrainOneStepCell: sens=0 makes every gradient 0; use sens=1.0, or leave it out")
        scale = 1.0 if sens is None else check_scale("TrainOneStepCell: sens", sens, 2.0**-149)
        checks.check_bool("TrainOneStepCell: return_grad", return_grad)
        super().__init__(network, optimizer)
        self.sens, self.return_grad = scale, return_grad
        self._gradients: dict[str, Tensor] = {}
        for name, parameter in network.named_parameters() if return_grad else ():
            parameter.register_post_accumulate_grad_hook(partial(self._keep, name))

    def _keep(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradients[name] = parameter.grad.detach().clone()

    def construct(self, *inputs: Any, sens: Any = None, **named: Any) -> Any:
        """Train on one batch; return the loss, or (loss, gradients)."""
        inputs, given = self._sens_of(inputs, sens)
        scale = torch.tensor(self.sens) if given is None else _scalar("sens", given)
        self._gradients.clear()
        loss, _ = self._train(scale, inputs, named)
        if not self.return_grad:
            return loss
        factor = 1.0 / float(scale)
        return loss, {name: gradient * factor for name, gradient in self._gradients.items()}


class TrainOneStepWithLossScaleCell(_OneStep):
    """One training step under a loss scale: ``cell(*inputs)`` trains and returns (loss, overflow, scale).

    `overflow` is a 0-dim bool tensor: the step was left out. `scale` is a copy of the scale after the step.

    Args:
        network: returns the loss, as `WithLossCell` does.
        optimizer: a torch optimizer over the network's parameters.
        scale_sense: an update cell, or a tensor of shape () or (1,) that stays until `set_sense_scale`. Left out, as
            older scripts do: 2**24, halved at bad steps and doubled after 2000 good ones.
        scale_update_cell: the older name of `scale_sense`.

    A call may end with one argument more than the network takes, or ``sens=``: the scale of this step, which leaves the
    update cell aside and is returned.

    Attributes:
        scale_sense: the scale, a float32 buffer.
        loss_scaling_manager: the update cell, or None.
        weights: the optimizer's parameters.
        grad, hyper_map, grad_reducer: for subclasses that write `construct` themselves.
    """

    scale_sense: Tensor

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, scale_sense: nn.Module | Tensor | None = None, *,
        scale_update_cell: nn.Module | None = None,
    ) -> None:  # fmt: skip
        if scale_sense is not None and scale_update_cell is not None:
            raise MindSporeValueError(
                "TrainOneStepWithLossScaleCell: scale_sense and scale_update_cell are two names of one thing; give one"
            )
        chosen = scale_sense if scale_update_cell is None else scale_update_cell
        if chosen is None:
            chosen = DynamicLossScaleUpdateCell(2.0**24, 2, 2000)  # DynamicLossScaleManager's numbers
        get = getattr(chosen, "get_loss_scale", None) if isinstance(chosen, nn.Module) else None
        if not isinstance(chosen, Tensor) and not callable(get):
            raise MindSporeTypeError(
                f"TrainOneStepWithLossScaleCell: scale_sense={chosen!r} is a {type(chosen).__name__}; expected a cell "
                "with get_loss_scale, such as nn.DynamicLossScaleUpdateCell(2**16, 2, 1000), or a Tensor(1024.0)"
            )
        start = _scalar("scale_sense", chosen if get is None else get())
        super().__init__(network, optimizer)
        self.loss_scaling_manager = None if isinstance(chosen, Tensor) else chosen
        self.register_buffer("scale_sense", start)
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        self.hyper_map = HyperMap()

    def construct(self, *inputs: Any, sens: Any = None, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Train on one batch; return (loss, overflow, scale)."""
        inputs, given = self._sens_of(inputs, sens)
        if given is not None:
            scale = _scalar("sens", given)
            loss, overflow = self._train(scale, inputs, named)
            return loss, overflow, scale
        loss, overflow = self._train(self.scale_sense.clone(), inputs, named)
        self.process_loss_scale(overflow)
        return loss, overflow, self.scale_sense.clone()

    def set_sense_scale(self, sens: Tensor) -> None:
        """Set the scale."""
        if not isinstance(sens, Tensor):
            raise MindSporeTypeError(f"set_sense_scale({sens!r}): expected a tensor, such as Tensor(1024.0)")
        self.scale_sense.copy_(_scalar("sens", sens))

    def grad_reducer(self, grads: Any) -> Any:
        """Return the gradients: DistributedDataParallel sums them over processes during backward."""
        return grads

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[Tensor, Any]:
        """Return (status, compute_input); torch needs no register cleared, so the status is False."""
        return torch.zeros((), dtype=torch.bool), compute_input

    def get_overflow_status(self, status: Tensor, compute_output: Any) -> Tensor:
        """Return whether something in `compute_output` (gradients) is not finite, as a 0-dim bool tensor."""
        outputs = [compute_output] if isinstance(compute_output, Tensor) else list(compute_output)
        return ~all_finite(outputs) | status.to(outputs[0].device)

    def process_loss_scale(self, overflow: Tensor) -> Tensor:
        """Update the scale after a step, if there is an update cell; return `overflow`."""
        if self.loss_scaling_manager is not None:
            self.loss_scaling_manager(self.scale_sense, overflow)
        return overflow


def _scalar(where: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if shape not in ((), (1,)):
            raise MindSporeValueError(f"{where}: a tensor of shape {shape}; expected one number, shape () or (1,)")
        value = float(value)
    checks.check_number(where, value, "a tensor of one element")
    number = torch.tensor(value, dtype=torch.float32)
    checks.check_value(where, value, 0.0 < float(number) < float("inf"), "a scale above 0 that float32 can hold")
    return number
