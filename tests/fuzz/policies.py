"""Random policies: what a policy says of itself is true, and a training under it runs or is refused in words.

A program is a random policy, a small model and a few TrainStep arguments. In this order:

1. The policy is a value: ``eval(repr(p)) == p``, TOML gives it back, equal policies hash alike, ``p.diff(p)`` is empty,
   and ``p.diff(q)`` has a line for every field that differs and none for another.
2. `explain` names the rule that decides: random operators, run in a region, give the format of the rule it names.
3. `hs.resolve` says what `prepare` does: formats of parameters, the masters, the scale.
4. TrainStep makes three updates with finite losses, and a run that resumes from its state continues bit for bit.

Intended differences, which are no findings:
- an error of halfstep, or ``NotImplementedError`` with a sentence about the policy: refused. Whoever refuses, `resolve`
  either refuses too or has shown a plan;
- an operator that the policy itself makes low (a rule of ``ops`` or ``modules``, or table all-low) and that torch has
  no kernel for: torch's error says so;
- formats that meet in an operator for which the policy has no rule (table none; on a CPU table torch, which has none
  for layer_norm; a module of rule fp32 around one of rule low), or a rule of its own: torch's error says which;
- losses that are not finite, where the low format has fewer exponent bits than fp32;
- weights that are not finite, which a state is refused for, where an optimizer steps fp16 weights without masters: its
  eps is 0 in fp16;
- ``master="auto"``, which TrainStep resolves by its optimizer.
"""

from __future__ import annotations

import dataclasses
import io
import random
import warnings
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import BannedOperatorError, HalfstepError
from halfstep.formats import DTYPES, FORMATS, format_of
from halfstep.policy.operators import known
from halfstep.policy.rule_kinds import MODULE_RULES, RULE_KINDS, RULES
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule

__all__ = ["SAMPLE", "check"]

SAMPLE = 50
PLAIN = tuple(rule for rule in MODULE_RULES if not RULE_KINDS[rule].recipe)  # the others need torchao

REFUSED = (HalfstepError, NotImplementedError)
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATTERNS = ("conv*", "*norm*", "*", "log*", "linalg.*", "F.softmax", "Tensor.__matmul__", "fuzz::*", "s?ftmax")
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "softmax": lambda x, w: F.softmax(x, -1),
    "log_softmax": lambda x, w: F.log_softmax(x, -1),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,)),
    "exp": lambda x, w: torch.exp(x),
    "sum": lambda x, w: x.sum(0),
    "add": torch.add,
    "cat": lambda x, w: torch.cat([x, w]),
    "mse_loss": F.mse_loss,
    "relu": lambda x, w: torch.relu(x),
    "gelu": lambda x, w: F.gelu(x),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-4),
}


