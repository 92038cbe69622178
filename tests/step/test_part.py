"""A part of the user's own: called at every moment of a step, in its place, and taken off again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step import Part
from halfstep.step.moments import MOMENTS

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(**named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.01), square, **named)


class Noting(Part):
    """Notes its moments, and does what `Part` does."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def _noting(name: str) -> Any:
    def method(self: Noting, *args: Any, **named: Any) -> Any:
        self.calls.append(name)
        return getattr(Part, name)(self, *args, **named)

    return method


for _name in set(MOMENTS) - {"loss_scale"}:
    setattr(Noting, _name, _noting(_name))


def test_every_moment_of_a_window_comes_in_its_order() -> None:
    step, plain = made(accumulate=2), made(accumulate=2)
    part = step.add_part(Noting())
    assert step.parts[-1] is part
    for _ in range(2):
        step(X)
        plain(X)
    passes = ["begin_micro_batch", "passes", "after_forward", "seed", "around_backward", "end_micro_batch"]
    first = ["begin_call", "begin_window", *passes, "again", "end_call"]
    last = ["begin_call", *passes, "before_update", "repeats", "after_update", "again", "end_call"]
    assert part.calls == first + last
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True))


def test_a_part_that_raises_is_undone_like_a_forward_pass() -> None:
    step, plain = made(), made()

    class Fails(Part):
        def after_forward(self, loss: Tensor) -> None:
            raise ValueError("no")

    part, noting = step.add_part(Fails()), step.add_part(Noting())
    with pytest.raises(ValueError, match="no"):
        step(X)
    assert noting.calls[-1] == "abort"
    step.remove_part(part)
    step.remove_part(part)  # nothing happens
    step(X)
    plain(X)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True))


def test_a_part_decides_the_loss_scale_and_the_seed() -> None:
    class Eight(Part):
        def loss_scale(self, device: torch.device) -> Tensor:
            return torch.full((), 8.0, device=device)

    step = made(policy=hs.Policy.of("mixed", dtype="fp16"))
    step.add_part(Eight())
    assert float(step(X).scale) == 8.0


def test_a_part_waits_for_the_choice_of_a_policy() -> None:
    step = made(policy="auto")
    part = step.add_part(Noting())
    assert step.parts == (part,)
    step(X)
    assert "after_update" in part.calls and part in step.parts


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(StepError, match=r"add_part\(object\): expected an hs.step.Part"):
        made().add_part(object())  # type: ignore[type-var]
