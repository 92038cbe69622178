"""Advice: what to change in the program itself; and the root cause, where `diagnose` has found the place.

`settle` asks, in this order: had training run away, does the batch hold what cannot be trained on, would fp32 have
helped. `advice` returns cures without a policy, which nothing has tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.binding.prepare import store_of
from halfstep.binding.wrappers import unwrap_optimizer
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES
from halfstep.lens.box.data import TARGET, suspects, without, wrong_target
from halfstep.lens.box.diagnose import BY_EXP, MASKED, WRITTEN, Subject
from halfstep.lens.box.origins import CallRecord, upstream
from halfstep.lens.box.replay import Attempt, Trace
from halfstep.lens.box.trials import RISING, Trials
from halfstep.lens.calls import NOTHING, Site, pointwise
from halfstep.lens.rise import BAD, FLOORS, LOSS, UNKNOWN, WEIGHTS, Rise, learning_rate, outlier, rise
from halfstep.lens.verdict import Cure, Verdict
from halfstep.schema import packaged_toml
from halfstep.step.parts.signals import UPDATES

REACH = 12  # so many calls before an operator are looked at

OURS = "look at the line: it puts nan or inf there itself; take it out, or mask what comes of it before the loss"
MASK = "mask last, after this operator: its gradient multiplies -inf by 0; or mask with a large finite negative number"

UNTRAINED = "before any update"  # evidence begins so where initial weights or inputs are too large
WITHOUT = "with another sample in its place"  # so it does where the batch trains without a sample
LOADED = "a loaded optimizer state"  # so it does where that destroyed the weights
NAMED = "without casts by name"  # so it does where fp32 trains only then


def _table(texts: Mapping[str, str]) -> dict[str, str]:
    return {key: texts.get(text.removeprefix("="), text) for key, text in texts.items()}


KINDS, CAUSED, OVERFLOW, INVALID, FORMULAS = map(_table, packaged_toml("lens/box/advice.toml").values())
"""The tables of `advice.toml`. Between the operators of a formula there may be `LIGHT` ones."""

# operators that belong to the formula around them
LIGHT = frozenset({"clamp", "clamp_min", "clamp_max", "add", "sub", "rsub", "to", "float", "half", "squeeze"})
PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
MASKS = frozenset({"masked_fill", "where"})


@dataclass(frozen=True, slots=True)
class Around:
    """The calls around the place of a verdict."""

    upstream: tuple[Site, ...] = ()  # those that made its inputs, the nearest first
    downstream: tuple[Site, ...] = ()  # those that read its result
    lost: tuple[str, ...] = ()  # constants of them that the format of their result cannot hold, in words

    @classmethod
    def of(cls, trace: Trace | None, verdict: Verdict) -> Around:
        """Read the calls that the loss depends on; empty where the place is none of them, or the batch is the cause."""
        if trace is None or trace.loss is None or not verdict.op or verdict.cause == "data":
            return cls()
        made, _ = trace.origins.made_by(trace.loss)
        calls = list(upstream(made))
        here = {call: call.site for call in calls if _is_at(call.site, verdict)}
        before = _elsewhere(upstream(here), verdict)[:REACH]
        after = _elsewhere((call for call in calls if not here.keys().isdisjoint(call.parents)), verdict)
        lost = [text for site in (*here.values(), *before) for text in _lost(trace, site)]
        return cls(before, after, tuple(dict.fromkeys(lost)))


ALONE_HERE = Around()


def advice(
    verdict: Verdict, around: Around = ALONE_HERE, *, everywhere: bool = False, cured: bool = False
) -> tuple[Cure, ...]:
    """Return what to change in the program, the most specific first; nothing general if a policy has `cured` the step.

    `everywhere`: the step is not finite in fp32 either.
    """
    evidence = verdict.because, verdict.shown
    texts = [text for begin, text in CAUSED.items() if any(words.startswith(begin) for words in evidence)]
    if verdict.cause == "divergence":
        return (Cure(text=[*texts, CAUSED["divergence"]][0]),)
    if not texts and verdict.cause == "data" and verdict.kind != "bad_batch" and not _of_none(verdict):
        texts = [CAUSED["data"]]
    texts += _specific(verdict, around)
    if (not texts and not cured) or (verdict.cause == "data" and verdict.kind == "invalid"):
        texts += [_general(verdict, everywhere=everywhere)]
    return tuple(Cure(text=text) for text in texts if text)


def lost_eps(optimizer: Optimizer | None, model: nn.Module) -> str:
    """Return in words the eps of an optimizer that is 0 in the format it computes an update in; "" if none is.

    Such an update divides 0 by 0 for every element without a gradient, and writes NaN. Fused forms compute in fp32.
    """
    if optimizer is None:
        return ""
    optimizer, store = unwrap_optimizer(optimizer), store_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        eps = group.get("eps")
        for parameter in group["params"] if isinstance(eps, float) and eps and not group.get("fused") else ():
            rounded = torch.tensor(eps, dtype=torch.float64, device="cpu").to(parameter.dtype)
            if parameter.dtype in LOW_DTYPES and not rounded and (store is None or parameter not in store):
                name, form = names.get(id(parameter), "a parameter"), DTYPE_NAMES[parameter.dtype]
                return (
                    f"eps={eps:g} of {type(optimizer).__name__} is 0 in {form}, in which {name} is updated: 0/0 is NaN"
                )
    return ""


def _specific(verdict: Verdict, around: Around) -> Iterator[str]:
    """Yield what follows from the formula that the place is part of."""
    if verdict.detail.startswith((WRITTEN, MASKED)) or verdict.kind not in {"overflow", "invalid"}:
        return
    if verdict.kind == "invalid":
        yield from around.lost[:2]
    before = [site.op for site in around.upstream]
    for operators, fix in FORMULAS.items():
        place, *makers = operators.split()
        if verdict.op == place and _leads(before, makers):
            yield fix
            return
    after = {site.op for site in around.downstream}
    if verdict.op in {"div", "sqrt", "log", "pow"} and verdict.kind == "invalid" and MASKS & after:
        yield (
            "give it a harmless argument first, x = torch.where(mask, x, 1.0), and mask its result: torch.where after "
            "the operator leaves nan in the gradient"
        )
    elif verdict.kind == "overflow" and BY_EXP in verdict.detail:
        where = verdict.detail.partition(BY_EXP)[2]
        yield f"clamp the argument of exp at {where}, such as a log-variance or a log-scale"
    elif verdict.op == "exp" and "log1p" in after:
        yield "use F.softplus(x) in the place of log1p(exp(x))"
    elif verdict.op in PRODUCTS and verdict.kind == "overflow" and {"div", "mul"} & after:
        yield "scale before the product and not after it: (q * factor) @ k.transpose(-2, -1)"


def _of_none(verdict: Verdict) -> bool:
    """Return whether the batch is as it may be, and the loss has no value for what it selects: nothing."""
    return NOTHING in verdict.detail or (verdict.op in {"cross_entropy", "nll_loss"} and "labels are" in verdict.detail)


def _leads(before: Sequence[str], makers: Sequence[str]) -> bool:
    """Return whether the operators before a place, the nearest first, begin with `makers`, light ones apart."""
    wanted = list(makers)
    for op in before:
        if op == wanted[0]:
            wanted.pop(0)
            if not wanted:
                return True
        elif op not in LIGHT:
            return False
    return False


def _general(verdict: Verdict, *, everywhere: bool) -> str:
    if verdict.kind == "bad_state" and verdict.cause == "precision":
        return KINDS["lost_eps"]
    if verdict.kind == "bad_batch" and TARGET in verdict.because:
        return KINDS["bad_target"]
    if verdict.kind == "overflow":
        return OVERFLOW.get(verdict.op, OVERFLOW["" if everywhere else "else"])
    if verdict.kind == "invalid" and verdict.detail.startswith(MASKED):
        return MASK
    if verdict.kind == "invalid" and NOTHING in verdict.detail and verdict.op not in {"cross_entropy", "nll_loss"}:
        return INVALID["mean"]
    if verdict.kind == "invalid":
        return OURS if verdict.detail == WRITTEN else INVALID.get(verdict.op, INVALID[""])
    return "" if verdict.kind == "not_reproducible" and verdict.detail else KINDS.get(verdict.kind, "")


def _elsewhere(calls: Iterable[CallRecord], verdict: Verdict) -> tuple[Site, ...]:
    return tuple(dict.fromkeys(call.site for call in calls if not _is_at(call.site, verdict)))


def _is_at(site: Site, verdict: Verdict) -> bool:
    return (site.op, site.module, site.line) == (verdict.op, verdict.module, verdict.line)


def _lost(trace: Trace, site: Site) -> Iterator[str]:
    """Yield in words the constants of a call that the format of its result rounds to another number of note."""
    numbers, dtype = trace.numbers.get(site, ((), torch.float32))
    if dtype not in LOW_DTYPES or not (pointwise(site.op) or site.op == "normalize"):
        return
    for number in numbers:
        rounded = float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype))
        if number and (rounded == 0.0 or (abs(rounded) == 1.0 != abs(number))):
            what = f"{number:g} {'rounds to' if rounded else 'is'} {rounded:g} in {DTYPE_NAMES[dtype]}"
            yield f"{what}: use a constant that the format can hold, or fp32 for {site.op}, at {site.line}"


# ------------------------------------------------------------------ the cause

BACK = 30.0  # a loss at most so many times what it was before is back where it was; `rise.FLOORS` has the same bound
ROSE = 3.0  # times that all losses from one step on are above all before it, where fp32 overflows too
DRAWN = 64  # updates of the history that a verdict keeps
MARGIN = 10.0  # times that weights may have moved farther than a plain update does: a momentum of 0.9 adds up to that
MOVED = 1e-3  # share of their size by which weights change at least where training runs away
BEGAN = 3  # a state that was loaded shows in so many updates
APART = 10.0  # times that an average is beyond what any gradients give, above what a low format or a new beta makes


def settle(subject: Subject, verdict: Verdict, attempt: Attempt, trials: Trials | None) -> Verdict:
    """Return the verdict with its root cause and the history of the run; trials train where the answer needs it."""
    cause, because, shown = _cause(subject, verdict, attempt, trials)
    seen = subject.signals.read()
    known = [[None if math.isnan(one) else one for one in values] for values in (seen.losses, seen.gradients)]
    rows: list[tuple[int, float | None, float | None]] = list(zip(seen.steps, *known, strict=True))[-DRAWN:]
    sure = cause and ("shown" if shown else "likely")
    return replace(verdict, cause=cause, because=because, sure=sure, shown=shown, history=tuple(rows))


def _cause(subject: Subject, verdict: Verdict, attempt: Attempt, trials: Trials | None) -> tuple[str, str, str]:
    """Return cause, evidence, and what could have refuted it; "" for a cause that is not known, or was not tried."""
    found = suspects(subject, attempt)
    if verdict.kind == "bad_batch":
        evidence = found[0] if found else f"{verdict.parameter}: {verdict.detail or 'not finite'}"
        return "data", evidence, "the values are there before the first operator, and the loss or a gradient needs them"
    if verdict.kind == "not_reproducible":
        return "", "", ""
    target, batch, away, state = wrong_target(attempt), poisoned(subject), runaway(subject), loaded(subject)
    wide = None if trials is None else trials.wide
    # a step that is not finite cannot be trained on
    tried = f"in fp32: {wide.outcome}" if wide is not None and (wide.trained or wide.finite_once is False) else ""
    lost = "" if wide is not None and wide.trains else tried
    if target or batch:
        return "data", target or batch, lost
    if state:
        return "divergence", state, ""
    if verdict.kind == "bad_state" and (eps := lost_eps(subject.optimizer, subject.model)):
        return "precision", eps, ""
    if wide is None or trials is None:
        return ("divergence", away, "") if away else ("", "", "")
    if away and not _back(subject, trials):
        return "divergence", away, tried
    if found and not (wide.trains and verdict.kind == "invalid"):  # fp32 trains on what has no value here
        other = without(subject, attempt)
        trial = None if other is None else Trials(other).of(subject.policy)
        trains = trial is not None and trial.trains
        return "data", found[0], f"{WITHOUT}: {trial.outcome}" if trial is not None and trains else lost
    if verdict.kind == "scale_too_high":
        replayed = next((note for note in verdict.notes if note.startswith("at scale")), tried)
        return "scale", f"at a lower loss scale the step is finite; {verdict.detail}", replayed
    above = wide.trains and trials.before and abs(wide.losses[-1]) > RISING * max(trials.before)
    if above and trials.astray:
        return "divergence", f"the loss rises in fp32 too: {wide.outcome}", trials.astray
    if wide.trains:
        how = f"{NAMED} " if trials.by_name else ""
        return "precision", f"{how}in fp32 the same steps are finite and train", wide.outcome
    if wide.finite_once is None:
        return "", "", ""
    if not wide.finite_once and verdict.kind == "overflow" and (course := _off_course(subject, trials)):
        return "divergence", f"{course}; now fp32 overflows too", ""
    if not wide.finite_once:
        value = "value" if verdict.kind == "invalid" else "finite value"
        shown = f"{lost}; in float64 the operator has none either" if verdict.kind == "invalid" else ""
        return "model", f"fp32 has no {value} there either", shown
    if not wide.trained:  # the weights may be too large to train in any format
        why = wide.outcome.partition(": ")[2]
        because = f"in fp32 the step is finite, and training had not run away before; {why}"
        return ("precision", because, "") if trials.before else ("", "", "")
    if not trials.before and not _updated(subject):
        because = f"{UNTRAINED}, in fp32: {wide.outcome}; initial weights or inputs are too large"
        return "model", because, trials.astray
    if trials.astray:
        return "divergence", f"in fp32 the step is finite and training does not go on: {wide.outcome}", trials.astray
    course = _off_course(subject, trials)  # no trial shows that updates are to blame: only likely
    return ("divergence", f"{course}; in fp32: {wide.outcome}", "") if course else ("", "", "")


def _back(subject: Subject, trials: Trials) -> bool:
    """Return whether fp32 trains, and its loss is back where it was: at the foot of the rise, else in the median."""
    found, _ = _before(subject)
    usual = found.before if found is not None and found.what == LOSS else trials.usual
    return trials.wide.trains and (usual is None or abs(trials.wide.losses[-1]) <= BACK * usual)


def _updated(subject: Subject) -> bool:
    """Return whether the optimizer's state shows that there were updates, of a run that was resumed."""
    states = () if subject.optimizer is None else subject.optimizer.state.values()
    return any(bool(v.any()) for state in states for v in state.values() if isinstance(v, Tensor))


