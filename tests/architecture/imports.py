"""The checker of import directions: who may import whom, as data, and a reader of every import statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from tests.sources import nodes_of

PACKAGE = "halfstep"

LAYERS: Mapping[str, int] = {
    "accelerators": 0, "arguments": 0, "errors": 0, "events": 0, "formats": 0, "lazy": 0, "meeting": 0, "mistakes": 0,
    "optim": 0, "schema": 0, "timing": 0, "torch_private": 0, "trees": 0,
    "kernels": 1, "policy": 1, "snapshot": 1,
    "cast": 2, "scale": 2, "weights": 2,
    "binding": 3, "update": 3,
    "auto": 4,
    "step": 5,
    "checkpoints": 6, "lens": 6, "report": 6,
    "advise": 7, "cli": 7, "compat": 7, "integrations": 7, "tasks": 7, "testing": 7,
}  # fmt: skip
"""Part -> layer. An import points to a lower layer; parts of one layer do not see each other."""

OUTSIDE = 7
"""Parts of this layer are users of the package: they import its public names, never its inside."""

PUBLIC = frozenset(
    {"", "arguments", "binding", "checkpoints", "errors", "formats", "lens", "policy", "step", "testing", "timing"}
    | {"trees"}
)
"""Parts whose `__all__` is public ("" is `halfstep` itself): users of the package import these names and no others."""

ARROWS: Mapping[tuple[str, str], str] = {
    ("arguments", "errors"): "errors is at the bottom: every part says what is wrong in its words",
    ("events", "errors"): "errors is at the bottom: every part says what is wrong in its words",
    ("formats", "errors"): "errors is at the bottom: every part says what is wrong in its words",
    ("mistakes", "schema"): "the catalogue is a file of the package",
    ("meeting", "errors"): "errors is at the bottom: every part says what is wrong in its words",
    ("optim", "errors"): "errors is at the bottom: every part says what is wrong in its words",
    ("schema", "errors"): "errors is at the bottom: every part says what is wrong in its words",
    ("schema", "arguments"): "one kind of a value, and one way to show a value, for arguments and files",
    ("lens", "checkpoints"): "evidence is written as the files of a checkpoint are",
    ("lens", "report"): "an audit is written as a page",
    ("advise", "mistakes"): "the linter's rules on loops have the words of the catalogue",
    ("advise", "schema"): "a file of measurements is checked as every other file",
    ("advise", "tasks"): "what is decided is decided for a task, and measured with its tools",
    ("advise", "report"): "a decision, a plan and findings are written as pages",
    ("advise", "testing"): "a plan for a GPU is traced on the fake GPU",
    ("integrations", "lazy"): "a library is imported when its part is first used",
    ("tasks", "schema"): "what spoils a measurement is a file of the package",
    ("cli", "lazy"): "typer is imported when the application is first used",
    ("cli", "advise"): "the command line shows what was decided, planned and found",
    ("cli", "compat"): "halfstep run puts names of another library in place for a script",
    ("compat", "schema"): "lists of another library's operators are files of the package",
    ("cli", "schema"): "completion reads the names of presets and GPUs from their files",
    ("cli", "tasks"): "the command line works on tasks",
    ("cli", "report"): "the command line composes documents and has them rendered",
    ("__main__", "cli"): "python -m halfstep is the command line",
}
"""Part -> part that the layers forbid and the design allows, with the reason."""

FOR_ALL = "torch_private"
"""The part that every other part imports, those of its own layer too: torch's private names stand once."""

USED = {"advise", "cast", "integrations", "kernels", "lazy", "scale", "tasks"}
ROOT_IMPORTS = frozenset(PUBLIC | USED) - {"", "testing"}
"""Parts that `halfstep/__init__.py` imports or whose names it re-exports."""

EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("halfstep.compat.apex.optimizers", "kernels"): "which of torch's fused kernels do their work stands once",
    ("halfstep.testing.building", "kernels"): "C++ is compiled in one place, into one cache",
    ("halfstep.step.parts.verdicts", "lens"): "the black box, inside a function: who looks at a step is above it",
    ("halfstep.step.train_step", "lens"): "the annotation of TrainStep.explain",
}
"""(module, part) -> reason: single imports that go the wrong way on purpose."""


