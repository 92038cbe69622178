"""What policy="auto" chooses: candidates race on the model and the batch of a training step.

Note [candidates]: fp32 (O0), mixed, O2 and pure in the format that the device is fast in, eager; then the best of them
compiled, and if that is faster the second best compiled too. pure is left out where it lowers the same parameters as
O2, and low formats where the device has no units for them. They race (`race`) in complete training steps on the user's
model and batch, which are taken back (`trial`).

Note [compilation]: code is compiled only if its predicted time is at most `BUDGET` seconds and at most what `PAYBACK`
eager steps take: a run of ten times as many, a tenth faster, earns it back. The second is compiled if the first left
enough of the budget. The prediction is `BEGIN` seconds and `PER_NODE` for each autograd node of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.auto.race import Elimination
from halfstep.auto.trial import StepSnapshot, Team, TimedSteps
from halfstep.binding.bind import is_bound
from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError, first_line
from halfstep.policy.plan import resolve
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of, resolved
from halfstep.scale.scaler import GradScaler
from halfstep.timing import Ratio, Unfit
from halfstep.trees import graph_of

FP32, COMPILED = "fp32", " compiled"
POLICIES: Mapping[str, str] = {FP32: "O0", "mixed": "mixed", "O2": "O2", "pure": "pure"}
"""Candidates, the most precise first: it is preferred where others are not faster."""

EAGER_TURNS, FIRST_TURNS, TURNS = 9, 11, 13
"""Turns (`trial.STEPS`) until something is compiled, until a second candidate is, and of all: 40 steps at most."""

BUDGET = 120.0  # seconds of compilation
PAYBACK = 10_000  # steps
BEGIN, PER_NODE = 10.0, 0.1  # seconds
SETTINGS = "clip_norm clip_value accumulate scheduler retry update_in_backward".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What policy="auto" has chosen; `ratios` and what follows are empty for a choice from a checkpoint."""

    policy: Policy  # as it could be given to TrainStep
    compiled: bool  # whether the step is compiled
    line: str  # what was logged: the choice, and why
    # candidate -> its time over that of fp32, or of the one chosen where fp32 did not run
    ratios: tuple[tuple[str, Ratio], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()  # candidate -> why it could not be chosen
    rounds: int = 0  # of the measurement
    seconds: float = 0.0  # that it took
    calls: int = 0  # how often `loss_fn` was called in it


def choose(step: Any, make: Callable[..., Any], batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Choice, Any]:
    """Measure the candidates of `step`, which `make` makes; return the choice, and the compiled loss or None."""
    model, team = unwrap(step.model), Team(step.model if isinstance(step.model, DistributedDataParallel) else None)
    if is_bound(model):
        raise StepError("policy='auto': the model was prepared after this step was built; build the step anew")
    begun, nodes = time.perf_counter(), list[int]()
    snapshot = StepSnapshot(model, step.optimizer)
    settings = {name: getattr(step, name) for name in SETTINGS} | {"blackbox": False, "scheduler": None}
    visits: dict[str, TimedSteps] = {}

    def add(name: str, compile: Any) -> str:
        loss_fn = step.loss_fn if compile is not False else _counting(step.loss_fn, nodes)

        def build(scaler: GradScaler | None) -> Any:
            policy = POLICIES[name.removesuffix(COMPILED)]
            return make(model, step.optimizer, loss_fn, policy=policy, scaler=scaler, compile=compile, **settings)

        visits[name] = TimedSteps(snapshot, build, (batch, named), step)
        return name

    def measure(name: str, number: int) -> float:
        try:
            return visits[name].visit()
        except Unfit:
            raise
        except Exception as error:
            if name == first and visits[name].first is None:
                raise  # loss_fn's own
            raise Unfit(f"{type(error).__name__}: {first_line(error)}") from error

    race = Elimination(partial(team.together, measure))
    wish = step.compile
    every = False if wish is None else wish
    mark = COMPILED if every is not False else ""
    names = [add(name + mark, every) for name in candidates(step)]
    first = names[0]
    race.eliminate(names, EAGER_TURNS if wish is None else TURNS)
    best = eager = race.best()
    if wish is None and best:
        left = [name for name in names if name not in {eager, *race.dropped}]
        others = {name: ratio.median for name in left if (ratio := race.over(name, eager)) is not None}
        spent = 0.0
        trials = zip((eager, *sorted(others, key=others.__getitem__)), (FIRST_TURNS, TURNS), strict=False)
        for name, most in trials:
            if any(team.largest(not pays(nodes, race.typical(eager), spent))):
                break
            pair = [best, add(name + COMPILED, True)]
            race.eliminate(pair if name == eager else sorted(pair, key=[one + COMPILED for one in names].index), most)
            spent += visits[name + COMPILED].first or 0.0
            if race.best() == best:
                break
            best = race.best()
    if not best:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in race.dropped.items())
        raise StepError(f"policy='auto': no candidate can be chosen on this batch. {reasons}")
    calls = sum(timed.calls for timed in visits.values())
    choice = concluded(race, best, device_types_of([model])[0], time.perf_counter() - begun, calls)
    return choice, visits[best].compiled if team.ddp is None else None  # its code is for a model without a wrapper