def _off_course(subject: Subject, trials: Trials) -> str:
    """Return in words that losses rose or weights grew before the step; "" if they did not, or no weight has moved."""
    before = trials.before
    if not before:
        return ""
    first, then, now = subject.signals.growth(subject.model, subject.signals.read().steps[0]) or UNKNOWN
    rises = (at for at in range(1, len(before)) if min(before[at:]) >= ROSE * max(before[:at]))
    if (at := next(rises, 0)) and not abs(now - then) < MOVED * then:
        return f"the loss was {max(before[:at]):.3g} at most in {at} steps, and {before[-1]:.3g} at last"
    return f"the weights grew from {then:.3g} to {now:.3g} since step {first}" if now >= BAD.grew * then else ""


def runaway(subject: Subject) -> str:
    """Return the evidence that training had run away before a step, in one sentence; "" for none."""
    found, batch = _before(subject)
    if found is None or batch or not _reachable(found, subject):
        return ""
    rate = learning_rate(subject.optimizer)
    return f"{found}" + (f"; the learning rate is {rate:.3g}" if rate else "")


def _reachable(found: Rise, subject: Subject) -> bool:
    """Return whether updates can have moved the weights so far; else they were loaded or edited.

    An update of SGD moves them by the learning rate times the gradient, one of Adam each by about the learning rate.
    """
    if found.what != WEIGHTS or subject.optimizer is None:
        return True
    updates = subject.signals.read().updates(until=subject.step)
    norms = [norm for step, _, norm in updates if step >= found.first and math.isfinite(norm)]
    size = math.sqrt(sum(p.numel() for p in subject.model.parameters() if p.requires_grad))
    moved = learning_rate(subject.optimizer) * max(sum(norms), len(updates) * size)
    return (found.after - found.before) * size <= MARGIN * moved  # a root mean square times its root is a norm


