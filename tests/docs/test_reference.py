"""The reference: every public name is on a page, with a docstring; examples run and give what stands beside them."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer

import halfstep as hs
from docs_site import commands
from halfstep.cli import app
from tests.snippets import snippets

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"
TEXT = {page.stem: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
NAMES = [name for text in TEXT.values() for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]
PARTS = ("errors", "formats", "lens", "policy", "step", "testing", "trees")
"""Parts of the package whose public names have a place in the reference."""

RECORDS = (
    "Mismatch",
    "Units",
    "Cure",
    "Magnitude",
    "OperatorCall",
    "Sink",
    "Counts",
    "Row",
    "Sync",
    "StepMetrics",
    "MetricsLogger",
)
"""Classes that are given, not made: the functions that return them have the examples."""

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
HERE = [name for name in NAMES if not name.startswith("halfstep.integrations.")]
"""Names that need no library but torch."""


def found(name: str) -> Any:
    """Return what a dotted name stands for."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last, None)
    return value if value is not None else importlib.import_module(name)


def examples_of(name: str, value: object) -> Iterator[doctest.DocTest]:
    """Yield the examples in the docstring of a name and of its public methods."""
    parser = doctest.DocTestParser()
    owned = vars(value).items() if isinstance(value, type) else ()
    methods = [(f"{name}.{n}", getattr(value, n)) for n, _ in owned if not n.startswith("_")]
    for where, one in [(name, value), *methods]:
        if isinstance(text := getattr(one, "__doc__", None), str) and ">>>" in text:
            yield parser.get_doctest(inspect.cleandoc(text), {}, where, where, 0)


def run(test: doctest.DocTest, namespace: dict[str, Any]) -> str:
    """Run one docstring's examples; return what doctest reports of failures, or ""."""
    test.globs = namespace
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
    return "".join(report)


@pytest.fixture
def namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[dict[str, Any]]:
    """What examples have: the snippet of the reference's first page, a folder, one process of torchrun."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Mock()))
    caplog.set_level(logging.CRITICAL, "halfstep")
    torch.manual_seed(0)
    made: dict[str, Any] = {"__name__": "__main__"}
    ((_, code),) = snippets(PAGES / "README.md")
    exec(code, made)
    yield made
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in HERE if list(examples_of(n, found(n)))])
def test_examples_run_and_give_what_stands_beside_them(name: str, namespace: dict[str, Any]) -> None:
    for test in examples_of(name, found(name)):
        assert run(test, dict(namespace)) == ""


def test_every_public_name_at_the_top_has_a_docstring_and_an_example_that_runs() -> None:
    for name in hs.__all__:
        value = getattr(hs, name)
        examples = [e for test in examples_of(name, value) if test.name == name for e in test.examples]
        assert examples, f"hs.{name} has no example"
        assert not any(e.options.get(doctest.SKIP) for e in examples), name


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    listed = {id(found(name)) for name in HERE}
    assert len(NAMES) == len(set(NAMES)) and len(listed) == len(HERE)
    assert [name for name in hs.__all__ if id(getattr(hs, name)) not in listed] == []
    everything = "".join(TEXT.values())
    for part in map(importlib.import_module, [f"halfstep.{part}" for part in PARTS]):
        absent = [n for n in part.__all__ if id(getattr(part, n)) not in listed and f"`{n}`" not in everything]
        assert absent == [], part


def test_a_function_in_a_module_of_its_name_is_listed_by_its_whole_path() -> None:
    """The reference is made from the files, in which ``halfstep.checkpoints.save`` is a module."""
    for name in HERE:
        value, last = found(name), name.rpartition(".")[2]
        above, _, leaf = getattr(value, "__module__", "").rpartition(".")
        if leaf == last and getattr(importlib.import_module(above), last) is value:
            assert name == f"{above}.{leaf}.{last}"


def test_every_name_of_the_parts_has_a_docstring_and_what_is_called_an_example() -> None:
    for name in HERE:
        value = found(name)
        if not callable(value):
            continue
        own = (value.__doc__ or "").strip()
        assert own and not own.startswith(f"{value.__name__}("), f"{name} has no docstring"
        is_error = isinstance(value, type) and issubclass(value, Exception)
        if not is_error and not name.startswith("halfstep.advise.") and value.__name__ not in RECORDS:
            assert ">>>" in own, f"{name} has no example"


def test_the_examples_of_integrations_are_python() -> None:
    for path in (Path(hs.__file__).parent / "integrations").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else None
            for example in doctest.DocTestParser().get_examples(text or ""):
                compile(example.source, str(path), "exec")


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    text = commands.described_all()
    group: Any = typer.main.get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        section = text.partition(f"\n## halfstep {name}\n")[2].partition("\n## ")[0]
        options = [p.opts[0] for p in command.params if p.param_type_name == "option" and p.name != "help"]
        assert section and [o for o in options if f"| `{o}`" not in section] == [], name


@pytest.mark.parametrize("text", [">>> 1 + 1\n3", ">>> 1 / 0", ">>> hs.Policy.of('mixed').name\n'O2'"])
def test_an_example_that_is_wrong_is_noticed(text: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, {}, "wrong", "wrong", 0)
    assert "Expected" in (report := run(test, {"hs": hs})) or "Exception" in report
