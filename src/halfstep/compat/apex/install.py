"""install: make ``from apex import amp`` import halfstep's, in this process."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from halfstep.errors import HalfstepError

HERE = "halfstep.compat.apex"
FILES = {
    "amp": ("_process_optimizer", "frontend", "handle", "lists", "scaler"),
    "fp16_utils": ("fp16_optimizer", "fp16util", "loss_scaler"),
    "multi_tensor_apply": ("multi_tensor_apply",),
    "normalization": ("fused_layer_norm",),
    "optimizers": ("fused_adagrad", "fused_adam", "fused_lamb", "fused_novograd", "fused_sgd"),
    "parallel": ("LARC", "distributed", "optimized_sync_batchnorm", "sync_batchnorm"),
}
"""Packages of Apex, and their submodules that scripts name: those of amp are here too, the others are their package."""

MERGED = {"_amp_state": "_process_optimizer", "_initialize": "frontend", "amp": "handle", "opt": "handle"}
"""Submodules of ``apex.amp`` whose names are in another one here."""

ABSENT = {
    "RNN": "recurrent layers of torch.nn work under every opt_level",
    "contrib": "it is about kernels, not precision; torch has fused attention, losses and norms of its own",
    "fused_dense": "use torch.nn.Linear, and torch.nn.functional.gelu between two",
    "mlp": "use torch.nn.Sequential of torch.nn.Linear and an activation",
    "transformer": "it is about model parallelism; use torch.distributed.tensor.parallel",
}
"""Parts of Apex that are not here -> what to use."""

_before: dict[str, ModuleType] = {}
"""What was in sys.modules under the names of Apex."""


class DeprecatedFeatureWarning(FutureWarning):
    """Apex's category for the warning that amp is going away. Here it is not, so nothing ever warns with it."""


class _Absent(importlib.abc.MetaPathFinder):
    """Says of a part of Apex that is not here what to use instead; asked last, only while `install` is in force."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package, _, rest = name.partition(".")
        part = rest.split(".")[0]
        if package == "apex" and part in ABSENT:
            raise ModuleNotFoundError(f"{name} is not in {HERE}: {ABSENT[part]}", name=name)


_absent = _Absent()


def install(*, force: bool = False) -> bool:
    """Register this package as ``apex`` in `sys.modules`, with its submodules, for this process.

    An apex that is installed and has amp stays, unless `force`. One without amp (since May 2025) gives its place too:
    its other parts need its extensions, and a script with ``from apex import amp`` cannot use it.

    Returns:
        Whether this package is ``apex`` now.

    Raises:
        HalfstepError: another apex was imported already, so that parts of the program hold its objects.
    """
    if _absent in sys.meta_path:
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
    for name, files in FILES.items():
        module = modules[f"apex.{name}"] = importlib.import_module(f"{HERE}.{name}")
        setattr(package, name, module)
        modules.update({f"apex.{name}.{file}": sys.modules.get(f"{HERE}.{name}.{file}", module) for file in files})
    modules.update({f"apex.amp.{name}": modules[f"apex.amp.{here}"] for name, here in MERGED.items()})
    _before.update(_taken())
    sys.modules.update(modules)
    sys.meta_path.append(_absent)
    return True


def uninstall() -> None:
    """Take the names off again; what was under them before is back."""
    if _absent in sys.meta_path:
        sys.meta_path.remove(_absent)
        _taken()
        sys.modules.update(_before)
        _before.clear()


def _taken() -> dict[str, ModuleType]:
    """Take the modules of Apex out of sys.modules, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "apex"}


def _real_amp() -> bool:  # without importing it
    known = sys.modules.get("apex")
    spec = importlib.util.find_spec("apex") if known is None else None
    places: Any = getattr(known, "__path__", None) if spec is None else spec.submodule_search_locations
    found = importlib.machinery.PathFinder.find_spec("apex.amp", list(places)) if places else None
    return found is not None or hasattr(known, "amp")
