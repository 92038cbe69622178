"""docs/compat_megengine.md lists every name, and its statement on each is true."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

import halfstep.compat.megengine as mge
from halfstep.compat.megengine import amp, autodiff, functional, hub, optimizer
from tests.compat.name_table import DOCS, NameRow, exists, repeated, rows
from tests.snippets import run_page

PAGE = "compat_megengine.md"
TABLE = rows(PAGE)
OWN = {"amp.AS_SHIPPED", "amp.MEGENGINE", "amp.policy", "hub.resnet18"}  # not in MegEngine
PACKAGES = ("amp", "autodiff", "functional", "hub", "optimizer")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.names[0])
def test_a_row_is_true(row: NameRow) -> None:
    for name in row.names:
        assert exists(mge, name) == (row.verdict != "absent"), name
    assert row.verdict == "works" or len(row.note) > 10, "why?"


def test_every_name_has_one_row() -> None:
    listed = {name for row in TABLE for name in row.names} | OWN
    modules: dict[str, ModuleType] = {"": mge, "amp.": amp, "autodiff.": autodiff, "hub.": hub, "optimizer.": optimizer}
    modules |= {"functional.": functional, "functional.nn.": functional.nn}
    for prefix, module in modules.items():
        for name in module.__all__:
            # what is in `functional` has its row there, and the losses theirs in `functional.nn`
            short = name in functional.__all__ and prefix == "functional.nn." and f"functional.{name}" in listed
            loss = name in functional.loss.__all__ and f"functional.nn.{name}" in listed
            assert prefix + name in listed or short or loss or name in PACKAGES, prefix + name
    for prefix, cls in (("amp.GradScaler", amp.GradScaler), ("autodiff.GradManager", autodiff.GradManager)):
        for name in vars(cls):
            assert name.startswith("_") or f"{prefix}.{name}" in listed or name == "found_non_finite"
    assert not list(repeated(TABLE))


def test_the_snippets_run_and_give_the_same_losses() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    assert run_page(DOCS / PAGE, names) == 1
    assert all(bool(p.isfinite().all()) for p in names["net"].parameters())
    assert all(p.grad is None for p in names["net"].parameters())


def test_the_lists_are_those_of_the_page() -> None:
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    cured = re.findall(r"^\| (.+) \| .+`AS_SHIPPED`: .+\|$", text, re.M)
    assert cured == ["softmax, sum, prod, cumsum", "convolutions of volumes"]
    difference = amp.MEGENGINE.diff(amp.AS_SHIPPED).splitlines()
    assert "fp32 -> input: cumprod, cumsum, nansum, prod, softmax, softmin, sum" in difference
    assert "low -> widest: conv3d, conv_transpose3d" in difference
