"""Count the collectives of a step: the operators of torch.distributed that are dispatched, and the bytes sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.trees import tensors

__all__ = ["Collectives"]

SPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
NO_COLLECTIVE = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


class Collectives(TorchDispatchMode):
    """A context that lists collectives: those of c10d (object gathers, DDP's reducer) and functional ones.

    Attributes:
        seen: (operator, bytes that this rank puts in), in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own dispatch comes first, and calls the collectives
        if func.namespace in SPACES:
            name = func._schema.name.partition("::")[2]
            if name not in NO_COLLECTIVE:
                self.seen.append((name, _bytes(func, args)))
        return func(*args, **(kwargs or {}))


def _bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the tensors that a rank puts in: the argument called input, else the first."""
    names = [argument.name for argument in func._schema.arguments]
    place = next((i for i, name in enumerate(names[: len(args)]) if name.startswith("input")), 0)
    return sum(t.numel() * t.element_size() for t in tensors(args[place]))
