"""The pictures of the concept pages: drawn from the committed facts, which a run gives again; legible on a phone."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from benchmarks import concept_pictures
from benchmarks.canvas import SIDE, WIDTH
from benchmarks.concept_facts import scale_run
from benchmarks.concept_pictures import FOLDER, pictures, stale_pictures
from benchmarks.reports import load
from halfstep.testing import run_python
from halfstep.testing.fake_cuda import missing

ROOT = Path(__file__).resolve().parent.parent.parent
WIDEST = 6.7  # px of a letter of 12 px on average, in a wide font (DejaVu Sans)


def test_pictures_are_drawn_from_the_committed_facts() -> None:
    assert stale_pictures() == [], "run `make tables`"


def test_a_number_changed_by_hand_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in pictures().items():
        (tmp_path / name).write_text(text.replace("65504", "65505"), encoding="utf-8")
    monkeypatch.setattr(concept_pictures, "FOLDER", tmp_path)
    assert stale_pictures(write=True) == ["formats.svg"]
    assert stale_pictures() == []


@pytest.mark.parametrize("name", ["formats.svg", "step_casts.svg", "scale_moves.svg"])
def test_text_is_large_enough_for_a_phone_and_stays_inside(name: str) -> None:
    picture = (FOLDER / name).read_text(encoding="utf-8")
    texts = re.findall(r'<text x="([\d.]+)" .*?font-size: (\d+)px; text-anchor: (\w+);.*?>(.*?)</text>', picture)
    assert len(texts) == picture.count("<text ") > 10
    for x, size, anchor, text in texts:
        wide = WIDEST * len(text)
        left = float(x) - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        assert int(size) >= 12 and left >= SIDE / 2 and left + wide <= WIDTH, text


def test_the_scale_moves_as_committed(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("concepts.json")["scale"]
    assert scale_run() == found
    assert found["warnings"] == 1, "one warning at the floor"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_a_step_casts_as_committed(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    places = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    words = ["-m", "benchmarks.concept_facts", "--steps", "--json", str(file)]
    done = run_python(words, capture_output=True, env={**os.environ, "PYTHONPATH": places})
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text(encoding="utf-8"))["steps"] == load("concepts.json")["steps"]
