"""Python snippets of a Markdown page, run and held to what they say they give.

An expression may say what it gives and a statement what it raises, behind it or on the lines that follow::

    torch.tensor(1.0).dtype  # -> torch.float32
    print(policy.explain("softmax"))
    # -> policy 'mixed'
    #    operator softmax: keep, ...
    hs.Policy.of("mixd")
    # raises PolicyError: unknown preset 'mixd'; ...

``# ->`` stands before what the expression prints, or its repr if it prints nothing. Runs of white space count as one,
and ``...`` stands for any text.

On the pages of `test_pages.ALONE` a reader can paste each block into a file and run it. A block that needs the one
before it begins with the line `CONTINUES`, and a block with ``title="train.py"`` is a file that later blocks import.
``python -m tests.snippets PAGE ...`` runs them so, each in a process of its own.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
import traceback
import types
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = re.compile(r'^```python(?: title="([\w.]+)")?\n(.*?)^```', flags=re.DOTALL | re.MULTILINE)
PROMISE = re.compile(r"#\s+(->|raises)\s+(.*)")
FURTHER = re.compile(r"\s*#\s{2,}(.*)")
FRAGMENT = re.compile(r"^```py\n(.*)", flags=re.MULTILINE)
CONTINUES = "# continues the block above"
LIBRARIES = ("accelerate",)
"""What some programs need, and not every environment has."""


class Program(NamedTuple):
    """A block of a page, or several that continue one another."""

    line: int  # of the page, where its first block begins
    code: str
    title: str  # the file that a reader saves it as, if later blocks import that


def snippets(page: Path) -> list[tuple[int, str]]:
    """Return (line, code) of every Python block of `page`; lines count from 1."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(2)) + 1, found.group(2)) for found in BLOCK.finditer(text)]


