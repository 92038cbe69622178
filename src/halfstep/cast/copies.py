"""Low copies of fp32 parameters that live from step to step: one buffer a parameter, filled again in place.

torch.amp casts every weight into fresh memory in every forward pass, and on a CPU the page faults of that memory cost
more than the optimizer. A training step keeps its copies and fills them again, in one call, when a window of
micro-batches begins, whatever happened to the parameters since: no write between two updates is missed. Within the
window a copy serves as long as version and address of its parameter stay.

Note [edges]: a copy is what ``parameter.to(dtype)`` returned once, with its autograd edge to the parameter. Filling it
under no_grad keeps that edge, and counts its version up, so a graph of before the update raises torch's usual error.
Within a window a changed parameter gets a new copy instead: the graphs of what was computed before stay right.

Note [data]: a write through ``.data`` leaves no trace. The mode of a region handles the read of the attribute
(`touched`). Where the policy needs no mode, each copy is filled at its first use in the window instead of at its
beginning, so that a write in forward, before the weight is used, is seen too. A write between two micro-batches of one
window is missed.

Note [sums]: the gradient of a low copy is low, and torch casts it into new memory before it adds it to the parameter's.
The edge of a large copy adds it itself, in one pass, if there is a gradient to add to, it has no hook, and it is the
step's own backward pass: a nested one (torch.autograd.grad in a user's Function) must return it.

Note [kept weights]: torch.autocast casts the weights of linear layers and convolutions below Python, from a cache that
ends with the region and is keyed by the tensor alone. A bound layer whose forward is torch's own passes the copies of
its training step (`low_forward`); the operator is the same, and so are its bits. Anything unusual is cast by torch: a
weight that is frozen, parametrised, swapped by functional_call or a tensor subclass, a nested region. Where a rule
concerns the operator its handler finds the copies.

Note [shared activations]: torch.autocast casts an fp32 activation once for each layer that reads it, and each keeps its
own low copy for the backward pass. A large one is cast once for layers that read it one after the other, and kept once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled, nn
from torch.nn import functional as F

from halfstep.cast.rules.dispatch import address, cast_activation, stream_of
from halfstep.cast.state import STATE
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.eager.low import add_low_
from halfstep.torch_private.autograd import backward_hooks, current_graph_task_id, post_accumulate_grad_hooks
from halfstep.torch_private.fake import FakeTensor, is_fake
from halfstep.torch_private.foreach import foreach_copy_
from halfstep.torch_private.modes import peek_interpreter_stack
from halfstep.torch_private.modules import conv_forward

if TYPE_CHECKING:
    from halfstep.cast.rules.recipe import Recipe

Forward = Callable[..., Any]

SMALL, SMALL_IN_WINDOWS = 1 << 18, 1 << 13
"""Elements below which a CPU casts a weight anew, into memory that is still mapped, as fast as a copy is kept: filled
once for each use, and filled once for several micro-batches."""

MANY = 1 << 16  # elements of a gradient, or of an activation, from which an edge made in Python pays
ACTIVATIONS = frozenset({Tensor, FakeTensor})  # exact types: other subclasses may have data of their own


class _Copy:
    """One parameter's copy: `low`, with its edge to the parameter, and `memory`, the same without an edge.

    `stream`: where it was filled at its first use in this window: only readers there find it filled. 0: any may read
    it, since it was filled when the window began, or the device has one stream.
    """

    __slots__ = ("address", "low", "memory", "parameter", "stream", "used", "version")

    def __init__(self, parameter: nn.Parameter, low: Tensor, memory: Tensor) -> None:
        self.parameter, self.low, self.memory = parameter, low, memory
        self.used = True
        self.note()

    def note(self, *, for_all: bool = False) -> None:
        """Remember that the copy holds what the parameter holds now, `for_all` streams."""
        parameter = self.parameter
        self.version, self.address = parameter._version, address(parameter)
        self.stream = 0 if for_all else stream_of(parameter)

    def fits(self) -> bool:
        """Return whether the buffer can take the parameter's values, and gradients reach the parameter."""
        parameter, low = self.parameter, self.low
        return (
            parameter.requires_grad
            and parameter.dtype is torch.float32
            and parameter.shape == low.shape
            and parameter.device == low.device
            and parameter.stride() == low.stride()
        )


