"""install: make ``from apex import amp`` import halfstep's, in this process."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from halfstep.errors import HalfstepError

__all__ = ["NAMES", "DeprecatedFeatureWarning", "install", "uninstall"]

HERE = "halfstep.compat.apex"
NAMES = ("amp", "fp16_utils", "optimizers", "parallel")
"""Submodules of ``apex`` that exist here."""

AMP = ("_amp_state", "_initialize", "_process_optimizer", "amp", "frontend", "handle", "lists", "opt", "scaler")

FILES = {
    "fp16_utils": ("fp16_optimizer", "fp16util", "loss_scaler"),
    "optimizers": ("fused_adam", "fused_lamb", "fused_novograd", "fused_sgd"),
    "parallel": ("LARC", "distributed"),
}
"""Submodules of Apex that scripts name: each has all names of its package."""

_installed: dict[str, ModuleType | None] = {}
"""Name in sys.modules -> what was there before."""


class DeprecatedFeatureWarning(FutureWarning):
    """Apex's category for the warning that amp is going away. Here it is not, so nothing ever warns with it."""


def install(*, force: bool = False) -> bool:
    """Register this package as ``apex`` in `sys.modules`, with its submodules, for this process.

    An apex that is installed and has amp stays, unless `force`. One without amp (since May 2025) gives its place too:
    its other parts need its extensions, and a script that says ``from apex import amp`` cannot use it.

    Returns:
        Whether this package is ``apex`` now.

    Raises:
        HalfstepError: another apex was imported already, so that parts of the program hold its objects.
    """
    if _installed:
        return True
    if not force and _real_amp():
        return False
    known = sys.modules.get("apex")
    if known is not None and not force:
        raise HalfstepError(
            f"another module named apex is imported already ({getattr(known, '__file__', known)}); call install() "
            "before anything imports apex, or install(force=True) to replace it from here on"
        )
    package = ModuleType("apex", __doc__)
    package.__path__ = []  # a package: `import apex.amp` looks its parts up in sys.modules
    package.__spec__ = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    package.DeprecatedFeatureWarning = DeprecatedFeatureWarning  # type: ignore[attr-defined]
    modules = {"apex": package}
    for name in NAMES:
        module = importlib.import_module(f"{HERE}.{name}")
        setattr(package, name, module)
        modules[f"apex.{name}"] = module
    for name in AMP:
        modules[f"apex.amp.{name}"] = importlib.import_module(f"{HERE}.amp.{name}")
    for name, files in FILES.items():
        modules.update({f"apex.{name}.{file}": modules[f"apex.{name}"] for file in files})
    replaced = {name for name in sys.modules if name == "apex" or name.startswith("apex.")}
    _installed.update({name: sys.modules.get(name) for name in replaced | set(modules)})
    for name in replaced:
        del sys.modules[name]
    sys.modules.update(modules)
    return True


def uninstall() -> None:
    """Take the names off again; what was under them before is back."""
    for name, before in _installed.items():
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
    _installed.clear()


def _real_amp() -> bool:
    """Return whether an apex with amp can be imported, without importing it."""
    known = sys.modules.get("apex")
    if known is not None:
        return hasattr(known, "amp") or "apex.amp" in sys.modules or _has_amp(getattr(known, "__path__", None))
    spec = importlib.util.find_spec("apex")
    return spec is not None and _has_amp(spec.submodule_search_locations)


def _has_amp(locations: object) -> bool:
    if not locations:
        return False
    return importlib.machinery.PathFinder.find_spec("apex.amp", list(locations)) is not None  # type: ignore[call-overload]
