"""What the promise matrix trains, and what it observes while it does: formats and numbers, never halfstep's own books.

A `Job` is a model, its loss and its batches. An entry point (`entries`, `fronts`) trains it under a policy and returns
a `Trained`. The functions that begin with `see_` train a job that makes one kind of fact visible and return the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep as hs
from halfstep.formats import format_of

Batch = tuple[Tensor, ...]
Facts = dict[str, Any]

WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_fused_linear")


def word(tensor: Tensor) -> str:
    """Return the name of a tensor's format."""
    return WORDS[tensor.dtype]


@contextmanager
def one_rank() -> Iterator[None]:
    """Start a process group of one rank."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Job:
    """Something to train.

    Attributes:
        model: fresh and fp32.
        loss: ``loss(model, *batch)``, a scalar.
        windows: for each update its micro-batches.
        optimizer: makes the optimizer of parameters.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    windows: Sequence[Sequence[Batch]]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass
class Trained:
    """A job after its training.

    Attributes:
        model: the user's model, without wrappers.
        optimizer: what stepped it.
        updates: how many updates there were.
        call: evaluates the model as a user of this entry point would.
        name: what the entry point calls the policy.
        scale: the loss scale; 1.0 where there is none.
    """

    model: nn.Module
    optimizer: Optimizer
    updates: int
    call: Callable[..., Any]
    name: str = ""
    scale: float = 1.0

    def weight(self, name: str) -> Tensor:
        """Return the value of a weight as `state_dict` shows it."""
        value: Tensor = self.model.state_dict()[name].detach()
        return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()

    def parameter(self, name: str) -> Tensor:
        """Return a parameter as operators see it."""
        value = Tensor.detach(self.model.get_parameter(name))  # not `WatchedParameter.detach`, which reads fp32 values
        return value.to_local() if isinstance(value, DTensor) else value

    def load(self, name: str, value: Tensor) -> None:
        """Load `value` into a weight as a checkpoint would be."""
        there = self.model.state_dict()[name]
        if isinstance(there, DTensor):
            value = distribute_tensor(value, there.device_mesh, there.placements)
        self.model.load_state_dict({name: value}, strict=False)


