"""Black box: why a step was not finite, and under which policy it would have been.

`StepBox` looks after a `TrainStep`, `BlackBox` after a loop written by hand. A step that is not finite only because a
dynamic scale is on its way down is left alone; any other is replayed with instruments (`trace`), its first cause named
(`diagnose`), small changes of policy are tried by replay (`cures`), and evidence is kept if somebody gave a folder.
"""

from __future__ import annotations

import logging
import weakref
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
from halfstep.lens.cures import cures, rebound, with_rules
from halfstep.lens.diagnose import Subject, diagnose
from halfstep.lens.evidence import load_evidence, save_evidence, window_of
from halfstep.lens.replay import Replay
from halfstep.lens.trace import extremes
from halfstep.lens.trouble import Seen, Trouble
from halfstep.policy.policy import Policy
from halfstep.step.bind import binding_of
from halfstep.step.memory import Kept, Memory
from halfstep.step.prepare import prepared_policy, unwrap
from halfstep.step.train_step import TrainStep

__all__ = ["BlackBox", "StepBox", "replay"]

LOG = logging.getLogger("halfstep")

LOW_SCALE = 2.0**8
"""A dynamic scale above it is on its way down; no remark on a step that overflows under it."""

MOST_REPLAYS = 16
"""Explanations made without being asked, in the life of one box."""

LOOK_EVERY = 10
"""Steps of a streak between two looks at weights and optimizer state."""


class _Box:
    """What both boxes do."""

    def __init__(self, evidence: Path | None) -> None:
        self.verdict: Verdict | None = None
        self._evidence = evidence
        self._written: list[Path] = []
        self._trouble = Trouble()
        self._replays = 0
        self._said: set[str] = set()

    def explain_subject(self, subject: Subject) -> Verdict:
        """Replay, name the cause, look for cures, keep the evidence."""
        try:
            verdict, attempt = diagnose(subject)
        except Exception as error:
            raise StepError(f"the replay of step {subject.step} failed: {type(error).__name__}: {error}") from error
        if subject.foreign and attempt.trace is not None:
            low = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(attempt.trace.low)  # type: ignore[arg-type]
            subject.policy = None if low is None else Policy.of("torch", dtype=low)
        try:
            verdict = replace(verdict, cures=cures(subject, verdict, attempt))
        except Exception as error:  # the cause is known; what would help is not
            verdict = replace(verdict, notes=(*verdict.notes, f"no cure was looked for: {error}"))
        self.verdict = verdict
        if self._evidence is not None:
            said = save_evidence(self._evidence, subject, verdict, self._written)
            if not said.endswith(".pt"):
                self._say("evidence", said)
        return verdict

    def _announce(self, verdict: Verdict) -> None:
        self._say(f"{verdict.kind} {verdict.op} {verdict.module} {verdict.phase}", verdict.headline)

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            LOG.warning("black box: %s", text)


