"""Advice: what would save time or memory and that no policy can hold, with what was measured of the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from halfstep.advise.tune.board import Board
from halfstep.advise.tune.lab import Lab
from halfstep.advise.tune.text import size
from halfstep.tasks.compare import started

__all__ = ["advice"]

LARGE = 0.15
"""Share of the bytes kept for the backward pass that is worth a line of code."""

OFTEN = 3
"""Modules of one class beside one another that count as blocks."""


def advice(board: Board, lab: Lab) -> Iterator[str]:
    """Yield a line each for linear_cross_entropy and checkpointing, where they would matter."""
    best = board[board.best]
    if not best.saved_bytes:
        return
    kept = lab.known_calibration(board.candidate(board.best), board.steps)
    spots = () if kept is None else kept.spots
    if any(spot.op == "cross_entropy" for spot in spots):
        products = [spot for spot in spots if spot.op == "linear"]
        last = products[-1] if products else None
        if last is not None and last.bytes > LARGE * best.saved_bytes:
            yield (
                f"the result of {last.module or 'the last linear'} takes {size(last.bytes)} of "
                f"{size(best.saved_bytes)} kept for the backward pass: hs.linear_cross_entropy computes "
                "the loss without it"
            )
    if best.saved_bytes > best.state_bytes:
        found = _blocks(started(lab.task, lab.seed, "cpu"))
        if found:
            count, kind, path = found
            yield (
                f"{size(best.saved_bytes)} are kept for the backward pass and {size(best.state_bytes)} between steps: "
                f"torch.utils.checkpoint around each of the {count} {kind} in {path} keeps their inputs only, "
                "for about one more forward pass"
            )


def _blocks(model: nn.Module) -> tuple[int, str, str] | None:
    """Return (count, class, path) of the longest row of equal modules with submodules."""
    best: tuple[int, str, str] | None = None
    for path, module in model.named_modules():
        kinds = Counter(type(child).__name__ for child in module.children() if any(child.children()))
        for kind, count in kinds.items():
            if count >= OFTEN and (best is None or count > best[0]):
                best = count, kind, path or "the model"
    return best
