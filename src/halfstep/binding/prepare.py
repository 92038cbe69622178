"""prepare: bind a policy to models and optimizers; unprepare: take it off; edit_weights: change weights by hand.

Everything is checked (`bindable`) before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.binding.bind import Binding, bind, binding_of, is_bound, unbind
from halfstep.binding.bindable import check_model, check_optimizers, is_done, is_stateless, ruled
from halfstep.binding.fp8 import load
from halfstep.binding.fsdp import gather_as_others, has_run, reshard
from halfstep.binding.precise import replaced
from halfstep.binding.wrappers import unwrap, unwrap_optimizer
from halfstep.cast.state import forward_records
from halfstep.errors import BindError, WeightsError
from halfstep.formats import DTYPES, LOW_DTYPES, format_of
from halfstep.kernels.sharded import is_sharded, local, put
from halfstep.kernels.watched import unwatch_copies
from halfstep.optim import members
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of
from halfstep.scale.alarm import ExpectedScaler
from halfstep.scale.fused import keep_working_form
from halfstep.scale.scaler import GradScaler
from halfstep.snapshot import Snapshot, optimizer_state
from halfstep.torch_private.autograd import post_accumulate_grad_hooks
from halfstep.torch_private.modules import TorchLoss
from halfstep.weights import STRATEGIES, UnkeptWeights, WeightStore
from halfstep.weights.states import LowStates

PolicyLike = Policy | str | Path
ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def prepare(models: ModelT, *, policy: PolicyLike = ...) -> ModelT: ...
@overload
def prepare(
    models: ModelT, optimizers: OptimizerT, *, policy: PolicyLike = ...
) -> tuple[ModelT, OptimizerT, GradScaler]: ...
@overload
def prepare(models: Sequence[ModelT], *, policy: PolicyLike = ...) -> list[ModelT]: ...
@overload
def prepare(
    models: ModelT | Sequence[ModelT], optimizers: OptimizerT | Sequence[OptimizerT], *, policy: PolicyLike = ...
) -> tuple[Any, Any, GradScaler]: ...


def prepare(models: Any, optimizers: Any = None, *, policy: PolicyLike = "mixed") -> Any:
    """Bind `policy` to models, in place, and let optimizers step fp32 weights where the policy lowers parameters.

    A prepared model is in its policy's region whenever it is called: from any thread, under activation checkpointing,
    under `torch.compile`, after `copy.deepcopy` and `pickle`; its `state_dict()` is fp32. Outputs are fp32 where the
    policy's `outputs` says so. Call it before DistributedDataParallel and DataParallel. Where it lowers parameters,
    call it after fully_shard and parallelize_module, which replace them; `hs.shard` does both.

    Args:
        models: a model, or a list of models.
        optimizers: None, an optimizer or a list of optimizers over these models' parameters.
        policy: a preset's name, the path of a TOML file or a `Policy`.

    Returns:
        The same objects in the shape they came in: `models` without optimizers, else (models, optimizers, scaler).
        The scaler is off where the policy's `scale` is "none", so one training loop serves every policy.

    Raises:
        BindError: the model is already prepared with another policy, is wrapped or sharded already, has parameters that
            are not finite or that the low format cannot hold, or an optimizer holds parameters of no such model.
        PolicyError: the policy is wrong, or a module pattern matches nothing.
        UnbuiltError: the policy needs an engine that is not built yet; it is a NotImplementedError too.

    Examples:
        >>> model, optimizer, scaler = hs.prepare(model, optimizer, policy="O2")
        >>> loss = loss_fn(model, x, y)
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """
    prepared = prepare_with(models, optimizers, policy)
    if optimizers is not None and (scaler := prepared[2]).is_enabled():
        binding = binding_of(unwrap(_listed(models, nn.Module, "models")[0]))
        assert binding is not None
        if format_of(dtype := binding.policy.dtype).is_narrow:
            for optimizer in _listed(optimizers, Optimizer, "optimizers"):
                ExpectedScaler(scaler, unwrap_optimizer(optimizer), dtype)
    return prepared


def prepare_with(models: Any, optimizers: Any, policy: PolicyLike, *, one_pass: bool = False) -> Any:
    """Do what `prepare` does; `one_pass` as `resolve` takes it."""
    model_list = _listed(models, nn.Module, "models")
    if not model_list:
        raise BindError("hs.prepare: models is an empty list; give it the model, or a list of models")
    optimizer_list = [] if optimizers is None else _listed(optimizers, Optimizer, "optimizers")
    optimizer_list = [one for optimizer in optimizer_list for one in members(unwrap_optimizer(optimizer))]
    wanted = Policy.of(policy)
    devices = device_types_of(model_list)
    plans = [check_model(model, wanted, devices, one_pass=one_pass) for model in model_list]
    load(plans)
    concrete = plans[0].policy  # the same for all of them
    check_optimizers(model_list, optimizer_list, low=concrete.master != "none")

    fresh = [(unwrap(m), plan) for m, plan in zip(model_list, plans, strict=True) if not is_done(m, wanted, concrete)]
    trained = {id(p) for o in optimizer_list for group in o.param_groups for p in group["params"]}
    known = [s for m in model_list if (s := store_of(m)) is not None]
    for optimizer, before in product(optimizer_list, known):
        if id(optimizer) not in before.attached:
            before.refuse_rounded(optimizer)
    halved = [buffer for model, plan in fresh for buffer in _low_buffers(model, plan)]
    store = _lower(fresh, concrete, trained)  # raises before it changes anything
    for buffer in halved:
        buffer.data = buffer.data.float()
    for model, plan in fresh:
        unwatch_copies(model.parameters())
        _bind(model, wanted, devices, plan, store)
    for model in model_list:
        _attach(model, optimizer_list, low_states=concrete.state == "low")
    if optimizers is None:
        return models
    ExpectedScaler.drop(optimizer_list)
    scaler = GradScaler.from_policy(concrete.scale, concrete.dtype)
    for model in model_list:
        scaler.name_parameters(unwrap(model).named_parameters())
    return models, optimizers, scaler


def _listed(value: Any, kind: type, what: str) -> list[Any]:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            name = type(item).__name__
            raise BindError(f"hs.prepare: {what} must be a torch {kind.__name__} or a list of them, not {name}")
    return items


def _low_buffers(model: nn.Module, plan: Plan) -> list[Tensor]:
    """Return the low buffers of modules whose own parameters came low and become fp32, which the buffers follow."""
    wide = [p.name for p in plan.parameters if p.format == "fp32" and model.get_parameter(p.name).dtype in LOW_DTYPES]
    owners = [model.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in wide)]
    return [buffer for owner in owners for buffer in owner.buffers(recurse=False) if buffer.dtype in LOW_DTYPES]


def _lower(models: list[tuple[nn.Module, Plan]], concrete: Policy, trained: set[int]) -> WeightStore | None:
    """Bring parameters into the formats of the plans; return the fp32 values behind low ones, for all models at once.

    `trained`: ids of optimizers' parameters. Nothing is kept behind others that are frozen.
    """
    named = [(p.name, m.get_parameter(p.name), p) for m, plan in models for p in plan.parameters]
    wide = {id(parameter) for _, parameter, decision in named if not decision.low}
    low = [(name, parameter) for name, parameter, decision in named if decision.low and id(parameter) not in wide]
    store = None
    if low and concrete.master == "none":
        for _, parameter in low:
            put(parameter, local(Tensor.detach(parameter)).to(DTYPES[concrete.dtype]))
        UnkeptWeights(low, forward_records)
    elif low:
        frozen = {id(p) for _, p in low if not p.requires_grad and id(p) not in trained}
        store = STRATEGIES[concrete.master](low, DTYPES[concrete.dtype], frozen=frozen, records=forward_records)
        _accumulate_in(torch.float32 if concrete.grads == "fp32" else None, store.parameters())
    for _, parameter, decision in named:
        if decision.format == "fp32" and parameter.dtype in LOW_DTYPES:  # a low checkpoint under fp32 parameters
            put(parameter, local(Tensor.detach(parameter)).float())
    return store


def _accumulate_in(dtype: torch.dtype | None, parameters: Iterable[nn.Parameter]) -> None:
    """Make autograd accumulate the gradients of `parameters` in `dtype`; None: in the format they come in."""
    for parameter in parameters:
        if dtype is not None or parameter.grad_dtype is torch.float32:  # left by an earlier policy
            # torch refuses to set it beside a gradient of another format
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype or parameter.dtype)


def _bind(model: nn.Module, wanted: Policy, devices: tuple[str, ...], plan: Plan, store: WeightStore | None) -> None:
    sharded = any(is_sharded(p) for p in model.parameters())
    for path, module, rule, entrance in ruled(model, plan):
        known = binding_of(module)
        root = not path or (known is not None and known.root)
        guest = not root and is_stateless(module)
        binding = Binding(
            wanted,
            devices,
            concrete=plan.policy,
            path=path,
            root=root,
            rule=rule,
            entrance=entrance,
            store=store,
            guest=guest,
            alone=isinstance(module, TorchLoss),
        )
        binding.sharded = sharded
        if guest:
            if not binding.home and binding.recipe.mode is None:
                continue  # nothing to do in any region
            if known is not None and known.home is not None:
                if known.entrance and known.holders and not entrance:  # a rule of another model, for its own regions
                    known.holders.add(model)
                    continue
                binding.holders |= known.holders
            binding.holders.add(model)
        bind(module, binding)


def _attach(model: nn.Module, optimizers: list[Optimizer], *, low_states: bool) -> None:
    """Make a bound model a root, and make optimizers step its precise weights and keep `low_states`."""
    binding = binding_of(unwrap(model))
    assert binding is not None
    binding.become_root()  # also where it is a part of another that was bound before
    store = binding.store
    draws = None if store is None else store.draws
    if store is not None and isinstance(model, nn.parallel.DistributedDataParallel):
        store.broadcast(model)
    if low_states:
        LowStates.keep_low(model.parameters(), draws)
    own = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if store is not None:
            # also if the parameters of `model` in it are not low (yet)
            if id(optimizer) not in store.attached and any(id(p) in own for p in stepped):
                store.attach(optimizer)
            stepped = [p for p in stepped if p not in store]
        keep_working_form(optimizer, stepped)
        if low_states and LowStates.of(optimizer) is None:
            LowStates(optimizer, draws)


def _module(model: object, what: str) -> nn.Module:
    if isinstance(model, nn.Module):
        return unwrap(model)
    many = "; call it for each model" if isinstance(model, (list, tuple)) else ""
    raise BindError(f"{what} takes a model, a torch Module, not {type(model).__name__}{many}")


def store_of(model: nn.Module) -> WeightStore | None:
    """Return the precise weights behind a prepared model, or None."""
    binding = binding_of(unwrap(model))
    return None if binding is None else binding.store


def prepared_policy(model: nn.Module) -> Policy | None:
    """Return the policy that `model`, or a prepared model it is a part of, was prepared with; None if it is not.

    Examples:
        >>> hs.prepared_policy(hs.prepare(model, policy="mixed")).name
        'mixed'
    """
    binding = binding_of(_module(model, "hs.prepared_policy"))
    return None if binding is None else binding.wanted


def unprepare(model: ModelT) -> ModelT:
    """Take the binding off `model` and give it its fp32 weights back, in place; its optimizers step it as before.

    Raises:
        BindError: the model is not prepared.

    Examples:
        >>> model = hs.prepare(model, policy="O2")
        >>> hs.unprepare(model)[0].weight.dtype
        torch.float32
    """
    inner = _module(model, "hs.unprepare")
    binding, store = binding_of(inner), store_of(inner)
    if binding is None:
        raise BindError("hs.unprepare: this model is not prepared (pass the model that was given to hs.prepare)")
    reshard(inner)
    if binding.policy.params == "low" and has_run(inner):
        raise BindError(
            "hs.unprepare: fully_shard has fixed the low format of the parameters in the first forward pass; save "
            "model.state_dict(), which is fp32, and load it into a model that is not prepared"
        )
    modules = list(inner.modules())
    for module in modules:
        mine = binding_of(module)
        if mine is not None:
            mine.holders.difference_update(modules)
            if module is inner or not mine.holders:  # else a guest of another prepared model
                unbind(module)
    gather_as_others(inner)
    own = {id(p) for p in inner.parameters()}
    LowStates.release(own)
    ExpectedScaler.release(own)
    if store is not None:
        low = [p for p in inner.parameters() if p in store and binding.policy.grads == "fp32"]
        store.release(inner.parameters())
        _accumulate_in(None, low)
    else:
        UnkeptWeights.release(inner.parameters())
        for parameter in inner.parameters():
            if parameter.dtype in LOW_DTYPES and binding.policy.params == "low":
                put(parameter, local(Tensor.detach(parameter)).float())
    unwatch_copies(inner.parameters())
    return model


@contextmanager
def edit_weights(model: ModelT) -> Iterator[ModelT]:
    """Expose fp32 weights for changes by hand (re-initialisation, clipping, averaging) and write them back at the end.

    Inside, `model.parameters()` and ``module.weight`` are the fp32 values; changes made under `torch.no_grad` reach the
    low weights when the block ends, also when it ends with an exception. Without low parameters it is the model itself.
    Functions of a low weight and of its ``.data`` change its fp32 value outside of the block too; what writes by
    another way (`torch.ops`, a kernel, a collective) belongs here. The model's optimizers do not step inside.

    Raises:
        BindError: the model is not prepared.
        WeightsError: the block has left a weight that the low format cannot hold; that parameter is as it was before.

    Examples:
        >>> model, optimizer, scaler = hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype="bf16"))
        >>> with torch.no_grad(), hs.edit_weights(model):
        ...     model[0].weight *= 0.5  # the fp32 value; the low weight follows when the block ends
    """
    inner = _module(model, "hs.edit_weights")
    if binding_of(inner) is None:
        raise BindError("hs.edit_weights: this model is not prepared; edit its parameters directly")
    store = store_of(inner)
    if store is None:
        yield model
        return
    reshard(inner)
    places = [
        (module, name, parameter)
        for module in inner.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in store
    ]
    editing, frozen = store.editing, {id(p) for *_, p in places if store.is_frozen(p)}
    shown: list[tuple[str, nn.Parameter, nn.Parameter, int, torch.Tensor]] = []
    try:
        store.editing = editing or bool(places)
        for _, name, parameter in places:
            master = store.master(parameter)  # referenced in `shown`: some strategies make it only while it is
            shown.append((name, parameter, master, master._version, master.data))
        with replaced(places, {id(parameter): master for _, parameter, master, *_ in shown}):
            yield model
    finally:
        store.editing = editing
        resized, touched, same = "", [], []
        for name, parameter, master, version, values in shown:
            if master.shape != parameter.shape:
                shapes = tuple(parameter.shape), tuple(master.shape)
                resized = f"{name} of shape {shapes[0]} was given data of shape {shapes[1]}"
                master.data = values
            if master.device.type == "cpu" or master._version != version:  # on other devices, looking at values waits
                touched.append(parameter)
            if master._version == version and id(parameter) in frozen:
                same.append(parameter)
        lost = store.undo_beyond(touched)
        store.write_back(parameter for _, parameter, *_ in shown)
        store.freeze(same)
        if resized:
            raise WeightsError(
                f"{resized} in hs.edit_weights, which edits values: it stays as it was; hs.unprepare(model), "
                "resize it, build the optimizer anew, then hs.prepare"
            )
        if lost:
            raise WeightsError(f"{lost}; the block ends with what it was before, and the other weights as edited")


# ------------------------------------------------------------------ a step that cannot be built, or on trial


@contextmanager
def unchanged_on_failure(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Undo what a block does to `model` and `optimizer` if it raises; see `bound`."""
    snapshot = Snapshot(optimizer_state(optimizer), bound(model))
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


def bound(model: nn.Module) -> Callable[[], None]:
    """Note whether `model` is prepared; return a function that takes off what a training step makes of it.

    Low weights with nothing behind them (a policy's master="none", frozen parameters) come back rounded.
    """
    inner = unwrap(model)
    fresh = not is_bound(inner)
    gradients = [(p, p.grad_dtype, set(post_accumulate_grad_hooks(p))) for p in inner.parameters()]

    def undo() -> None:
        behind = {id(store): store for p in inner.parameters() if (store := WeightStore.behind(p)) is not None}
        if fresh and binding_of(inner) is not None:
            unprepare(inner)
        for store in behind.values() if fresh else ():  # also if preparing it was cut off
            store.release(inner.parameters())
        for parameter, dtype, hooks in gradients:
            if parameter.grad_dtype is not dtype:
                parameter.grad_dtype = dtype
            for key in set(post_accumulate_grad_hooks(parameter)) - hooks:
                del post_accumulate_grad_hooks(parameter)[key]

    return undo
