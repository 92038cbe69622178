"""Cures: the smallest changes of policy under which a step is finite and training goes on, found by trying them."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from halfstep.binding.bind import Binding, bind, binding_of
from halfstep.binding.prepare import prepare, unprepare
from halfstep.cast.regions.opening import opened
from halfstep.cast.rules.recipe import Recipe, recipe_for
from halfstep.cast.state import STATE
from halfstep.errors import BindError
from halfstep.formats import DTYPES, LOW_DTYPES, POLICY_DTYPES
from halfstep.lens.box.advice import Around, advice
from halfstep.lens.box.diagnose import LOWEST, Subject, low_of, verdict_of
from halfstep.lens.box.replay import Attempt
from halfstep.lens.box.trials import Trials, highest, in_place_of
from halfstep.lens.calls import RUNS_BACKWARD, Site, region_here, spelled
from halfstep.lens.tracing import Sink, Tracer
from halfstep.lens.verdict import Cure, Verdict
from halfstep.policy.operators import known
from halfstep.policy.plan import resolve
from halfstep.policy.policy import PRESETS, Policy
from halfstep.policy.resolve import default_device_types, resolved
from halfstep.policy.scale_rule import ScaleRule
from halfstep.torch_private.autograd import current_graph_task_id

LAYERS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "embedding"})
LONGEST = 4  # rules in one cure: with more, bf16 or fp32 is the smaller change
NEAREST = 6  # producers that are tried, one at a time: each costs a trial
ENOUGH = 3  # verified cures, after which no other format is tried
ENTRY = re.compile(r"^(?=[^ \n].* = |\[)", re.MULTILINE)  # where an entry of a policy file, or a table, begins
IMPATIENT = 20  # a scale that grows after fewer good steps skips more than one in so many


def cures(subject: Subject, verdict: Verdict, attempt: Attempt, trials: Trials) -> tuple[Cure, ...]:
    """Return the changes under which training goes on, smallest first; else advice that nothing has verified."""
    if verdict.cause == "divergence":
        return advice(verdict)
    if verdict.kind == "scale_too_high":
        return _scales(subject, attempt, trials)
    around = Around.of(attempt.trace, verdict)
    if subject.policy is None or attempt.index is None:
        return advice(verdict, around)
    if trials.wide.finite_once is False:  # no format helps
        return advice(verdict, around, everywhere=True)
    search = _Search(subject, attempt.only, trials)
    base = subject.policy
    if attempt.added is None and verdict.op in LAYERS:  # one module is less than the operator of all layers
        search.modules(verdict)
        search.operators(verdict, around.upstream)
    elif attempt.added is None:
        search.operators(verdict, around.upstream)
        search.modules(verdict)
    elif base.grads != "fp32":
        search.try_one(base.replace(grads="fp32"), "gradients added in fp32", "policy.replace(grads='fp32')")
    if base.loss == "keep":
        search.try_one(base.replace(loss="fp32"), "losses in fp32", "policy.replace(loss='fp32')")
    if low_of(subject.policy, subject.model) == "fp16" and len(search.verified) < ENOUGH:
        search.try_one(base.replace(dtype="bf16"), "bf16 instead of fp16", "policy.replace(dtype='bf16')")
    if not search.found:
        search.try_one(base.replace(dtype="fp32", scale="none"), "nothing low", "policy.replace(dtype='fp32')")
    told = advice(verdict, around, cured=bool(search.verified))
    once = [cure for cure in search.found if not cure.verified]
    if verdict.cause == "data":
        return (*told, *search.verified, *once)
    return (*search.verified, *told, *once)


class _Search:
    """Tries policies by trials of training."""

    def __init__(self, subject: Subject, index: int | None, trials: Trials) -> None:
        assert subject.policy is not None
        self.subject, self.base = subject, subject.policy
        self.index, self.trials = index, trials
        self.found: list[Cure] = []  # the changes under which the step is finite

    @property
    def verified(self) -> list[Cure]:
        return [cure for cure in self.found if cure.verified]

    def try_one(self, policy: Policy, words: str, line: str) -> bool:
        trial = self.trials.of(policy)
        if not trial.finite_once:
            return False
        if trial.scale != self.subject.scale and policy.scale == self.base.scale:
            words += f" (finite at a scale of {trial.scale:g}, to which it adapts; it was {self.subject.scale:g})"
        if self.subject.foreign:
            text = _pasted(self.base, policy, words, line, self.subject.region)
        else:
            text = _with_toml(self.base, policy, words, line)
        self.found.append(Cure(policy=policy, text=text, verified=trial.trains, outcome=trial.outcome))
        return True

    def operators(self, verdict: Verdict, upstream: Sequence[Site]) -> None:
        """Give the operator a rule; else one of its producers; else it and those that then overflow after it, or them.

        `upstream` are the calls that made its inputs, the nearest first.
        """
        first = [verdict.op] if verdict.op in known() else []
        following = self._next(*self._with_operators(first)) if first else verdict
        if self.found:
            return
        before = [site.op for site in upstream if site.op in known() and site.op not in first]
        before = list(dict.fromkeys(before))[:NEAREST]
        for op in before:
            if self.try_one(*self._with_operators([op])):
                return
        rules, current = first, following
        while current is not None and current.op in known() and current.op not in rules and len(rules) < LONGEST:
            rules = [*rules, current.op]
            current = self._next(*self._with_operators(rules))
        if self.found:
            return
        for count in range(1, LONGEST if first else 0):
            if self.try_one(*self._with_operators([*first, *before[:count]])):
                return

    def _with_operators(self, rules: list[str]) -> tuple[Policy, str, str]:
        return self.base.with_ops(fp32=rules), f"{' and '.join(rules)} in fp32", f"policy.with_ops(fp32={rules!r})"

    def modules(self, verdict: Verdict) -> None:
        rules: dict[str, str] = {}
        current = verdict
        names = {name for name, _ in self.subject.model.named_modules()}
        while current.module in names and current.module and current.module not in rules and len(rules) < LONGEST:
            rules[current.module] = "fp32"
            policy = self.base.with_modules(rules)
            words = f"{'module' if len(rules) == 1 else 'modules'} {' and '.join(rules)} in fp32"
            following = self._next(policy, words, f"policy.with_modules({rules!r})")
            if following is None:
                return
            current = following

    def _next(self, policy: Policy, words: str, line: str) -> Verdict | None:
        """Try `policy`; return the verdict on what is not finite then, None if nothing is or it is not known."""
        if self.try_one(policy, words, line):
            return None
        subject = dataclasses.replace(self.subject, wide=policy.grads == "fp32")
        try:
            with subject.under(policy):
                trace = subject.run(only=self.index, traced=True).trace
        except Exception:  # of the user's code, which cannot run under it
            return None
        if trace is None:
            return None
        following = verdict_of(trace, subject.names)
        return following if following.kind in {"overflow", "invalid"} else None


def _scales(subject: Subject, attempt: Attempt, trials: Trials) -> tuple[Cure, ...]:

    def finite(scale: float) -> bool:
        return not subject.run(factor=scale / subject.scale, only=attempt.only).bad

    right = highest(finite, subject.scale, LOWEST)
    words = f"a scale of {right:g}"
    policy = subject.policy
    rule = None if policy is None else policy.scale
    if subject.policy is not None and isinstance(rule, ScaleRule) and rule.growth > 1.0 and rule.interval < IMPATIENT:
        policy = subject.policy.replace(scale="halfstep")
        words = f"a scale that grows less often than every {rule.interval + 1} steps, after which it overflows again"
        text = _with_toml(subject.policy, policy, words, "policy.replace(scale='halfstep')")
    elif subject.scaling == "dynamic" and right >= subject.floor:
        text = f"nothing to change: the scale adapts; at {right:g} this step is finite"
    elif subject.policy is None:
        text = f"a dynamic scale, or one of {right:g}"
    else:
        policy = subject.policy.replace(scale=right)
        text = _with_toml(subject.policy, policy, words, f"policy.replace(scale={right!r})")
    trial = trials.of(policy)
    return (Cure(policy=policy, text=text, verified=trial.trains, outcome=trial.outcome),)


def _pasted(base: Policy, policy: Policy, words: str, line: str, region: str) -> str:
    """Return the text of a cure: a line to paste into a loop whose loss function opens the regions."""
    made, where = line, f"in place of {region}"
    preset = base.name if base.name in PRESETS else "torch"
    settings = "" if base.dtype == "auto" else f", dtype={base.dtype!r}"
    if Policy.of(preset).replace(dtype=base.dtype) == base:
        if policy == base.replace(dtype=policy.dtype):
            made = f"hs.Policy.of({preset!r}, dtype={policy.dtype!r})"
        else:
            made = line.replace("policy.", f"hs.Policy.of({preset!r}{settings}).", 1)
    else:
        where += ", `policy` being that of the region"
    if policy.modules or policy.grads == "fp32":  # a region has no model
        pasted, where = f"hs.prepare(model, policy={made})", f"before the loop, and nothing {where}"
    else:
        pasted = f"with hs.autocast(policy={made}):"
    return f"{words}: {pasted}\n{where}"


def _with_toml(base: Policy, policy: Policy, words: str, line: str) -> str:
    known_entries = set(map(str.strip, ENTRY.split(base.to_toml())))
    entries = map(str.strip, ENTRY.split(policy.to_toml()))
    return "\n".join([f"{words}: {line}", "in TOML:", *(entry for entry in entries if entry not in known_entries)])


@contextmanager
def rebound(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Bind a prepared model to another policy in a block; its parameters are made anew from their precise values."""
    binding = binding_of(model)
    assert binding is not None
    plan = resolve(policy, model, binding.device_types[0])
    concrete = resolved(policy, binding.device_types[0])
    store = binding.store
    bound = [(module, known) for module in model.modules() if (known := binding_of(module)) is not None]
    made: dict[int, nn.Parameter] = {}
    for decision in plan.parameters:
        parameter = model.get_parameter(decision.name)
        precise = store.read(parameter) if store is not None and parameter in store else parameter.detach()
        wanted = DTYPES.get(concrete.dtype, torch.float32) if decision.low else torch.float32
        if parameter.dtype in POLICY_DTYPES and parameter.dtype is not wanted:
            made[id(parameter)] = nn.Parameter(precise.to(wanted), requires_grad=parameter.requires_grad)
    with in_place_of(model, made):
        rules = {m.path: m.rule for m in plan.modules}
        for module, own in bound:
            rule = rules.get(own.path, "")
            parent = rules.get(own.path.rpartition(".")[0], "") if own.path else ""
            entrance = bool(rule) and rule != parent
            bind(module, Binding(policy, own.device_types, path=own.path, root=own.root, rule=rule, entrance=entrance))
        yield


