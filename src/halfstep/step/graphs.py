"""cuda_graph=: a whole training step as one CUDA graph, replayed without Python.

A call of the step with a new kind of batch runs eagerly `WARM_UPS` times, then it is captured and replayed; all of
these calls are real steps, each on its own batch.

Note [warm-ups]: a warm-up calls the function that is captured, with the same static tensors, so that every kernel is
compiled and loaded before the capture, in which old drivers (before CUDA 12.3) refuse to load one. Triton makes another
kernel where an argument is None, or is a tensor that begins elsewhere; torch.compile guards strides.

Note [what is captured]: a graph repeats kernels, their arguments and addresses. What may change from call to call is
copied to static tensors before a replay: the batch, and the learning rate, which is a number in `param_groups` and a
tensor only in warm-ups and captures. Everything else that Python decides is either part of the key of a graph (shapes
and formats of the batch, what in it is no tensor, train or eval mode, which parameters are frozen) or a fact that all
graphs depend on (other hyperparameters, the addresses of parameters, buffers and optimizer state): if a fact changes,
all graphs are dropped and captured again.

Note [windows]: with `accumulate` above 1 there is a graph for the first micro-batch, one for those between and one for
the last with its update; what one leaves for the next is in static tensors, so that any first graph can precede any
last one.

`Graphs` uses the two methods of `CudaRecorder` and nothing else of CUDA graphs, so its bookkeeping can be tested on any
machine, with another recorder in `RECORDERS`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from halfstep.binding.wrappers import unwrap
from halfstep.cast.state import STATE
from halfstep.errors import StepError, lacks_memory, ours, warn
from halfstep.events import StepResult
from halfstep.kernels.eager.torch_fused import WITH_KERNELS
from halfstep.kernels.optimizers import optimizer_names
from halfstep.kernels.triton.tables import tables_of
from halfstep.optim import members
from halfstep.snapshot import Snapshot, cloned, gradients, noted
from halfstep.step.moments import Phase
from halfstep.torch_private.foreach import foreach_copy_
from halfstep.trees import map_tensors, opened
from halfstep.update.optimizer_step import can_fuse, is_fused, takes_predicate
from halfstep.update.updater import Culprits, unsuited
from halfstep.weights import UnkeptWeights

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

LOG = logging.getLogger("halfstep.step")
REMEDY = "leave cuda_graph out"
WARM_UPS = 3  # as in torch's notes on CUDA graphs: libraries choose kernels and make workspaces in the first calls
KINDS = 8  # of batches that get graphs; each keeps its memory
RESETS = 3  # before a warning that graphs are captured again and again
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of CUDA's driver
Work = Callable[[], tuple[StepResult, Tensor]]  # what is captured; it returns what `_packed` does
T = TypeVar("T")


@dataclass(slots=True)
class _Graph:
    """One graph: of one kind of batch at one place of a window."""

    calls: int = 0  # warm-ups so far
    replay: Callable[[], None] | None = None  # repeats what was captured; None before that
    inputs: list[Tensor] = field(default_factory=list)  # static tensors of the batch; made by the first call
    outputs: StepResult | None = None  # what the step returned while it was captured, in static tensors
    numbers: Tensor | None = None  # fp32: scale, gradient norm, all gradients' norms, and the loss if it is fp32
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # what parameters hold afterwards
    open: Any = None  # the statistics that wait for the verdict afterwards


class Graphs:
    """The graphs of one training step; `captures` and `replays` count them and the calls that were replays."""

    def __init__(self, step: TrainStep, device: torch.device) -> None:
        self._step, self._device, self._run = step, device, step._micro_batch
        self._moments, self._statistics, self._updater = step._moments, step._statistics, step._updater
        self._recorder = RECORDERS[device.type](device)  # `refuse_graph` has checked that there is one
        self._model = unwrap(step.model)
        self.captures = self.replays = self._resets = 0
        self._facts: Any = None
        self.reset()

    def reset(self) -> None:
        """Drop all graphs: something they depend on has changed."""
        self._graphs: dict[Hashable, _Graph] = {}
        self._kinds: set[Hashable] = set()
        self._models: dict[int, nn.Module] = {}  # those that ran: graphs read their tensors, so they stay
        self._scale: Tensor | None = None  # of a window, and gradients: note [windows]
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._rates: list[Tensor | None] = []  # of each group on the device, where graphs read it; None: it is there
        self._filled: list[float | None] = []
        self._full = False

    def __call__(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Train on one micro-batch: eagerly, or by a graph."""
        step = self._step
        found: list[Tensor] = []
        generators: list[torch.Generator] = []
        kind = (kind_of((batch, named), found, generators), self._modes())
        self._check_facts()
        graph, watched = self._graph_of(kind), self._watched()
        if graph is None or watched:
            batch, named = map_tensors((batch, named), lambda tensor: tensor.to(self._device, non_blocking=True))
            result = self._recorder.warm(lambda: self._static_step(batch, named))
            return replace(result, scale=result.scale.clone())
        updates = step.record.micro_batches + 1 == step.accumulate
        if graph.calls == 0:
            graph.inputs = [torch.empty_like(t, device=self._device).requires_grad_(t.requires_grad) for t in found]
        self._fill_inputs(graph, found, updates=updates)
        if graph.replay is not None:
            self.replays += 1
            return self._replayed(graph, updates=updates)
        following = iter(graph.inputs)
        batch, named = map_tensors((batch, named), lambda tensor: next(following))

        def work() -> tuple[StepResult, Tensor]:
            return _packed(self._static_step(batch, named))

        self._clear_casts()  # a copy made before would not be made in the graph
        if graph.calls < WARM_UPS:
            with self._rates_as_tensors(updates=updates):
                result, _ = self._recorder.warm(work)
            graph.calls += 1
            return replace(result, scale=result.scale.clone(), aux=cloned(result.aux))
        self._capture(graph, work, generators, updates=updates)
        return self._replayed(graph, updates=updates)

    def _watched(self) -> bool:
        """Return whether a watcher must see the coming update, which then cannot be a replay."""
        for watcher in self._step.watchers:
            if not hasattr(watcher, "wants_update") or not hasattr(watcher, "pass_update"):
                raise StepError(
                    f"cuda_graph=True replays updates that a watcher cannot see, and {type(watcher).__name__} in "
                    f"step.watchers does not say which ones it wants; give it wants_update and pass_update, or {REMEDY}"
                )
        return any(watcher.wants_update() for watcher in self._step.watchers)

    def _modes(self) -> Hashable:
        self._models.update((key, m) for key, other in self._statistics.models.items() if (m := other()) is not None)
        modules = tuple([m.training for other in self._models.values() for m in other.modules()])
        return modules, tuple([p.requires_grad for p in self._model.parameters()])

    def _graph_of(self, kind: Hashable) -> _Graph | None:
        """Return the graph for `kind` at this place of the window, a new one if there is room."""
        step = self._step
        if kind not in self._kinds:
            if len(self._kinds) >= KINDS:
                if not self._full:
                    self._full = True
                    warn(
                        f"cuda_graph=True: this is the {KINDS + 1}th kind of batch (shapes, formats, values that are "
                        f"no tensors), and graphs are kept for {KINDS}; the others run eagerly. Pad batches to fewer "
                        "shapes, and pass numbers that change as tensors"
                    )
                return None
            self._kinds.add(kind)
        before = step.record.micro_batches
        place = "first" if before == 0 else "last" if before + 1 == step.accumulate else "between"
        there = () if before == 0 else tuple([p.grad is not None for p in self._model.parameters()])
        return self._graphs.setdefault((kind, place, there), _Graph())

    def _static_step(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResult:
        """Take the step, and copy what it leaves for the next micro-batch to static tensors; note [windows]."""
        step = self._step
        first = step.record.micro_batches == 0
        result = self._run(batch, named)
        if step.record.micro_batches:
            if first:
                self._scale = step.record.scale.clone() if self._scale is None else self._scale
                step.record.scale = self._scale.copy_(step.record.scale)
            made = {p: p.grad for p in self._model.parameters() if p.grad is not None}
            for parameter, gradient in made.items():
                parameter.grad = self._gradients.setdefault(parameter, gradient)
            moved = [p for p, gradient in made.items() if self._gradients[p] is not gradient]
            if moved:
                foreach_copy_([self._gradients[p] for p in moved], [made[p] for p in moved])
        return result

    @contextmanager
    def _rates_as_tensors(self, *, updates: bool) -> Iterator[None]:
        """Replace learning rates by tensors that `_fill_rates` has filled, and mark the optimizer capturable."""
        groups = self._step.optimizer.param_groups if updates else []
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, tensor in zip(groups, self._rates, strict=False):
            if tensor is not None:
                group["lr"] = tensor
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable

    def _fill_rates(self) -> None:
        """Write the rates that have changed into the tensors that graphs read; waits for nothing."""
        groups = self._step.optimizer.param_groups
        if not self._rates:
            self._rates = [
                None if _on_device(group["lr"]) else torch.zeros((), dtype=torch.float32, device=self._device)
                for group in groups
            ]
            self._filled = [None] * len(groups)
        for i, (group, tensor) in enumerate(zip(groups, self._rates, strict=True)):
            if tensor is not None and (now := float(group["lr"])) != self._filled[i]:
                tensor.fill_(now)
                self._filled[i] = now

    def _capture(self, graph: _Graph, work: Work, generators: list[torch.Generator], *, updates: bool) -> None:
        """Capture `work` into `graph`; if that fails all is as before the call, and the next one is a warm-up."""
        step = self._step
        record, before, statistics = step.record, dict(vars(step.record)), self._statistics.open
        snapshot = Snapshot(noted(generators), gradients(self._model.parameters()))
        step.watchers.paused = True  # what they do is not part of a step
        try:
            with self._rates_as_tensors(updates=updates):
                graph.replay, (graph.outputs, graph.numbers) = self._recorder.capture(work, generators)
        except BaseException as error:
            self._moments.phase = Phase.MICRO_BATCH
            vars(record).update(before)
            self._statistics.open = statistics
            snapshot.restore()
            self._updater.abort(written=False)
            step.scaler.forget()
            graph.calls = WARM_UPS - 1  # the loss may be another one by then: a warm-up loads its kernels
            if not isinstance(error, Exception) or isinstance(error, StepError) or lacks_memory(error):
                raise
            raise StepError(
                f"cuda_graph=True: the step cannot be captured{place_of(error)}. A graph allows nothing that the host "
                "must wait for or decide from values: no .item(), bool(tensor), print(tensor), nonzero, masks that "
                f"change a shape, copies to the CPU. Keep it on the device (torch.where), or {REMEDY}. Nothing was "
                f"trained on this batch. torch says: {type(error).__name__}: {str(error).strip()}"
            ) from error
        finally:
            step.watchers.paused = False
            self._clear_casts()  # those made in a capture hold nothing yet
        graph.gradients = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        graph.open = self._statistics.open
        record.done, record.micro_batches = before["done"], before["micro_batches"]  # `_done` counts
        self._moments.phase = Phase.MICRO_BATCH
        self.captures += 1
        shapes = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in graph.inputs]
        LOG.info("TrainStep(cuda_graph=True): captured graph %d, inputs %s", self.captures, shapes)

    @staticmethod
    def _clear_casts() -> None:
        torch.clear_autocast_cache()
        STATE.casts.clear()

    def _fill_inputs(self, graph: _Graph, found: list[Tensor], *, updates: bool) -> None:
        with torch.no_grad():
            for static, tensor in zip(graph.inputs, found, strict=True):
                static.copy_(tensor, non_blocking=True)
                static.grad = None  # a warm-up's
        if updates:
            self._updater.check_optimizer()
            self._fill_rates()

    def _replayed(self, graph: _Graph, *, updates: bool) -> StepResult:
        """Replay `graph`; with an update that is the critical part of a step (note [cut off] in `moments`)."""
        step = self._step
        assert graph.replay is not None
        if not updates:
            graph.replay()
            return self._done(graph, updates=False)
        with self._moments.critical:
            self._moments.phase = Phase.UPDATE
            graph.replay()
            result = self._done(graph, updates=True)
            self._moments.phase = Phase.REST
        step.record.send_verdict()
        for watcher in step.watchers:
            watcher.pass_update()
        step.scaler.check_alarm(step.optimizer)
        return result

    def _done(self, graph: _Graph, *, updates: bool) -> StepResult:
        """Do the host's part of a replayed micro-batch; return copies of its results."""
        step, static = self._step, graph.outputs
        assert static is not None and graph.numbers is not None
        record = step.record
        number = record.done + record.micro_batches + 1
        record.done, record.micro_batches = (number, 0) if updates else (record.done, record.micro_batches + 1)
        self._statistics.open = graph.open
        for parameter in self._model.parameters() if updates else ():
            parameter.grad = None
        for parameter, gradient in graph.gradients:
            parameter.grad = gradient
        if not updates and self._scale is not None:
            step.record.scale = self._scale
        numbers, skipped = graph.numbers.clone(), static.skipped.clone()
        exact = static.loss.dtype is torch.float32
        loss = numbers[-1].reshape(static.loss.shape) if exact else static.loss.clone()
        aux = cloned(static.aux)
        result = StepResult(number, loss, aux, numbers[0], numbers[1], skipped, updates)
        if updates:
            if isinstance(static.find_culprits, Culprits):
                result.find_culprits = replace(static.find_culprits, norms=numbers[2:-1])
            step.record.bad = result.skipped
            self._mark_written()
        return result

    def _mark_written(self) -> None:
        """Count a write to fp32 parameters, whose low copies are stale now; a store counts low weights."""
        store = self._updater.store
        changed = [p for g in self._step.optimizer.param_groups for p in g["params"] if store is None or p not in store]
        torch.autograd.graph.increment_version(changed)
        UnkeptWeights.stepped(changed)
        torch.clear_autocast_cache()  # torch's own does not look at versions

    def _check_facts(self) -> None:
        """Drop all graphs if anything they depend on has changed; note [what is captured]."""
        step = self._step
        facts = facts_of(step)
        if self._facts is not None and facts != self._facts:
            changed = " and ".join(name for name, value in facts.items() if self._facts[name] != value)
            if any(graph.replay is not None for graph in self._graphs.values()):
                self._resets += 1
                LOG.info("TrainStep(cuda_graph=True): %s changed; graphs are made again", changed)
                if self._resets == RESETS:
                    warn(
                        f"cuda_graph=True: graphs were dropped {RESETS} times because {changed} changed, and a graph "
                        "cannot change it; only the learning rate may change from step to step (OneCycleLR: "
                        f"cycle_momentum=False), or {REMEDY}"
                    )
            if step.record.micro_batches:
                raise StepError(f"cuda_graph=True: {changed} changed within an accumulation window")
            self.reset()
        self._facts, self._state = facts, [one.state for one in members(step.optimizer)]  # kept alive: ids are facts


