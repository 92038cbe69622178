"""What becomes of weights that a loop writes by hand: the table of docs/concepts/weights.md; `make tables`.

`fate` moves weights 12 times by a 32nd of an ulp of bf16, or lets an average follow weights that moved, and compares
the way with that of fp32 weights. `outcome` is what the page says; tests/weights/test_write_table.py compares both.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep as hs
from benchmarks.markdown import table

SIZE, COUNT, DECAY = 2.0**-12, 12, 0.99
KINDS = ("trained", "frozen", "prepared alone", "shared", "sharded")
MASTERS = ("master", "split", "kahan", "stochastic", "none")

# ------------------------------------------------------------------ the ways


def _operator(p: Any) -> None:
    p += SIZE


def _functional(p: Tensor) -> None:
    options: dict[str, Any] = {"weight_decay": 0.0, "maximize": False, "foreach": False}
    gradient = torch.full_like(p.float(), -1.0)
    sgd([p], [gradient], [None], lr=SIZE / 2, momentum=0.0, dampening=0.0, nesterov=False, **options)
    first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
    counts = [torch.tensor(0.0)]
    rates: dict[str, Any] = {"lr": SIZE / 2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-12}
    adamw([p], [gradient], [first], [second], [], counts, amsgrad=False, **rates, **options)


def _set(p: Any) -> None:
    p.set_(p.detach() + SIZE)


WRITES: Mapping[str, Callable[[Any], Any]] = {
    "methods: `p.add_(x)`, `p.lerp_`, `p.copy_`, ...": lambda p: p.add_(SIZE),
    "operators: `p += x`": _operator,
    "`p.data.add_(x)`, `p.data += x`": lambda p: p.data.add_(SIZE),
    "without `torch.no_grad`: `p.detach().add_(x)`": lambda p: p.detach().add_(SIZE),
    "functions of optimizers: `torch.optim.adamw.adamw`": _functional,
    "`p.set_(x)`, `p.data = x`": _set,
    "`torch.add(p, x, out=p)`": lambda p: torch.add(p, SIZE, out=p),
    "`torch._foreach_add_([p], x)`": lambda p: torch._foreach_add_([p], SIZE),
    "kernels: `torch.ops.aten.add_(p, x)`": lambda p: torch.ops.aten.add_(p, SIZE),
    "a view: `p.view(-1).add_(x)`, `p[0].add_(x)`": lambda p: p.view(-1).add_(SIZE),
}
"""One movement of a weight."""

Average = tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module], None], Callable[[Any], Iterable[Tensor]]]


def _listed(model: nn.Module) -> list[Tensor]:
    return [p.clone().detach() for p in model.parameters()]


def _made_before(model: nn.Module) -> list[Tensor]:
    """Return an average as it is made of an fp32 model, before that is prepared."""
    return [p.clone().detach().as_subclass(Tensor).clone() for p in model.parameters()]


def _follow(means: Iterable[Any], model: nn.Module) -> None:
    for mean, p in zip(means, model.parameters(), strict=True):
        mean.sub_((1 - DECAY) * (mean - p))


AVERAGES: Mapping[str, Average] = {
    "SWA and EMA of torch: `AveragedModel`": (
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
        lambda mean, model: mean.update_parameters(model),
        lambda mean: mean.module.parameters(),
    ),
    "an average in a list: `[p.clone().detach() for p in ...]`": (_listed, _follow, lambda mean: mean),
    "an average made before `hs.prepare`: `mean.lerp_(p, 0.01)`, `torch._foreach_lerp_`": (
        _made_before,
        lambda mean, model: torch._foreach_lerp_(mean, [*model.parameters()], 1 - DECAY),
        lambda mean: mean,
    ),
    "an average in `copy.deepcopy(model)`": (
        copy.deepcopy,
        lambda mean, model: _follow(mean.parameters(), model),
        lambda mean: mean.parameters(),
    ),
}
"""What makes an average of a model, moves it and reads it."""


# ------------------------------------------------------------------ what becomes of them


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


def _net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Tied() if kind == "shared" else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    for p in model.parameters():
        p.data = torch.empty(p.shape).uniform_(1.0, 1.5).bfloat16().float()
    return model.requires_grad_(kind != "frozen")


def _prepared(kind: str, master: Any) -> tuple[nn.Module, Callable[[], object]]:
    """Return a model and what updates it without moving it far."""
    model = _net(kind)
    policy = hs.Policy.of("O3" if master == "none" else "pure", dtype="bf16").replace(master=master)
    if kind == "sharded":
        hs.shard(model, policy)
    if kind in {"frozen", "prepared alone"}:
        hs.prepare(model, policy=policy)
        return model, model.state_dict
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    hs.prepare(model, optimizer, policy=policy)

    def update() -> None:
        model(torch.ones(2, 8)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def _values(tensors: Iterable[Any]) -> Tensor:
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().float().flatten() for t in whole])


def _moved(way: str, model: nn.Module, update: Callable[[], object]) -> Tensor:
    """Return how far weights, or an average of them, went."""
    if way in WRITES:
        first = _values(model.state_dict().values())
        for _ in range(COUNT):
            with torch.set_grad_enabled("without" in way):
                for p in model.parameters():
                    WRITES[way](p)
            update()
        return _values(model.state_dict().values()) - first
    make, follow, read = AVERAGES[way]
    mean = make(model)
    with torch.no_grad():
        follow(mean, model)  # torch's first one copies
        first = _values(read(mean))
        for p in model.parameters():
            p.add_(0.25)  # exact in bf16
        for _ in range(COUNT):
            follow(mean, model)
    return _values(read(mean)) - first


@cache
def _wanted(way: str, kind: str) -> Tensor:
    """Return how far fp32 weights go."""
    return _moved(way, _net(kind), lambda: None)


def fate(way: str, kind: str, master: str) -> tuple[float, list[str]]:
    """Return how far weights end from where fp32 weights do, over the way of these, and the warnings."""
    model, update = _prepared(kind, master)
    wanted = _wanted(way, kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = _moved(way, model, update)
    return float((found - wanted).norm() / wanted.norm()), [str(warning.message) for warning in told]


# ------------------------------------------------------------------ the page

EXACT, TOLD = "fp32", "one warning"


def outcome(way: str, kind: str, master: str) -> str:
    """Return what the page says."""
    if way in AVERAGES:
        return EXACT
    lossy = master in {"stochastic", "none"} or "torch.ops" in way
    return TOLD if lossy else EXACT


def writes_table() -> str:
    """Return the table of the page."""
    columns = {
        "`master`, `split`, `kahan`": ("master", "split", "kahan"),
        "`stochastic`; `none` (`O3`)": ("stochastic", "none"),
    }
    rows = []
    for way in (*WRITES, *AVERAGES):
        cells = [{outcome(way, kind, m) for kind in KINDS[:4] for m in masters} for masters in columns.values()]
        assert all(len(cell) == 1 for cell in cells)
        rows.append([way, *(cell.pop() for cell in cells)])
    return table(["written by hand", *columns], rows)