def programs(page: Path) -> list[Program]:
    """Return what a reader can run of `page` here; the lines between two blocks are empty ones."""
    titles = [found.group(1) or "" for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    found: list[Program] = []
    for (line, code), title in zip(snippets(page), titles, strict=True):
        if code.startswith(CONTINUES):
            first, before, _ = found.pop()
            gap = "\n" * (line - first - before.count("\n"))
            found.append(Program(first, before + gap + code, ""))
        else:
            found.append(Program(line, code, title))
    absent = [name for name in LIBRARIES if find_spec(name) is None]
    return [program for program in found if not any(name in program.code for name in absent)]


def run_page(page: Path, namespace: dict[str, Any] | None = None) -> int:
    """Run every block of `page` in one namespace; return how many promises were kept."""
    shared: dict[str, Any] = {"__name__": "__main__"} if namespace is None else namespace
    return sum(run_block(code, shared, str(page), line) for line, code in snippets(page))


def run_programs(page: Path) -> None:
    """Run every program of `page`, each in a namespace of its own; files that it saves go into the current folder."""
    for program in programs(page):
        if program.title:
            Path(program.title).write_text(program.code, encoding="utf-8")
        run_block(program.code, {"__name__": "__main__"}, str(page), program.line)
        if (state := sys.modules.get("accelerate.state")) is not None:  # a process has one format there
            state.AcceleratorState._reset_state(reset_partial_state=True)


def run_block(code: str, namespace: dict[str, Any], page: str = "<page>", line: int = 1) -> int:
    """Run one block and return how many promises it kept.

    Raises:
        AssertionError: a promise was broken, or stands where nothing can keep it; the message names the line.
    """
    tree = ast.parse("\n" * (line - 1) + code, page)
    lines = ["", *[""] * (line - 1), *code.splitlines()]
    promises: list[Promise] = []
    for place, statement in enumerate(tree.body):
        assert statement.end_lineno is not None
        kind, text = _promise(lines, statement.end_lineno)
        if kind:
            where = f"{page}:{statement.end_lineno}"
            assert kind == "raises" or isinstance(statement, ast.Expr), f"{where}: `# ->` belongs behind an expression"
            tree.body[place] = _promised(statement, len(promises))
            promises.append(Promise(kind, text, where))
    promised = len(PROMISE.findall(code))
    assert len(promises) == promised, f"{page}:{line}: {promised} promises, and statements for {len(promises)}"
    namespace["__promises__"] = promises
    exec(compile(ast.fix_missing_locations(tree), page, "exec"), namespace)
    return promised


class Promise:
    """What a statement is to give or raise; a context around it, which fails if it does not."""

    def __init__(self, kind: str, text: str, where: str) -> None:
        self.kind, self.text, self.where = kind, text, where
        self.value: Any = None
        self._printed = StringIO()
        self._redirected = redirect_stdout(self._printed)

    def __enter__(self) -> None:
        self._redirected.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._redirected.__exit__(kind, error, trace)
        if error is not None and (self.kind != "raises" or not isinstance(error, Exception)):
            return False
        raised = "nothing" if error is None else f"{type(error).__name__}: {error}"
        got = _flat(raised if self.kind == "raises" else self._printed.getvalue() or repr(self.value))
        pattern = ".*".join(re.escape(_flat(part)) for part in self.text.split("..."))
        told = f"{self.where}\n promised: {_flat(self.text)}\n      got: {got}"
        if not re.fullmatch(pattern, got, re.DOTALL):
            raise AssertionError(told) from None
        return True


def _promised(statement: ast.stmt, number: int) -> ast.stmt:
    """Return `statement` in the context of a promise, to which it gives its value if it is an expression."""
    made = ast.parse(f"with __promises__[{number}]:\n    __promises__[{number}].value = None").body[0]
    assert isinstance(made, ast.With) and isinstance(made.body[0], ast.Assign)
    if isinstance(statement, ast.Expr):
        made.body[0].value = statement.value
    else:
        made.body = [statement]
    for node in (made, *made.items, *made.body):
        ast.copy_location(node, statement)
    return made


def _promise(lines: list[str], end: int) -> tuple[str, str]:
    """Return ("->" or "raises", text) of the statement that ends at line `end`, ("", "") for none."""
    found = PROMISE.search(lines[end])
    if found is None:
        end += 1
        found = PROMISE.match(lines[end].strip()) if end < len(lines) else None
    if found is None:
        return "", ""
    texts = [found.group(2)]
    while (end := end + 1) < len(lines) and (more := FURTHER.fullmatch(lines[end])) and not PROMISE.search(lines[end]):
        texts.append(more.group(1))
    return found.group(1), " ".join(texts)


def _flat(text: str) -> str:
    return " ".join(text.split())


def alone(page: Path, folder: Path) -> int:
    """Run each program of `page` as ``python script.py`` would, forked from this process; return how many failed."""
    failed = 0
    for program in programs(page):
        script = folder / (program.title or "script.py")
        script.write_text("\n" * (program.line - 1) * (not program.title) + program.code, encoding="utf-8")
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os._exit(_script(program, script))
        failed += os.waitpid(child, 0)[1] != 0
    return failed


def _script(program: Program, script: Path) -> int:
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"], sys.argv, sys.path[0] = main, [str(script)], str(script.parent)
    os.chdir(script.parent)
    try:
        with redirect_stdout(StringIO()):
            run_block(program.code, vars(main), str(script), 1 if program.title else program.line)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def warm_up() -> None:
    """Import what most programs need."""
    import torch

    import halfstep as hs

    model = torch.nn.Linear(2, 1)
    hs.TrainStep(model, torch.optim.AdamW(model.parameters()), lambda model, x: model(x).sum())(torch.ones(1, 2))


if __name__ == "__main__":
    warm_up()
    wrong = 0
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as made:
            bad = alone(Path(name), Path(made))
            print(f"{name}: {bad} failed" if bad else f"{name}: ok", flush=True)
            wrong += bad
    sys.exit(bool(wrong))
