"""Cures: the smallest changes of policy under which a step is finite, found by replaying it under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from halfstep.errors import HalfstepError
from halfstep.events import Cure, Verdict
from halfstep.lens.diagnose import Subject, advice, verdict_of
from halfstep.lens.replay import Attempt
from halfstep.lens.values import extremes
from halfstep.policy.operators import known, name_of
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import resolve, resolved
from halfstep.step.bind import KEY, Binding, binding_of
from halfstep.step.prepare import LOW
from halfstep.trees import map_tensors

__all__ = ["cures", "rebound", "with_rules"]

LONGEST = 4  # rules in one cure
ENOUGH = 3  # verified cures
LOWS = frozenset({torch.float16, torch.bfloat16})
FLOATS = LOWS | {torch.float32}


def cures(subject: Subject, verdict: Verdict, attempt: Attempt) -> tuple[Cure, ...]:
    """Return the changes under which the step is finite, smallest first; else advice that nobody has tried.

    Args:
        subject: the step.
        verdict: the first cause.
        attempt: the replay it was drawn from.
    """
    if verdict.kind == "scale_too_high":
        return _scales(subject, attempt)
    if verdict.kind not in {"overflow", "invalid"} or subject.policy is None or attempt.index is None:
        return advice(verdict)
    search = _Search(subject, attempt.only)
    base = subject.policy
    wide = base.replace(dtype="fp32", scale="none")
    wide_finite = search.finite(wide)
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
        search.found.append(_cure(base, wide, "nothing low", "policy.replace(dtype='fp32')"))
    if subject.foreign:
        search.found = [_foreign(base, cure) for cure in search.found]
    return tuple(search.found) or advice(verdict)


def _foreign(base: Policy, cure: Cure) -> Cure:
    """Say how a model that is not prepared comes by a policy."""
    door = "hs.prepare(model, policy=policy)" if cure.policy.modules else "hs.autocast(policy=policy)"
    first, *rest = cure.text.splitlines()
    start = f"with policy = hs.Policy.of('torch', dtype={base.dtype!r}) and {door} in place of torch.autocast"
    return Cure(policy=cure.policy, text="\n".join([first, start, *rest]), verified=cure.verified)


class _Search:
    """Tries policies by replay."""

    def __init__(self, subject: Subject, index: int | None) -> None:
        self.subject = subject
        self.index = index
        self.found: list[Cure] = []

    def _run(self, policy: Policy, *, traced: bool = False) -> Attempt | None:
        try:
            replay = dataclasses.replace(self.subject.replay, wide=policy.grads == "fp32")
            with self.subject.under(policy):
                attempt = replay.run(traced=traced, only=self.index)
                if not attempt.bad or self.subject.scaling != "dynamic" or self.subject.scale <= 1.0:
                    return attempt
                if any(not extremes(loss)[1] for loss in attempt.losses):
                    return attempt
                # its gradients overflow: a matter of the scale, which adapts, unless they do without one too
                low = replay.run(factor=1.0 / self.subject.scale, only=self.index)
                return attempt if low.bad else low
        except (HalfstepError, RuntimeError, NotImplementedError, TypeError, ValueError):
            return None  # this model cannot run under it

    def finite(self, policy: Policy) -> bool | None:
        """Return whether the step is finite under `policy`; None if it cannot run."""
        attempt = self._run(policy)
        return None if attempt is None else not attempt.bad

    def try_one(self, policy: Policy, words: str, line: str) -> bool:
        """Add `policy` to the cures if the step is finite under it."""
        if self.finite(policy):
            assert self.subject.policy is not None
            self.found.append(_cure(self.subject.policy, policy, words, line))
            return True
        return False

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
        """Try `policy`; return what is wrong then, or None if nothing is or nobody knows."""
        attempt = self._run(policy, traced=True)
        if attempt is None:
            return None
        if not attempt.bad:
            assert self.subject.policy is not None
            self.found.append(_cure(self.subject.policy, policy, words, line))
            return None
        if attempt.trace is None:
            return None
        following = verdict_of(attempt.trace, self.subject.names)
        return following if following.kind in {"overflow", "invalid"} else None


def _scales(subject: Subject, attempt: Attempt) -> tuple[Cure, ...]:
    """Find the largest scale, by powers of 16, at which the step is finite."""
    scale, factor = subject.scale, 1.0
    while scale * factor > 1.0:
        factor /= 16.0
        if not subject.replay.run(factor=max(factor, 1.0 / scale), only=attempt.only).bad:
            break
    right = max(scale * factor, 1.0)
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
    """Let a prepared model live by another policy for a while: its parameters too, from their precise values."""
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
        wanted = LOW.get(concrete.dtype, torch.float32) if decision.low else torch.float32
        if parameter.dtype in FLOATS and parameter.dtype is not wanted:
            made[id(parameter)] = nn.Parameter(precise.to(wanted), requires_grad=parameter.requires_grad)
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        # others are put in their place: another format in `.data` would cost a parameter the hooks of its gradient
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


class _Rules(TorchFunctionMode):
    """What a policy's fp32 rules do to operators, for models in somebody's torch.autocast region."""

    def __init__(self, operators: frozenset[str], dtype: torch.dtype | None, *, every: bool) -> None:
        super().__init__()
        self.operators = operators
        self.dtype = dtype
        self.inside = int(every)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        if name is not None and (self.inside or name in self.operators):
            args, kwargs = map_tensors((args, kwargs), _wide)
            for device in on:
                torch.set_autocast_enabled(device, False)
            try:
                return func(*args, **kwargs)
            finally:
                for device in on:
                    torch.set_autocast_enabled(device, True)
        if self.dtype is None or not on:
            return func(*args, **kwargs)
        before = [torch.get_autocast_dtype(device) for device in on]
        for device in on:
            torch.set_autocast_dtype(device, self.dtype)
        try:
            return func(*args, **kwargs)
        finally:
            for device, dtype in zip(on, before, strict=True):
                torch.set_autocast_dtype(device, dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOWS else tensor


@contextmanager
def with_rules(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Do to a model that is not prepared what the operator and module rules of `policy` and its dtype would do."""
    wide = frozenset(name for name, rule in policy.ops if rule == "fp32")
    mode = _Rules(wide, LOW.get(policy.dtype), every=policy.dtype == "fp32")
    patterns = [pattern for pattern, rule in policy.modules if rule == "fp32"]
    handles = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode.inside += 1
        return map_tensors((args, kwargs), _wide)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mode.inside -= 1

    for name, module in model.named_modules():
        if name in patterns:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    torch.clear_autocast_cache()
    try:
        with mode:
            yield
    finally:
        torch.clear_autocast_cache()
        for handle in handles:
            handle.remove()
