"""policy="auto": what is chosen, that measuring leaves nothing behind, and that training goes on bit for bit."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import halfstep as hs
from halfstep.auto import choose, trial
from halfstep.auto.choose import Elimination, pays
from halfstep.auto.trial import StepSnapshot
from halfstep.errors import BindError, PolicyError, StepError, WeightsError
from halfstep.step import undecided as auto
from halfstep.step.undecided import Undecided
from halfstep.timing import Ratio, timed

SECONDS = {"fp32": 1.0, "mixed": 0.1, "O2": 0.01, "pure": 0.001}  # so far apart that one round is enough


class Net(nn.Module):
    """Dropout, both kinds of norms, shared weights, a generator and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.layer = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.inside.weight
        self.out = nn.Linear(8, 2)
        self.noise, self.calls, self.seen = torch.Generator().manual_seed(3), 0, list[int]()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        y = self.norm(self.inside(x))
        if self.cache is None:  # as rotary embeddings do: what is made first stays
            self.cache = y.detach()[0, 0].clone()
        y = self.layer(F.dropout(self.again(y), 0.3)) * self.cache.float()
        out: Tensor = self.out(y + 0.1 * torch.randn(y.shape, generator=self.noise))
        return out


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(model(x), y) * random.uniform(0.9, 1.0) * float(np.random.uniform(0.9, 1.0))
    return loss


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=source), torch.randint(0, 2, (16,), generator=source)


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def built(policy: Any, kind: type[hs.TrainStep] = hs.TrainStep, loss: Any = loss_fn, **options: Any) -> hs.TrainStep:
    """Return a step of a new net, from a fixed seed."""
    seeded()
    model = Net()
    optimizer: Any = options.pop("optimizer", lambda p: torch.optim.AdamW(p, lr=1e-2))(model.parameters())
    if options.pop("warm", False):  # states and gradients are there already
        loss(model, *batch(9)).backward()
        optimizer.step()
    if (schedule := options.pop("schedule", None)) is not None:
        options["scheduler"] = schedule(optimizer)
    before = [p.grad for p in model.parameters()]
    step = kind(model, optimizer, loss, policy=policy, **options)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), before, strict=True))
    return step


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Let candidates really run, and take as long as this gives."""
    seconds = dict(SECONDS)

    class Timed(Elimination):
        def __init__(self, measure: Callable[[str, int], float]) -> None:
            def given(name: str, number: int) -> float:
                measure(name, number)
                return seconds[name]

            super().__init__(given)

    monkeypatch.setattr(choose, "Elimination", Timed)
    monkeypatch.setattr(trial, "timed", lambda run, device: timed(run, device, clock=lambda: 0.0) + 1.0)
    monkeypatch.setattr(choose, "PAYBACK", 0)
    yield seconds


def everything(step: hs.TrainStep) -> list[Any]:
    """Return all that a step may change, as plain values."""
    model: Any = step.model
    flat: list[Any] = [
        (name, value.clone() if isinstance(value, Tensor) else value) for name, value in model.state_dict().items()
    ]
    flat += [(p.dtype, p.data_ptr(), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    optimizer = copy.deepcopy(step.optimizer.state_dict())
    flat += [sorted(optimizer["param_groups"][0].items(), key=lambda item: item[0]), sorted(optimizer["state"])]
    flat += [(k, v) for state in optimizer["state"].values() for k, v in sorted(state.items())]
    flat += [torch.get_rng_state(), random.getstate(), repr(np.random.get_state()), model.noise.get_state()]
    flat += [model.calls, list(model.seen), model.cache, type(model), sorted(vars(model)), sorted(vars(step.optimizer))]
    flat += [type(part) for part in model.modules()]
    flat += [sorted(vars(part)) for part in model.modules()]
    return flat


def same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def trained(step: hs.TrainStep, first: int = 0, last: int = 6) -> list[Any]:
    """Train some micro-batches; return what was computed and what is there then, without addresses."""
    found = [step(*batch(number)).host() for number in range(first, last)]
    step.flush()
    state = step.state_dict()
    state.pop("choice", None)
    model: Any = step.model
    random_states = [torch.get_rng_state(), random.getstate(), model.noise.get_state()]
    return [
        [repr(one) for one in found],
        state,
        random_states,
        model.calls,
        model.cache,
        step.optimizer.param_groups[0]["lr"],
    ]


# ---------------------------------------------------------------------- the same as from the start

OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "SGD with momentum": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    "Adadelta, which no operator of halfstep makes": {"optimizer": lambda p: torch.optim.Adadelta(p)},
    "windows": {"accumulate": 2, "clip_norm": 0.1},
    "a schedule": {"schedule": lambda o: StepLR(o, 1, 0.5), "clip_value": 0.01},
    "retry": {"retry": True},
    "in the backward pass": {"update_in_backward": True},
    "a resumed optimizer": {"warm": True},
}


EVERY = [(best, name) for best in SECONDS for name in OPTIONS]
QUICK = [*(("pure", name) for name in OPTIONS), ("fp32", "plain"), ("mixed", "plain"), ("O2", "windows")]


@pytest.mark.parametrize(
    ("best", "name"), [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.hours) for pair in EVERY]
)
def test_training_is_that_of_a_step_with_the_policy_from_the_start(
    best: str, name: str, times: dict[str, float]
) -> None:
    times[best] = 1e-5
    step = built("auto", **OPTIONS[name])
    found = trained(step)
    assert step.choice is not None
    assert step.choice.policy == hs.Policy.of(choose.POLICIES[best])
    assert type(step) is hs.TrainStep
    assert same(found, trained(built(step.choice.policy, **OPTIONS[name])))


def test_fp16_waits_for_its_scale_and_trains_as_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = hs.Policy.of("pure", dtype="fp16", scale=hs.ScaleRule(init=2.0**24))
    monkeypatch.setitem(choose.POLICIES, "pure", policy)
    options: dict[str, Any] = {"retry": True}
    step = built("auto", **options)
    found = trained(step)
    assert step.choice is not None
    assert step.choice.policy == policy
    assert same(found, trained(built(policy, **options)))


def test_two_steps_of_one_loop_each_choose() -> None:
    """A loss that runs another model: its statistics and gradients return too."""
    critic = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def adversarial(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = critic(model(x)).square().mean() + loss_fn(model, x, y)
        return loss

    def run(policy: Any) -> list[Any]:
        seeded()
        critic.load_state_dict(start)
        critic.zero_grad()
        step = built(policy, loss=adversarial)
        found: list[Any] = [step(*batch(9)).host()]
        held = [p.grad for p in critic.parameters()]
        other = hs.TrainStep(
            critic,
            torch.optim.SGD(critic.parameters(), lr=0.1),
            lambda m, x: m(x[:, :2]).square().mean(),
            policy=policy,
        )
        found += [(step(*batch(n)).host(), other(batch(n)[0]).host()) for n in range(3)]
        chosen.append((step.choice, other.choice))
        values = copy.deepcopy(critic.state_dict())
        hs.unprepare(critic)
        return [repr(found), values, held, step.model.state_dict()]

    start, chosen = copy.deepcopy(critic.state_dict()), list[Any]()
    assert same(run("auto"), run("pure"))
    assert [one and one.policy.name for one in chosen[0]] == ["pure", "pure"] or chosen[0][1].policy.name == "O2"


def test_low_weights_of_a_checkpoint_are_as_they_were() -> None:
    seeded()
    model = nn.Linear(4, 4).bfloat16()
    before = model.weight.data
    snapshot = StepSnapshot(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with snapshot.lent():
        hs.prepare(model, policy="O0")
        assert model.weight.dtype is torch.float32
    assert model.weight.dtype is torch.bfloat16
    assert model.weight.data_ptr() == before.data_ptr()


# ---------------------------------------------------------------------- nothing is left behind


def measured_only(step: hs.TrainStep, *data: Any) -> Any:
    assert isinstance(step._moments, Undecided)
    return choose.choose(step, hs.TrainStep, data or batch(), {})[0]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("options", [{}, {"optimizer": lambda p: torch.optim.Adadelta(p)}, {"accumulate": 2}])
def test_measuring_changes_nothing(options: dict[str, Any], warm: bool) -> None:
    step = built("auto", warm=warm, **options)
    before = everything(step)
    choice = measured_only(step)
    assert choice.calls >= 13
    assert same(before, everything(step))


@pytest.mark.parametrize(
    ("call", "kind"),
    [*((call, RuntimeError) for call in (1, 2, 4, 5, 8)), (5, KeyboardInterrupt), (1, MemoryError), (12, MemoryError)],
)
def test_an_exception_in_any_trial_changes_nothing_and_the_next_call_measures_again(
    call: int, kind: type[BaseException]
) -> None:
    calls, on = [0], [True]

    def failing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        loss = loss_fn(model, x, y)
        if on[0] and calls[0] == call:
            raise kind("not now")
        return loss

    step = built("auto", loss=failing)
    before = everything(step)
    try:
        choice = measured_only(step)
    except kind:
        assert kind is KeyboardInterrupt or call <= 2
    else:
        assert any("not now" in reason for _, reason in choice.dropped)
    assert same(before, everything(step))
    on[0] = False
    step(*batch())
    assert step.choice is not None
    assert step.choice.policy.name == "pure"


def test_memory_that_is_shared_stays_shared() -> None:
    flat = torch.randn(20)
    model = nn.Linear(4, 4)
    model.weight.data, model.bias.data = flat[:16].view(4, 4), flat[16:]
    before = flat.clone()
    snapshot = StepSnapshot(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with snapshot.lent():
        assert model.weight.untyped_storage().data_ptr() == model.bias.untyped_storage().data_ptr() != flat.data_ptr()
        with torch.no_grad():
            model.weight.fill_(1.0)
    assert model.weight.data_ptr() == flat.data_ptr()
    assert torch.equal(flat, before)


def test_attributes_of_an_optimizer_and_numbers_in_tensors_return() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            self.param_groups[0]["lr"].mul_(0.5)
            return super().step(closure)

    step = built("auto", optimizer=lambda p: Counting(p, lr=torch.tensor(0.1)))
    rate = step.optimizer.param_groups[0]["lr"]
    measured_only(step)
    assert not hasattr(step.optimizer, "steps")
    assert step.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_a_loss_may_write_into_its_batch() -> None:
    def writing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model, x.mul_(0.5), y)

    step, (x, y) = built("auto", loss=writing), batch()
    step(x, y)
    assert torch.equal(x, batch()[0] * 0.5)


# ---------------------------------------------------------------------- what cannot be chosen


def low(model: Any) -> bool:
    return bool(model.out.weight.dtype is torch.bfloat16)


def test_a_candidate_that_is_not_finite_raises_or_lacks_memory_is_dropped_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def picky(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model, x, y)
        if model.layer.weight.dtype is torch.bfloat16:  # pure
            raise MemoryError("too much")
        if low(model):  # O2
            return loss * float("inf")
        if torch.is_autocast_enabled("cpu"):  # mixed
            raise ValueError("no half precision\nhere")
        return loss

    step = built("auto", loss=picky)
    step(*batch())
    assert step.choice is not None
    assert dict(step.choice.dropped) == {
        "mixed": "ValueError: no half precision",
        "O2": "its first step is not finite (loss inf)",
        "pure": "out of memory (too much)",
    }
    assert step.policy.name == "O0"
    assert "O2 cannot be chosen: its first step is not finite (loss inf)" in caplog.text


def test_what_the_loss_raises_in_fp32_is_raised_as_it_is() -> None:
    def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise KeyError("label")

    step = built("auto", loss=wrong)
    with pytest.raises(KeyError, match="label"):
        step(*batch())
    with pytest.raises(StepError, match="must return a scalar tensor"):
        built("auto", loss=lambda model, x, y: model(x))(*batch())
    assert step.choice is None


def test_a_batch_on_which_none_is_finite_is_an_error_and_the_next_one_decides() -> None:
    step = built("auto")
    x, y = batch()
    before = everything(step)
    with pytest.raises(
        StepError, match=r"no candidate can be chosen on this batch. fp32: its first step is not finite"
    ):
        step(x * float("nan"), y)
    assert same(before, everything(step))
    assert step(x, y).host().updated


def test_memory_may_be_enough_for_low_weights_alone() -> None:
    def large(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if not low(model):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return loss_fn(model, x, y)

    step = built("auto", loss=large)
    step(*batch())
    assert step.choice is not None
    assert [name for name, _ in step.choice.ratios] == ["O2", "pure"]
    assert step.choice.policy.name == "pure"


def test_without_units_for_a_low_format_there_is_fp32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "resolved", lambda policy, device: hs.Policy.of("O0"))
    step = built("auto")
    step(*batch())
    assert step.choice is not None
    assert [name for name, _ in step.choice.ratios] == ["fp32"]


def test_pure_runs_only_where_it_lowers_more_than_o2() -> None:
    assert choose.candidates(built("auto")) == ["fp32", "mixed", "O2", "pure"]
    model = nn.Linear(2, 2)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, policy="auto")
    assert choose.candidates(step) == ["fp32", "mixed", "O2"]


# ---------------------------------------------------------------------- the line, and the choice


def test_one_that_looks_faster_and_is_not_certain_has_its_interval_alone() -> None:
    chosen = Ratio(median=1.0, low=1.0, high=1.0, rounds=4)
    assert choose._beside("mixed", replace(chosen, median=1.2), chosen) == "mixed 1.20"
    near = Ratio(median=0.594, low=0.39, high=1.37, rounds=3)
    assert choose._beside("O2", near, chosen) == "O2 not certain (0.39 to 1.37)"
    once = Ratio(median=0.66, low=0.66, high=0.66, rounds=1)
    assert choose._beside("O2", once, replace(chosen, median=0.84)) == "O2 not certain (one round)"
    assert choose._beside("O2", replace(once, median=0.838), replace(chosen, median=0.84)) == "O2 0.84"


def test_the_choice_is_logged_in_one_line(times: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    times |= {"fp32": 1.0, "mixed": 0.9, "O2": 0.8, "pure": 0.6}
    step = built("auto")
    step(*batch())
    choice = step.choice
    assert choice is not None
    line = (
        "auto: pure in bf16: 0.60 of fp32, 600 ms a step, 3 rounds, 28 calls of loss_fn, "
        f"{choice.seconds:.1f} s; mixed 0.90, O2 0.80"
    )
    assert [record.getMessage() for record in caplog.records if record.name == "halfstep"] == [line]
    assert choice.line == line
    assert dict(choice.ratios)["O2"].median == pytest.approx(0.8)
    assert (choice.rounds, choice.compiled, choice.dropped) == (3, False, ())
    assert step(*batch(1)).step == 2
    assert len(caplog.records) == 1


def test_a_busy_machine_does_not_make_the_line_contradict_itself() -> None:
    seconds = {"fp32": 6.0, "mixed": 1.0, "O2": 1.02, "pure": 1.1}

    def measure(name: str, number: int) -> float:
        return 0.7 if (name, number) == ("O2", 0) else seconds[name]  # in the one round that fp32 was in too

    race = Elimination(measure)
    race.eliminate(list(seconds), choose.EAGER_TURNS)
    assert len(race.times["fp32"]) == 1
    line = choose.concluded(race, race.best(), "cpu", 1.0, 28).line
    assert line.startswith("auto: mixed in bf16: 0.17 of fp32, ")
    assert "O2 0.17" in line


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.461, 0.464, "0.46 to 0.47"), (0.39, 1.37, "0.39 to 1.37"), (0.46, 0.46, ""), (0.4649, 0.4651, "0.46 to 0.47")],
)
def test_an_interval_in_words_is_never_empty(low: float, high: float, words: str) -> None:
    assert choose._interval(Ratio(median=low, low=low, high=high, rounds=5)) == words


def test_a_choice_takes_at_most_forty_steps_however_close_candidates_are(
    times: dict[str, float], graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "pays", lambda nodes, seconds, spent: True)
    times |= dict.fromkeys(SECONDS, 1.0)
    times |= {"fp32 compiled": 0.9, "mixed compiled": 0.88}
    for accumulate in (1, 2):
        step = compilable("auto", accumulate=accumulate)
        step(*batch())
        assert step.choice is not None
        assert step.choice.compiled
        assert 28 < step.choice.calls / accumulate <= 40


@pytest.mark.parametrize(
    ("nodes", "seconds", "spent", "paid"),
    [
        ([100], 0.01, 0.0, True),  # 20 seconds, and 10,000 steps take 100
        ([100], 0.001, 0.0, False),  # 10
        ([1_000], 1.0, 0.0, True),  # 110 seconds of 120
        ([1_200], 1.0, 0.0, False),
        ([100], 1.0, 50.0, True),
        ([100], 1.0, 70.0, False),  # it would take as long again
    ],
)
def test_what_compiling_may_cost(
    nodes: list[int], seconds: float, spent: float, paid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "PAYBACK", 10_000)
    assert pays(nodes, seconds, spent) is paid


def compilable(policy: Any, **options: Any) -> hs.TrainStep:
    """Return a step whose loss is one graph."""
    seeded()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return hs.TrainStep(model, optimizer, plain, policy=policy, **options)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let torch.compile run graphs as they are; return them."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **{"backend": backend, **options}))
    return seen


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        (1e-4, 1e-5, "O2"),
        pytest.param(1e-4, 1e-4, "O2", marks=pytest.mark.hours),  # the more precise one of two
        pytest.param(1e-4, 1e-3, "pure", marks=pytest.mark.hours),
        pytest.param(1e-3, 1e-5, "", marks=pytest.mark.hours),  # no gain: the second is not compiled
    ],
)
def test_the_best_is_compiled_too_then_the_second_and_chosen_if_it_is_faster(
    first: float, second: float, best: str, times: dict[str, float], graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "pays", lambda nodes, seconds, spent: nodes[0] > 5)
    times |= {"pure compiled": first, "O2 compiled": second}
    step = compilable("auto")
    found = [repr(step(*batch(n)).host()) for n in range(3)]
    assert step.choice is not None
    assert step.choice.compiled is step.compile is bool(best)
    assert [name for name, _ in step.choice.ratios][4:] == ["pure compiled", "O2 compiled"][: 1 + bool(best)]
    assert step.choice.policy.name == (best or "pure")
    assert len(graphs) == 1 + bool(best)
    other = compilable(step.choice.policy, compile=step.choice.compiled)
    assert found == [repr(other(*batch(n)).host()) for n in range(3)]
    assert same(step.model.state_dict(), other.model.state_dict())


@pytest.mark.hours
@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_what_is_to_be_compiled_always_is_compiled_once_for_each_candidate(
    times: dict[str, float], graphs: list[Any]
) -> None:
    times |= {f"{name} compiled": value for name, value in SECONDS.items()}
    step = compilable("auto", compile={"fullgraph": True})
    step(*batch())
    step(*batch(1))
    assert step.choice is not None
    assert (step.choice.rounds, step.choice.compiled, step.choice.policy.name) == (1, True, "pure")
    assert step.compile == {"fullgraph": True}
    assert len(graphs) == 4


# ---------------------------------------------------------------------- before the choice


def test_before_the_choice_what_is_not_known_is_an_error_that_says_when(tmp_path: Path) -> None:
    step = built("auto", clip_norm=1.0)
    for name in ("policy", "scaler", "watchers", "copies", "generic"):
        with pytest.raises(StepError, match=rf"step.{name}: policy='auto' chooses in the first call"):
            getattr(step, name)
        assert not hasattr(step, name)
    with pytest.raises(StepError, match="chooses in the first call"):
        hs.Monitor(step, format="bf16")
    with pytest.raises(StepError, match="chooses in the first call"):
        step.explain()
    assert isinstance(step, hs.TrainStep)
    assert repr(step).startswith("<halfstep.step.train_step.TrainStep object")
    assert (step.choice, step.compile, step.flush(), step.host_reads, step.record.done) == (None, None, None, 0, 0)
    assert hs.prepared_policy(step.model) is None
    loss = step.evaluate(*batch())
    assert not loss.requires_grad


def test_what_is_set_before_the_choice_holds_after_it() -> None:
    step = built("auto")
    step.clip_norm = 1e-3
    metrics = step.metrics(every=1)
    step(*batch())
    assert step.clip_norm == 1e-3
    assert [one.step for one in metrics.poll()] == [1]


def test_a_class_of_the_users_is_its_own_again() -> None:
    class Mine(hs.TrainStep):
        def __call__(self, *data: Any, **named: Any) -> Any:
            counted.append(1)
            return super().__call__(*data, **named)

    counted: list[int] = []
    step = built("auto", kind=Mine)
    assert isinstance(step, Mine)
    step(*batch())
    assert type(step) is Mine
    assert counted == [1]


REFUSED: Mapping[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any], str]] = {
    "scaler": (lambda m: m, {"scaler": hs.GradScaler()}, "brings its own loss scale"),
    "graph": (lambda m: m, {"compile": {"mode": "reduce-overhead"}}, "CUDA graphs are captured under one policy"),
    "prepared": (lambda m: hs.prepare(m, policy="pure"), {}, "prepared with 'pure' already.*hs.unprepare"),
    "wrapped": (nn.DataParallel, {}, "wrapped in DataParallel; give the model in it"),
    "lazy": (lambda m: nn.Sequential(nn.LazyLinear(2)), {}, "parameter 0.weight has no values yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_auto_is_refused(name: str) -> None:
    change, options, words = REFUSED[name]
    model = change(Net())
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))] if name == "lazy" else model.parameters(), lr=0.1)
    with pytest.raises(StepError, match=f"policy='auto': .*{words}"):
        hs.TrainStep(model, optimizer, loss_fn, policy="auto", **options)


def test_what_a_step_in_fp32_refuses_is_refused_when_it_is_built() -> None:
    with pytest.raises(StepError, match="update_in_backward"):
        built("auto", update_in_backward=True, clip_norm=1.0)
    with pytest.raises(BindError, match="is not a parameter of the model"):
        hs.TrainStep(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), loss_fn, policy="auto")
    with pytest.raises(StepError, match="compile"):
        built("auto", compile={"backnd": "eager"})


def test_several_processes_without_ddp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "processes", lambda: (1, 2))
    with pytest.raises(StepError, match="processes choose together under DistributedDataParallel alone; wrap the"):
        built("auto")


def test_a_model_that_was_prepared_in_between_is_refused() -> None:
    step = built("auto")
    hs.prepare(step.model, policy="mixed")
    with pytest.raises(StepError, match="the model was prepared after this step was built"):
        step(*batch())


@pytest.mark.parametrize(
    "use", [lambda p: hs.autocast(policy=p), hs.Policy.of, lambda p: hs.prepare(nn.Linear(2, 2), policy=p)]
)
def test_elsewhere_auto_names_the_training_step(use: Callable[[Any], Any]) -> None:
    with pytest.raises(PolicyError, match=r"policy='auto' is measured by hs.TrainStep alone.*dtype='auto'"):
        use("auto")


# ---------------------------------------------------------------------- checkpoints and copies


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what forbids to measure from now on."""

    def forbid() -> None:
        monkeypatch.setattr(auto, "choose", lambda *_: pytest.fail("it measures"))

    return forbid