def loaded(subject: Subject) -> str:
    """Return the evidence that a state which was loaded into the optimizer destroys weights; "" for none.

    The averages of Adam cannot hold a first moment that large beside so small a second one, whatever the gradients
    were; and a loss that jumps with the first updates after such a state was loaded is its work.
    """
    optimizer = None if subject.optimizer is None else unwrap_optimizer(subject.optimizer)
    passed = 0.0
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            passed = max(passed, float(state.get("step", 0.0)))
            if apart := _apart(group, state):
                whose = f"exp_avg_sq of {subject.names.get(id(parameter), 'a parameter')}"
                return f"{LOADED}: {whose} is too small beside exp_avg in {apart} elements, which no gradients make"
    history = subject.signals.read()
    rows = [row for row in history.updates() if math.isfinite(row[1])]
    if len(rows) < 2 or not 2 * len(history.steps) < min(2 * UPDATES, passed):
        return ""  # the optimizer's first updates are those of this run, or this run's are not known any more
    first, last = rows[0], max(rows[1 : 1 + BEGAN], key=lambda row: abs(row[1]))
    rose = Rise(what=LOSS, first=first[0], last=last[0], before=first[1], after=last[1])
    far = abs(rose.after) >= FLOORS[LOSS] * abs(rose.before)
    return f"{LOADED}: {rose}, its first updates after {passed - len(history.steps):g}" if far else ""


