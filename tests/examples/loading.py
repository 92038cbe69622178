"""Import of an example by its path."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@cache
def load(name: str) -> ModuleType:
    """Import ``examples/NAME.py``, under a name by which a process it starts can import it too."""
    spec = importlib.util.spec_from_file_location(f"examples.{name.replace('/', '.')}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
