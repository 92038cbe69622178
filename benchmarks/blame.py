"""Whom each instrument names, on one and the same fault: operator, module and source line.

The faults are those of list A of the fault bench (`benchmarks/faults`) that have a producer and that torch alone has
too.
halfstep runs them in its own step, the others in the same loop written with torch.autocast. The report of an instrument
is graded in three parts, generously where it is near: a node of the graph counts as the operator that it belongs to,
and the innermost line of the program in any traceback counts as the line that was named.

The peers take a `Run`, a program in torch alone: ``run(attach)`` builds it, calls ``attach(model)`` and trains to its
bad step. `benchmarks.faults.stories_scored` asks them about its stories too.
"""

from __future__ import annotations

import io
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.faults import case as frame_of_faults
from benchmarks.faults.case import Fault, marked_line
from benchmarks.faults.catalog import LIST_A, SECOND_A
from benchmarks.faults.plain import plain_bad_steps
from benchmarks.faults.scored import verdict_on
from benchmarks.instruments import CheckEveryOperator, NotFinite, watch_modules

SHOWN = (
    "attention_logits",
    "residual_sum",
    "fully_masked_row",
    "exp_without_max",
    "distance_of_twins",
    "exploding_gradient",
)
"""Faults that are shown one by one: forward and backward, NaN and inf, inside of modules and in the loss."""

NODES: Mapping[str, frozenset[str]] = {
    "matmul": frozenset({"mm", "bmm", "unsafeview"}),
    "linear": frozenset({"mm", "addmm", "linear", "t"}),
    "einsum": frozenset({"bmm"}),
    "conv2d": frozenset({"convolution"}),
    "convtranspose2d": frozenset({"convolution"}),
    "crossentropy": frozenset({"logsoftmax", "nllloss", "nllloss2d"}),
    "multiheadattentionforward": frozenset({"softmax", "bmm", "scaleddotproductflashattentionforcpu"}),
    "to": frozenset({"tocopy"}),
}
"""Operator -> nodes of the graph that stand for it besides the one of its own name."""

PROGRAMS = Path(frame_of_faults.__file__).parent
FRAME = {"case.py", "plain.py", "scored.py", "story.py", "stories_scored.py", "observe.py"}
OURS = "hs.TrainStep"
NODE = re.compile(r"Function '(\w+?)Backward\w*'")
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
FRAME_HEAD = re.compile(r"^ {17} (\S*) (\w+)$", re.MULTILINE)
"""The head of a module in a report of transformers: its path, "" for the root, and its class."""

