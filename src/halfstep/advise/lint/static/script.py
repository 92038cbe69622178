"""A script as the static rules read it: its names, and the roles of its objects.

An object has a role (loss scaler, optimizer, scheduler, model) by the call that made it, or by methods that only such
objects have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from halfstep.advise.lint.static.names import Function, Names, Value, calls_in, walked

__all__ = ["OPTIMIZERS", "SCALERS", "Function", "Script", "calls_in", "walked"]

SCALERS = re.compile(r"(torch\..*|halfstep)\.(Sharded)?GradScaler")
OPTIMIZERS = re.compile(
    r"torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)?[A-Z]\w+"
    r"|(.*\.)?(Fused|Distributed)?(Adam|AdamW|SGD|Adafactor|Lion|RMSprop)"
)
OPTIMIZER_NAME = re.compile(r"(^|[._])(optim|optimizers?|opt)(_\w+|\d*)?$|_optim(izer)?$", re.IGNORECASE)
OPTIMIZER_METHODS = ("step", "first_step", "second_step", "zero_grad", "state_dict", "load_state_dict")
SCHEDULERS = re.compile(r"torch\.optim\.lr_scheduler\.[A-Z]\w+|(.*\.)?get_\w*schedule\w*")
SCHEDULER_NAME = re.compile(r"sched", re.IGNORECASE)


class Script(Names):
    """One Python file."""

    @cached_property
    def scalers(self) -> dict[str, str]:
        """Loss scaler -> the library it is from, "torch" or "halfstep"."""
        if not self.uses_torch:
            return {}
        found: dict[str, str] = {}
        for key, values in self.assigned.items():
            made = [name for value in values for name in self._made(value)]
            if any(SCALERS.fullmatch(name) for name in made):
                others = [name for name in made if name and not SCALERS.fullmatch(name)]
                if not others:
                    found[key] = "halfstep" if any(name.startswith("halfstep.") for name in made) else "torch"
            elif any(value.index == 2 and self.called(value.node) == "halfstep.prepare" for value in values):
                found[key] = "halfstep"
        strangers = {key for key, values in self.assigned.items() if key not in found and any(map(self._calls, values))}
        for node in walked(self.tree):
            if (
                isinstance(node, ast.arg)
                and node.annotation is not None
                and "GradScaler" in ast.unparse(node.annotation)
            ):
                found.setdefault(node.arg, "torch")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if node.func.attr == "backward" and isinstance(owner, ast.Call) and self._is_scale(owner):
                    owner = owner.func.value  # type: ignore[attr-defined]  # a scale call's function is an attribute
                elif node.func.attr != "unscale_" or len(node.args) != 1:
                    continue
                if (key := self.name(owner)) and key not in strangers:
                    found.setdefault(key, "torch")
        return found

    @cached_property
    def keeps_scaled(self) -> bool:
        """Whether a name of the file is assigned a scaled loss."""
        return any(
            isinstance(value.node, ast.Call) and self.called(value.node).rpartition(".")[::2] == (key, "scale")
            for values in self.assigned.values()
            for value in values
            for key in self.scalers
        )

    def _calls(self, value: Value) -> bool:
        return isinstance(value.node, ast.Call)

    @staticmethod
    def _is_scale(node: ast.Call) -> bool:
        return isinstance(node.func, ast.Attribute) and node.func.attr == "scale" and len(node.args) == 1

    def _made(self, value: Value) -> Iterator[str]:
        """Yield the names of the functions whose results a value may be."""
        if value.index is None:
            nodes = [value.node]
            while nodes:
                node = nodes.pop()
                if isinstance(node, ast.IfExp):
                    nodes += [node.body, node.orelse]
                elif isinstance(node, ast.Call):
                    yield self.called(node)

    @cached_property
    def optimizers(self) -> set[str]:
        """Optimizers: made by an optimizer's class, stepped or unscaled by a scaler, or named as one."""
        found = {
            key
            for key, values in self.assigned.items()
            if any(OPTIMIZERS.fullmatch(name) for value in values for name in self._made(value))
        }
        for node in walked(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, method = self.name(node.func.value), node.func.attr
                if method in ("step", "unscale_") and owner in self.scalers and node.args:
                    found.add(self.key(node.args[0]))
                elif method in OPTIMIZER_METHODS and OPTIMIZER_NAME.search(owner):
                    found.add(owner)
        return found - self.schedulers

    @cached_property
    def models(self) -> set[str]:
        """Modules: objects whose parameters or mode the file asks for."""
        methods = ("parameters", "named_parameters", "train", "eval", "modules")
        owners = {
            self.name(node.func.value)
            for node in self.calls
            if isinstance(node.func, ast.Attribute) and node.func.attr in methods
        }
        return owners - {"", "self", "super"} - self.imports.keys()

    def methods_of(self, key: str) -> Iterator[ast.Call]:
        """Yield the calls of methods of an object: in the source, and on the value that it is assigned."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and self.name(call.func.value) == key:
                yield call
        for value in self.assigned.get(key, []):
            node: ast.AST = value.node if value.index is None else ast.Pass()
            while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if self.name(node.func.value) != key:  # else it was yielded above
                    yield node
                node = node.func.value

    def makers(self, key: str) -> set[str]:
        """Return the names of the functions whose results an object may be; "" for one without a name."""
        return {name for value in self.assigned.get(key, []) for name in self._made(value)}

    @cached_property
    def schedulers(self) -> set[str]:
        """Learning-rate schedulers: made by one of torch's classes or a ``get_..._schedule...``, or named as one."""
        found = {
            key
            for key, values in self.assigned.items()
            if any(SCHEDULERS.fullmatch(name) for value in values for name in self._made(value))
        }
        for node in walked(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                if SCHEDULER_NAME.search(owner := self.name(node.func.value)):
                    found.add(owner)
        return found
