"""Cures: the smallest changes of policy under which a step is finite, found by replaying it under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from halfstep.cast.regions.opening import opened
from halfstep.cast.rules.recipe import Recipe, recipe_for
from halfstep.cast.state import STATE
from halfstep.errors import BindError, HalfstepError
from halfstep.formats import DTYPES, LOW_DTYPES, POLICY_DTYPES
from halfstep.lens.box.diagnose import Subject, advice, verdict_of
from halfstep.lens.box.replay import Attempt, Replay
from halfstep.lens.calls import RUNS_BACKWARD, extremes, region_here, spelled
from halfstep.policy.operators import known
from halfstep.policy.policy import Policy
from halfstep.policy.presets import PRESETS
from halfstep.policy.resolve import default_device_types, resolve, resolved
from halfstep.step.bind import KEY, Binding, binding_of
from halfstep.step.prepare import prepare, unprepare
from halfstep.verdict import Cure, Verdict

__all__ = ["cures", "instead", "rebound"]

LONGEST = 4  # rules in one cure
ENOUGH = 3  # verified cures


def cures(subject: Subject, verdict: Verdict, attempt: Attempt) -> tuple[Cure, ...]:
    """Return the changes under which the step is finite, smallest first; else advice that no replay has verified.

    Args:
        subject: the step.
        verdict: the first cause.
        attempt: the replay that led to it.
    """
    if verdict.kind == "scale_too_high":
        return _scales(subject, attempt)
    if subject.policy is None or attempt.index is None:
        return advice(verdict)
    search = _Search(subject, attempt.only)
    base = subject.policy
    wide = base.replace(dtype="fp32", scale="none")
    wide_finite = search.finite(wide)
    wide_scale = search.scale
    if wide_finite is False:  # no format helps
        return advice(verdict, everywhere=True)
    if attempt.added is None:
        search.operators(base, verdict)
        search.modules(base, verdict)
    elif base.grads != "fp32":
        search.try_one(base.replace(grads="fp32"), "gradients added in fp32", "policy.replace(grads='fp32')")
    if base.loss == "keep":
        search.try_one(base.replace(loss="fp32"), "losses in fp32", "policy.replace(loss='fp32')")
    if subject.low == "fp16" and len(search.found) < ENOUGH:
        search.try_one(base.replace(dtype="bf16"), "bf16 instead of fp16", "policy.replace(dtype='bf16')")
    if not search.found and wide_finite:
        search.scale = wide_scale
        search.add(wide, "nothing low", "policy.replace(dtype='fp32')")
    return tuple(search.found) or advice(verdict)


def _foreign(base: Policy, policy: Policy, words: str, line: str, region: str) -> Cure:
    """Return a cure with a line to paste into a loop whose loss function opens the regions."""
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
    return Cure(policy=policy, text=f"{words}: {pasted}\n{where}", verified=True)


class _Search:
    """Tries policies by replay."""

    def __init__(self, subject: Subject, index: int | None) -> None:
        self.subject = subject
        self.index = index
        self.found: list[Cure] = []
        self.scale = subject.scale  # at which the last trial was finite

    def _run(self, policy: Policy, *, traced: bool = False) -> Attempt | None:
        try:
            self.scale = self.subject.scale
            replay = dataclasses.replace(self.subject.replay, wide=policy.grads == "fp32")
            with self.subject.under(policy):
                attempt = replay.run(traced=traced, only=self.index)
                if not attempt.bad or self.subject.scaling != "dynamic" or self.subject.scale <= 1.0:
                    return attempt
                if any(not extremes(loss)[1] for loss in attempt.losses):
                    return attempt
                # its gradients overflow: a dynamic scale adapts, unless they overflow without one too
                low = replay.run(factor=1.0 / self.subject.scale, only=self.index)
                if not low.bad:
                    self.scale = _highest(replay, self.subject, self.index)
                return attempt if low.bad else low
        except (HalfstepError, RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # this model cannot run under it

    def finite(self, policy: Policy) -> bool | None:
        """Return whether the step is finite under `policy`; None if it cannot run."""
        attempt = self._run(policy)
        return None if attempt is None or attempt.odd else not attempt.bad

    def try_one(self, policy: Policy, words: str, line: str) -> bool:
        """Add `policy` to the cures if the step is finite under it."""
        if self.finite(policy):
            self.add(policy, words, line)
            return True
        return False

    def add(self, policy: Policy, words: str, line: str) -> None:
        """Add `policy`, under which the last trial was finite, to the cures."""
        base = self.subject.policy
        assert base is not None
        if self.scale != self.subject.scale:
            words += f" (finite at a scale of {self.scale:g}, to which it adapts; it was {self.subject.scale:g})"
        if self.subject.foreign:
            self.found.append(_foreign(base, policy, words, line, self.subject.region))
        else:
            self.found.append(_cure(base, policy, words, line))

    def operators(self, base: Policy, verdict: Verdict) -> None:
        """Give the operator a rule, and those that then overflow after it."""
        rules: list[str] = []
        current = verdict
        while current.op in known() and current.op not in rules and len(rules) < LONGEST:
            rules.append(current.op)
            policy = base.with_ops(fp32=rules)
            following = self._next(policy, f"{' and '.join(rules)} in fp32", f"policy.with_ops(fp32={rules!r})")
            if following is None:
                return
            current = following

    def modules(self, base: Policy, verdict: Verdict) -> None:
        """Give the module a rule, and those that then overflow after it."""
        rules: dict[str, str] = {}
        current = verdict
        names = {name for name, _ in self.subject.model.named_modules()}
        while current.module in names and current.module and current.module not in rules and len(rules) < LONGEST:
            rules[current.module] = "fp32"
            policy = base.with_modules(rules)
            words = f"{'module' if len(rules) == 1 else 'modules'} {' and '.join(rules)} in fp32"
            following = self._next(policy, words, f"policy.with_modules({rules!r})")
            if following is None:
                return
            current = following

    def _next(self, policy: Policy, words: str, line: str) -> Verdict | None:
        """Try `policy`; return the verdict on what is not finite then, None if nothing is or it is not known."""
        attempt = self._run(policy, traced=True)
        if attempt is None or attempt.odd:
            return None
        if not attempt.bad:
            self.add(policy, words, line)
            return None
        if attempt.trace is None:
            return None
        following = verdict_of(attempt.trace, self.subject.names)
        return following if following.kind in {"overflow", "invalid"} else None


def _highest(replay: Replay, subject: Subject, index: int | None) -> float:
    """Find the largest scale below that of the step, by powers of 16, at which it is finite."""
    scale, lowest = subject.scale, min(subject.floor, subject.scale)
    while scale > lowest:
        scale = max(scale / 16.0, lowest)
        if not replay.run(factor=scale / subject.scale, only=index).bad:
            break
    return scale


def _scales(subject: Subject, attempt: Attempt) -> tuple[Cure, ...]:
    """Find the largest scale at which the step is finite."""
    right = _highest(subject.replay, subject, attempt.only)
    if subject.scaling == "dynamic":
        text = f"nothing to change: the scale adapts; at {right:g} this step is finite"
        return (Cure(policy=subject.policy, text=text, verified=True),)
    if subject.policy is None:
        return (Cure(policy=None, text=f"a dynamic scale, or one of {right:g}", verified=True),)
    changed = subject.policy.replace(scale=right)
    return (_cure(subject.policy, changed, f"a scale of {right:g}", f"policy.replace(scale={right!r})"),)


def _cure(base: Policy, policy: Policy, words: str, line: str) -> Cure:
    known_lines = set(base.to_toml().splitlines())
    toml, keep = [], False
    for text in policy.to_toml().splitlines():  # whole entries, also where an array spans lines
        begins = " = " in text and not text.startswith(" ")
        keep = (text not in known_lines or (begins and text.endswith("["))) if begins else keep
        if keep and not (begins and text.endswith("[") and _same(base, policy, text.split(" = ")[0])):
            toml.append(text)
        elif begins:
            keep = False
    return Cure(policy=policy, text="\n".join([f"{words}: {line}", "in TOML:", *toml]), verified=True)


def _same(base: Policy, policy: Policy, field: str) -> bool:
    return bool(getattr(base, field) == getattr(policy, field))


@contextmanager
def rebound(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Bind a prepared model to another policy in a block; its parameters are made anew from their precise values."""
    binding = binding_of(model)
    assert binding is not None
    plan = resolve(policy, model, binding.device_types[0])
    concrete = resolved(policy, binding.device_types[0])
    store = binding.store
    bound = [(module, module.__dict__[KEY]) for module in model.modules() if KEY in module.__dict__]
    made: dict[int, nn.Parameter] = {}
    for decision in plan.parameters:
        parameter = model.get_parameter(decision.name)
        precise = store.read(parameter) if store is not None and parameter in store else parameter.detach()
        wanted = DTYPES.get(concrete.dtype, torch.float32) if decision.low else torch.float32
        if parameter.dtype in POLICY_DTYPES and parameter.dtype is not wanted:
            made[id(parameter)] = nn.Parameter(precise.to(wanted), requires_grad=parameter.requires_grad)
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        # new parameters take their places: another format in `.data` would remove the hooks of a gradient
        for module in model.modules():
            for name, old in list(module._parameters.items()):
                if old is not None and id(old) in made:
                    swapped.append((module, name, old))
                    setattr(module, name, made[id(old)])
        rules = {m.path: m.rule for m in plan.modules}
        for module, old in bound:
            rule = rules.get(old.path, "")
            parent = rules.get(old.path.rpartition(".")[0], "") if old.path else ""
            module.__dict__[KEY] = Binding(
                policy,
                old.device_types,
                path=old.path,
                root=old.root,
                rule=rule,
                entrance=bool(rule) and rule != parent,
            )
        yield
    finally:
        for module, name, parameter in swapped:
            setattr(module, name, parameter)
        for module, old in bound:
            module.__dict__[KEY] = old


