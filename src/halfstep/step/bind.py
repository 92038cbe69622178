"""Binding: a policy that belongs to a model, so that any call of it, from anywhere, is in the region.

A bound module's class is swapped for a cached subclass of its class. The subclass' `forward` opens the region unless
the binding's region is already the one this thread is in; `state_dict`, `load_state_dict`, `copy.deepcopy` and `pickle`
see fp32 values. No function of the user is replaced, and taking the binding off gives the class back.

Note [what is bound]: every module with a forward, leaves of torch.nn too: activation checkpointing recomputes any of
them alone, and users call a head or a layer by itself. Inside the region a bound forward costs one comparison.

Note [parametrizations]: torch.nn.utils.parametrize gives a module a class of its own, and takes it off by its first
base. It stays the outermost: what is bound is the class below it, and torch's is made again over that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.nn.utils.parametrize import is_parametrized

from halfstep.cast.dispatch import RuleMode
from halfstep.cast.layers import low_forward, unruled
from halfstep.cast.opening import abandon, close_recipe, open_recipe, opened
from halfstep.cast.recipe import Recipe, call_traced, recipe_for, run_eagerly
from halfstep.cast.recompute import hooks_over_this, remember
from halfstep.cast.region import SUSPENDED
from halfstep.cast.state import STATE
from halfstep.errors import RegionError, WeightsError
from halfstep.policy.policy import Policy
from halfstep.trees import map_tensors, tensors
from halfstep.weights import WeightStore

__all__ = ["Binding", "binding_of", "bind_class", "explained", "is_bound"]

KEY = "_halfstep"
NOWHERE = object()
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Binding:
    """What a bound module carries: its policy, the rule it runs under and where its precise weights are.

    Attributes:
        policy: the policy the model was prepared with.
        device_types: the devices its region enters.
        path: dotted name of the module under the prepared root; "" is the root.
        root: whether it is, or was prepared as a model of its own before the whole was.
        rule: the module rule that applies here ("low", "fp32", "keep"), or "" for none.
        entrance: whether this module is the outermost one its rule applies to (it casts inputs and outputs).
        store: the precise weights behind low parameters, or None. Not copied and not pickled.
        recipe: the region of this module.
        passes: the region in which its forward has nothing to do: `recipe`, or none for roots and entrances.
        unruled: whether no rule of the region concerns what its forward calls; None: not yet known.
        idle: whether there is nothing to do inside the region: no mode to take off, no weight to hand over.
    """

    def __init__(
        self,
        policy: Policy,
        device_types: tuple[str, ...],
        *,
        path: str,
        root: bool,
        rule: str = "",
        entrance: bool = False,
        store: WeightStore | None = None,
    ) -> None:
        self.policy = policy
        self.device_types = device_types
        self.path = path
        self.root = root  # what is traced asks this: a guard on each path would compile equal layers one by one
        self.rule = rule
        self.entrance = entrance
        self.store = store
        self.recipe = module_recipe(policy, device_types, rule)
        self.passes = NOWHERE if root or entrance else self.recipe
        self.unruled: bool | None = None
        self.idle = False

    def become_root(self) -> None:
        """Let this module be a model of its own from now on."""
        self.root, self.passes = True, NOWHERE

    def learn(self, module: nn.Module, original: type[nn.Module], mode: RuleMode) -> bool:
        """Find out, once, whether `mode` has no rule for what the forward of `module` calls."""
        self.unruled = unruled(module, original, mode.handlers)
        return self.unruled

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_binding, (
            self.policy,
            self.device_types,
            self.path,
            self.root,
            self.rule,
            self.entrance,
        )

    def __repr__(self) -> str:
        return f"Binding({self.path or '<root>'}, policy={self.policy.name!r}, rule={self.rule!r})"


def _rebuild_binding(
    policy: Policy, device_types: tuple[str, ...], path: str, root: bool, rule: str, entrance: bool
) -> Binding:
    return Binding(policy, device_types, path=path, root=root, rule=rule, entrance=entrance)


@lru_cache(maxsize=256)
def module_recipe(policy: Policy, device_types: tuple[str, ...], rule: str) -> Recipe:
    """Return the region of a module under `rule`, which wins over the policy's operator rules.

    low = every operator low but losses, fp32 = off, keep = by input.
    """
    if rule == "low":
        return recipe_for(
            policy.replace(table="all-low", ops=(), residual="low", loss="fp32", modules=()), device_types
        )
    if rule == "keep":
        every = (("*", "keep"),)
        return recipe_for(policy.replace(table="all-low", ops=every, residual="fp32", modules=()), device_types)
    return recipe_for(policy.replace(modules=()), device_types, enabled=rule != "fp32")


def binding_of(module: nn.Module) -> Binding | None:
    """Return the binding of `module` itself, or None."""
    binding = module.__dict__.get(KEY)
    return binding if isinstance(binding, Binding) else None


def is_bound(module: nn.Module) -> bool:
    """Return whether `module` or anything in it is bound."""
    return any(binding_of(m) is not None for m in module.modules())


def bind_class(module: nn.Module, *, on: bool) -> None:
    """Swap the class of `module` for the bound subclass of it, or back; see note [parametrizations]."""
    own = type(module)
    below = own.__bases__[0] if is_parametrized(module) else own
    kind = getattr(below, "_halfstep_original", below)
    if on:
        binding = binding_of(module)
        if binding is not None:
            binding.idle = binding.recipe.mode is None and low_forward(kind) is None
        kind = bound_class(kind)
    if is_parametrized(module):
        body = {name: value for name, value in vars(own).items() if name not in {"__dict__", "__weakref__"}}
        kind = type(own.__name__, (kind,), body)
    module.__class__ = kind


def _cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of a tree; containers keep their types."""
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.dtype in FLOATS else tensor)


