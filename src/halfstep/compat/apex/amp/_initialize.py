"""What `initialize` does to models and optimizers: checks, then a policy for each model and `hs.prepare`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.compat.apex.amp import amp
from halfstep.compat.apex.amp._amp_state import _amp_state
from halfstep.compat.apex.amp._process_optimizer import (
    ADDED,
    Session,
    adopt,
    attach,
    masters_of,
    process_optimizer,
    release_optimizer,
)
from halfstep.compat.apex.amp.handle import close_own_casts
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.compat.apex.parallel import LARC
from halfstep.compat.shared import LOW_NAMES
from halfstep.errors import BindError
from halfstep.formats import POLICY_DTYPES
from halfstep.torch_private.modules import BatchNormBase, forward_hooks, forward_pre_hooks, state_dict_hooks

__all__ = ["close_casts", "initialize"]

_initialized: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def close_casts() -> None:
    """Switch off the casts of an earlier O1 in this thread; another thread keeps its own."""
    close_own_casts()
    _amp_state.handle = None


def initialize(
    models: Any, optimizers: Any, properties: Any, loss_scalers: list[LossScaler],
    cast_model_outputs: torch.dtype | None, *, loud: bool,
) -> Any:  # fmt: skip
    """Prepare models and optimizers by `properties`, and return them in the shape they came in."""
    model_list = _listed(models, nn.Module, "models", "model")
    without = optimizers is None or (isinstance(optimizers, (list, tuple)) and not optimizers)
    optimizer_list = [] if without else _listed(optimizers, (Optimizer, LARC), "optimizers", "optimizer")
    _check_models(model_list)
    _check_foreign(model_list)
    if not _amp_state.allow_incoming_model_not_fp32:
        _check_params_fp32(model_list)
    inner = [getattr(optimizer, "optim", optimizer) for optimizer in optimizer_list]
    _check_optimizers(inner)

    session = Session(properties, loss_scalers, model_list)
    close_casts()
    policy = None
    if properties.patch_torch_functions:
        handle = amp.switch_on(properties.low, loss_scale=properties.loss_scale, verbose=loud)
        session.casts_off, session.casts_on, policy = handle._disable_casts, handle.casts_again, handle.policy
    for model in model_list:
        _release(model)
    done: list[Optimizer] = []
    try:
        for optimizer in inner:
            process_optimizer(optimizer, session)
            done.append(optimizer)
        for model in model_list:
            _prepare(model, inner, session, policy, loud=loud)
            _cast_at_the_door(model, properties, cast_model_outputs)
        for optimizer in inner:
            for group in optimizer.param_groups:
                adopt(optimizer, session, group["params"])
    except BaseException:
        close_casts()
        for model in model_list:
            _release(model)
        for optimizer in done:
            release_optimizer(optimizer)
        raise
    _amp_state.begin(properties, session if inner else None, loss_scalers)
    for model in model_list:
        _initialized.add(model)
        for scaler in loss_scalers:
            scaler.name_parameters(model.named_parameters())
    return models if without else (models, optimizers)


def _prepare(
    model: nn.Module, optimizers: list[Optimizer], session: Session, o1: hs.Policy | None, *, loud: bool
) -> None:
    properties = session.properties
    if o1 is not None:
        # A bound model's region would hide its operators from what prints them; and binding makes parameters fp32,
        # which O1 leaves as they are: a model with low ones is cast by this thread's region alone.
        if not loud and not any(p.dtype in LOW_NAMES for p in model.parameters()):
            attach(model, optimizers, o1)
        return
    low = properties.low
    if low is None:
        if properties.cast_model_type is torch.float32:
            model.to(torch.float32)
        return
    names = dict(model.named_parameters())
    attach(model, optimizers, cast_policy(model, properties, low))
    if properties.master_weights:
        session.masters |= masters_of(model, names)
    for module in model.modules():
        module.register_state_dict_post_hook(_state_in_fp32)


def cast_policy(model: nn.Module, properties: Any, low: torch.dtype) -> hs.Policy:
    """Return the policy of a model whose parameters are cast: O2 and O3 with their overrides.

    Normalisation layers are told one by one, because Apex keeps BatchNorm with weights in fp32 and nothing else.
    """
    keep = bool(properties.keep_batchnorm_fp32)
    rules = []
    for path, module in model.named_modules():
        kept = keep and isinstance(module, BatchNormBase) and module.affine
        if "Norm" in type(module).__name__ and not kept and not list(module.children()):
            rules.append(("".join(f"[{c}]" if c in "*?[" else c for c in path), "low"))  # a pattern for `path` alone
    return hs.Policy(
        name=f"apex {properties.opt_level} {LOW_NAMES[low]}",
        dtype=LOW_NAMES[low],
        params="low",
        master="master" if properties.master_weights else "none",
        table="mixed" if properties.opt_level == "O2" else "all-low",
        residual="low",
        inputs="low",
        outputs="fp32",
        loss="fp32" if properties.opt_level == "O2" else "keep",
        scale="none",
        modules=tuple(rules),
    )


def _state_in_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Turn low entries of a state_dict into fp32, as O2 and O3 promise."""
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in LOW_NAMES:
            state_dict[name] = value.float()


class _CastInputs:
    """A forward hook that casts inputs: floating tensors, and objects of other classes by their own `to`."""

    def __init__(self, dtype: torch.dtype, *, tensors: bool = True) -> None:
        self.dtype, self.tensors = dtype, tensors

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(_cast(a, self.dtype, tensors=self.tensors) for a in args), {
            name: _cast(value, self.dtype, tensors=self.tensors) for name, value in kwargs.items()
        }


