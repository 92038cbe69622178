"""The pages on other engines: snippets, the quoted error, tables and links are the code's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine_tables import engine_blocks
from benchmarks.markdown import names
from halfstep.errors import PolicyError
from halfstep.policy import Policy
from tests.snippets import run_page

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE = DOCS / "engines.md"
TABLES = [DOCS / "tables" / f"{name}.md" for name in ("engine_fields", "engine_runs")]
TEXT = PAGE.read_text(encoding="utf-8")


def test_snippets_run_and_keep_their_promises() -> None:
    assert run_page(PAGE) == 8


def test_the_quoted_error_is_the_one_raised() -> None:
    with pytest.raises(PolicyError) as error:
        Policy.of("pure", dtype="bf16").to_deepspeed()
    assert f"```\n{error.value}\n```" in TEXT


def test_every_table_is_on_a_page_and_says_what_the_code_says() -> None:
    """`tests/test_tables.py` compares the others with the JSON files; "engine lost" needs the code alone."""
    blocks, text = engine_blocks({}), "".join(page.read_text(encoding="utf-8") for page in (PAGE, *TABLES))
    assert names(text) == set(blocks)
    assert f"<!-- engine lost -->\n{blocks['engine lost']}\n<!-- end -->" in text, "run `make tables`"
