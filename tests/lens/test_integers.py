"""Audit: integers that are made of low numbers and choose others; those that come out the same are no matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

O3 = hs.Policy.of("O3", dtype="bf16")


class Bucket(nn.Module):
    """Looks logarithms up in a table."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.factor = nn.Embedding(64, 8), nn.Linear(8, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        number = (torch.log(x.float() + 1.0) * self.factor).long()
        number = torch.where(number > 60, number - 1, number)
        out: Tensor = self.out(self.table(number))
        return out


class Inner(nn.Module):
    """The same in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = Bucket(13.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bucket(x)
        return out


def audited(model: nn.Module, policy: hs.Policy = O3) -> hs.lens.Audit:
    x = torch.arange(1, 100.0).repeat(4, 1)
    return hs.audit(model, [(x,)], lambda m, x: m(x).float().square().mean(), policy)


@pytest.mark.parametrize(("model", "module"), [(Bucket(13.0), ""), (Inner(), "bucket")])
def test_what_an_index_is_made_of_is_at_fault_and_its_remedy_helps(model: nn.Module, module: str) -> None:
    (finding,) = audited(model).findings()
    assert (finding.kind, finding.op, finding.module) == ("rounding", "mul", module) and ".log(" in finding.line
    assert "integers that are made of its result" in finding.cause and finding.policy is not None
    cured = audited(model, finding.policy)
    assert cured.findings() == ()
    (row,) = cured.filter(op="mul", role="activation")
    assert row.otherwise == 0.0


def test_integers_that_come_out_the_same_are_no_finding() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(128, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.table((x * 1.0).to(torch.long)))
            return out

    audit = audited(Plain())
    (row,) = audit.filter(op="mul", role="activation")
    assert row.otherwise == 0.0 and audit.findings() == ()


def test_integers_that_choose_nothing_are_no_finding() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(99, 1)

        def forward(self, x: Tensor) -> Tensor:
            levels = (torch.log(x.float() + 1.0) * 13.0).to(torch.int32)
            out: Tensor = self.out(levels.to(x.dtype) / 13.0)
            return out

    audit = audited(Quantized())
    assert not any("integers" in finding.cause for finding in audit.findings())
