"""The entry points of halfstep: each trains a job under a policy as its documentation shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.errors import BindError, ours
from halfstep.step import graphs
from halfstep.step.graphs import WARM_UPS
from halfstep.step.parts import statistics
from halfstep.weights import attachment, states
from tests.promises.probe import Entry, Job, Trained, accumulated, one_rank
from tests.step.tape import TapeRecorder

__all__ = ["ENTRIES", "Compiled"]


class Autocast(Entry):
    """``with hs.autocast(policy=policy):`` around the loss, in a loop of one's own."""

    name = "autocast"

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        region = hs.autocast("cpu", policy=policy)
        optimizer = job.optimizer(job.model.parameters())
        for window in job.windows:
            for batch in window:
                with region:
                    loss = job.loss(job.model, *batch)
                (loss.float() / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()

        def call(*batch: Any) -> Any:
            with region:
                return job.model(*batch)

        return Trained(job.model, optimizer, len(job.windows), call, name=repr(region).split()[1])


class OwnLoop(Entry):
    """``hs.prepare`` and a loop of one's own, without or with the scaler that it returns."""

    def __init__(self, *, scaling: bool) -> None:
        self.name = "prepare, scaler" if scaling else "prepare, own loop"
        self.scaling = scaling

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        model, optimizer, scaler = hs.prepare(job.model, job.optimizer(job.model.parameters()), policy=policy)
        scale = scaler.get_scale()
        unscaled = scale != 1.0 and not self.scaling
        with pytest.warns(UserWarning, match="loss that was not scaled") if unscaled else nullcontext():
            self.train(model, optimizer, scaler, job)
        return Trained(model, optimizer, len(job.windows), model, name=_told(model), scale=scale)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: hs.GradScaler, job: Job) -> None:
        """Run the loop."""
        for window in job.windows:
            for batch in window:
                loss = job.loss(model, *batch).float() / len(window)
                (scaler.scale(loss) if self.scaling else loss).backward()
            if self.scaling:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()


class Later(Entry):
    """``hs.prepare`` of the model alone; the optimizer is made after it, and nothing scales."""

    name = "prepare, optimizer later"

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        inner = self.prepared(job.model, policy)
        model = self.wrapped(inner)
        optimizer = job.optimizer(model.parameters())
        for window in job.windows:
            for batch in window:
                (job.loss(model, *batch).float() / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return Trained(inner, optimizer, len(job.windows), model, name=_told(inner))

    def prepared(self, model: nn.Module, policy: hs.Policy) -> nn.Module:
        """Prepare `model`."""
        return hs.prepare(model, policy=policy)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return `model` as it is trained."""
        return model


def _told(model: nn.Module) -> str:
    """Return the name of the policy as an error names it."""
    try:
        hs.prepare(model, policy=hs.Policy(name="another", dtype="fp32", table="none"))
    except BindError as error:
        return str(error).partition("with policy ")[2].partition(" and was given")[0].strip("'")
    return ""


class Step(Entry):
    """``hs.TrainStep``, with some of its arguments; a window of several batches is an accumulation window."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        optimizer = job.optimizer(job.model.parameters())
        step = hs.TrainStep(
            job.model, optimizer, job.loss, policy=policy, accumulate=len(job.windows[0]), **self.arguments
        )
        return run(step, job.model, job.windows)


def run(step: hs.TrainStep, model: nn.Module, windows: Sequence[Sequence[Any]]) -> Trained:
    """Call `step` with every batch."""
    scale = step.scaler.get_scale()
    for window in windows:
        for batch in window:
            result = step(*batch)
        assert result.due and not bool(result.skipped)
    name = hs.Policy.from_toml(step.state_dict()["policy"]).name
    return Trained(model, step.optimizer, len(windows), model, name=name, scale=scale)


class Accumulating(Step):
    """``accumulate=`` of 2 at least."""

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        return super().__call__(policy, accumulated(job))


class Compiled(Step):
    """``compile=``, by a backend that counts the graphs it gets."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name)
        self.backend = backend
        self.mode: TorchDispatchMode | None = None

    @contextmanager
    def watched(self, mode: TorchDispatchMode) -> Iterator[None]:
        """Let `mode` see what compiled code calls; around it nothing would be compiled."""
        self.mode = mode
        try:
            yield
        finally:
            self.mode = None

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`; the loss has to reach the compiler."""
        graphs = []
        inner: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)

        def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            compiled, mode = inner(graph, inputs), self.mode

            def run_watched(*args: Any) -> Any:
                with mode or nullcontext():
                    return compiled(*args)

            return run_watched

        torch._dynamo.reset()
        self.arguments = {"compile": {"backend": counting}}
        done = super().__call__(policy, job)
        assert graphs, "nothing was compiled"
        return done


class Captured(Step):
    """``cuda_graph=True``, recorded on the tape that keeps CUDA's promises on a CPU."""

    repeats = WARM_UPS + 3

    @contextmanager
    def around(self) -> Iterator[None]:
        """Let graphs be recorded on a tape."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)
            for module in (attachment, states):
                patch.setattr(module, "skipped", lambda optimizer: False)  # as on CUDA, where asking would wait
            patch.setattr(statistics, "peek", lambda flag: True)  # as on CUDA: a captured step repeats what was done
            tape = str(Path(__file__).parents[1] / "step" / "tape.py")
            patch.setattr(graphs, "ours", lambda name: ours(name) or name == tape)
            yield


class Ranks(Step):
    """A TrainStep in a process group of one rank, whose model is distributed."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Start a process group."""
        with one_rank():
            yield


class Parallel(Ranks):
    """DistributedDataParallel around a prepared model."""

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        model, optimizer, _ = hs.prepare(job.model, job.optimizer(job.model.parameters()), policy=policy)
        wrapped = nn.parallel.DistributedDataParallel(model)
        step = hs.TrainStep(wrapped, optimizer, job.loss, accumulate=len(job.windows[0]))
        return run(step, model, job.windows)


class ParallelLoop(Later, Ranks):
    """DistributedDataParallel around a prepared model, in a loop of one's own."""

    name = "DDP, own loop"

    def __init__(self) -> None: ...

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Wrap `model`."""
        return nn.parallel.DistributedDataParallel(model)


class Sharded(Ranks):
    """A model that `hs.shard` has sharded."""

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        model = hs.shard(job.model, policy)
        step = hs.TrainStep(model, job.optimizer(model.parameters()), job.loss, accumulate=len(job.windows[0]))
        return run(step, model, job.windows)


class ShardedLoop(Later, Ranks):
    """A model that `hs.shard` has sharded, in a loop of one's own."""

    name = "shard, own loop"

    def __init__(self) -> None: ...

    def prepared(self, model: nn.Module, policy: hs.Policy) -> nn.Module:
        """Shard `model`."""
        return hs.shard(model, policy)


ENTRIES: tuple[Entry, ...] = (
    Autocast(),
    OwnLoop(scaling=False),
    OwnLoop(scaling=True),
    Later(),
    Step("TrainStep"),
    Accumulating("TrainStep, accumulate"),
    Compiled("TrainStep, compile", "eager"),
    Captured("TrainStep, cuda_graph", cuda_graph=True),
    Parallel("DDP"),
    ParallelLoop(),
    Sharded("shard"),
    ShardedLoop(),
)