def _packed(result: StepResult) -> tuple[StepResult, Tensor]:
    """Bring the small results of a step, but for `skipped`, into one tensor: copying them takes two launches then."""
    parts = [result.scale, result.grad_norm]
    if isinstance(result.find_culprits, Culprits):
        parts.append(result.find_culprits.norms)
    numbers = torch.cat([part.reshape(-1).to(torch.float32) for part in (*parts, result.loss)])
    return result, numbers


def facts_of(step: TrainStep) -> dict[str, Any]:
    """Return what all graphs of `step` depend on, by its name in messages; waits for nothing."""
    groups = step.optimizer.param_groups
    model = unwrap(step.model)
    return {
        "a hyperparameter in param_groups": [
            [(k, id(v) if isinstance(v, Tensor) else v) for k, v in group.items() if k not in {"params", "lr"}]
            for group in groups
        ],
        "a learning rate that is a tensor": [id(g["lr"]) if _on_device(g["lr"]) else None for g in groups],
        "the place of a parameter or buffer": [t.data_ptr() for t in (*model.parameters(), *model.buffers())],
        "clipping or the scaler": (step.clip_norm, step.clip_value, step.accumulate, step.scaler.rule),
        "the optimizer's state": [id(optimizer.state) for optimizer in members(step.optimizer)],
    }