def _apart(group: dict[str, Any], state: dict[str, Any]) -> str:
    """Return in words how many elements of Adam's averages contradict each other; "" for none.

    By Cauchy and Schwarz the first average is at most (1 - b1) / sqrt((1 - b2) (1 - b1 ** 2 / b2)) roots of the second.
    """
    one, two, betas = state.get("exp_avg"), state.get("exp_avg_sq"), group.get("betas", ())
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or len(betas) != 2 or two.dtype in LOW_DTYPES:
        return ""  # in a low format the second one underflows by itself
    (b1, b2), eps = map(float, betas), float(group.get("eps", 0.0))
    if not 0.0 < b1 * b1 < b2 < 1.0:
        return ""
    most = (1.0 - b1) / math.sqrt((1.0 - b2) * (1.0 - b1 * b1 / b2))
    bad = one.detach().float().abs() > APART * (most * two.detach().float().clamp_min(0.0).sqrt() + eps)
    return f"{int(bad.sum())} of {bad.numel()}" if bool(bad.any()) else ""


def poisoned(subject: Subject) -> str:
    """Return the evidence that training had run away after the update of a bad batch, as `runaway`; "" for none."""
    found, batch = _before(subject)
    return f"{batch}, and its update was applied: {found}" if batch else ""


def _before(subject: Subject) -> tuple[Rise | None, str]:
    """Return what had run away before a step, and the outlier of the batch with which that began, "" for none."""
    history = subject.signals.read()
    loss = subject.window[-1].loss if subject.window else None
    own = math.nan if loss is None or loss.numel() != 1 else float(loss)
    rows = [*history.updates(until=subject.step), (subject.step, own, math.nan)]
    found = rise(rows, partial(subject.signals.growth, subject.model), BAD)
    return found, "" if found is None else outlier(history.inputs, found, subject.step)
