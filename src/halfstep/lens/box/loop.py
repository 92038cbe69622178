"""Loop: errors in the order of calls of a training loop written by hand.

What is compared are gradients and weights themselves: a gradient that no call has written to between two moments is the
same object with the same version. Two small gradients stand for all, so a good step costs some microseconds on the
host. Values are read after a bad step, in the first updates of a run, and where something looks wrong.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.kernels.choose import norms_for
from halfstep.kernels.sharded import local
from halfstep.lens.calls import extremes
from halfstep.lens.tracing import user_frame, user_line
from halfstep.lens.verdict import Cure, Verdict
from halfstep.mistakes import MISTAKES
from halfstep.optim import stepped_by
from halfstep.scale.alarm import in_scaler, is_scaler

WATCHED = 2  # gradients that stand for all: the smallest ones
SEEN = 2  # an error that does no harm at once is reported when it was seen in so many steps in a row
SAMPLES = 3  # scaled updates whose norms are read, at the beginning of a run, and from which clipping is judged
TRIES = 64  # backward passes whose norms are computed for that, at most
CLIPPED = 0.5  # a norm below this part of what it was counts as clipped
EQUAL = 1e-4  # relative difference of norms that count as equal: clipping adds 1e-6 to a norm, and fp32 rounds
UNKNOWN = 64  # backward passes of one update, at most, before the first update has shown how many there are
HARMLESS = frozenset({"HS001", "HS201"})  # errors because of which training does not run away
COMPARED = "gradients and weights, compared before and after the calls of this run"
ALONE = "call scaler.step(optimizer) alone: it leaves out a step whose gradients are not finite"
COPIED = 1 << 26  # bytes of weights that are copied to find out whether a bad step was applied to them


@dataclass(eq=False)
class _Update:
    """A call of the optimizer's step on gradients that are not finite."""

    weights: list[tuple[Tensor, Tensor]]  # (parameter, a copy from before) of those whose gradient is not finite
    line: str  # the user's line
    scaler: bool  # whether the loss was scaled and a scaler is within reach of the line


