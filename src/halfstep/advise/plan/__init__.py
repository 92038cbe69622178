"""Plan: count the bytes of a training step before training, and without its memory."""

from halfstep.advise.plan.ledger import PARTS, PHASES, PlanError, Sent
from halfstep.advise.plan.memory import (
    Fit,
    Gpu,
    Largest,
    MemoryPlan,
    Moment,
    Row,
    fit_of,
    gpu_named,
    gpu_names,
    largest_batch,
)
from halfstep.advise.plan.planner import plan, plan_each

__all__ = [
    "PARTS", "PHASES", "Fit", "Gpu", "Largest", "MemoryPlan", "Moment", "PlanError", "Row", "Sent", "fit_of",
    "gpu_named", "gpu_names", "largest_batch", "plan", "plan_each",
]  # fmt: skip