class _InPlaceOfRegions(Sink):
    """Opens a region around every operator inside a region of the loss function, torch's or halfstep's."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.native = dataclasses.replace(recipe, mode=None)

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = region_here()
        on = any(torch.is_autocast_enabled(device) for device, _, _ in self.recipe.devices)
        if not on or (STATE.frames and region is None) or spelled(func) in RUNS_BACKWARD:
            return func(*args, **kwargs)
        recomputed = current_graph_task_id() != -1  # by a checkpoint, which restores the format and no rules
        with opened(self.native if recomputed else self.recipe):
            return func(*args, **kwargs)


@contextmanager
def instead(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Run a step under `policy` whose loss function opens its regions itself.

    Without module rules ``hs.autocast(policy=policy)`` takes the place of each region. With module rules `model` is
    prepared for the block, and those regions do nothing.
    """
    by_module = bool(policy.modules)
    if by_module and any(p.dtype in LOW_DTYPES for p in model.parameters()):
        raise BindError("hs.prepare would change the formats of its parameters")
    recipe = recipe_for(policy.replace(modules=()), default_device_types(), enabled=not by_module)
    torch.clear_autocast_cache()
    try:
        if by_module:
            prepare(model, policy=policy)
        with Tracer(_InPlaceOfRegions(recipe)):
            yield
    finally:
        torch.clear_autocast_cache()
        if by_module and binding_of(model) is not None:
            unprepare(model)
