"""Settings of a training step: fixed when it is built, or in effect from the next window on; none is ignored.

Reading one costs no Python call: its value is an attribute with an underscore before the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.arguments import COUNT, check, fixed
from halfstep.binding.bind import binding_of
from halfstep.binding.construct import unchanged_on_failure
from halfstep.binding.prepare import prepare_with
from halfstep.binding.wrappers import unwrap, unwrap_optimizer
from halfstep.cast.copies import Copies
from halfstep.errors import SettingError, StepError
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.step.arguments import check_loss_function, check_optimizer, check_scheduler, limit
from halfstep.step.graph.capturable import refuse_graph
from halfstep.step.moments import Moments, Watchers
from halfstep.step.parts.in_backward import InBackward, in_backward
from halfstep.step.parts.record import Record
from halfstep.step.parts.retry import Retry
from halfstep.step.parts.scaling import Scaling
from halfstep.step.parts.unfinished import Unfinished
from halfstep.step.state import KEPT, refuse_window
from halfstep.update import optimizer_step
from halfstep.update import updater as update
from halfstep.update.updater import Updater

if TYPE_CHECKING:
    from halfstep.auto.choose import Choice

__all__ = ["Settings"]

ANEW = "build the TrainStep anew"


def _assigned(name: str, assign: Callable[[Any, Any], None]) -> Any:
    return property(attrgetter(f"_{name}"), assign)


def _set_clip(name: str, step: Any, value: object) -> None:
    found = limit(name, value)
    if found is not None and step.update_in_backward:
        raise SettingError(f"TrainStep.{name}: update_in_backward=True sees one gradient at a time; {ANEW}")
    vars(step)[f"_{name}"] = found


def _set_accumulate(step: Any, accumulate: int) -> None:
    check("TrainStep", StepError, accumulate=(accumulate, COUNT))
    if accumulate != step.accumulate:
        step._refuse_within("step.accumulate = ...")
        if step._compiled is not None or (step._unfinished is None and not step.cuda_graph):
            raise SettingError(f"TrainStep.accumulate: the step is compiled, or built for windows of one; {ANEW}")
    step._accumulate = int(accumulate)


def _set_loss_fn(step: Any, loss_fn: Callable[..., Any]) -> None:
    check_loss_function(loss_fn)
    if loss_fn is not step.loss_fn and (step.compile or step.cuda_graph):
        raise SettingError(f"TrainStep.loss_fn: the one there was is compiled, or captured in a graph; {ANEW}")
    step._loss_fn = loss_fn


def _set_scheduler(step: Any, scheduler: LRScheduler | None) -> None:
    check_scheduler(scheduler, step.optimizer)
    step._scheduler = scheduler


class Settings:
    """The public attributes of a `TrainStep`, and what happens when one is assigned."""

    _updater: Updater
    _moments: Moments
    _names: dict[int, str]
    _alone: bool
    _scaling: Scaling | None
    _retry: Retry | None
    _unfinished: Unfinished | None
    _in_backward: InBackward | None
    _settle: Callable[..., None]

    model: nn.Module = fixed("model", ANEW)
    policy: Policy = fixed("policy", f"{ANEW}, after hs.unprepare(model)")
    compile: bool | Mapping[str, Any] | None = fixed("compile", ANEW)
    cuda_graph: bool = fixed("cuda_graph", ANEW)
    retry: int = fixed("retry", ANEW, "_attempts")
    update_in_backward: bool = fixed("update_in_backward", ANEW)
    evidence: Path | None = fixed("evidence", f"{ANEW}: blackbox=folder")
    record: Record = fixed("record", "it counts what the step does; load a state by step.load_state_dict(...)")
    copies: Copies = fixed("copies", "step.copies.free() gives their memory back")
    choice: Choice | None = fixed("choice", f"{ANEW}: policy=...")
    ordinal: int = fixed("ordinal", "it follows from the order in which steps are built")
    scaler: GradScaler = fixed("scaler", f"{ANEW}: scaler=..., or step.scaler.load_state_dict(...)")
    watchers: Watchers = fixed("watchers", "change the list in place: step.watchers[:] = [...], append or remove")
    generic: str = fixed("generic", "it says why the last update went through optimizer.step()", "_updater.reason")
    host_reads: int = fixed("host_reads", "it counts how often an update waited for the device", "_record.host_reads")

    clip_norm: float | None = _assigned("clip_norm", partial(_set_clip, "clip_norm"))
    clip_value: float | None = _assigned("clip_value", partial(_set_clip, "clip_value"))
    accumulate: int = _assigned("accumulate", _set_accumulate)
    loss_fn: Callable[..., Any] = _assigned("loss_fn", _set_loss_fn)
    scheduler: LRScheduler | None = _assigned("scheduler", _set_scheduler)
    optimizer: Optimizer = _assigned("optimizer", lambda step, optimizer: step._replace_optimizer(optimizer))

    def _made_in_backward(self) -> InBackward | None:
        settings = {name: getattr(self, name) for name in KEPT} | {"alone": self._alone}
        return in_backward(unwrap(self.model), self._updater, self.record, self.watchers, settings)

    def _take_optimizer(self) -> None:
        """Refuse parameters without masters, and use the optimizer's fused form."""
        self._updater.refuse_replaced_parameters(self._names)
        if not any(getattr(m, "sparse", False) for m in unwrap(self.model).modules()):  # fused forms take none of those
            optimizer_step.prefer_fused(self.optimizer, self._updater.stepped_parameters())

    def _replace_optimizer(self, optimizer: Optimizer) -> None:
        """Train with another optimizer over parameters of the model from the next window on.

        Raises:
            StepError: in the middle of a window; or a scheduler of the old one is there: assign None to it before.
            BindError, StepError: as when a step is built with it. Nothing was changed.
        """
        optimizer, before = unwrap_optimizer(optimizer), self.optimizer
        check_optimizer(optimizer)
        if optimizer is before:
            return
        self._refuse_within("step.optimizer = ...")
        self._settle(wait=True)
        if getattr(self.scheduler, "optimizer", optimizer) is not optimizer:
            raise StepError(
                "step.scheduler moves the learning rate of the optimizer that is replaced; assign step.scheduler = "
                "None, then step.optimizer, then a scheduler of the new one"
            )
        if self.cuda_graph:
            refuse_graph(self.model, optimizer)
        binding = binding_of(unwrap(self.model))
        assert binding is not None
        in_backward = self._in_backward
        with unchanged_on_failure(self.model, optimizer):
            try:
                prepare_with(self.model, optimizer, binding.wanted, one_pass=update.suits(optimizer))
                self._use(optimizer)
                self._take_optimizer()
                if in_backward is not None:
                    self._in_backward = self._made_in_backward()
                    self._moments.has_written = (self._in_backward or self._updater).has_written
            except BaseException:
                self._use(before)
                self._in_backward = in_backward
                raise

    def _use(self, optimizer: Optimizer) -> None:
        vars(self)["_optimizer"] = optimizer
        self._updater.use(optimizer)
        for part in (self._scaling, self._retry, self._unfinished):
            if part is not None:
                part.optimizer = optimizer

    def _refuse_within(self, what: str) -> None:
        """Refuse `what` in the middle of a window, or in a state that was cut off."""
        self._moments.refuse(self.record.done)
        refuse_window(self, what, "assign it")
