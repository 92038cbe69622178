"""The page agrees with the code: every row resolves, every public name has a row, every snippet runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import halfstep as hs
import halfstep.compat.mindspore as ms
from tests.snippets import run_page

FILE = Path(__file__).resolve().parents[3] / "docs" / "compat_mindspore.md"
PAGE = FILE.read_text()
ROWS = re.findall(r"^\| `([\w.]+)` \| (works|differs on purpose|absent) \|(.*)\|$", PAGE, re.M)

# mindspore.amp.__all__ of 2.10, the cells of mixed precision, and what older pages and the Ascend options list
PUBLIC = """
amp.DynamicLossScaleManager amp.LossScaleManager amp.FixedLossScaleManager amp.build_train_network
amp.DynamicLossScaler amp.StaticLossScaler amp.LossScaler amp.auto_mixed_precision amp.all_finite
amp.custom_mixed_precision amp.get_white_list amp.get_black_list amp.init_status train.Model
nn.TrainOneStepCell nn.TrainOneStepWithLossScaleCell nn.DynamicLossScaleUpdateCell nn.FixedLossScaleUpdateCell
nn.TrainOneStepWithLossScaleCell.set_sense_scale nn.TrainOneStepWithLossScaleCell.start_overflow_check
nn.TrainOneStepWithLossScaleCell.get_overflow_status nn.TrainOneStepWithLossScaleCell.process_loss_scale
nn.WithLossCell nn.WithEvalCell nn.ForwardValueAndGrad nn.WithGradCell nn.GradAccumulationCell
nn.Cell.to_float nn.Cell.add_flags nn.Cell.add_flags_recursive boost.GroupLossScaleManager
context.enable_auto_mixed_precision context.ascend_config value_and_grad
""".split()


def resolved(name: str) -> Any:
    value: Any = ms
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_every_public_name_of_mindspores_mixed_precision_has_one_row() -> None:
    names = [name for name, _, _ in ROWS]
    assert len(names) == len(set(names))
    assert set(PUBLIC) <= set(names)
    assert {f"amp.{name}" for name in ms.amp.__all__} <= set(names)


@pytest.mark.parametrize(("name", "status", "note"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_row_is_true(name: str, status: str, note: str) -> None:
    if status == "absent":
        with pytest.raises(AttributeError):
            resolved(name)
    else:
        assert resolved(name).__doc__
    if status != "works":
        assert len(note.split()) >= 4, "a difference has a reason"


def test_nearly_nothing_is_absent() -> None:
    assert sum(status == "absent" for _, status, _ in ROWS) <= 7 < len(ROWS) / 6


def test_every_name_the_packages_offer_is_there() -> None:
    for package in (ms, ms.amp, ms.nn, ms.ops, ms.train, ms.common, ms.dtype):
        assert sorted(set(package.__all__)) == sorted(package.__all__)
        assert all(hasattr(package, name) for name in package.__all__)


def test_the_pages_snippets_run_and_give_the_same_losses() -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    assert run_page(FILE, made) == 1
    assert made["loss"].isfinite() and float(made["scale"]) <= 2.0**24


def test_halfsteps_own_lines_in_the_migration_table_exist() -> None:
    table = PAGE.split("## Change the calls")[1].split("## What differs")[0]
    for name in re.findall(r"hs\.(\w+)", table):
        assert name in hs.__all__
    policy = hs.Policy.of("mixed", dtype="fp16", scale=hs.ScaleRule(init=2.0**16, interval=1000, floor=1.0))
    policy = policy.with_modules({"class:Softmax": "fp32", "fc3": "fp32"}).with_ops(low=["matmul"])
    assert policy.replace(scale=1024.0).scale == 1024.0
    assert hs.GradScaler(rule="mindspore-scaler").rule.floor == 1.0
