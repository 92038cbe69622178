"""MemoryPlan: the bytes of a training step as plain values: what persists, what is alive at the peak, the timeline."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import halfstep as hs
from halfstep.advise.plan.fit import Fit, Largest
from halfstep.advise.plan.ledger import PARTS, PHASES
from halfstep.advise.plan.page import part_table, plan_page, plan_text
from halfstep.advise.plan.ranks import Sent
from halfstep.report import write_page


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Memory of one part, module and format."""

    part: str  # one of `PARTS`
    module: str  # dotted name of the module that owns it or whose operator made it; "" for none or the model itself
    format: str  # number format, as "fp32", "bf16", "int64"
    bytes: int  # sum over its tensors' memory; memory shared by tensors counts once
    tensors: int  # blocks of memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The highest point of one stretch of a step."""

    phase: str  # one of `PHASES`
    operator: int  # number of operators run before it in this step
    name: str  # the operator that made the last block before it, such as "aten::mm"
    module: str  # dotted name of the module that was running, or whose backward pass was
    bytes: tuple[int, ...]  # of each part, in the order of `PARTS`

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of one training step, planned without it.

    Attributes:
        name: of the task or model.
        policy: the policy as it was resolved for the device.
        device: "cpu" or "cuda", whose operators and kernels were planned.
        parameters: elements of the model's parameters.
        operators: how many operators one step runs.
        persistent: what is there between two steps, batch included.
        peak: what is alive at the highest point of the steps.
        peak_at: when that is; in the first step only where `first_peak` is higher than the peak of the others.
        first_peak: bytes of the highest point of the first step, which makes the optimizer's state.
        setup_peak: bytes of the highest point before the first step, when model and optimizer are prepared.
        timeline: highest points of equally long stretches of a step after the first, in order.
        notes: what the plan does not include, one sentence each.
        devices: how many train together; the bytes are those of the first, which has the most.
        shard: "none", "ddp" or "fsdp2".
        batch_size: the first dimension of the batch; 0 if it has none.
        sent: the collectives of a step.
        fit: whether it fits a GPU; None if none was named.
        largest: the largest batch that fits; None if it was not looked for.
    """

    name: str
    policy: hs.Policy
    device: str
    parameters: int
    operators: int
    persistent: tuple[Row, ...]
    peak: tuple[Row, ...]
    peak_at: Moment
    first_peak: int
    setup_peak: int
    timeline: tuple[Moment, ...]
    notes: tuple[str, ...] = ()
    devices: int = 1
    shard: str = "none"
    batch_size: int = 0
    sent: tuple[Sent, ...] = ()
    fit: Fit | None = None
    largest: Largest | None = None

    @property
    def persistent_bytes(self) -> int:
        """Bytes between two steps."""
        return sum(row.bytes for row in self.persistent)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest point of a step."""
        return sum(row.bytes for row in self.peak)

    def phase_peaks(self) -> dict[str, int]:
        """Return the highest point of each phase of a step after the first, bytes."""
        found = dict.fromkeys(PHASES, 0)
        for moment in self.timeline:
            found[moment.phase] = max(found[moment.phase], moment.total)
        return found

    def by_part(self, *, peak: bool = True) -> dict[str, int]:
        """Return the bytes of each of `PARTS` at the peak, or of what persists."""
        found = self._sums(lambda row: row.part, peak)
        return {part: found[part] for part in PARTS if part in found}

    def by_format(self, *, peak: bool = True) -> dict[str, int]:
        """Return the bytes of each format, largest first."""
        return dict(self._sums(lambda row: row.format, peak).most_common())

    def by_module(self, depth: int | None = None, *, peak: bool = True) -> dict[str, int]:
        """Return the bytes of each module, largest first, by the first `depth` words of its dotted name; None: all."""
        return dict(self._sums(lambda row: ".".join(row.module.split(".")[:depth]), peak).most_common())

    def table(self) -> list[tuple[str, ...]]:
        """Return the parts as rows of text: headers first, then bytes between steps and at the peak, and the share."""
        return part_table(self).texts()

    def __str__(self) -> str:
        """Return the answer, the parts and the drawing of the peak as text."""
        return plan_text(self)

    def save_html(self, path: str | Path) -> None:
        """Write the plan as one HTML file with pictures that needs nothing else."""
        write_page(plan_page([self]), path)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values for JSON, with the sums under "summary"."""
        return {
            "summary": {
                "persistent_bytes": self.persistent_bytes,
                "peak_bytes": self.peak_bytes,
                "persistent": self.by_part(peak=False),
                "peak": self.by_part(),
                "peak_formats": self.by_format(),
                "phase_peaks": self.phase_peaks(),
            },
            **dataclasses.asdict(self),
            "policy": self.policy.to_toml(),
        }

    def _sums(self, name_of: Callable[[Row], str], peak: bool) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in self.peak if peak else self.persistent:
            found[name_of(row)] += row.bytes
        return found
