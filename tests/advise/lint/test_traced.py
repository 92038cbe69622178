"""Traced rules: each finds its example's mistake, and nothing in the same file without it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.lint.rule import RULES, LintFinding, Rule
from halfstep.advise.lint.rule import task as example
from halfstep.advise.lint.tracing.rules import check_task as run_checks
from halfstep.tasks import load_task

COUNT = itertools.count(1)
MIXED = hs.Policy.of("mixed")
TRACED_RULES = [rule for rule in RULES.values() if rule.traced]


def check_task(task: hs.Task, policy: hs.Policy = MIXED) -> list[LintFinding]:
    return run_checks(task, policy)


def found(text: str, under: str, folder: Path) -> list[LintFinding]:
    """Return what the traced rules find in the task of a file with `text`, under a policy "NAME" or "NAME:DTYPE"."""
    path = folder / "example.py"
    path.write_text(text, encoding="utf-8")
    name, _, dtype = under.partition(":")
    policy = hs.Policy.of(name, dtype=dtype) if dtype else hs.Policy.of(name)
    return check_task(load_task(f"{path}:task"), policy)


@pytest.mark.parametrize("rule", TRACED_RULES, ids=lambda rule: rule.code)
def test_a_rule_finds_its_mistake_and_not_its_remedy(rule: Rule, tmp_path: Path) -> None:
    bad = [f for f in found(rule.bad, rule.under, tmp_path) if f.code == rule.code]
    assert bad, rule.bad
    assert all(f.file.endswith("example.py") and f.line > 0 for f in bad), bad
    good = found(rule.good, rule.under, tmp_path)
    assert not [f for f in good if f.code in (rule.code, "HS133")], good


@pytest.mark.parametrize("under", ["mixed", "mixed:fp16", "O1", "O2", "pure", "lean"])
def test_a_healthy_task_has_no_findings(under: str, tmp_path: Path) -> None:
    assert found(example(), under, tmp_path) == []


def test_a_lint_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(3)
    check_task(task_of())
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": lambda: Drawn()}, "weight 'factor' of a second model"),
        ({"batches": lambda seed, step: (torch.full((2, 4), float(next(COUNT))),)}, "batches(0, 0)"),
        ({"loss_fn": lambda model, x: model(x).float().square().mean() * next(COUNT)}, "the loss of the same weights"),
    ],
)
def test_what_is_not_reproducible_is_named(changed: dict[str, Any], named: str) -> None:
    findings = [f for f in check_task(task_of(**changed)) if f.code == "HS132"]
    assert len(findings) == 1 and findings[0].what.startswith(named), findings


def test_an_error_of_the_task_is_a_finding_with_its_line() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise ZeroDivisionError("no rows")

    (finding,) = check_task(task_of(loss_fn=broken))
    assert finding.code == "HS133" and finding.severity == "error"
    assert "ZeroDivisionError: no rows" in finding.what
    assert finding.file == __file__ and finding.line == broken.__code__.co_firstlineno + 1


def test_a_foreign_parameter_is_reported_once() -> None:
    other = nn.Linear(4, 4)
    task = task_of(optimizer=lambda model: torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    assert [f.code for f in check_task(task)] == ["HS103"]


def test_an_operator_decorator_is_a_rule_for_an_autograd_function() -> None:
    ruled = hs.operator("fp32", name="lint_tests::swish")(Swish)
    for function, codes in ((Swish, ["HS112"]), (ruled, [])):
        task = task_of(loss_fn=lambda model, x, function=function: function.apply(model(x)).float().square().mean())
        assert [f.code for f in check_task(task)] == codes


def test_a_skipped_step_says_nothing_about_updates() -> None:
    """Weights that an overflow left as they were are no swallowed updates."""
    policy = hs.Policy.of("O3", dtype="fp16")
    task = task_of(loss_fn=lambda model, x: (model(x).float() * 1e30).square().mean())
    assert "HS105" not in {f.code for f in check_task(task, policy)}
    assert "HS105" in {f.code for f in check_task(task_of(lr=1e-9), policy)}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax])
def test_an_eps_of_0_is_reported_where_weights_get_lost(kind: Any) -> None:
    """The fused AdamW of torch computes in fp32; the others divide 0 by 0 where a gradient underflows."""
    policy = hs.Policy.of("O3", dtype="fp16")
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(nn.Linear(4, 8))
        return made[-1]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x).float() * 1e-9).sum()
        return loss

    task = task_of(model=model, loss_fn=loss_fn, optimizer=lambda model: kind(model.parameters(), lr=1e-3))
    reported = "HS107" in {finding.code for finding in check_task(task, policy)}
    lost = not all(bool(p.isfinite().all()) for p in made[0].parameters())
    assert reported == lost == (kind is not torch.optim.AdamW)


def test_whole_numbers_are_positions_only_where_different_ones_become_equal() -> None:
    low = torch.bfloat16
    cases = {
        "positions": (lambda y: y + 0 * torch.arange(300).to(low).sum(), True),
        "fp32 positions": (lambda y: y + 0 * torch.arange(300.0).to(low).sum(), True),
        "a mask of -10000": (lambda y: y + 0 * torch.tensor([0.0, -10000.0]).to(low).sum(), False),
        "pixels": (lambda y: y + 0 * torch.arange(256).to(low).sum(), False),
    }
    for name, (change, found_there) in cases.items():
        task = task_of(loss_fn=lambda model, x, change=change: change(model(x)).float().square().mean())
        assert ("HS125" in {f.code for f in check_task(task)}) == found_there, name


def test_a_closed_row_is_reported_where_it_becomes_nan() -> None:
    """The operator scaled_dot_product_attention gives 0 for such a row."""
    mask = torch.ones(2, 2).tril(-1).bool()

    def attention(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)[None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask).float().square().mean()

    assert "HS121" not in {f.code for f in check_task(task_of(loss_fn=attention))}


def test_sizes_for_fp8_are_multiples_of_16() -> None:
    task = task_of(model=lambda: nn.Linear(4, 24))
    assert [f.code for f in check_task(task, hs.Policy.of("mixed", dtype="bf16"))] == []
    assert [f.code for f in check_task(task, hs.Policy.of("mixed", dtype="fp8_e4m3"))] == ["HS111"]


def test_a_weight_of_one_output_has_no_sizes() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    assert [f.code for f in check_task(task_of(model=Head))] == []


class Drawn(nn.Module):
    """A model with a weight that torch.manual_seed does not determine."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), float(next(COUNT))))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.factor
        return y


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        gradient: Tensor = grads[0] * (s + x * s * (1 - s))
        return gradient


def task_of(*, lr: float = 0.1, **changed: Any) -> hs.Task:
    """Return a task on a linear layer, with some of its parts replaced."""
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 8),
        "batches": lambda seed, step: (torch.linspace(-1, 1, 8).reshape(2, 4),),
        "loss_fn": lambda model, x: model(x).float().square().mean(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=lr),
    }
    return hs.Task(name="tiny", **(parts | changed))
