"""Remedies: what would help against a finding, in words and, where one does, as a policy."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.formats import FP32, format_of
from halfstep.lens.audit.rows import Row
from halfstep.lens.finding import Finding
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.policy.scale_rule import ScaleRule

__all__ = ["Doctor"]


class Doctor:
    """Makes findings and their remedies.

    Args:
        rows: of an audit, in the order in which operators ran.
        policy: what was audited.
        plan: what it means for the model.
        headroom: bits below the largest number of a format that are a risk.
    """

    def __init__(self, rows: tuple[Row, ...], policy: Policy, plan: Plan, headroom: float) -> None:
        self.rows, self.policy, self.plan, self.headroom = rows, policy, plan, headroom

    def of(self, *roles: str) -> Iterator[Row]:
        """Iterate over the rows of some roles."""
        return (row for row in self.rows if row.role in roles)

    def finding(
        self, kind: str, row: Row, severity: float, cause: str, remedy: str, policy: Policy | None = None
    ) -> Finding:
        """Return a finding in the place of `row`."""
        diff = "" if policy is None else self.policy.diff(policy)
        if not diff:
            policy = None
        return Finding(
            kind=kind,
            module=row.module,
            op=row.op,
            role=row.role,
            parameter=row.parameter,
            line=row.line,
            severity=min(max(severity, 0.0), 1.0),
            cause=cause,
            remedy=remedy,
            policy=policy,
            diff=diff,
        )

    # ------------------------------------------------------------------ remedies

    def wider(self, row: Row) -> tuple[str, Policy | None]:
        """Return how to keep an operator out of the low format."""
        if row.op == "to" and not row.module and self.plan.policy.inputs == "low":
            return "let the inputs come as they are", self.policy.replace(inputs="keep")
        if row.op == "to" or row.rule not in {"low", "keep", "widest"}:
            if format_of(row.format).bits >= FP32.bits:
                return "its inputs are fp32 already; compute it in float64, or write it in another way", None
            if row.op != "to" and row.module:
                policy = self.policy.with_modules({row.module: "fp32"})
                return f"keep module {row.module!r} in fp32", policy
            if row.op != "to" and "::" not in row.op:
                return f"give {row.op} fp32", _with_fp32(self.policy, row.op)
            return "your code asks for the low format here: leave the cast out, and let the policy decide", None
        if row.module:
            return (
                f"keep module {row.module!r} in fp32, or the operator everywhere: policy.with_ops(fp32=[{row.op!r}])",
                self.policy.with_modules({row.module: "fp32"}),
            )
        return f"give {row.op} fp32", _with_fp32(self.policy, row.op)

    def line_wider(self, row: Row) -> tuple[str, Policy | None]:
        """Return how to keep all of the line that an operator stands in out of the low format."""
        if row.module:
            return f"keep module {row.module!r} in fp32", self.policy.with_modules({row.module: "fp32"})
        ops = list(dict.fromkeys(r.op for r in self.of("activation") if r.line == row.line and "::" not in r.op))
        return f"give {', '.join(ops)} fp32, or this line a region in fp32", _with_fp32(self.policy, *ops)

    def scaled(self, row: Row) -> tuple[str, Policy | None]:
        """Return how to lift gradients into the format."""
        form = format_of(row.format)
        if form.exponent_bits >= FP32.exponent_bits:
            form = format_of(self.plan.policy.dtype)
        scale = self.plan.policy.scale
        if not isinstance(scale, ScaleRule):
            if self.policy.dtype != "fp32" and form.exponent_bits < FP32.exponent_bits:
                return "scale the loss: the rule 'halfstep' starts high and adapts", self.policy.replace(
                    scale="halfstep"
                )
            return "scale the loss", self.policy.replace(scale="halfstep")
        return (
            "the range of these gradients is wider than the format's: use bf16, whose exponents are fp32's, or keep "
            f"{row.module or row.op!r} in fp32",
            self.policy.replace(dtype="bf16", scale="auto"),
        )


def _with_fp32(policy: Policy, *ops: str) -> Policy | None:
    try:
        return policy.with_ops(fp32=ops)
    except ValueError:  # no operator of torch: a custom one without a name, a conversion
        return None
