"""Binding: a policy that belongs to a model, so that every call of the model is in the policy's region.

A bound module keeps its class, and has methods of its own in its `__dict__`, which hide those of the class. Its
`forward` opens the region unless this thread is in it already; `state_dict`, `load_state_dict`, `copy.deepcopy` and
`pickle` see fp32 values (`precise`).

Note [instance methods]: each is a `MethodType` whose first argument is the `Binding`, which refers weakly to its
module: a strong reference would be a cycle, and the memory of a model would not be free when the model is deleted. So
such a method does not keep its model alive (`here` raises), and what copies the `__dict__` of a module has to bind the
copy, as copy, pickle and DataParallel do here. Python looks for `__copy__` in the class only: where that of the user's
class shares the `__dict__`, the copy has to be prepared anew.

Note [what is bound]: every module with a forward, also leaves of torch.nn: activation checkpointing recomputes any of
them alone, and users call a head or a layer by itself. Inside the region a bound forward costs one comparison.

Note [guests]: a module without parameters, buffers and children may serve several models, prepared or not: libraries
keep one GELU for a whole process. It follows the region it is called in and opens none of its own; a module rule for it
holds in the regions of the policy that has the rule. A loss opens a region where none is open, because its rules are
meant for calls outside the model.

Note [methods]: a public method of a user's class that is called with a tensor runs as forward does, but its inputs are
not cast: they may be anything (returns, old log-probabilities). Called without a tensor it may as well merge weights or
train, so no region is open, but what modules called from it give is cast, as if they were called from outside. Names
that base classes of libraries have are theirs to call, and generators and coroutines are suspended: these stay.

Note [tools]: transformers chooses a model's arguments by the names in its signature, and torch.fx makes placeholders
from them, so a bound forward has those of the user's. Two tools lose the region and are refused: `torch.jit.script`
compiles the source of the user's forward, and `torch.fx` runs the forward of the class and records operators only.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import lru_cache, partial, update_wrapper
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import nn
from torch.fx import GraphModule, Proxy
from torch.nn.utils.parametrize import is_parametrized

from halfstep.binding.fp8 import layer_of
from halfstep.binding.fsdp import refuse_own_loop
from halfstep.binding.precise import KEY, load, low_parameters, make_precise, save, saving
from halfstep.binding.wrappers import refuse_flat
from halfstep.cast.copies import Copies, low_forward
from halfstep.cast.regions.autocast import SUSPENDED
from halfstep.cast.regions.dtype_errors import EXPLAINED, explained
from halfstep.cast.regions.opening import abandon, close_recipe, open_recipe, opened
from halfstep.cast.regions.recompute import mark_checkpoints, saved_tensor_hooks
from halfstep.cast.rules.handlers import PRECISE, norm_forward
from halfstep.cast.rules.recipe import LAYERS, Recipe, call_traced, recipe_for, run_eagerly, unruled
from halfstep.cast.state import STATE, HandCode, in_forward
from halfstep.errors import BindError
from halfstep.formats import DTYPES, LOW_DTYPES, POLICY_DTYPES
from halfstep.kernels.watched import by_hand, owner_of, unwatch
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of, reduces_itself, resolved
from halfstep.policy.rule_kinds import MODULE_RULES, RULE_KINDS, for_every_kind
from halfstep.policy.scale_rule import ScaleRule
from halfstep.torch_private.compiler import DYNAMO, is_fx_symbolic_tracing, mark_constant
from halfstep.torch_private.devices import storage_key
from halfstep.torch_private.modes import (
    get_tracing_state,
    is_in_torch_dispatch_mode,
    len_torch_function_stack,
    pop_torch_function_stack,
    push_on_torch_function_stack,
)
from halfstep.torch_private.modules import APPLY, LOAD_STATE, SAVE_STATE, apply_of, get_name_of, replicate_of
from halfstep.torch_private.trees import tree_leaves
from halfstep.trees import map_tensors, tensors
from halfstep.weights import UnkeptWeights, WeightStore
from halfstep.weights.states import LowStates

NOWHERE = object()
"""A region that is never open."""

CALLED = object()
"""What `STATE.bound` is in a method of a root that was called from outside without a tensor; see note [methods]."""

FRAMEWORKS = ("torch.", "halfstep.", "lightning.", "pytorch_lightning.", "peft.")
"""Modules of base classes; see note [methods]."""

HUBS = ("transformers.", "diffusers.", "huggingface_hub.")
"""Modules of base classes, and of models, which have a forward."""


@dataclass(eq=False, repr=False)
class Binding:
    """What a bound module carries: its policy, the rule it runs under and where its precise weights are."""

    wanted: Policy  # the policy the model was prepared with
    device_types: tuple[str, ...]  # the devices its region enters
    _: KW_ONLY
    path: str  # dotted name of the module under the prepared root; "" is the root
    root: bool  # whether it is a model of its own; Dynamo guards on this: by path it would compile equal layers again
    rule: str = ""  # the module rule that applies here (one of `MODULE_RULES`)
    entrance: bool = False  # whether it is the outermost module that has its rule (under "fp32" it casts inputs)
    store: WeightStore | None = None  # the precise weights behind low parameters; not copied and not pickled
    guest: bool = False  # see note [guests]
    alone: bool = False  # whether a guest opens its region where none is open
    concrete: InitVar[Policy | None] = None  # becomes `policy`

    def __post_init__(self, concrete: Policy | None) -> None:
        # `wanted`, resolved for the first of the devices, with the master that is used
        self.policy = resolved(self.wanted, self.device_types[0]) if concrete is None else concrete
        self.holders = WeakSet[nn.Module]()  # the prepared models that a guest is a part of
        self.module_ref: Callable[[], nn.Module | None] = type(None)  # returns the module, None if it is gone
        self.eight_bits = layer_of(self.rule)  # the class whose forward it runs instead of its own
        self.astray = ""  # of a root that was moved where its policy means other formats: the error of a call
        self.methods = _Methods()  # the functions of the methods that its module has been given, by name
        self.enter_on(self.device_types)
        self.averages = reduces_itself(self.policy)  # whether only `TrainStep` averages gradients as the policy demands
        self.sharded = False  # whether parameters were sharded (DTensor) before the model was prepared
        self.fresh = True  # whether no forward pass has come here yet

    def enter_on(self, device_types: tuple[str, ...]) -> None:
        """Let the region of this module be one on `device_types`."""
        self.device_types = device_types
        self.recipe = module_recipe(self.wanted, device_types, self.rule)
        # the region in which its forward has nothing to do
        self.passes = NOWHERE if self.root or self.entrance else self.recipe
        self.home: frozenset[Any] | None = None  # the regions in which a guest follows its rule
        if self.guest:
            rules = {"", *(rule for _, rule in self.wanted.modules)} if self.entrance else ()
            self.home = frozenset(module_recipe(self.wanted, device_types, each) for each in rules)
            self.home |= {None} if self.alone else set()
        self.unruled: bool | None = None  # whether the region has no rule for what its forward calls; None: not known
        self.idle = False  # whether its forward needs nothing in the region: no mode taken off and no low weight
        self.held: list[dict[str, nn.Parameter | None]] | None = None  # of a root: the parameters of each module
        self.kept: Copies | None = None  # of a root: the low weights it is called with while gradients are off

    def become_root(self) -> None:
        """Let this module be a model of its own from now on."""
        self.root, self.passes, self.home, self.guest = True, NOWHERE, None, False
        if (module := self.module_ref()) is not None:
            ROOTS[id(module)] = module

    def here(self) -> nn.Module:
        """Return the module."""
        module = self.module_ref()
        if module is None:
            raise BindError(
                f"the prepared module {self.path or '<root>'!r} of this method is gone: a method of a prepared module "
                "does not keep it alive; keep a reference to the model as long as you call its methods"
            )
        return module

    def settings(self) -> dict[str, Any]:
        """Return the arguments, all plain values, of a binding for a copy of the module."""
        names = ("wanted", "device_types", "path", "root", "rule", "entrance", "guest", "alone")
        return {name: getattr(self, name) for name in names}

    def again(self, store: WeightStore | None = None) -> Binding:
        """Return a binding for a copy of the module."""
        return Binding(**self.settings(), store=store)

    def bind_late(self) -> None:
        """Bind the children that hold parameters and were made after the module was bound, if it is low."""
        if self.store is None:
            return
        for name, child in self.here()._modules.items():
            if child is None or binding_of(child) is not None or next(child.parameters(), None) is None:
                continue
            path = f"{self.path}.{name}".lstrip(".")
            given = {**self.settings(), "path": path, "root": False, "entrance": False, "guest": False}
            bind(child, Binding(**given, concrete=self.policy, store=self.store))

    def without(self, value: Any) -> Any:
        """Return `value` without what binding has put into it, if it is the `__dict__` of the module or a copy."""
        if type(value) is not dict or value.get(KEY) is not self:
            return value
        return {name: entry for name, entry in value.items() if entry is not self and not self.gave(name, entry)}

    def gave(self, name: str, entry: Any) -> bool:
        """Return whether `entry`, an attribute of the module with this name, is a method that binding gave it."""
        return isinstance(entry, MethodType) and entry.__self__ is self and name in self.methods

    def __reduce__(self) -> tuple[Any, ...]:
        return _held, (self.here(),)  # a method is copied or pickled by itself

    def __repr__(self) -> str:
        return f"Binding({self.path or '<root>'}, policy={self.policy.name!r}, rule={self.rule!r})"


TAKES_METHODS = torch.__version__ >= "2.13"
"""Whether Dynamo takes a function off a class that it has by a closure; that of 2.11 does not, 2.12 was not tried."""

IN_MODULES: Mapping[str, Mapping[str, Any]] = for_every_kind(
    "binding.bind",
    {
        "low": {"table": "all-low", "ops": (), "residual": "low", "loss": "fp32"},
        "fp32": {},  # the region is off
        "keep": {"table": "all-low", "ops": (("*", "keep"),), "residual": "fp32"},
        "mixed": {},
        **dict.fromkeys((rule for rule, kind in RULE_KINDS.items() if kind.recipe), {}),  # the region is off
    },
    MODULE_RULES,
)
"""Rule of a module -> the fields of the policy in its region that differ from the model's policy."""


