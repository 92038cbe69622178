"""Lazy names: what a package has, imported when it is first used, so that a program pays for what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, files: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: its names by file, and the parts of the package themselves.

    Args:
        package: its name.
        files: file below the package, with dots -> names from it, with spaces between.
    """
    file_of = {name: file for file, names in files.items() for name in names.split()}

    def found(name: str) -> Any:
        part = f"{package}.{file_of.get(name, name)}"
        try:
            value = import_module(part)
        except ModuleNotFoundError as error:
            if error.name != part:
                raise  # a library that the part needs is absent
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = getattr(value, name) if name in file_of else value
        setattr(sys.modules[package], name, value)
        return value

    return found
