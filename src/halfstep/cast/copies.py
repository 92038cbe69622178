"""Low copies of fp32 parameters: cast once for several forward passes, by a training step and by a model that serves.

A step keeps a copy for a window of several micro-batches: ``parameter.to(dtype)`` with its autograd edge, made at its
first use in the window and dropped before the update. With one micro-batch a window there are none: torch.autocast
casts each weight at its first use, and each low weight goes with the last node of the graph that has saved it.

A prepared model keeps copies of convolutions and of large matrices, 2 bytes an element, while gradients are off; a
forward pass that records gradients drops them (`serving`).

Note [stale copies]: a copy serves as long as version and address of its parameter stay. A write through ``.data`` or by
another process changes neither. In a step's window the mode of a region handles the read of the attribute (`touched`);
without rules there is none, and such a write within one window is missed. A model that serves compares the sum of its
parameter's bits, which changes with any element, and the bits at `PLACES` places, since a sum does not know the order.

Note [sums]: the gradient of a low copy is low, and torch casts it into new memory before it adds it to the parameter's.
The edge of a large copy adds it itself, in one pass, if there is a gradient to add to, it has no hook, and it is the
step's own backward pass: a nested one (torch.autograd.grad in a user's Function) must return it.

Note [kept weights]: torch.autocast casts the weights of linear layers and convolutions below Python, from a cache that
ends with the region and is keyed by the tensor alone. A bound layer whose forward is torch's own passes the copies that
are kept (`low_forward`); the operator is the same, and so are its bits. Anything unusual is cast by torch: a weight
that is parametrised, swapped by functional_call or a tensor subclass, a nested region, in a training step a frozen one.
Where a rule concerns the operator its handler finds the copies.

Note [shared activations]: torch.autocast casts an fp32 activation once for each layer that reads it, and each keeps its
own low copy for the backward pass. A large one is cast once for layers that read it one after the other, and kept once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled, nn
from torch.nn import functional as F

from halfstep.cast.rules.dispatch import address, cast_activation, device_type, stream_of
from halfstep.cast.rules.recipe import Recipe
from halfstep.cast.state import STATE
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.eager.low import add_low_
from halfstep.torch_private.autograd import backward_hooks, current_graph_task_id, post_accumulate_grad_hooks
from halfstep.torch_private.fake import FakeTensor, is_fake
from halfstep.torch_private.modes import peek_interpreter_stack
from halfstep.torch_private.modules import conv_forward

Forward = Callable[..., Any]

SMALL = 1 << 13  # elements below which a CPU casts a weight anew as fast as a copy is found
LARGE = 1 << 23  # of a matrix: below, a CPU casts it as fast as a model that serves finds its copy unchanged

PLACES = 32  # values of a parameter by which a new order of them is noticed; read in half a microsecond

MANY = 1 << 16  # elements of a gradient, or of an activation, from which an edge made in Python pays
ACTIVATIONS = frozenset({Tensor, FakeTensor})  # exact types: other subclasses may have data of their own


class _Copy:
    """The copy of one parameter; only readers on `stream`, where it was made, find it filled; 0: the device has one."""

    __slots__ = ("address", "bits", "low", "stream", "version")

    def __init__(self, parameter: Tensor, low: Tensor, *, serving: bool) -> None:
        self.low, self.version = low, parameter._version
        self.address, self.stream = address(parameter), stream_of(parameter)
        self.bits = _bits(parameter) if serving else None

    def is_of(self, parameter: Tensor) -> bool:
        """Return whether `parameter` still has the values of this copy; note [stale copies]."""
        if self.version != parameter._version or self.address != address(parameter):
            return False
        return self.bits is None or self.bits == _bits(parameter)


def _bits(parameter: Tensor) -> tuple[int, list[int]]:
    """Return the sum of the bits of a parameter, modulo 2**64, and those at some places."""
    bits = parameter.detach().reshape(-1).view(torch.int32)  # no function mode is on where a layer finds its copy
    pairs = len(bits) % 2 == 0 and bits.storage_offset() % 2 == 0  # twice as fast
    total = (bits.view(torch.int64) if pairs else bits).sum()
    return int(total), bits[:: len(bits) // PLACES | 1].tolist()  # odd: in a matrix not one column


class Copies:
    """The low copies of the weights that layers use: 2 bytes for each element.

    Those of `parameters` on the first device of `recipe` get copies. `sums`: whether their edges may add gradients
    (note [sums]). `serving`: of a model that is called without gradients; they have no edges.

    Attributes:
        layers: ids of the modules that own such a parameter named weight.
        task: the backward pass in which edges add gradients; -1: none.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        recipe: Recipe,
        *,
        sums: bool = True,
        serving: bool = False,
    ) -> None:
        device, dtype, on = recipe.devices[0]
        least = SMALL if device == "cpu" else 1  # a launch costs more than a small cast
        matrix = LARGE if serving else least  # a convolution's cast costs more
        self.sums, self.serving, self.task, self.device, self.dtype = sums, serving, -1, device, dtype
        self._members: dict[int, nn.Parameter] = {}
        if on and dtype is not torch.float32:
            self._members = {
                id(p): p
                for p in parameters
                if (type(p) is nn.Parameter or is_fake(p))
                and p.device.type == device
                and p.numel() >= (least if p.dim() > 2 else matrix)
                if not p.is_inference()  # without a version
            }
        self._copies: dict[int, _Copy] = {}
        self.layers = {id(m) for m in model.modules() if id(m._parameters.get("weight")) in self._members}

    @property
    def bytes(self) -> int:
        """How much memory the copies take now: none between two windows."""
        return sum(copy.low.numel() * copy.low.element_size() for copy in self._copies.values())

    def free(self) -> None:
        """Give the memory back; the next use makes copies anew."""
        self._copies.clear()

    # ------------------------------------------------------------------ in a region

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the low copy of `weight`, or None if it has none that may be read here."""
        if torch.is_grad_enabled() if self.serving else not weight.requires_grad:
            return None
        copy = self._copies.get(id(weight))
        if copy is None or not copy.is_of(weight):
            return self._made(weight)
        return None if copy.stream and copy.stream != stream_of(weight) else copy.low

    def _made(self, weight: Tensor) -> Tensor | None:
        if id(weight) not in self._members or weight.dtype is not torch.float32:
            return None
        if peek_interpreter_stack():  # what is made inside a torch.func transform must not be found outside it
            return None
        with torch.inference_mode(False), torch.set_grad_enabled(not self.serving):
            if self.sums and weight.numel() >= MANY:
                low: Tensor = _Edge.apply(weight, self.dtype, weakref.ref(self))  # type: ignore[no-untyped-call]
            else:
                low = weight.to(self.dtype)
        self._copies[id(weight)] = _Copy(weight, low, serving=self.serving)
        return low

    def touched(self, tensor: Tensor) -> None:
        """Expect a write through the ``.data`` of `tensor`, which was read just now."""
        self._copies.pop(id(tensor), None)

    # ------------------------------------------------------------------ a part of the step

    def around_backward(self, loss: Tensor, seed: Tensor, run: Callable[[Tensor, Tensor], None]) -> None:
        """Let `run` do the backward pass of `loss` from `seed`; large edges add gradients themselves; note [sums]."""
        handle = loss.register_hook(self._begins)
        try:
            run(loss, seed)
        finally:
            self.task = -1
            handle.remove()

    def _begins(self, gradient: Tensor) -> None:
        self.task = current_graph_task_id()

    def before_update(self) -> None:
        """Drop the copies: the backward passes of the window are over."""
        self.free()

    def abort(self, *, written: bool) -> None:
        """Drop the copies of a window that was cut off."""
        self.free()


class _Edge(torch.autograd.Function):
    """The autograd edge from a large copy to its parameter; note [sums]."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype, copies: weakref.ref[Copies]) -> Tensor:
        ctx.parameter, ctx.copies = parameter, copies  # a weak reference: the copies reference this
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        parameter, copies = ctx.parameter, ctx.copies()
        total = parameter.grad
        if (
            copies is None
            or total is None
            or total.is_sparse
            or total.dtype is not torch.float32
            or copies.task != current_graph_task_id()
            or torch.is_grad_enabled()  # the gradient will be differentiated
            or backward_hooks(parameter)
            or post_accumulate_grad_hooks(parameter)
        ):
            return gradient.to(parameter.dtype), None, None
        add_low_(total, gradient)
        return None, None, None