def candidates(step: Any) -> list[str]:
    """Return the names of candidates that differ for the model of `step`, the most precise first."""
    model = unwrap(step.model)
    device = device_types_of([model])[0]
    if resolved(Policy.of("mixed"), device).dtype == FP32:
        return [FP32]
    plans = (resolve(Policy.of(name), model, device) for name in ("O2", "pure"))
    low, pure = ([parameter.low for parameter in plan.parameters] for plan in plans)
    return [name for name in POLICIES if name != "pure" or low != pure]


def pays(nodes: list[int], seconds: float, spent: float) -> bool:
    """Return whether to compile a candidate after `spent` seconds of compilation, see note [compilation]."""
    predicted = max(spent, BEGIN + PER_NODE * sum(nodes))
    return predicted <= min(BUDGET - spent, PAYBACK * seconds)


def _counting(loss_fn: Callable[..., Any], nodes: list[int]) -> Callable[..., Any]:
    """Return `loss_fn`; its first call notes how many autograd nodes the loss has."""

    def counted(*args: Any, **named: Any) -> Any:
        returned = loss_fn(*args, **named)
        if not nodes:
            loss = returned[0] if isinstance(returned, tuple) else returned
            differentiable = isinstance(loss, Tensor) and loss.requires_grad
            nodes.append(len(list(graph_of(loss))) if differentiable else 0)
        return returned

    return counted


def described(policy: Policy, device: str, compiled: bool) -> str:
    """Return a policy in words, with the format that it has on this device."""
    dtype = resolved(policy, device).dtype
    name = FP32 if policy == Policy.of(POLICIES[FP32]) else f"{policy.name} in {dtype}"
    return f"{name}, compiled" if compiled else name


def _interval(ratio: Ratio) -> str:
    """Return the interval of a ratio, its ends rounded outwards; "" for that of one round, which has none."""
    low, high = math.floor(100 * ratio.low) / 100, math.ceil(100 * ratio.high) / 100
    return f"{low:.2f} to {high:.2f}" if ratio.low < ratio.high else ""


def _beside(name: str, ratio: Ratio, chosen: Ratio) -> str:
    # the interval alone where the median says that it is faster, which did not decide: note [ties] in `race`
    if round(ratio.median, 2) >= round(chosen.median, 2):
        return f"{name} {ratio.median:.2f}"
    return f"{name} not certain ({_interval(ratio) or 'one round'})"


def concluded(race: Elimination, best: str, device: str, seconds: float, calls: int) -> Choice:
    """Return the choice of candidate `best` in a race that is over, with the ratios behind it."""
    timed = [name for name in race.times if name not in race.dropped]
    base = timed[0] if timed[0].removesuffix(COMPILED) == FP32 else best
    own = race.over(best, base)
    assert own is not None
    # by way of the choice, in the rounds that both were in: medians of other rounds may contradict the choice
    ratios = {name: own.times(ratio) for name in timed if (ratio := race.over(name, best)) is not None}
    ratios |= {base: Ratio(median=1.0, low=1.0, high=1.0, rounds=own.rounds), best: own}
    policy, compiled = Policy.of(POLICIES[best.removesuffix(COMPILED)]), best.endswith(COMPILED)
    interval = f" ({found})" if (found := _interval(own)) else ""
    of_base = "" if best == base else f"{own.median:.2f} of {base}{interval}, "
    parts = [
        f"auto: {described(policy, device, compiled)}: {of_base}{1e3 * race.typical(best):.3g} ms a step, "
        f"{race.rounds} rounds, {calls} calls of loss_fn, {seconds:.1f} s",
        ", ".join(_beside(name, ratios[name], own) for name in timed if name in ratios and name not in {best, base}),
        *(f"{name} cannot be chosen: {reason}" for name, reason in race.dropped.items()),
    ]
    line, dropped = "; ".join(part for part in parts if part), tuple(race.dropped.items())
    return Choice(
        policy=policy, compiled=compiled, line=line, ratios=tuple(ratios.items()), dropped=dropped, rounds=race.rounds,
        seconds=seconds, calls=calls,
    )  # fmt: skip