def _first_float(tree: Any) -> torch.dtype | None:
    return next((tensor.dtype for tensor in tensors(tree) if tensor.dtype in FLOATS), None)


def explained(error: RuntimeError, tree: Any) -> RegionError | None:
    """Return an error that says what to do if `error` is about a float64 tensor of `tree` among others, else None."""
    if "Double" not in str(error) or isinstance(error, RegionError):
        return None
    if all(tensor.dtype is not torch.float64 for tensor in tensors(tree)):
        return None
    return RegionError(
        "a float64 input met weights of another format, and no rule touches float64; if it came from numpy, whose "
        f"default that is, pass x.float(). torch says: {error}"
    )


def _casts(binding: Binding, args: Any, kwargs: Any, *, outermost: bool) -> tuple[Any, Any, torch.dtype | None]:
    """Cast the inputs of an entrance and say which dtype its outputs take (None: as they come)."""
    output = None
    if binding.rule == "fp32" and binding.entrance:
        output = _first_float((args, kwargs))
        args, kwargs = _cast_floats(args, torch.float32), _cast_floats(kwargs, torch.float32)
    elif binding.root:
        policy = binding.policy
        if policy.inputs == "low":
            for _, dtype, on in binding.recipe.devices:
                if on and dtype is not None:
                    args, kwargs = _cast_floats(args, dtype), _cast_floats(kwargs, dtype)
                    break
        if policy.outputs == "fp32" and outermost:
            output = torch.float32
    return args, kwargs, output


