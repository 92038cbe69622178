"""initialize: options by opt_level, overrides and conflicts; a policy for each model and `hs.prepare`; states."""

import contextlib
import re
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.compat.apex.amp import _process_optimizer as process
from halfstep.compat.apex.amp._process_optimizer import _amp_state, maybe_print, warn_or_err
from halfstep.compat.apex.amp.handle import AmpHandle, close_casts
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.compat.apex.parallel import LARC
from halfstep.compat.shared import LOW_NAMES
from halfstep.torch_private.modules import BatchNormBase, forward_hooks, forward_pre_hooks, state_dict_hooks

_WORDS = {"True": True, "False": False}  # text from a command line, where "False" would count as true
_SWITCHES = {
    "keep_batchnorm_fp32": AssertionError, "patch_torch_functions": ValueError, "master_weights": ValueError,
}  # fmt: skip
"""Option that is True, False or None -> the error of another value, as in Apex."""

_WITH_O1: dict[str, tuple[tuple[Any, ...], str]] = {
    "cast_model_type": (
        (None, False, torch.float32, torch.bfloat16),
        "opt_level='O1' casts around functions and leaves the model's weights in fp32. To cast the model, use "
        "opt_level='O2' or 'O3'; O1 takes torch.bfloat16 alone, as the format of its casts",
    ),
    "keep_batchnorm_fp32": (
        (None,),
        "with opt_level='O1' batchnorm's weights are fp32 as all others are, so keep_batchnorm_fp32 should be None",
    ),
    "master_weights": (
        (None,),
        "master_weights make no sense with opt_level='O1', under which the model's weights are fp32 themselves",
    ),
}
"""Option -> the values that go with O1, and why no others do."""


