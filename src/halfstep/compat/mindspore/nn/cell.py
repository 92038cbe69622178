"""Cell: a torch module whose computation is called `construct`, with MindSpore's methods."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.compat.mindspore import precision
from halfstep.compat.mindspore.checks import MindSporeTypeError, check_bool, check_names, check_type
from halfstep.compat.shared import public
from halfstep.torch_private.modules import NormBase

Self = TypeVar("Self", bound="Cell")


class Cell(nn.Module):
    """A torch module: everything of torch works on it, and torch modules may be its children.

    Override `construct`. As in MindSpore, a cell starts in evaluation mode; `set_train` changes it.

    Args:
        auto_prefix: kept for MindSpore's signature: torch names parameters by their place.
        flags: precision flags, as `add_flags` takes them.

    Attributes:
        training: whether layers such as BatchNorm behave as in training.
        cls_name: name of the class, for messages.
    """

    _recomputed = False

    def __init__(self, auto_prefix: bool = True, flags: dict[str, bool] | None = None) -> None:
        name = type(self).__name__
        check_bool(f"{name}: auto_prefix", auto_prefix)
        check_type(f"{name}: flags", flags, (dict, NoneType), "a dict such as {'fp16': True}")
        nn.Module.__init__(self)
        self.training = False
        if flags:
            self.add_flags(**flags)

    cls_name = property(lambda self: type(self).__name__, doc="Name of the class.")

    def construct(self, *inputs: Any, **named: Any) -> Any:
        """Compute the outputs; every subclass defines it."""
        raise hs.errors.UnbuiltError(f"{type(self).__name__} has no construct; define construct(self, ...)")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute the outputs by `construct`: torch calls this name."""
        if precision.mark_of(self).casts:
            inputs, named = hs.trees.map_tensors(
                (inputs, named), lambda x: x.float() if x.dtype is torch.float64 else x
            )
        if self._recomputed and torch.is_grad_enabled():
            return checkpoint(
                self.construct, *inputs, use_reentrant=False,
                context_fn=lambda: (nullcontext(), _keep_statistics(self)), **named,
            )  # fmt: skip
        return self.construct(*inputs, **named)

    def recompute(self, **kwargs: bool) -> None:
        """Compute this cell again in the backward pass instead of keeping what it computed.

        BatchNorm's statistics move once.

        Args:
            **kwargs: mp_comm_recompute, parallel_optimizer_comm_recompute, recompute_slice_activation: kept for
                MindSpore's signature; they are about its parallel training.
        """
        known = ("mp_comm_recompute", "parallel_optimizer_comm_recompute", "recompute_slice_activation")
        check_names("recompute", kwargs, known)
        for name, value in kwargs.items():
            check_bool(f"recompute: {name}", value)
        self._recomputed = True

    to_float, get_flags = precision.to_float, precision.flags_of
    add_flags, add_flags_recursive = precision.add_flags, precision.add_flags_recursive

    def set_train(self: Self, mode: bool = True) -> Self:
        """Set training mode, here and below."""
        return self.train(mode)

    def set_grad(self: Self, requires_grad: bool = True) -> Self:
        """Return the cell: torch differentiates what requires it."""
        for parameter in () if requires_grad else self.parameters():
            parameter.requires_grad_(False)
        return self

    def cells_and_names(self, name_prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, cell) for this cell and all in it."""
        yield from self.named_modules(prefix=name_prefix)

    def trainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        """Return the parameters that require gradients."""
        return [p for p in self.parameters(recurse) if p.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        """Return the parameters that do not require gradients."""
        return [p for p in self.parameters(recurse) if not p.requires_grad]

    get_parameters = public(nn.Module.parameters, lambda self, expand=True: self.parameters(expand), "get_parameters")
    parameters_and_names = public(
        nn.Module.named_parameters,
        lambda self, name_prefix="", expand=True: self.named_parameters(name_prefix, expand), "parameters_and_names",
    )  # fmt: skip
    parameters_dict = public(
        nn.Module.named_parameters, lambda self, recurse=True: dict(self.named_parameters(recurse=recurse)),
        "parameters_dict",
    )  # fmt: skip
    cells = public(nn.Module.children, lambda self: list(self.children()), "cells")
    name_cells = public(nn.Module.named_children, lambda self: dict(self.named_children()), "name_cells")
    insert_child_to_cell = public(
        nn.Module.add_module, lambda self, child_name, child: self.add_module(child_name, child), "insert_child_to_cell"
    )


@contextmanager
def _keep_statistics(cell: nn.Module) -> Iterator[None]:
    """Leave the statistics of norms alone in the second of a recomputed cell's forward passes."""
    norms = [module for module in cell.modules() if isinstance(module, NormBase)]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _given(where: str, cells: tuple[Any, ...]) -> Any:
    given = cells[0] if len(cells) == 1 and isinstance(cells[0], (list, tuple)) else cells
    for cell in given:
        if not isinstance(cell, (nn.Module, dict)):
            raise MindSporeTypeError(f"{where}: {cell!r} is a {type(cell).__name__}; expected cells or torch modules")
    return given


class SequentialCell(Cell, nn.Sequential):
    """Cells one after the other, given as arguments or as one list; torch's Sequential otherwise."""

    def __init__(self, *cells: Any) -> None:
        nn.Sequential.__init__(self, *_given("SequentialCell", cells))
        self.training = False

    def construct(self, x: Any) -> Any:
        """Return `x` passed through all cells in order."""
        for cell in self:
            x = cell(x)
        return x


class CellList(nn.ModuleList):
    """A list of cells: torch's ModuleList under MindSpore's name, with or without a list around the arguments."""

    def __init__(self, *cells: Any, auto_prefix: bool = True) -> None:
        check_bool("CellList: auto_prefix", auto_prefix)
        nn.ModuleList.__init__(self, _given("CellList", cells))
        self.training = False

    to_float, add_flags_recursive = precision.to_float, precision.add_flags_recursive