def imported(path: Path, module: str, root: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for every import of this package in a file; "" is the package itself.

    Imports inside functions and under ``if TYPE_CHECKING`` count: they are dependencies too.
    """
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                above = here[: len(here) - (node.level - 1)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # `from halfstep import scale` names a part, `from halfstep import Policy` the package
            names = [f"{base}.{a.name}" for a in node.names] if base == PACKAGE else []
            parts = [n for n in names if _exists(root, n)]
            targets = parts + ([base] if len(parts) < max(1, len(names)) else [])
        else:
            continue
        for target in targets:
            words = target.split(".")
            if words[0] == PACKAGE:
                yield node.lineno, words[1] if len(words) > 1 else ""


def violations(root: Path, exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS) -> list[str]:
    """Return what breaks the rules below `root`, the folder of the package, one line each."""
    found = []
    for path in sorted(root.rglob("*.py")):
        words = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        module = ".".join(words[:-1] if words[-1] == "__init__" else words)
        part = words[1] if len(words) > 1 and words[1] != "__init__" else ""
        for line, target in imported(path, module, root):
            if (module, target) not in exceptions and not allowed(part, target):
                found.append(f"{module}:{line} imports {target or PACKAGE}: {why(part, target)}")
        if LAYERS.get(part) == OUTSIDE:
            for line, name in not_public(path, part):
                found.append(f"{module}:{line} uses {name}: {why(part, '')}")
    return found


def not_public(path: Path, part: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for every name of a public part that a file of `part` uses and that is in no ``__all__``."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [_dotted(node).replace("hs.", f"{PACKAGE}.", 1)]
        else:
            continue
        for name in names:
            package, _, below = name.partition(".")
            place, _, last = below.rpartition(".")
            first = place.split(".")[0]
            if (part, below) in ARROWS:  # `from halfstep import report` names a part
                continue
            if package == PACKAGE and below not in PUBLIC and first in PUBLIC - {part} and not last.startswith("__"):
                is_attribute = isinstance(node, ast.Attribute) and place not in PUBLIC  # as in hs.policy.Policy.of
                if not is_attribute and (place not in PUBLIC or last not in public_names(place)):
                    yield node.lineno, name


def public_names(place: str) -> list[str]:
    """Return the public names of the package ("") or of one of its parts."""
    names: list[str] = import_module(f"{PACKAGE}.{place}".rstrip(".")).__all__
    return names


def used_exceptions(root: Path, exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS) -> set[tuple[str, str]]:
    """Return the exceptions without which `violations` would find something."""
    found = violations(root, {})
    return {
        (module, target)
        for module, target in exceptions
        if any(line.startswith(f"{module}:") and f" imports {target}: " in line for line in found)
    }


def allowed(part: str, target: str) -> bool:
    """Return whether `part` may import `target`; "" is the package's own ``__init__``."""
    if part == target or (part, target) in ARROWS or (target == FOR_ALL and part):
        return True
    if part == "":
        return target in ROOT_IMPORTS
    if part not in LAYERS:
        return False
    if LAYERS[part] == OUTSIDE:
        return target in PUBLIC
    return target in LAYERS and LAYERS[target] < LAYERS[part]


def why(part: str, target: str) -> str:
    """Return the rule that ``part -> target`` breaks."""
    if part == "":
        return f"the package re-exports {', '.join(sorted(ROOT_IMPORTS))} and nothing else"
    if part not in LAYERS:
        return f"{part} has no layer; give it one in LAYERS"
    if LAYERS[part] == OUTSIDE:
        return f"{part} is a user of the package and sees its public names only"
    if target == "":
        return "the inside of the package must not import the package itself (it would be half-imported)"
    if target not in LAYERS:
        return f"{target} has no layer; give it one in LAYERS"
    if LAYERS[part] == LAYERS[target]:
        return f"{part} and {target} are siblings of layer {LAYERS[part]} and blind to each other"
    return f"layer {LAYERS[part]} must not see layer {LAYERS[target]}"


def _dotted(node: ast.expr) -> str:
    """Return a chain of attributes of a name as it is written, "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{above}.{node.attr}" if (above := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _exists(root: Path, name: str) -> bool:
    place = root.joinpath(*name.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()
