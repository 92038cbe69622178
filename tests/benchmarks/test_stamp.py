"""Results name the commit, whether its tree was clean, and the day; tables say how old a result is."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import date
from pathlib import Path

import pytest

from benchmarks.reports import RESULTS, load
from benchmarks.stamp import AGE, ROOT, commit, stamped, told, write

BEFORE = {"compare", "compare_resnet", "concepts", "counts", "kills", "upstream"}
"""Written before results named their commit; `matrix` names one in each row. Measuring again takes a name away."""


def git(root: Path, *words: str) -> None:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *author, *words], check=True, capture_output=True)


def changed(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-m", text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    changed(tmp_path, "src/halfstep/a.py", "1")
    return tmp_path


def test_a_result_names_commit_clean_tree_and_day(checkout: Path) -> None:
    clean = commit(checkout)
    assert re.fullmatch(r"[0-9a-f]{10}", clean)
    (checkout / "src/halfstep/a.py").write_text("2")
    assert commit(checkout) == f"{clean}-dirty"
    for measured, whole in ((clean, True), (f"{clean}-dirty", False)):
        report = stamped({"commit": measured, "rows": 1})
        assert report == {"commit": measured, "rows": 1, "clean": whole, "date": date.today().isoformat()}


def test_a_written_report_has_it(tmp_path: Path) -> None:
    write(tmp_path / "new" / "x.json", {"rows": 1})
    found = json.loads((tmp_path / "new" / "x.json").read_text())
    assert found["rows"] == 1 and {"commit", "clean", "date"} < found.keys()


def test_a_table_counts_the_commits_that_have_changed_src_since(checkout: Path) -> None:
    first = commit(checkout)
    assert told(first, root=checkout) == f"Commit {first}; src is unchanged since."
    changed(checkout, "docs/a.md", "no code")
    changed(checkout, "src/halfstep/a.py", "2")
    second = commit(checkout)
    changed(checkout, "src/halfstep/b.py", "3")
    told.__globals__["_age"].cache_clear()
    assert told(f"{first}-dirty", root=checkout) == f"Commit {first} with changes; 2 commits changed src since."
    assert told(second, root=checkout) == f"Commit {second}; 1 commit changed src since."
    assert told(first, second, "", root=checkout).endswith("; 2 commits changed src since.")
    assert told("0123456789", root=checkout) == "Commit 0123456789."  # of another history
    assert told("", root=checkout) == told(root=checkout) == "Measured before results named their commit."
    texts = {AGE.sub("", told(first, root=root)) for root in (checkout, checkout.parent)}
    assert texts == {f"Commit {first}."}, "pages are compared without it"


def test_every_committed_result_names_its_commit_or_is_known_not_to() -> None:
    without = {path.stem for path in RESULTS.glob("*.json") if not load(path.name).get("commit")}
    assert without - {"matrix"} == BEFORE


def test_every_writer_of_results_writes_the_stamp() -> None:
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "faults").glob("*.py")]
    writers = {path.stem: text for path in files if '"--json"' in (text := path.read_text(encoding="utf-8"))}
    assert len(writers) > 20
    assert [name for name, text in writers.items() if not re.search(r"stamp(ed)?\b.*\n|stamp import", text)] == []