@lru_cache(maxsize=256)
def module_recipe(policy: Policy, device_types: tuple[str, ...], rule: str) -> Recipe:
    """Return the region of a module under `rule`, which wins over operator rules; each policy has its own regions."""
    off = rule == "fp32" or bool(rule and RULE_KINDS[rule].recipe)
    return recipe_for(policy.replace(**IN_MODULES.get(rule, {})), device_types, enabled=not off)


def binding_of(module: nn.Module) -> Binding | None:
    """Return the binding of `module` itself, or None."""
    binding = module.__dict__.get(KEY)
    # a `__dict__` that was copied by hand has that of another module
    return binding if isinstance(binding, Binding) and binding.module_ref() is module else None


def is_bound(module: nn.Module) -> bool:
    """Return whether `module` or anything in it is bound; guests of other models do not count."""
    return any((binding := binding_of(m)) is not None and binding.home is None for m in module.modules())


# ------------------------------------------------------------------ the forward of a bound module


def _cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.dtype in POLICY_DTYPES else tensor)


def _casts(
    binding: Binding, args: Any, kwargs: Any, outer: Any, *, method: bool = False
) -> tuple[Any, Any, torch.dtype | None]:
    """Return the inputs as an entrance or a root casts them, and the dtype of its outputs (None: as they come)."""
    policy, outside = binding.policy, outer is None or outer is SUSPENDED or outer is CALLED
    # of a root in fp32 parameters that came low are fp32 now, and no operator casts
    if (binding.rule == "fp32" and binding.entrance) or (binding.root and policy.dtype == "fp32"):
        args, kwargs = _cast_floats(args, torch.float32), _cast_floats(kwargs, torch.float32)
    elif binding.eight_bits:
        low = DTYPES[policy.dtype]
        args, kwargs = _cast_floats(args, low), _cast_floats(kwargs, low)
    elif binding.root and policy.inputs == "low" and not method:
        for _, dtype, on in binding.recipe.devices:
            if on and dtype is not None:
                args, kwargs = _cast_floats(args, dtype), _cast_floats(kwargs, dtype)
                break
    cast = policy.outputs == "fp32" and outside and (binding.root or outer is CALLED)
    return args, kwargs, torch.float32 if cast else None