@pytest.mark.parametrize("saved", ["auto", "pure"])
@pytest.mark.parametrize("loaded", ["auto", "pure"])
def test_a_choice_is_loaded_and_not_measured(
    saved: str, loaded: str, unmeasured: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    step = built(saved)
    trained(step, 0, 3)
    state = copy.deepcopy(step.state_dict())
    assert ("choice" in state) is (saved == "auto")
    rest, noise = trained(step, 3), step.model
    unmeasured()
    other = built(loaded)
    caplog.clear()
    other.load_state_dict(state)
    model: Any = other.model
    line = "auto: pure in bf16, as in the checkpoint"
    assert [record.getMessage() for record in caplog.records] == ([line] if loaded == "auto" else [])
    assert (other.choice is not None) is (loaded == "auto")
    assert other.policy.name == "pure"
    assert other.record.done == 3
    assert "choice" in other.state_dict() if loaded == "auto" else True
    assert rest
    assert noise is not model


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, unmeasured: Callable[[], None]) -> None:
    step = compilable("auto")
    step(*batch(0))
    hs.save(step, tmp_path)
    rest = [repr(step(*batch(n)).host()) for n in range(1, 4)]
    unmeasured()
    other = compilable("auto")
    loaded = hs.load(other, tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert rest == [repr(other(*batch(n)).host()) for n in range(1, 4)]
    assert same(other.model.state_dict(), step.model.state_dict())


def test_a_state_from_before_the_choice_leaves_it_open(times: dict[str, float], tmp_path: Path) -> None:
    step = built("auto", warm=True)
    hs.save(step, tmp_path)
    state = copy.deepcopy(step.state_dict())
    other = built("auto")
    assert hs.load(other, tmp_path) is not None
    assert other.choice is None
    assert same(other.model.state_dict(), step.model.state_dict())
    assert same(other.optimizer.state_dict(), step.optimizer.state_dict())
    seeded()
    times["mixed"] = 1e-5
    other(*batch())
    assert other.policy.name == "mixed"
    with pytest.raises(StepError, match="saved under another policy"):
        built("mixed").load_state_dict(state)


def test_a_state_that_cannot_be_loaded_leaves_the_choice_open() -> None:
    step = built("auto")
    step(*batch())
    state = step.state_dict()
    other = built("auto")
    before = everything(other)
    wrong: dict[str, Any]
    for wrong in ({"weights": {"drawn": 1}}, {"model": {}}, {"policy": "name = 3"}, {"choice": 5}, {"step": -1}):
        with pytest.raises((StepError, PolicyError, WeightsError)):
            other.load_state_dict({**state, **wrong})
        assert other.choice is None
        assert same(before, everything(other))
    assert other(*batch()).host().updated


def test_whether_to_compile_is_loaded_unless_the_step_was_told(graphs: list[Any]) -> None:
    step = built("auto")
    step(*batch())
    state = step.state_dict()
    state["choice"]["compiled"] = True
    for wish, compiled in ((None, True), (False, False), ({"fullgraph": True}, {"fullgraph": True})):
        other = built("auto", compile=wish)
        other.load_state_dict(state)
        assert other.compile == compiled
        assert other.choice is not None
        assert other.choice.compiled is bool(compiled)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_copies_of_a_step_choose_for_themselves_or_keep_the_choice(
    copied: Callable[[hs.TrainStep], hs.TrainStep], unmeasured: Callable[[], None]
) -> None:
    step = built("auto", clip_norm=0.5)
    early: Any = copied(step)
    assert isinstance(early._moments, Undecided)
    assert early.clip_norm == 0.5 and early._given.choice is None
    step(*batch())
    early(*batch())
    assert early.choice is not None and early.choice.rounds
    unmeasured()
    late = copied(step)
    assert type(late) is hs.TrainStep
    assert late.choice == step.choice
    late(*batch(1))