Run = Callable[[Callable[[nn.Module], Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What an instrument said of a fault.

    Attributes:
        words: in short; "" if it was silent.
        op: operators that it may mean.
        module: dotted path; None: it named none.
        line: (file name, number); None: it named none.
        places: (file, number) of every line in the traceback it gave, outermost first.
    """

    words: str
    op: frozenset[str] = frozenset()
    module: str | None = None
    line: tuple[str, int] | None = None
    places: tuple[tuple[str, int], ...] = ()


SILENT = Said(words="")


# ------------------------------------------------------------------ the instruments


def halfstep(fault: Fault) -> Said:
    """Ask the black box of a TrainStep."""
    verdict = verdict_on(fault)
    if verdict is None or not verdict.op:
        return SILENT if verdict is None else Said(words=verdict.kind)
    place = re.search(r"([^/\\\s:]+\.py):(\d+)", verdict.line)
    where = "no line" if place is None else place[0]
    return Said(
        words=f"{verdict.kind}, {verdict.phase} of {verdict.op} in {verdict.module!r}, {where}",
        op=frozenset({verdict.op}),
        module=verdict.module,
        line=(place[1], int(place[2])) if place else None,
    )


def anomaly_mode(run: Run) -> Said:
    """Run under torch's anomaly mode; it raises at NaN in a backward pass, and tells where the node was made."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True):
                run(lambda model: None)
        except RuntimeError as error:
            node = NODE.search(str(error))
            if node is None:
                raise  # not its word
            found = [p for w in told if "Error detected in" in str(w.message) for p in PLACE.findall(str(w.message))]
            places = tuple((file, int(number)) for file, number in found)
            line = innermost(places)
            where = "no line of the program" if line is None else f"{line[0]}:{line[1]}"
            return Said(words=f"NaN, backward of {node[1]}, {where}", op=meant(node[1]), line=line, places=places)
    return SILENT


def hooks_on_modules(run: Run) -> Said:
    """Run with a check of every module's outputs and gradients; it raises at the first that is not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a hook of a first module gets no gradient of its inputs
        try:
            run(watch_modules)
        except NotFinite as found:
            places = frames_of(found)
            return Said(words=str(found), module=found.module, line=innermost(places), places=places)
    return SILENT


def mode_on_operators(run: Run) -> Said:
    """Run under a mode that checks every operator's result; it raises at the first that is not finite."""
    try:
        with CheckEveryOperator():  # type: ignore[no-untyped-call]
            run(lambda model: None)
    except FloatingPointError as error:
        places = frames_of(error)
        line = innermost(places)
        where = "no line of the program" if line is None else f"{line[0]}:{line[1]}"
        return Said(words=f"{error}, {where}", op=meant(str(error)), line=line, places=places)
    return SILENT


def debug_underflow_overflow(run: Run) -> Said:
    """Run under transformers' DebugUnderflowOverflow; it prints the last modules and raises after the forward pass."""
    from transformers.debug_utils import DebugUnderflowOverflow

    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            run(DebugUnderflowOverflow)
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                raise  # not its word
            heads = FRAME_HEAD.findall(printed.getvalue())
            places = frames_of(error)
            module = heads[-1][0] if heads else None
            words = f"inf or nan around {' '.join(heads[-1])}" if heads else "inf or nan"
            return Said(words=words, module=module, line=innermost(places), places=places)
    return SILENT


def frames_of(error: BaseException) -> tuple[tuple[str, int], ...]:
    """Return (file, line) of every frame of a traceback, outermost first."""
    return tuple((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))


PEERS: Mapping[str, Callable[[Run], Said]] = {
    "detect_anomaly": anomaly_mode,
    "hooks on modules": hooks_on_modules,
    "mode on every operator": mode_on_operators,
    "DebugUnderflowOverflow": debug_underflow_overflow,
}


def in_torch(fault: Fault) -> Run:
    """Return the program of a fault in an ordinary loop with torch.autocast."""

    def run(attach: Callable[[nn.Module], Any]) -> None:
        case = fault.build()
        attach(case.model)
        list(plain_bad_steps(case))

    return run


# ------------------------------------------------------------------ judging


def meant(node: str) -> frozenset[str]:
    """Return the operators, in small letters without underscores, that a node of the graph may belong to."""
    name = plain(node)
    return frozenset({name} | {op for op, nodes in NODES.items() if name in nodes})


def plain(name: str) -> str:
    return name.lower().replace("_", "").replace(".", "").removeprefix("linalg")


def innermost(places: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the last of the places that lies in a fault's program, as (file name, line)."""
    own = [(Path(f).name, n) for f, n in places if PROGRAMS in Path(f).parents and Path(f).name not in FRAME]
    return own[-1] if own else None


def judged(said: Said, fault: Fault) -> dict[str, Any]:
    """Return what was said and which parts of it are right."""
    truth, marked = fault.truth, marked_line(fault)
    assert marked is not None
    right = {plain(name) for name in (truth.op, *truth.also)}
    return {
        "words": said.words,
        "op": bool(right & {plain(name) for name in said.op}),
        "module": said.module is not None and said.module in (truth.module, *truth.also),
        "line": said.line == marked[:2],
    }


def instruments(fault: Fault) -> dict[str, Callable[[], Said]]:
    """Return every instrument, ready to be asked about a fault."""
    peers = {name: partial(peer, in_torch(fault)) for name, peer in PEERS.items()}
    return {OURS: partial(halfstep, fault), **peers}


def asked() -> list[Fault]:
    """Return the faults that every instrument is tried on."""
    faults = (*LIST_A, *SECOND_A)
    return [fault for fault in faults if fault.plain and fault.truth.op and marked_line(fault) is not None]


def answer(ask: Callable[[], Said]) -> Said:
    """Ask an instrument; a program that fails otherwise because it is watched is no answer, and told as such."""
    try:
        return ask()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Said(words=f"fails: {type(error).__name__}: {first}")


def compared(faults: Iterable[Fault]) -> dict[str, Any]:
    """Return the report of every instrument on every fault."""
    rows = {}
    for fault in faults:
        truth, marked = fault.truth, marked_line(fault)
        assert marked is not None
        rows[fault.name] = {
            "set": "second" if fault in SECOND_A else "first",
            "truth": {
                "kind": truth.kind,
                "op": truth.op,
                "module": truth.module,
                "phase": truth.phase,
                "line": f"{marked[0]}:{marked[1]}",
                "text": marked[2],
                "about": fault.about,
            },
            "said": {name: judged(answer(ask), fault) for name, ask in instruments(fault).items()},
        }
    return {"instruments": [OURS, *PEERS], "shown": [name for name in SHOWN if name in rows], "rows": rows}
