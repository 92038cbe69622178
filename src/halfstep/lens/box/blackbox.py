"""Black box: the box of a loop written by hand, and replays from evidence files; `stepbox` has what boxes share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.cast.regions.autocast import autocast, decorated
from halfstep.cast.state import STATE
from halfstep.errors import StepError
from halfstep.kernels.sharded import local
from halfstep.lens.box.cures import instead, rebound
from halfstep.lens.box.diagnose import Subject, low_of
from halfstep.lens.box.evidence import load_evidence, load_weights, window_of
from halfstep.lens.box.replay import Replay
from halfstep.lens.box.stepbox import CALL, LOW_SCALE, MOST_REPLAYS, UPDATE, Box, SkippedStep, StepBox, Topic, rank
from halfstep.lens.calls import extremes
from halfstep.policy.policy import Policy
from halfstep.step.prepare import prepared_policy, unwrap
from halfstep.step.record import History, MicroBatch, Window
from halfstep.step.statistics import Statistics
from halfstep.step.train_step import TrainStep
from halfstep.verdict import Verdict

__all__ = ["BlackBox", "replay"]

ORDINALS = count(1)
"""Numbers of the boxes of this process, by which ranks name them to each other."""

LISTED_EVERY = 16
"""The parameters of the model are listed every so many calls: walking it takes longer than all the rest."""


class BlackBox(Box):
    """The black box of a loop written by hand, with halfstep's regions and scalers, with torch's, or with none.

    It calls the loss function in the loop's place, keeps the arguments of the call, and reads the gradients once when
    the backward pass of the loss ends. The result is read at the next call or, with `optimizer`, before that steps, so
    that weights are still those of the bad step.

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
        loss_fn: ``loss_fn(model, *batch, **batch) -> loss`` or ``(loss, aux)``; a region may be inside it, or around
            the call of the box. Losses of a batch that are reduced later will do; None, and a loss without gradient,
            is ignored.
        optimizer: the optimizer of the loop; the box reads its verdict before each of its steps.
        evidence: a folder for evidence files; None for none.

    Attributes:
        verdict: the last one, or None.

    Raises:
        StepError: an argument of the wrong kind.
    """

    spelled = "box"

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer | None = None,
        *,
        evidence: str | Path | None = None,
    ) -> None:
        given: Any = model
        if not isinstance(given, nn.Module):
            own = "; a TrainStep has a black box of its own: step.explain()" if isinstance(given, TrainStep) else ""
            raise StepError(f"BlackBox: model must be a torch.nn.Module and is {given!r}{own}")
        if not callable(loss_fn):
            raise StepError(f"BlackBox: loss_fn must be callable as loss_fn(model, *batch) and is {loss_fn!r}")
        if optimizer is not None and not callable(getattr(optimizer, "register_step_pre_hook", None)):
            raise StepError(f"BlackBox: optimizer must be a torch.optim.Optimizer or None and is {optimizer!r}")
        if evidence is not None and not isinstance(evidence, (str, os.PathLike)):
            raise StepError(f"BlackBox: evidence must be a folder's path or None and is {evidence!r}")
        super().__init__(None if evidence is None else Path(evidence))
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.step = 0
        self._memory = History(unwrap(model), watched=True)
        self._statistics = Statistics(unwrap(model))
        self._flag: Tensor | None = None  # whether the loss or a gradient is not finite
        self._bad: Tensor | None = None  # whether a gradient is not finite
        self._explained_step = 0
        self._ordinal = next(ORDINALS)
        self._synced = True  # whether ranks average the gradients of the last call in its backward pass
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._around: list[AbstractContextManager[Any]] = []  # regions that the last call was made in
        self._added = False  # whether gradients were there before the backward pass
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_update)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Return ``loss_fn(model, *batch, **named)`` and keep the call.

        Raises:
            StepError: the loss cannot be told in what it returned.
        """
        self._read()
        self.step += 1
        self._memory.judged = None
        self._memory.begin()
        self._statistics.begin_window()
        self._around = _regions_here()
        self._synced = getattr(self.model, "require_backward_grad_sync", True)
        kept = self._memory.keep(self.step, batch, named)
        returned = self.loss_fn(self.model, *batch, **named)
        if self.step % LISTED_EVERY == 1:  # after the call, which may have made lazy ones
            found = unwrap(self.model).parameters()
            self._parameters = [p for p in found if not is_lazy(p) and not p.is_inference()]
        loss = _loss_in(returned)
        if loss is not None and loss.requires_grad and loss.numel():
            kept.loss = loss.detach()
            self._versions = [p._version for p in self._parameters]
            loss.register_hook(lambda gradient: self._begin(kept, gradient))
        return returned

    def explain(self) -> Verdict:
        """Return why the last step was not finite; ``print(box.explain())`` is a report.

        Raises:
            StepError: the last step was finite, or nothing has run backward.
        """
        if self._explained_step == self.step and self.verdict is not None:
            topic = self._topic(CALL) if self._missing else None
            return self.verdict if topic is None else self._again(topic)
        if self._flag is None or not bool(self._flag):
            if self.verdict is not None:
                return self.verdict
            raise StepError("explain(): there is no step to explain: the last one was finite, or has not run backward")
        return self._explained(CALL)

    def _begin(self, kept: MicroBatch, gradient: Tensor) -> None:
        """Keep the seed of a backward pass, and have the gradients read when it ends."""
        if self._memory.window.batches and self._memory.window.batches[0] is kept:
            kept.seed = gradient.detach()
            self._added = any(p.grad is not None for p in self._parameters)
            engine = torch.autograd.Variable._execution_engine
            # from within a callback: after those of DistributedDataParallel and fully_shard, which complete gradients
            engine.queue_callback(lambda: engine.queue_callback(self._look))

    def _look(self) -> None:
        """Note on the device whether loss and gradients are finite; raises nothing into the user's backward pass."""
        try:
            kept = self._memory.window.batches[0]
            with torch.no_grad():
                norms = _norms([_values(p.grad) for p in self._parameters if p.grad is not None])
                self._bad = _not_finite(norms)
                self._flag = self._bad if kept.loss is None else self._bad | _not_finite(_norms([kept.loss]))
            self._memory.end(self._flag, None)
            if kept.loss is not None and kept.loss.numel() == 1 and norms:
                versions = kept.loss._version, norms[0]._version
                self._memory.signals.recent.append((self.step, kept.loss, norms[0], versions, self._bad, kept.seed))
        except Exception as error:
            self._flag = None
            self._warn_once(
                "failed", f"the gradients of step {self.step} were not looked at: {type(error).__name__}: {error}"
            )

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._read()

    def _read(self) -> None:
        """Read the flag of the last backward pass, once."""
        flag = self._flag
        if flag is None or self._explained_step == self.step:
            return
        if not bool(flag):
            self._flag = None
            self._trouble.fine()
            return
        try:
            self._see()
        except Exception as error:
            self._warn_once("failed", f"step {self.step} was not finite, and {type(error).__name__}: {error}")
        self._flag = None

    def _see(self) -> None:
        """Examine a step that is not finite, in its gradients or in its loss alone."""
        model, kept = unwrap(self.model), self._memory.window.batches[0]
        finite = kept.loss is None or extremes(kept.loss)[1]
        if not finite and not self._gradients_bad():
            texts = self._trouble.lost()
            first = self._trouble.losses == 1
        else:
            self._trouble.skipped()
            scale = self._scale()
            seen = SkippedStep(
                loss_finite=finite,
                scaling="dynamic" if scale > 1 else "none",
                scale=scale,
                floor=0.0,  # not known here
                low=low_of(prepared_policy(model), model),
                state_finite=finite or self._state_finite(model, self.optimizer),
            )
            texts = self._trouble.see(seen)
            first = self._trouble.streak == 1
        self._warn(self.step, texts)
        if first and self._replays < MOST_REPLAYS:
            matters = self._scale() <= LOW_SCALE
            if matters or self._matters(self._topic(UPDATE), mine=not finite):
                self._replays += 1
                self._announce(self._explained(UPDATE))

    def _scale(self) -> float:
        """Return the largest value of the backward pass's seed; 1.0 if it has not begun."""
        seed = self._memory.window.batches[0].seed
        return 1.0 if seed is None else extremes(seed)[0]

    def _named_models(self) -> tuple[nn.Module, nn.Module, str]:
        return self.model, unwrap(self.model), f"box {self._ordinal}"

    def _topic(self, place: str) -> Topic | None:
        """Return the topic of a step whose gradients are bad, so that all ranks see it; None of any other."""
        shared = self._synced and self._gradients_bad() and self.exchange is not None
        return Topic(str(self.step), place) if shared else None

    def _gradients_bad(self) -> bool:
        return self._bad is not None and bool(self._bad)

    def _explained(self, place: str) -> Verdict:
        model = unwrap(self.model)

        def forward(batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
            with ExitStack() as stack:
                for region in self._around:
                    stack.enter_context(region)
                returned = self.loss_fn(model, *batch, **named)
            return returned[0] if isinstance(returned, tuple) else returned

        scale = self._scale()
        policy = prepared_policy(model)
        under = instead if policy is None else rebound
        buffers = [*self._memory.window.buffers, *self._statistics.kept()]
        subject = Subject(
            replay=Replay(model, forward, self._memory.window.batches, buffers),
            model=model,
            optimizer=self.optimizer,
            policy=policy,
            under=lambda tried: under(model, tried),
            scaling="dynamic" if scale > 1 else "none",
            scale=scale,
            step=self.step,
            rank=rank(),
            normed=False,
            foreign=policy is None,
            signals=self._memory.signals,
        )
        self._explained_step = self.step
        verdict = self.explain_subject(subject, self._topic(place))
        if [p._version for p in self._parameters] != self._versions:
            note = "the weights have been written to since: the replay ran with others than the step; pass optimizer="
            self.verdict = verdict = replace(verdict, notes=(*verdict.notes, note))
        if self._added and verdict.kind == "not_reproducible":
            note = "its gradients were added to those of earlier backward passes, which were not finite or became so"
            self.verdict = verdict = replace(verdict, notes=(*verdict.notes, note))
        return verdict


def _regions_here() -> list[AbstractContextManager[Any]]:
    """Return contexts that open the region that is open here again: halfstep's or torch's."""
    owner = STATE.frames[-1].owner() if STATE.frames else None
    if isinstance(owner, (autocast, decorated)):
        return [decorated(owner.recipe)]
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [torch.autocast(device, torch.get_autocast_dtype(device)) for device in on]


def _loss_in(returned: Any) -> Tensor | None:
    """Return the loss in what a loss function returned.

    Raises:
        StepError: there is none.
    """
    loss = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
    if loss is None or isinstance(loss, Tensor):
        return loss
    got = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, (tuple, list)) else "")
    raise StepError(f"BlackBox: loss_fn must return the loss, a tensor, or (loss, aux), and returned a {got}")


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient on this rank, whatever its layout."""
    gradient = local(gradient)
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.is_sparse else gradient.values()


def _norms(found: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitudes of tensors, in one tensor for each device and format."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in found:
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            kinds.setdefault((real.device, real.dtype), []).append(real)
    return [torch.stack(torch._foreach_norm(some, math.inf)) for some in kinds.values()]


def _not_finite(norms: list[Tensor]) -> Tensor:
    """Return a 0-dim bool: whether a value is not finite. Largest magnitudes show it, and cannot overflow."""
    flags = [~torch.isfinite(some).all() for some in norms]
    if len(flags) == 1:
        return flags[0]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()


def replay(file: str | Path, task: Any) -> Verdict:
    """Replay the evidence in `file` on a new model of `task` and return the verdict.

    Args:
        file: a ``halfstep-blackbox-STEP.pt``.
        task: an `hs.Task`, whose model, loss function and optimizer are those of the run.

    Raises:
        StepError: no evidence, no task, or weights that do not fit the task's model.
    """
    if not all(callable(getattr(task, needed, None)) for needed in ("model", "optimizer", "loss_fn")):
        raise StepError(f"replay takes an hs.Task of the run and got {type(task).__name__}")
    content = load_evidence(file)
    model = task.model()
    policy = None if content["policy"] is None else Policy.from_toml(content["policy"])
    step = TrainStep(model, task.optimizer(model), task.loss_fn, policy=policy or "O0")
    load_weights(model, content, file)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modules = dict(model.named_modules())
    buffers = [(modules[m], n, v.to(device)) for m, n, v in content["buffers"] if m in modules]
    if content.get("signals"):
        step.record.signals.restore(content["signals"])
    scale = torch.tensor(float(content["scale"]))
    verdict = StepBox(step)._explained(Window(window_of(content, device), buffers, int(content["step"]), scale))
    if content["model"]:
        return verdict
    note = "the evidence holds no weights: the replay ran with those that the task's model begins with"
    return replace(verdict, notes=(*verdict.notes, note))