class Loop:
    """Watches the order of calls around one optimizer."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None
        self.facts: dict[str, Verdict] = {}  # code of an error in `mistakes.MISTAKES` -> the verdict on it alone
        self.bad: tuple[int, float] | None = None  # (number, scale) of the last bad step, until its gradients are gone
        self.carried = 0  # number of the step whose bad gradients went into the present one; 0: none
        self.same_window = False  # whether the present step adds to the gradients of a bad one within one update
        self.wrote: tuple[int, Verdict] | None = None  # (number, verdict) of a bad step whose gradients were applied
        self.buffers: dict[str, int] = {}  # name -> number of the bad step that wrote to it what is not finite
        self.updates = 0  # since the last backward pass
        self.update: _Update | None = None  # under way, of gradients that are not finite, with no scaler to stop it
        self._watched: list[Tensor] = []  # parameters
        self._made: list[tuple[Tensor, Tensor, int]] = []  # (parameter, gradient, version) after the backward pass
        self._left: list[tuple[Tensor, Tensor, int]] = []  # the same after the last update, until a pass begins
        self._passes = self._usual = 0  # backward passes since the last update, and up to it
        self._depth = 0  # an optimizer's step may call that of its base class
        self._kept = self._cleared = 0  # updates in a row whose gradients stayed, and that had none
        self._suspected = False  # whether the optimizer may step twice with the same gradients
        self._first: tuple[str, Tensor] | None = None  # line and gradients of the first update of a suspected step
        self._raw: Tensor | None = None  # norm of the gradients after the backward pass
        self._tries = 0
        self._samples: list[tuple[float, float, float, float]] = []  # scale; norm before, norm and largest after

    # ------------------------------------------------------------------ moments

    def begin(self, step: int) -> None:
        """A backward pass begins."""
        left, self._left = self._left, []
        updates, self.updates, self._depth = self.updates, 0, 0
        self._passes += 1
        if not updates:
            return
        kept = [g for parameter, g, version in left if parameter.grad is g and g._version == version]
        if not any(bool(local(gradient).any()) for gradient in kept):
            self._kept = 0
            return
        self._kept += 1
        if self._kept == SEEN:
            largest = max(extremes(gradient)[0] for gradient in kept)
            self._note(
                "HS034",
                because=f"zero_grad() is missing: the gradients of the updates before, up to {largest:.3g}, are still "
                f"there when backward() of step {step} begins",
            )

    def end(self) -> None:
        """A backward pass has ended."""
        beginning = self._cleared >= 0 or self._tries < TRIES
        self._made = self._state() if beginning else []
        if self._tries < TRIES and self.optimizer is not None:
            self._tries += 1
            self._raw = torch.linalg.vector_norm(norms_for(self._gradients()))

    def carry(self, bad: bool, scale: float) -> None:
        """Note whether gradients that are not finite are there when a pass begins, and the scale of its loss."""
        assert self.bad is not None
        step, before = self.bad
        # an update came between, or should have
        passed = self.updates > 0 or scale != before or self._passes >= (self._usual or UNKNOWN)
        self.carried = step if bad and passed else 0
        self.same_window = bad and not passed
        if not bad:
            self.bad = None

    def before_update(self, *, bad: bool, scale: Tensor | None, closure: bool) -> None:
        """The optimizer steps, on gradients that are `bad`; `scale` is their seed; a closure makes other gradients."""
        self._depth += 1
        if self._depth > 1 or closure:
            return
        self.update = None
        if bad:
            self.update = self._bad_update(scale)
        elif not self.updates:
            self._sample(scale)
            self._look_for_gradients()
        elif self.updates == 1 and self._left and all(p.grad is gradient for p, gradient, _ in self._left):
            self._compare(scale)

    def after_update(self, *, closure: bool) -> _Update | None:
        """The optimizer has stepped; return the call if it has written gradients that are not finite into weights."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or closure:
            return None
        self._usual = self._passes or self._usual
        self.updates, self._passes = self.updates + 1, 0
        self._left = self._state()
        if self.updates == 1 and self._suspected and self._left:
            self._first = user_line(), self._joined()
        update, self.update = self.update, None
        if update is not None and any(_differ(parameter, before) for parameter, before in update.weights):
            return update
        return None

    # ------------------------------------------------------------------ what is wrong

    def _bad_update(self, seed: Tensor | None) -> _Update | None:
        """Return the call that is about to apply gradients that are not finite; None if a scaler made it."""
        frame = sys._getframe()
        if in_scaler(frame):  # which lets the optimizer skip on the device
            return None
        weights: list[tuple[Tensor, Tensor]] = []
        room = COPIED
        for parameter in sorted(self._parameters(), key=Tensor.numel):
            if parameter.grad is not None and not extremes(parameter.grad)[1]:
                room -= parameter.nbytes
                if weights and room < 0:
                    break
                weights.append((parameter, parameter.detach().clone()))
        scaled = seed is not None and extremes(seed)[0] > 1.0
        return _Update(weights, user_line(), scaled and bool(_scales_near(frame))) if weights else None

    def _look_for_gradients(self) -> None:
        if self._made and self._cleared >= 0:
            gone = all(parameter.grad is None for parameter, _, _ in self._made)
            self._cleared = self._cleared + 1 if gone else -1
            if self._cleared == SEEN:
                self._note(
                    "HS201",
                    because=f"zero_grad() ran between backward() and the update: {SEEN} updates had no gradients",
                    line=user_line(),
                )

    def _compare(self, seed: Tensor | None) -> None:
        """Compare the gradients of a second update with those of the first; copies are taken from the next step on."""
        if self._first is None:
            self._suspected = "HS006" not in self.facts
            return
        (line, first), now = self._first, self._joined()
        self._first = None
        scale = 1.0 if seed is None else extremes(seed)[0]
        # unchanged, or divided by the scale once more
        alike = (bool(torch.allclose(now * factor, first, rtol=1e-6, atol=0.0)) for factor in {1.0, scale})
        if bool(first.any()) and any(alike):
            places = " and ".join(where.partition(" ")[0] for where in (line, user_line()))
            self._note(
                "HS006",
                because=f"the optimizer stepped twice with the gradients of one backward pass, at {places}",
                line=user_line(),
            )
        self._suspected = False

    def _sample(self, seed: Tensor | None) -> None:
        raw, self._raw = self._raw, None
        if raw is None or seed is None:
            return
        scale = extremes(seed)[0]
        if scale <= 1.0:
            self._tries = TRIES  # no loss scaling
            return
        frame = sys._getframe()
        near = _scales_near(frame)
        gradients = self._gradients()
        norm = float(torch.linalg.vector_norm(norms_for(gradients)))
        if any(math.isclose(scale, one * one) for one in near):
            self._note(
                "HS202",
                because=f"the loss was multiplied by {scale:g} before backward(), the square of the loss scale, and "
                "gradients are divided by it once",
            )
        elif math.isclose(norm, float(raw), rel_tol=EQUAL) and not in_scaler(frame):
            # by the norms: torch's unscale_ counts no version of a gradient
            shares = (one / scale for one in near)  # of accumulated micro-batches
            if any(math.isclose(share, round(share)) and 1 <= share <= UNKNOWN for share in shares):
                self._note(
                    "HS005",
                    because=f"optimizer.step() ran in the place of scaler.step(optimizer): it applied gradients that "
                    f"are multiplied by the loss scale, {scale:g}",
                    line=user_line(),
                )
            self._tries = TRIES
            return
        largest = max((extremes(g)[0] for g in gradients), default=0.0)
        self._samples.append((scale, float(raw), norm, largest))
        if len(self._samples) == SAMPLES:
            self._tries = TRIES
            self._judge_clipping()

    def _judge_clipping(self) -> None:
        """Find out whether scaled gradients were clipped: what is left has the limit divided by the scale as norm."""
        for column, what, call in ((2, "norm", "clip_grad_norm_"), (3, "largest value", "clip_grad_value_")):
            limits = [sample[0] * sample[column] for sample in self._samples]
            befores = [before / scale for scale, before, _, _ in self._samples]
            clipped = all(after < CLIPPED * old for old, (_, _, after, _) in zip(befores, self._samples, strict=True))
            alike = all(abs(limit - limits[0]) <= EQUAL * limits[0] for limit in limits)
            varied = max(befores) > (1 + 100 * EQUAL) * min(befores)
            scale, after = self._samples[0][0], self._samples[0][column]
            if clipped and alike and varied and _is_round(limits[0]) and not _is_round(after):
                self._note(
                    "HS001",
                    because=f"{call} ran before unscale_(): in {SAMPLES} updates the {what} of all gradients is "
                    f"{limits[0]:.3g} / {scale:g} (the loss scale), their norm without clipping {befores[0]:.3g}",
                )
                return

    def _note(self, code: str, because: str, line: str = "") -> None:
        self.facts[code] = _blamed(Verdict(kind="loop", phase="update"), code, because, line)

    # ------------------------------------------------------------------ verdicts

    def judge(self, verdict: Verdict) -> Verdict:
        """Return the verdict on a bad step, with the loop as its cause where that is so."""
        if self.carried and verdict.kind == "not_reproducible":
            return _blamed(
                replace(verdict, kind="loop", phase="update", detail=""),
                "HS034",
                f"zero_grad() is missing: the gradients of step {self.carried}, which were not finite, were still "
                f"there when backward() of step {verdict.step} began; its own are finite",
            )
        if verdict.kind == "bad_state" and verdict.parameter in self.buffers:
            return _blamed(verdict, "HS204", _of_buffers([verdict.parameter], self.buffers[verdict.parameter]))
        if verdict.kind == "bad_state" and self.wrote is not None and self.wrote[0] < verdict.step:
            step, first = self.wrote
            because = f"{verdict.parameter} is not finite since the update of step {step}: "
            because += first.because or first.headline
            return replace(
                verdict, kind="loop" if first.kind == "loop" else verdict.kind, cause=first.cause, because=because,
                sure=first.sure, shown=first.shown, line=first.line, cures=first.cures,
            )  # fmt: skip
        spoiling = next((fact for code, fact in self.facts.items() if code not in HARMLESS), None)
        if spoiling is not None and verdict.kind in {"overflow", "invalid", "bad_state"}:
            because, cures = spoiling.because, spoiling.cures
            return replace(verdict, kind="loop", cause="loop", because=because, sure="likely", cures=cures)
        return verdict

    def applied(self, verdict: Verdict, update: _Update) -> Verdict:
        """Return the verdict on a step whose gradients were applied though they were not finite."""
        parameters = self._parameters()
        bad = sum(not extremes(parameter)[1] for parameter in parameters)
        call = " at ".join(filter(None, ("optimizer.step()", update.line.partition(" ")[0])))
        count = f"{bad} of {len(parameters)} parameters are not finite since"
        scaled = verdict.kind == "scale_too_high"
        if scaled:
            verdict = replace(verdict, kind="loop", phase="update", op="", module="", line=update.line, detail="")
        if update.scaler:
            because = f"{call} ran outside of GradScaler.step and applied gradients that are not finite; {count}"
            verdict = _blamed(verdict, "HS006", because)
            verdict = replace(verdict, cures=(Cure(text=ALONE),))
        elif scaled:
            because = f"{call} applied gradients that overflowed under the loss scale; {count}"
            verdict = _blamed(verdict, "HS005", because)
        else:
            verdict = replace(verdict, notes=(*verdict.notes, f"its update was applied by {call}: {count}"))
        self.wrote = self.wrote or (verdict.step, verdict)
        return verdict

    def spoil(self, names: Sequence[str], step: int) -> str:
        """Note buffers that bad step `step` has left with what is not finite; return that in words, "" for none new."""
        new = [name for name in names if name not in self.buffers]
        self.buffers.update(dict.fromkeys(new, step))
        return _of_buffers(new, step) if new else ""

    # ------------------------------------------------------------------ gradients

    def _parameters(self) -> list[Tensor]:
        return [] if self.optimizer is None else stepped_by(self.optimizer)

    def _gradients(self) -> list[Tensor]:
        found = (local(p.grad.detach()) for p in self._parameters() if p.grad is not None)
        return [g for g in found if g.layout is torch.strided and g.numel()]

    def _joined(self) -> Tensor:
        return torch.cat([local(gradient).detach().flatten().double() for _, gradient, _ in self._left])

    def _state(self) -> list[tuple[Tensor, Tensor, int]]:
        if all(p.grad is None for p in self._watched):
            found = [p for p in self._parameters() if p.grad is not None and p.grad.layout is torch.strided]
            self._watched = sorted(found, key=Tensor.numel)[:WATCHED]
        return [(p, p.grad, p.grad._version) for p in self._watched if p.grad is not None]


