"""docs/compat_torch.md lists every name of torch.amp, and its statement on each is true."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
import torch.cpu.amp
import torch.cuda.amp
import torch.distributed.fsdp.sharded_grad_scaler

from halfstep.compat import torch_amp
from tests.compat.name_table import DOCS, NameRow, exists, repeated, rows

PAGE = "compat_torch.md"
TABLE = rows(PAGE)


def here(name: str) -> str:
    """Return the name below halfstep.compat.torch_amp: torch.amp is the package, cuda.amp and cpu.amp its modules."""
    return re.sub(r"^(cuda|cpu)\.amp\b", r"\1", re.sub(r"^amp\.", "", name))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.names[0])
def test_a_row_is_true(row: NameRow) -> None:
    for name in row.names:
        assert exists(torch, name), f"torch.{name} does not exist"
        if row.verdict in ("works", "differs"):
            assert exists(torch_amp, here(name)), name
        elif row.verdict == "absent":
            assert not exists(torch_amp, here(name)), name
    assert row.verdict in ("works", "torch's own") or len(row.note) > 10, "why?"


def test_every_name_has_one_row() -> None:
    listed = {name for row in TABLE for name in row.names}
    wanted = {f"amp.{name}" for name in torch_amp.__all__ if name not in ("cpu", "cuda")}
    wanted |= {f"amp.autocast_mode.{n}" for n in torch.amp.autocast_mode.__all__ if n not in torch_amp.__all__}
    wanted |= {f"amp.grad_scaler.{n}" for n in torch.amp.grad_scaler.__all__}
    wanted |= {f"cuda.amp.{n}" for n in torch.cuda.amp.__all__} | {"cpu.amp.autocast", "cpu.amp.GradScaler"}
    wanted |= {
        f"amp.GradScaler.{n}" for n, f in vars(torch.amp.GradScaler).items() if callable(f) and not n.startswith("_")
    }
    assert wanted <= listed
    assert not list(repeated(TABLE))


def test_the_lines_of_the_migration_run() -> None:
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    lines = re.findall(r"`(from halfstep[^`]+)`", text)
    assert len(lines) == 3
    for line in lines:
        exec(line, {})
    for file in re.findall(r"\]\(\.\./([^)]+)\)", text):
        assert (DOCS.parent / file).is_file()
    assert importlib.import_module("halfstep.compat.torch_amp") is torch_amp
