"""Code that is not about CUDA does not name it."""

from __future__ import annotations

from pathlib import Path

import halfstep
from tests.architecture.cuda import ALLOWED, names, unused, violations

ROOT = Path(halfstep.__file__).parent


def test_only_the_files_of_the_table_name_cuda() -> None:
    assert violations(ROOT) == []


def test_every_line_of_the_table_is_needed() -> None:
    assert unused(ROOT) == []


def test_a_file_that_begins_to_name_cuda_is_found() -> None:
    without = {place: why for place, why in ALLOWED.items() if place != "tasks/speed.py"}
    assert any(found.startswith("tasks/speed.py:") for found in violations(ROOT, without))


def test_names_of_a_device_count_and_words_do_not() -> None:
    code = '"""Of cuda."""\nx.is_cuda\ntorch.cuda.Event()\ny = "cuda:1"\nf"on cuda {x}"\nstep.cuda_graph\n"cuda" in w\n'
    assert sorted(names(code)) == [(2, "is_cuda"), (3, "cuda"), (4, "cuda:1"), (7, "cuda")]
