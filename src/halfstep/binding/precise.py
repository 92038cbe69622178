"""Precise: `state_dict`, copies, pickles and ``save_pretrained`` of a bound module contain fp32 values.

`save`, `load` and `saving` are methods of bound modules; their first argument is the `Binding`.

Note [copies]: a copy lacks the optimizers of the original, so it has no masters: its own parameters are the fp32
values. Parameters keep their identity, because an optimizer copied along refers to them; only their values change.

Note [parts made later]: a parametrization registered on a bound module, or a module added to it, is not bound. It may
have low parameters, so saving or copying a module binds such children first.

Note [whole models]: ``torch.load(weights_only=True)`` fills an instance only if its class is allowed by name. A script
allows its own classes; what a bound model needs besides is allowed by `allow_in_files`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.kernels.sharded import local, put
from halfstep.kernels.watched import WeightTensor
from halfstep.torch_private.modules import load_state_of, save_state_of
from halfstep.weights import UnkeptWeights, WeightStore

if TYPE_CHECKING:
    from halfstep.binding.bind import Binding

KEY = "_halfstep"  # where a bound module keeps its `Binding`

Place = tuple[nn.Module, str, nn.Parameter]
"""A module, and a parameter of its own by name."""


def low_parameters(module: nn.Module, *, frozen: bool = False) -> list[tuple[str, nn.Parameter, WeightStore]]:
    """Return (name, parameter, store) for the parameters `module` itself owns that have precise weights behind them."""
    binding = module.__dict__.get(KEY)
    if binding is None or binding.store is None:
        return []
    store: WeightStore = binding.store
    store.restore()
    own = [(n, p) for n, p in module._parameters.items() if p is not None and p in store]
    return [(n, p, store) for n, p in own if frozen or not store.is_frozen(p)]


def low_places(model: nn.Module, store: WeightStore) -> list[Place]:
    """Return where in `model` parameters with precise weights in `store` are; those that are shared more than once."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in store
    ]


def put_back(places: list[Place]) -> None:
    """Put parameters back in place of the fp32 values; called twice, because Ctrl-C may end the first call."""
    for module, name, parameter in places:
        module._parameters[name] = parameter


def save(binding: Binding, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Put the fp32 values of a module's own parameters into `destination`: its `_save_to_state_dict`."""
    self = binding.here()
    binding.bind_late()
    save_state_of(type(self))(self, destination, prefix, keep_vars)
    for name in () if keep_vars else self._parameters:
        if isinstance(value := destination.get(prefix + name), WeightTensor):
            destination[prefix + name] = value.as_subclass(Tensor)
    for name, parameter, store in low_parameters(self, frozen=True):
        if store.is_frozen(parameter):
            store.check_frozen(parameter)
            value = parameter if keep_vars else Tensor.detach(parameter)
        else:
            value = store.value(parameter) if keep_vars else store.read(parameter)
        destination[prefix + name] = value
    for name, parameter, owner in UnkeptWeights.of(self._parameters.items()):
        owner.check(parameter)
        destination[prefix + name] = parameter if keep_vars else Tensor.detach(parameter)


def load(
    binding: Binding,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Read the fp32 values of a module's own parameters: its `_load_from_state_dict`."""
    self = binding.here()
    binding.bind_late()
    low = low_parameters(self, frozen=True)
    if low and local_metadata.get("assign_to_params_buffers", False):
        raise WeightsError(
            f"load_state_dict(assign=True) would replace the low parameters of {prefix.rstrip('.') or 'the model'} "
            "and leave their fp32 weights behind; load without assign"
        )
    for path, module in [(prefix[:-1], self)] if prefix else self.named_modules():  # all, before any is loaded
        for name, parameter, store in low_parameters(module, frozen=True):
            value = state_dict.get(f"{path}.{name}" if path else name)
            if isinstance(value, Tensor):
                store.refuse(parameter, value)
    with ExitStack() as loading:
        owners: set[WeightStore | UnkeptWeights] = {store for *_, store in low}
        for owner in owners.union(owner for *_, owner in UnkeptWeights.of(self._parameters.items())):
            loading.enter_context(owner.loaded())
        load_state_of(type(self))(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
    for name, parameter, store in low:
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            store.assign(parameter, value)


def make_precise(module: nn.Module, precise: Mapping[str, Tensor]) -> None:
    """Give the low parameters of a copy, in place, the values in `precise`, by name; it shares no memory with them."""
    for name, value in precise.items():
        parameter = module._parameters.get(name)
        if parameter is not None and parameter.dtype is not value.dtype:
            put(parameter, local(value.detach()).clone())


def saving(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `own`, the ``save_pretrained`` of a library, run while the parameters are the fp32 values.

    Such a method writes `state_dict`, and reads the format that it records from the parameters.
    """

    @functools.wraps(own)
    def save_pretrained(binding: Binding, *args: Any, **kwargs: Any) -> Any:
        self = binding.here()
        for module in self.modules():  # parents first: they bind what the iteration comes to next
            if (bound := module.__dict__.get(KEY)) is not None:
                bound.bind_late()
        low = [(module, *entry) for module in self.modules() for entry in low_parameters(module)]
        # all are made before the first is placed; a shared parameter stays one parameter
        shown = {id(parameter): store.value(parameter) for _, _, parameter, store in low}
        places = [(module, name, parameter) for module, name, parameter, _ in low]
        try:
            for module, name, parameter in places:
                module._parameters[name] = shown[id(parameter)]
            return own(self, *args, **kwargs)
        finally:
            try:
                put_back(places)
            finally:
                put_back(places)

    return save_pretrained


def allow_in_files(*allowed: Any) -> None:
    """Allow files loaded with ``weights_only=True`` to name these classes and functions; note [whole models]."""
    torch.serialization.add_safe_globals(list(allowed))
