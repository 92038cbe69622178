"""initialize: Apex's options, their defaults by opt_level, overrides and conflicts; state_dict and load_state_dict."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from halfstep.compat.apex.amp import _initialize
from halfstep.compat.apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
from halfstep.compat.apex.amp.scaler import LossScaler

__all__ = ["O0", "O1", "O2", "O3", "Properties", "initialize", "load_state_dict", "opt_levels", "state_dict"]

_OPTIONS = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


class Properties:
    """The options in force; an assignment is checked against the others.

    Attributes:
        options: all of them by name, in the order they are printed.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        start: dict[str, Any] = {"enabled": False, "opt_level": None, "cast_model_type": None}
        start |= {"patch_torch_functions": False, "keep_batchnorm_fp32": None, "master_weights": None}
        object.__setattr__(self, "options", {**start, "loss_scale": 1.0})

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"Properties has no option {name!r}; it has {', '.join(options)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"Properties has no option {name!r}; it has {', '.join(self.options)}")
        check = getattr(self, f"_check_{name}", None)
        self.options[name] = value if check is None else check(value)

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

    def _check_cast_model_type(self, value: Any) -> Any:
        if self.opt_level == "O1" and value not in (None, False, torch.float32, torch.bfloat16):
            warn_or_err(
                "opt_level='O1' casts around functions and leaves the model's weights in fp32. To cast the model, use "
                "opt_level='O2' or 'O3'; O1 takes torch.bfloat16 alone, as the format of its casts. cast_model_type "
                f"was {value}"
            )
        kinds = (None, False, torch.float32, torch.float16, torch.bfloat16)
        if not any(value is kind for kind in kinds):
            raise ValueError(
                f"cast_model_type={value!r}; expected torch.float16, torch.bfloat16, torch.float32, or False to leave "
                "the model's parameters as they are"
            )
        return value

    def _check_patch_torch_functions(self, value: Any) -> Any:
        value = _flag("patch_torch_functions", value)
        if self.opt_level != "O1" and value:
            warn_or_err(f"patch_torch_functions=True comes with opt_level='O1' and cannot be set at {self.opt_level}")
        return value

    def _check_keep_batchnorm_fp32(self, value: Any) -> Any:
        if self.opt_level == "O1" and value is not None:
            warn_or_err(
                "with opt_level='O1' batchnorm's weights are fp32 as all others are, so keep_batchnorm_fp32 should be "
                f"None. keep_batchnorm_fp32 was {value}"
            )
        words = {"True": True, "False": False}
        if value not in (True, False, None, *words):
            raise AssertionError(
                f"keep_batchnorm_fp32={value!r}; expected True, False, their text 'True' or 'False', or None"
            )
        return words.get(value, value) if isinstance(value, str) else value

    def _check_master_weights(self, value: Any) -> Any:
        if self.opt_level == "O1" and value is not None:
            warn_or_err(
                "master_weights make no sense with opt_level='O1', under which the model's weights are fp32 "
                f"themselves. master_weights was {value}"
            )
        return _flag("master_weights", value)

    def _check_loss_scale(self, value: Any) -> Any:
        if value == "dynamic":
            return value
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"loss_scale={value!r}; expected 'dynamic', or a number or text of one") from None


def _flag(name: str, value: Any) -> bool | None:
    """Return a flag that may come as text from a command line, where "False" would count as true."""
    words = {"True": True, "False": False}
    found = words.get(value) if isinstance(value, str) else value
    if value is not None and not isinstance(found, bool):
        raise ValueError(f"{name}={value!r}; expected True, False, their text 'True' or 'False', or None")
    return found


class O0:
    """Pure FP32 training."""

    brief = "O0: everything in fp32.\n"
    defaults = (torch.float32, False, None, False, 1.0)


class O1:
    """Casts around operators."""

    brief = "O1: casts around functions and methods of PyTorch.\n"
    defaults = (None, True, None, None, "dynamic")


class O2:
    """Low model, fp32 batchnorm, fp32 masters."""

    brief = "O2: a low model, with batchnorm and master weights in fp32.\n"
    defaults = (torch.float16, False, True, True, "dynamic")


class O3:
    """Everything low."""

    brief = "O3: everything low.\n"
    defaults = (torch.float16, False, False, False, 1.0)


opt_levels: dict[str, type[O0] | type[O1] | type[O2] | type[O3]] = {"O0": O0, "O1": O1, "O2": O2, "O3": O3}


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
        _initialize.close_casts()
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
    level = opt_levels[opt_level]
    properties = Properties()
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
    result = _initialize.initialize(models, optimizers, properties, scalers, cast_model_outputs, loud=verbosity > 1)
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