class Block(nn.Module):
    """A part with a norm and an addition."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        norms = {"LayerNorm": nn.LayerNorm, "BatchNorm": nn.BatchNorm1d, "RMSNorm": nn.RMSNorm, "none": nn.Identity}
        self.rows = nn.Embedding(10, 8)
        self.blocks = nn.Sequential(*(Block(norms[draw.choice(sorted(norms))](8)) for _ in range(draw.randint(1, 2))))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(x + self.rows(tokens)))  # type: ignore[no-any-return]


# ------------------------------------------------------------------ random values


def _scale(draw: random.Random) -> Any:
    number = draw.choice([1.0, 1024.0, 2.0**-3, draw.uniform(0.1, 1e5)])
    rule = ScaleRule(init=2.0 ** draw.randint(0, 16), interval=draw.randint(1, 100), backoff=draw.uniform(0.1, 1.0))
    return draw.choice(["auto", "auto", "none", draw.choice(sorted(SCALE_RULES)), number, rule])


def _ops(draw: random.Random) -> tuple[tuple[str, str], ...]:
    names = [draw.choice([draw.choice(sorted(known())), draw.choice(PATTERNS), draw.choice(sorted(OPERATORS))])]
    names += [draw.choice(sorted(OPERATORS)) for _ in range(draw.randint(0, 2))]
    return tuple((name, draw.choice(RULES)) for name in names) if draw.random() < 0.5 else ()


def _modules(draw: random.Random) -> tuple[tuple[str, str], ...]:
    if draw.random() < 0.6:
        return ()
    patterns = ["head", "blocks.0", "blocks.*.norm", "class:Linear", "class:Block", "", "*.up", "rows"]
    patterns += ["nowhere"] if draw.random() < 0.1 else []
    return tuple((draw.choice(patterns), draw.choice(PLAIN)) for _ in range(draw.randint(1, 3)))


def _policy(draw: random.Random) -> hs.Policy:
    """Return a random policy: a preset with some fields drawn anew."""
    hints = get_type_hints(hs.Policy)
    base = draw.choice([hs.Policy(), *hs.policy.PRESETS.values()])
    drawn: dict[str, Any] = {
        "name": draw.choice(["", "fuzzed", 'a "quoted" -> name\n', "Ünïcode\t"]),
        "dtype": draw.choice(["auto", *DTYPES, "bf16", "fp16", draw.choice(sorted(FORMATS)), "e3m4"]),
        "ops": _ops(draw),
        "modules": _modules(draw),
        "scale": _scale(draw),
    }
    for name, hint in hints.items():
        if get_origin(hint) is not None and name not in drawn and draw.random() < 0.3:
            drawn[name] = draw.choice(get_args(hint))
    return base.replace(**{name: value for name, value in drawn.items() if draw.random() < 0.7})


# ------------------------------------------------------------------ what must hold


def _value(policy: hs.Policy, other: hs.Policy) -> str:
    if eval(repr(policy), {"Policy": hs.Policy, "ScaleRule": ScaleRule}) != policy:
        return f"repr does not give it back: {policy!r}"
    again = hs.Policy.from_toml(policy.to_toml())
    if again != policy or hash(again) != hash(policy):
        return f"TOML does not give it back: {policy!r} -> {again!r}"
    if policy.diff(policy):
        return f"differs from itself: {policy.diff(policy)}"
    lines, fields = policy.diff(other).split("\n"), dataclasses.fields(policy)
    for name in (field.name for field in fields):
        mine, theirs = getattr(policy, name), getattr(other, name)
        told = any(line.startswith((f"{name}: ", f"{name}.")) for line in lines)
        if told is not (mine != theirs):
            return f"diff says {'' if told else 'no'}thing of {name}: {mine!r} and {theirs!r}"
    return ""


def _explained(policy: hs.Policy, draw: random.Random) -> str:
    """Compare what `explain` says of some operators with the formats they give in a region."""
    region = policy.replace(
        params="fp32", norms="fp32", master="auto", grads="param", modules=(), inputs="keep", reduce="grad",
        state="fp32", scale="auto",
    )  # fmt: skip
    if region.dtype not in {"bf16", "fp16"}:
        return ""
    low = TORCH[region.dtype]
    for name in draw.sample(sorted(OPERATORS), 4):
        given = draw.choice([torch.float32, low])
        x, w = torch.rand(4, 4).to(given), torch.rand(4, 4).to(given)
        said = next(
            line
            for line in region.explain(name).splitlines()
            if line.startswith((f"operator {name}:", f"operator {name} on cpu:"))
        )
        rule = said.partition(": ")[2].partition(",")[0]
        wanted = {"low": low, "fp32": torch.float32}.get(rule, given)
        try:
            with hs.autocast("cpu", policy=region):
                got = OPERATORS[name](x, w).dtype
        except BannedOperatorError:
            if rule != "banned" or given is torch.float32:
                return f"{name} of {given} is banned, and explain says {said!r}: {region!r}"
            continue
        if rule == "banned" and given is low:
            return f"{name} is not banned, and explain says {said!r}: {region!r}"
        if got is not wanted:
            return f"{name} of {given} gave {got}, and explain says {said!r}: {region!r}"
    return ""


def _loss(model: nn.Module, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, tokens), y)


def _batch(i: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(4, 8, generator=generator)
    return x, torch.randint(0, 10, (4,), generator=generator), torch.randint(0, 3, (4,), generator=generator)


def _step(policy: hs.Policy, seed: int, arguments: dict[str, Any], optimizer: str) -> tuple[hs.TrainStep, nn.Module]:
    torch.manual_seed(seed)
    model = Net(random.Random(seed))
    step = hs.TrainStep(model, OPTIMIZERS[optimizer](model.parameters()), _loss, policy=policy, **arguments)
    return step, model


def _planned(policy: hs.Policy, plan: hs.policy.Plan, step: hs.TrainStep, model: nn.Module) -> str:
    """Compare `hs.resolve` with what TrainStep has made of the model."""
    by_class = any(pattern.startswith("class:") for pattern, _ in policy.modules)
    for module in plan.modules:
        if by_class or (
            module.path and "." not in module.path
        ):  # explain knows no classes, and takes words for operators
            continue
        said = next(line for line in policy.explain(module.path).splitlines() if line.startswith("module "))
        rule = said.partition(": ")[2].partition(",")[0] if module.rule else "no rule of its own"
        if rule != (module.rule or "no rule of its own") or not said.partition(": ")[2].startswith(rule):
            return f"resolve says {module.rule!r} of module {module.path!r} and explain {said!r}: {policy!r}"
    for decision in plan.parameters:
        there = model.get_parameter(decision.name).dtype
        if there is not TORCH[decision.format]:
            return f"resolve says {decision.name} is {decision.format} and it is {there}: {policy!r}"
    if policy.master != "auto" and any(p.low for p in plan.parameters) and plan.policy.master != step.policy.master:
        return f"resolve says master={plan.policy.master!r} and it is {step.policy.master!r}: {policy!r}"
    scale = plan.policy.scale
    told = scale.init if isinstance(scale, ScaleRule) else 1.0 if scale == "none" else scale
    if step.scaler.get_scale() != float(torch.tensor(told, dtype=torch.float32)):
        return f"resolve says scale={scale!r} and it is {step.scaler.get_scale()}: {policy!r}"
    return ""


def _bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _trained(policy: hs.Policy, seed: int, draw: random.Random) -> str:
    arguments: dict[str, Any] = {"accumulate": draw.choice([1, 1, 2]), "clip_norm": draw.choice([None, 1.0])}
    optimizer = draw.choice(sorted(OPTIMIZERS))
    plan = None
    try:
        torch.manual_seed(seed)
        plan = hs.resolve(policy, Net(random.Random(seed)))
    except REFUSED:
        pass
    try:
        step, model = _step(policy, seed, arguments, optimizer)
    except REFUSED:
        return ""
    if plan is None:
        return f"resolve refuses what TrainStep takes: {policy!r}"
    if problem := _planned(policy, plan, step, model):
        return problem
    narrow = format_of(plan.policy.dtype).is_narrow
    try:
        for i in range(3 * step.accumulate):
            result = step(*_batch(i))
            if not narrow and not bool(torch.isfinite(result.loss)):
                return f"loss {float(result.loss)} in step {i}: {policy!r}"
    except REFUSED:
        return ""
    except RuntimeError as error:
        if _asked_for(policy, str(error)):
            return ""
        raise
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    other, again = _step(policy, seed, arguments, optimizer)
    if not all(bool(torch.isfinite(value).all()) for value in saved["model"].values()):
        return _loads_no_ruins(other, saved, policy)
    other.load_state_dict(saved)
    for i in range(20, 20 + 2 * step.accumulate):
        first, second = step(*_batch(i)), other(*_batch(i))
        if not torch.equal(first.loss, second.loss) and bool(torch.isfinite(first.loss)):
            return f"a resumed run has loss {float(second.loss)} where it was {float(first.loss)}: {policy!r}"
    left, right = _bits(model), _bits(again)
    different = [n for n in left if not torch.equal(left[n].nan_to_num(), right[n].nan_to_num())]
    return f"a resumed run has other weights {different}: {policy!r}, {arguments}, {optimizer}" if different else ""


def _loads_no_ruins(step: hs.TrainStep, saved: dict[str, Any], policy: hs.Policy) -> str:
    """Say what is wrong if weights that are not finite can be loaded, or came from a format that keeps them finite."""
    if policy.dtype != "fp16" or policy.master != "none":
        return f"training left weights that are not finite: {policy!r}"
    try:
        step.load_state_dict(saved)
    except HalfstepError:
        return ""
    return f"weights that are not finite were loaded: {policy!r}"


def _asked_for(policy: hs.Policy, error: str) -> bool:
    """Return whether the policy itself brought operators to what torch says here."""
    rules = {rule for _, rule in (*policy.ops, *policy.modules)}
    if "not implemented for" in error:
        return policy.table == "all-low" or "low" in rules
    if "same dtype" in error or "mixed dtype" in error:
        return policy.table in {"none", "torch"} or bool(policy.ops) or {"fp32", "low"} <= rules
    return False


def check(seed: int) -> str:
    """Check the program of `seed`; "" if all that must hold holds."""
    draw = random.Random(seed)
    policy, other = _policy(draw), _policy(draw)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "policy .* on cpu", UserWarning)
        try:
            return _value(policy, other) or _explained(policy, draw) or _trained(policy, seed, draw)
        except Exception as error:  # a finding, whatever it is
            return f"{type(error).__name__}: {error} ({policy!r})"