@dataclass
class Properties:
    """The options in force; an assignment is checked against the others."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: Any = None
    patch_torch_functions: Any = False
    keep_batchnorm_fp32: Any = None
    master_weights: Any = None
    loss_scale: Any = 1.0

    options = property(vars, doc="The options by name, in the order they are printed.")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Properties has no option {name!r}; it has {', '.join(self.options)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(Properties, name):
            self.__getattr__(name)
        allowed, reason = _WITH_O1.get(name, ((value,), ""))
        if self.opt_level == "O1" and value not in allowed:
            warn_or_err(f"{reason}. {name} was {value}")
        self.options[name] = self._checked(name, value)

    def _update_options_dict(self, new_options: Mapping[str, Any]) -> None:
        """Set several options without checks; an unknown one is an error."""
        for name, value in new_options.items():
            if name not in self.options:
                raise ValueError(f"Tried to set unexpected option {name}; there are {', '.join(self.options)}")
            self.options[name] = value

    @property
    def low(self) -> torch.dtype | None:
        """The low format, or None where everything is fp32."""
        if self.patch_torch_functions:
            return torch.bfloat16 if self.cast_model_type is torch.bfloat16 else torch.float16
        kind = self.cast_model_type
        return kind if isinstance(kind, torch.dtype) and kind is not torch.float32 else None

    def _checked(self, name: str, value: Any) -> Any:
        found = _WORDS.get(value, value) if isinstance(value, str) else value
        if name == "cast_model_type":
            if not any(value is kind for kind in (None, False, torch.float32, torch.float16, torch.bfloat16)):
                raise ValueError(
                    f"cast_model_type={value!r}; expected torch.float16, torch.bfloat16, torch.float32, or False to "
                    "leave the model's parameters as they are"
                )
        elif name in _SWITCHES:
            if found not in (True, False, None):
                raise _SWITCHES[name](f"{name}={value!r}; expected True, False, their text 'True' or 'False', or None")
            if name == "patch_torch_functions" and found and self.opt_level != "O1":
                warn_or_err(f"{name}=True comes with opt_level='O1' and cannot be set at {self.opt_level}")
            return found
        elif name == "loss_scale" and value != "dynamic":
            try:
                return float(value)
            except (TypeError, ValueError):
                raise ValueError(f"loss_scale={value!r}; expected 'dynamic', or a number or text of one") from None
        return value


class Level(NamedTuple):
    """What an opt_level means."""

    brief: str  # a line about it
    defaults: tuple[Any, ...]  # of the options


O0 = Level("O0: everything in fp32.\n", (torch.float32, False, None, False, 1.0))
O1 = Level("O1: casts around functions and methods of PyTorch.\n", (None, True, None, None, "dynamic"))
O2 = Level(
    "O2: a low model, with batchnorm and master weights in fp32.\n", (torch.float16, False, True, True, "dynamic")
)
O3 = Level("O3: everything low.\n", (torch.float16, False, False, False, 1.0))

_OPTIONS = tuple(Properties().options)[2:]  # those that an argument sets
opt_levels = {"O0": O0, "O1": O1, "O2": O2, "O3": O3}


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", cast_model_type: Any = None,
    patch_torch_functions: bool | None = None, keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None, loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None, num_losses: int = 1, verbosity: int = 1,
    min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
) -> Any:  # fmt: skip
    """Prepare models and optimizers, in place, as `opt_level` and the overrides say.

    Call it before DistributedDataParallel and DataParallel. It may be called again for other models and optimizers, or
    for the same model with a new optimizer: earlier optimizers keep their own scalers, which `state_dict` holds too. If
    it raises, nothing changed.

    Args:
        models: a model or a list of models.
        optimizers: None, an optimizer or a list.
        enabled: False returns everything as it is, and `scale_loss` yields the loss itself.
        opt_level: "O0", "O1", "O2" or "O3".
        cast_model_type: format of the model's parameters; torch.bfloat16 works at every level, in O1 as the format of
            the casts. False leaves parameters as they are.
        patch_torch_functions: the casts of O1; only O1 may set it.
        keep_batchnorm_fp32: BatchNorm's parameters stay fp32 (a bool, or "True" or "False").
        master_weights: optimizers step fp32 copies of low parameters.
        loss_scale: "dynamic", or a number or text of one.
        cast_model_outputs: format of the models' floating outputs; by default fp32 where the model is cast.
        num_losses: how many scalers to make; `scale_loss` chooses by ``loss_id``.
        verbosity: 0 prints nothing; 2 prints every cast of O1.
        min_loss_scale: floor of dynamic scales; by default 2**-14.
        max_loss_scale: their ceiling.

    Returns:
        What came in, in the same shape: models alone without optimizers.

    Raises:
        RuntimeError: an unknown level, options that contradict each other, a model wrapped too early or already low,
            an optimizer that was passed before.
        ValueError: an argument of another kind, or a floor above the ceiling of the scale.
        TypeError: models or optimizers of another kind.
    """
    if not enabled:
        close_casts()
        _amp_state.verbosity = verbosity
        _amp_state.begin(Properties(), None, [])
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("amp.initialize needs cuDNN: set torch.backends.cudnn.enabled = True before it")
    if opt_level not in opt_levels:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}; there are 'O0', 'O1', 'O2' and 'O3', each with the letter O "
            "in front and not the digit zero"
        )
    properties, level = Properties(), opt_levels[opt_level]
    properties._update_options_dict({"enabled": True, "opt_level": opt_level})
    properties._update_options_dict(dict(zip(_OPTIONS, level.defaults, strict=True)))
    defaults = dict(properties.options)
    given = (cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale)
    for name, value in zip(_OPTIONS, given, strict=True):
        if value is not None:
            setattr(properties, name, value)
    _check_rest(num_losses, cast_model_outputs, min_loss_scale, max_loss_scale)
    scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    result = _apply(models, optimizers, properties, scalers, cast_model_outputs, loud=verbosity > 1)
    _amp_state.verbosity = verbosity
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    maybe_print(f"Selected optimization level {level.brief}", True)
    _print_options("Defaults for this optimization level are:", defaults)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    _print_options("After processing overrides, optimization options are:", properties.options)
    return result


def _check_rest(num_losses: Any, outputs: Any, floor: float | None, ceiling: float) -> None:
    """Refuse what would fail later, in the first `scale_loss` or forward pass."""
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses={num_losses!r}; expected a whole number from 1")
    if outputs is not None and not (isinstance(outputs, torch.dtype) and outputs.is_floating_point):
        raise ValueError(f"cast_model_outputs={outputs!r}; expected None or a floating format such as torch.float32")
    for name, value in (("min_loss_scale", floor), ("max_loss_scale", ceiling)):
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or (value is None and name[1] == "i")):
            raise ValueError(f"{name}={value!r} is a {type(value).__name__}; expected a number")
    if floor is not None and floor > ceiling:
        raise ValueError(f"min_loss_scale={floor!r} is above max_loss_scale={ceiling!r}; change one")


def _print_options(title: str, options: Mapping[str, Any]) -> None:
    maybe_print(title, True)
    for name, value in options.items():
        maybe_print(f"{name:22} : {value}", True)


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return the loss scales: ``loss_scaler0 -> {"loss_scale": ..., "unskipped": ...}`` and so on.

    After several calls of `initialize` for other models it holds the scalers of all that are in use, those of the last
    call first. With ``initialize(enabled=False)`` alone it is what was loaded last, so that a checkpoint survives a run
    without amp.

    Args:
        destination: where to put them; by default a new OrderedDict.
    """
    if destination is None:
        destination = OrderedDict()
    if _amp_state.opt_properties is None:
        raise RuntimeError("amp.state_dict() was called before amp.initialize(...), so there is nothing to save yet")
    destination.update(_amp_state.loaded)
    for index, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned; call it after `initialize` with the same arguments.

    Raises:
        RuntimeError: called before `initialize`, or keys that are not loss scalers; nothing is loaded then.
    """
    if _amp_state.opt_properties is None:
        raise RuntimeError(
            "amp.load_state_dict(...) was called before amp.initialize(...), which would start with fresh loss scales; "
            "call initialize first, then restore model, optimizer and amp"
        )
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"amp.load_state_dict({state_dict!r}): pass what amp.state_dict() returned")
    unexpected = [key for key in state_dict if not re.fullmatch(r"loss_scaler\d+", str(key))]
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"amp.load_state_dict: unexpected key(s) in state_dict: {keys}; pass what amp.state_dict() returned, often "
            "checkpoint['amp']"
        )
    for key, saved in state_dict.items():
        if not isinstance(saved, Mapping) or not {"loss_scale", "unskipped"} <= set(saved):
            raise RuntimeError(f"amp.load_state_dict: {key} is {saved!r}; expected its 'loss_scale' and 'unskipped'")
    scalers = _amp_state.loss_scalers
    if not scalers:  # amp is off
        _amp_state.loaded = {key: dict(value) for key, value in state_dict.items()}
        return
    if len(state_dict) != len(scalers):
        print(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for session in _amp_state.sessions:  # those of models that the state does not know: an earlier run's, mostly
        session.in_use = any(scaler in scalers[: len(state_dict)] for scaler in session.loss_scalers)
    for key, saved in state_dict.items():
        index = int(key.removeprefix("loss_scaler"))
        if index >= len(scalers):
            print(f"Skipping loss_scaler[{index}], since num_losses was set to {len(scalers)}")
            continue
        scalers[index]._loss_scale = saved["loss_scale"]
        scalers[index]._unskipped = saved["unskipped"]


# ---------------------------------------------------------------------- models and optimizers


def _apply(
    models: Any, optimizers: Any, properties: Any, loss_scalers: list[LossScaler],
    cast_model_outputs: torch.dtype | None, *, loud: bool,
) -> Any:  # fmt: skip
    model_list = _listed(models, nn.Module, "models", "model")
    without = optimizers is None or (isinstance(optimizers, (list, tuple)) and not optimizers)
    optimizer_list = [] if without else _listed(optimizers, (Optimizer, LARC), "optimizers", "optimizer")
    for model in model_list:
        _check_model(model)
    inner = [getattr(optimizer, "optim", optimizer) for optimizer in optimizer_list]
    _check_optimizers(inner)

    session = process.Session(properties, loss_scalers, model_list)
    close_casts()
    policy = None
    if properties.patch_torch_functions:
        handle = AmpHandle(properties.loss_scale, verbose=loud, low=properties.low)
        session.casts_off, policy = handle._disable_casts, handle.policy
        session.casts_on = partial(hs.autocast, policy=policy, cache_enabled=False)  # where casts_off has effect
    for model in model_list:
        _release(model)
    with contextlib.ExitStack() as undo:
        undo.callback(close_casts)
        for model in model_list:
            undo.callback(_release, model)
        for optimizer in inner:
            process.process_optimizer(optimizer, session)
            undo.callback(process.release_optimizer, optimizer)
        for model in model_list:
            _prepare(model, inner, session, policy, loud=loud)
            _cast_at_the_door(model, properties, cast_model_outputs)
        for optimizer in inner:
            for group in optimizer.param_groups:
                process.adopt(optimizer, session, group["params"])
        undo.pop_all()
    _amp_state.begin(properties, session if inner else None, loss_scalers)
    for model in model_list:
        for scaler in loss_scalers:
            scaler._scaler.name_parameters(model.named_parameters())
    return models if without else (models, optimizers)


def _prepare(
    model: nn.Module, optimizers: list[Optimizer], session: process.Session, o1: hs.Policy | None, *, loud: bool
) -> None:
    properties = session.properties
    if o1 is not None:
        # A bound model's region would hide its operators from what prints them; and binding makes parameters fp32,
        # which O1 leaves as they are: a model with low ones is cast by this thread's region alone.
        if not loud and not any(p.dtype in LOW_NAMES for p in model.parameters()):
            process.attach(model, optimizers, o1)
        return
    low = properties.low
    if low is None:
        if properties.cast_model_type is torch.float32:
            model.to(torch.float32)
        return
    names = dict(model.named_parameters())
    process.attach(model, optimizers, cast_policy(model, properties, low))
    if properties.master_weights:
        session.masters |= process.masters_of(model, names)
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
    level, name = properties.opt_level, LOW_NAMES[low]
    master = "master" if properties.master_weights else "none"
    fields = {"norms": "fp32", "outputs": "fp32", "scale": "none", "modules": tuple(rules)}
    preset = "O2" if level == "O2" else "O3"
    return hs.Policy.of(preset, name=f"apex {level} {name}", dtype=name, master=master, **fields)


def _state_in_fp32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Turn low entries of a state_dict into fp32, as O2 and O3 promise."""
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in LOW_NAMES:
            state_dict[name] = value.float()