def _widened(module: nn.Module, result: Any) -> Any:
    """Return what a method of `module` gave with its low tensors in fp32, except those that are its weights."""
    if not any(tensor.dtype in LOW_DTYPES for tensor in tensors(result)):
        return result
    if torch.compiler.is_compiling():
        return _cast_floats(result, torch.float32)
    own = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return map_tensors(result, lambda t: t.float() if t.dtype in LOW_DTYPES and (_storage(t) or -1) not in own else t)


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies the memory of `tensor`; 0 where torch.func has wrapped it."""
    with suppress(NotImplementedError, RuntimeError):
        return int(storage_key(tensor.untyped_storage()))
    return 0


def _check_shards(binding: Binding, module: nn.Module) -> None:
    """Register for low states the parameters that fully_shard has put in place of the prepared ones."""
    policy = binding.policy
    if binding.sharded:
        return
    if binding.store is not None:
        raise BindError(
            f"policy {policy.name!r} has params='low', and the model was sharded after hs.prepare, which put "
            "parameters without fp32 values behind them in the place of the low ones; use hs.shard(model, policy), or "
            "call fully_shard first, then hs.prepare"
        )
    if policy.state == "low":
        LowStates.keep_low(module.parameters())


def _move(binding: Binding, *args: Any, **kwargs: Any) -> nn.Module:
    """Do what `_apply` of the class does, for ``cuda()`` and ``to()``, and let a root follow its parameters."""
    module = binding.here()
    moved: nn.Module = apply_of(type(module))(module, *args, **kwargs)
    if binding.root:
        _follow(binding, module)
    return moved


def _follow(binding: Binding, module: nn.Module) -> None:
    """Let the regions of a root be those of its parameters' devices.

    Where the policy means other formats there the next call is an error, and not the move: it may be on the way to a
    file.
    """
    there, binding.astray, binding.held = device_types_of([module]), "", None
    if set(there) <= set(binding.device_types):
        return
    lost = (binding.store is not None and p.dtype in LOW_DTYPES and p not in binding.store for p in module.parameters())
    before, after = (resolved(binding.wanted, devices[0]) for devices in (binding.device_types, there))
    if any(lost):
        binding.astray = (
            f"the model was prepared on {binding.device_types[0]!r}, and others without fp32 values behind them were "
            f"put in the place of its low parameters, on {there[0]!r}; place the model first, then call hs.prepare"
        )
    elif before != after:
        binding.astray = (
            f"the model was prepared on {binding.device_types[0]!r} with policy {binding.wanted.name!r} and moved to "
            f"{there[0]!r}, where that means other formats; move it first, then call hs.prepare (or hs.unprepare "
            f"it now, and prepare it anew). They differ:\n{before.diff(after)}"
        )
    else:
        for part in list(module.modules()):
            mine = binding_of(part)
            if mine is not None and mine.wanted == binding.wanted:
                mine.enter_on(there)
                bind(part, mine)


def _has_left(binding: Binding, module: nn.Module) -> bool:
    """Return whether a parameter of a root that was prepared on a CPU is elsewhere: a device map replaced it."""
    if binding.device_types != ("cpu",) or len_torch_function_stack():  # a mode would see each read of a parameter
        return False
    if binding.held is None:
        binding.held = [part._parameters for part in module.modules() if part._parameters]
    return not all(p is None or p.is_cpu for own in binding.held for p in own.values())


def _enter(
    binding: Binding, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, *, method: bool = False
) -> Any:
    state = STATE
    if type(code := state.bound) is HandCode:
        state.bound = code.bound
        try:
            by_hand(False)
            state.records = torch.is_grad_enabled()
            run = forward if method else partial(binding.methods["forward"], binding)
            return run(*((module, *args) if method else args), **kwargs)
        finally:
            by_hand(True)
            state.bound = code
    if binding.home is not None and state.bound not in binding.home:
        return forward(module, *args, **kwargs)
    store = binding.store
    if binding.root:
        if binding.astray or _has_left(binding, module):
            _follow(binding, module)
        if binding.astray:
            raise BindError(binding.astray)
        if hasattr(type(module), "unshard"):
            _check_shards(binding, module)
        elif binding.fresh or "_is_fsdp_managed_module" in module.__dict__:
            refuse_flat(module)
            binding.fresh = False
    if store is not None:
        store.before_forward(module)
    elif binding.root and binding.policy.params == "low":
        UnkeptWeights.before_forward(module)
    if binding.root:
        if state.statistics is not None:
            if id(module) not in state.statistics.models:
                state.statistics.add(module)
        elif binding.averages:
            refuse_own_loop(module, binding.policy)
            binding.averages = not binding.sharded  # of a sharded model, what is checked here stays
    inside = state.bound is binding.recipe or (state.bound is SUSPENDED and binding.policy.params == "fp32")
    args, kwargs, output = _casts(binding, args, kwargs, state.bound, method=method)
    if inside:
        if saved_tensor_hooks(True) is not None:
            mark_checkpoints()  # a checkpoint around it, which would find no region later
        result = forward(module, *args, **kwargs)
    else:
        if is_fx_symbolic_tracing():
            _refuse_fx(binding.recipe, module, (args, kwargs))
        region, failing, copies = opened(binding.recipe), True, state.copies
        low = binding.policy.params == "low"
        try:
            if low:
                by_hand(False)
                if not in_forward():
                    state.records = torch.is_grad_enabled()
            region.frame = open_recipe(binding.recipe, region)
            state.bound = binding.recipe
            if binding.root and binding.policy.params == "fp32" and copies is None:
                state.copies = _kept(binding, module)
            result = forward(module, *args, **kwargs)
            failing = False
        except EXPLAINED as error:
            if (better := explained(error, (args, kwargs))) is None:
                raise
            raise better from error
        finally:  # note [interrupts] of cast/regions/opening.py
            try:
                state.copies = copies
                close_recipe(region, failing=failing)
            finally:
                abandon(region.frame)
                if low and not in_forward():
                    by_hand(True)
    if output is None:
        return result
    return _widened(module, result) if method else _cast_floats(result, output)


def _kept(binding: Binding, module: nn.Module) -> Copies | None:
    """Return the low weights that a root keeps while it is called without gradients; a call with gradients drops them.

    On a CPU alone: elsewhere a change of a weight that leaves no trace cannot be seen without a wait. What records
    operators has to record their casts: dispatch modes, torch.jit.trace.
    """
    if torch.is_grad_enabled():
        binding.kept = None
        return None
    if binding.device_types != ("cpu",) or is_in_torch_dispatch_mode() or get_tracing_state():
        return None
    if binding.kept is None:
        binding.kept = Copies(module, module.parameters(), binding.recipe, sums=False, serving=True)
    return binding.kept


def _call(run: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a method of a root that was called from outside without a tensor; see note [methods]."""
    state = STATE
    try:
        state.bound = CALLED
        return run(module, *args, **kwargs)
    except EXPLAINED as error:
        if (better := explained(error)) is None:
            raise
        raise better from error
    finally:
        state.bound = None


