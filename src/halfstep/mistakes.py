"""Mistakes in the order of a training loop's calls: one table of what each is, what it does and what to write instead.

The linter's rules (advise/lint), the verdicts on a loop that runs (lens/box/loop.py), the errors of a loss scaler
(scale/) and the page docs/verdicts/loop.md have their words from here. Each of them adds what it has seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake."""

    code: str  # "HS001" to "HS100" if the linter finds it in source, from "HS201" on if only a run shows it
    severity: str  # "error", "warning" or "note"
    title: str
    why: str  # what it does to training
    fix: str  # what to write instead

    @property
    def remedy(self) -> str:
        """The fix with the number, to stand behind what was seen."""
        return f"{self.fix[0].lower()}{self.fix[1:].rstrip('.').replace('`', '')} ({self.code})"


_TABLE = (
    Mistake(
        "HS001", "error", "gradients are clipped before unscale_",
        "The gradients are still multiplied by the loss scale, so the bound is thousands of times too small: after "
        "unscaling every step is close to zero.",
        "Call `scaler.unscale_(optimizer)` after the backward pass and before clipping.",
    ),
    Mistake(
        "HS002", "error", "update without a step",
        "torch raises: no gradients were checked since the last update.",
        "Call `scaler.update()` once an iteration, after the steps of all optimizers.",
    ),
    Mistake(
        "HS003", "error", "unscale_ twice",
        "torch raises: gradients are unscaled once between two updates, and step does it where unscale_ did not.",
        "Call `unscale_` once per step, just before clipping; with accumulation only in the micro-batch that ends a "
        "window; and call `update()` also after a step that is skipped by hand.",
    ),
    Mistake(
        "HS004", "error", "a scaler's step without update",
        "torch raises at the second step, and the scale never adapts.",
        "Call `scaler.update()` at the end of every iteration, after `scaler.step(optimizer)`.",
    ),
    Mistake(
        "HS005", "error", "the optimizer steps on scaled gradients",
        "Gradients are as many times too large as the scale, which Adam hides and SGD does not, and gradients that "
        "overflowed are applied: the weights become inf or NaN.",
        "Call `scaler.step(optimizer)` in its place, which divides and checks gradients, then `scaler.update()`.",
    ),
    Mistake(
        "HS006", "error", "a second step that nothing protects",
        "The same gradients are applied twice, and those of a step that the scaler skipped are applied by the second "
        "call.",
        "Delete one of the two steps; beside `scaler.step(optimizer)`, which checks gradients, delete "
        "`optimizer.step()`.",
    ),
    Mistake(
        "HS007", "error", "backward of a loss that is not scaled",
        "The scaler divides gradients by a scale that they were not multiplied with: torch raises if no loss was ever "
        "scaled, and else every update is thousands of times too small.",
        "Run `scaler.scale(loss).backward()` instead of `loss.backward()`.",
    ),
    Mistake(
        "HS008", "error", "update between the steps of two optimizers",
        "update may change the scale, and the second optimizer's gradients are then divided by another scale than "
        "they were multiplied with.",
        "Step all optimizers, then call `scaler.update()` once.",
    ),
    Mistake(
        "HS009", "error", "a closure under a loss scaler",
        "The closure runs its backward pass inside of the step: torch raises, or its gradients are never unscaled.",
        "Run forward and backward pass before the step; an optimizer that needs a closure (LBFGS) trains in bf16 or "
        "fp32 without a scaler, or with GradScaler(enabled=False).",
    ),
    Mistake(
        "HS010", "note", "the scheduler advances after skipped steps",
        "A step that overflows is skipped, and the learning rate moves on: a warm-up begins too late, and torch may "
        "warn of lr_scheduler.step() before optimizer.step().",
        "Compare the scale before and after `scaler.update()`, and step the scheduler if it did not fall; "
        "hs.TrainStep(scheduler=) does it.",
    ),
    Mistake(
        "HS034", "error", "gradients are never cleared",
        "All gradients since the start are summed. After the first overflow they stay inf, every step is skipped, and "
        "the loss scale falls to 0.",
        "Call `optimizer.zero_grad()` once for each update, also after one that was skipped.",
    ),
    Mistake(
        "HS035", "error", "gradients are cleared only where they are finite",
        "A gradient that is not finite stays, and every later sum is not finite either: no step runs again.",
        "Call `optimizer.zero_grad()` outside of the condition: once for each update, also after one that was skipped.",
    ),
    Mistake(
        "HS036", "warning", "clipping in every micro-batch",
        "The sum of the micro-batches before is clipped again and again, so early ones count for less; with a loss "
        "scale the second `unscale_` of a window raises.",
        "Unscale and clip once, in the micro-batch that ends the window.",
    ),
    Mistake(
        "HS038", "error", "an optimizer stepped beside hs.TrainStep",
        "The step unscales, clips and updates; a second `optimizer.step()` has no gradients, or those of another pass.",
        "Delete `optimizer.step()`.",
    ),
    Mistake(
        "HS201", "error", "gradients are cleared between the backward pass and the update",
        "The update has no gradients, so it changes nothing.",
        "Call `optimizer.zero_grad()` after the update, or before the backward pass.",
    ),
    Mistake(
        "HS202", "error", "the loss is scaled twice",
        "Gradients are divided by the scale once, so every update is as many times too large as the scale.",
        "Call `scaler.scale(loss)` once.",
    ),
    Mistake(
        "HS203", "error", "a backward pass after unscale_",
        "Scaled gradients are added to gradients that were divided by the scale already: no number unscales the sum.",
        "Run every backward pass before `unscale_()`, and call `update()` also after a step that you skip by hand.",
    ),
    Mistake(
        "HS204", "error", "BatchNorm's running statistics are not finite after a skipped step",
        "A skipped step leaves the weights as they are, its forward pass has written the statistics, and eval() reads "
        "them.",
        "Restore the statistics when a step is skipped, as hs.TrainStep does; reset them (`reset_running_stats()`) or "
        "load a checkpoint.",
    ),
)  # fmt: skip

MISTAKES: Mapping[str, Mistake] = MappingProxyType({mistake.code: mistake for mistake in _TABLE})
"""Number -> mistake."""
