"""A malformed state is refused by the path of what is wrong, and then nothing has been loaded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.binding.bindable import first_wrong
from halfstep.errors import HalfstepError, StepError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
NAN, INF = float("nan"), float("inf")
Spoil = Callable[[dict[str, Any]], Any]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(
    policy: str = "mixed", optimizer: Any = torch.optim.AdamW, scheduler: Any = None, **named: Any
) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    own = optimizer(model.parameters(), **named)
    schedule = (scheduler or (lambda o: torch.optim.lr_scheduler.StepLR(o, 1)))(own)
    chosen = hs.Policy.of(policy, dtype="fp16")
    step = hs.TrainStep(model, own, square, policy=chosen, scheduler=schedule)
    step(X)
    return step


def entry(state: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer"]["state"][number]
    return found


def group(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer"]["param_groups"][0]
    return found


SPOILED: dict[str, tuple[Spoil, str]] = {
    "step of text": (lambda s: s.update(step="x"), "step: 'x', expected a whole number of micro-batches from 0"),
    "step None": (lambda s: s.update(step=None), "step: None, expected"),
    "step below 0": (lambda s: s.update(step=-1), "step: -1, expected"),
    "step True": (lambda s: s.update(step=True), "step: True, expected"),
    "step 1.5": (lambda s: s.update(step=1.5), "step: 1.5, expected"),
    "policy None": (lambda s: s.update(policy=None), "policy: None, expected the text"),
    "policy, no TOML": (lambda s: s.update(policy="]["), "TOML"),
    "model None": (lambda s: s.update(model=None), "model: None, expected a dict"),
    "model, a name": (
        lambda s: s["model"].update({"0.wait": s["model"].pop("0.weight")}),
        "'0.weight' is missing and ",
    ),
    "model, unknown": (lambda s: s["model"].update(more=X), "model: 'more' is unknown"),
    "weight of text": (lambda s: s["model"].update({"0.weight": "x"}), r"model\['0.weight'\]: 'x', expected a Tensor"),
    "weight, shape": (
        lambda s: s["model"].update({"2.bias": torch.ones(3)}),
        r"model\['2.bias'\]: shape \(3,\), expected \(1,\)",
    ),
    "weight, integers": (
        lambda s: s["model"].update({"2.bias": torch.ones(1, dtype=torch.int64)}),
        r"model\['2.bias'\]: torch.int64, expected torch.float32",
    ),
    "weight nan": (lambda s: s["model"]["0.weight"].fill_(NAN), r"model\['0.weight'\] holds nan or inf"),
    "weight inf": (lambda s: s["model"]["2.weight"].fill_(INF), r"model\['2.weight'\] holds nan or inf"),
    "scaler of text": (lambda s: s.update(scaler="x"), "scaler: 'x', expected a dict"),
    "scaler, scale": (lambda s: s["scaler"].update(scale=NAN), "scale must be a finite number from 0 and is nan"),
    "weights of text": (lambda s: s.update(weights="x"), "weights: 'x', expected a dict"),
    "weights of nothing": (
        lambda s: s.update(weights={"seed": 1, "counts": {}}),
        "weights: nothing is rounded by chance here",
    ),
    "scheduler of text": (lambda s: s.update(scheduler="x"), "scheduler: 'x', expected None or a dict"),
    "scheduler None": (lambda s: s.update(scheduler=None), "saved with a scheduler and this TrainStep has none"),
    "scheduler, last_epoch": (lambda s: s["scheduler"].pop("last_epoch"), "scheduler: 'last_epoch' is missing"),
    "scheduler, text": (
        lambda s: s["scheduler"].update(last_epoch="x"),
        "scheduler.last_epoch: 'x', expected a finite number",
    ),
    "scheduler, nan": (
        lambda s: s["scheduler"].update(gamma=NAN),
        "scheduler.gamma: nan, expected a finite number",
    ),
    "scheduler, groups": (
        lambda s: s["scheduler"].update(base_lrs=[1, 2]),
        "scheduler.base_lrs: a list of 2, expected a list of 1",
    ),
    "scheduler, other": (lambda s: s["scheduler"].update(T_max=3), "'T_max' is unknown"),
    "optimizer None": (lambda s: s.update(optimizer=None), "optimizer: None, expected a dict"),
    "states in a list": (lambda s: s["optimizer"].update(state=[1]), "optimizer.state: a list of 1, expected a dict"),
    "groups in a dict": (
        lambda s: s["optimizer"].update(param_groups={}),
        "optimizer.param_groups: a dict, expected a list",
    ),
    "a group of text": (
        lambda s: s["optimizer"].update(param_groups=["x"]),
        r"param_groups\[0\]: 'x', expected a dict",
    ),
    "no lr": (lambda s: group(s).pop("lr"), r"optimizer.param_groups\[0\]: 'lr' is missing"),
    "no betas": (lambda s: group(s).pop("betas"), r"optimizer.param_groups\[0\]: 'betas' is missing"),
    "lr of text": (lambda s: group(s).update(lr="x"), r"optimizer.param_groups\[0\].lr: 'x', expected a finite number"),
    "lr None": (lambda s: group(s).update(lr=None), r"param_groups\[0\].lr: None, expected a finite number"),
    "lr True": (lambda s: group(s).update(lr=True), r"param_groups\[0\].lr: True, expected a finite number"),
    "lr nan": (lambda s: group(s).update(lr=NAN), r"param_groups\[0\].lr: nan, expected a finite number"),
    "one beta": (lambda s: group(s).update(betas=0.9), r"param_groups\[0\].betas: 0.9, expected a list of 2"),
    "shape of a moment": (
        lambda s: entry(s).update(exp_avg=torch.ones(3)),
        r"optimizer.state\[0\].exp_avg: shape \(3,\), expected \(4, 4\)",
    ),
    "a moment of text": (
        lambda s: entry(s).update(exp_avg="x"),
        r"optimizer.state\[0\].exp_avg: 'x', expected a Tensor",
    ),
    "integer moment": (
        lambda s: entry(s).update(exp_avg=torch.ones(4, 4).int()),
        r"state\[0\].exp_avg: torch.int32, exp",
    ),
    "nan in a moment": (lambda s: entry(s, 2)["exp_avg"].fill_(NAN), r"optimizer.state\[2\].exp_avg holds nan"),
    "moment missing": (lambda s: entry(s).pop("exp_avg_sq"), r"optimizer.state\[0\]: 'exp_avg_sq' is missing"),
    "moment None": (lambda s: entry(s).update(exp_avg_sq=None), r"optimizer.state\[0\]: 'exp_avg_sq' is missing"),
    "count missing": (lambda s: entry(s).pop("step"), r"optimizer.state\[0\]: 'step' is missing"),
    "count of text": (
        lambda s: entry(s).update(step="x"),
        r"optimizer.state\[0\].step: 'x', expected a finite number from 0",
    ),
    "count below 0": (
        lambda s: entry(s).update(step=-1),
        r"optimizer.state\[0\].step: -1, expected a finite number from",
    ),
    "count of many": (
        lambda s: entry(s).update(step=X),
        r"optimizer.state\[0\].step: a Tensor, expected a finite number from 0",
    ),
    "of SGD": (
        lambda s: s["optimizer"].update(state={0: {"momentum_buffer": torch.ones(4, 4)}}),
        r"optimizer.state\[0\].momentum_buffer: AdamW has no such state, only exp_avg, ",
    ),
    "of no parameter": (
        lambda s: s["optimizer"]["state"].update({9: entry(s)}),
        r"optimizer.state\[9\]: there is no such",
    ),
    "an entry of text": (
        lambda s: s["optimizer"]["state"].update({1: "x"}),
        r"optimizer.state\[1\]: 'x', expected a dict",
    ),
    "a key": (lambda s: s.update(more=1), "state: 'more' is unknown"),
}


LOW = ("weight nan", "shape of a moment", "no lr", "scaler, scale", "step None")  # tried with low weights too


@pytest.mark.parametrize(("policy", "case"), [*(("mixed", c) for c in SPOILED), *(("O2", c) for c in LOW)])
def test_a_malformed_state_changes_nothing(policy: str, case: str) -> None:
    spoil, text = SPOILED[case]
    step = made(policy)
    spoiled = copy.deepcopy(step.state_dict())
    spoil(spoiled)
    step(X)
    before = repr(step.state_dict())
    with pytest.raises(HalfstepError, match=text):
        step.load_state_dict(spoiled)
    assert repr(step.state_dict()) == before
    assert step(X).host().updated


@pytest.mark.parametrize("state", [None, "x", [], {"model": {}}])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(StepError, match="state: .*(expected a dict|'optimizer' is missing)"):
        made().load_state_dict(state)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop, all": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    **{
        name: (getattr(torch.optim, name), {})
        for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor")
    },
    "Lion": (hs.Lion, {}),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["mixed", "O2"])
def test_whatever_an_optimizer_saves_is_loaded(case: str, policy: str) -> None:
    """The table of states is that of torch: into a step that has trained, and into a new one."""
    kind, named = OPTIMIZERS[case]
    step = made(policy, kind, **named)
    step(X)
    state = copy.deepcopy(step.state_dict())
    step(X)
    after = repr(step.state_dict())
    for trained in (True, False):
        other = made(policy, kind, **named)
        if not trained:
            other.optimizer.state.clear()
        other.load_state_dict(copy.deepcopy(state))
        assert repr(other.state_dict()) == repr(state)
        other(X)
        assert repr(other.state_dict()) == after


@pytest.mark.parametrize(("case", "name"), [("Adam, amsgrad", "max_exp_avg_sq"), ("RMSprop, all", "momentum_buffer")])
def test_a_state_that_an_option_needs(case: str, name: str) -> None:
    kind, named = OPTIMIZERS[case]
    step = made("mixed", kind, **named)
    state = copy.deepcopy(step.state_dict())
    entry(state).pop(name)
    with pytest.raises(StepError, match=f"'{name}' is missing"):
        step.load_state_dict(state)


def test_options_that_older_versions_did_not_save_may_be_missing() -> None:
    step = made()
    state = copy.deepcopy(step.state_dict())
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        group(state).pop(name)
    step.load_state_dict(state)
    assert bool(step(X).updated)


def test_infinite_second_moments_and_masks_are_no_mistakes() -> None:
    step = made()
    state = copy.deepcopy(step.state_dict())
    entry(state)["exp_avg_sq"].fill_(INF)
    step.load_state_dict(state)
    assert step.state_dict()["model"]["mask"][1] == -INF


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)]
        ),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: math.exp(-n)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    ],
)
def test_whatever_a_scheduler_saves_is_loaded(make: Any) -> None:
    step = made(scheduler=make)
    state = copy.deepcopy(step.state_dict())
    for _ in range(2):
        step(X)
    step.load_state_dict(state)
    assert repr(step.state_dict()["scheduler"]) == repr(state["scheduler"])


class Partial(nn.Linear):
    """Fails to load after its weight is there."""

    fail = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.fail:
            raise MemoryError("no room")


def test_a_model_that_fails_half_way_refuses_to_go_on_until_a_state_is_loaded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Partial(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    step = hs.TrainStep(model, optimizer, square, policy=hs.Policy.of("O2", dtype="bf16"))
    step(X)
    state = copy.deepcopy(step.state_dict())
    step(X)
    moments = repr(optimizer.state_dict())
    vars(model[1])["fail"] = True
    with pytest.raises(MemoryError):
        step.load_state_dict(state)
    assert repr(optimizer.state_dict()) == moments  # what can be put back is
    with pytest.raises(StepError, match=r"MemoryError \(no room\) cut off load_state_dict.*load a checkpoint"):
        step(X)
    with pytest.raises(StepError, match="cut off"):
        step.state_dict()
    vars(model[1])["fail"] = False
    step.load_state_dict(state)
    assert repr(step.state_dict()) == repr(state)
    step(X)


@pytest.mark.parametrize("policy", ["mixed", "O2"])
@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_a_piece_that_fails_to_load_leaves_the_others_as_they_were(part: str, policy: str) -> None:
    class Optimizer(torch.optim.RMSprop):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            if part == "optimizer":
                raise MemoryError

    class Scheduler(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            if part == "scheduler":
                raise MemoryError

    step = made(policy, Optimizer, lambda o: Scheduler(o, 1))
    state = copy.deepcopy(step.state_dict())
    step(X)
    before = repr(step.state_dict())
    with pytest.raises(MemoryError):
        step.load_state_dict(state)
    assert repr(step.state_dict()) == before
    assert step(X).host().updated


def test_random_bits_begin_again_with_a_state_from_before_the_first_update() -> None:
    policy = hs.Policy.of("O2", dtype="bf16", master="stochastic")

    def fresh() -> hs.TrainStep:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.01), square, policy=policy)

    step = fresh()
    state = copy.deepcopy(step.state_dict())
    first = [step(X).host() for _ in range(5)]
    step.load_state_dict(state)
    assert [step(X).host() for _ in range(5)] != first[::-1]
    step.load_state_dict(state)
    again = [step(X).host().loss for _ in range(5)]
    assert again == [result.loss for result in first]


class Packed(Tensor):
    """A state that stores its values its own way, as torchao's 8-bit states do, and knows no comparison."""

    kept: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        return made

    def __init__(self, values: Tensor) -> None:
        self.kept = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["kept"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, more: Any, size: Any, stride: Any) -> Packed:
        return cls(parts["kept"])

    def dequantize(self) -> Tensor:
        return self.kept

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].kept)
        raise NotImplementedError(str(func))


@pytest.mark.parametrize(("value", "wrong"), [(1.0, ""), (math.nan, "state")])
def test_states_of_a_tensor_subclass_are_looked_at_in_its_values(value: float, wrong: str) -> None:
    assert first_wrong([("state", Packed(torch.full((3,), value)))], infinities=True) == wrong