def _enter(binding: Binding, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run `forward` in the region of `binding`."""
    state = STATE
    store = binding.store
    if store is not None:
        store.heal()
    if state.visit is not None and binding.root:
        state.visit(module)
    inside = state.bound is binding.recipe or (state.bound is SUSPENDED and binding.policy.params == "fp32")
    args, kwargs, output = _casts(binding, args, kwargs, outermost=state.bound is None or state.bound is SUSPENDED)
    if inside:
        if hooks_over_this(True) is not None:
            remember()  # a checkpoint around it, which would find no region later
        result = forward(module, *args, **kwargs)
    else:
        region, failing = opened(binding.recipe), True
        try:
            region.frame = open_recipe(binding.recipe, region, depth=3)
            state.bound = binding.recipe
            result = forward(module, *args, **kwargs)
            failing = False
        except RuntimeError as error:
            if (better := explained(error, (args, kwargs))) is None:
                raise
            raise better from error
        finally:  # note [interrupts] of cast/opening.py
            try:
                close_recipe(region, failing=failing)
            finally:
                abandon(region.frame)
    return result if output is None else _cast_floats(result, output)


run_eagerly(_enter, below=False)  # where Dynamo gives up on a bound forward, what is below may still be compiled


def _visit_traced(address: int) -> None:
    """Tell the training step, while Dynamo traces its loss, that the model at `address` runs in it.

    Dynamo calls this itself, once for each graph, and guards on the address: an argument has to be a constant.
    """
    if STATE.visit is not None:
        STATE.visit(ctypes.cast(address, ctypes.py_object).value)


_visit_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


def _enter_compiled(binding: Binding, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """`_enter` in the words Dynamo traces."""
    state = STATE
    if state.visit is not None and binding.root:
        _visit_traced(id(module))
    outer = state.bound
    args, kwargs, output = _casts(binding, args, kwargs, outermost=outer is None or outer is SUSPENDED)
    if outer is binding.recipe or (outer is SUSPENDED and binding.policy.params == "fp32"):
        result = forward(module, *args, **kwargs)
    else:
        state.bound = binding.recipe
        try:
            result = call_traced(binding.recipe, forward, (module, *args), kwargs)
        finally:
            state.bound = outer
    return result if output is None else _cast_floats(result, output)


BOUND = WeakValueDictionary[type[nn.Module], type[nn.Module]]()  # what `bound_class` made and is in use


def bound_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `original` that bound instances get; one for each class."""
    kind = BOUND.get(original)
    if kind is None:
        kind = BOUND[original] = _bound_class(original)
    return kind


def _bound_class(original: type[nn.Module]) -> type[nn.Module]:

    layer = low_forward(original)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        binding = self.__dict__.get(KEY)
        if binding is None:  # made by the class itself, as a Sequential's slice
            return original.forward(self, *args, **kwargs)
        state = STATE
        if binding.idle and state.bound is binding.passes:
            return original.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if state.bound is binding.passes:
                return original.forward(self, *args, **kwargs)
            return _enter_compiled(binding, original.forward, self, args, kwargs)
        mode, run = binding.recipe.mode, original.forward
        free = mode is None or (binding.learn(self, original, mode) if binding.unruled is None else binding.unruled)
        if state.bound is binding.recipe and state.mode is not mode:  # in a region that somebody opened inside
            free = False
        if free and layer is not None and len(args) == 1 and not kwargs:
            run = layer
        if state.bound is not binding.passes:
            return _enter(binding, run, self, args, kwargs)
        if not free or mode is None or _len_torch_function_stack() != 1:  # other modes want to see everything
            return run(self, *args, **kwargs)
        _pop_torch_function_stack()
        try:
            return run(self, *args, **kwargs)
        finally:
            _push_on_torch_function_stack(mode)

    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        original._save_to_state_dict(self, destination, prefix, keep_vars)
        for name, parameter, store in _low_parameters(self):
            destination[prefix + name] = store.value(parameter) if keep_vars else store.read(parameter)

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
        low = _low_parameters(self)
        if low and local_metadata.get("assign_to_params_buffers", False):
            raise WeightsError(
                f"load_state_dict(assign=True) would replace the low parameters of {prefix.rstrip('.') or 'the model'} "
                "and leave their fp32 weights behind; load without assign"
            )
        original._load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, parameter, store in low:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                store.assign(parameter, value)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, max(int(protocol), 2))
        state = reduced[2] if len(reduced) > 2 else None
        precise = {name: store.value(parameter) for name, parameter, store in _low_parameters(self)}
        return (_rebuild, (original,), _Carried(state, precise) if precise else state, *reduced[3:])

    def setstate(self: nn.Module, state: Any) -> None:
        if not isinstance(state, _Carried):
            original.__setstate__(self, state)
            return
        original.__setstate__(self, state.state)
        for name, master in state.precise.items():
            parameter = self._parameters[name]
            assert parameter is not None
            parameter.data = master.data

    body: dict[str, Any] = {
        "_save_to_state_dict": save,
        "_load_from_state_dict": load,
        "__reduce_ex__": reduce_ex,
        "__setstate__": setstate,
        "_halfstep_original": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if original.forward is not nn.Module.forward:
        forward.__code__ = forward.__code__.replace()  # one of its own: Dynamo counts recompilations by code object
        body["forward"] = forward
    return type(original.__name__, (original,), body)


class _Carried(NamedTuple):
    """The state of a module with low parameters while it is copied or pickled.

    Attributes:
        state: what its class says; the low parameters in it are those an optimizer holds, and stay the same objects.
        precise: the fp32 values they take in the copy, by name.
    """

    state: Any
    precise: dict[str, nn.Parameter]


def _rebuild(original: type[nn.Module]) -> nn.Module:
    """Make the bare instance that pickle and deepcopy fill."""
    kind = bound_class(original)
    return kind.__new__(kind)


def _low_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter, WeightStore]]:
    """Return (name, parameter, store) for the parameters `module` itself owns that have precise weights behind them."""
    binding = module.__dict__.get(KEY)
    if binding is None or binding.store is None:
        return []
    store = binding.store
    store.heal()
    return [(n, p, store) for n, p in module._parameters.items() if p is not None and p in store]
