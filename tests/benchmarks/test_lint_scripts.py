"""The report on public scripts: its numbers follow from its labels, and a run over clones keeps them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lint_scripts import REPORT, key_of, run, summary, written
from halfstep.advise.lint import RULES

CLIPPED = """import torch

scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def test_the_summary_follows_from_the_labels() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    assert report["summary"] == json.loads(json.dumps(summary(report)))
    assert written(report) == REPORT.read_text(encoding="utf-8")
    findings = report["findings"]
    assert len({key_of(finding) for finding in findings}) == len(findings)
    assert all(finding["true"] in (True, False) and finding["reason"] for finding in findings)
    assert {finding["code"] for finding in findings} <= set(RULES)
    scripts = {(script["repository"], script["path"]) for script in report["scripts"]}
    assert {(finding["repository"], finding["path"]) for finding in findings} <= scripts


def test_nine_of_ten_findings_are_true_also_without_deprecated_names() -> None:
    shares = json.loads(REPORT.read_text(encoding="utf-8"))["summary"]["all, now"]
    assert shares["share"] >= 0.9 and shares["without HS026"]["share"] >= 0.9


def test_a_run_keeps_labels_and_what_was_found_first(tmp_path: Path) -> None:
    clone = tmp_path / "owner" / "name"
    clone.mkdir(parents=True)
    (clone / "train.py").write_text(CLIPPED, encoding="utf-8")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(clone), *words], check=True)
    head = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    script = {"repository": "owner/name", "commit": head.stdout.strip(), "path": "train.py", "set": "first"}
    gone = {"repository": "owner/name", "path": "train.py", "line": 1, "code": "HS026", "severity": "note", "what": ""}
    gone |= {"true": False, "reason": "no such call", "first": True, "now": True}
    report: dict[str, Any] = {
        "scripts": [script],
        "findings": [gone, {**gone, "line": 2, "first": False}],
        "summary": {},
        "rules": [],
    }

    (finding,) = run(report, tmp_path, first=False)
    assert (finding["code"], finding["line"], finding["true"]) == ("HS001", 10, None)
    finding |= {"true": True, "reason": "no unscale_"}
    assert run(report, tmp_path, first=True) == []
    assert [f["line"] for f in report["findings"]] == [1, 10], "what is found no more stays if it was among the first"
    made = report["summary"]
    assert made["first, before mending"]["share"] == 0.5 and made["first, now"]["share"] == 1.0

    with pytest.raises(SystemExit, match="see --list"):
        run({**report, "scripts": [{**script, "path": "gone.py"}]}, tmp_path, first=False)