class _Cast:
    """A forward hook that casts inputs or outputs: floating tensors, and objects of other classes by their own `to`."""

    def __init__(self, dtype: torch.dtype, *, tensors: bool = True) -> None:
        self.dtype, self.tensors = dtype, tensors

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(map(self.cast, args)), {name: self.cast(value) for name, value in kwargs.items()}

    def outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.cast(output)

    def cast(self, value: Any) -> Any:
        """Return `value` cast, objects by their `to` as Apex does; what holds nothing to cast is returned as it is."""
        if isinstance(value, Tensor):
            return value.to(self.dtype) if self.tensors and value.dtype in hs.formats.POLICY_DTYPES else value
        if isinstance(value, (nn.Module, type)):  # a module would be changed for good
            return value
        if (opened := hs.trees.opened(value)) is not None:
            items = [item for _, item in opened[0]]
            made = list(map(self.cast, items))
            if not all(map(is_, made, items)):
                value = opened[1](made)
        own = getattr(value, "to", None)
        return own(self.dtype) if callable(own) and not isinstance(value, (list, tuple, Mapping)) else value


def _cast_at_the_door(model: nn.Module, properties: Any, outputs: torch.dtype | None) -> None:
    """Cast where `model` is entered and left what its policy does not cast there."""
    cast = properties.cast_model_type
    if cast and not properties.patch_torch_functions:  # O0, O2, O3; False casts nothing
        own = properties.low is not None  # the policy casts tensors
        model.register_forward_pre_hook(_Cast(cast, tensors=not own).inputs, with_kwargs=True)
        outputs = outputs or (None if own else torch.float32)
    if outputs is not None:
        model.register_forward_hook(_Cast(outputs).outputs)


