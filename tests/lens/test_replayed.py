"""Evidence of a bad step, replayed in another process, gives the verdict of the run: cause, place and cures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lens.replayed import CASES, alone, in_ranks
from tests.two_processes import run_all

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
PLACE = "kind cause because sure op module phase line parameter".split()
SAME = [*PLACE, "shown", "value", "rank"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the verdicts of runs and of replays, which were made in two processes."""
    made = tmp_path_factory.mktemp("replayed")
    in_ranks(made)
    for what in ("run", "replay"):
        run_all(alone, (what, str(made)), nprocs=1)
    return made


@pytest.mark.parametrize(("loop", "fault"), CASES)
def test_a_replay_elsewhere_gives_the_verdict_of_the_run(folder: Path, loop: str, fault: str) -> None:
    run = json.loads((folder / f"{loop}-{fault}" / "run0.json").read_text())
    files = sorted((folder / f"{loop}-{fault}").glob(f"halfstep-blackbox-{run['step']}*.json"))
    assert len(files) == (2 if loop == "ddp" else 1)
    same = 0
    for file in files:
        again = json.loads(file.read_text())
        names = PLACE if again["rank"] != run["rank"] else SAME  # each rank replays its own batch
        assert {name: again[name] for name in names} == {name: run[name] for name in names}
        assert [cure["text"] for cure in again["cures"]] == [cure["text"] for cure in run["cures"]]
        assert run["cause"] or fault == "state"
        assert file.with_suffix(".txt").read_text().splitlines()[0].endswith(run["headline"])
        if again["rank"] == run["rank"]:
            assert _outcomes(again) == _outcomes(run)
            same += 1
    assert same


def _outcomes(verdict: dict[str, Any]) -> list[Any]:
    return [(cure["verified"], cure["outcome"]) for cure in verdict["cures"]]
