"""The counts of a step: frozen rows, their totals, a table and JSON."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PHASES = ("other", "forward", "backward", "tail")
"""Where in a step something happened.

forward: from the call of a model (or, in a TrainStep, of its loss function) to the backward pass; backward: inside it;
tail: after the last one, until a model is called again; other: before the first call of a model.
"""

CASTS = ("weight", "gradient", "down", "up")
"""Kinds of casts: of a parameter's values, of a parameter's gradient, and of the rest to fewer or to more bits."""

MIB = 2.0**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One operator in one phase.

    Attributes:
        phase: one of `PHASES`.
        operator: its name in torch's dispatcher, ``aten::mm``; with ``.out`` and the like left out.
        kind: one of `CASTS`, or "".
        casts: tensors cast.
        launches: calls that start work on a device: each counts one, however many tensors it takes.
        kernels: the same with multi-tensor functions counted as the launches they need on CUDA.
        read: bytes of the tensors read.
        written: bytes of the tensors written.
    """

    phase: str
    operator: str
    kind: str = ""
    casts: int = 0
    launches: int = 0
    kernels: int = 0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Something for which the host waits for the device.

    Attributes:
        phase: one of `PHASES`.
        operator: what was asked, ``aten::_local_scalar_dense`` for `.item()`.
        where: ``file.py:12 text`` of the innermost line outside torch; "" if there is none.
    """

    phase: str
    operator: str
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What one step did.

    Attributes:
        rows: one for each phase, operator and kind of cast, in the order of their first calls.
        syncs: everything the host waited for, in order.
        parameters: elements of the model's parameters.
        saved: bytes that the forward pass left for the backward pass, parameters excepted, each storage once.
    """

    rows: tuple[Row, ...]
    syncs: tuple[Sync, ...]
    parameters: int
    saved: int

    def casts(self, *kinds: str) -> int:
        """Return how many tensors were cast: of these kinds, or of all."""
        return sum(row.casts for row in self._cast_rows(kinds))

    def cast_bytes(self, *kinds: str) -> int:
        """Return the bytes these casts read and wrote."""
        return sum(row.bytes for row in self._cast_rows(kinds))

    def bytes(self, *phases: str) -> int:
        """Return the bytes read and written: in these phases, or in all."""
        return sum(row.bytes for row in self.rows if row.phase in (phases or PHASES))

    def launches(self, *phases: str) -> int:
        """Return the calls that start work on a device: in these phases, or in all."""
        return sum(row.launches for row in self.rows if row.phase in (phases or PHASES))

    def kernels(self, *phases: str) -> int:
        """Return the launches with multi-tensor functions counted as often as they launch on CUDA."""
        return sum(row.kernels for row in self.rows if row.phase in (phases or PHASES))

    def syncs_in(self, *phases: str) -> int:
        """Return how often the host waited: in these phases, or in all."""
        return sum(sync.phase in (phases or PHASES) for sync in self.syncs)

    @property
    def tail_bytes_per_parameter(self) -> float:
        """Bytes read and written in the tail, for each parameter of the model."""
        return self.bytes("tail") / max(1, self.parameters)

    @property
    def weight_bytes_per_parameter(self) -> float:
        """Bytes for each parameter that casts of weights and of their gradients moved outside of the tail."""
        moved = sum(row.bytes for row in self._cast_rows(("weight", "gradient")) if row.phase != "tail")
        return moved / max(1, self.parameters)

    def summary(self) -> dict[str, Any]:
        """Return the totals as plain values, by name."""
        return {
            "parameters": self.parameters,
            "casts": self.casts(),
            **{f"casts_{kind}": self.casts(kind) for kind in CASTS},
            "cast_bytes": self.cast_bytes(),
            "bytes": self.bytes(),
            **{f"bytes_{phase}": self.bytes(phase) for phase in PHASES},
            "launches": self.launches(),
            "launches_tail": self.launches("tail"),
            "kernels": self.kernels(),
            "kernels_tail": self.kernels("tail"),
            "syncs": self.syncs_in(),
            **{f"syncs_{phase}": self.syncs_in(phase) for phase in PHASES},
            "saved_bytes": self.saved,
            "tail_bytes_per_parameter": self.tail_bytes_per_parameter,
            "weight_bytes_per_parameter": self.weight_bytes_per_parameter,
        }

    def to_json(self) -> str:
        """Return everything as JSON: the totals under "summary", and the rows and syncs they come from."""
        return json.dumps({"summary": self.summary(), **dataclasses.asdict(self)}, indent=1)

    def __str__(self) -> str:
        """Return a table: the phases, then the casts, then what moved the most bytes."""
        lines = [_line("phase", "MiB", "casts", "cast MiB", "launches", "kernels", "syncs")]
        for phase in (*PHASES, "all"):
            chosen = PHASES if phase == "all" else (phase,)
            cast = [row for row in self._cast_rows(()) if row.phase in chosen]
            lines.append(
                _line(
                    phase,
                    f"{self.bytes(*chosen) / MIB:.1f}",
                    sum(row.casts for row in cast),
                    f"{sum(row.bytes for row in cast) / MIB:.1f}",
                    self.launches(*chosen),
                    self.kernels(*chosen),
                    self.syncs_in(*chosen),
                )
            )
        kinds = ", ".join(f"{kind} {self.casts(kind)} ({self.cast_bytes(kind) / MIB:.1f} MiB)" for kind in CASTS)
        lines += ["", f"casts: {kinds}", f"saved for backward: {self.saved / MIB:.1f} MiB"]
        lines.append(
            f"bytes a parameter ({self.parameters:,}): tail {self.tail_bytes_per_parameter:.1f}, casts of weights and "
            f"their gradients before it {self.weight_bytes_per_parameter:.1f}"
        )
        lines += ["", _line("most bytes", "MiB", "casts", "", "launches", "kernels", "")]
        for row in sorted(self.rows, key=lambda row: -row.bytes)[:12]:
            name = f"{row.phase} {row.operator}{f' ({row.kind})' if row.kind else ''}"
            lines.append(_line(name, f"{row.bytes / MIB:.1f}", row.casts or "", "", row.launches, row.kernels, ""))
        lines += [f"sync in {sync.phase}: {sync.operator} at {sync.where or 'torch'}" for sync in self.syncs]
        return "\n".join(line.rstrip() for line in lines)

    def _cast_rows(self, kinds: Iterable[str]) -> list[Row]:
        wanted = tuple(kinds) or CASTS
        return [row for row in self.rows if row.kind in wanted]


def _line(name: str, *cells: object) -> str:
    return f"{name:<58}" + "".join(f"{cell!s:>10}" for cell in cells)