run_eagerly(_enter, below=False)  # where Dynamo gives up on a bound forward, what is below may still be compiled
run_eagerly(_call, below=False)
run_eagerly(WeightStore.before_forward)


ROOTS = WeakValueDictionary[int, nn.Module]()  # prepared models by their ids


def _add_traced(root: int) -> None:
    """Report a model to the training step whose loss Dynamo traces; Dynamo calls this, with a constant: the id."""
    if STATE.statistics is not None and (model := ROOTS.get(root)) is not None:
        STATE.statistics.add(model)


mark_constant(_add_traced)


def _enter_compiled(
    binding: Binding, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, *, method: bool = False
) -> Any:
    """Do what `_enter` does, in constructs that Dynamo traces."""
    state = STATE
    outer = state.bound.bound if type(state.bound) is HandCode else state.bound
    if binding.home is not None and outer not in binding.home:
        return forward(module, *args, **kwargs)
    if binding.astray:
        raise BindError(binding.astray)
    if state.statistics is not None and binding.root:
        _add_traced(id(module))
    elif binding.averages and binding.root:
        refuse_own_loop(module, binding.policy)
    args, kwargs, output = _casts(binding, args, kwargs, outer, method=method)
    if outer is binding.recipe or (outer is SUSPENDED and binding.policy.params == "fp32"):
        result = forward(module, *args, **kwargs)
    else:
        state.bound = binding.recipe
        try:
            result = call_traced(binding.recipe, forward, (module, *args), kwargs)
        finally:
            state.bound = outer
    if output is None:
        return result
    return _widened(module, result) if method else _cast_floats(result, output)


