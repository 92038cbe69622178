"""What a seeded precision fault is: a small program, and the truth about it, written before anything diagnosed it.

A fault is a function that returns a `Case`, decorated with its `Truth`. Its faulty source line ends with the comment
``# FAULT name``, so that file and line are found in the source (`marked_line`) and stay right when code moves.

An operator is named as the user called it (`hs.policy.operator_name`). The line is the innermost one that is neither
torch's nor halfstep's. The module is the innermost nn.Module whose forward was running. A cast that a policy inserts
belongs to the operator it was inserted for, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import halfstep as hs

HERE = Path(__file__).parent

MIXED = hs.Policy.of("mixed", dtype="fp16", scale=128.0)
UNSCALED = hs.Policy.of("mixed", dtype="fp16", scale=1.0)
TORCH = hs.Policy.of("torch", dtype="fp16", scale=128.0)
BF16 = hs.Policy.of("mixed", dtype="bf16")
FULL = hs.Policy.of("O0")

ALL = ("op fp32", "module fp32", "bf16")
"""The cures of what only fp16 is too small for."""

INF = float("inf")

Batch = Callable[[int], tuple[Any, ...]]
Edit = Callable[[int], None]


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
        steps: calls of the TrainStep until the fault has shown (or, for a control, has not); 0: as the entry says.
        options: keyword arguments of `hs.TrainStep`.
        before: called with the call number before it; plants bad state.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[..., Any]
    batch: Batch
    policy: hs.Policy
    steps: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    before: Edit = _nothing


Build = Callable[[], Case]


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
        cause: for list B: underflow | overflow | rounding | saturation | swallowed_update | low_state.
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
class Entry:
    """One program of the bench.

    Attributes:
        program: the function that returns the case.
        seed: of torch's generator before it; None if it sets one itself.
    """

    program: Build
    seed: int | None = None

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.program.__name__

    @property
    def about(self) -> str:
        """What happens in it."""
        return (self.program.__doc__ or "").strip()

    @property
    def file(self) -> Path:
        """The source file of the program."""
        return Path(self.program.__code__.co_filename)

    @property
    def default_steps(self) -> int:
        """Steps of a case that does not say how many."""
        return 4

    def build(self) -> Case:
        """Make the case anew."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        case = self.program()
        return case if case.steps else replace(case, steps=self.default_steps)


@dataclass(frozen=True, kw_only=True)
class Fault(Entry):
    """One entry of list A or B.

    Attributes:
        truth: about it.
        plain: whether torch alone, with torch.autocast in the same format, ends in the same non-finite step.
        measured: for list B: what measures the effect, and the least size that counts.
    """

    truth: Truth
    plain: bool = True
    measured: tuple[Measure, float] | None = None

    @property
    def list(self) -> str:
        """A ends in a non-finite step, B stays finite."""
        return "A" if self.measured is None else "B"

    @property
    def default_steps(self) -> int:
        """Steps up to the bad one."""
        return self.truth.step

    def effect(self) -> tuple[float, float]:
        """Return the measured size of the effect of a fault of list B, and the least size that counts."""
        assert self.measured is not None
        measure, least = self.measured
        return measure(self), least


Measure = Callable[[Fault], float]


@dataclass(frozen=True, kw_only=True)
class Control(Entry):
    """A healthy program.

    Attributes:
        scare: what looks bad in it and is not.
        skips: most steps that may be skipped on the way (a scale that finds its size).
    """

    scare: str
    skips: int = 0


# ------------------------------------------------------------------ declarations


def fault(
    kind: str,
    op: str = "",
    module: str = "",
    *,
    seed: int | None = None,
    plain: bool = True,
    effect: tuple[Measure, float] | None = None,
    **truth: Any,
) -> Callable[[Build], Fault]:
    """Decorate the function that returns a faulty case with the truth about it.

    Args:
        kind: the kind of list A or, with `effect`, the cause of list B.
        op: the operator to blame; its phase is forward if nothing else is said.
        module: the module it runs in.
        seed: as in `Entry`.
        plain: as in `Fault`.
        effect: `Fault.measured`; makes it a fault of list B.
        truth: the other fields of `Truth`.
    """
    said: dict[str, Any] = {"phase": "forward" if op else "", "kind": kind}
    if effect is not None:
        said = {"kind": "quiet", "cause": kind, "step": 1}
    known = Truth(op=op, module=module, **{**said, **truth})
    return lambda program: Fault(program=program, seed=seed, truth=known, plain=plain, measured=effect)


def control(scare: str, *, seed: int | None = None, skips: int = 0) -> Callable[[Build], Control]:
    """Decorate the function that returns a healthy case."""
    return lambda program: Control(program=program, seed=seed, scare=scare, skips=skips)


def classify(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the plainest loss."""
    return F.cross_entropy(model(x), y)


def case(
    model: Any,
    batch: Batch,
    loss_fn: Callable[..., Any] = classify,
    *,
    policy: hs.Policy = MIXED,
    lr: float = 1e-3,
    optimizer: Optimizer | None = None,
    **others: Any,
) -> Case:
    """Return a `Case`, trained by AdamW if no optimizer is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    return Case(model=model, optimizer=optimizer, loss_fn=loss_fn, batch=batch, policy=policy, **others)


class Assembled(nn.Module):
    """A module of named parts whose forward is a function ``forward(module, *inputs)``."""

    def __init__(self, forward: Callable[..., Any], parts: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the function."""
        return self.function(self, *inputs, **named)


def model_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """Return a module with these parts, whose forward is ``forward(module, *inputs)``."""
    return Assembled(forward, parts)


def at(step: int, edit: Callable[[], Any]) -> Edit:
    """Return a function for `Case.before` that calls `edit`, without gradients, before one step."""

    def before(number: int) -> None:
        if number == step:
            with torch.no_grad():
                edit()

    return before


# ------------------------------------------------------------------ seeded data


def generator(step: int) -> torch.Generator:
    """Return the generator of a call's batch."""
    return torch.Generator().manual_seed(1000 + step)


def normal(step: int, *shape: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=generator(step))


def labels(step: int, count: int, kinds: int = 4) -> Tensor:
    """Return labels, drawn by another generator than `tokens` of the same step."""
    return tokens(step + 500, (count,), kinds)


def tokens(step: int, shape: tuple[int, ...], high: int) -> Tensor:
    """Return whole numbers below `high`."""
    return torch.randint(0, high, shape, generator=generator(step))


# ------------------------------------------------------------------ running


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
