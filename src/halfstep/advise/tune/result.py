"""Result: what a search for a policy has found, as plain data. `search` makes it, `page` writes it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import halfstep as hs
from halfstep.advise.tune.page import commented, summary, tuning_page
from halfstep.advise.tune.proof import Proof
from halfstep.report import write_page
from halfstep.tasks.candidates import FP32
from halfstep.timing import Ratio


class TuneError(hs.HalfstepError, ValueError):
    """A search that cannot be made of these arguments, or a task that no policy can be found for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference of a candidate from its preset, and why."""

    field: str  # of the policy, such as "ops", "modules" or "residual"
    pattern: str = ""  # the operator or module, where the field has rules
    value: str | float  # the rule or the field's new value; in words in a `Tried`
    why: str  # one line for people: what was measured, and what the change saves or costs

    def __str__(self) -> str:
        """Return ``softmax keep``, or ``residual = low`` of a field without rules."""
        return f"{self.pattern} {self.value}" if self.pattern else f"{self.field} = {self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One candidate and what was measured of it.

    Attributes:
        error: relative error of the gradients against fp32 on the same weights and batch, the mean over the parameters,
            each at most 1; 0.0 for fp32, nan if not measured.
        loss_rise: how much higher the training loss ends than fp32's from the same start with the same batches, as a
            fraction of fp32's; inf if it is not finite, nan if not measured.
        verdict: "chosen", "within" (loss rise within the bound), "worse" (beyond it), "undecided", "slower" (not
            cheaper for certain, so that its loss was not judged), "saves" (saves alone, and was judged with other
            changes), "failed" (an error, no memory) or "unmeasured".
    """

    label: str  # its name, unique in a search: "fp32", "mixed bf16", "mixed bf16 + 2 rules"
    policy: hs.Policy  # what it trains under
    preset: str  # the preset that it starts from
    compile: bool = False  # whether its TrainStep has ``compile=True``
    changes: tuple[Change, ...] = ()  # its differences from the preset
    time: Ratio | None = None  # its step time over that of fp32, in paired rounds; None if it was not timed
    milliseconds: float = math.nan  # median time of a step; nan if it was not timed
    state_bytes: int = 0  # bytes between steps; 0 if not counted
    saved_bytes: int = 0  # bytes kept for the backward pass; 0 if not counted
    error: float = math.nan
    loss_rise: float = math.nan
    verdict: str = "unmeasured"
    reason: str = ""  # one sentence: why it was chosen or rejected
    predicted: float = math.nan  # step time over fp32's as its changes, each measured alone, made expect; nan without
    predicted_bytes: int = 0  # likewise, `bytes`; 0 without changes

    @property
    def bytes(self) -> int:
        """Bytes between steps and those kept for the backward pass."""
        return self.state_bytes + self.saved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What a search has found.

    Attributes:
        task: name of the task.
        chosen: the candidate that was chosen.
        tried: every candidate, fp32 first, then in the order in which they were tried; `chosen` is one of them.
        target: "time", "memory", or weights such as "0.7:0.3".
        bound: the largest loss rise that was allowed, a fraction of fp32's loss.
        bound_from: where the bound is from, in words.
        proof: the equivalence test of the choice; None if it was not made.
        proofs: every equivalence test that was made, (label, Proof), in order.
        control: fp32 over fp32 in the same rounds: what these timings cannot resolve; None if nothing was timed.
        steps: of the short trainings.
        seed: of the search.
        device: device type.
        machine: what decides the numbers: processor, versions, threads.
        advice: lines on what no policy can hold: linear_cross_entropy, checkpointing, compile.
        notes: what the reader should know: what was left out and what is missing for a decision.
        finished: whether the search came to its end; not after Ctrl-C or when the time was up.
        interrupted: whether Ctrl-C ended it.
        seconds: that the search took, all its parts together.
        command: the command line that made it, "" from Python.
    """

    task: str
    chosen: Tried
    tried: tuple[Tried, ...]
    target: str
    bound: float
    bound_from: str
    proof: Proof | None
    proofs: tuple[tuple[str, Proof], ...] = ()
    control: Ratio | None
    steps: int
    seed: int
    device: str
    machine: dict[str, Any] = field(hash=False)
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    finished: bool = True
    interrupted: bool = False
    seconds: float = 0.0
    command: str = ""

    @property
    def policy(self) -> hs.Policy:
        """The policy that was chosen."""
        return self.chosen.policy

    @property
    def is_fp32(self) -> bool:
        """Whether the choice computes in fp32, as what it is compared with does, and needs no proof."""
        return self.chosen.preset == "O0" and not self.chosen.compile

    @property
    def compile(self) -> bool:
        """Whether to give TrainStep ``compile=True`` with it."""
        return self.chosen.compile

    @property
    def fp32(self) -> Tried:
        """The candidate that the others are compared with."""
        return next((tried for tried in self.tried if tried.label == FP32), self.tried[0])

    def to_toml(self) -> str:
        """Return the policy as TOML, with comments: why each exception, what was rejected; `Policy.of` reads it."""
        return commented(self)

    def save_html(self, path: str | Path) -> None:
        """Write the search as one HTML file with pictures that needs nothing else."""
        write_page(tuning_page(self), path)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values; a policy is its TOML text."""
        made: dict[str, Any] = plain(self)
        return made

    def __str__(self) -> str:
        """Return the choice, what was tried, and the notes, as text."""
        return summary(self)


def plain(value: Any) -> Any:
    """Return `value` as plain values: dataclasses as dicts, policies as TOML, tuples as lists."""
    if isinstance(value, hs.Policy):
        return value.to_toml()
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
