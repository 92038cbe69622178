"""Every way of writing weights by hand moves them as fp32 weights, or one warning names a weight and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.writes import AVERAGES, EXACT, KINDS, MASTERS, WRITES, fate, outcome
from tests.products import sampled


@pytest.mark.parametrize(
    ("way", "kind", "master"), sampled([*WRITES, *AVERAGES], KINDS[:4], MASTERS, rest=pytest.mark.slow)
)
def test_weights_move_as_fp32_weights_or_it_is_told(way: str, kind: str, master: str) -> None:
    error, told = fate(way, kind, master)
    if outcome(way, kind, master) == EXACT:
        assert error < 0.05 and told == []
    else:
        assert len(told) == 1 and error > 0.05  # else it need not be told
        assert "weight" in told[0] and ("'split'" in told[0] or "hs.edit_weights" in told[0])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SEEN = [way for way in WRITES if not any(word in way for word in (".data", "_foreach_", "torch.ops"))]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_writes_into_parts_of_sharded_weights_are_told(one_rank: None) -> None:
    for way in SEEN:
        for master in MASTERS[:4]:
            error, told = fate(way, "sharded", master)
            assert error > 0.05 and len([text for text in told if "hs.edit_weights" in text]) == 1, (way, master)
