"""Audit: what it leaves alone besides the model: every generator of random numbers; and what it says of bad steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.errors import AuditError

BF16 = hs.Policy.of("mixed", dtype="bf16")


class Drawing(nn.Module):
    """Draws from everything there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.own = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(4, generator=self.own) * torch.rand(4) * (1.0 + random.random())
        out: Tensor = self.layer(x) * kept * float(1.0 + numpy.random.rand())
        return out


def drawn(model: Drawing) -> list[float]:
    """Return what every generator gives next."""
    return [torch.rand(()).item(), random.random(), numpy.random.rand(), torch.rand((), generator=model.own).item()]


def seeded() -> Drawing:
    model = Drawing()
    random.seed(0)
    numpy.random.seed(0)
    return model


def squared(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_generator_goes_on_as_if_nothing_had_been(accumulate: int) -> None:
    model = seeded()
    wanted = drawn(model)
    model = seeded()
    loader = DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=4, shuffle=True)  # draws its order
    audit = hs.audit(model, loader, squared, BF16, accumulate=accumulate)
    assert drawn(model) == wanted
    assert not any("no accumulated errors" in note for note in audit.notes)
    rows = audit.filter(op="mul", role="activation")
    assert max(row.accumulated for row in rows) < 0.02  # the fp32 run has drawn the same


def test_generators_are_put_back_where_the_audit_fails_too() -> None:
    model = seeded()
    wanted = drawn(model)
    model = seeded()

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        squared(model, x)
        raise KeyError("no such label")

    with pytest.raises(KeyError):
        hs.audit(model, [(torch.ones(2, 4),)], fails, BF16, reference=False)
    assert drawn(model) == wanted


def test_an_iterator_in_a_batch_is_refused_in_words() -> None:
    def once() -> Iterator[Tensor]:
        yield torch.ones(2, 4)

    for batch in ((once(),), {"x": iter([torch.ones(2, 4)])}):
        with pytest.raises(AuditError, match="which can be read once, .* make a list"):
            hs.audit(nn.Linear(4, 4), [batch], lambda model, x: sum(model(one).mean() for one in x))


# ------------------------------------------------------------------ steps that are not finite


def test_a_step_that_is_not_finite_in_fp32_either_is_no_good_news(tmp_path: Path) -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        return squared(model, x) + torch.log(model(x) * 0).mean()

    torch.manual_seed(0)
    audit = hs.audit(nn.Linear(4, 4), [(torch.randn(2, 4),)] * 2, broken, BF16)
    assert (audit.bad, audit.bad_in_fp32, audit.skipped) == (2, 2, 0)
    assert "no findings of precision, but 2 of 2 steps were not finite, in fp32 too" in str(audit)
    (row,) = audit.filter(op="log", role="activation")
    (line,) = (line for line in str(audit).splitlines() if " log " in line and "gradient" not in line)
    assert row.nonfinite == 1.0 and "100 %" in line
    audit.save_html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "Not finite" in page and "Healthy" not in page and "all inf or nan" in page


def test_steps_that_are_finite_leave_out_the_column_of_what_is_not() -> None:
    torch.manual_seed(0)
    audit = hs.audit(nn.Linear(4, 4), [(torch.randn(2, 4),)], squared, BF16)
    assert (audit.bad, audit.bad_in_fp32) == (0, 0) and "inf, nan" not in str(audit)


def test_questions_that_make_no_sense_are_refused() -> None:
    torch.manual_seed(0)
    audit = hs.audit(nn.Linear(4, 4), [(torch.randn(2, 4),)], squared, BF16)
    with pytest.raises(AuditError, match="scale must be .* and is 'a'"):
        audit.what_if("fp16", scale="a")  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="module must be a pattern such as .* and is 3"):
        audit.filter(module=3)  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="count must be a whole number of rows from 0 and is -1"):
        audit.worst(-1)
    assert len(audit.worst(2)) == 2


def test_rows_of_states_say_whose_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    audit = hs.audit(model, [(torch.randn(2, 4),)], squared, BF16, torch.optim.AdamW(model.parameters()))
    names = [cells[1] for cells in audit.filter(role="state").table()[1:]]
    assert len(names) == len(set(names)) == 4