class Copies:
    """The low copies that one training step keeps: 2 bytes for each element of the weights its layers use.

    That is what torch.amp holds from forward to backward; here it stays while the optimizer steps and between steps,
    on accelerators too, where addresses that stay are what a captured graph needs. `free` gives it back.

    Those of `parameters` on the first device of `recipe` get copies. `windows`: whether a window has several
    micro-batches, over which gradients are summed (`sums`, note [sums]).

    Attributes:
        at_once: whether all copies are filled when a window begins, or each at its first use; note [data].
        layers: ids of the modules that own such a parameter named weight.
        task: the backward pass in which edges add gradients; -1: none.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], recipe: Recipe, *, windows: bool = False
    ) -> None:
        device, dtype, on = recipe.devices[0]
        least = SMALL_IN_WINDOWS if windows else SMALL
        if device != "cpu":
            least = 1  # a launch costs more than a small cast
        self.sums, self.task = windows, -1
        self.recipe, self.device, self.dtype, self.at_once = recipe, device, dtype, recipe.mode is not None
        self._members: dict[int, nn.Parameter] = {}
        if on and dtype is not torch.float32:
            self._members = {
                id(p): p
                for p in parameters
                if (type(p) is nn.Parameter or is_fake(p)) and p.device.type == device and p.numel() >= least
            }
        self._address = address if any(map(is_fake, self._members.values())) else Tensor.data_ptr
        self._copies: dict[int, _Copy] = {}
        self.layers = {id(m) for m in model.modules() if id(m._parameters.get("weight")) in self._members}

    @property
    def bytes(self) -> int:
        """How much memory the copies take now."""
        return sum(copy.low.numel() * copy.low.element_size() for copy in self._copies.values())

    def free(self) -> None:
        """Give the memory back; the next step makes copies anew."""
        self._copies.clear()

    # ------------------------------------------------------------------ in a region

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the low copy of `weight`, or None if it has none that may be read here."""
        copy = self._copies.get(id(weight))
        if copy is None:
            return self._made(weight)
        if copy.version != weight._version or copy.address != self._address(weight) or not weight.requires_grad:
            return self._again(copy)
        if copy.stream and copy.stream != stream_of(weight):
            return None
        copy.used = True
        return copy.low

    def _made(self, weight: Tensor) -> Tensor | None:
        parameter = self._members.get(id(weight))
        if parameter is None or not parameter.requires_grad or parameter.dtype is not torch.float32:
            return None
        if peek_interpreter_stack():  # what is made inside a torch.func transform must not be found outside it
            return None
        with torch.inference_mode(False), torch.enable_grad():
            if self.sums and parameter.numel() >= MANY:
                memory = parameter.detach().to(self.dtype)
                low: Tensor = _Edge.apply(parameter, memory, weakref.ref(self))  # type: ignore[no-untyped-call]
            else:
                low = parameter.to(self.dtype)
                memory = low.detach()
        self._copies[id(parameter)] = _Copy(parameter, low, memory)
        return low

    def _again(self, copy: _Copy) -> Tensor | None:
        """Bring a copy up to date: in its buffer if this window has not used it, else in another one."""
        parameter = copy.parameter
        if copy.used or not copy.fits():
            self._copies.pop(id(parameter), None)
            return self._made(parameter)
        with torch.no_grad():
            copy.memory.copy_(parameter)
        copy.note()
        copy.used = True
        return copy.low

    def touched(self, tensor: Tensor) -> None:
        """Expect a write through the ``.data`` of `tensor`, which was read just now."""
        copy = self._copies.get(id(tensor))
        if copy is not None:
            copy.version = -1

    # ------------------------------------------------------------------ in the backward pass

    def backward(self, loss: Tensor, seed: Tensor, run: Callable[[Tensor, Tensor], None]) -> None:
        """Let `run` do the backward pass of `loss` from `seed`; large edges add gradients themselves; note [sums]."""
        handle = loss.register_hook(self._begins)
        try:
            run(loss, seed)
        finally:
            self.task = -1
            handle.remove()

    def _begins(self, gradient: Tensor) -> None:
        self.task = current_graph_task_id()

    # ------------------------------------------------------------------ between steps

    def begin_window(self) -> None:
        """Begin a window: every copy used in the last one takes its parameter's values; the others are dropped."""
        stale: list[_Copy] = []
        for key, copy in list(self._copies.items()):
            if not copy.used:
                del self._copies[key]
                continue
            copy.used = False
            if not self.at_once:
                copy.version = -1
            elif copy.fits():
                stale.append(copy)
            else:
                del self._copies[key]
        if stale:
            with torch.no_grad():
                foreach_copy_([copy.memory for copy in stale], [copy.parameter for copy in stale])
            for copy in stale:
                copy.note(for_all=True)


class _Edge(torch.autograd.Function):
    """The autograd edge from a large copy to its parameter; note [sums]."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, memory: Tensor, copies: weakref.ref[Copies]) -> Tensor:
        ctx.parameter, ctx.copies = parameter, copies  # a weak reference: the copies reference this
        return memory.detach()

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
        return _low_forward(original.forward, _linear)
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if original.forward is kind.forward and conv_forward(original) is conv_forward(kind):
            return _low_forward(original.forward, conv_forward(kind))
    return None


def _linear(module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias)


def _low_forward(plain: Forward, run: Forward) -> Forward:
    def forward(module: nn.Module, input: Any) -> Any:
        copies = STATE.copies
        if copies is not None and id(module) not in copies.layers:
            copies = None
        shared = type(input) in ACTIVATIONS and input.dtype is torch.float32 and input.numel() >= MANY
        if copies is None and not shared:
            return plain(module, input)
        device = input.device.type if copies is None else copies.device
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
