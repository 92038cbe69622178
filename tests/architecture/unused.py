"""The lint for dead code: definitions that no other code uses, and exported names that no other file uses.

``python -m tests.architecture.unused`` (part of `make lint`) prints a line for each finding and fails if there is any.
It compares names: a definition counts as used if any file uses anything of its name. What torch or a
user's code calls by name is in `CALLED_FROM_OUTSIDE`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
USERS = ("tests", "benchmarks", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs")

FOREIGN = "src/halfstep/compat/"
"""The names of this folder are another library's, and its users are their users: its exports are not checked."""

CALLED_FROM_OUTSIDE: Mapping[str, str] = {
    "gpt_task": "tasks.task builds the name",
    "lenet5_task": "tasks.task builds the name",
    "resnet_task": "tasks.task builds the name",
    "visit_Name": "ast.NodeTransformer calls it",
    "visit_Return": "ast.NodeTransformer calls it",
    "get_code": "importlib's SourceFileLoader.exec_module calls it",
    "generate_vmap_rule": "torch.autograd.Function reads it",
    "avoid_device_init": "torch's FakeTensorMode reads it",
    "_is_in_bad_fork": "torch.manual_seed asks the module of the host device",
    "manual_seed_all": "torch.manual_seed calls it in the module of the host device",
    "set_rng_state": "torch.random.fork_rng calls it in the module of the host device",
    "set_device": "users of a device's module call it",
    "get_amp_supported_dtype": "torch.autocast asks the module of the host device",
    "extra_repr": "torch.nn.Module.__repr__ calls it",
    "get_extra_state": "torch.nn.Module.state_dict calls it",
    "set_extra_state": "torch.nn.Module.load_state_dict calls it",
    "connect": "Lightning's Strategy.setup_precision_plugin calls it",
    "forward_context": "Lightning's Strategy.training_step and Fabric's modules call it",
    "teardown": "Lightning's Strategy.teardown calls it",
    "on_load_checkpoint": "Lightning's Trainer calls it when a run goes on",
    "all_fp16_grad_stash": "an attribute that users of apex.amp read",
    "all_fp32_from_fp32_grad_stash": "an attribute that users of apex.amp read",
    "backbone_network": "an attribute that users of mindspore.nn read",
    "get_lr": "a method that users of mindspore.nn call",
    "on_train_begin": "transformers' Trainer calls it",
    "on_optimizer_step": "transformers' Trainer calls it before gradients are cleared",
    "prepare_optimizer": "accelerate's Accelerator.prepare calls it",
    "unscale_gradients": "accelerate's Accelerator.clip_grad_norm_ and clip_grad_value_ call it",
    "_lazy_init_scale_growth_tracker": "accelerate's Accelerator.load_state calls it under FSDP2",
    "state_dict_key": "timm's CheckpointSaver and resume_checkpoint read it",
}
"""Name -> its caller outside this repository."""

REGISTERED_BY = frozenset({"check_of", "on_paths", "by_line"})
"""Decorators that put a function into a table, in which its caller finds it: the rules of the linter."""

EXCEPTIONS: Mapping[str, str] = {
    "initial_state": "the first state of a scale rule, for laws of `advance` as a pure function",
}
"""Name -> why it stays although it is unused, used by tests alone, or exported without an importer."""


@dataclass(frozen=True)
class File:
    """The names of one Python file: where it defines and exports them, which it uses, which it imports from where."""

    defined: dict[str, int] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    imported: set[tuple[str, str]] = field(default_factory=set)


def read(path: Path, root: Path) -> File:
    """Return the names of a Python file below `root`."""
    tree, file = ast.parse(path.read_text(encoding="utf-8")), File()
    exports: set[int] = set()
    for statement in _definitions(tree):
        for name, line in _names(statement):
            file.defined.setdefault(name, line)
            if name == "__all__":
                strings = [n for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                file.exported.update((str(node.value), node.lineno) for node in strings)
                exports.update(map(id, strings))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            file.used.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            file.used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            file.imported.update((_source(node, path, root), alias.name) for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            file.used.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in exports:
            if re.fullmatch(r"\w+([.:]\w+)*", node.value):  # a name for getattr, monkeypatch or a command line
                file.used.update(re.findall(r"\w+", node.value))
    return file


def module(path: Path, root: Path) -> str:
    """Return the dotted name by which a file below `root` is imported."""
    words = path.relative_to(root).with_suffix("").parts
    return ".".join(words[words[0] == "src" : len(words) - (words[-1] == "__init__")])


def findings(root: Path = ROOT, exceptions: Mapping[str, str] = EXCEPTIONS) -> list[str]:
    """Return what is defined or exported below `root`/src without a use, and needless exceptions, one line each."""
    source = {path: read(path, root) for path in sorted((root / "src").rglob("*.py"))}
    users = {folder: [read(p, root) for p in sorted((root / folder).rglob("*.py"))] for folder in USERS}
    pages = [p for page in PAGES for p in [root / page, *(root / page).rglob("*.md")] if p.is_file()]
    written = set(re.findall(r"\w+", " ".join(p.read_text(encoding="utf-8") for p in pages)))
    inside = {name for file in source.values() for name in file.used} | set(CALLED_FROM_OUTSIDE)
    outside = {folder: set().union(*map(_mentioned, files)) for folder, files in users.items()}
    known = inside | written | outside["benchmarks"] | outside["examples"]
    found: list[tuple[str, str]] = []
    for path, file in source.items():
        place = path.relative_to(root).as_posix()
        for name, line in file.defined.items():
            if name in known or (name.startswith("__") and name.endswith("__")):
                continue
            if name not in outside["tests"]:
                found.append((name, f"{place}:{line} {name} is defined and used nowhere"))
            elif not place.startswith(FOREIGN):
                found.append((name, f"{place}:{line} {name} is used by tests alone"))
        if not place.startswith(FOREIGN):
            here, others = module(path, root), [f for p, f in source.items() if p != path] + sum(users.values(), [])
            for name, line in file.exported.items():
                used = name in written or any((here, name) in f.imported or name in f.used for f in others)
                if not used and name not in CALLED_FROM_OUTSIDE:
                    found.append((name, f"{place}:{line} {name} is in __all__ and no other file uses it"))
    needless = sorted(set(exceptions) - {name for name, _ in found})
    return [text for name, text in found if name not in exceptions] + [
        f"tests/architecture/unused.py: the exception {name} is no longer needed" for name in needless
    ]


def _mentioned(file: File) -> set[str]:
    return file.used | {name for _, name in file.imported}


def _definitions(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module and of its classes, not those inside functions."""
    blocks = [tree.body]
    while blocks:
        for statement in blocks.pop():
            yield statement
            if isinstance(statement, (ast.ClassDef, ast.If, ast.Try)):
                blocks.append(statement.body)


def _names(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    """Yield the names that a statement defines, with their lines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        calls = [decorator.func for decorator in statement.decorator_list if isinstance(decorator, ast.Call)]
        if not any(isinstance(call, ast.Name) and call.id in REGISTERED_BY for call in calls):
            yield statement.name, statement.lineno
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from ((target.id, target.lineno) for target in targets if isinstance(target, ast.Name))


def _source(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """Return the absolute name of the module that an import names."""
    if not node.level:
        return node.module or ""
    here = module(path, root).split(".")
    package = here if path.name == "__init__.py" else here[:-1]
    return ".".join([*package[: len(package) - (node.level - 1)], *([node.module] if node.module else [])])


if __name__ == "__main__":
    for line in (lines := findings()):
        print(line)
    sys.exit(bool(lines))
