"""An optimizer that is cut off while it holds fp32 masters gets the model's parameters back, wherever that happens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.binding.prepare import store_of
from tests.products import sampled
from tests.step.cutting import is_instant

WEIGHTS = str(Path(hs.__file__).parent / "weights")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Cut:
    """Raises at the n-th line of the package that steps fp32 values."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.done = at, 0, False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WEIGHTS):
            return None
        if event == "call" or (event == "line" and not is_instant(frame)):
            self.seen += 1
            if self.seen == self.at + 1:
                self.done = True
                raise KeyboardInterrupt
        return self


def prepared(master: str, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    made = optimizer(model.parameters(), lr=0.01)
    hs.prepare(model, made, policy=hs.Policy.of("O2", dtype="bf16", master=master))
    return model, made


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()


@pytest.mark.parametrize("stride", [pytest.param(3, marks=pytest.mark.hours), 13], ids=["many", "some"])
@pytest.mark.parametrize(
    ("master", "what"),
    sampled(
        ["master", "split", "kahan", "stochastic"], ["step", "state_dict", "load_state_dict"], rest=pytest.mark.slow
    ),
)
def test_after_any_line_every_parameter_is_trained(master: str, what: str, stride: int) -> None:
    at, cuts = 0, 0
    while True:
        model, optimizer = prepared(master, torch.optim.RMSprop)
        own = list(model.parameters())
        backward(model, optimizer)
        optimizer.step()
        saved = optimizer.state_dict()
        backward(model, optimizer)
        cut = Cut(at)
        sys.settrace(cut)
        try:
            optimizer.load_state_dict(saved) if what == "load_state_dict" else getattr(optimizer, what)()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)  # torch's own no_grad may have been cut off
        if not cut.done:
            break
        cuts += 1
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(3):
            backward(model, optimizer)
            optimizer.step()
        held = optimizer.param_groups[0]["params"]
        assert all(p is q for p, q in zip(held, own, strict=True)), at
        assert {id(p) for p in optimizer.state} == {id(p) for p in own}, at
        frozen = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
        assert not frozen, at
        store = store_of(model)
        assert store is not None and not store.substituted and not store.cannot_update()
        at += stride
    assert cuts > 30 / stride


def test_masters_that_nothing_was_written_to_are_dropped_without_a_write() -> None:
    model, optimizer = prepared("split", torch.optim.SGD)
    store = store_of(model)
    assert store is not None
    backward(model, optimizer)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    versions = [p._version for p in model.parameters()]
    assert store.restore(write_back=False) and not store.restore()
    assert [p._version for p in model.parameters()] == versions