# ------------------------------------------------------------------ methods of bound modules


class _Methods(dict[str, Callable[..., Any]]):
    """The methods that modules of one class get: Dynamo compiles a model again whose methods are other functions."""


METHODS = WeakValueDictionary[type[nn.Module], _Methods]()  # those in use


def _methods_of(original: type[nn.Module]) -> _Methods:
    methods = METHODS.get(original)
    if methods is None:
        methods = METHODS[original] = _Methods(COMMON)
        methods.update({name: _bound_method(original, name) for name in _own_methods(original)})
        if original.forward is not nn.Module.forward:
            methods["forward"] = _bound_forward(original)
        if callable(saver := getattr(original, "save_pretrained", None)):
            methods["save_pretrained"] = saving(saver)
    return methods


def bind(module: nn.Module, binding: Binding) -> None:
    """Make `binding` the one of `module`, and give it the methods of a bound module."""
    kind = binding.eight_bits or (type(module).__bases__[0] if is_parametrized(module) else type(module))
    binding.module_ref, binding.methods = ref(module), _methods_of(kind)
    keeps_mode = kind not in LAYERS and norm_forward(kind) is None
    binding.idle = low_forward(kind) is None and (binding.recipe.mode is None or keeps_mode)
    if binding.root:
        ROOTS[id(module)] = module
    if binding.rule == "fp32" and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        PRECISE.add(module)
    own = module.__dict__
    own[KEY] = binding
    for name, function in binding.methods.items():
        if name not in own or isinstance(getattr(own[name], "__self__", None), Binding):  # else the user has set it
            own[name] = MethodType(function, binding)
    if isinstance(module, GraphModule):  # torch.fx makes a class for each
        setattr(type(module), "__copy__", _copy_graph)  # noqa: B010  # mypy forbids to assign methods


