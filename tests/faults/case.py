"""What a seeded precision fault is: a small program, and the truth about it, written before anything diagnosed it.

A fault is a function that builds a `Case`, decorated with its `Truth`. Its faulty source line ends with the comment
``# FAULT name``, so that file and line are found in the source (`marked_line`) and stay right when code moves.

Whose line, whose operator: an operator is named as the user called it (`operator_name`), the line is the innermost one
that is neither torch's nor halfstep's, the module is the innermost nn.Module whose forward was running. A cast that a
policy inserts belongs to the operator it was inserted for, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import halfstep as hs

__all__ = ["Case", "Control", "Fault", "Truth", "control", "fault", "generator", "marked_line", "run", "start"]

HERE = Path(__file__).parent


def _nothing(step: int) -> None:
    """Do nothing before a step."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training program, ready to run.

    Attributes:
        model: the model; `Case`s are built anew for each run.
        optimizer: over its parameters.
        loss_fn: ``loss_fn(model, *batch)``.
        batch: call number (from 1) -> batch; the same for the same number.
        policy: under which it is trained.
        steps: calls of the TrainStep until the fault has shown (or, for a control, has not).
        options: keyword arguments of `hs.TrainStep`.
        before: called with the call number before it; plants bad state.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    policy: hs.Policy
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[int], None] = _nothing


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a diagnosis has to say. Empty means that it is not asked for.

    Attributes:
        kind: overflow | invalid | bad_batch | bad_state | scale_too_high, and for list B quiet.
        step: number of the call whose loss or gradient is not finite, none before it (B: by which the effect is there).
        op: public short name of the producer. Empty where no operator is to blame (bad batch, bad state, scale).
        module: dotted path of the module it ran in; "" is the root, and a loss outside of every module.
        phase: forward | backward | update.
        parameter: the parameter or buffer that is bad (bad_state), or the one the effect is measured on (B).
        rank: the process whose values are bad; None where there is one process.
        cause: for list B: underflow | rounding | saturation | swallowed_update | low_state.
        role: for list B: activation | gradient | weight | update | state.
        cures: smallest policy changes each of which makes the step finite (`cured` carries them out); none for faults
            that stay in fp32.
        also: other names of the same operator or module that are right too: what a composite calls inside, a second
            path of a shared module.
    """

    kind: str
    step: int
    op: str = ""
    module: str = ""
    phase: str = ""
    parameter: str = ""
    rank: int | None = None
    cause: str = ""
    role: str = ""
    cures: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of list A or B.

    Attributes:
        name: of the function that builds it.
        list: "A" ends in a non-finite step, "B" stays finite.
        build: makes the case.
        truth: about it.
        plain: whether torch alone, with torch.autocast in the same format, ends in the same non-finite step.
        effect: for list B: measured size of the effect and the least size that counts.
    """

    name: str
    list: str
    build: Callable[[], Case]
    truth: Truth
    plain: bool = True
    effect: Callable[[], tuple[float, float]] | None = None

    @property
    def file(self) -> Path:
        """The source file of the program."""
        return Path(self.build.__code__.co_filename)


@dataclass(frozen=True, kw_only=True)
class Control:
    """A healthy program.

    Attributes:
        name: of the function that builds it.
        build: makes the case.
        skips: most steps that may be skipped on the way (a scale that finds its size).
        scare: what looks bad in it and is not.
    """

    name: str
    build: Callable[[], Case]
    scare: str
    skips: int = 0


def fault(
    list: str, *, plain: bool = True, effect: Callable[[], tuple[float, float]] | None = None, **truth: Any
) -> Callable[[Callable[[], Case]], Fault]:
    """Decorate the function that builds a faulty case with the truth about it."""

    def made(build: Callable[[], Case]) -> Fault:
        name = build.__name__
        return Fault(name=name, list=list, build=build, truth=Truth(**truth), plain=plain, effect=effect)

    return made


def control(scare: str, *, skips: int = 0) -> Callable[[Callable[[], Case]], Control]:
    """Decorate the function that builds a healthy case."""

    def made(build: Callable[[], Case]) -> Control:
        return Control(name=build.__name__, build=build, scare=scare, skips=skips)

    return made


def generator(step: int) -> torch.Generator:
    """Return the generator of a call's batch."""
    return torch.Generator().manual_seed(1000 + step)


def marked_line(fault: Fault) -> tuple[str, int, str] | None:
    """Return (file name, line number, text) of the line marked with a fault's name; None if none is."""
    for number, text in enumerate(fault.file.read_text(encoding="utf-8").splitlines(), 1):
        code, mark, name = text.partition("  # FAULT ")
        if mark and name.strip() == fault.name:
            return fault.file.name, number, code.strip()
    return None


def start(case: Case, policy: hs.Policy | None = None) -> hs.TrainStep:
    """Make the TrainStep of a case, under its policy or another one."""
    chosen = case.policy if policy is None else policy
    return hs.TrainStep(case.model, case.optimizer, case.loss_fn, policy=chosen, **case.options)


def run(case: Case, policy: hs.Policy | None = None) -> Iterator[tuple[hs.TrainStep, hs.step.HostStepResult]]:
    """Train a case call by call; yield the TrainStep and each result."""
    step = start(case, policy)
    for number in range(1, case.steps + 1):
        case.before(number)
        yield step, step(*case.batch(number)).host()


def cured(policy: hs.Policy, cure: str, truth: Truth) -> hs.Policy:
    """Return `policy` with the change that a cure's words stand for.

    ``op fp32`` and ``module fp32`` speak of the truth's own operator and module, ``op fp32: NAME`` of another one;
    ``bf16``; ``scale`` is a loss scale 2**12 times lower; ``loss fp32``.
    """
    what, _, name = cure.partition(": ")
    if what == "op fp32":
        return policy.with_ops(fp32=[name or truth.op])
    if what == "module fp32":
        return policy.with_modules({name or truth.module: "fp32"})
    if what == "bf16":
        return policy.replace(dtype="bf16", scale="none")
    if what == "loss fp32":
        return policy.replace(loss="fp32")
    if what == "scale" and isinstance(policy.scale, float):
        return policy.replace(scale=policy.scale * 2.0**-12)
    raise ValueError(f"no such cure for scale={policy.scale!r}: {cure!r}")