class Entry:
    """A way to train under a policy: ``entry(policy, job)``; see `entries`."""

    name: str
    repeats: int = 1
    """How often a window is repeated; a graph that replays needs some."""

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job` under `policy`."""
        raise NotImplementedError

    @contextmanager
    def around(self) -> Iterator[None]:
        """Set up what trainings, and looks at their results, need."""
        yield

    @contextmanager
    def watched(self, mode: TorchDispatchMode) -> Iterator[None]:
        """Let `mode` see the operators of trainings."""
        with mode:
            yield


@hs.operator("fp32", name="promises::square")
def square(x: Tensor) -> Tensor:
    """Return a square by an operator that torch does not know."""
    return x * x


class Head(nn.Linear):
    """A last layer that notes what its product gave."""

    def __init__(self, width: int, out: int, seen: dict[str, Tensor]) -> None:
        super().__init__(width, out)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        self.seen["head"] = y.detach()
        return y


class Probe(nn.Module):
    """A model of one operator of each kind; `seen` holds what each gave in the last forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.rows = nn.Embedding(8, 16)
        self.inner = nn.Linear(16, 16)
        self.norm, self.batch = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.head = Head(16, 4, self.seen)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        seen = self.seen
        seen["input"] = x.detach()
        rows = self.rows(tokens)
        seen["embedding"] = rows.detach()
        product = self.inner(x)
        seen["linear"] = product.detach()
        stream = rows + product
        seen["add"] = stream.detach()
        shares = F.softmax(product, -1)
        seen["softmax"] = shares.detach()
        normed = self.norm(product)
        seen["norm"] = normed.detach()
        grown = torch.exp(product)
        seen["exp"] = grown.detach()
        batch = self.batch(product)
        own = square(product)
        seen["custom"] = own.detach()
        seen["inner loss"] = F.mse_loss(product, rows.detach()).detach()
        return self.head(normed + batch + shares + stream + grown + own)  # type: ignore[no-any-return]


def probe_loss(model: nn.Module, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
    """Return a loss of `Probe`; what it and the model gave is noted too."""
    seen: dict[str, Tensor] = getattr(model, "module", model).seen  # type: ignore[assignment]
    out = model(x, tokens)
    seen["output"] = out.detach()
    loss = F.mse_loss(out, y)
    seen["loss"] = loss.detach()
    return loss / 65536  # in fp16 gradients times the largest scale stay finite


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=2.0**-10)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0)


# ------------------------------------------------------------------ kinds of facts


class Products(TorchDispatchMode):
    """Notes in which formats matrix products run, below all that halfstep does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.formats: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func._schema.name.removeprefix("aten::") in PRODUCTS:
            self.formats |= {WORDS[a.dtype] for a in args if isinstance(a, Tensor) and a.dtype in WORDS}
        return func(*args, **(kwargs or {}))


class Reductions(TorchDispatchMode):
    """Notes in which formats gradients are summed across processes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.formats: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce" in func._schema.name:
            self.formats |= {WORDS[a.dtype] for a in tree_leaves(args) if isinstance(a, Tensor) and a.dtype in WORDS}
        return func(*args, **(kwargs or {}))


def see_formats(entry: Entry, policy: hs.Policy) -> Facts:
    """Train `Probe`: formats of every operator's result, of parameters, optimizer state, inputs and outputs."""
    torch.manual_seed(0)
    batch = torch.randn(4, 16), torch.arange(4), torch.randn(4, 4)
    model = Probe()
    done = entry(policy, Job(model, probe_loss, [[batch]] * entry.repeats, adamw))
    facts: Facts = {name: word(tensor) for name, tensor in model.seen.items()}
    grid = format_of("fp8_e4m3")
    facts["fp8 numbers"] = bool(torch.equal(grid.round(model.seen["linear"].float()), model.seen["linear"].float()))
    facts["weight"] = word(done.parameter("inner.weight"))
    facts["norm weight"] = word(done.parameter("norm.weight"))
    facts["batch norm weight"] = word(done.parameter("batch.weight"))
    facts["state"] = _state_format(done.optimizer)
    facts["output"] = word(done.call(batch[0], batch[1]))
    facts["name"] = done.name
    return facts


def _state_format(optimizer: Optimizer) -> str:
    found = {v.dtype for state in optimizer.state.values() for v in state.values() if _elementwise(v)}
    return " and ".join(sorted(WORDS[dtype] for dtype in found))


def _elementwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def see_products(entry: Entry, policy: hs.Policy) -> Facts:
    """Train one layer: formats in which its products ran."""
    return {"products": _seen_by(Products(), entry, policy) or "none seen"}


def see_reduction(entry: Entry, policy: hs.Policy) -> Facts:
    """Train one layer: formats in which its gradients were summed across processes."""
    return {"summed": _seen_by(Reductions(), entry, policy) or "nothing"}


def _seen_by(watcher: Products | Reductions, entry: Entry, policy: hs.Policy) -> str:
    torch.manual_seed(0)
    with entry.watched(watcher):
        entry(policy, Job(nn.Linear(16, 16), _sum_loss, [[(torch.randn(4, 16),)]] * entry.repeats, sgd))
    return " and ".join(sorted(watcher.formats))


def _sum_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().sum() / 1024  # type: ignore[no-any-return]


MICRO = 64
"""Micro-batches of a window in which a sum in bf16 is seen to lose digits."""


def see_sum(entry: Entry, policy: hs.Policy) -> Facts:
    """Sum the gradients of 64 micro-batches: whether the sum is as precise as fp32's, by the change of an SGD's weight.

    The loss is linear in the weight, so that every update has the same gradient.
    """
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    window = [(torch.rand(2, 16) + 0.5,) for _ in range(MICRO)]
    before = model.weight.detach().to(torch.float64)
    done = entry(policy, Job(model, _sum_loss, [window] * entry.repeats, sgd))
    exact = torch.cat([x for (x,) in window]).to(torch.float64).sum(0) / MICRO / 1024
    change = (before - done.weight("weight").to(torch.float64)) / done.updates
    error = float((change - exact).norm() / exact.expand_as(change).norm())
    return {"sum": "fp32" if error < 0.0015 else "bf16", "weight": word(done.parameter("weight"))}


def see_small_gradients(entry: Entry, policy: hs.Policy) -> Facts:
    """Train with gradients below fp16's smallest number: whether they arrive, and the loss scale."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    before = model.weight.detach().clone()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().sum() * 2.0**-27  # type: ignore[no-any-return]

    def large_rate(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=2.0**20)

    done = entry(policy, Job(model, loss, [[(torch.ones(2, 16),)]] * entry.repeats, large_rate))
    return {"small gradients": not torch.equal(before, done.weight("weight")), "scale": done.scale}


def see_precise_weights(entry: Entry, policy: hs.Policy) -> Facts:
    """Load values that bf16 does not have, then make updates too small for it: what a weight keeps of both."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().sum() * 2.0**-24  # type: ignore[no-any-return]

    def rate(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=2.0**-12, weight_decay=0.0)

    windows = [[(torch.ones(1, 64),)]] * max(entry.repeats, 2)
    nn.init.constant_(model.weight, 1.0)
    done = entry(policy, Job(model, loss, windows, rate))
    moved = bool((done.weight("weight") != 1.0).any())
    values = {"a third": 1 / 3, "half way": 1 + 2.0**-8}
    kept = {}
    for name, value in values.items():
        done.load("weight", torch.full((64, 64), value))
        kept[name] = float(done.weight("weight")[0, 0]), float(done.parameter("weight")[0, 0])
    third = abs(kept["a third"][0] * 3 - 1)
    return {
        "small updates": moved,
        "digits": "24" if third < 2.0**-24 else "16" if third < 2.0**-15 else "8",
        "half way": "up" if kept["half way"][1] > 1 else "even",
    }


def accumulated(job: Job) -> Job:
    """Return `job` with every window of two micro-batches at least; the mean gradient is the same."""
    return replace(job, windows=[list(w) if len(w) > 1 else list(w) * 2 for w in job.windows])
