"""What activation checkpointing computes again follows the rules it followed first, in a training step's backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.cast.dispatch import mode_here
from halfstep.cast.recipe import recipe_for
from halfstep.cast.recompute import recomputing
from halfstep.cast.state import STATE


class Attends(nn.Module):
    """Operators of every rule in a bound method or a function: no module opens a region for those alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(4, 4), how

    def inner(self, z: Tensor) -> Tensor:
        q = z * 0 + 3 + z
        return torch.softmax(q @ q.t(), -1) @ z

    def forward(self, x: Tensor) -> Any:
        h = self.lin(x)
        if self.how == "":
            return self.inner(h)
        function = self.inner if "method" in self.how else lambda z: self.inner(z)
        return checkpoint(function, h, use_reentrant="reentrant" in self.how)


def trained(how: str, policy: hs.Policy) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Attends(how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).float().pow(2).mean(), policy=policy, accumulate=2)
    for k in range(4):
        step(torch.randn(4, 4, generator=torch.Generator().manual_seed(k)))
    assert STATE.mode is None
    assert not STATE.casts._casts
    assert _len_torch_function_stack() == 0
    return model.state_dict()


@pytest.mark.parametrize("how", ["method", "function", "method, reentrant", "function, reentrant"])
@pytest.mark.parametrize("name", ["O1", "O2", "mixed", "pure", "torch"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_checkpointed_function_trains_the_bits_of_one_that_is_not(name: str, dtype: str, how: str) -> None:
    policy = hs.Policy.of(name, dtype=dtype, scale=64.0 if dtype == "fp16" else "none")
    plain, recomputed = trained("", policy), trained(how, policy)
    assert all(torch.equal(plain[key], recomputed[key]) for key in plain)


def test_without_the_rules_the_recomputation_differs() -> None:
    """The seeded fault: the backward pass of a loop written by hand, whose recomputation has torch's own lists."""
    torch.manual_seed(0)
    model = Attends("method")
    hs.prepare(model, policy=hs.Policy.of("O1", dtype="fp16"))
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        model(torch.randn(4, 4)).float().sum().backward()


def test_an_error_in_the_backward_pass_takes_the_mode_off() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("on purpose")

    fails: Any = Fails.apply
    model = nn.Linear(2, 2)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: fails(m(x)).sum(), policy="O1")
    with pytest.raises(ValueError, match="on purpose"):
        step(torch.randn(2, 2))
    assert STATE.mode is None
    assert _len_torch_function_stack() == 0


def test_rules_sleep_in_a_backward_pass_that_computes_nothing_again() -> None:
    recipe = recipe_for(hs.Policy.of("mixed", dtype="bf16"), ("cpu",))
    x = torch.randn(3, 3)
    with recomputing(recipe):
        assert (x @ x).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16


def test_a_region_around_the_backward_pass_holds_as_it_is() -> None:
    recipe = recipe_for(hs.Policy.of("mixed", dtype="bf16"), ("cpu",))
    with hs.autocast("cpu", torch.float16):
        depth, mode = _len_torch_function_stack(), STATE.mode
        with recomputing(recipe):
            assert (_len_torch_function_stack(), STATE.mode) == (depth, mode)


def test_the_engines_thread_finds_the_mode_on_the_stack_and_keeps_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device the backward pass runs in another thread, with torch's stack of modes and no region of ours."""
    recipe = recipe_for(hs.Policy.of("O1", dtype="fp16"), ("cpu",))
    seen: list[Any] = []
    weight = nn.Parameter(torch.randn(3, 3))

    def engine() -> None:
        assert recipe.mode is not None
        _push_mode(recipe.mode)
        try:
            for task in (7, -1):  # inside a backward pass, outside
                monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda task=task: task)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    seen.append((mode_here() is recipe.mode, torch.softmax(weight @ weight, -1).dtype))
            seen.append((bool(STATE.casts._casts), len(_get_current_function_mode_stack())))
        finally:
            _pop_mode()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [(True, torch.float32), (False, torch.bfloat16), (False, 1)]