def _on_device(rate: object) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"


def refuse_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Refuse what cannot be captured, before anything is changed; return the model's device."""
    wrapper = type(model).__name__
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise StepError(
            f"cuda_graph=True captures one process on one device, and the model is in {wrapper}, which reduces "
            f"gradients over several; {REMEDY}"
        )
    inner = unwrap(model)
    for name, parameter in inner.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise StepError(f"cuda_graph=True and parameter {name} is sharded (DTensor); {REMEDY}")
    devices = sorted({str(p.device) for p in inner.parameters()})
    if len(devices) != 1 or torch.device(devices[0]).type not in RECORDERS:
        raise StepError(
            f"cuda_graph=True needs a model on one CUDA device and this one is on {', '.join(devices) or 'none'}; "
            f"move it with model.to('cuda') before the optimizer is made, or {REMEDY}"
        )
    for name, module in inner.named_modules():
        if getattr(module, "sparse", False):
            raise StepError(f"cuda_graph=True and module {name} has sparse gradients, whose size the host must read")
    for one in members(optimizer):
        if unsuited(one) and not any(able(one) for able in (is_fused, can_fuse, takes_predicate)):
            raise StepError(
                f"cuda_graph=True needs an optimizer that skips a bad step on the device, and {type(one).__name__} as "
                f"it is here does not: use {optimizer_names('or', WITH_KERNELS)}, with fused=True or with no form "
                f"chosen (foreach, capturable, differentiable) and without dampening, or {REMEDY}"
            )
    return torch.device(devices[0])


