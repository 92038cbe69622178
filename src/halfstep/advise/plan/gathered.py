"""Gathered: what `fully_shard` allocates and sends in a traced step. In: its operators. Out: named blocks, collectives.

fully_shard gathers a group's parameters into storages that it fills by `resize_` and empties by `resize_(0)`, which no
operator shows. Those that are full are looked at before every operator, so that a block ends before the next begins.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halfstep.advise.plan.ledger import Ledger
from halfstep.advise.plan.traffic import collective
from halfstep.torch_private.operators import schema_of

__all__ = ["Gathered"]


class Gathered:
    """Follows gathered parameters and buffers of collectives.

    Args:
        ledger: where blocks are noted.

    Attributes:
        seen: (operator, bytes that this rank puts in) of every collective of each step.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._full: list[Tensor] = []
        self.seen: dict[int, list[tuple[str, int]]] = {}

    def settle(self) -> None:
        """Notice which gathered parameters have been freed."""
        for tensor in self._full:
            self._ledger.resized(tensor)
        self._full = [tensor for tensor in self._full if tensor.untyped_storage().nbytes()]

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, step: int) -> None:
        """Name the blocks of one operator."""
        name = schema_of(func).name
        sent = collective(func, args)
        if sent is not None:
            self.seen.setdefault(step, []).append(sent)
            if sent[0] == "_reduce_scatter_base_":
                self._name(args[0], "gradients")
        elif name == "fsdp::all_gather_copy_in":
            for tensor in (*args[0], *result):
                self._name(tensor, "communication")
        elif name == "fsdp::chunk_cat":
            self._name(kwargs["out"], "communication")
        elif name == "fsdp::split_with_sizes_copy":
            for tensor in kwargs["out"]:
                self._ledger.resized(tensor)
                self._name(tensor, "gathered parameters", anew=True)
                self._full.append(tensor)

    def _name(self, tensor: Tensor, part: str, *, anew: bool = False) -> None:
        block = self._ledger.of(tensor)
        if block is not None and (anew or not block.part):
            block.part = part
