"""What a story is: a fault taken from a public issue, with its root cause and a healthy twin.

A story is a `Fault` whose program is built twice: as it was reported, and as a twin from which the cause is taken out.
Stories stand in `third/*.py` and `fourth/*.py`; `stories()` returns those of a folder. Import transformers inside the
function.

``python -m benchmarks.faults.story NAME ...`` checks what is written about stories without an instrument: the source
and the labels have their form, the story breaks at its step and not before, its true cures train as fp32 does, fp32
does what the cause implies, the place exists and the twin trains. It prints what is wrong and exits with 1 if anything
is.

A loop written by hand is a generator ``program(healthy, watch)``. ``watch(model, loss_fn, optimizer)`` returns the
function that the loop calls in the place of ``loss_fn(model, *batch)``. The loop runs for ever and yields a `Turn`
after each update; the steps of its story are turns.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import logging
import math
import pkgutil
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import nn

import halfstep as hs
from benchmarks.faults import fourth, third
from benchmarks.faults.case import FULL, Case, Fault, Truth, cured, marked_line, start
from benchmarks.faults.observe import finite, unwatched
from halfstep.lens.verdict import CAUSES, KINDS

__all__ = ["Course", "Place", "Story", "Turn", "Watch", "changed", "course", "near", "place_of", "stories", "story"]

CURED_STEPS = 50
"""Steps that a cure has to train."""

TWIN_STEPS = 300
"""Steps that a twin has to train."""

SLOW = 0.05
"""Seconds of one core that a step may take."""

LOST = 3.0
"""A loss that ends this many times above its first value is lost, finite or not."""

SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
"""A public issue or pull request: "owner/repository#number"."""

Watch = Callable[[nn.Module, Callable[..., Any], torch.optim.Optimizer], Callable[..., Any]]


class Turn(NamedTuple):
    """One update of a loop written by hand.

    Attributes:
        loss: of its last micro-batch.
        skipped: whether the loop or its scaler refused the update.
    """

    loss: float
    skipped: bool = False


class Place(NamedTuple):
    """Lines of a source file, both ends included."""

    file: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Story(Fault):
    """One story of the third or the fourth set. `truth.cause` is its root cause, one of `halfstep.lens.verdict.CAUSES`.

    Attributes:
        source: the public issue, "owner/repository#number".
        place: where the line at fault is in library code, "file.py: Class.method" or, with a part of the line's text,
            "file.py: Class.method: text" (folders before the file's name tell it from others); "" if the line is ours
            and ends with ``# FAULT name``.
        says: regular expressions, each of which has to be found in headline or report.
        never: regular expressions none of which may be found there.
        asked: step at which an instrument is asked; the bad step if nothing else is stated.
    """

    source: str
    place: str
    says: tuple[str, ...]
    never: tuple[str, ...]
    asked: int

    @property
    def loop(self) -> bool:
        """Whether the program is a loop written by hand."""
        return inspect.isgeneratorfunction(self.program)

    @property
    def default_steps(self) -> int:
        """Steps up to the one that an instrument is asked about."""
        return self.asked

    def build(self, *, healthy: bool = False) -> Case:
        """Make the case anew, or its twin."""
        self._seed()
        program: Any = self.program
        case: Case = program(healthy)
        return case if case.steps else replace(case, steps=self.default_steps)

    def turns(self, watch: Watch, *, healthy: bool = False) -> Iterator[Turn]:
        """Start the loop anew, or its twin; it runs for as long as turns are taken."""
        self._seed()
        program: Any = self.program
        return iter(program(healthy, watch))

    def _seed(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed)


def story(
    *,
    source: str,
    cause: str,
    kind: str,
    step: int,
    op: str = "",
    module: str = "",
    place: str = "",
    says: Sequence[str] = (),
    never: Sequence[str] = (),
    asked: int = 0,
    seed: int | None = None,
    **truth: Any,
) -> Callable[[Any], Story]:
    """Decorate the function that returns a faulty case, or its twin, with the truth about it.

    Args:
        source: the public issue.
        cause: root cause, one of `halfstep.lens.verdict.CAUSES`.
        kind: what happened at the place, one of `halfstep.lens.verdict.KINDS`.
        step: the first call whose loss or gradients are not finite.
        op: the operator to blame, "" if none is; its phase is forward if nothing else is stated.
        module: the module it runs in.
        place: as in `Story`.
        says: what headline and report have to contain.
        never: what they must not contain.
        asked: the step at which an instrument is asked; 0: the bad step.
        seed: as in `benchmarks.faults.case.Entry`.
        truth: the other fields of `Truth`: phase, parameter, cures, also. A cure is written as `changed` reads it.
    """
    given: dict[str, Any] = {"phase": "forward" if op else "", **truth}
    known = Truth(kind=kind, step=step, op=op, module=module, cause=cause, **given)
    return lambda program: Story(
        program=program,
        seed=seed,
        truth=known,
        source=source,
        place=place,
        says=tuple(says),
        never=tuple(never),
        asked=asked or step,
    )


def stories(folder: Any = third) -> tuple[Story, ...]:
    """Return the stories of a folder, `third` or `fourth`, in the order of files' names and of lines."""
    names = sorted(found.name for found in pkgutil.iter_modules(folder.__path__))
    files = [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    return tuple(value for file in files for value in vars(file).values() if isinstance(value, Story))


def changed(policy: hs.Policy, cure: str, truth: Truth) -> hs.Policy:
    """Return `policy` with the change that a cure's words stand for.

    Besides the words of `case.cured`: ``scale: 128``, ``scale: dynamic`` and ``scale: none`` set another loss scale.
    """
    if cure in ("scale: dynamic", "scale: none"):
        return policy.replace(scale={"scale: dynamic": "halfstep", "scale: none": "none"}[cure])
    if cure.startswith("scale: "):
        return policy.replace(scale=float(cure.removeprefix("scale: ")))
    return cured(policy, cure, truth)


# ------------------------------------------------------------------ running without instruments


class Course(NamedTuple):
    """What happened when a program ran.

    Attributes:
        losses: of each step.
        bad: steps, from 1, whose loss is not finite or whose update was refused.
        poisoned: first step after which a weight or buffer was not finite; 0 if none was.
        seconds: of the processor, for a step on average.
    """

    losses: tuple[float, ...]
    bad: tuple[int, ...]
    poisoned: int
    seconds: float

    @property
    def broken(self) -> int:
        """The first step that is not as it should be; 0 if none."""
        return min((*self.bad, *((self.poisoned,) if self.poisoned else ())), default=0)

    @property
    def lost(self) -> bool:
        """Whether training is not what it was: a weight, or the loss, is not finite at the end, or far above."""
        if self.poisoned or not math.isfinite(self.losses[-1]):
            return True
        first = next((loss for loss in self.losses if math.isfinite(loss)), math.inf)
        return self.losses[-1] - first > (LOST - 1) * max(abs(first), 0.1)


def course(told: Story, steps: int, *, healthy: bool = False, policy: hs.Policy | None = None) -> Course:
    """Run a story, or its twin, without an instrument; a loop has no other policy than its own."""
    losses, bad, poisoned = [], [], 0
    model, turns = _started(told, steps, healthy=healthy, policy=policy)
    begun = time.process_time()
    for number, turn in enumerate(islice(turns, steps), 1):
        losses.append(turn.loss)
        if turn.skipped or not math.isfinite(turn.loss):
            bad.append(number)
        if not poisoned and not all(finite(part) for part in (*model().parameters(), *model().buffers())):
            poisoned = number
    return Course(tuple(losses), tuple(bad), poisoned, (time.process_time() - begun) / steps)


def _started(
    told: Story, steps: int, *, healthy: bool, policy: hs.Policy | None
) -> tuple[Callable[[], nn.Module], Iterator[Any]]:
    if not told.loop:
        case = replace(unwatched(told.build(healthy=healthy)), steps=steps)
        return lambda: case.model, _trained(case, policy)
    models: list[nn.Module] = []

    def watch(model: nn.Module, loss_fn: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        models.append(model)
        return partial(loss_fn, model)

    return lambda: nn.ModuleList(models), told.turns(watch, healthy=healthy)


def _trained(case: Case, policy: hs.Policy | None) -> Iterator[Any]:
    step = start(case, policy)
    for number in range(1, case.steps + 1):
        case.before(number)
        yield step(*case.batch(number)).host()


def near(found: Course, wide: Course) -> str:
    """Say how a run under a cure differs from that in fp32; "" if it trains as that does.

    Weights, buffers and losses stay finite; of the second half at most a fifth is refused (in the first a dynamic scale
    may come down); and the mean of the last ten losses lies within a tenth of fp32's after as many updates, or within
    twice their spread.
    """
    if found.poisoned:
        return f"a weight or buffer is not finite after step {found.poisoned}"
    wrong = [number for number, loss in enumerate(found.losses, 1) if not math.isfinite(loss)]
    if wrong:
        return f"the loss of step {wrong[0]} is not finite"
    half = len(found.losses) // 2
    refused = sum(number > half for number in found.bad)
    if refused > half // 5:
        return f"{refused} of the last {half} updates were refused"
    theirs = wide.losses[: len(wide.losses) - len(found.bad)][-10:]
    mine, yours = fmean(found.losses[-10:]), fmean(theirs)
    bound = 0.1 * abs(yours) + 2 * pstdev(theirs)
    return "" if abs(mine - yours) <= bound else f"loss {mine:.4g}, in fp32 {yours:.4g}"


# ------------------------------------------------------------------ places


def place_of(told: Story) -> Place | None:
    """Return the lines that count as the place; None if no line is to blame.

    Raises:
        LookupError: the file, the function or the text of `place` does not exist or is not the only one, or no line is
            marked.
    """
    if not told.place:
        marked = marked_line(told)
        if marked is None and told.truth.op:
            raise LookupError(f"{told.name}: no line ends with '# FAULT {told.name}' and place is empty")
        return None if marked is None else Place(marked[0], marked[1], marked[1])
    file, name, text = (*(part.strip() for part in told.place.split(": ", 2)), "")[:3]
    paths = sorted({path for module in list(sys.modules.values()) if (path := _file(module)).endswith(f"/{file}")})
    places = [place for path in paths if (place := _inside(Path(path), name.split("."), text)) is not None]
    if len(places) != 1:
        raise LookupError(f"{told.name}: {len(places)} imported modules have {told.place!r}; build the story first")
    return places[0]


def _inside(path: Path, names: Sequence[str], text: str) -> Place | None:
    """Return the function's lines in a file, or the one line of it that has `text`."""
    code = path.read_text(encoding="utf-8")
    function = _function(ast.parse(code), names)
    if function is None:
        return None
    first, last = function.lineno, function.end_lineno or function.lineno
    if not text:
        return Place(path.name, first, last)
    lines = [n for n, line in enumerate(code.splitlines(), 1) if first <= n <= last and text in line]
    return Place(path.name, lines[0], lines[0]) if len(lines) == 1 else None


def _file(module: Any) -> str:
    return str(getattr(module, "__dict__", {}).get("__file__") or "")


def _function(tree: ast.AST, names: Sequence[str]) -> Any:
    for name in names:
        inside = (part for part in ast.iter_child_nodes(tree) if getattr(part, "name", None) == name)
        found = next(inside, None)
        if found is None:
            return None
        tree = found
    return tree


# ------------------------------------------------------------------ checking


def form(told: Story) -> list[str]:
    """Return what is wrong with the labels of a story, without running it."""
    truth = told.truth
    wrong = []
    if not SOURCE.fullmatch(told.source):
        wrong.append(f"source {told.source!r} is no owner/repository#number")
    if truth.cause not in CAUSES:
        wrong.append(f"cause {truth.cause!r} is none of {', '.join(CAUSES)}")
    if truth.kind not in KINDS:
        wrong.append(f"kind {truth.kind!r} is none of {', '.join(KINDS)}")
    if truth.cause in ("precision", "scale") and not truth.cures and not told.loop:
        wrong.append(f"cause {truth.cause} has no cure")
    if truth.cause in ("divergence", "model", "loop") and truth.cures:
        wrong.append(f"cause {truth.cause} has cures, but no policy takes it away")
    if not told.says:
        wrong.append("says is empty")
    if not told.about:
        wrong.append("no docstring")
    for expression in (*told.says, *told.never):
        re.compile(expression)
    return wrong


def checked(told: Story) -> list[str]:
    """Return everything that is wrong with a story, seen without an instrument."""
    truth = told.truth
    wrong = form(told)
    seen = course(told, max(truth.step, told.asked))
    if seen.broken != truth.step:
        losses = " ".join(f"{loss:.3g}" for loss in seen.losses[-8:])
        wrong.append(f"it breaks at step {seen.broken}, not {truth.step}; the last losses are {losses}")
    try:
        place_of(told)
    except LookupError as error:
        wrong.append(str(error))
    if not told.loop:
        wrong += _policies(told)
    twin = course(told, TWIN_STEPS, healthy=True)
    if twin.seconds > SLOW:
        wrong.append(f"a step takes {1000 * twin.seconds:.0f} ms")
    if twin.poisoned or not all(map(math.isfinite, twin.losses)):
        wrong.append(f"the twin breaks at step {twin.broken}")
    elif twin.bad and not told.loop and isinstance(told.build(healthy=True).policy.scale, float):
        wrong.append(f"updates of the twin are refused: {twin.bad[:5]}")
    if twin.lost:
        wrong.append(f"the twin does not train: loss {twin.losses[0]:.4g} at first, {twin.losses[-1]:.4g} at last")
    return wrong


def _policies(told: Story) -> list[str]:
    """Return what is wrong with the cures and with what the cause implies for fp32."""
    truth, case = told.truth, told.build()
    wide = course(told, CURED_STEPS, policy=FULL)
    wrong = []
    if truth.module and truth.module not in dict(case.model.named_modules()):
        wrong.append(f"there is no module {truth.module!r}")
    if truth.cause in ("precision", "scale") and (wide.broken or wide.lost):
        wrong.append(f"cause {truth.cause}, but fp32 breaks at step {wide.broken} or does not train")
    if truth.cause == "model" and wide.broken != truth.step:
        wrong.append(f"cause model, but fp32 breaks at step {wide.broken}, not {truth.step}")
    if truth.cause == "divergence" and not (wide.broken or wide.lost):
        wrong.append("cause divergence, but fp32 trains")
    for cure in truth.cures:
        what = near(course(told, CURED_STEPS, policy=changed(case.policy, cure, truth)), wide)
        if what:
            wrong.append(f"the cure {cure!r} does not train: {what}")
    return wrong


def main() -> None:
    """Check the named stories, or all; print what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.story", description="Check stories.")
    parser.add_argument("names", nargs="*", help="names of stories or of files; none: all")
    names = set(parser.parse_args().names)
    torch.set_num_threads(1)
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    chosen = [told for told in (*stories(), *stories(fourth)) if not names or names & {told.name, told.file.stem}]
    failed = not chosen
    for told in chosen:
        begun = time.perf_counter()
        try:
            wrong = checked(told)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        failed |= bool(wrong)
        print(f"{told.name} ({told.truth.cause}, {told.source}), {time.perf_counter() - begun:.1f} s:", end=" ")
        print("\n  ".join(("", *wrong)) if wrong else "right", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    importlib.import_module("benchmarks.faults.story").main()  # whose class the stories have, not this one's