def kind_of(tree: Any, found: list[Tensor], generators: list[torch.Generator]) -> Hashable:
    """Return what distinguishes kinds of batches; put their tensors into `found`."""
    if isinstance(tree, Tensor):
        if tree.grad_fn is not None:
            raise StepError(
                f"cuda_graph=True: a tensor of the batch, shape {tuple(tree.shape)}, was computed with gradients, and "
                f"its history is outside the graph; pass it detached, compute it in loss_fn, or {REMEDY}"
            )
        found.append(tree)
        return tree.shape, tree.dtype, tree.requires_grad
    if isinstance(tree, torch.Generator):
        generators.append(tree)
    node = opened(tree)
    if node is not None:
        return type(tree), tuple([(name, kind_of(item, found, generators)) for name, item in node[0]])
    try:
        hash(tree)
    except TypeError:
        raise StepError(
            f"cuda_graph=True: the batch holds a {type(tree).__name__}, which cannot be compared from call to call; "
            f"pass tensors (torch.from_numpy), numbers or text, or {REMEDY}"
        ) from None
    return type(tree), tree


def place_of(error: BaseException) -> str:
    """Return " at file:line `text`" for the user's innermost line in the traceback of `error`, or ""."""
    passed = [f for f in extract_tb(error.__traceback__) if not ours(f.filename) and not f.filename.startswith("<")]
    return f" at {passed[-1].filename}:{passed[-1].lineno} `{passed[-1].line}`" if passed else ""