class _CastOutputs:
    """A forward hook that casts outputs, as `_CastInputs` does inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self.dtype, tensors=True)


def _cast(value: Any, dtype: torch.dtype, *, tensors: bool) -> Any:
    """Return `value` cast; what holds nothing to cast is returned as it is."""
    if tensors:
        value = hs.trees.map_tensors(value, lambda t: t.to(dtype) if t.dtype in POLICY_DTYPES else t)
    return _cast_objects(value, dtype)


def _cast_objects(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with objects that have a `to` cast by it, as Apex does, also in lists, tuples and dicts."""
    if isinstance(value, (Tensor, nn.Module, type)):  # a module would be changed for good
        return value
    if isinstance(value, (list, tuple)):
        made = [_cast_objects(item, dtype) for item in value]
        if all(one is other for one, other in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if type(value) is dict:
        cast = {key: _cast_objects(item, dtype) for key, item in value.items()}
        return value if all(cast[key] is item for key, item in value.items()) else cast
    own = getattr(value, "to", None)
    return own(dtype) if callable(own) and not isinstance(value, Mapping) else value


def _cast_at_the_door(model: nn.Module, properties: Any, outputs: torch.dtype | None) -> None:
    """Cast where `model` is entered and left what its policy does not cast there."""
    cast = properties.cast_model_type
    if cast and not properties.patch_torch_functions:  # O0, O2, O3; False casts nothing
        own = properties.low is not None  # the policy casts tensors
        model.register_forward_pre_hook(_CastInputs(cast, tensors=not own), with_kwargs=True)
        outputs = outputs or (None if own else torch.float32)
    if outputs is not None:
        model.register_forward_hook(_CastOutputs(outputs))


def _release(model: nn.Module) -> None:
    """Take off what an earlier `initialize` did to `model`: its weights are fp32 again, bit for bit."""
    for module in model.modules():
        for hooks in (forward_pre_hooks(module), forward_hooks(module), state_dict_hooks(module)):
            for key, hook in list(hooks.items()):
                if isinstance(hook, (_CastInputs, _CastOutputs)) or hook is _state_in_fp32:
                    del hooks[key]
    _initialized.discard(model)
    with contextlib.suppress(BindError):  # not prepared
        hs.unprepare(model)


def _check_foreign(models: list[nn.Module]) -> None:
    """Refuse models that the user has given to hs.prepare."""
    for model in models:
        policy = hs.prepared_policy(model)
        if policy is not None and not policy.name.startswith("apex "):
            raise RuntimeError(
                f"amp.initialize: {type(model).__name__} was given to hs.prepare with policy {policy.name!r}; use one "
                "way of saying precision: leave amp.initialize out, or hs.unprepare(model) first"
            )


def _listed(value: Any, kind: Any, plural: str, one: str) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    if all(isinstance(item, kind) for item in items):
        return list(items)
    if one == "optimizer":
        items = [item for item in items if not isinstance(item, kind)]
        if isinstance(value, list) and type(items[0]).__name__ == "FP16_Optimizer":
            raise RuntimeError(
                f"amp.initialize: an incoming optimizer is an instance of {type(items[0])}, which keeps masters of its "
                "own; pass bare optimizers of PyTorch or of apex.optimizers"
            )
    remedy = f"; write amp.initialize(..., list({plural}))" if isinstance(value, (tuple, dict)) else ""
    if isinstance(value, dict):
        remedy = f"; write amp.initialize(..., list({plural}.values()))"
    raise TypeError(f"{plural} must be either a single {one} or a list of {plural}. It is {_described(value)}{remedy}")


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return f"a {type(value).__name__}"


def _check_models(models: list[nn.Module]) -> None:
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for model in models:
        if isinstance(model, wrappers):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            raise RuntimeError(
                f"Incoming model is an instance of {kind}: parallel wrappers come AFTER amp.initialize. Pass the model "
                "itself, then wrap what amp.initialize returns"
            )


def _check_params_fp32(models: list[nn.Module]) -> None:
    for model in models:
        entries: list[tuple[str, str, Tensor]] = [("param", n, p) for n, p in model.named_parameters()]
        entries += [("buffer", n, b) for n, b in model.named_buffers()]
        bound = model in _initialized  # its parameters are low because an earlier call made them so
        for what, name, tensor in entries:
            if tensor.dtype in LOW_NAMES and not (bound and what == "param"):
                raise RuntimeError(
                    f"Found {what} {name} with type {tensor.type()}, expected float32: amp.initialize makes models low "
                    "itself, at every opt_level, so leave out .half(). To start from a low checkpoint, use .float(), "
                    "or set amp._amp_state.allow_incoming_model_not_fp32 = True"
                )


def _check_optimizers(optimizers: list[Any]) -> None:
    seen: set[int] = set()
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_stash") or id(optimizer) in seen:
            raise RuntimeError(
                f"This {type(optimizer).__name__} was passed through amp.initialize before, which an optimizer can be "
                "only once; make a new one for another amp.initialize"
            )
        seen.add(id(optimizer))
        for name in ADDED:
            if hasattr(optimizer, name):
                raise RuntimeError(f"Incoming optimizer already has an attribute {name}, which amp uses; rename it")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.is_floating_point():
                    raise TypeError(
                        "amp steps parameters of floating formats (float32, float16, bfloat16) and "
                        f"{parameter.type()} is none; take it out of the optimizer"
                    )
