"""A sample of what `make test-distributed` runs, in one pair of processes: what CI runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import test_join, test_others, test_pipeline, test_strategies
from tests.two_processes import in_two_processes

pytestmark = pytest.mark.dist

STRATEGIES = (("ddp, windows", "pure:bf16:grads=fp32"), ("ddp, reduce=low", "mixed:fp16:reduce=low"), ("tp", "O0"))
UPDATES, OVERFLOWS = 3, 12
JOINS = ("windows", "pure")
ZERO, STAGES = "mixed:fp16", ("O2:fp16", "1F1B")


def _all(rank: int) -> dict[str, Any]:
    return {
        "strategies": test_strategies.work(rank, STRATEGIES, UPDATES, OVERFLOWS),
        "joins": {**{name: test_join.run(rank, name) for name in JOINS}, "refused": test_join.refused(rank)},
        "others": {
            "zero": test_others.zeros(rank, (ZERO,)),
            "flat": test_others.flat(rank),
            "overlapping": test_others.overlapping(rank),
        },
        "stages": {STAGES: test_pipeline.train(rank, *STAGES)},
    }


def test_a_sample_of_what_several_processes_do(tmp_path: Path) -> None:
    found = in_two_processes(_all, tmp_path)
    strategies, joins, others, stages = ([each[key] for each in found] for key in found[0])
    test_strategies.check(strategies, STRATEGIES, UPDATES)
    for name in JOINS:
        test_join.test_ranks_that_run_out_of_batches_train_with_the_others_to_the_end(joins, name)
    test_join.test_a_join_that_would_wait_forever_is_refused(joins)
    test_others.test_a_zero_redundancy_optimizer_trains_as_the_one_it_shards(others, ZERO)
    test_others.test_a_sharded_flat_parameter_is_refused_in_every_order(others)
    test_others.test_updates_and_casts_inside_the_backward_pass_are_refused(others)
    test_pipeline.test_stages_train_as_one_process_and_skip_together(stages, *STAGES)
