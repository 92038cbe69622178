"""MindSpore's levels and flags: halfstep policies, the marks of modules that ask for them, and their binding.

`bind` turns the marks of a subtree into regions: hs.prepare for its root and each module inside whose policy differs.
A primitive in the operator lists (``lists.toml``) stands for every way torch spells it. Cells of O2's black list
compute in fp32 and give low, as in MindSpore.
"""

import glob
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

import halfstep as hs
from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.checks import MindSporeRuntimeError, MindSporeTypeError, MindSporeValueError
from halfstep.compat.shared import LOW_NAMES
from halfstep.schema import packaged_toml
from halfstep.torch_private.modules import TorchLoss, forward_hooks

PREFIX = "mindspore-"
"""How the names of these policies begin; a policy without it was bound by the user."""

O1_WHITE, AUTO = packaged_toml("compat/mindspore/lists.toml").values()
"""O1's white list, primitive or cell, in small letters -> torch's operators; the auto level's lists."""

AUTO_WHITE = tuple(operator for row in O1_WHITE if row not in ("relu", "ger") for operator in O1_WHITE[row])
"""The auto level's white list; recurrent layers are listed because MindSpore makes them of its MatMul."""


def _rules(operators: Iterable[str], rule: str) -> tuple[tuple[str, str], ...]:
    return tuple((operator, rule) for operator in operators)


FP32_RULES = (("*", "fp32"),)
AUTO_RULES = (*_rules(AUTO_WHITE, "low"), *_rules(AUTO["black"], "fp32"), *_rules(AUTO["promote"], "widest"))
ALL_LOW = (("", "low"),)
"""How the modules of a policy begin that runs everything low but modules it names: O2, O3, the flags fp16 and bf16."""


def new_policy(name: str, dtype: str, **fields: Any) -> hs.Policy:
    """Return a policy of this front-end; MindSpore's loss scales are not policies."""
    return hs.Policy(name=PREFIX + name, dtype=dtype, table="none", scale="none", **fields)


def fp32_policy(dtype: str) -> hs.Policy:
    """Return the policy of the flag fp32: operators take fp32; `dtype`, the low format around, keeps the region on."""
    return new_policy("fp32", dtype, ops=FP32_RULES)


def low_policy(dtype: str) -> hs.Policy:
    """Return the policy of the flags fp16 and bf16: every operator low, parameters fp32, loss functions fp32."""
    return new_policy(dtype, dtype, modules=ALL_LOW, outputs="fp32")


def level_policy(level: str, dtype: str, black: Iterable[str] = (), white: Iterable[str] | None = None) -> hs.Policy:
    """Return the policy of an amp level."""
    if level == "O0":
        return new_policy(level, "fp32", loss="keep")
    if level == "O1":
        operators = (operator for row in O1_WHITE.values() for operator in row) if white is None else white
        return new_policy(level, dtype, outputs="fp32", ops=(*FP32_RULES, *_rules(operators, "low")))
    if level == "auto":
        return new_policy(level, dtype, outputs="fp32", ops=AUTO_RULES)
    return new_policy(level, dtype, outputs="fp32", modules=(*ALL_LOW, *_rules(black, "fp32")))


def low_name(dtype: object, where: str) -> str:
    """Return "fp16" or "bf16" for a dtype."""
    expected = "a low format, mstype.float16 or mstype.bfloat16"
    checks.check_type(f"{where}: dtype", dtype, torch.dtype, expected)
    checks.check_value(f"{where}: dtype", dtype, dtype in LOW_NAMES, expected)
    return LOW_NAMES[cast(torch.dtype, dtype)]


# ---------------------------------------------------------------------------------------------------------------- marks

KEY = "_mindspore_precision"
FLAGS = ("fp16", "fp32", "bf16")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass
class Mark:
    """The precision that a user asked for on one module."""

    # "fp16", "fp32", "bf16" -> on or off, as far as they were given
    flags: dict[str, bool] = field(default_factory=dict)
    level: str = ""  # the amp level the module was converted with, "" if none
    policy: hs.Policy | None = None  # that level as a policy, None for a level that casts nothing
    around: hs.Policy | None = None  # the policy of the module around it when that was bound, None outside every region
    casts: bool = False  # whether it was bound to a low policy: fp64 inputs, which regions leave alone, become fp32


