"""Plan: count the bytes of a training step before training, and without its memory."""

from halfstep.advise.plan.fit import Fit, Largest, fit_of, largest_batch
from halfstep.advise.plan.gpus import Gpu, gpu_named, gpu_names
from halfstep.advise.plan.memory import PARTS, PHASES, MemoryPlan, Moment, PlanError, Row
from halfstep.advise.plan.planner import plan, plan_each
from halfstep.advise.plan.traffic import Sent

__all__ = [
    "PARTS", "PHASES", "Fit", "Gpu", "Largest", "MemoryPlan", "Moment", "PlanError", "Row", "Sent", "fit_of",
    "gpu_named", "gpu_names", "largest_batch", "plan", "plan_each",
]  # fmt: skip
