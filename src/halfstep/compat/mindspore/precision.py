"""Marks of modules (flags, a level), and the binding of the policies that carry them out.

Marks live on the modules; `bind` turns those of a subtree into regions: hs.prepare for its root, and again for each
module inside whose policy differs. An inner binding wins over an outer one, wherever the model is called from.

Which mark wins: the flag fp32 over everything; then the flags fp16 and bf16; then the level of the nearest
module above.
Under O2 and O3 a low flag in the same format changes nothing, so O2's fp32 layers stay fp32. Loss cells are always
fp32. Cells of O2's black list compute in fp32 and give low, as in MindSpore, which wraps them so. A level given later
does not touch flags; flags set later on the same module or one above take a level away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

import halfstep as hs
from halfstep.compat.mindspore.checks import MindSporeRuntimeError, MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.policies import (
    PREFIX,
    as_built_policy,
    fp32_policy,
    is_low_everywhere,
    level_policy,
    low_policy,
)
from halfstep.compat.shared import LOW_NAMES
from halfstep.torch_private.modules import TorchLoss, forward_hooks

__all__ = [
    "Mark", "add_flags", "add_flags_recursive", "bind", "bind_for_training", "flags_of", "low_format_in", "mark_level",
    "mark_of", "to_float",
]  # fmt: skip

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


def mark_of(module: nn.Module) -> Mark | None:
    """Return the mark of `module` itself."""
    mark = module.__dict__.get(KEY)
    return mark if isinstance(mark, Mark) else None


def flags_of(module: nn.Module) -> dict[str, bool]:
    """Return a copy of the precision flags of `module` itself."""
    mark = mark_of(module)
    return {} if mark is None else dict(mark.flags)


def _marked(module: nn.Module) -> Mark:
    mark = mark_of(module)
    if mark is None:
        mark = module.__dict__[KEY] = Mark()
    return mark


def to_float(module: ModuleT, dst_type: torch.dtype) -> ModuleT:
    """Run `module` and all in it in `dst_type`, in place; the last call wins, also over flags.

    Float inputs, parameters and tensors are cast when operators use them; parameters and gradients stay fp32. The
    outputs of the outermost low module come back in fp32, so that layers after it work.

    Args:
        module: any torch module.
        dst_type: mstype.float16, float32 or bfloat16.
    """
    if not isinstance(dst_type, torch.dtype):
        raise MindSporeTypeError(f"to_float: dst_type={dst_type!r} is not a dtype; pass mstype.float16")
    if dst_type is not torch.float32 and dst_type not in LOW_NAMES:
        raise MindSporeValueError(
            f"to_float: dst_type={dst_type}; a cell runs in mstype.float16, mstype.float32 or mstype.bfloat16"
        )
    wanted = LOW_NAMES.get(dst_type, "fp32")
    return add_flags_recursive(module, **{name: name == wanted for name in FLAGS})


def add_flags(module: ModuleT, **flags: bool) -> ModuleT:
    """Set precision flags of `module` alone, in place; modules in it without flags of their own follow it.

    Args:
        module: any torch module.
        **flags: fp16, bf16 or fp32, each True or False. fp32 wins over the others, whatever the order of the calls.
    """
    return _flag(module, [module] if isinstance(module, nn.Module) else [], flags)


def add_flags_recursive(module: ModuleT, **flags: bool) -> ModuleT:
    """Set precision flags of `module` and of every module in it, in place; see `add_flags`."""
    return _flag(module, list(module.modules()) if isinstance(module, nn.Module) else [], flags)


def _flag(module: ModuleT, members: list[nn.Module], flags: dict[str, bool]) -> ModuleT:
    if not isinstance(module, nn.Module):
        raise MindSporeTypeError(f"add_flags: expected a Cell or a torch module, not {type(module).__name__}")
    for name, value in flags.items():
        if name not in FLAGS:
            raise MindSporeValueError(
                f"add_flags({name}={value!r}): halfstep carries out the flags of precision only: {', '.join(FLAGS)}"
            )
        if not isinstance(value, bool):
            raise MindSporeTypeError(f"add_flags({name}={value!r}) is a {type(value).__name__}; expected True or False")
    if flags.get("fp16") and flags.get("bf16"):
        raise MindSporeValueError("add_flags(fp16=True, bf16=True): a cell has one low format; give one of the two")
    _refuse_foreign(module)
    for member in members:
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


def low_format_in(module: nn.Module) -> str:
    """Return the low format in which something in `module` runs, "" if all of it is fp32."""
    return _low_format_in(module, None)


def _low_format_in(module: nn.Module, around: hs.Policy | None) -> str:
    wanted = _wanted(module, around)
    if wanted is not None and wanted.name != PREFIX + "fp32":
        return wanted.dtype
    return next((found for child in module.children() if (found := _low_format_in(child, wanted))), "")


def _wanted(module: nn.Module, around: hs.Policy | None) -> hs.Policy | None:
    """Return the policy `module` runs under, given that of the module around it."""
    mark = mark_of(module)
    flags = {} if mark is None else mark.flags
    level = around if mark is None or mark.policy is None else mark.policy
    low = next((name for name in LOW_NAMES.values() if flags.get(name)), "")
    if flags.get("fp32"):
        return fp32_policy(low or (level.dtype if level is not None else "fp16"))
    if low:
        same = level is not None and is_low_everywhere(level) and level.dtype == low
        return level if same else low_policy(low)
    if isinstance(module, TorchLoss) and level is not None and level.dtype in LOW_NAMES.values():
        return fp32_policy(level.dtype)
    return level


def _carry_out(module: nn.Module, around: hs.Policy | None, bound: hs.Policy | None, *, listed: bool = False) -> None:
    """Bind `module` and the modules in it, outer ones first, wherever the policy differs from that bound around it.

    Args:
        module: a network or a part of it.
        around: the policy of the module around it.
        bound: the policy that was bound around it.
        listed: whether it is inside a cell of the black list of `around`.
    """
    mark, wanted = _marked(module), _wanted(module, around)
    mark.around, mark.casts = around, wanted is not None and wanted.dtype in LOW_NAMES.values()
    # A list has no forward to bind; its members are bound one by one.
    if wanted is not None and wanted != bound and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        if hs.prepared_policy(module) is not None:
            hs.unprepare(module)
        hs.prepare(module, policy=_without_absent(wanted, module))
        bound = wanted
    black = wanted is not None and wanted == around and _is_black(wanted, module)
    if black and not listed:
        module.register_forward_hook(_lowered)
    for child in module.children():
        _carry_out(child, wanted, bound, listed=wanted == around and (listed or black))


def _is_black(policy: hs.Policy, module: nn.Module) -> bool:
    """Return whether `module` is a cell of the black list of `policy`."""
    classes = {f"class:{kind.__name__}" for kind in type(module).__mro__}
    return any(rule == "fp32" and pattern in classes for pattern, rule in policy.modules)


def _lowered(module: nn.Module, args: object, output: Any) -> Any:
    """Return the output of a cell of a black list in the format of its first input, as the cells after it expect."""
    taken = next((tensor.dtype for tensor in hs.trees.tensors(args) if tensor.is_floating_point()), torch.float32)
    return hs.trees.map_tensors(output, lambda tensor: tensor.to(taken) if tensor.dtype is torch.float32 else tensor)


def _without_absent(policy: hs.Policy, module: nn.Module) -> hs.Policy:
    """Return `policy` without patterns for classes that do not occur in `module`: a pattern must match something."""
    classes = {f"class:{kind.__name__}" for part in module.modules() for kind in type(part).__mro__}
    return policy.replace(modules=tuple(rule for rule in policy.modules if not rule[0] or rule[0] in classes))


def _refuse_foreign(module: nn.Module) -> None:
    """Refuse to overwrite what the user has bound with hs.prepare.

    Raises:
        MindSporeRuntimeError: the user prepared a part of `module`; nothing was changed.
    """
    for path, part in module.named_modules():
        policy = hs.prepared_policy(part)
        if policy is not None and not policy.name.startswith(PREFIX):
            raise MindSporeRuntimeError(
                f"{path or type(module).__name__} was prepared with hs.prepare and policy {policy.name!r}; use one way "
                "of saying precision: hs.unprepare it first, or hs.prepare the outermost cell instead of a part of it"
            )


def bind(module: nn.Module) -> None:
    """Carry out the marks of `module` and of all in it; what surrounds it stays as it is."""
    mark = mark_of(module)
    _release(module)
    _carry_out(module, None if mark is None else mark.around, None)


def bind_for_training(network: nn.Module) -> None:
    """Bind a training network that is not bound as a whole: what is in it keeps its policy, the rest runs in fp32.

    A network that the user gave to hs.prepare stays as it is.

    Raises:
        MindSporeRuntimeError: a part of it was given to hs.prepare.
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
    """Return the policy under which the low parameters of `network` stay low; None if it has none."""
    low = next((LOW_NAMES[p.dtype] for p in network.parameters() if p.dtype in LOW_NAMES), "")
    rules = []
    for path, module in network.named_modules():
        own = [p.dtype for p in module.parameters(recurse=False)]
        if own:
            pattern = "".join(f"[{c}]" if c in "*?[" else c for c in path)  # matches `path` alone
            rules.append((pattern, "low" if any(dtype in LOW_NAMES for dtype in own) else "fp32"))
    return as_built_policy(low, tuple(rules)) if low else None


def _release(module: nn.Module) -> None:
    for part in module.modules():
        if hs.prepared_policy(part) is not None:
            hs.unprepare(part)
        for key in [key for key, hook in forward_hooks(part).items() if hook is _lowered]:
            del forward_hooks(part)[key]