def poisoned(kept: Iterable[tuple[nn.Module, str, Tensor]], model: nn.Module) -> list[str]:
    """Return names of buffers that are not finite now, and were in `kept`: (module, name, value before the step)."""
    names: dict[int, str] = {}
    found = []
    for module, name, before in kept:
        now = module._buffers.get(name)
        if now is not None and not extremes(now)[1] and extremes(before)[1]:
            names = names or {id(m): n for n, m in model.named_modules()}
            found.append(".".join(filter(None, (names.get(id(module), ""), name))))
    return found


def _blamed(verdict: Verdict, code: str, because: str, line: str = "") -> Verdict:
    return replace(
        verdict, cause="loop", because=because, sure="shown", shown=COMPARED, line=line or verdict.line,
        cures=(Cure(text=MISTAKES[code].remedy),),
    )  # fmt: skip


def _of_buffers(names: Sequence[str], step: int) -> str:
    more = [f"{len(names) - 1} more"] if len(names) > 2 else names[1:]
    shown = " and ".join([names[0], *more])
    return (
        f"{shown} {'are' if more else 'is'} not finite since the forward pass of step {step}: leaving out "
        "its update does not restore them, and eval() reads them"
    )


def _differ(now: Tensor, before: Tensor) -> bool:
    now, before = local(now.detach()), local(before)
    return not torch.equal(now, before) and not torch.equal(now.nan_to_num(), before.nan_to_num())


def _is_round(number: float) -> bool:
    """Return whether a number has at most two decimal digits that are not zero, as limits that people choose have."""
    return number > 0.0 and math.isclose(number, float(f"{number:.1e}"), rel_tol=EQUAL)


# ------------------------------------------------------------------ the user's program


def _attributes(owner: object) -> list[Any]:
    """Return the values of an object's attributes; none of a class, of a module, and of what has or shows none."""
    try:
        return [] if isinstance(owner, (type, ModuleType)) else list(vars(owner).values())
    except Exception:  # of a stand-in for another object
        return []


def _scales_near(frame: FrameType) -> list[float]:
    """Return the scales of the scalers that the program around the step has in its variables."""
    found: dict[int, Any] = {}
    near = user_frame(frame)
    for one, _ in () if near is None else walk_stack(near):
        values = [*one.f_locals.values(), *one.f_globals.values()]
        for owner in one.f_locals.values():  # self, or what holds the parts of a loop
            values += _attributes(owner)
        found.update({id(value): value for value in values if is_scaler(value)})
    return [float(scaler.get_scale()) for scaler in found.values()]