# ---------------------------------------------------------------------- what is recorded on a device


class CudaRecorder:
    """CUDA graphs, captured on one side stream, in one memory pool as long as there are any.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (torch 2.13). One pool is enough because the graphs
    of a training step never run at the same time, and none reads freed memory of another. torch refuses to capture into
    a pool whose graphs are gone, so the next one gets a new pool.

    Note [failed captures]: an operation that a capture forbids makes `CUDAGraph.capture_end` raise. Up to torch 2.13 it
    raises in its first call of CUDA and leaves what follows undone: torch's allocators still record into the pool, and
    its random generators still draw for a capture, so that every later draw and capture fails. Ending an empty capture
    of the same stream in its place does all of that; torch would begin one with a state of its own, so the driver
    begins it. torch 2.14 needs only `reset`. ``torch.cuda.graph`` is not used: it also leaves the side stream current
    (up to torch 2.14).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # those in the pool

    def warm(self, function: Callable[[], T]) -> T:
        """Call `function` on the side stream, in order with the work before and after it: what it does is done."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], T]:
        """Record what `function` does, which does not happen yet; if that fails, raise what it raised.

        Return what repeats it, and what `function` has returned.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # the pool can use none of what is cached
            with tables_of(graph, self._device):
                try:
                    # thread_local: a data loader's thread that pins memory meanwhile would end a "global" capture
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    result = function()
                except BaseException:
                    with suppress(Exception):
                        self._end(graph)
                    graph.reset()  # what was raised may keep it alive
                    raise
                self._end(graph)
        self._graphs.add(graph)
        return graph.replay, result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        torch.cuda.set_stream(self._stream)  # the function may have left another one current
        try:
            graph.capture_end()
        except Exception as error:
            if not hasattr(graph, "capture_end_pre"):
                self._end_instead(graph, error)
            graph.reset()
            raise

    def _end_instead(self, graph: torch.cuda.CUDAGraph, error: Exception) -> None:
        """End an empty capture in place of that of `graph`, which has ended with `error`; note [failed captures]."""
        try:
            mark = torch.zeros((), device=self._device)
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            status = driver.cuStreamBeginCapture_v2(ctypes.c_void_p(self._stream.cuda_stream), THREAD_LOCAL)
            if status:
                raise RuntimeError(f"cuStreamBeginCapture returned {status}")
            mark.zero_()  # torch warns of graphs without any work
            graph.capture_end()
        except Exception as again:
            LOG.warning(
                "a capture failed (%s) and torch's state could not be restored (%s): start the process anew before the "
                "next capture, or leave cuda_graph out",
                str(error).strip(),
                again,
            )


RECORDERS = {"cuda": CudaRecorder}
"""Type of a device -> what records its work."""
