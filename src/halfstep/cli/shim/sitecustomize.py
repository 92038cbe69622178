"""What a process started under `halfstep run --policy` runs first: torch.amp's names follow the policy in it, too.

Python imports the first `sitecustomize` on its path, which is this one; the next one on the path is run from here. The
names are put in place when the process has imported torch, so that processes without torch start as fast as ever.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))


class Watch(importlib.abc.MetaPathFinder):
    """Wait for the first import of torch, or of halfstep, whose files import torch; then put the names in place."""

    def __init__(self) -> None:
        self.names = {"torch", "halfstep"}
        self.depth = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a watched module, whose execution is reported."""
        if name not in self.names:
            return None
        self.names.remove(name)  # the search below asks this finder too
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module
            spec.loader.exec_module = partial(self.execute, own)  # type: ignore[method-assign]
        return spec

    def execute(self, own: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Run a watched module as `own` does; the outermost one has imported all that it needs."""
        self.depth += 1
        try:
            own(module)
        finally:
            self.depth -= 1
        if not self.depth:
            self.loaded()

    def loaded(self) -> None:
        """Put the names in place: torch is complete, and halfstep is if it was imported."""
        sys.meta_path.remove(self)
        try:
            from halfstep.cli.run import serve_child
        except ImportError as error:
            print(f"halfstep run: not in the process {sys.argv}, which has no halfstep: {error}", file=sys.stderr)
        else:
            serve_child()


def run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if not {"HALFSTEP_RUN_POLICY", "HALFSTEP_RUN_EVIDENCE"}.isdisjoint(os.environ):
        sys.meta_path.insert(0, Watch())
    run_next()
