"""Black box: the box of a loop written by hand, and replays from evidence files. `stepbox` says what a box does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import StepError
from halfstep.events import Verdict
from halfstep.lens.diagnose import Subject
from halfstep.lens.evidence import load_evidence, load_weights, window_of
from halfstep.lens.replay import Replay
from halfstep.lens.stepbox import LOW_SCALE, MOST_REPLAYS, Box, StepBox, rank
from halfstep.lens.trials import rebound, with_rules
from halfstep.lens.trouble import Seen
from halfstep.lens.values import extremes
from halfstep.policy.policy import Policy
from halfstep.step.memory import Kept, Memory, Window
from halfstep.step.prepare import prepared_policy, unwrap
from halfstep.step.train_step import TrainStep

__all__ = ["BlackBox", "replay"]


class BlackBox(Box):
    """The black box of a loop written by hand, with halfstep's regions and scalers, with torch's, or with none.

    It calls the loss function in the loop's place, remembers what it was called with, and looks at the gradients once
    when the backward pass of the loss ends (one reading pass). What it saw is read at the next call, or, with
    `optimizer`, before that steps, so that weights are still those of the bad step.

    Example:
        >>> box = hs.BlackBox(model, loss_fn, optimizer)
        >>> for x, y in batches:
        ...     loss = box(x, y)  # loss_fn(model, x, y), which holds the `with torch.autocast(...)`
        ...     scaler.scale(loss).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     optimizer.zero_grad()

    Args:
        model: the model, prepared or not.
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``; a region belongs inside it.
        optimizer: what steps the model; looked at before it does.
        evidence: a folder for evidence files; None for none.

    Attributes:
        verdict: the last one, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer | None = None,
        *,
        evidence: str | Path | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise StepError(f"BlackBox: loss_fn must be callable as loss_fn(model, *batch) and is {loss_fn!r}")
        super().__init__(None if evidence is None else Path(evidence))
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.step = 0
        self._memory = Memory(unwrap(model))
        self._flag: Tensor | None = None
        self._for = 0
        self._versions = 0
        self._added = False  # whether gradients were there before the backward pass
        if optimizer is not None:
            self._handle = optimizer.register_step_pre_hook(self._before_update)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Return ``loss_fn(model, *batch, **named)`` and remember the call."""
        self._read()
        self.step += 1
        self._memory.begin()
        kept = self._memory.keep(self.step, batch, named)
        returned = self.loss_fn(self.model, *batch, **named)
        loss = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
        if isinstance(loss, Tensor) and loss.requires_grad:
            kept.loss = loss.detach()
            self._versions = self._written_to()
            loss.register_hook(lambda gradient: self._begin(kept, gradient))
        return returned

    def explain(self) -> Verdict:
        """Say why the last step was not finite; ``print(box.explain())`` is a report.

        Raises:
            StepError: the last step was finite, or nothing has run backward.
        """
        if self._for == self.step and self.verdict is not None:
            return self.verdict
        if self._flag is None or not bool(self._flag):
            if self.verdict is not None:
                return self.verdict
            raise StepError("explain(): there is no step to explain: the last one was finite, or has not run backward")
        return self._explained()

    def _begin(self, kept: Kept, gradient: Tensor) -> None:
        """Remember what a backward pass begins with, and look at the gradients when it ends."""
        if self._memory.window.batches and self._memory.window.batches[0] is kept:
            kept.seed = gradient.detach()
            self._added = any(p.grad is not None for p in unwrap(self.model).parameters())
            torch.autograd.Variable._execution_engine.queue_callback(self._look)

    def _look(self) -> None:
        kept = self._memory.window.batches[0]
        gradients = [p.grad for p in unwrap(self.model).parameters() if p.grad is not None and not p.grad.is_sparse]
        flags = [] if kept.loss is None else [kept.loss.float().abs()]
        with torch.no_grad():
            flags += [n.float() for n in torch._foreach_norm([g for g in gradients if g.is_floating_point()])]
            device = flags[0].device
            self._flag = ~torch.isfinite(torch.stack([f.reshape(()).to(device) for f in flags])).all()
        self._memory.end(self._flag, self._flag)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._read()

    def _read(self) -> None:
        """Look at what the last backward pass left, once."""
        flag = self._flag
        if flag is None or self._for == self.step:
            return
        if not bool(flag):
            self._flag = None
            self._trouble.fine()
            return
        try:
            self._see()
        except Exception as error:
            self._say("failed", f"step {self.step} was not finite, and {type(error).__name__}: {error}")
        self._flag = None

    def _see(self) -> None:
        """Look at a step that is not finite, in its gradients or in its loss alone."""
        model, kept = unwrap(self.model), self._memory.window.batches[0]
        finite = kept.loss is None or extremes(kept.loss)[1]
        if not finite and all(extremes(p.grad)[1] for p in model.parameters() if p.grad is not None):
            texts = self._trouble.lost()
            first = self._trouble.losses == 1
        else:
            self._trouble.skipped()
            policy, scale = prepared_policy(model), self._scale()
            seen = Seen(
                loss_finite=finite,
                scaling="dynamic" if scale > 1 else "none",
                scale=scale,
                floor=0.0,  # whoever scales knows it
                low="" if policy is None else policy.dtype,
                state_finite=finite or self._state_finite(model, self.optimizer),
            )
            texts = self._trouble.see(seen)
            first = self._trouble.streak == 1
        self._warn(self.step, texts)
        if first and self._replays < MOST_REPLAYS and (not finite or self._scale() <= LOW_SCALE):
            self._replays += 1
            self._announce(self._explained())

    def _scale(self) -> float:
        """Return what the backward pass began with; 1.0 if it has not begun."""
        seed = self._memory.window.batches[0].seed
        return 1.0 if seed is None else abs(float(seed))

    def _written_to(self) -> int:
        return sum(p._version for p in unwrap(self.model).parameters() if not p.is_inference())

    def _explained(self) -> Verdict:
        model = unwrap(self.model)
        seen = self

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            returned = seen.loss_fn(model, *batch, **named)
            loss: Tensor = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
            return loss

        scale = self._scale()
        policy = prepared_policy(model)
        under: Callable[[Policy], AbstractContextManager[None]]
        if policy is None:
            under = lambda p: with_rules(model, p)  # noqa: E731
        else:
            under = lambda p: rebound(model, p)  # noqa: E731
        subject = Subject(
            replay=Replay(model, forward, self._memory.window.batches, self._memory.window.buffers),
            model=model,
            optimizer=self.optimizer,
            policy=policy,
            under=under,
            scaling="dynamic" if scale > 1 else "none",
            scale=scale,
            step=self.step,
            rank=rank(),
            foreign=policy is None,
        )
        self._for = self.step
        verdict = self.explain_subject(subject)
        if self._written_to() != self._versions:
            note = "the weights have been written to since: the replay ran with others than the step; pass optimizer="
            self.verdict = verdict = replace(verdict, notes=(*verdict.notes, note))
        if self._added and verdict.kind == "not_reproducible":
            note = "its gradients were added to those of earlier backward passes, which were not finite or became so"
            self.verdict = verdict = replace(verdict, notes=(*verdict.notes, note))
        return verdict


def replay(file: str | Path, task: Any) -> Verdict:
    """Replay the evidence in `file` on a new model of `task` and return the verdict.

    Args:
        file: a ``halfstep-blackbox-STEP.pt``.
        task: an `hs.Task`, whose model, loss function and optimizer are those of the run.

    Raises:
        StepError: no evidence, no task, or weights that do not fit the task's model.
    """
    content = load_evidence(file)
    if not all(callable(getattr(task, needed, None)) for needed in ("model", "optimizer", "loss_fn")):
        raise StepError(f"replay takes an hs.Task of the run and got {type(task).__name__}")
    model = task.model()
    policy = None if content["policy"] is None else Policy.from_toml(content["policy"])
    step = TrainStep(model, task.optimizer(model), task.loss_fn, policy=policy or "O0")
    load_weights(model, content, file)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modules = dict(model.named_modules())
    buffers = [(modules[m], n, v.to(device)) for m, n, v in content["buffers"] if m in modules]
    scale = torch.tensor(float(content["scale"]))
    verdict = StepBox(step)._explained(Window(window_of(content, device), buffers, int(content["step"]), scale))
    if content["model"]:
        return verdict
    note = "the evidence holds no weights: the replay ran with those that the task's model begins with"
    return replace(verdict, notes=(*verdict.notes, note))
