"""The benchmark of losses: a size is measured, and its table shows every candidate."""

from __future__ import annotations

from benchmarks.losses import Size, losses_table, measure, moved_table


def test_a_size_is_measured() -> None:
    case = measure(Size(rows=64, classes=4096, features=16), 1, quick=True)
    rows = case["rows"]
    assert case["rounds"] == 2 and all(row["ms"] > 0 for row in rows.values())
    logits = 64 * 4096 * 2
    assert logits <= rows["cross_entropy"]["saved_bytes"] < 1.1 * logits
    assert rows["torch.amp"]["saved_bytes"] >= 2 * logits > 4 * rows["linear_cross_entropy"]["saved_bytes"]
    text = losses_table({"quick": True, "cases": [case]})
    assert "measure nothing" in text and all(f"`{label}`" in text for label in rows)


def test_nothing_measured_is_said_so() -> None:
    assert losses_table({}) == moved_table({}) == "Not measured here."


def test_what_is_counted_is_shown() -> None:
    row = {"rows": 4, "classes": 5, "features": 6, "to_pair": 1.257, "launches": 60, "pair_launches": 26}
    assert "| 4 x 6 x 5 | 1.26 | 60 | 26 |" in moved_table({"moved": [row]})
