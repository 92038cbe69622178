"""Match: which modules a pattern matches, and which parts of itself a model declares to be fp32."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from halfstep.errors import PolicyError, did_you_mean, few
from halfstep.policy.rule_kinds import Rules

CLASS_PREFIX = "class:"
NORMS = "class:*Norm*"
"""The pattern of normalisation layers, to which the field `norms` applies."""

KEPT, KEPT_ALWAYS = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"
"""Attributes of transformers' models: names of parts that stay fp32 beside fp16, and beside bf16 too."""


def class_names(module: nn.Module) -> list[str]:
    """Return the names of a module's class and its bases, most derived first."""
    return [kind.__name__ for kind in type(module).__mro__ if kind is not object]


def matches(pattern: str, path: str, module: nn.Module) -> bool:
    """Return whether `pattern` matches this very module: its dotted name or, for ``class:GLOB``, one of its classes."""
    if pattern.startswith(CLASS_PREFIX):
        glob = pattern.removeprefix(CLASS_PREFIX)
        return any(fnmatchcase(name, glob) for name in class_names(module))
    return fnmatchcase(path, pattern)


def glob_covers(pattern: str, path: str) -> bool:
    """Return whether `pattern` matches the name of the module at `path` or of one around it.

    A `path` that is itself ``class:X`` is covered by ``class:`` patterns that match the class name ``X``.
    """
    if path.startswith(CLASS_PREFIX) or pattern.startswith(CLASS_PREFIX):
        return pattern.startswith(CLASS_PREFIX) == path.startswith(CLASS_PREFIX) and fnmatchcase(path, pattern)
    parts = path.split(".") if path else []
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(len(parts) + 1))


def rules_of_modules(rules: Rules, model: nn.Module) -> Mapping[nn.Module, tuple[str, str]]:
    """Return module -> (pattern, rule) for every module that a pattern covers: it, or a module around it, matches.

    The last pattern wins. A module that occurs at several places is covered if any of them is.
    """
    places = list(model.named_modules(remove_duplicate=False))
    decided: dict[nn.Module, tuple[str, str]] = {}
    for pattern, rule in rules:
        inside: set[str] = set()
        matched = False
        for path, module in places:  # parents come before their children
            here = matches(pattern, path, module)
            if here or (path and path.rpartition(".")[0] in inside):
                inside.add(path)
                decided[module] = (pattern, rule)
                matched = matched or here
        if not matched:
            raise PolicyError(_matches_nothing(pattern, model, places))
    return decided


def declared_fp32(model: nn.Module, *, narrow: bool) -> tuple[dict[nn.Module, str], dict[nn.Parameter, str]]:
    """Return the modules and the parameters that transformers' models in `model` declare to be fp32, with the reason.

    A name stands for modules, with all below them, and for parameters: "wo", "gate.weight", "sinks". A module whose
    parameters are all declared by name is one of the modules. `KEPT` counts for ranges narrower than bf16's.
    """
    modules: dict[nn.Module, str] = {}
    parameters: dict[nn.Parameter, str] = {}
    for part in model.modules():
        for field in (KEPT, KEPT_ALWAYS) if narrow else (KEPT_ALWAYS,):
            names = getattr(part, field, None)
            for name in sorted(names) if isinstance(names, (list, tuple, set)) else ():
                there = re.compile(rf"(^|\.){re.escape(name).replace(re.escape('*'), '.*')}(\.|$)")
                reason = f"{type(part).__name__}.{field} has {name!r}"
                for path, module in part.named_modules(remove_duplicate=False):
                    if there.search(path):
                        modules.setdefault(module, reason)
                for path, parameter in part.named_parameters(remove_duplicate=False):
                    if there.search(path):
                        parameters.setdefault(parameter, reason)
    for module in model.modules() if parameters else ():
        own = next(module.parameters(recurse=False), None)
        if own in parameters and all(parameter in parameters for parameter in module.parameters()):
            for inner in module.modules():
                modules.setdefault(inner, parameters[own])
    return modules, parameters


def _matches_nothing(pattern: str, model: nn.Module, places: Sequence[tuple[str, nn.Module]]) -> str:
    paths = [path for path, _ in places if path]
    classes = sorted({name for _, module in places for name in class_names(module)} - {"Module"})
    message = f"module pattern {pattern!r} matches no module of {type(model).__name__}"
    if pattern.startswith(CLASS_PREFIX):
        wanted = pattern.removeprefix(CLASS_PREFIX)
        near = did_you_mean(wanted, classes) or did_you_mean(wanted.strip("*"), classes)
        return f"{message}; its classes are {few([*map(repr, classes)], 6) or 'none'}{near}"
    if pattern in classes:
        return f"{message}; to mean the class, write {CLASS_PREFIX + pattern!r}"
    near = did_you_mean(pattern, paths) or did_you_mean(pattern.strip("*."), paths)
    return f"{message}; its modules are {few([*map(repr, paths)], 6) or 'none'}{near}"
