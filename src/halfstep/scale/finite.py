"""Passes over gradients: divide them by the scale, check that they are finite, name those that are not.

One multi-tensor kernel per device, dtype and placement does check and product together (fp32 arithmetic, one rounding
to the gradient's dtype): complex gradients as pairs of reals, sparse ones as their values, sharded ones (DTensor) by
mesh and placements, so that torch's own handler makes the ranks agree. Only `describe_non_finite` waits for the device.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from halfstep.formats import LOW_DTYPES, widest_dtype
from halfstep.kernels.sharded import local
from halfstep.torch_private.foreach import amp_foreach_non_finite_check_and_unscale_, foreach_copy_

NAMES_SHOWN = 5
"""How many parameters a message names before it ends with 'and N more'."""


def gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, gradient) for every parameter of `optimizer` that has a gradient, group by group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                yield parameter, gradient


@torch.no_grad()
def unscale_(
    pairs: Iterable[tuple[Tensor, Tensor]], scale: Tensor, *, into_fp32: bool = False, check_scale: bool = False
) -> Tensor | None:
    """Divide every gradient by the scale (0-dim fp32 or fp64) and return a flag, without waiting for the device.

    The flag is 0-dim fp32 on the scale's device, not zero if something was not finite; None without gradients.
    Gradients of `pairs` are changed in place; sparse low, conjugated and (under `into_fp32`) low gradients
    are replaced, and the ``grad_dtype`` of low parameters becomes None, any. With `check_scale` a scale so small that
    1/scale is inf in fp32 counts as not finite.
    """
    # rounded once where there is float64: some fp32 division kernels are not exact
    inverse = scale.to(widest_dtype(scale.device)).reciprocal().float()
    unusable = inverse.isfinite().logical_not() if check_scale else torch.zeros_like(inverse)
    flags = {scale.device: unusable.to(torch.float32)}
    divided: list[Tensor] = []
    again: list[Tensor] = []  # checked once more after the division
    wide: list[tuple[Tensor, Tensor]] = []  # low parameters and their gradients, to become fp32
    summed: list[tuple[Tensor, Tensor, torch.dtype]] = []  # parameters, gradients in fp32, the dtype to go back to
    for parameter, gradient in pairs:
        if gradient.dtype in LOW_DTYPES and gradient.layout is not torch.strided:
            # Duplicate indices are summed in fp32: a sum of scaled fp16 values overflows where the unscaled one fits.
            total = gradient.to(torch.float32)
            total = total.coalesce() if total.is_sparse else total
            summed.append((parameter, total, gradient.dtype))
            divided.append(total)
        elif gradient.dtype in LOW_DTYPES and into_fp32:
            wide.append((parameter, gradient))
        else:
            if gradient.is_conj():
                parameter.grad = gradient = gradient.resolve_conj()
            divided.append(gradient)
            if gradient.dtype in (torch.float16, torch.complex32):
                again.append(gradient)  # dividing by a scale below 1 can take it out of range
    divided += _widen(wide)
    _run(divided, flags, inverse)
    for parameter, total, dtype in summed:
        if into_fp32:
            _replace(parameter, total)
        else:
            parameter.grad = total.to(dtype)
            again.append(parameter.grad)
    if again:
        _run(again, flags, torch.ones_like(inverse))
    return _combined(flags) if divided else None


@torch.no_grad()
def check(pairs: Iterable[tuple[Tensor, Tensor]], like: Tensor) -> Tensor | None:
    """Return what `unscale_` does, on the device of `like` (0-dim), and leave the gradients as they are."""
    flags = {like.device: torch.zeros_like(like, dtype=torch.float32)}
    checked = []
    for _, gradient in pairs:
        if gradient.is_sparse and gradient.dtype in LOW_DTYPES:
            gradient = gradient.to(torch.float32).coalesce()
        checked.append(gradient.resolve_conj())
    _run(checked, flags, torch.ones_like(like, dtype=torch.float32))
    return _combined(flags) if checked else None


@torch.no_grad()
def describe_non_finite(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[Tensor, str] | None = None
) -> tuple[str, ...]:
    """Name the parameters whose gradient is not finite, as in "head.weight (3 of 20 values)"; waits for the device.

    Their names are those of `names`, else those that ``named_parameters`` gave the optimizer, else their positions.
    """
    found = []
    for optimizer in optimizers:
        for label, parameter in _labelled(optimizer, names):
            if parameter.grad is not None:
                values = local(values_of(parameter.grad))
                count = int(values.isfinite().logical_not().sum())
                found += [f"{label} ({count} of {values.numel()} values)"] if count else []
    return _few(found)


def names_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], names: Mapping[Tensor, str] | None = None
) -> tuple[str, ...]:
    """Name parameters of `optimizer` as `describe_non_finite` does."""
    wanted = {id(parameter) for parameter in parameters}
    return _few([label for label, parameter in _labelled(optimizer, names) if id(parameter) in wanted])


def _labelled(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str] | None) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            known = names.get(parameter) if names is not None else None
            position = f"param_groups[{number}]['params'][{index}] of shape {tuple(parameter.shape)}"
            yield known or (given[index] if given else position), parameter


def _few(texts: list[str]) -> tuple[str, ...]:
    shown = texts[:NAMES_SHOWN]
    return (*shown, f"and {len(texts) - NAMES_SHOWN} more") if len(texts) > NAMES_SHOWN else tuple(shown)


def _run(gradients: Iterable[Tensor], flags: dict[torch.device, Tensor], factor: Tensor) -> None:
    """Multiply gradients by `factor` (0-dim fp32) in place; note in the flag of a device what was not finite before.

    Each group that one multi-tensor kernel takes goes through it together.
    """
    groups: dict[Hashable, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.layout is not torch.strided or gradient.is_complex():
            gradient = torch.view_as_real(values) if (values := values_of(gradient)).is_complex() else values
        key: Hashable = (gradient.device, gradient.dtype)
        if type(gradient) is not Tensor and (mesh := getattr(gradient, "device_mesh", None)) is not None:
            # DTensor: torch's handler for this kernel takes mesh and placements of the first gradient for all of them.
            key = (key, mesh, gradient.placements)  # type: ignore[attr-defined]
        groups.setdefault(key, []).append(gradient)
    for group in groups.values():
        device = group[0].device
        if device not in flags:
            flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        amp_foreach_non_finite_check_and_unscale_(group, flags[device], factor.to(device, non_blocking=True))


def _combined(flags: dict[torch.device, Tensor]) -> Tensor:
    result, *others = flags.values()
    for flag in others:
        result = torch.maximum(result, flag.to(result.device, non_blocking=True))
    return result


def values_of(gradient: Tensor) -> Tensor:
    """Return the stored values of a gradient of any layout; they share its memory."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.is_sparse else gradient.values()


def _widen(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    gradients = [gradient for _, gradient in pairs]
    if gradients and all(type(gradient) is Tensor for gradient in gradients):  # one kernel for all
        copies = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        foreach_copy_(copies, gradients)
    else:
        copies = [gradient.to(torch.float32) for gradient in gradients]
    for (parameter, _), copy in zip(pairs, copies, strict=True):
        _replace(parameter, copy)
    return copies


def _replace(parameter: Tensor, gradient: Tensor) -> None:
    """Give a low parameter an fp32 gradient, which torch allows only where ``grad_dtype`` is None."""
    parameter.grad = None
    if parameter.grad_dtype is not None and parameter.grad_dtype != gradient.dtype:
        parameter.grad_dtype = None
    parameter.grad = gradient