UNMARKED = Mark()


def mark_of(module: nn.Module) -> Mark:
    """Return the mark of `module` itself; `_marked` makes one that can be changed."""
    return cast(Mark, module.__dict__.get(KEY, UNMARKED))


def _marked(module: nn.Module) -> Mark:
    return cast(Mark, module.__dict__.setdefault(KEY, Mark()))


def flags_of(module: nn.Module) -> dict[str, bool]:
    """Return a copy of the precision flags of `module` itself."""
    return dict(mark_of(module).flags)


def to_float(module: ModuleT, dst_type: torch.dtype) -> ModuleT:
    """Run `module` and all in it in `dst_type`, in place; the last call wins, also over flags.

    Float inputs, parameters and tensors are cast when operators use them; parameters and gradients stay fp32. The
    outputs of the outermost low module come back in fp32, so that layers after it work.

    Args:
        module: any torch module.
        dst_type: mstype.float16, float32 or bfloat16.
    """
    expected = "a dtype that a cell can run in: mstype.float16, mstype.float32 or mstype.bfloat16"
    checks.check_type("to_float: dst_type", dst_type, torch.dtype, expected)
    checks.check_value("to_float: dst_type", dst_type, dst_type is torch.float32 or dst_type in LOW_NAMES, expected)
    wanted = LOW_NAMES.get(dst_type, "fp32")
    return add_flags_recursive(module, **{name: name == wanted for name in FLAGS})


def add_flags(module: ModuleT, **flags: bool) -> ModuleT:
    """Set precision flags of `module` alone, in place; modules in it without flags of their own follow it.

    Args:
        module: any torch module.
        **flags: fp16, bf16 or fp32, each True or False. fp32 wins over the others, whatever the order of the calls.
    """
    return _flag(module, flags, recursive=False)


def add_flags_recursive(module: ModuleT, **flags: bool) -> ModuleT:
    """Set precision flags of `module` and of every module in it, in place; see `add_flags`."""
    return _flag(module, flags, recursive=True)


def _flag(module: ModuleT, flags: dict[str, bool], *, recursive: bool) -> ModuleT:
    if not isinstance(module, nn.Module):
        raise MindSporeTypeError(f"add_flags: expected a Cell or a torch module, not {type(module).__name__}")
    for name, value in flags.items():
        if name not in FLAGS:
            raise MindSporeValueError(
                f"add_flags({name}={value!r}): halfstep carries out the flags of precision only: {', '.join(FLAGS)}"
            )
        checks.check_bool(f"add_flags: {name}", value)
    if flags.get("fp16") and flags.get("bf16"):
        raise MindSporeValueError("add_flags(fp16=True, bf16=True): a cell has one low format; give one of the two")
    _refuse_foreign(module)
    for member in module.modules() if recursive else (module,):
        mark = _marked(member)
        mark.level, mark.policy = "", None
        if flags.get("fp16") or flags.get("bf16"):  # the other low format gives way; fp32 never does
            mark.flags.update(fp16=False, bf16=False)
        mark.flags.update(flags)
    bind(module)
    return module


def mark_level(module: nn.Module, level: str, policy: hs.Policy | None) -> None:
    """Remember that `module` was converted with `level`, and bind it."""
    _refuse_foreign(module)
    mark = _marked(module)
    mark.level, mark.policy = level, policy
    bind(module)


def low_format_in(module: nn.Module, around: hs.Policy | None = None) -> str:
    """Return the low format in which something in `module` runs, "" if all of it is fp32."""
    wanted = _wanted(module, around)
    if wanted is not None and wanted.name != PREFIX + "fp32":
        return wanted.dtype
    return next((found for child in module.children() if (found := low_format_in(child, wanted))), "")


def _wanted(module: nn.Module, around: hs.Policy | None) -> hs.Policy | None:
    """Return the policy `module` runs under, given that of the module around it."""
    mark = mark_of(module)
    level = around if mark.policy is None else mark.policy
    low = next((name for name in LOW_NAMES.values() if mark.flags.get(name)), "")
    if mark.flags.get("fp32"):
        return fp32_policy(low or (level.dtype if level is not None else "fp16"))
    if low:
        same = level is not None and level.modules[:1] == ALL_LOW and level.dtype == low
        return level if same else low_policy(low)
    if isinstance(module, TorchLoss) and level is not None and level.dtype in LOW_NAMES.values():
        return fp32_policy(level.dtype)
    return level


