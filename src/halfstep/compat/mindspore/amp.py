"""``mindspore.amp``: levels, lists, training networks; halfstep carries them out."""

import warnings
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import nn

import halfstep as hs
from halfstep.compat.mindspore import checks, precision
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn import layers, loss_scale
from halfstep.compat.mindspore.nn.loss import WithLossCell
from halfstep.compat.mindspore.nn.loss_scale import *  # noqa: F403  # what mindspore.amp has of them
from halfstep.compat.mindspore.nn.loss_scale import DynamicLossScaleManager, LossScaleManager
from halfstep.compat.mindspore.nn.step import TrainOneStepCell, TrainOneStepWithLossScaleCell
from halfstep.compat.mindspore.ops import operations
from halfstep.compat.shared import LOW_NAMES

__all__ = [
    "auto_mixed_precision", "build_train_network", "custom_mixed_precision", "get_black_list", "get_white_list",
    *loss_scale.__all__,
]  # fmt: skip

T = TypeVar("T", bound=Callable[..., Any])

CELLS: tuple[type[layers.Layer], ...] = (
    layers.Conv1d, layers.Conv2d, layers.Conv3d, layers.Conv1dTranspose, layers.Conv2dTranspose,
    layers.Conv3dTranspose, layers.Dense, layers.LSTMCell, layers.RNNCell, layers.GRUCell,
)  # fmt: skip
WHITE_LIST: tuple[type, ...] = (
    *CELLS, operations.Conv2D, operations.Conv3D, operations.Conv2DTranspose, operations.Conv3DTranspose,
    operations.Conv2DBackpropInput, operations.MatMul, operations.BatchMatMul, operations.PReLU, operations.ReLU,
    operations.Ger,
)  # fmt: skip
BLACK_LIST: tuple[type, ...] = (layers.BatchNorm1d, layers.BatchNorm2d, layers.BatchNorm3d, layers.LayerNorm)


FP32_LEVEL = (False, torch.float32, False)
CONFIG = {
    "O0": FP32_LEVEL, "O1": FP32_LEVEL, "O2": (True, torch.float16, True), "O3": (False, torch.float16, False),
    "auto": FP32_LEVEL,
}  # fmt: skip
"""MindSpore 2.10's levels: `keep_batchnorm_fp32`, `cast_model_type`, and whether the loss scale moves."""


def get_white_list() -> list[type]:
    """Return a copy of O1's white list: classes of cells and primitives."""
    return list(WHITE_LIST)


def get_black_list() -> list[type]:
    """Return a copy of O2's black list: classes of cells that stay fp32."""
    return list(BLACK_LIST)


def auto_mixed_precision(network: T, amp_level: str = "O0", dtype: torch.dtype = torch.float16) -> T:
    """Convert a network to a level, in place; parameters stay fp32 and outputs come back in fp32.

    O0 casts nothing. O1: the white list's operators in `dtype`, everything else fp32. O2: everything in `dtype` but the
    black list's cells. O3: everything. auto: white operators in `dtype`, sensitive ones fp32, the rest by input.
    Operators are recognised however they are written, and cells that the user gave a flag keep it.

    Args:
        network: a Cell or any torch module; for "auto" also a function, which is returned decorated.
        amp_level: "O0", "O1", "O2", "O3" or "auto".
        dtype: mstype.float16 or mstype.bfloat16.

    Returns:
        The same object; for a function a new one.
    """
    name = precision.low_name(dtype, "auto_mixed_precision")
    _check_level("auto_mixed_precision: amp_level", amp_level)
    if not isinstance(network, nn.Module):
        if amp_level == "auto" and callable(network) and not isinstance(network, type):
            return hs.autocast(policy=precision.level_policy("auto", name))(network)  # type: ignore[return-value]
        expected = "a Cell or torch module (or, for 'auto', a function)"
        raise MindSporeTypeError(f"auto_mixed_precision: network is a {type(network).__name__}; expected {expected}")
    if amp_level == "O0" or _converted(network, amp_level):
        return network
    black = _patterns(BLACK_LIST) if amp_level == "O2" else ()
    precision.mark_level(network, amp_level, precision.level_policy(amp_level, name, black))
    return network


def custom_mixed_precision(
    network: nn.Module, *, white_list: list[type] | None = None, black_list: list[type] | None = None,
    dtype: torch.dtype = torch.float16,
) -> nn.Module:  # fmt: skip
    """Convert a network with one's own white list (as O1) or black list (as O2), in place.

    Args:
        network: a Cell or any torch module.
        white_list: classes of cells or primitives to run in `dtype`; everything else runs in fp32.
        black_list: classes of cells to run in fp32; everything else runs in `dtype`.
        dtype: mstype.float16 or mstype.bfloat16.
    """
    checks.check_network("custom_mixed_precision", network)
    name = precision.low_name(dtype, "custom_mixed_precision")
    if (white_list is None) == (black_list is None):
        given = "neither" if white_list is None else "both"
        raise MindSporeValueError(f"custom_mixed_precision takes white_list or black_list, and was given {given}")
    where = f"custom_mixed_precision: {'black' if white_list is None else 'white'}_list"
    classes: Any = black_list if white_list is None else white_list
    bases = (nn.Module,) if white_list is None else (nn.Module, operations.Primitive)
    if not isinstance(classes, list):
        raise MindSporeTypeError(f"{where}={classes!r} is a {type(classes).__name__}, not a list")
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, bases)):
            expected = " or ".join(base.__name__ for base in bases)
            raise MindSporeTypeError(f"{where} contains {kind!r}; expected classes (not instances) of {expected}")
    if _converted(network, "custom"):
        return network
    if white_list is None:
        precision.mark_level(network, "O2", precision.level_policy("O2", name, _patterns(classes)))
        return network
    operators: dict[str, None] = {}  # in order, once each
    cells: list[type] = []
    for kind in classes:
        row = next((cell.__name__ for cell in CELLS if kind in (cell, cell.kind)), kind.__name__).lower()
        if row in precision.O1_WHITE or issubclass(kind, operations.Primitive):
            operators.update(dict.fromkeys(precision.O1_WHITE[row] if row in precision.O1_WHITE else kind.operators))
        else:
            cells.append(kind)
    for part in network.modules():
        if isinstance(part, tuple(cells)) and part is not network:
            precision.mark_level(part, "white", precision.low_policy(name))
    precision.mark_level(network, "O1", precision.level_policy("O1", name, white=operators))
    return network


