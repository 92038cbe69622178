from __future__ import annotations

import json

from halfstep.testing import Counts, Row, Sync


def row(phase: str, operator: str, kind: str, casts: int, launches: int, kernels: int, read: int, written: int) -> Row:
    numbers = {"casts": casts, "launches": launches, "kernels": kernels, "read": read, "written": written}
    return Row(phase=phase, operator=f"aten::{operator}", kind=kind, **numbers)


COUNTS = Counts(
    rows=(
        row("forward", "_to_copy", "weight", 2, 2, 2, 80, 40),
        row("forward", "mm", "", 0, 1, 1, 100, 50),
        row("backward", "_to_copy", "up", 1, 1, 1, 20, 40),
        row("tail", "_foreach_copy_", "weight", 3, 1, 2, 9, 1),
    ),
    syncs=(Sync(phase="tail", operator="aten::_local_scalar_dense", where="train.py:3 loss.item()"),),
    parameters=10,
    saved=2**20,
)


def test_totals_are_sums_of_rows() -> None:
    assert (COUNTS.casts(), COUNTS.casts("weight"), COUNTS.casts("down")) == (6, 5, 0)
    assert (COUNTS.cast_bytes(), COUNTS.cast_bytes("up")) == (190, 60)
    assert (COUNTS.bytes(), COUNTS.bytes("forward"), COUNTS.bytes("forward", "tail")) == (340, 270, 280)
    assert (COUNTS.launches(), COUNTS.kernels("tail")) == (5, 2)
    assert (COUNTS.syncs_in(), COUNTS.syncs_in("tail"), COUNTS.syncs_in("forward")) == (1, 1, 0)
    assert (COUNTS.tail_bytes_per_parameter, COUNTS.weight_bytes_per_parameter) == (1.0, 12.0)


def test_a_value_can_be_pasted_back() -> None:
    assert eval(repr(COUNTS)) == COUNTS and hash(COUNTS) == hash(eval(repr(COUNTS)))


def test_json_has_the_totals_and_where_they_come_from() -> None:
    data = json.loads(COUNTS.to_json())
    assert data["summary"]["casts_weight"] == 5 and data["summary"]["launches_tail"] == 1
    again = Counts(
        rows=tuple(Row(**row) for row in data["rows"]),
        syncs=tuple(Sync(**sync) for sync in data["syncs"]),
        parameters=data["parameters"],
        saved=data["saved"],
    )
    assert again == COUNTS


def test_printing_it_gives_a_table() -> None:
    lines = str(COUNTS).splitlines()
    assert lines[0].split() == ["phase", "MiB", "casts", "cast", "MiB", "launches", "kernels", "syncs"]
    assert next(line for line in lines if line.startswith("tail ")).split() == [
        "tail",
        "0.0",
        "3",
        "0.0",
        "1",
        "2",
        "1",
    ]
    assert "saved for backward: 1.0 MiB" in lines
    assert lines[-1] == "sync in tail: aten::_local_scalar_dense at train.py:3 loss.item()"
    assert all(line == line.rstrip() for line in lines)


def test_nothing_counted_divides_by_nothing() -> None:
    assert Counts(rows=(), syncs=(), parameters=0, saved=0).tail_bytes_per_parameter == 0.0