def _release(model: nn.Module) -> None:
    """Take off what an earlier `initialize` did to `model`: its weights are fp32 again, bit for bit."""
    for module in model.modules():
        for hooks in (forward_pre_hooks(module), forward_hooks(module), state_dict_hooks(module)):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), _Cast) or hook is _state_in_fp32:
                    del hooks[key]
    with contextlib.suppress(hs.errors.BindError):  # not prepared
        hs.unprepare(model)


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
    remedy = f"; write amp.initialize(..., list({plural}))" if isinstance(value, tuple) else ""
    if isinstance(value, dict):
        remedy = f"; write amp.initialize(..., list({plural}.values()))"
    what = f"a {type(value).__name__}"
    if isinstance(value, (list, tuple)):
        what += f" of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    raise TypeError(f"{plural} must be either a single {one} or a list of {plural}. It is {what}{remedy}")


def _check_model(model: nn.Module) -> None:
    """Refuse a wrapper, what the user has given to hs.prepare, and parameters and buffers that are low already."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise RuntimeError(
            f"Incoming model is an instance of {kind}: parallel wrappers come AFTER amp.initialize. Pass the model "
            "itself, then wrap what amp.initialize returns"
        )
    policy = hs.prepared_policy(model)
    if policy is not None and not policy.name.startswith("apex "):
        raise RuntimeError(
            f"amp.initialize: {type(model).__name__} was given to hs.prepare with policy {policy.name!r}; use one "
            "way of saying precision: leave amp.initialize out, or hs.unprepare(model) first"
        )
    if _amp_state.allow_incoming_model_not_fp32:
        return
    low: list[tuple[str, str, Tensor]] = [("buffer", name, buffer) for name, buffer in model.named_buffers()]
    if policy is None:  # else its parameters are low because an earlier call made them so
        low = [("param", name, parameter) for name, parameter in model.named_parameters()] + low
    for what, name, tensor in low:
        if tensor.dtype in LOW_NAMES:
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
        for name in process.ADDED:
            if hasattr(optimizer, name):
                raise RuntimeError(f"Incoming optimizer already has an attribute {name}, which amp uses; rename it")
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if not parameter.is_floating_point():
                raise TypeError(
                    "amp steps parameters of floating formats (float32, float16, bfloat16) and "
                    f"{parameter.type()} is none; take it out of the optimizer"
                )
