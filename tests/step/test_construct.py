"""A TrainStep that cannot be built leaves model, optimizer and scaler as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step import settings
from halfstep.step.parts.gradients import MANY
from halfstep.update import optimizer_step

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return everything about them that building a step may change."""
    own = {k: v for k, v in vars(optimizer).items() if k not in {"param_groups", "state", "defaults"}}
    hooks = {k: len(v) for k, v in own.items() if k.endswith("hooks")}
    rest = {k: repr(v) for k, v in own.items() if k not in hooks}
    parameters = [
        (n, p.dtype, p.grad_dtype, p.tolist(), p._post_accumulate_grad_hooks or None)
        for n, p in model.named_parameters()
    ]
    kinds = [(type(m).__name__, sorted(k for k in vars(m) if "halfstep" in k)) for m in model.modules()]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return repr((parameters, kinds, copy.deepcopy(optimizer.state_dict()), optimizer.defaults, hooks, rest, held))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("policy", ["mixed", "O2", "pure"])
@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"compile": {"backend": "no such backend"}}, "refused by torch.compile.*no such backend.*backends: "),
        ({"compile": {"mode": "no such mode"}}, "refused by torch.compile.*no such mode"),
        ({"compile": {"options": {"no such option": 1}}}, "refused by torch.compile.*no such option"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "must be an hs.GradScaler"),
        ({"cuda_graph": True}, "needs a model on one CUDA device"),
        ({"blackbox": 3}, "blackbox"),
    ],
)
def test_what_is_refused_changes_nothing(named: dict[str, Any], text: str, policy: str) -> None:
    model, optimizer = parts()
    before = facts(model, optimizer)
    with pytest.raises(StepError, match=text):
        hs.TrainStep(model, optimizer, square, policy=hs.Policy.of(policy, dtype="bf16"), **named)
    assert facts(model, optimizer) == before


STAGES = ("Statistics", "Copies", "Sums", "Record", "Watchers")


@pytest.mark.parametrize("policy", ["mixed", "O2", "pure"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_fails_late_is_undone(stage: str, policy: str, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = parts()
    before = facts(model, optimizer)

    class Fails:
        of = None

        def __init__(self, *args: Any, **named: Any) -> None:
            raise error

    Fails.of = Fails  # type: ignore[assignment]
    chosen = hs.Policy.of(policy, dtype="bf16")
    with monkeypatch.context() as patch:
        patch.setattr(settings, stage, Fails)
        with pytest.raises(error):
            hs.TrainStep(model, optimizer, square, policy=chosen)
    assert facts(model, optimizer) == before
    step = hs.TrainStep(model, optimizer, square, policy=chosen)
    twin = hs.TrainStep(*parts(), square, policy=chosen)
    for _ in range(2):
        assert step(X).host() == twin(X).host()


def test_the_last_thing_that_can_fail_is_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there are hooks on parameters, and the optimizer is in its fused form."""
    torch.manual_seed(0)
    model = nn.Linear(MANY // 4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = facts(model, optimizer)
    policy = hs.Policy.of("O2", dtype="bf16", grads="fp32")
    prefer_fused = optimizer_step.prefer_fused

    def fails(*args: Any) -> None:
        prefer_fused(*args)
        assert optimizer.param_groups[0]["fused"] and model.weight._post_accumulate_grad_hooks
        raise ZeroDivisionError

    monkeypatch.setattr("halfstep.update.updater.prefer_fused", fails)
    with pytest.raises(ZeroDivisionError):
        hs.TrainStep(model, optimizer, square, policy=policy, accumulate=2)
    assert facts(model, optimizer) == before


def test_a_model_that_was_prepared_stays_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = parts()
    policy = hs.Policy.of("O2", dtype="bf16")
    hs.prepare(model, optimizer, policy=policy)
    before = facts(model, optimizer)
    monkeypatch.setattr(settings, "Statistics", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hs.TrainStep(model, optimizer, square)
    assert facts(model, optimizer) == before and hs.prepared_policy(model) == policy


@pytest.mark.parametrize("policy", ["mixed", "O2"])
def test_an_activation_of_another_prepared_model_stays_that_models(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = parts()
    shared = nn.Softmax(-1)
    other: nn.Module = hs.prepare(nn.Sequential(nn.Linear(8, 8), shared), policy="O1")
    model.add_module("3", shared)
    expected, before = other(X), facts(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "Statistics", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hs.TrainStep(model, optimizer, square, policy=hs.Policy.of(policy, dtype="bf16"))
    assert facts(model, optimizer) == before and hs.prepared_policy(model) is None
    assert torch.equal(other(X), expected)