def unbind(module: nn.Module) -> None:
    """Take the binding off `module`; a method that was read before runs as the user wrote it."""
    binding: Binding = module.__dict__.pop(KEY)
    PRECISE.discard(module)
    for name, value in list(module.__dict__.items()):
        if binding.gave(name, value):
            del module.__dict__[name]
    if vars(type(module)).get("__copy__") is _copy_graph:
        delattr(type(module), "__copy__")
    binding.home, binding.passes, binding.idle = frozenset(), NOWHERE, False


def _bound_forward(original: type[nn.Module]) -> Callable[..., Any]:
    layer, norm = low_forward(original), norm_forward(original)
    own = _plain_forward(original)
    traced = own.forward  # see `TAKES_METHODS`

    def forward(binding: Binding, *args: Any, **kwargs: Any) -> Any:
        try:
            self = binding.module_ref()
        except AttributeError:  # accelerate makes a method of a module of this function
            self, binding = binding, binding.__dict__[KEY]  # type: ignore[assignment]
        if self is None:
            self = binding.here()
        state = STATE
        if binding.idle and state.bound is binding.passes and (TAKES_METHODS or not torch.compiler.is_compiling()):
            return own.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if state.bound is binding.passes:
                return traced(self, *args, **kwargs)
            return _enter_compiled(binding, traced, self, args, kwargs)
        mode, run = binding.recipe.mode, own.forward
        if mode is not None and binding.unruled is None:
            binding.unruled = unruled(self, original, mode.ruled)
        free = mode is None or binding.unruled
        if state.bound is binding.recipe and state.mode is not mode:  # in a region that was opened inside
            free = False
        if free and layer is not None and len(args) == 1 and not kwargs:
            run = layer
        if norm is not None and not free and mode is state.mode and mode is not None and state.bound is binding.passes:
            if len(args) == 1 and not kwargs and len_torch_function_stack() == 1:
                pop_torch_function_stack()
                try:
                    found = norm(self, args[0], mode)
                finally:
                    push_on_torch_function_stack(mode)
                if found is not None:
                    return found
        if state.bound is not binding.passes:
            return _enter(binding, run, self, args, kwargs)
        if not free or mode is None or len_torch_function_stack() != 1:  # other modes get every operator
            return run(self, *args, **kwargs)
        pop_torch_function_stack()
        try:
            return run(self, *args, **kwargs)
        finally:
            push_on_torch_function_stack(mode)

    forward.__code__ = forward.__code__.replace()  # one of its own: Dynamo counts recompilations by code object
    return _presented_as(forward, original.forward)


