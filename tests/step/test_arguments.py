"""What cannot train is refused in words before anything is changed; numbers of other kinds than Python's are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import StepError
from halfstep.update.updater import Updater, check_rates

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
NAN, INF = float("nan"), float("inf")


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW, **named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    named = {"loss_fn": square, "policy": hs.Policy.of("mixed", dtype="bf16"), **named}
    return hs.TrainStep(model, optimizer(model.parameters()), **named)


class Timm:
    """A scheduler that wants to know the epoch."""

    def step(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clip_norm": True}, "clip_norm must be a positive finite number or None and is True"),
        ({"clip_value": "1"}, "clip_value must be a positive finite number or None and is '1'"),
        ({"clip_norm": torch.ones(2)}, "clip_norm"),
        ({"accumulate": True}, "accumulate"),
        ({"accumulate": 2.0}, "accumulate"),
        ({"cuda_graph": "yes"}, "cuda_graph must be True or False and is 'yes'"),
        ({"scheduler": "cosine"}, "and is 'cosine'; build one"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "and is the class StepLR; build one"),
        ({"scheduler": torch.optim.SGD([torch.ones(1)], 0.1)}, "and is a SGD; build one"),
        ({"scheduler": Timm()}, "Timm needs 'epoch' at each step"),
        ({"compile": {"backend": 3}}, "a backend is a name or a function"),
        (
            {"loss_fn": F.cross_entropy},
            r"is cross_entropy, .* give lambda model, x, y: F.cross_entropy\(model\(x\), y\)",
        ),
        ({"loss_fn": nn.MSELoss()}, r"is MSELoss, which takes no model; .*criterion\(model\(x\), y\)"),
    ],
)
def test_arguments_that_make_no_sense(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StepError, match=text):
        made(**change)


@pytest.mark.parametrize("model", [None, "model", [nn.Linear(1, 1)], nn.Linear])
def test_a_model_that_is_none(model: Any) -> None:
    with pytest.raises(StepError, match=r"model must be a torch\.nn\.Module and is "):
        hs.TrainStep(model, torch.optim.SGD([torch.ones(1)], 0.1), square)


def test_numbers_of_other_kinds() -> None:
    step = made(clip_norm=np.float32(0.5), clip_value=torch.tensor(0.25), accumulate=np.int64(2))
    assert (step.clip_norm, step.clip_value, step.accumulate) == (0.5, 0.25, 2)
    assert all(type(value) in {float, int} for value in (step.clip_norm, step.clip_value, step.accumulate))
    step(X), step(X)


# ---------------------------------------------------------------------- numbers of the optimizer

BAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "lr nan": (torch.optim.SGD, {"lr": NAN}),
    "lr inf": (torch.optim.RMSprop, {"lr": INF}),
    "lr tensor": (torch.optim.AdamW, {"lr": torch.tensor(NAN)}),
    "weight_decay": (torch.optim.AdamW, {"weight_decay": INF}),
    "betas": (torch.optim.AdamW, {"betas": (0.9, NAN)}),
    "betas, list": (torch.optim.AdamW, {"betas": [NAN, 0.9]}),
    "eps": (torch.optim.Adam, {"eps": NAN}),
    "eps, two": (torch.optim.Adafactor, {"eps": (None, NAN)}),
    "momentum": (torch.optim.SGD, {"momentum": INF}),
    "numpy": (torch.optim.SGD, {"lr": np.float32("nan")}),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("policy", ["mixed", "O2"])
@pytest.mark.parametrize("later", [False, True])
def test_a_number_that_leaves_no_weight_finite(case: str, policy: str, later: bool) -> None:
    kind, change = BAD[case]
    chosen = hs.Policy.of(policy, dtype="bf16")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    (name,) = change
    place = rf"{kind.__name__}\.param_groups\[0\]\['{name}'\] is "
    if not later:
        optimizer.param_groups[0].update(change)
        with pytest.raises(StepError, match=place):
            hs.TrainStep(model, optimizer, square, policy=chosen)
        assert type(model) is nn.Linear and model.weight.dtype is torch.float32
        return
    step = hs.TrainStep(model, optimizer, square, policy=chosen)
    step(X)
    before = repr(step.state_dict())
    kept = optimizer.param_groups[0][name]
    optimizer.param_groups[0].update(change)
    with pytest.raises(StepError, match=place):
        step(X)
    optimizer.param_groups[0][name] = kept
    assert repr(step.state_dict()) == before
    assert step(X).host().updated


def test_a_scheduler_that_ends_in_nan_is_found_at_the_update_it_would_spoil() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n < 2 else NAN)
    step = hs.TrainStep(model, optimizer, square, policy="O0", scheduler=scheduler)
    step(X), step(X)
    with pytest.raises(StepError, match=r"\['lr'\] is nan"):
        step(X)
    assert bool(torch.isfinite(model.weight).all())


def test_a_rate_on_a_device_is_not_read() -> None:
    parameter = nn.Parameter(torch.ones(1, device="meta"))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(NAN, device="meta")
    check_rates(optimizer)


def test_a_check_looks_again_at_what_has_changed() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters[:2]], 0.1)
    check = Updater(optimizer, None, {}).check_optimizer
    for _ in range(2):
        check()
    optimizer.param_groups[1]["momentum"] = NAN
    for _ in range(2):
        with pytest.raises(StepError, match=r"param_groups\[1\]\['momentum'\]"):
            check()
    optimizer.param_groups[1]["momentum"] = 0.5
    check()
    optimizer.add_param_group({"params": [parameters[2]], "lr": INF})
    with pytest.raises(StepError, match=r"param_groups\[2\]\['lr'\]"):
        check()
    optimizer.param_groups[2]["lr"] = torch.tensor(0.1)
    check()
    optimizer.param_groups[2]["lr"].fill_(NAN)
    with pytest.raises(StepError, match=r"param_groups\[2\]\['lr'\]"):
        check()


def test_infinities_under_other_names_are_left_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0]["growth_rate"] = INF
    check_rates(optimizer)
    Updater(optimizer, None, {}).check_optimizer()


@pytest.mark.parametrize("policy", ["mixed", "O2", "O0"])
def test_a_complex_loss_changes_nothing(policy: str) -> None:
    def turned(model: nn.Module, x: Tensor) -> Tensor:
        return torch.view_as_complex(model(x).float().reshape(-1, 2)).sum()

    chosen = policy if policy == "O0" else hs.Policy.of(policy, dtype="bf16")
    step = made(loss_fn=turned, policy=chosen)
    before = repr(step.state_dict())
    with pytest.raises(StepError, match=r"complex loss \(torch.complex64\).*loss.abs"):
        step(X)
    assert repr(step.state_dict()) == before
