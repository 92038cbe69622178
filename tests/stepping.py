"""What tests of several parts share about optimizers and about objects that must be freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


def own_step(optimizer: Optimizer) -> Any:
    """Make a training step call ``optimizer.step()`` instead of its own update; return the handle that ends this.

    A training step calls it where a hook must see the call.
    """
    return optimizer.register_step_pre_hook(lambda *_: None)


def fragile(kind: type[Optimizer]) -> Any:
    """Return a subclass of an optimizer whose next step fails once ``broken`` is set."""

    class Fragile(kind):  # type: ignore[misc, valid-type]
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                self.broken = False
                raise ZeroDivisionError
            return super().step(closure)

    return Fragile


@contextmanager
def without_collector() -> Iterator[None]:
    """Free objects by their reference counts only."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
