"""The soak runs, and a step that keeps something is not flat."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from benchmarks.soak import BOUNDS, growths, soak, soak_table

STEPS = 300


@pytest.mark.hours
def test_a_short_soak_does_everything_and_what_is_kept_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "halfstep"):
        kept: list[Any] = []
        found = soak(STEPS, 12)
        leaking = soak(STEPS // 2, 12, after=kept.append)
    counts = found["counts"]
    assert counts["updates"] > 200 and counts["updates retried"] > 3 and counts["updates skipped"] > 0
    assert all(counts[name] > 0 for name in ("checkpoints", "copies", "restarts", "batches not finite"))
    for name in ("tensors", "tensor_bytes", "files", "threads"):
        if name in found["growths"]:
            assert found["growths"][name]["flat"], name
    assert not leaking["growths"]["tensors"]["flat"]
    assert "300 micro-batches of four programs" in soak_table(found) and "| open files |" in soak_table(found)


def test_a_quantity_is_flat_up_to_its_bound() -> None:
    for name, (bound, _) in BOUNDS.items():
        for more, flat in ((bound, True), (bound + 2, False)):
            samples = [dict.fromkeys(BOUNDS, 5) for _ in range(8)]
            for last in samples[-2:]:
                last[name] += more
            assert growths(samples)[name]["flat"] is flat
