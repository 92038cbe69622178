"""The page on loops keeps its promises: its snippets run, its table of kinds is that of its sections."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from tests.snippets import run_page

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "loops.md"


def test_snippets_run_and_keep_their_promises() -> None:
    assert run_page(PAGE) >= 10


def test_each_kind_of_loop_has_a_section_and_readme_links_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) == sections
    assert "(docs/loops.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_gradient_that_overflows_leaves_a_carried_state_finite() -> None:
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 16), nn.Linear(16, 2)

    def read(model: Reader, words: torch.Tensor, hidden: object) -> tuple[torch.Tensor, object]:
        out, hidden = model.lstm(words, hidden)
        return F.cross_entropy(model.head(out).flatten(0, 1), torch.zeros(40, dtype=torch.long)), hidden

    model = Reader()
    scaler = hs.GradScaler(init_scale=2.0**40)
    step = hs.TrainStep(
        model, torch.optim.Adam(model.parameters()), read, policy=hs.Policy.of("mixed", dtype="fp16"), scaler=scaler
    )
    result = step(torch.randn(5, 8, 4), None)
    assert result.host().skipped
    assert all(torch.isfinite(part).all() for part in result.aux)
