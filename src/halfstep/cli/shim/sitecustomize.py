"""What a process started under `halfstep run --policy` runs first: torch.amp's names follow the policy in it, too.

Python imports the first `sitecustomize` on its path, which is this one; the next one on the path is run from here. The
names are put in place when the process has imported torch, so that processes without torch start as fast as ever.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class Watch(importlib.abc.MetaPathFinder):
    """Wait for the first import of torch, or of halfstep, which imports torch; then put the names in place."""

    def __init__(self) -> None:
        self.names = {"torch", "halfstep"}
        self.depth = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a watched module with a loader that reports its end."""
        if name not in self.names:
            return None
        self.names.remove(name)  # the search below asks this finder too
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(self, spec.loader)
        return spec

    def loaded(self) -> None:
        """Put the names in place: torch is complete, and halfstep is if it was imported."""
        sys.meta_path.remove(self)
        try:
            from halfstep.cli.run import serve_child
        except ImportError as error:
            print(f"halfstep run: not in the process {sys.argv}, which has no halfstep: {error}", file=sys.stderr)
        else:
            serve_child()


class Loader(importlib.abc.Loader):
    """Load a module as `own` does, and tell `watch`."""

    def __init__(self, watch: Watch, own: Any) -> None:
        self.watch, self.own = watch, own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Do what `own` does."""
        return self.own.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Do what `own` does, and be forgotten."""
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.watch.depth += 1
        try:
            self.own.exec_module(module)
        finally:
            self.watch.depth -= 1
        if not self.watch.depth:
            self.watch.loaded()


def run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if "HALFSTEP_RUN_POLICY" in os.environ:
        sys.meta_path.insert(0, Watch())
    run_next()
