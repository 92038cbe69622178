"""Verdict: why a step was not finite, from its root cause to the cures that were tried.

`kind` says what happened at the place, `cause` why: a place where fp16 overflows may have a learning rate as its cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CAUSES", "KINDS", "Cure", "Magnitude", "Verdict"]

KINDS = {
    "overflow": "a result is larger than the largest number of its format",
    "invalid": "the operator has no finite value there, in any format",
    "bad_batch": "the batch holds values that are not finite",
    "bad_state": "a parameter, a buffer or the optimizer's state was not finite before the step",
    "scale_too_high": "the gradients overflow because of the loss scale alone",
    "loop": "the training loop wrote values, or left values, that it should not have",
    "not_reproducible": "the replay is finite, or there was none",
}
"""Kind of a verdict -> what happened at the place."""

CAUSES = {
    "precision": "the low format: in fp32 the same steps are finite and train",
    "scale": "the setting of the loss scale",
    "divergence": "training ran away before this step: in fp32 it is lost too, now or a few steps later",
    "data": "a batch holds what cannot be trained on: inf, nan, outliers, labels out of range, rows all masked out",
    "model": "the code has no finite value or gradient there, in any format",
    "loop": "the order of calls in the training loop",
}
"""Root cause of a verdict -> what it means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Magnitude:
    """How large the numbers of one operator were; a row of a verdict's story.

    Attributes:
        op: public short name of the operator.
        module: dotted name of the module it was called in.
        line: the user's line that called it: "file.py:12 text".
        phase: "forward" or "backward".
        dtype: format of its result.
        largest: largest finite magnitude of its result; 0.0 if it holds none.
        limit: largest number of that format.
        finite: whether the whole result was finite.
    """

    op: str
    module: str
    line: str
    phase: str
    dtype: str
    largest: float
    limit: float
    finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change of policy for a step that went wrong.

    Attributes:
        policy: the whole policy with the change made, an `hs.Policy`; None where the change is none of a policy.
        text: the change in words and as a line of code.
        verified: whether training went on under it for some steps as it does in fp32, with finite buffers.
        outcome: what trying it showed, in words: "trained 12 steps, ...", "finite once: ..."; "" if it was not tried.
    """

    policy: Any
    text: str
    verified: bool
    outcome: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a step was not finite; printing it is a report. What is absent is "" or ().

    Attributes:
        kind: what happened at the place, one of `KINDS`.
        cause: why, one of `CAUSES`; "" if that is not known.
        because: what shows the cause, in one sentence with its numbers.
        sure: "shown" if a replay or the run itself shows the cause, "likely" if it is the best reading; "" without one.
        op: public short name of the operator that made the first non-finite value, such as "linear".
        module: dotted name of the module it was called in; "" for the root and for what no module calls.
        phase: "forward", "backward" or "update".
        line: the user's line that called it: "file.py:12 text".
        parameter: name of the parameter, buffer, optimizer state or input that was not finite, or that the format of
            the result cannot hold.
        dtypes: formats of the tensors it was given.
        shapes: their shapes.
        value: largest magnitude among them.
        limit: largest number of the format its result has; 0.0 if that does not matter.
        rank: rank of the process it happened on.
        ranks: all ranks on which the step was not finite, of those that make each step together; () if there are no
            others, or if the step was finite on each.
        step: the step of the TrainStep or BlackBox, from 1.
        cures: changes under which the step is finite, smallest first; then unverified advice.
        detail: the part of the headline that follows the place.
        notes: other observations.
        story: magnitudes of the operators that led to the place, in their order; the last row is the place.
    """

    kind: str
    cause: str = ""
    because: str = ""
    sure: str = ""
    op: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""
    parameter: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    value: float = 0.0
    limit: float = 0.0
    rank: int = 0
    ranks: tuple[int, ...] = ()
    step: int = 0
    cures: tuple[Cure, ...] = ()
    detail: str = ""
    notes: tuple[str, ...] = ()
    story: tuple[Magnitude, ...] = ()

    @property
    def where(self) -> str:
        """Operator, module and line in one phrase."""
        parts = [self.op, f"in {self.module}" if self.module else "", f"at {self.line}" if self.line else ""]
        return " ".join(part for part in parts if part)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        rank = f" on rank {self.rank}" if self.rank or self.ranks else ""
        return f"step {self.step}{rank}: {self._sentence()}"

    def _sentence(self) -> str:
        what = f"{self.phase} of {self.where}" if self.where else self.phase
        if self.kind == "overflow":
            limit = (
                f"; the largest input is {self.value:.6g}, the format ends at {self.limit:.6g}" if self.limit else ""
            )
            return f"overflow in {what}; {self.detail}" if self.detail else f"overflow in {what}{limit}"
        if self.kind == "invalid":
            return f"invalid operation in {what}: {self.detail or 'there is no finite result for these finite inputs'}"
        if self.kind == "bad_batch":
            return f"the batch is not finite: {self.parameter}" + (f": {self.detail}" if self.detail else "")
        if self.kind == "bad_state":
            return f"{self.parameter or 'the state'} is not finite before the step" + (f"; {what}" if self.op else "")
        if self.kind == "scale_too_high":
            return f"the loss scale is too high for {what}" + (f"; {self.detail}" if self.detail else "")
        return f"not reproducible: {self.detail or 'the replay of this step is finite'}"

    def __str__(self) -> str:
        """Return the report: one fact a line, then what to change."""
        lines = [f"halfstep black box, {self.headline}"]
        facts = [("cause", f"{self.cause}, {self.sure}: {self.because or CAUSES[self.cause]}" if self.cause else "")]
        facts += [("operator", self.op), ("module", self.module), ("line", self.line), ("phase", self.phase)]
        facts.append(("value of", self.parameter))
        facts.append(("ranks", ", ".join(map(str, self.ranks)) if len(self.ranks) > 1 else ""))
        if self.shapes:
            inputs = zip(self.dtypes, self.shapes, strict=True)
            facts.append(("inputs", ", ".join(f"{d} {list(s)}" for d, s in inputs)))
            facts.append(("largest", f"{self.value:.6g}" + (f", limit {self.limit:.6g}" if self.limit else "")))
        lines += [f"  {name:<9} {text}" for name, text in facts if text]
        for row in self.story:
            end = f"{row.largest:.4g}" if row.finite else "not finite"
            lines.append(f"  {row.op:<12} {row.module or 'the model':<20} {row.dtype:<9} {end:<10} of {row.limit:.4g}")
        lines += [f"  note      {note}" for note in self.notes]
        for cure in self.cures:
            mark = "cure, verified by replay" if cure.verified else "advice, not verified"
            lines.append(f"  {mark}: " + cure.text.replace("\n", "\n      "))
        return "\n".join(lines)
