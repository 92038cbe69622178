"""Which tensors the tail's operators take, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels import native, norms_for, ops, pick, reference

REASON = native.why_not()
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)

FP32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


class Lists:
    """What `can_update` is asked about, and what a test changes."""

    def __init__(self) -> None:
        self.form = "copy"
        self.weights = [torch.ones(3, 4), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)]
        self.beside = [w.to(BF16) for w in self.weights]
        self.states = [[w.clone() for w in self.weights], [w.to(BF16) for w in self.weights]]
        self.steps = [torch.zeros(()) for _ in self.weights]
        self.gradients: list[Tensor] = [w.to(HALF) for w in self.weights]

    def reason(self) -> str:
        return pick.can_update(self.form, self.weights, self.beside, self.states, self.steps, self.gradients)


def test_tensors_that_lie_alike_can_be_updated_where_there_are_kernels() -> None:
    assert Lists().reason() == native.why_not()
    lists = Lists()
    lists.weights = [nn.Parameter(w) for w in lists.weights]
    assert lists.reason() == native.why_not()
    lists.form, lists.beside, lists.steps, lists.states = "plain", [], [], []
    assert lists.reason() == native.why_not()


def no_parameters(lists: Lists) -> None:
    lists.weights = []


def other_form(lists: Lists) -> None:
    lists.form = "split"


def transposed(lists: Lists) -> None:
    lists.gradients[0] = lists.gradients[0].T.contiguous().T


def other_layout(lists: Lists) -> None:
    lists.states[1][1] = lists.states[1][1].contiguous()


def gaps(lists: Lists) -> None:
    lists.weights[0] = torch.ones(3, 8)[:, ::2]


def expanded(lists: Lists) -> None:
    lists.gradients[0] = torch.ones(4, dtype=HALF).expand(3, 4)


def sparse(lists: Lists) -> None:
    lists.gradients[0] = lists.gradients[0].float().relu().to_sparse_coo()


def wide(lists: Lists) -> None:
    lists.gradients[0] = lists.gradients[0].double()


def half_state(lists: Lists) -> None:
    lists.states[0][0] = lists.states[0][0].half()


def wide_step(lists: Lists) -> None:
    lists.steps[1] = lists.steps[1].double()


def elsewhere(lists: Lists) -> None:
    lists.beside[0] = lists.beside[0].to("meta")


def no_kernels(lists: Lists) -> None:
    for tensors in (lists.weights, lists.beside, *lists.states, lists.steps, lists.gradients):
        tensors[:] = [t.to("meta") for t in tensors]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_parameters, "there are no parameters"),
        (other_form, "form 'split' has no torch.float32 weights with torch.bfloat16 beside them"),
        (transposed, "a gradient lies in memory in another order than its weight"),
        (other_layout, "an optimizer state lies in memory in another order than its weight"),
        (gaps, "a weight of shape (3, 4) has gaps or overlaps in memory"),
        (expanded, "a gradient of shape (3, 4) has gaps or overlaps in memory"),
        (sparse, "a gradient is a Tensor of layout torch.sparse_coo"),
        (wide, "a gradient is torch.float64"),
        (half_state, "an optimizer state is torch.float16"),
        (wide_step, "a step counter is not a 0-dim fp32 tensor"),
        (elsewhere, "a second half is on meta, the first weight on cpu"),
        (no_kernels, "there are no kernels for the device type 'meta'"),
    ],
)
def test_what_cannot_be_updated_is_said_in_a_sentence(change: Callable[[Lists], None], reason: str) -> None:
    lists = Lists()
    change(lists)
    assert lists.reason() == reason


@compiled
def test_norms_go_through_the_operator_where_memory_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(tensors: list[Tensor]) -> Tensor:
        calls.append(len(tensors))
        norms: Tensor = torch.ops.halfstep.norms.default(tensors)
        return norms

    monkeypatch.setattr(ops, "norms", counted)
    plain = [
        torch.ones(3, 4).T,
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones((), dtype=HALF),
    ]
    others = [torch.ones(3, 8)[:, ::2], torch.ones(3, dtype=torch.float64), torch.ones(0), torch.ones(4).expand(3, 4)]
    assert norms_for(plain).tolist() == pytest.approx(reference.norms(plain).tolist())
    assert calls == [3]
    for odd in others:
        assert norms_for([*plain, odd]).tolist() == pytest.approx(reference.norms([*plain, odd]).tolist())
    assert calls == [3]
    monkeypatch.setenv("HALFSTEP_NATIVE", "0")
    assert norms_for(plain).tolist() == pytest.approx(reference.norms(plain).tolist())
    assert calls == [3]