def _carry_out(module: nn.Module, around: hs.Policy | None, bound: hs.Policy | None, *, listed: bool = False) -> None:
    """Bind `module` and the modules in it, outer ones first, wherever the policy differs from that bound around it.

    `listed`: it is inside a cell of the black list of `around`, the policy of the module around it.
    """
    mark, wanted = _marked(module), _wanted(module, around)
    mark.around, mark.casts = around, wanted is not None and wanted.dtype in LOW_NAMES.values()
    # A list has no forward to bind; its members are bound one by one.
    if wanted is not None and wanted != bound and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        if hs.prepared_policy(module) is not None:
            hs.unprepare(module)
        # a pattern must match something
        classes = {f"class:{kind.__name__}" for part in module.modules() for kind in type(part).__mro__}
        modules = tuple(rule for rule in wanted.modules if not rule[0] or rule[0] in classes)
        hs.prepare(module, policy=wanted.replace(modules=modules))
        bound = wanted
    own = {f"class:{kind.__name__}" for kind in type(module).__mro__}
    black = wanted is not None and wanted == around and any(r == "fp32" and p in own for p, r in wanted.modules)
    if black and not listed:
        module.register_forward_hook(_lowered)
    for child in module.children():
        _carry_out(child, wanted, bound, listed=wanted == around and (listed or black))


def _lowered(module: nn.Module, args: object, output: Any) -> Any:
    """Return the output of a cell of a black list in the format of its first input, as the cells after it expect."""
    taken = next((tensor.dtype for tensor in hs.trees.tensors(args) if tensor.is_floating_point()), torch.float32)
    return hs.trees.map_tensors(output, lambda tensor: tensor.to(taken) if tensor.dtype is torch.float32 else tensor)


def _refuse_foreign(module: nn.Module) -> None:
    """Refuse, before anything is changed, to overwrite what the user has bound with hs.prepare."""
    for path, part in module.named_modules():
        policy = hs.prepared_policy(part)
        if policy is not None and not policy.name.startswith(PREFIX):
            raise MindSporeRuntimeError(
                f"{path or type(module).__name__} was prepared with hs.prepare and policy {policy.name!r}; use one way "
                "of saying precision: hs.unprepare it first, or hs.prepare the outermost cell instead of a part of it"
            )


def bind(module: nn.Module) -> None:
    """Carry out the marks of `module` and of all in it; what surrounds it stays as it is."""
    _release(module)
    _carry_out(module, mark_of(module).around, None)


def bind_for_training(network: nn.Module) -> None:
    """Bind a training network that is not bound as a whole: what is in it keeps its policy, the rest runs in fp32.

    A network that the user gave to hs.prepare stays as it is; a part of it that was given there is refused.
    """
    if hs.prepared_policy(network) is not None:
        return
    _refuse_foreign(network)
    dtype = low_format_in(network)
    _release(network)
    if not dtype and (built := _as_built(network)) is not None:
        hs.prepare(network, policy=built)
        return
    hs.prepare(network, policy=fp32_policy(dtype) if dtype else level_policy("O0", "fp16"))
    for child in network.children():
        _carry_out(child, None, None)


def _as_built(network: nn.Module) -> hs.Policy | None:
    """Return O0's policy of a network built with low parameters, which stay low and are stepped so; or None."""
    low = next((LOW_NAMES[p.dtype] for p in network.parameters() if p.dtype in LOW_NAMES), "")
    if not low:
        return None
    rules = []
    for path, module in network.named_modules():
        own = [p.dtype for p in module.parameters(recurse=False)]
        if own:
            rules.append((glob.escape(path), "low" if any(dtype in LOW_NAMES for dtype in own) else "fp32"))
    return new_policy("O0", low, params="low", norms="low", master="none", modules=tuple(rules))


def _release(module: nn.Module) -> None:
    for part in module.modules():
        if hs.prepared_policy(part) is not None:
            hs.unprepare(part)
        for key in [key for key, hook in forward_hooks(part).items() if hook is _lowered]:
            del forward_hooks(part)[key]
