"""Plan: count the bytes of a training step before training, and without its memory."""

from halfstep.advise.plan.memory import PARTS, PHASES, MemoryPlan, Moment, PlanError, Row
from halfstep.advise.plan.plan import plan, plan_each

__all__ = ["PARTS", "PHASES", "MemoryPlan", "Moment", "PlanError", "Row", "plan", "plan_each"]