class _InPlaceOfRegions(TorchFunctionMode):
    """Opens a region around every operator inside a region of the loss function, torch's or halfstep's.

    It stands above those regions (`STATE.above`); a trace that stands there calls it.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.native = dataclasses.replace(recipe, mode=None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        policy = region_here()
        on = any(torch.is_autocast_enabled(device) for device, _, _ in self.recipe.devices)
        if not on or (STATE.frames and policy is None) or spelled(func) in RUNS_BACKWARD:
            return func(*args, **kwargs)
        recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, which restores the format and no rules
        with opened(self.native if recomputed else self.recipe):
            return func(*args, **kwargs)


@contextmanager
def instead(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Run a step under `policy` whose loss function opens its regions itself.

    Without module rules ``hs.autocast(policy=policy)`` takes the place of each region. With module rules `model` is
    prepared for the block, and those regions do nothing.

    Raises:
        HalfstepError: the model cannot be prepared.
    """
    by_module = bool(policy.modules)
    if by_module and any(p.dtype in LOW_DTYPES for p in model.parameters()):
        raise BindError("hs.prepare would change the formats of its parameters")
    recipe = recipe_for(policy.replace(modules=()), default_device_types(), enabled=not by_module)
    mode, before = _InPlaceOfRegions(recipe), STATE.above
    torch.clear_autocast_cache()
    try:
        if by_module:
            prepare(model, policy=policy)
        with mode:
            STATE.above = mode
            yield
    finally:
        STATE.above = before
        torch.clear_autocast_cache()
        if by_module and binding_of(model) is not None:
            unprepare(model)
