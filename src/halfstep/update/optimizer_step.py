"""Updates through ``optimizer.step()``: in torch's fused form if only speed changes, and not where gradients are bad.

torch's fused optimizers unscale and skip on the device; all others read the verdict on the host, one wait an update.

Note [undo]: `Marks` tell an optimizer that raised and changed nothing from one after which a checkpoint must be loaded.
torch counts the writes to each tensor in its `_version`; no tensor is copied.
"""

from collections.abc import Sequence
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from halfstep.formats import LOW_DTYPES
from halfstep.kernels.eager.torch_fused import WITH_KERNELS, fused_here, fused_works
from halfstep.kernels.sharded import local
from halfstep.scale.fused import keep_working_form, must_not_skip, skips_itself, step_with_flag
from halfstep.torch_private.fake import FakeTensor
from halfstep.torch_private.foreach import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_
from halfstep.torch_private.modules import WRAPPED
from halfstep.weights import WeightStore

FUSED = frozenset(WITH_KERNELS)  # a subclass may have a step of its own

ADAGRAD_ON_CUDA = "2.13"  # from here on its fused form is known to take CUDA parameters
WHOLE_TENSORS = frozenset({Tensor, FakeTensor})  # types whose storage holds all of their values


def stored(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return what gradients hold here: the values of coalesced sparse ones, this rank's part of sharded ones."""
    return [gradient._values() if gradient.is_sparse else local(gradient) for gradient in gradients]


def clip_values_(gradients: Sequence[Tensor], divisor: Tensor | None, limit: float) -> None:
    """Unscale `gradients` in place by `divisor` and clamp every element to [-limit, limit]."""
    dense = stored(gradients)
    if divisor is not None:
        foreach_mul_(dense, divisor.reciprocal())
    foreach_clamp_min_(dense, -limit)
    foreach_clamp_max_(dense, limit)


def prefer_fused(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Let `optimizer` use torch's fused form if its user chose none; the forms' counters are on different devices."""
    keep_working_form(optimizer, parameters)
    if is_fused(optimizer):
        vars(optimizer)["_step_supports_amp_scaling"] = True  # a copy or a pickle of one has lost it
    if not can_fuse(optimizer) or not parameters or not all(_fits(optimizer, p) for p in parameters):
        return
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"], group["foreach"] = True, False
    vars(optimizer)["_step_supports_amp_scaling"] = True  # torch's marker, set by its __init__
    optimizer.register_load_state_dict_pre_hook(_stay_fused)


def _fits(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Return whether torch's fused form can step `parameter`.

    Low parameters without masters are computed in fp32 and rounded once there, where the other forms round after every
    operator. Adagrad's state was made when they were fp32, and its fused form refuses CUDA up to torch 2.11.
    """
    kind, device = type(optimizer), parameter.device.type
    stored = type(Tensor.data.__get__(parameter))  # type: ignore[attr-defined]  # of C
    if stored not in WHOLE_TENSORS or not fused_here(kind, device) or not fused_works(kind, parameter):
        return False
    if kind is Adagrad and device == "cuda" and torch.__version__ < ADAGRAD_ON_CUDA:
        return False
    return parameter.dtype is torch.float32 or (parameter.dtype in LOW_DTYPES and kind is not Adagrad)


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is in torch's fused form, by choice or since `prefer_fused`."""
    return type(optimizer) in FUSED and all(group.get("fused") for group in optimizer.param_groups)


def can_fuse(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` itself allows torch's fused form."""
    if type(optimizer) not in FUSED or not all(map(_free, optimizer.param_groups)):
        return False
    # no state that a step left: Adagrad makes some, with step 0, when it is built
    return not any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _free(group: dict[str, Any]) -> bool:
    """Return whether a group's user chose no form, and the fused one does the same as the others."""
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    damped = group.get("momentum") and group.get("dampening")  # see `_begin_momentum`
    return not (chosen or damped or group.get("differentiable") or group.get("capturable"))


def _stay_fused(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """Keep the fused form where a state comes from an optimizer that had none chosen."""
    if not all(_free(group) for group in state["param_groups"]):
        return None
    return {**state, "param_groups": [{**group, "fused": True, "foreach": False} for group in state["param_groups"]]}


def takes_predicate(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` reads found_inf and grad_scale on the device (torch's fused optimizers do)."""
    return skips_itself(optimizer) and not must_not_skip(optimizer)


def step_unless(bad: Tensor, optimizer: Optimizer, gradients: Sequence[Tensor], factor: Tensor | None) -> bool:
    """Step `optimizer` with ``gradients * factor``, its parameters', unless `bad`; return whether the host read it."""
    if type(optimizer) is SGD and skips_itself(optimizer):
        _begin_momentum(optimizer, gradients)
    if takes_predicate(optimizer):
        scale = None if factor is None else factor.reciprocal()
        step_with_flag(optimizer, scale, bad.to(torch.float32), (), {})
        return False
    if not bool(bad):
        if factor is not None:
            foreach_mul_(stored(gradients), factor)
        optimizer.step()
    return True


def _begin_momentum(optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    """Give parameters without momentum one of zero, from which an undamped step makes what torch begins with.

    torch's fused SGD (2.13) fails if one gets its first gradient later, and keeps what was in memory after a skip.
    """
    following = iter(gradients)
    for group in optimizer.param_groups:
        begins = group["momentum"] and not group["dampening"]
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = next(following)
                if begins and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)


# ------------------------------------------------------------------ note [undo]

COMPARED_TYPES = (int, float, bool, str, type(None))
ATTRIBUTES = ("grad_scale", "found_inf")  # torch's protocol of scaled steps, see `scale.fused`
COUNTED = ("torch.optim", "halfstep")  # optimizers of these packages write by operators that count their writes


class Marks:
    """How often everything that an optimizer may write to had been written to, before its step."""

    __slots__ = ("_attributes", "_entered", "_handle", "_optimizer", "_parts", "_states")

    def __init__(self, optimizer: Optimizer, store: WeightStore | None) -> None:
        self._optimizer = optimizer
        parts: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        if store is not None:
            pairs = [store.parts(p) if p in store else (p, None) for p in parts]  # type: ignore[arg-type]
            parts = [part for pair in pairs for part in pair if part is not None]
        self._parts = [(part, part._version) for part in parts]
        self._states = [
            (state, dict(state), [v._version if isinstance(v, Tensor) else None for v in state.values()])
            for state in optimizer.state.values()
            if state is not None  # ZeroRedundancyOptimizer: another rank has it
        ]
        own = vars(optimizer)
        self._attributes = {name: own[name] for name in ATTRIBUTES if name in own}
        # the last of its hooks before the step; without hooks its code is entered at once
        replaced = "step" in own and not hasattr(own["step"], WRAPPED)
        self._entered = replaced or not getattr(type(optimizer).step, "hooked", False)
        self._handle = None if self._entered else optimizer.register_step_pre_hook(self._enter)

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._entered = True

    def end(self) -> None:
        """Take the hook off the optimizer."""
        if self._handle is not None:
            self._handle.remove()

    def moved(self) -> bool:
        """Return whether the step has changed anything, or may have, but states it made, which `restore` removes."""
        if not self._entered:
            return False
        if not _counts_writes(self._optimizer) or any(part._version != version for part, version in self._parts):
            return True
        return any(
            not _same(state.get(name, self), value) or (version is not None and value._version != version)
            for state, before, versions in self._states
            for (name, value), version in zip(before.items(), versions, strict=True)
        )

    def restore(self) -> None:
        """Remove what a step that has not moved anything has made: states, and attributes for scaled steps."""
        self.end()
        known = {id(state): before for state, before, _ in self._states}
        for parameter, state in list(self._optimizer.state.items()):
            if state is None:
                continue
            if id(state) not in known:
                del self._optimizer.state[parameter]
            elif len(state) != len(known[id(state)]):
                for name in [name for name in state if name not in known[id(state)]]:
                    del state[name]
        for name in ATTRIBUTES:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(self._attributes)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, COMPARED_TYPES) and now == before)


def _counts_writes(optimizer: Optimizer) -> bool:
    """Return whether torch counts what `optimizer` writes: not through ``.data``, in fused forms (2.13), by kernels."""
    own = vars(optimizer)
    if "step" in own and not hasattr(own["step"], WRAPPED):
        return False  # replaced by a function that may do anything
    if any(group.get("fused") for group in optimizer.param_groups):
        return False
    kinds = type(optimizer).__mro__
    root = kinds[kinds.index(Optimizer) - 1]
    if not root.__module__.startswith(COUNTED):
        return False
    others = [kind for kind in kinds[: kinds.index(root)] if not kind.__module__.startswith(COUNTED)]
    functions = [unwrap(f) for kind in others for f in vars(kind).values() if isinstance(f, FunctionType)]
    return all("data" not in function.__code__.co_names for function in functions)