def _plain_forward(original: type[nn.Module]) -> Any:
    """Return what has the forward of `original` as a function of (module, ...), also of a static method or object."""
    found: Any = inspect.getattr_static(original, "forward")
    if isinstance(found, FunctionType):
        return original  # looked up at each call: a forward that its class is given later counts

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (found.__get__(module, original) if hasattr(found, "__get__") else found)(*args, **kwargs)

    return SimpleNamespace(forward=forward)


def _own_methods(original: type[nn.Module]) -> Iterator[str]:
    """Iterate over the names of the methods of `original` that are bound beside forward; see note [methods]."""
    lent, own = set[str](), dict[str, Any]()
    for kind in reversed(original.__mro__[:-1]):
        origin = f"{kind.__module__}."
        hub = origin.startswith(HUBS) and getattr(kind, "forward", nn.Module.forward) is nn.Module.forward
        (lent if hub or origin.startswith(FRAMEWORKS) else own).update(vars(kind))
    for name in own.keys() - lent - {"save_pretrained"}:
        value = inspect.getattr_static(original, name)
        if not name.startswith("_") and isinstance(value, FunctionType):
            kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
            if not any(suspends(value) or suspends(inspect.unwrap(value)) for suspends in kinds):
                yield name


def _bound_method(original: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the method `name` of bound modules of class `original`; see note [methods]."""
    traced = getattr(original, name)  # as in `_bound_forward`

    def method(binding: Binding, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        run = traced if compiling else getattr(original, name)  # a method that its class is given later counts
        self, outer = binding.here(), STATE.bound
        if outer is binding.passes:
            return run(self, *args, **kwargs)
        if tensors((args, kwargs)):
            return (_enter_compiled if compiling else _enter)(binding, run, self, args, kwargs, method=True)
        if outer is not None or not binding.root or compiling:
            return run(self, *args, **kwargs)
        result = _call(run, self, args, kwargs)
        return _widened(self, result) if binding.policy.outputs == "fp32" else result

    method.__code__ = method.__code__.replace()  # as in `_bound_forward`
    return _presented_as(method, getattr(original, name))


# ------------------------------------------------------------------ what tools see of a bound forward


def _presented_as(bound: Callable[..., Any], own: Any) -> Callable[..., Any]:
    """Give `bound` the name, docstring, annotations, signature and attributes of `own`, the user's function."""
    update_wrapper(bound, own, updated=())
    noted = getattr(own, "__dict__", {})
    if not any(name.startswith(DYNAMO) for name in noted):  # else torch.compile would run that one in place of ours
        for name, value in noted.items():
            bound.__dict__.setdefault(name, value)
    with suppress(ValueError, TypeError):  # a builtin function may have none
        bound.__dict__["__signature__"] = inspect.signature(own)  # inspect.getfullargspec does not look further
    return bound


def _refuse_fx(recipe: Recipe, module: nn.Module, tree: Any) -> None:
    """Refuse to be traced by torch.fx in the region of `recipe`, unless the region is off or `make_fx` traces."""
    if any(isinstance(leaf, Proxy) for leaf in tree_leaves(tree)):
        _refuse_region(recipe)
        return
    for parameter in module.parameters():
        if (owner := owner_of(parameter)) is not None:
            unwatch(parameter, owner)


def _refuse_region(recipe: Recipe) -> None:
    """Refuse to be traced by torch.fx in the region of `recipe`, unless that is off."""
    if recipe.mode is not None or any(on for _, _, on in recipe.devices):
        raise BindError(
            f"torch.fx.symbolic_trace records operators and not the region of policy {recipe.policy.name!r}, so the "
            "graph would compute in other formats; hs.unprepare(model), trace it, then hs.prepare the graph "
            "(torch.export and torch.compile take a prepared model as it is)"
        )


def _refuse_script(binding: Binding) -> nn.Module:
    """Refuse `torch.jit.script`, which calls this."""
    raise BindError(
        f"torch.jit.script compiles the source of forward, without the region of policy {binding.policy.name!r}; "
        "script a copy that is not prepared, hs.unprepare(copy.deepcopy(model)), or use torch.jit.trace or "
        "torch.export, which see the casts of a prepared model"
    )


def _name_for_fx(binding: Binding) -> str:
    """Return the name of the class; torch.fx asks the module that it is about to trace for it: note [tools]."""
    module = binding.here()
    if is_fx_symbolic_tracing() and not is_in_torch_dispatch_mode():
        _refuse_region(binding.recipe)
    return str(get_name_of(type(module))(module))


# ------------------------------------------------------------------ parts made later, copies, pickles


class _Carried(NamedTuple):
    """The state of a bound module while it is copied; the low parameters in it, by name, take the `precise` values."""

    state: Any
    precise: dict[str, nn.Parameter]


def _reduce(binding: Binding, protocol: Any) -> Any:
    """Return what pickle and copy take of a module: what its class gives them, less what binding has added."""
    module = binding.here()
    binding.bind_late()
    reduced: list[Any] = [*type(module).__reduce_ex__(module, max(int(protocol), 2)), None]
    make, args, state, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        make, args = None, args[:1]
    precise = {name: store.value(parameter) for name, parameter, store in low_parameters(module)}
    if isinstance(state, tuple):
        state = tuple(map(binding.without, state))
    given = (binding.settings(), make, *map(binding.without, args))
    return _rebuild, given, _Carried(binding.without(state), precise), *rest[:-1]


def _rebuild(settings: dict[str, Any], make: Callable[..., Any] | None, *args: Any) -> nn.Module:
    """Make the bound instance that `_set_state` fills."""
    module: nn.Module = args[0].__new__(args[0]) if make is None else make(*args)
    bind(module, Binding(**settings))
    return module


def _set_state(binding: Binding, carried: Any) -> None:
    """Fill a module that `_rebuild` has made."""
    module = binding.here()
    state, precise = carried if isinstance(carried, _Carried) else (carried, {})
    if state is not None:
        type(module).__setstate__(module, state)
    binding.store = next(filter(None, map(WeightStore.behind, module.parameters())), None)
    if binding.store is None:  # else a shallow copy, which shares the low parameters
        make_precise(module, precise)
    bind(module, binding)  # the class may have replaced the whole `__dict__`


def _deepcopy(binding: Binding, memo: dict[int, Any]) -> Any:
    """Copy a module as its class does, bind the copy and give it the fp32 values; see note [copies] of `precise`."""
    module = binding.here()
    binding.bind_late()
    own = getattr(type(module), "__deepcopy__", None)
    if own is None:
        make, args, *state = _reduce(binding, 4)
        twin = memo[id(module)] = make(*copy.deepcopy(args, memo))
        twin.__setstate__(copy.deepcopy(state[0], memo))
        return twin
    memo[id(binding)] = binding.again()
    twin = own(module, memo)
    if twin is not module and isinstance(twin, nn.Module):
        make_precise(twin, {name: store.value(parameter) for name, parameter, store in low_parameters(module)})
        bind(twin, memo[id(binding)])
    return twin


def _copy_graph(module: GraphModule) -> Any:
    """Copy a bound GraphModule as torch does, and bind the copy; they have the same parameters."""
    twin: Any = super(type(module), module).__copy__()  # type: ignore[misc]
    binding = binding_of(module)
    if binding is not None:
        bind(twin, binding.again(binding.store))
    return twin


def _replicate(binding: Binding) -> Any:
    module: Any = binding.here()
    twin = replicate_of(type(module))(module)
    bind(twin, binding.again(binding.store))
    return twin


class _Held(Binding):
    """The binding of a method that was copied or pickled by itself, which keeps its module alive."""

    def __getattr__(self, name: str) -> Any:
        return MethodType(vars(self.here())[name].__func__, self)


def _held(module: nn.Module) -> Any:
    """Return what has the methods of `module`, bound or not, and keeps it alive."""
    binding = module.__dict__.get(KEY)
    if binding is None:
        return module
    held = _Held.__new__(_Held)
    held.__dict__.update(binding.__dict__, module_ref=lambda: module)
    return held


COMMON: dict[str, Callable[..., Any]] = {
    SAVE_STATE: save,
    LOAD_STATE: load,
    "__reduce_ex__": _reduce,
    "__setstate__": _set_state,
    "__deepcopy__": _deepcopy,
    "_replicate_for_data_parallel": _replicate,
    "__prepare_scriptable__": _refuse_script,
    "_get_name": _name_for_fx,
    APPLY: _move,
}
"""The methods that all bound modules get, by name; the first argument of each is the `Binding`."""

# a script that loads a whole model with ``weights_only=True`` allows its own classes; these are what binding adds
torch.serialization.add_safe_globals([_rebuild, _Carried, Policy, ScaleRule])
