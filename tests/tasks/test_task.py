from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

import halfstep as hs
from halfstep.tasks import TaskError, load_task, machine, task_names
from halfstep.tasks.candidates import candidates
from halfstep.tasks.compare import check
from tests.tasks.small import small_task


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("model", 3, "task 'small': model must be callable and is 3"),
        ("metric", 3, "metric must be callable or None and is 3"),
        ("metric", None, "metric and margin go together"),
        ("margin", None, "metric and margin go together"),
        ("steps", 0, "steps must be a whole number from 1 and is 0"),
        ("excerpt_steps", 2.5, "excerpt_steps must be a whole number from 1 and is 2.5"),
        ("margin", 0.0, "margin must be a positive finite number or None and is 0.0"),
        ("margin", float("nan"), "margin must be a positive finite number or None and is nan"),
        ("clip_norm", -1.0, "clip_norm must be a positive finite number or None and is -1.0"),
    ],
)
def test_a_task_that_makes_no_sense_says_what_and_where(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        small_task(**{field: value})


def test_a_task_without_a_metric_is_not_compared() -> None:
    task = small_task(metric=None, margin=None)
    with pytest.raises(TaskError, match="task 'small' has no metric to compare by; give it metric= and margin="):
        check(task, candidates([], "cpu"), "cpu")
    with pytest.raises(TaskError, match="has no metric"):
        task.measured(task.model())


def test_a_task_is_frozen_and_its_error_is_halfsteps() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_task().steps = 3  # type: ignore[misc]
    assert issubclass(TaskError, (hs.HalfstepError, ValueError))


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(
        TaskError, match=r"unknown task 'lenet'; did you mean 'lenet5'\?; there are lenet5, resnet, gpt and path"
    ):
        load_task("lenet")
    assert task_names() == ("lenet5", "resnet", "gpt")


def test_a_task_from_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.tasks.small import small_task\n\ndef make():\n    return small_task(name='mine')\n\nthree = 3\n"
    )
    assert load_task(f"{file}:make").name == "mine"
    with pytest.raises(TaskError, match=r"mine.py has no function 'maek'; did you mean 'make'\?"):
        load_task(f"{file}:maek")
    with pytest.raises(TaskError, match="no function 'three'"):
        load_task(f"{file}:three")
    with pytest.raises(TaskError, match=r"other.py' does not exist"):
        load_task(f"{tmp_path / 'other.py'}:make")
    file.write_text("def make():\n    return 5\n")
    with pytest.raises(TaskError, match="must return an hs.Task and returned int"):
        load_task(f"{file}:make")


def test_a_users_file_imports_its_neighbours_and_has_dataclasses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a_neighbour.py").write_text("from tests.tasks.small import small_task\n")
    (tmp_path / "another_neighbour.py").write_text("NAME = 'mine'\n")
    file = tmp_path / "with_neighbours.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport a_neighbour\n\n"
        "@dataclass\nclass Config:\n    width: int = 3\n\n"
        "def make():\n    import another_neighbour\n    return a_neighbour.small_task(name=another_neighbour.NAME)\n"
    )
    modules = set(sys.modules)
    try:
        assert load_task(f"{file}:make").name == "mine"
        assert set(sys.modules) - modules == {"a_neighbour", "another_neighbour"}
        assert sys.path[0] == str(tmp_path.resolve())
    finally:
        for name in ("a_neighbour", "another_neighbour"):
            sys.modules.pop(name, None)


def test_a_file_without_its_function() -> None:
    with pytest.raises(TaskError, match=r"'train.py' names no function; write train.py:function"):
        load_task("train.py")


def test_the_machine_is_described_in_plain_values() -> None:
    about = machine()
    assert about["cpu"] and about["cores"] >= 1 and about["torch"] and about["python"]
    assert all(isinstance(v, (str, int, bool, list)) for v in about.values())
