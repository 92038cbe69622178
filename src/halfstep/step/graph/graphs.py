"""cuda_graph=: a whole training step as one CUDA graph, replayed without Python.

Forward, backward, scaling, clipping, the optimizer and the scale's update wait for nothing, so all of it can be
captured. A call of the step with a new kind of batch runs eagerly `WARM_UPS` times, then it is captured and replayed;
warm-up calls, the call that captures and replays are all real steps, each on its own batch.

Note [what is baked in]: a graph repeats kernels, their arguments and addresses. What may change from call to call is
brought into static tensors before a replay: the batch, and the learning rate, which is a number in `param_groups` and a
tensor only while a graph is captured. Everything else that Python decides is either part of the key of a graph (shapes
and formats of the batch, what in it is no tensor, train or eval mode, which parameters are frozen) or a fact that all
graphs rest on (other hyperparameters, where parameters, buffers and the optimizer's state are): if a fact changes, all
graphs are dropped and made again.

Note [windows]: with `accumulate` above 1 there is a graph for the first micro-batch, one for those between and one for
the last with its update; what one leaves for the next is pinned (`pinned`), so that any first graph can go before any
last one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.cast.state import STATE
from halfstep.errors import StepError
from halfstep.events import StepResult
from halfstep.step.culprits import Culprits
from halfstep.step.graph.capturable import REMEDY, kind_of, place_of
from halfstep.step.graph.facts import Rates, facts_of
from halfstep.step.graph.recorder import Recorder, recorder_for
from halfstep.step.graph.static import Pins
from halfstep.step.prepare import unwrap
from halfstep.step.progress import REST, UPDATE, WINDOW
from halfstep.trees import map_tensors

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

__all__ = ["Graphs"]

LOG = logging.getLogger("halfstep.step")
WARM_UPS = 3  # what torch's notes on CUDA graphs take: libraries choose kernels and make workspaces in the first calls
KINDS = 8  # of batches that get graphs; each keeps its memory
RESETS = 3  # before it is said aloud that graphs are made again and again


@dataclass(slots=True)
class _Graph:
    """One graph: of one kind of batch at one place of a window.

    Attributes:
        calls: eager calls so far.
        replay: repeats what was captured; None before that.
        inputs: static tensors of the batch.
        outputs: what the step returned while it was captured, in static tensors.
        numbers: scale, gradient norm, all gradients' norms, and the loss if it is fp32, in one fp32 tensor.
        skipped: 0-dim bool.
        gradients: what the parameters hold afterwards.
        open: the statistics that wait for the verdict afterwards.
    """

    calls: int = 0
    replay: Callable[[], None] | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: StepResult | None = None
    numbers: Tensor | None = None
    skipped: Tensor | None = None
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    open: Any = None


class Graphs:
    """The graphs of one training step.

    Attributes:
        captures: how many graphs were captured so far.
        replays: how many calls were replays.
    """

    def __init__(self, step: TrainStep, device: torch.device) -> None:
        recorder = recorder_for(device)
        assert recorder is not None  # `refuse_graph` has looked
        self._step, self._device = step, device
        self._recorder: Recorder = recorder
        self._model = unwrap(step.model)
        step._statistics.blind = True
        self.captures = self.replays = self._resets = 0
        self._facts: Any = None
        self.reset()

    def reset(self) -> None:
        """Drop all graphs: whatever they rest on has changed."""
        self._graphs: dict[Hashable, _Graph] = {}
        self._kinds: set[Hashable] = set()
        self._pins = Pins()
        self._rates = Rates(self._device)
        self._full = False

    # ------------------------------------------------------------------ one micro-batch

    def __call__(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Train on one micro-batch: eagerly, or by a graph."""
        step = self._step
        found: list[Tensor] = []
        generators: list[torch.Generator] = []
        kind = (kind_of((batch, named), found, generators), self._modes())
        self._check_facts()
        graph, watched = self._graph_of(kind), self._watched()
        if graph is None or graph.calls < WARM_UPS or watched:
            batch, named = map_tensors((batch, named), self._moved)
            result = self._recorder.warm(lambda: self._pinned_step(batch, named))
            if graph is not None:
                graph.calls += 1
            return replace(result, scale=result.scale.clone())
        updates = step._window + 1 == step.accumulate
        if graph.replay is None:
            self._capture(graph, found, generators, batch, named, updates=updates)
        else:
            self.replays += 1
        self._bring(graph, found, updates=updates)
        return self._replayed(graph, updates=updates)

    def _watched(self) -> bool:
        """Return whether a watcher wants to look at the coming update, which then must not be a replay.

        Raises:
            StepError: a watcher that cannot say so.
        """
        for watcher in self._step.watchers:
            if not hasattr(watcher, "wants_update") or not hasattr(watcher, "pass_update"):
                raise StepError(
                    f"cuda_graph=True replays updates that a watcher cannot see, and {type(watcher).__name__} in "
                    f"step.watchers does not say which ones it wants; give it wants_update and pass_update, or {REMEDY}"
                )
        return any(watcher.wants_update() for watcher in self._step.watchers)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self._device else tensor.to(self._device, non_blocking=True)

    def _modes(self) -> Hashable:
        """Return what Python decides in models besides the batch."""
        modules = tuple([m.training for other in self._step._statistics.models for m in other.modules()])
        return modules, tuple([p.requires_grad for p in self._model.parameters()])

    def _graph_of(self, kind: Hashable) -> _Graph | None:
        """Return the graph for `kind` at this place of the window, a new one if there is room."""
        step = self._step
        if kind not in self._kinds:
            if len(self._kinds) >= KINDS:
                if not self._full:
                    self._full = True
                    warnings.warn(
                        f"cuda_graph=True: this is the {KINDS + 1}th kind of batch (shapes, formats, values that are "
                        f"no tensors), and graphs are kept for {KINDS}; the others run eagerly. Pad batches to fewer "
                        "shapes, and pass numbers that change as tensors",
                        stacklevel=4,
                    )
                return None
            self._kinds.add(kind)
        place = "first" if step._window == 0 else "last" if step._window + 1 == step.accumulate else "between"
        there = () if step._window == 0 else tuple([p.grad is not None for p in self._model.parameters()])
        return self._graphs.setdefault((kind, place, there), _Graph())

    def _pinned_step(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Take the step, and pin what it leaves for the next micro-batch; note [windows]."""
        step = self._step
        first = step._window == 0
        result = step._micro(batch, named)
        if step._window:
            if first:
                step._scale = self._pins.pinned_scale(step._scale)
            self._pins.pin_gradients(self._model.parameters())
        return result

    # ------------------------------------------------------------------ capture and replay

    def _capture(
        self,
        graph: _Graph,
        found: list[Tensor],
        generators: list[torch.Generator],
        batch: tuple[Any, ...],
        named: dict[str, Any],
        *,
        updates: bool,
    ) -> None:
        """Capture the step into `graph`; if that fails nothing has changed.

        Raises:
            StepError: something in the step waits for the device, or cannot be captured for another reason.
        """
        step = self._step
        graph.inputs = [
            torch.empty_like(t, device=self._device).copy_(t.detach()).requires_grad_(t.requires_grad) for t in found
        ]
        following = iter(graph.inputs)
        batch, named = map_tensors((batch, named), lambda tensor: next(following))
        before = (step._step, step._window, step._scale, step._pending, step._statistics.open, step.host_reads)
        held = [(p, p.grad) for p in self._model.parameters()]
        watchers, step.watchers = step.watchers, []  # what they do is not part of a step
        self._clear_casts()
        try:
            with self._rates.as_tensors(step.optimizer) if updates else nullcontext():
                graph.replay, (outputs, numbers, skipped) = self._recorder.capture(
                    lambda: _packed(self._pinned_step(batch, named), updates=updates), generators
                )
        except BaseException as error:
            step._progress.phase = WINDOW
            step._step, step._window, step._scale, step._pending, step._statistics.open, step.host_reads = before
            for parameter, gradient in held:
                parameter.grad = gradient
            step._abandon_update()
            if not isinstance(error, Exception) or isinstance(error, StepError):
                raise
            raise StepError(
                f"cuda_graph=True: the step cannot be captured{place_of(error)}. A graph allows nothing that the host "
                "must wait for or decide from values: no .item(), bool(tensor), print(tensor), nonzero, masks that "
                f"change a shape, copies to the CPU. Keep it on the device (torch.where), or {REMEDY}. Nothing was "
                f"trained on this batch. torch says: {type(error).__name__}: {str(error).strip()}"
            ) from error
        finally:
            step.watchers = watchers
            self._clear_casts()  # those made in a capture hold nothing yet
        graph.outputs, graph.numbers, graph.skipped = outputs, numbers, skipped
        graph.gradients = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        graph.open = step._statistics.open
        step._step, step._window = before[:2]  # `_done` counts
        step._progress.phase = WINDOW
        self.captures += 1
        LOG.info("TrainStep(cuda_graph=True): captured graph %d, inputs %s", self.captures, [*map(_shape, found)])

    @staticmethod
    def _clear_casts() -> None:
        torch.clear_autocast_cache()
        STATE.casts.clear()

    def _bring(self, graph: _Graph, found: list[Tensor], *, updates: bool) -> None:
        """Fill the static tensors that `graph` reads."""
        with torch.no_grad():
            for static, tensor in zip(graph.inputs, found, strict=True):
                static.copy_(tensor, non_blocking=True)
        if updates:
            self._step._check_rates()
            self._rates.fill(self._step.optimizer)

    def _replayed(self, graph: _Graph, *, updates: bool) -> StepResult:
        """Replay `graph`; with an update that is the critical part of a step (note [cut off] in `progress`)."""
        step = self._step
        assert graph.replay is not None
        if not updates:
            graph.replay()
            return self._done(graph, updates=False)
        with step._progress.critical:
            step._progress.phase = UPDATE
            graph.replay()
            result = self._done(graph, updates=True)
            step._progress.phase = REST
        for watcher in step.watchers:
            watcher.pass_update()
        step.scaler.check_alarm(step.optimizer)
        return result

    def _done(self, graph: _Graph, *, updates: bool) -> StepResult:
        """Do on the host what a replay does not, and return copies of its results."""
        step, static = self._step, graph.outputs
        assert static is not None and graph.numbers is not None and graph.skipped is not None
        number = step._step + step._window + 1
        step._step, step._window = (number, 0) if updates else (step._step, step._window + 1)
        step._statistics.open = graph.open
        for parameter in self._model.parameters() if updates else ():
            parameter.grad = None
        for parameter, gradient in graph.gradients:
            parameter.grad = gradient
        if not updates and self._pins.scale is not None:
            step._scale = self._pins.scale
        numbers, skipped = graph.numbers.clone(), graph.skipped.clone()
        exact = static.loss.dtype is torch.float32
        loss = numbers[-1].reshape(static.loss.shape) if exact else static.loss.clone()
        result = StepResult(
            step=number,
            loss=loss,
            aux=map_tensors(static.aux, lambda tensor: tensor.detach().clone()),
            scale=numbers[0],
            grad_norm=numbers[1],
            skipped=skipped,
            due=updates,
        )
        if updates:
            if isinstance(static.find_culprits, Culprits):
                result.find_culprits = replace(static.find_culprits, norms=numbers[2:-1])
            step._pending = result.skipped
            self._mark_written()
        return result

    def _mark_written(self) -> None:
        """Tell torch that fp32 parameters have changed, so that no low copy of an older value is taken for them.

        Low weights are counted by their store, which would take this for a change by hand.
        """
        store = self._step._store
        changed = [p for g in self._step.optimizer.param_groups for p in g["params"] if store is None or p not in store]
        torch.autograd.graph.increment_version(changed)
        torch.clear_autocast_cache()  # torch's own does not look at versions

    # ------------------------------------------------------------------ what graphs rest on

    def _check_facts(self) -> None:
        """Drop all graphs if anything they rest on has changed; note [what is baked in]."""
        step = self._step
        facts = facts_of(step)
        if self._facts is not None and facts != self._facts:
            changed = [name for name, value in facts.items() if self._facts[name] != value]
            if any(graph.replay is not None for graph in self._graphs.values()):
                self._tell_reset(" and ".join(changed))
            if step._window == 0:
                self.reset()
            else:
                raise StepError(f"cuda_graph=True: {' and '.join(changed)} changed within an accumulation window")
        self._facts = facts

    def _tell_reset(self, what: str) -> None:
        self._resets += 1
        LOG.info("TrainStep(cuda_graph=True): %s changed; graphs are made again", what)
        if self._resets == RESETS:
            warnings.warn(
                f"cuda_graph=True: graphs were dropped {RESETS} times because {what} changed, and a graph holds it "
                "fast; only the learning rate may change from step to step (OneCycleLR: cycle_momentum=False), or "
                f"{REMEDY}",
                stacklevel=5,
            )


def _packed(result: StepResult, *, updates: bool) -> tuple[StepResult, Tensor, Tensor]:
    """Bring the small results of a step into two tensors, so that copying them takes two launches."""
    parts = [result.scale, result.grad_norm]
    if isinstance(result.find_culprits, Culprits):
        parts.append(result.find_culprits.norms)
    numbers = torch.cat([part.reshape(-1).to(torch.float32) for part in (*parts, result.loss)])
    return result, numbers, result.skipped


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