# ------------------------------------------------------------------ notes [kept weights], [shared activations]


def low_forward(original: type[nn.Module]) -> Forward | None:
    """Return the forward of a linear layer or a convolution that casts as little as it can; None for other classes."""
    if original.forward is nn.Linear.forward:
        return _low_forward(original.forward, lambda module, *given: F.linear(*given))
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if original.forward is kind.forward and conv_forward(original) is conv_forward(kind):
            return _low_forward(original.forward, conv_forward(kind))
    return None


def _low_forward(plain: Forward, run: Forward) -> Forward:
    def forward(module: nn.Module, input: Any) -> Any:
        copies = STATE.copies
        if copies is not None and id(module) not in copies.layers:
            copies = None
        shared = type(input) in ACTIVATIONS and input.dtype is torch.float32 and input.numel() >= MANY
        if copies is None and not shared:
            return plain(module, input)
        device = device_type(input) if copies is None else copies.device
        if not (is_autocast_enabled(device) and is_autocast_cache_enabled()):
            return plain(module, input)
        dtype = get_autocast_dtype(device)
        if shared and dtype in LOW_DTYPES and not peek_interpreter_stack():
            input = cast_activation(input, dtype)
        if copies is None or copies.dtype is not dtype:
            return plain(module, input)
        parameters = module._parameters
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or (low := copies.of(weight)) is None:
            return plain(module, input)
        bias: Tensor | None = parameters["bias"]
        if bias is not None and (low_bias := copies.of(bias)) is not None:
            bias = low_bias
        return run(module, input, low, bias)

    return forward
