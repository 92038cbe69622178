"""Random sequences of GradScaler calls on three machines: halfstep's scaler, torch's, and an oracle without scaling.

A program makes one to three optimizers and calls, in any order: scale and backward (of some parameters; at once, or
held and differentiated later), unscale_, step, update (also with a scale), zero_grad (None or zeros), gradients
replaced by a function of themselves or changed in place, an unscaled loss, setters, state_dict and pickle. All numbers
are exact in fp32 under the scales used, so weights are compared bit for bit.

The oracle keeps, for every parameter, the sum of the true gradients that its ``p.grad`` stands for, and knows for every
call of halfstep whether it must pass or raise ScaleError, which optimizer steps, and what the scale becomes. It says
nothing more about an optimizer ("lost") once the program itself has made a gradient that no scaler can judge:

- one that an earlier step left behind (no zero_grad), alone or with a scaled one added to it;
- a sum of gradients under two scales, or of a scaled and an unscaled loss before unscale_.

An unscaled loss never begins the gradient of a parameter whose late or mixed one (below) was dropped since `unscale_`:
the scaler sees neither happen and takes the new one for the old.

torch's scaler is compared with halfstep's in weights, scale, tracker and errors, up to the first difference. Each is
classified; any other is a finding:

- idle: an optimizer without gradients. torch's step raises, and its update if there was nothing else; ours does
  nothing.
- skipped by hand: unscale_, zero_grad, a new scaled gradient. torch's second unscale_ raises and its step takes
  gradients that are still scaled; ours begins anew, checked against the oracle.
- late: a parameter's first gradient comes after unscale_. torch steps it scaled; ours unscales it, checked likewise.
- mixed: a scaled loss added to an unscaled gradient. torch steps the sum; ours raises.
- unclear: unscale_ found no gradient, and later there is one of a loss that was not scaled. torch raises for another
  reason (no checks); ours says what is wrong.
- again: unscale_ twice, the first time without any gradient. torch raises; ours has divided nothing twice.
- whole: update(new_scale=4) with an integer. torch raises AttributeError.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ScaleError
from halfstep.scale import GradScaler

__all__ = ["SAMPLE", "check"]

SAMPLE = 250
INF = float("inf")
ERRORS = (AssertionError, RuntimeError, AttributeError, TypeError, ValueError)
KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.25, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.25),
}
CALLS = {
    "backward": 30, "hold": 4, "release": 5, "unscale_": 12, "step": 16, "update": 14, "zero_grad": 10, "zeros": 4,
    "replace": 5, "in_place": 5, "foreign": 2, "set": 2, "round_trip": 2, "pickle": 1, "new_scale": 2, "skip": 6,
    "loop": 12, "after": 8,
}  # fmt: skip


class Finding(Exception):
    """Something that no rule explains."""


@dataclass
class Slot:
    """What a parameter's gradient stands for.

    Attributes:
        true: the sum of true gradients; None without a gradient.
        kind: "scaled" (by `factor`), "unscaled", "mixed", "stale" (no scaler can judge it) or "zero".
        factor: the scale of a scaled one.
    """

    true: Tensor | None = None
    kind: str = "zero"
    factor: float = 1.0


@dataclass
class Side:
    """One optimizer on three machines."""

    kind: str
    slots: list[Slot]
    stage: str = "ready"
    had: bool = False
    bad: bool = False
    lost: bool = False
    made: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        """Make optimizers and scalers."""
        self.random = random.Random(seed)
        self.scale, self.good = 2.0 ** self.random.choice((0, 3, 10)), 0
        numbers: dict[str, Any] = {
            "init_scale": self.scale,
            "growth_factor": self.random.choice((2.0, 4.0)),
            "backoff_factor": self.random.choice((0.5, 0.25)),
            "growth_interval": self.random.choice((1, 2, 5)),
        }
        self.growth, self.backoff = numbers["growth_factor"], numbers["backoff_factor"]
        self.interval = numbers["growth_interval"]
        self.ours = GradScaler("cpu", **numbers, floor=2.0**-60, ceiling=2.0**60)
        self.torchs = torch.amp.GradScaler("cpu", **numbers)
        kinds = [self.random.choice(list(KINDS)) for _ in range(self.random.choice((1, 1, 2, 3)))]
        counts = [self.random.choice((1, 2, 3)) for _ in kinds]
        self.sides = [Side(kind, [Slot() for _ in range(count)]) for kind, count in zip(kinds, counts, strict=True)]
        self.params = [self._fresh(counts) for _ in range(3)]
        self.optimizers = [
            [KINDS[kind](own) for kind, own in zip(kinds, params, strict=True)] for params in self.params
        ]
        self.tied, self.started, self.turns, self.recorded = True, False, False, False
        self.held: list[tuple[list[Any], list[tuple[int, int, Tensor]], float]] = []
        self.log: list[str] = []

    @staticmethod
    def _fresh(counts: list[int]) -> list[list[torch.nn.Parameter]]:
        return [[torch.nn.Parameter(torch.ones(2)) for _ in range(count)] for count in counts]

    def run(self) -> None:
        """Make random calls."""
        names, weights = list(CALLS), list(CALLS.values())
        for _ in range(self.random.randint(5, 40)):
            name = self.random.choices(names, weights)[0]
            index = self.random.randrange(len(self.sides))
            self.log.append(f"{name} {index}")
            getattr(self, f"do_{name}")(index)
            self.compare()

    # ------------------------------------------------------------------ losses

    def _picked(self, index: int) -> list[tuple[int, int, Tensor]]:
        """Return (optimizer, parameter, gradient) of what a loss reaches, mostly of one optimizer."""
        sides = [index] if self.random.random() < 0.8 else range(len(self.sides))
        picked = [(i, j) for i in sides for j in range(len(self.sides[i].slots)) if self.random.random() < 0.7]
        bad = self.random.choice((INF, float("nan"))) if self.random.random() < 0.12 else None
        values = [torch.tensor([self.random.choice((-2.0, -1.0, 1.0, 3.0)), 1.0]) for _ in picked]
        if bad is not None and values:
            values[-1][0] = bad
        return [(i, j, value) for (i, j), value in zip(picked, values, strict=True)]

    def _losses(self, picked: list[tuple[int, int, Tensor]], *, scaled: bool) -> list[Any]:
        losses = []
        scalers: tuple[Any, ...] = (self.ours, self.torchs)
        for scaler, params in zip(scalers, self.params, strict=False):
            loss = sum(((params[i][j] * value).sum() for i, j, value in picked), torch.zeros(()))
            losses.append(scaler.scale(loss) if scaled else loss)
        return losses

    def _differentiate(self, losses: list[Any], picked: list[tuple[int, int, Tensor]], factor: float) -> None:
        for loss in losses[: 1 + self.tied]:  # once they differ, torch's scale may have moved meanwhile
            if loss.requires_grad:
                loss.backward()
        for i, j, value in picked:
            side = self.sides[i]
            slot = side.slots[j]
            if slot.true is None:
                slot.true, slot.kind, slot.factor = value.clone(), "scaled", factor
                if side.stage == "unscaled":
                    side.made.add(j)
                    side.marked.add(j)
                continue
            slot.true = slot.true + value
            if slot.kind == "zero":
                slot.kind, slot.factor = "scaled", factor
            elif slot.kind == "scaled":
                slot.kind = "scaled" if slot.factor == factor else "stale"
            elif slot.kind == "unscaled":
                slot.kind = "mixed" if side.stage == "unscaled" else "stale"
                side.marked.add(j)

    def do_backward(self, index: int) -> None:
        """Scale a loss and differentiate it."""
        self.started = True
        picked = self._picked(index)
        self._differentiate(self._losses(picked, scaled=True), picked, self.scale)

    def do_hold(self, index: int) -> None:
        """Scale a loss and keep it."""
        self.started = True
        picked = self._picked(index)
        self.held.append((self._losses(picked, scaled=True), picked, self.scale))

    def do_release(self, index: int) -> None:
        """Differentiate a loss that was kept."""
        if self.held:
            losses, picked, factor = self.held.pop(self.random.randrange(len(self.held)))
            self._differentiate(losses, picked, factor)

    def do_foreign(self, index: int) -> None:
        """Differentiate a loss without a scale."""
        picked = [one for one in self._picked(index) if one[1] not in self.sides[one[0]].marked]
        for loss in self._losses(picked, scaled=False):
            if loss.requires_grad:
                loss.backward()
        for i, j, value in picked:
            side = self.sides[i]
            slot = side.slots[j]
            fine = side.stage == "unscaled" and slot.kind in ("zero", "unscaled")
            slot.kind = "unscaled" if fine else slot.kind if slot.kind == "mixed" else "stale"
            slot.true = value.clone() if slot.true is None else slot.true + value

    # ------------------------------------------------------------------ gradients

    def _each(self, index: int, change: Any) -> None:
        for params in self.params[:2]:
            for parameter in params[index]:
                if parameter.grad is not None:
                    change(parameter)

    def do_zero_grad(self, index: int) -> None:
        """Drop the gradients of an optimizer."""
        for optimizers in self.optimizers[:2]:
            optimizers[index].zero_grad()
        for slot in self.sides[index].slots:
            slot.true, slot.kind = None, "zero"

    def do_zeros(self, index: int) -> None:
        """Set gradients to zero; while unscaled, nobody can tell that from clipping."""
        for optimizers in self.optimizers[:2]:
            optimizers[index].zero_grad(set_to_none=False)
        side = self.sides[index]
        for slot in side.slots:
            if slot.true is not None:
                slot.true = torch.zeros(2)
                if side.stage != "unscaled":
                    slot.kind = "zero"

    def do_replace(self, index: int) -> None:
        """Put a function of each gradient in its place."""
        whole = self.random.random() < 0.5

        def change(parameter: Any) -> None:
            parameter.grad = torch.nan_to_num(parameter.grad, 0.0, 0.0, 0.0) if whole else parameter.grad * 2.0

        self._each(index, change)
        for slot in self.sides[index].slots:
            if slot.true is not None:
                slot.true = torch.nan_to_num(slot.true, 0.0, 0.0, 0.0) if whole else slot.true * 2.0

    def do_in_place(self, index: int) -> None:
        """Clip, so to say."""
        self._each(index, lambda parameter: parameter.grad.mul_(0.5))
        for slot in self.sides[index].slots:
            if slot.true is not None:
                slot.true = slot.true * 0.5

    # ------------------------------------------------------------------ the scaler

    def _call(self, method: str, index: int | None, args: tuple[Any, ...] = ()) -> tuple[str, str]:
        """Call a method of both scalers; return what each raised, "" for nothing."""
        raised = []
        for scaler, optimizers in zip((self.ours, self.torchs), self.optimizers, strict=False):
            given = args if index is None else (optimizers[index], *args)
            try:
                getattr(scaler, method)(*given)
                raised.append("")
            except ScaleError as error:
                raised.append(str(error))
            except ERRORS as error:
                if scaler is self.ours:
                    raise Finding(f"{method} raised {type(error).__name__}: {error}") from error
                raised.append(f"{type(error).__name__}: {error}")
        return raised[0], raised[1]

    def _expect(self, method: str, raised: tuple[str, str], fails: str, *, untie: str = "") -> bool:
        """Compare errors with what must be; return whether halfstep's call passed.

        Args:
            method: what was called.
            raised: by halfstep and by torch.
            fails: why it must raise, "" if it must not.
            untie: the rule by which torch differs here, "" if it must not.
        """
        mine, torchs = raised
        if bool(mine) != bool(fails):
            raise Finding(f"{method}: expected {fails or 'no error'}, got {mine or 'no error'}")
        if untie:
            self.tied = False
        elif self.tied and bool(mine) != bool(torchs):
            raise Finding(f"{method}: halfstep {mine or 'passes'}, torch {torchs or 'passes'}")
        return not mine

    def _look(self, side: Side) -> tuple[bool, bool, bool]:
        """Return whether there are mixed, late and other gradients."""
        present = [j for j, slot in enumerate(side.slots) if slot.true is not None]
        mixed = any(side.slots[j].kind == "mixed" for j in present)
        side.made.intersection_update(present)
        late = bool(side.made)
        return mixed, late, any(j not in side.made and side.slots[j].kind != "mixed" for j in present)

    def _unscale(self, side: Side, only: set[int] | None = None) -> None:
        """Unscale gradients in the oracle."""
        for j, slot in enumerate(side.slots):
            if slot.true is None or (only is not None and j not in only):
                continue
            if slot.kind == "stale" or slot.kind == "unscaled" or (slot.kind == "scaled" and slot.factor != self.scale):
                side.lost = True
            slot.kind = "unscaled"
            side.bad |= not bool(slot.true.isfinite().all())
            side.had = True

    def _begin_anew(self, side: Side) -> None:
        self.recorded |= side.bad
        side.stage, side.had, side.bad, side.made, side.marked = "ready", False, False, set(), set()

    def _out_of_turn(self, index: int) -> str:
        return "no loss" if not self.started else "order" if self.sides[index].stage == "stepped" else ""

    def do_unscale_(self, index: int) -> None:
        """Unscale."""
        side, fails, untie = self.sides[index], self._out_of_turn(index), ""
        mixed, late, others = self._look(side)
        if not fails and side.stage == "unscaled":
            anew = late and not others and not mixed
            fails = "mixed" if mixed else "" if anew or not side.had else "order"
            untie = "" if fails else "skipped by hand" if anew else "again"
        if self._expect("unscale_", self._call("unscale_", index), fails, untie=untie):
            self.turns = True
            if side.stage == "unscaled":
                self._begin_anew(side)
            self._unscale(side)
            side.stage = "unscaled"

    def do_step(self, index: int) -> None:
        """Step."""
        side, fails, untie = self.sides[index], self._out_of_turn(index), ""
        mixed, late, others = self._look(side)
        if not fails and side.stage == "unscaled":
            fails = "mixed" if mixed else "unclear" if others and not side.had else ""
            untie = "mixed, late, unclear, skipped by hand" if fails or late else ""
        if not untie and not fails and all(slot.true is None for slot in side.slots) and not side.had:
            untie = "idle"
        if not self._expect("step", self._call("step", index), fails, untie=untie):
            return
        self.turns = True
        if side.stage == "unscaled" and late:
            if others:
                self._unscale(side, side.made)
            else:
                self._begin_anew(side)
        if side.stage == "ready":
            self._unscale(side)
        side.stage, side.made = "stepped", set()
        if bool(self.ours.skipped(self.optimizers[0][index])) != side.bad and not side.lost:
            raise Finding(f"step: skipped is {not side.bad}")
        if side.had and not side.bad and not side.lost:
            for parameter, slot in zip(self.params[2][index], side.slots, strict=True):
                parameter.grad = None if slot.true is None else slot.true.clone()
            self.optimizers[2][index].step()

    def do_update(self, index: int) -> None:
        """Let the scale answer."""
        fails = "" if self.turns else "nothing was stepped"
        checked = self.recorded or any(side.had for side in self.sides)
        lost = any(side.lost for side in self.sides)
        untie = "idle" if self.turns and not checked else ""
        if not self._expect("update", self._call("update", None), fails, untie=untie):
            return
        if checked:
            bad = self.recorded or any(side.bad for side in self.sides)
            if lost:  # what a lost optimizer found is not known; the scaler says
                bad = self.ours.get_scale() < self.scale
            self.good = 0 if bad else self.good + 1
            self.scale *= self.backoff if bad else 1.0
            if self.good >= self.interval:
                self.scale, self.good = self.scale * self.growth, 0
        self._end()

    def _end(self) -> None:
        self.held.clear()  # autograd refuses them: the scale they were multiplied by has changed in place
        self.turns = self.recorded = False
        for side in self.sides:
            side.stage, side.had, side.bad, side.made, side.marked = "ready", False, False, set(), set()
            for slot in side.slots:
                slot.kind = "stale" if slot.kind == "mixed" else slot.kind

    def do_new_scale(self, index: int) -> None:
        """Set the scale by hand."""
        value = self.random.choice((4.0, 64.0, 4, torch.tensor(16.0)))
        if self.started:
            self._expect("update", self._call("update", None, (value,)), "", untie="whole" if value == 4 else "")
            self.scale = float(value)
            self._end()

    def do_set(self, index: int) -> None:
        """Set a number."""
        which = self.random.randrange(3)
        if which == 0:
            self.growth = self.random.choice((2.0, 4.0))
            self._call("set_growth_factor", None, (self.growth,))
        elif which == 1:
            self.backoff = self.random.choice((0.5, 0.25))
            self._call("set_backoff_factor", None, (self.backoff,))
        elif self.good == 0:  # torch never grows again from a count past a shorter interval
            self.interval = self.random.choice((1, 2, 5))
            self._call("set_growth_interval", None, (self.interval,))

    def do_round_trip(self, index: int) -> None:
        """Load each scaler's state into the other: they are the same while nothing differs."""
        mine, torchs = self.ours.state_dict(), self.torchs.state_dict()
        self.held.clear()
        self.ours.load_state_dict(torchs if self.tied else mine)
        self.torchs.load_state_dict(mine)

    def do_pickle(self, index: int) -> None:
        """Pickle the scaler, which is refused in the middle of an iteration."""
        try:
            copy = pickle.loads(pickle.dumps(self.ours))
        except ScaleError:
            if not self.turns:
                raise
            return
        if self.turns:
            raise Finding("pickled in the middle of an iteration")
        if copy.state_dict() != self.ours.state_dict():
            raise Finding("a pickled scaler differs")

    def do_skip(self, index: int) -> None:
        """Skip a step by hand: unscale_, zero_grad, and go on."""
        self.do_backward(index)
        self.do_unscale_(index)
        self.do_zero_grad(index)

    def do_after(self, index: int) -> None:
        """Unscale before the last backward pass: of other parameters or the same, scaled before it or after, or not."""
        self.do_zero_grad(index)
        reached = [j for j in range(len(self.sides[index].slots)) if self.random.random() < 0.5]
        first = [(index, j, torch.tensor([1.0, 2.0])) for j in reached]
        self.started = True
        self._differentiate(self._losses(first, scaled=True), first, self.scale)
        how = self.random.choice(("hold", "backward", "foreign"))
        if how == "hold":
            self.do_hold(index)
        self.do_unscale_(index)
        if how != "hold":
            getattr(self, f"do_{how}")(index)
        elif self.held:
            losses, picked, factor = self.held.pop()
            self._differentiate(losses, picked, factor)
        self.do_step(index)

    def do_loop(self, index: int) -> None:
        """Do a whole iteration as it should be."""
        self.do_zero_grad(index)
        self.do_backward(index)
        if self.random.random() < 0.5:
            self.do_unscale_(index)
            self.do_in_place(index)
        self.do_step(index)
        self.do_update(index)

    # ------------------------------------------------------------------ comparison

    def compare(self) -> None:
        """Compare weights, scale and tracker."""
        state = self.ours.state_dict()
        if (state["scale"], state["_growth_tracker"]) != (self.scale, self.good):
            lost = any(side.lost for side in self.sides)
            if not lost:
                raise Finding(f"scale {state['scale']}, tracker {state['_growth_tracker']}: {self.scale}, {self.good}")
            self.scale, self.good = state["scale"], state["_growth_tracker"]
        for index, side in enumerate(self.sides):
            weights = [torch.stack([p.detach() for p in params[index]]) for params in self.params]
            if not side.lost and not torch.equal(weights[0].nan_to_num(7.0), weights[2].nan_to_num(7.0)):
                raise Finding(f"weights {weights[0].tolist()}, true ones {weights[2].tolist()}")
            if self.tied and not torch.equal(weights[0].nan_to_num(7.0), weights[1].nan_to_num(7.0)):
                raise Finding(f"weights {weights[0].tolist()}, torch's {weights[1].tolist()}")
        if self.tied:
            theirs = self.torchs.state_dict()
            if any(theirs[key] != state[key] for key in theirs):
                raise Finding(f"state {state}, torch's {theirs}")


def check(seed: int) -> str:
    """Run the program of `seed`; return what no rule explains, or ""."""
    program = Program(seed)
    try:
        program.run()
    except Finding as finding:
        return f"{finding} after {'; '.join(program.log)}"
    return ""
