"""Count what a training step does: casts, bytes, launches, host syncs, bytes saved for backward.

A `Counter` sits under autograd and autocast, where torch's operators arrive one by one with the tensors they work on.
It works on real CPU tensors, on CUDA tensors, and on the fake CUDA tensors of `halfstep.testing.fake_cuda`, where the
operators and formats are those of a GPU and nothing is computed. Compiled functions run eagerly under it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfstep as hs
from halfstep.lens import Sink, Tracer, user_line
from halfstep.testing.counts import Counts, Row, Sync
from halfstep.testing.traffic import Cost, bytes_of, cost_of
from halfstep.torch_private.autograd import current_graph_task_id
from halfstep.torch_private.devices import storage_key
from halfstep.torch_private.fake import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from halfstep.torch_private.operators import schema_of
from halfstep.trees import tensors

ALWAYS_READ = frozenset(
    {"aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::unique_dim"}
    | {"aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim_consecutive"}
)
"""Operators whose result, or its shape, the host must know."""

CAST = "aten::_to_copy"
INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"})
ON_HOST = ("step", "mu_product")  # state that torch's optimizers keep on the CPU unless fused or capturable
UNCOMPUTED = ("aten::_fused_", "aten::_amp_")  # not for fake tensors: they change arguments in place, values only
PACKAGE = Path(hs.__file__).parent
OWN = ("testing", "lens/tracing.py", "cast")
UNNAMED = (str(Path(torch.__file__).parent), *(str(PACKAGE / part) for part in OWN), "<")
"""Where files begin whose lines are not named: torch, what counts, and halfstep.cast, which runs all operators."""


class CountError(hs.HalfstepError, RuntimeError):
    """A step that cannot be counted where it is."""


class Counter(Sink):
    """Counts all that torch does while it is open; `counts` returns it.

    Phases are found by themselves: forward from the call of a module, backward inside autograd, tail after it.

    Examples:
        >>> from halfstep.testing import Counter
        >>> with Counter() as counter:
        ...     loss_fn(model, x, y).backward()
        ...     optimizer.step()
        >>> len(counter.counts().syncs)  # how often the host would wait for a device
        0
    """

    def __init__(self) -> None:
        self._phase = "other"
        self._rows: dict[tuple[str, str, str], list[int]] = {}
        self._syncs: list[Sync] = []
        self._modules: dict[int, nn.Module] = {}  # keeps them alive, so that no address comes twice
        self._weights: dict[int, nn.Parameter] = {}  # by storage
        self._gradients: dict[int, Tensor] = {}  # of parameters, by storage; made when the tail begins
        self._raised: dict[int, tuple[int, int, Any]] = {}  # casts to more bits in this backward pass, by storage
        self._optimizers: dict[int, Optimizer] = {}
        self._saved: dict[int, Any] = {}  # storages
        self._exits = ExitStack()

    def __enter__(self) -> Counter:
        """Begin to count."""
        self._exits.callback(register_optimizer_step_pre_hook(self._stepped).remove)
        self._exits.enter_context(Tracer(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting."""
        self._exits.close()

    def saving(self) -> saved_tensors_hooks:
        """Return a block in which what autograd keeps for the backward pass is counted: around the forward pass."""
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def begin_forward(self) -> None:
        """Mark the begin of the forward pass, where no module is called."""
        self._phase = "forward"

    def watch(self, model: nn.Module) -> None:
        """Take the parameters of `model` as the weights; models that are called while counting are found anyway."""
        if id(model) in self._modules:
            return
        self._modules.update({id(m): m for m in model.modules()})
        for parameter in model.parameters():
            if self._weights.setdefault(_storage(parameter), parameter) is parameter and parameter.requires_grad:
                self._exits.callback(parameter.register_hook(self._arrived).remove)

    def counts(self) -> Counts:
        """Return what has been counted so far."""
        names = ("casts", "launches", "kernels", "read", "written")
        rows = (
            Row(phase=phase, operator=operator, kind=kind, **dict(zip(names, numbers, strict=True)))
            for (phase, operator, kind), numbers in self._rows.items()
            if any(numbers)  # not a row whose casts turned out to be of another kind
        )
        return Counts(
            rows=tuple(rows),
            syncs=tuple(self._syncs),
            parameters=sum(p.numel() for p in self._weights.values()),
            saved=sum(storage.nbytes() for storage in self._saved.values()),
        )

    # ------------------------------------------------------------------ what happens around the operators

    def entering(self, module: nn.Module) -> None:
        """Begin the forward pass, and take the parameters of a model that is called for the first time."""
        if id(module) not in self._modules:
            self.watch(module)
        if not _in_backward():  # a recomputation belongs to the backward pass
            self._phase = "forward"

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _arrived(self, gradient: Tensor) -> None:
        """Count a cast as one of a gradient if it made the gradient of a parameter."""
        cast = self._raised.pop(_storage(gradient), None)
        if cast is not None:
            for kind, sign in (("up", -1), ("gradient", 1)):
                self._add("backward", CAST, kind, *(sign * amount for amount in (1, 1, 1, *cast[:2])))

    def _keep(self, tensor: Tensor) -> Tensor:
        if not _in_backward() and tensor.layout is torch.strided:
            key = _storage(tensor)
            if key not in self._weights:
                self._saved.setdefault(key, tensor.untyped_storage())
        return tensor

    def _where(self) -> str:
        if _in_backward():
            self._phase = "backward"
        elif self._phase == "backward":
            self._phase = "tail"
            self._raised.clear()
            found = (p.grad for p in self._weights.values())
            self._gradients = {_storage(g): g for g in found if g is not None and g.layout is torch.strided}
        return self._phase

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and count it."""
        phase, name = self._where(), schema_of(func).name
        if name == "aten::_local_scalar_dense":
            return self._read_scalar(phase, func, args[0])
        if _host_must_know(name, args, kwargs):
            self._sync(phase, name)
        fake = any(isinstance(t, FakeTensor) for t in tensors(args))
        try:
            if fake and name.startswith(UNCOMPUTED):
                result = args[0] if len(schema_of(func).returns) else None
            else:
                result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            where = user_line(UNNAMED) or "torch"
            raise CountError(
                f"the shape of what {name} returns depends on values ({where}), and fake tensors have none; count this "
                "step on CPU tensors"
            ) from error
        self._count(phase, name, cost_of(func, args, kwargs, result))
        return result

    def _count(self, phase: str, name: str, cost: Cost) -> None:
        if not cost.launches:
            return
        read, written, launches, kernels = cost.read, cost.written, cost.launches, cost.kernels
        for source, target in cost.casts:
            kind = self._kind(source, target)
            amounts = (1, launches, kernels, bytes_of(source), bytes_of(target))
            self._add(phase, name, kind, *amounts)
            read, written, launches, kernels = read - amounts[3], written - amounts[4], 0, 0
            if phase == "backward" and kind == "up" and name == CAST:
                # keeps the storage alive, so that no address comes twice; autograd still sees one owner of the tensor
                self._raised[_storage(target)] = (*amounts[3:], target.untyped_storage())
        if not cost.casts or read or written:
            self._add(phase, name, "", 0, launches, kernels, read, written)

    def _add(self, phase: str, name: str, kind: str, *amounts: int) -> None:
        row = self._rows.setdefault((phase, name, kind), [0] * len(amounts))
        row[:] = map(add, row, amounts)

    def _kind(self, source: Tensor, target: Tensor) -> str:
        keys = {_storage(source), _storage(target)}
        if not keys.isdisjoint(self._weights):
            return "weight"
        if not keys.isdisjoint(self._gradients):
            return "gradient"
        return "down" if target.element_size() <= source.element_size() else "up"

    def _read_scalar(self, phase: str, func: Any, tensor: Tensor) -> Any:
        fake = isinstance(tensor, FakeTensor)
        if not (tensor.device.type == "cpu" and (fake or self._counts_steps(tensor))):
            self._sync(phase, schema_of(func).name)
        try:
            return func(tensor)  # a fake one that is a constant has a value
        except DataDependentOutputException:
            value = 1 if tensor.device.type == "cpu" else 0  # a step counter; a flag that is not set
            return bool(value) if tensor.dtype is torch.bool else float(value) if tensor.is_floating_point() else value

    def _counts_steps(self, tensor: Tensor) -> bool:
        """Return whether a CPU tensor is a step counter that an optimizer keeps on the CPU on every device."""
        for optimizer in self._optimizers.values():
            if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
                continue
            if any(state.get(name) is tensor for state in optimizer.state.values() for name in ON_HOST):
                return True
        return False

    def _sync(self, phase: str, name: str) -> None:
        self._syncs.append(Sync(phase=phase, operator=name, where=user_line(UNNAMED)))


def count_step(step: hs.TrainStep | Callable[..., Any], *batch: Any, warm: int = 2, **named: Any) -> Counts:
    """Train `warm` steps, then count one: ``step(*batch, **named)``.

    Args:
        step: a TrainStep, or a function that trains one step of a loop of your own: forward, backward, optimizer.
        *batch: what it is called with; tensors on the CPU, or fake or real ones on CUDA.
        warm: steps before, after which states exist and the loss scale has begun; they train too.
        **named: as `batch`, by name.

    Returns:
        What the last of these steps did. On fake tensors operators, formats and bytes are exactly a GPU's.

    Raises:
        CountError: it cannot be counted on fake tensors.

    Examples:
        >>> from halfstep.testing import count_step
        >>> step = hs.TrainStep(model, optimizer, loss_fn, policy=hs.Policy.of("mixed", dtype="bf16"))
        >>> counts = count_step(step, x, y)
        >>> counts.saved  # bytes
        324
    """
    for _ in range(warm):
        with Counter():  # which makes fake tensors readable
            step(*batch, **named)
    counter = Counter()
    if not isinstance(step, hs.TrainStep):
        with counter, counter.saving():
            step(*batch, **named)
        return counter.counts()
    own = step.loss_fn

    def loss_fn(*args: Any, **kwargs: Any) -> Any:
        counter.begin_forward()
        with counter.saving():
            return own(*args, **kwargs)

    step.loss_fn = loss_fn
    try:
        with counter:
            counter.watch(step.model)
            step(*batch, **named)
    finally:
        step.loss_fn = own
    return counter.counts()


def _in_backward() -> bool:
    return int(current_graph_task_id()) >= 0


def _storage(tensor: Tensor) -> int:
    return int(storage_key(tensor.untyped_storage())) if tensor.layout is torch.strided else id(tensor)


def _host_must_know(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits in this call: it needs a value, or for memory that moves between devices."""
    if name in ALWAYS_READ:
        return True
    if name in INDEXED:
        return any(t.dtype in {torch.bool, torch.uint8} for t in tensors(args[1]))
    if name == CAST:
        to = kwargs.get("device")
        return to is not None and torch.device(to).type != args[0].device.type and not kwargs.get("non_blocking")
    if name == "aten::copy_":
        waits = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return args[0].device.type != args[1].device.type and waits
    return False
