"""policy="auto": a training step that measures policies in its first call and runs under the best from then on.

In: a TrainStep made with ``policy="auto"`` and its first batch. Out: the same object as a TrainStep under the policy that
was chosen, with `choice`; bit for bit as if it had been made with that policy.

Note [candidates]: fp32 (O0), mixed, O2 and pure in the format that the device is fast in, eager; then the best of them
compiled, and if that is faster the second best compiled too. pure is left out where it lowers the same parameters as O2,
and low formats where the device has no units for them. They race (`race`) in complete training steps on the user's model
and batch, which are taken back (`trial`).

Note [compilation]: code is compiled only if its predicted time is at most `BUDGET` seconds and at most what `PAYBACK`
eager steps take: a run of ten times as many, a tenth faster, earns it back. The second is compiled if the first left
enough of the budget. The prediction is `BEGIN` seconds and `PER_NODE` for each autograd node of the loss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from halfstep.cast.rules.recipe import recipe_for, run_eagerly
from halfstep.errors import StepError
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of, resolve, resolved
from halfstep.ratios import Ratio
from halfstep.scale.scaler import GradScaler
from halfstep.step.bind import binding_of, is_bound
from halfstep.step.checkpoint import CHOICE, check_state
from halfstep.step.checkpoints.meeting import processes
from halfstep.step.compiled import compile_options, uses_graphs
from halfstep.step.evaluate import evaluate
from halfstep.step.fsdp import is_distributed
from halfstep.step.prepare import unwrap
from halfstep.step.race import Race, Unfit
from halfstep.step.record import Record
from halfstep.step.train_step import TrainStep
from halfstep.step.trial import Ground, Trial

if TYPE_CHECKING:
    from halfstep.events import StepResult
    from halfstep.step.compiled import CompiledLoss

__all__ = ["Choice", "Undecided", "undecide"]

LOG = logging.getLogger("halfstep")
FP32, COMPILED = "fp32", " compiled"
POLICIES = {FP32: "O0", "mixed": "mixed", "O2": "O2", "pure": "pure"}
"""Candidates, the most precise first: it is preferred where others are not faster."""

ROUNDS, EAGER_ROUNDS = 30, 18  # the most of all, and of those before anything is compiled
SECONDS = 60.0  # after so many no further round of the eager, or of the compiled candidates begins
BUDGET = 120.0  # seconds of compilation
PAYBACK = 10_000  # steps
BEGIN, PER_NODE = 10.0, 0.1  # seconds
SETTINGS = "clip_norm clip_value accumulate scheduler retry update_in_backward".split()
CARRIED = "_metrics saving preemption".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What policy="auto" has chosen.

    Attributes:
        policy: as it could be given to TrainStep.
        compiled: whether the step is compiled.
        line: what was logged: the choice, and why.
        ratios: candidate -> its time over that of fp32, or of the one chosen where fp32 did not run; () from a
            checkpoint, as the following.
        dropped: candidate -> why it could not be chosen.
        rounds: of the measurement.
        seconds: that it took.
        calls: how often `loss_fn` was called in it.
    """

    policy: Policy
    compiled: bool
    line: str
    ratios: tuple[tuple[str, Ratio], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    rounds: int = 0
    seconds: float = 0.0
    calls: int = 0


class NotChosen(StepError, AttributeError):
    """Something that a step with policy="auto" does not have before its first call."""


class Undecided(TrainStep):
    """A TrainStep with policy="auto" before its first call; its class is its own again when the choice is made."""

    _blackbox: Any

    def __call__(self, *batch: Any, **named: Any) -> StepResult:
        """Choose a policy by measuring on this micro-batch, then train on it under that policy.

        Raises:
            StepError: no candidate made a finite step; or the model was prepared since the step was built.
        """
        choice, compiled = choose(self, batch, named)
        self._become(choice, compiled)
        return self(*batch, **named)

    def _become(self, choice: Choice, compiled: CompiledLoss | None = None) -> None:
        """Be the training step that was chosen; if that fails, stay what it is."""
        before, kind = dict(vars(self)), type(self)
        settings = {name: getattr(self, name) for name in SETTINGS}
        compile = (self.compile or True) if choice.compiled else False
        self.__class__ = kind.__bases__[1]
        try:
            TrainStep.__init__(
                self,
                self.model,
                self.optimizer,
                self.loss_fn,
                policy=choice.policy,
                compile=compile,
                blackbox=self._blackbox,
                **settings,
            )
        except BaseException:
            _put(self, before, kind)
            raise
        vars(self).update({name: before[name] for name in CARRIED})
        self.choice = choice
        if compiled is not None:
            self._compiled = compiled
        LOG.warning("%s", choice.line)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotChosen(
            f"step.{name}: policy='auto' chooses in the first call of the step, which has not come yet; call "
            "step(*batch), or load a checkpoint, before"
        )

    def flush(self) -> StepResult | None:
        """Return None: there is nothing to update with."""
        return None

    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """Return what `loss_fn` returns for a batch in fp32, without gradients."""
        recipe = recipe_for(Policy.of(POLICIES[FP32]), device_types_of([self.model]))
        return evaluate(self.model, self.loss_fn, recipe, batch, named)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a step that has not chosen, and chooses after it is loaded too."""
        return {
            CHOICE: None,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": GradScaler(enabled=False).state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "policy": Policy.of(POLICIES[FP32]).to_toml(),
            "step": 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and take the policy it was saved under without measuring.

        Raises:
            StepError: as `TrainStep.load_state_dict`; nothing was changed.
        """
        check_state(self, state)
        if CHOICE in state and state[CHOICE] is None:  # it had not chosen
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict({**state["optimizer"], "state": dict(state["optimizer"]["state"])})
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            return
        policy, saved = Policy.from_toml(state["policy"]), state.get(CHOICE, {})
        compiled = bool(saved.get("compiled", False) if self.compile is None else self.compile is not False)
        line = f"auto: {described(policy, device_types_of([self.model])[0], compiled)}, as in the checkpoint"
        before, kind, ground = dict(vars(self)), type(self), Ground(self.model, self.optimizer)
        self._become(Choice(policy=policy, compiled=compiled, line=line))
        try:
            self.load_state_dict(state)
        except BaseException:
            if not self._moments.phase:  # else it refuses to go on until another state is loaded
                ground.restore()
                _put(self, before, kind)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle: a new step of the copied model and optimizer, which chooses for itself."""
        named = {name: getattr(self, name) for name in (*SETTINGS, "compile")} | {"blackbox": self._blackbox}
        return _rebuild, (type(self).__bases__[1], self.model, self.optimizer, self.loss_fn, named)


run_eagerly(Undecided.__call__)


def _put(step: TrainStep, values: Mapping[str, Any], kind: type[TrainStep]) -> None:
    vars(step).clear()
    vars(step).update(values)
    step.__class__ = kind


def _rebuild(kind: type[TrainStep], model: Any, optimizer: Any, loss_fn: Any, named: dict[str, Any]) -> TrainStep:
    return kind(model, optimizer, loss_fn, policy="auto", **named)


@cache
def _undecided(kind: type[TrainStep]) -> type[TrainStep]:
    """Return the class of a step of class `kind` before its choice."""
    return type(kind.__name__, (Undecided, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def undecide(step: TrainStep, scaler: object, blackbox: object) -> None:
    """Make of a training step that is being built, and has the user's arguments, one that has not chosen.

    Raises:
        StepError: what does not go together with policy="auto".
        BindError, PolicyError, UnbuiltError: as for a step in fp32.
    """
    model, optimizer = step.model, step.optimizer
    options = compile_options(step.compile, accumulate=step.accumulate, cuda_graph=False)
    remedy = ""
    if scaler is not None:
        remedy = "scaler=: the policy that is chosen brings its own loss scale; leave scaler out"
    elif step.cuda_graph or (options is not None and uses_graphs(options)):
        remedy = "CUDA graphs are captured under one policy; leave them out, or give the policy that was chosen"
    elif is_distributed(model) or processes()[1] > 1:
        remedy = (
            "each of several processes would choose for itself; choose in one process, and give all of them the policy "
            "that step.choice names"
        )
    elif is_bound(model):
        binding = binding_of(unwrap(model))
        name = "another policy" if binding is None else repr(binding.wanted.name)
        remedy = f"the model is prepared with {name} already; leave policy out, or call hs.unprepare(model) before"
    elif unwrap(model) is not model:
        remedy = f"the model is wrapped in {type(model).__name__}; give the model in it (compile= compiles it)"
    elif lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        remedy = f"parameter {lazy[0]} has no values yet; run one batch before"
    if remedy:
        raise StepError(f"policy='auto': {remedy}")
    settings = {name: getattr(step, name) for name in SETTINGS}
    with Ground(model, optimizer).returning(copied=False):  # raises here what the first call would raise
        TrainStep(model, optimizer, step.loss_fn, policy=POLICIES[FP32], blackbox=False, **settings)
    step._metrics, step.saving, step.preemption = None, None, None
    step.record = Record(model, replayable=False)
    step.__class__ = _undecided(type(step))
    vars(step)["_blackbox"] = blackbox


# ---------------------------------------------------------------------- the choice


def choose(
    step: TrainStep,
    batch: tuple[Any, ...],
    named: dict[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Choice, CompiledLoss | None]:
    """Measure the candidates of `step` on a batch, and change nothing.

    Args:
        step: one that has not chosen.
        batch: positional arguments of `loss_fn` after the model.
        named: its named arguments.
        clock: returns seconds.

    Returns:
        What was chosen, and the compiled loss function if it is compiled.

    Raises:
        StepError: no candidate made a finite step; or the model was prepared since the step was built.
        Exception: what `loss_fn` raises in fp32.
    """
    if is_bound(step.model):
        raise StepError("policy='auto': the model was prepared after this step was built; build the step anew")
    begun, nodes = clock(), list[int]()
    ground = Ground(step.model, step.optimizer)
    settings = {name: getattr(step, name) for name in SETTINGS} | {"blackbox": False, "scheduler": None}
    trials: dict[str, Trial] = {}

    def add(name: str, compile: Any) -> str:
        loss_fn = step.loss_fn if compile is not False else _counting(step.loss_fn, nodes)

        def build(scaler: GradScaler | None) -> TrainStep:
            policy = POLICIES[name.removesuffix(COMPILED)]
            return TrainStep(
                step.model, step.optimizer, loss_fn, policy=policy, scaler=scaler, compile=compile, **settings
            )

        trials[name] = Trial(ground, build, (batch, named), step, clock)
        return name

    def measure(name: str) -> float:
        try:
            return trials[name].visit()
        except Unfit:
            raise
        except Exception as error:
            if name == first and trials[name].first is None:
                raise  # loss_fn's own
            raise Unfit(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}") from error

    race = Race(measure, most=ROUNDS, seconds=SECONDS, clock=clock)
    wish = step.compile
    every = False if wish is None else wish
    mark = COMPILED if every is not False else ""
    names = [add(name + mark, every) for name in candidates(step)]
    first = names[0]
    race.run(names, EAGER_ROUNDS)
    best = eager = race.best()
    if wish is None and best:
        others = {
            n: ratio.median for n in names if n not in race.dropped and (ratio := race.over(n, eager)) is not None
        }
        del others[eager]
        spent = 0.0
        for name in (eager, *sorted(others, key=others.__getitem__)[:1]):
            if not pays(nodes, trials[eager].seconds, spent):
                break
            race.run([best, add(name + COMPILED, True)])
            spent += trials[name + COMPILED].first or 0.0
            if race.best() == best:
                break
            best = race.best()
    if not best:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in race.dropped.items())
        raise StepError(f"policy='auto': no candidate can be chosen on this batch. {reasons}")
    calls = sum(trial.calls for trial in trials.values())
    choice = concluded(race, best, device_types_of([step.model])[0], clock() - begun, calls)
    return choice, trials[best].compiled


def candidates(step: TrainStep) -> list[str]:
    """Return the names of candidates that differ for the model of `step`, the most precise first."""
    device = device_types_of([step.model])[0]
    if resolved(Policy.of("mixed"), device).dtype == FP32:
        return [FP32]
    low = [
        [parameter.low for parameter in resolve(Policy.of(name), step.model, device).parameters]
        for name in ("O2", "pure")
    ]
    return [name for name in POLICIES if name != "pure" or low[0] != low[1]]


def pays(nodes: list[int], seconds: float, spent: float) -> bool:
    """Return whether to compile a candidate, see note [compilation].

    Args:
        nodes: number of autograd nodes of the loss; [] if it is not known.
        seconds: of an eager step.
        spent: seconds of compilation so far.
    """
    predicted = max(spent, BEGIN + PER_NODE * sum(nodes))
    return predicted <= min(BUDGET - spent, PAYBACK * seconds)


def _counting(loss_fn: Callable[..., Any], nodes: list[int]) -> Callable[..., Any]:
    """Return `loss_fn`; its first call notes how many autograd nodes the loss has."""

    def counted(*args: Any, **named: Any) -> Any:
        returned = loss_fn(*args, **named)
        if not nodes:
            loss = returned[0] if isinstance(returned, tuple) else returned
            waiting, seen = [loss.grad_fn] if isinstance(loss, Tensor) else [], set[Any]()
            while waiting:
                node = waiting.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    waiting += [parent for parent, _ in node.next_functions]
            nodes.append(len(seen))
        return returned

    return counted


def described(policy: Policy, device: str, compiled: bool) -> str:
    """Return a policy in words, with the format that it has on this device."""
    dtype = resolved(policy, device).dtype
    name = FP32 if policy == Policy.of(POLICIES[FP32]) else f"{policy.name} in {dtype}"
    return f"{name}, compiled" if compiled else name


def concluded(race: Race, best: str, device: str, seconds: float, calls: int) -> Choice:
    """Return the choice of candidate `best`, with the ratios that speak for it.

    Args:
        race: that is over.
        best: the candidate chosen.
        device: device type of the model.
        seconds: that the measurement took.
        calls: of `loss_fn`.
    """
    timed = [name for name in race.times if name not in race.dropped]
    base = timed[0] if timed[0].removesuffix(COMPILED) == FP32 else best
    ratios = {name: ratio for name in timed if (ratio := race.over(name, base)) is not None}
    policy, compiled = Policy.of(POLICIES[best.removesuffix(COMPILED)]), best.endswith(COMPILED)
    own = ratios[best]
    of_base = "" if best == base else f"{own.median:.2f} of {base} ({own.low:.2f} to {own.high:.2f}), "
    parts = [
        f"auto: {described(policy, device, compiled)}: {of_base}{1e3 * race.typical(best):.3g} ms a step, "
        f"{race.rounds} rounds, {calls} calls of loss_fn, {seconds:.1f} s",
        ", ".join(f"{name} {ratios[name].median:.2f}" for name in timed if name in ratios and name not in {best, base}),
        *(f"{name} cannot be chosen: {reason}" for name, reason in race.dropped.items()),
    ]
    return Choice(
        policy=policy,
        compiled=compiled,
        line="; ".join(part for part in parts if part),
        ratios=tuple(ratios.items()),
        dropped=tuple(race.dropped.items()),
        rounds=race.rounds,
        seconds=seconds,
        calls=calls,
    )
