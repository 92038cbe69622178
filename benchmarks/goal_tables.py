"""Tables of docs/tables/goals.md: each goal, and what was reached."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.goals import Goal
from benchmarks.markdown import table
from benchmarks.reports import Reports


def goal_row(goal: Goal, reports: Reports) -> list[str]:
    """Return a goal, its bound, what was reached and whether that is enough."""
    found = goal.read(reports)
    bound = f"{'at least' if goal.least else 'at most'} {goal.bound:g}"
    if found is None:
        return [goal.what, bound, "not measured", ""]
    reached = f"{found.value:.3g}" if goal.least or found.value >= 10 else f"{found.value:.3f}"
    if found.low is not None and found.high is not None:
        form = "{:.3g}" if goal.least else "{:.3f}"
        reached += f" [{form.format(found.low)}, {form.format(found.high)}]"
    if found.where:
        reached += f" ({found.where})"
    return [goal.what, bound, reached, "yes" if goal.met(found) else "**no**"]


def goal_table(reports: Reports, listed: Iterable[Goal]) -> str:
    return table(["number", "goal", "reached", ""], [goal_row(goal, reports) for goal in listed])
