"""Plans made by hand, for tests of what is said about them."""

from __future__ import annotations

from typing import Any

import halfstep as hs
from halfstep.advise.plan import PARTS, MemoryPlan, Moment, Row

GIB = 2**30


def made(peak: float, persistent: float = 1.0, **fields: Any) -> MemoryPlan:
    """Return a plan with these GiB: parameters persist, the rest of the peak is saved for backward."""
    kept, saved = int(persistent * GIB), int((peak - persistent) * GIB)
    parameters = Row(part="parameters", module="blocks.0.up", format="fp32", bytes=kept, tensors=1)
    rest = [Row(part="saved for backward", module=f"blocks.{n}.up", format="bf16", bytes=saved // 2, tensors=3)
            for n in range(2)]  # fmt: skip
    moments = [_moment("forward", n, kept, saved * n // 3) for n in (1, 2)]
    moments += [
        _moment("backward", 3, kept, saved),
        _moment("backward", 4, kept, saved // 2),
        _moment("update", 5, kept, 0),
    ]
    given: dict[str, Any] = {
        "name": "net", "policy": hs.Policy.of("mixed", dtype="bf16"), "device": "cpu", "parameters": 1000,
        "operators": 6,
        "persistent": (parameters,), "peak": (parameters, *rest), "peak_at": moments[2], "first_peak": int(peak * GIB),
        "setup_peak": kept, "timeline": tuple(moments), "batch_size": 8,
    }  # fmt: skip
    return MemoryPlan(**{**given, **fields})


def _moment(phase: str, operator: int, kept: int, saved: int) -> Moment:
    sizes = {"parameters": kept, "saved for backward": saved}
    return Moment(
        phase=phase, operator=operator, name="aten::mm", module="blocks.1.up",
        bytes=tuple(sizes.get(part, 0) for part in PARTS),
    )  # fmt: skip
