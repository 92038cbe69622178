"""Precise: `state_dict`, copies, pickles and ``save_pretrained`` of a bound module contain fp32 values.

`methods_of` returns the methods that do this, for the bound class of one class.

Note [copies]: a copy lacks the optimizers of the original, so it has no masters: its own parameters are the fp32
values. Parameters keep their identity, because an optimizer copied along refers to them; only their values change.

Note [parts made later]: a parametrization registered on a bound module, or a module added to it, is not bound. It may
have low parameters, so saving or copying a module binds such children first.

Note [whole models]: ``torch.load(weights_only=True)`` fills an instance only if its class is allowed by name. A script
allows its own classes; what a bound model needs besides is allowed here. The bound class of an allowed class is allowed
when an instance of it is rebuilt, under a name that no file contains by accident.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from halfstep.errors import WeightsError
from halfstep.kernels.sharded import local, put
from halfstep.kernels.watched import WeightTensor
from halfstep.weights import UnkeptWeights, WeightStore

__all__ = [
    "allow_in_files",
    "copy_parametrized",
    "copying",
    "low_places",
    "make_precise",
    "methods_of",
    "put_back",
]

KEY = "_halfstep"  # where a bound module keeps its `Binding`

Copying = Callable[[nn.Module, dict[int, Any]], nn.Module]
Rebuild = Callable[[type[nn.Module]], nn.Module]
Late = Callable[[nn.Module], None]
Again = Callable[[Any, dict[str, nn.Parameter], Callable[..., Any], tuple[Any, ...]], nn.Module]
Place = tuple[nn.Module, str, nn.Parameter]
"""A module, and a parameter of its own by name."""


def low_parameters(module: nn.Module, *, frozen: bool = False) -> list[tuple[str, nn.Parameter, WeightStore]]:
    """Return (name, parameter, store) for the parameters `module` itself owns that have precise weights behind them.

    Args:
        module: bound or not.
        frozen: whether to return low parameters with nothing behind them, too.
    """
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


def methods_of(original: type[nn.Module], rebuild: Rebuild, again: Again, late: Late) -> dict[str, Any]:
    """Return the methods by which an instance of the bound class of `original` gives fp32 weights.

    Args:
        original: the user's class.
        rebuild: makes the bare instance of its bound class that pickle fills; a function of a module.
        again: binds what another function of `original` has made, with a binding; a function of a module.
        late: binds children that were made later, see note [parts made later].
    """

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        late(self)
        original._save_to_state_dict(self, destination, prefix, keep_vars)
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
        self: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        late(self)
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
            original._load_from_state_dict(
                self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        for name, parameter, store in low:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                store.assign(parameter, value)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        late(self)
        reduced = original.__reduce_ex__(self, max(int(protocol), 2))
        state = reduced[2] if len(reduced) > 2 else None
        precise = {name: store.value(parameter) for name, parameter, store in low_parameters(self)}
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]  # the class builds its instances itself
            return (again, (self.__dict__.get(KEY), precise, *reduced[:2]), *reduced[2:])
        return (rebuild, (original,), _Carried(state, precise) if precise else state, *reduced[3:])

    def setstate(self: nn.Module, state: Any) -> None:
        if not isinstance(state, _Carried):
            original.__setstate__(self, state)
            return
        original.__setstate__(self, state.state)
        make_precise(self, state.precise)

    def shallow(self: nn.Module) -> nn.Module:
        own = getattr(original, "__copy__", None)
        twin = _as_reduced(self, original, None) if own is None else own(self)
        # one binding for both, since they have the same parameters
        return twin if KEY in twin.__dict__ else again(self.__dict__.get(KEY), {}, lambda: twin, ())

    def whole(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return copy_parametrized(self, memo) if is_parametrized(self) else _as_reduced(self, original, memo)

    methods: dict[str, Any] = {
        "_save_to_state_dict": save,
        "_load_from_state_dict": load,
        "__reduce_ex__": reduce_ex,
        "__setstate__": setstate,
        "__copy__": shallow,
        "__deepcopy__": copying(getattr(original, "__deepcopy__", whole), again, late),
    }
    saver = getattr(original, "save_pretrained", None)
    if callable(saver):
        methods["save_pretrained"] = _saving(saver, late)
    return methods


def copying(own: Copying, again: Again, late: Late) -> Copying:
    """Return `own`, a ``__deepcopy__``, so that the copy is bound and has the fp32 values; see note [copies]."""

    @functools.wraps(own)
    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        late(self)
        twin = own(self, memo)
        if twin is self or not isinstance(twin, nn.Module):
            return twin
        make_precise(twin, {name: store.value(parameter) for name, parameter, store in low_parameters(self)})
        if KEY in twin.__dict__ and hasattr(type(twin), "_halfstep_original"):
            return twin
        return again(copy.deepcopy(self.__dict__.get(KEY), memo), {}, lambda: twin, ())

    return deepcopy


def make_precise(module: nn.Module, precise: Mapping[str, Tensor]) -> None:
    """Give the low parameters of a copy, in place, the values in `precise`, by name; it shares no memory with them."""
    for name, value in precise.items():
        parameter = module._parameters.get(name)
        if parameter is not None and parameter.dtype is not value.dtype:
            put(parameter, local(value.detach()).clone())


def copy_parametrized(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a parametrized module with all its attributes, as torch does, which forbids to pickle it."""
    twin = memo[id(module)] = type(module).__new__(type(module))
    twin.__dict__ = copy.deepcopy(module.__dict__, memo)
    return twin


def _as_reduced(module: nn.Module, original: type[nn.Module], memo: dict[int, Any] | None) -> nn.Module:
    """Copy `module` the way its own class is copied and pickled; deep with a `memo`."""
    reduced: tuple[Any, ...] = original.__reduce_ex__(module, 4)  # type: ignore[assignment]  # a str names a global
    make, args, state, *_ = (*reduced, None)
    twin: nn.Module = make(*(args if memo is None else copy.deepcopy(args, memo)))
    if memo is not None:
        memo[id(module)] = twin
        state = copy.deepcopy(state, memo)
    if state is not None:
        twin.__setstate__(state)
    return twin


def _saving(own: Callable[..., Any], late: Late) -> Callable[..., Any]:
    """Return `own`, the ``save_pretrained`` of a library, run while the parameters are the fp32 values.

    Such a method writes `state_dict`, and reads the format that it records from the parameters.
    """

    @functools.wraps(own)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for module in self.modules():  # parents first: they bind what the iteration comes to next
            late(module)
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


class _Carried(NamedTuple):
    """The state of a module with low parameters while it is pickled.

    Attributes:
        state: that of its class; the low parameters in it stay the same objects, which an optimizer may refer to.
        precise: the fp32 values they take in the copy, by name.
    """

    state: Any
    precise: dict[str, nn.Parameter]


def allow_in_files(*allowed: Any) -> None:
    """Allow files loaded with ``weights_only=True`` to name halfstep's classes and functions; see note [whole models].

    Args:
        allowed: classes and functions, or (class, name in files).
    """
    torch.serialization.add_safe_globals(list(allowed))


allow_in_files(_Carried)
