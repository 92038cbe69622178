"""The helper that runs snippets can fail: a broken promise is noticed, and so is one that nothing keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets import run_block, run_page, snippets

PAGE = """# Title

```python
a = 1
```

```sh
not python
```

```python
a + 1  # -> 2
print("one", "two")
# -> one
#    two
```
"""


def test_blocks_of_a_page_share_a_namespace_and_know_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert [line for line, _ in snippets(page)] == [4, 12]
    assert run_page(page) == 2


@pytest.mark.parametrize(
    "code",
    [
        "1 + 1  # -> 2",
        "print(2)  # -> 2",
        "'a'  # -> 'a'",
        "'a long text'  # -> 'a ... text'",
        "int('x')\n# raises ValueError: invalid literal\n#     for int() ...",
        "a = 1 / 0  # raises ZeroDivisionError: division by zero",
        "print('a\\n  b')\n# -> a\n#      b",
    ],
)
def test_a_promise_that_is_kept_counts(code: str) -> None:
    assert run_block(code, {}) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 + 1  # -> 3", "promised: 3"),
        ("'ab'  # -> 'a...c'", "promised"),
        ("1  # raises ValueError: ...", "got: nothing"),
        ("1 / 0  # raises ValueError: division by zero", "got: ZeroDivisionError"),
        ("a = 1  # -> 1", "behind an expression"),
        ("for _ in [1]:\n    _ + 1  # -> 2\n    _ + 2", "1 promises, and statements for 0"),
        ("# -> 1\n1", "1 promises, and statements for 0"),
    ],
)
def test_a_promise_that_is_broken_or_hangs_in_the_air_fails(code: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_block(code, {})


def test_an_error_without_a_promise_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_block("1 / 0", {})