def build_train_network(
    network: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Any] | None = None,
    level: str = "O0", boost_level: str = "O0", **kwargs: Any,
) -> TrainOneStepCell | TrainOneStepWithLossScaleCell:  # fmt: skip
    """Convert a network, in place, and return the cell that trains it.

    Args:
        network: a Cell or torch module; without `loss_fn` it returns the loss.
        optimizer: a torch optimizer over the network's parameters.
        loss_fn: called as ``loss_fn(output, label)``, in fp32.
        level: "O0", "O1", "O2", "O3" or "auto".
        boost_level: only "O0": acceleration by other means than precision does not exist here.
        **kwargs: instead of the level's: ``cast_model_type`` (mstype.float16, bfloat16 or float32),
            ``keep_batchnorm_fp32`` (bool), ``loss_scale_manager`` (a `LossScaleManager` or None).

    Returns:
        A `TrainOneStepWithLossScaleCell` where there is a manager with an update cell, else a `TrainOneStepCell`.
    """
    where = "build_train_network"
    checks.check_network(where, network, callable if loss_fn is None else loss_fn)
    checks.check_optimizer(where, optimizer)
    own = {id(parameter) for parameter in network.parameters()}
    if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise MindSporeValueError(
            f"{where}: {type(optimizer).__name__} holds parameters that are not the network's; build it from "
            "network.trainable_params()"
        )
    _check_level(f"{where}: level", level)
    expected = "'O0' (MindSpore's boost is about communication and dimensions, not precision)"
    checks.check_value(f"{where}: boost_level", boost_level, boost_level == "O0", expected)
    keeps, low, dynamic = CONFIG[level]
    checks.check_names(where, kwargs, ("cast_model_type", "keep_batchnorm_fp32", "loss_scale_manager"))
    keep = kwargs.get("keep_batchnorm_fp32", keeps)
    checks.check_bool(f"{where}: keep_batchnorm_fp32", keep)
    cast = kwargs.get("cast_model_type", low)
    expected = "mstype.float16, mstype.bfloat16 or mstype.float32"
    checks.check_value(f"{where}: cast_model_type", cast, cast is torch.float32 or cast in LOW_NAMES, expected)
    manager = kwargs.get("loss_scale_manager", DynamicLossScaleManager() if dynamic else None)
    expected = "a LossScaleManager, such as DynamicLossScaleManager(), or None"
    checks.check_type(f"{where}: loss_scale_manager", manager, (LossScaleManager, NoneType), expected)
    update = None if manager is None else manager.get_update_cell()
    scale = 1.0 if manager is None else float(manager.get_loss_scale())
    target = network.backbone if loss_fn is None and isinstance(network, WithLossCell) else network
    if cast in LOW_NAMES:  # whatever the level: everything low, with or without norms
        if not _converted(target, level):
            black = _patterns(BLACK_LIST) if keep else ()
            precision.mark_level(target, level, precision.level_policy("O2" if black else "O3", LOW_NAMES[cast], black))
    elif level not in ("O2", "O3"):  # O2 and O3 with cast_model_type=float32 cast nothing
        auto_mixed_precision(target, level)
    trained: nn.Module = network if loss_fn is None else WithLossCell(network, loss_fn)
    if precision.low_format_in(trained) == "fp16" and manager is None:
        warnings.warn(
            f"build_train_network(level={level!r}): fp16 is trained without a loss scale, so small gradients are 0; "
            "pass loss_scale_manager=DynamicLossScaleManager()",
            stacklevel=2,
        )
    if update is None:
        return TrainOneStepCell(trained, optimizer, scale).set_train()
    return TrainOneStepWithLossScaleCell(trained, optimizer, update).set_train()


def _check_level(where: str, level: object) -> None:
    expected = f"one of {', '.join(CONFIG)}"
    checks.check_type(where, level, str, expected)
    checks.check_value(where, level, level in CONFIG, expected + hs.errors.did_you_mean(str(level), CONFIG))


def _converted(network: nn.Module, level: str) -> bool:
    """Return whether `network` has been converted before, and warn if so."""
    before = precision.mark_of(network).level
    if before:
        warnings.warn(
            f"{type(network).__name__} was converted with level {before!r} before and stays as it is; {level!r} is not "
            "applied. network.add_flags_recursive(fp16=False) takes a level away",
            stacklevel=3,
        )
    return bool(before)


def _patterns(kinds: Sequence[type]) -> tuple[str, ...]:
    """Return the module patterns of some classes of cells; torch's class stands for one of MindSpore's layers."""
    ours = {kind: kind.kind for kind in kinds if issubclass(kind, layers.Layer) and kind.__module__ == layers.__name__}
    return tuple(f"class:{ours.get(kind, kind).__name__}" for kind in kinds)
