"""Presets: each is pinned by a golden file; a change of a preset shows as a change of that file."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.policy import PRESETS, Policy

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", PRESETS)
def test_is_its_golden_file(name: str) -> None:
    golden = (GOLDEN / f"{name}.toml").read_text(encoding="utf-8")
    assert PRESETS[name].to_toml() == golden, f"{name} changed; if it was meant to, write to_toml() to {name}.toml"
    assert Policy.from_toml(golden) == PRESETS[name]


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.toml")} == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_is_called_by_its_name(name: str) -> None:
    assert PRESETS[name].name == name


def test_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["mine"] = Policy()  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("O0", {"dtype": "fp32", "params": "fp32", "scale": "none"}),
        ("torch", {"params": "fp32", "table": "torch", "residual": "fp32", "scale": "auto"}),
        ("O1", {"params": "fp32", "table": "apex-o1", "residual": "fp32", "scale": "auto"}),
        ("mixed", {"params": "fp32", "table": "mixed", "residual": "fp32", "scale": "auto", "loss": "fp32"}),
        (
            "O2",
            {"params": "low", "norms": "fp32", "master": "auto", "inputs": "low", "outputs": "fp32", "residual": "low"},
        ),
        ("pure", {"params": "low", "norms": "low", "master": "auto", "outputs": "fp32", "residual": "low"}),
        ("lean", {"params": "low", "norms": "low", "master": "stochastic", "state": "low", "residual": "low"}),
        ("O3", {"params": "low", "norms": "low", "master": "none", "table": "all-low", "scale": 1.0, "loss": "keep"}),
    ],
)
def test_says_what_the_design_says(name: str, fields: dict[str, object]) -> None:
    assert {field: getattr(PRESETS[name], field) for field in fields} == fields