class StepBox(_Box):
    """The black box of one TrainStep, made when one of its steps is not finite.

    Attributes:
        verdict: the last one, or None.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step._evidence)
        self._step = weakref.ref(step)
        self._for = 0  # the step `verdict` is about

    @property
    def step(self) -> TrainStep:
        """The TrainStep."""
        step = self._step()
        assert step is not None
        return step

    def fine(self) -> None:
        """Take note of an applied step."""
        self._trouble.fine()

    def bad(self) -> None:
        """Look at a step that was not applied; training goes on whatever happens here."""
        step = self.step
        try:
            for text in self._trouble.see(self._seen()):
                LOG.warning("black box: %s", f"step {step._step}: {text}")
            matters = self._together(self._matters())
            if matters and self._trouble.streak == 1 and self._replays < MOST_REPLAYS and self._for != step._step:
                self._replays += 1
                self._announce(self._shared(self._explained()))
        except Exception as error:
            self._say("failed", f"step {step._step} was not finite, and {type(error).__name__}: {error}")

    def explain(self) -> Verdict:
        """Return the verdict on the last step that was not applied."""
        step = self.step
        if step._memory is None:
            raise StepError("explain(): this TrainStep was built with blackbox=False and keeps nothing to replay")
        pending = step._pending
        if pending is not None and bool(pending):
            return self._explained() if self.verdict is None or self._for != step._step else self.verdict
        if self.verdict is None:
            raise StepError(
                "explain(): there is no step to explain: the last one was applied, or nothing has run; call it after a "
                "step whose result.skipped is true, before the next one"
            )
        return self.verdict

    # ------------------------------------------------------------------ what is known without a replay

    def _scaling(self) -> str:
        scaler = self.step.scaler
        return "none" if not scaler.is_enabled() else "static" if scaler.rule.is_static else "dynamic"

    def _losses_finite(self) -> bool:
        memory = self.step._memory
        return all(k.loss is None or extremes(k.loss)[1] for k in (memory.window if memory is not None else ()))

    def _matters(self) -> bool:
        """Return whether there is more to the last step than a dynamic scale on its way down."""
        if self.step._memory is None:
            return False
        return self._scaling() != "dynamic" or float(self.step._scale) <= LOW_SCALE or not self._losses_finite()

    def _seen(self) -> Seen:
        step = self.step
        look = self._trouble.streak % LOOK_EVERY == 1
        state = True
        if look:
            held = [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
            state = all(extremes(t)[1] for t in (*unwrap(step.model).parameters(), *held))
        return Seen(
            loss_finite=self._losses_finite(),
            scaling=self._scaling(),
            scale=float(step._scale),
            floor=step.scaler.rule.floor,
            low=step.policy.dtype,
            state_finite=state,
        )

    # ------------------------------------------------------------------ replay

    def _explained(self) -> Verdict:
        step = self.step
        memory = step._memory
        assert memory is not None
        model = unwrap(step.model)
        if any(hasattr(p, "placements") for p in model.parameters()):
            raise StepError("its parameters are sharded, and a replay on one rank would wait for the others")

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            return step._forward(model, batch, named)[0]

        subject = Subject(
            replay=Replay(model, forward, memory.window, memory.buffers),
            model=model,
            optimizer=step.optimizer,
            policy=prepared_policy(model),
            under=lambda policy: rebound(model, policy),
            scaling=self._scaling(),
            scale=float(step._scale),
            step=step._step,
            rank=_rank(),
        )
        self._for = step._step
        return self.explain_subject(subject)

    # ------------------------------------------------------------------ ranks

    def _together(self, matters: bool) -> bool:
        """Let the ranks of DistributedDataParallel, which all know of the step, agree on whether to look at it."""
        group = self._group()
        if group is None:
            return matters
        flag = torch.tensor(float(matters), device=next(self.step.model.parameters()).device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group[0])
        return bool(flag)

    def _shared(self, mine: Verdict) -> Verdict:
        """Return the verdict of the first rank whose own replay was not finite."""
        group = self._group()
        if group is None:
            return mine
        found: list[Any] = [None] * torch.distributed.get_world_size(group[0])
        torch.distributed.all_gather_object(found, mine, group=group[0])
        bad = [v for v in found if v is not None and v.kind != "not_reproducible"]
        self.verdict = bad[0] if bad else mine
        return self.verdict

    def _group(self) -> tuple[Any] | None:
        if not isinstance(self.step.model, nn.parallel.DistributedDataParallel):
            return None
        return (self.step.model.process_group,)


def _rank() -> int:
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if here else 0


class BlackBox(_Box):
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
        if optimizer is not None:
            self._handle = optimizer.register_step_pre_hook(self._before_update)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Return ``loss_fn(model, *batch, **named)`` and remember the call."""
        self._read()
        self.step += 1
        self._memory.begin(self.step)
        kept = self._memory.keep(batch, named)
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
        if self._memory.window and self._memory.window[0] is kept:
            kept.seed = gradient.detach()
            torch.autograd.Variable._execution_engine.queue_callback(self._look)

    def _look(self) -> None:
        self._memory.end()
        kept = self._memory.window[0]
        gradients = [p.grad for p in unwrap(self.model).parameters() if p.grad is not None and not p.grad.is_sparse]
        flags = [] if kept.loss is None else [kept.loss.float().abs()]
        with torch.no_grad():
            flags += [n.float() for n in torch._foreach_norm([g for g in gradients if g.is_floating_point()])]
            device = flags[0].device
            self._flag = ~torch.isfinite(torch.stack([f.reshape(()).to(device) for f in flags])).all()

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
            self._trouble.streak += 1
            if self._trouble.streak == 1 and self._replays < MOST_REPLAYS and self._matters():
                self._replays += 1
                self._announce(self._explained())
        except Exception as error:
            self._say("failed", f"step {self.step} was not finite, and {type(error).__name__}: {error}")
        self._flag = None

    def _matters(self) -> bool:
        kept = self._memory.window[0]
        if kept.loss is not None and not extremes(kept.loss)[1]:
            return True
        return abs(float(kept.seed)) <= LOW_SCALE if kept.seed is not None else True

    def _written_to(self) -> int:
        return sum(p._version for p in unwrap(self.model).parameters() if not p.is_inference())

    def _explained(self) -> Verdict:
        model = unwrap(self.model)
        seen = self

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
            returned = seen.loss_fn(model, *batch, **named)
            loss: Tensor = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
            return loss

        seed = self._memory.window[0].seed
        scale = 1.0 if seed is None else abs(float(seed))
        policy = prepared_policy(model)
        under: Callable[[Policy], AbstractContextManager[None]]
        if policy is None:
            under = lambda p: with_rules(model, p)  # noqa: E731
        else:
            under = lambda p: rebound(model, p)  # noqa: E731
        subject = Subject(
            replay=Replay(model, forward, self._memory.window, self._memory.buffers),
            model=model,
            optimizer=self.optimizer,
            policy=policy,
            under=under,
            scaling="dynamic" if scale > 1 else "none",
            scale=scale,
            step=self.step,
            rank=_rank(),
            foreign=policy is None,
        )
        self._for = self.step
        verdict = self.explain_subject(subject)
        if self._written_to() != self._versions:
            note = "the weights have been written to since: the replay ran with others than the step; pass optimizer="
            self.verdict = verdict = replace(verdict, notes=(*verdict.notes, note))
        return verdict


def replay(file: str | Path, task: Any) -> Verdict:
    """Replay the evidence in `file` on a new model of `task` and return the verdict.

    Args:
        file: a ``halfstep-blackbox-STEP.pt``.
        task: an `hs.Task`, whose model, loss function and optimizer are those of the run.

    Raises:
        StepError: no evidence, or weights that do not fit the task's model.
    """
    content = load_evidence(file)
    model = task.model()
    policy = None if content["policy"] is None else Policy.from_toml(content["policy"])
    step = TrainStep(model, task.optimizer(model), task.loss_fn, policy=policy or "O0")
    if content["model"]:
        try:
            model.load_state_dict(content["model"])
        except RuntimeError as error:
            raise StepError(f"the weights in {str(file)!r} do not fit the task's model: {error}") from error
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    memory = step._memory
    assert memory is not None and binding_of(model) is not None
    memory.window = window_of(content, device)
    modules = dict(model.named_modules())
    memory.buffers = [(modules[m], n, v.to(device)) for m, n, v in content["buffers"] if m in modules]
    step._step = int(content["step"])
    step._scale = torch.tensor(float(content["scale"]))
    return StepBox(step)._explained()

