"""Precise: `state_dict`, copies, pickles and ``save_pretrained`` of a bound module contain fp32 values.

Note [copies]: a copy lacks the optimizers of the original, so it has no masters: its own parameters are the fp32
values. Parameters keep their identity, because an optimizer copied along refers to them; only their values change.
A parametrization registered on a bound module, or a module added to it, may have low parameters and is not bound:
saving or copying a module binds such children first (`Binding.bind_late`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.kernels.sharded import local, put
from halfstep.kernels.watched import StateTensor, WeightTensor
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


@contextmanager
def replaced(places: list[Place], values: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Have `values`, by id of the parameter, in `places` while a block runs."""
    try:
        for module, name, parameter in places:
            module._parameters[name] = values[id(parameter)]
        yield
    finally:
        try:
            _put_back(places)
        finally:  # again, because Ctrl-C may end the first call
            _put_back(places)


def _put_back(places: list[Place]) -> None:
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
    low: list[tuple[str, nn.Parameter, WeightStore | UnkeptWeights]] = [*low_parameters(self, frozen=True)]
    for name, parameter, owner in low + UnkeptWeights.of(self._parameters.items()):
        if isinstance(owner, WeightStore) and not owner.is_frozen(parameter):
            value = owner.value(parameter) if keep_vars else StateTensor.of(parameter, owner.read(parameter))
        else:
            owner.check(parameter)
            value = parameter if keep_vars else Tensor.detach(parameter)
        destination[prefix + name] = value


def load(
    binding: Binding, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any, **named: Any
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
        for owner in {owner for *_, owner in (*low, *UnkeptWeights.of(self._parameters.items()))}:
            loading.enter_context(owner.loaded())
        load_state_of(type(self))(self, state_dict, prefix, local_metadata, *rest, **named)
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
    """Return `own`, a library's ``save_pretrained``, run while the parameters, whose format it records, are fp32."""

    @functools.wraps(own)
    def save_pretrained(binding: Binding, *args: Any, **kwargs: Any) -> Any:
        self = binding.here()
        for module in self.modules():  # parents first: they bind what the iteration comes to next
            if (bound := module.__dict__.get(KEY)) is not None:
                bound.bind_late()
        low = [(module, *entry) for module in self.modules() for entry in low_parameters(module)]
        # all are made before the first is placed; a shared parameter stays one parameter
        shown = {id(parameter): store.value(parameter) for _, _, parameter, store in low}
        with replaced([(module, name, parameter) for module, name, parameter, _ in low], shown):
            return own(self, *args, **kwargs)

    return save_pretrained
