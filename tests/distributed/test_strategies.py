"""Every strategy in two and four gloo processes: as one process with the same global batch, and equal ranks.

`benchmarks.scale` runs the same checks for longer, and writes down what it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checks import added, deviation, overflows, parity, reference
from tests.distributed.strategies import STRATEGIES
from tests.two_processes import in_processes

pytestmark = [pytest.mark.dist, pytest.mark.hours]

UPDATES, OVERFLOWS = 6, 200
ALL = tuple((name, policy) for name, strategy in STRATEGIES.items() for policy in strategy.policies)


def work(rank: int, runs: tuple[tuple[str, str], ...], updates: int, overflowing: int) -> dict[Any, Any]:
    checks: dict[str, Callable[..., Any]] = {
        "parity": lambda name, policy: parity(rank, name, policy, updates),
        "overflows": lambda name, policy: overflows(rank, name, policy, overflowing),
        "added": lambda name, policy: added(rank, name, policy),
    }
    return {(check, run): call(*run) for run in runs for check, call in checks.items()}


def check(found: list[dict[Any, Any]], runs: tuple[tuple[str, str], ...], updates: int) -> None:
    for run in runs:
        wanted = reference(*run, len(found), updates)
        results = [each["parity", run] for each in found]
        for result in results:
            apart = deviation(result["weights"], wanted["weights"], wanted["start"])
            assert apart <= STRATEGIES[run[0]].bound(run[1]), (run, apart)
            assert deviation(result["weights"], results[0]["weights"], wanted["start"]) == 0.0, run
        sent = found[0]["added", run]
        for kind in ("good", "bad"):  # a plain norm beside sharded ones is agreed upon, and counted apart
            assert len(sent[kind]) - len(sent["passes"]) <= 1, (run, sent)
        many = [each["overflows", run] for each in found]
        assert all(one["skipped"] == one["expected"] for one in many), run
        assert any(many[0]["expected"]) and not all(many[0]["expected"])
        assert all(one["scales"] == many[0]["scales"] and one["weights"] and one["finite"] for one in many), run


@pytest.mark.parametrize("count", [2, 4])
def test_every_strategy_trains_as_one_process_and_ranks_agree(count: int, tmp_path: Path) -> None:
    runs = tuple(run for run in ALL if count in STRATEGIES[run[0]].ranks)
    check(in_processes(count, work, tmp_path, runs, UPDATES, OVERFLOWS, patience=3000), runs, UPDATES)
