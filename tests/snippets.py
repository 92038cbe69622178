"""Python snippets of a Markdown page, run from top to bottom in one namespace, and held to what they say they give.

An expression may say what it gives and a statement what it raises, behind it or on the lines that follow::

    torch.tensor(1.0).dtype  # -> torch.float32
    print(policy.explain("softmax"))
    # -> policy 'mixed'
    #    operator softmax: keep, ...
    hs.Policy.of("mixd")
    # raises PolicyError: unknown preset 'mixd'; ...

``# ->`` stands before what the expression prints, or its repr if it prints nothing. Runs of white space count as one,
and ``...`` stands for any text.
"""

from __future__ import annotations

import ast
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PROMISE = re.compile(r"#\s+(->|raises)\s+(.*)")
FURTHER = re.compile(r"\s*#\s{2,}(.*)")


def snippets(page: Path) -> list[tuple[int, str]]:
    """Return (line, code) of every Python block of `page`; lines count from 1."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in BLOCK.finditer(text)]


def run_page(page: Path, namespace: dict[str, Any] | None = None) -> int:
    """Run every block of `page`; return how many promises were kept. What is printed without one is printed."""
    shared: dict[str, Any] = {"__name__": "__main__"} if namespace is None else namespace
    return sum(run_block(code, shared, str(page), line) for line, code in snippets(page))


def run_block(code: str, namespace: dict[str, Any], page: str = "<page>", line: int = 1) -> int:
    """Run one block and return how many promises it kept.

    Raises:
        AssertionError: a promise was broken, or stands where nothing can keep it; the message names the line.
    """
    tree = ast.parse("\n" * (line - 1) + code, page)
    lines = ["", *[""] * (line - 1), *code.splitlines()]
    kept = 0
    for statement in tree.body:
        assert statement.end_lineno is not None
        kind, text = _promise(lines, statement.end_lineno)
        where = f"{page}:{statement.end_lineno}"
        if not kind:
            exec(compile(ast.Module([statement], []), page, "exec"), namespace)
            continue
        kept += 1
        got = _raised(statement, namespace, page) if kind == "raises" else _given(statement, namespace, page)
        pattern = ".*".join(re.escape(_flat(part)) for part in text.split("..."))
        assert re.fullmatch(pattern, _flat(got), re.DOTALL), (
            f"{where}\n promised: {_flat(text)}\n      got: {_flat(got)}"
        )
    promised = len(re.findall(rf"{PROMISE.pattern}", code))
    assert kept == promised, f"{page}:{line}: {promised} promises, and statements for {kept}"
    return kept


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


def _given(statement: ast.stmt, namespace: dict[str, Any], page: str) -> str:
    assert isinstance(statement, ast.Expr), f"{page}:{statement.lineno}: `# ->` belongs behind an expression"
    printed = StringIO()
    with redirect_stdout(printed):
        value = eval(compile(ast.Expression(statement.value), page, "eval"), namespace)
    return printed.getvalue() or repr(value)


def _raised(statement: ast.stmt, namespace: dict[str, Any], page: str) -> str:
    try:
        exec(compile(ast.Module([statement], []), page, "exec"), namespace)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _flat(text: str) -> str:
    return " ".join(text.split())
