"""Bytes a parameter under each policy, counted while a small GPT trains; tables of the pages on weights.

Storages are added up at three moments of an update: the end of the forward pass, just before the optimizer steps, and
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from benchmarks.markdown import table
from halfstep.binding.prepare import store_of
from halfstep.tasks.gpt import GPT

HELD = ("weight", "low copy", "gradient", "master", "optimizer state")
STEP = ("fp32 gradient", "fp32 weight")  # beside these, while an optimizer steps
WHERE = (*HELD, *STEP)
MOMENTS = ("forward", "update", "between")
COMPACT = ("split", "kahan", "stochastic")
BATCH = (1, 4)  # activations are not counted
UPDATES = 3  # the last one is counted: then the optimizer has its state and buffers are there


def storage_bytes(found: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of some tensors, each counted once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(sizes.values())


class LowCopies(TorchDispatchMode):
    """Notes every cast of a weight to a low format, and counts the bytes of these copies that are still alive."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.weights = {w.untyped_storage().data_ptr() for w in weights}
        self.copies: list[tuple[StorageWeakRef, int]] = []
        self.before_update: Callable[[], None] = lambda: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "halfstep" and func._schema.is_mutable:  # halfstep's own update
            self.before_update()
        result = func(*args, **(kwargs or {}))
        of_weight = func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.weights
        if of_weight and result.element_size() < 4:  # the fp32 value of a low weight is counted where it is used
            storage = result.untyped_storage()
            self.copies.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def alive(self) -> int:
        return sum(size for reference, size in self.copies if not reference.expired())


@dataclass
class Count:
    """Bytes of one training run by place, at the moments of its last update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    copies: LowCopies
    at: dict[str, dict[str, int]] = field(default_factory=dict)

    def look(self, moment: str) -> None:
        weights, store = list(self.model.parameters()), store_of(self.model)
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        gradients = [p.grad for p in weights if p.grad is not None]
        attached = [] if store is None else store.attached.values()
        self.at[moment] = {
            "weight": storage_bytes(weights),
            "low copy": self.copies.alive(),
            "gradient": storage_bytes(gradients),
            "fp32 gradient": storage_bytes(buffer for one in attached for buffer in one.buffers.values()),
            "master": 0 if store is None else storage_bytes(store.kept()),
            "fp32 weight": 0 if store is None else storage_bytes(store.temporaries()),
            "optimizer state": storage_bytes(state),
        }


def small_gpt() -> nn.Module:
    return GPT(vocabulary=64, width=128, layers=3, heads=4, length=32)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def torch_loop(model: nn.Module, optimizer: torch.optim.Optimizer, low: bool, count: Count) -> Callable[..., None]:
    """Train as torch.amp's page shows it: cast in a region, clip, step, forget gradients."""

    def update(*batch: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = loss_of(model, *batch)
            count.look("forward")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        count.look("update")
        optimizer.step()
        optimizer.zero_grad()
        count.look("between")

    return update


def halfstep_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: hs.Policy, count: Count, *, own: bool
) -> Callable[..., None]:
    """Train with a TrainStep; `own`: by halfstep's update in one pass, else through the optimizer's own step."""

    def counted(model: nn.Module, *batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        count.look("forward")
        return loss

    step = hs.TrainStep(model, optimizer, counted, policy=policy, clip_norm=1.0)
    if own:
        count.copies.before_update = lambda: count.look("update")
    else:  # a hook must see the step being called, so it is
        optimizer.register_step_pre_hook(lambda *_: count.look("update"))

    def update(*batch: Tensor) -> None:
        step(*batch)
        assert bool(step.generic) is not own, step.generic
        count.look("between")

    return update


def counted(
    policy: hs.Policy | None,
    *,
    low: bool = False,
    own: bool = True,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[dict[str, dict[str, int]], int]:
    """Return (moment -> place -> bytes, number of parameters) of `make` under `policy`; None: torch's own loop."""
    torch.manual_seed(0)
    model = small_gpt()
    optimizer = make(model.parameters(), lr=1e-3)
    copies = LowCopies([])
    count = Count(model, optimizer, copies)
    if policy is None:
        update = torch_loop(model, optimizer, low, count)
    else:
        update = halfstep_loop(model, optimizer, policy, count, own=own)
    copies.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with copies:
        for _ in range(UPDATES):
            update(torch.randint(0, 64, BATCH), torch.randint(0, 64, BATCH))
    return count.at, sum(p.numel() for p in model.parameters())


@cache
def bytes_rows() -> list[list[str]]:
    """Return candidate, the most bytes a parameter of each place, the most at once, and those between updates."""
    bf16 = {name: hs.Policy.of(name, dtype="bf16") for name in hs.policy.PRESETS if name != "O0"}
    runs = {
        "fp32 (torch)": counted(None),
        "`O0`": counted(hs.policy.PRESETS["O0"]),
        "torch.amp": counted(None, low=True),
        **{f"`{name}`": counted(bf16[name]) for name in ("torch", "O1", "mixed", "O2", "pure", "lean")},
        '`O2`, `grads="fp32"`': counted(bf16["O2"].replace(grads="fp32")),
        **{f'`O2`, `master="{name}"`': counted(bf16["O2"].replace(master=name)) for name in ("master", *COMPACT[1:])},
        **{
            f'`O2`, `master="{name}"`, `state="low"`': counted(bf16["O2"].replace(master=name, state="low"))
            for name in COMPACT
        },
        **{
            f'`O2`, `master="{name}"`, own step': counted(bf16["O2"].replace(master=name), own=False)
            for name in ("master", *COMPACT)
        },
        "`lean`, own step": counted(bf16["lean"], own=False),
        '`O2`, `master="stochastic"`, Adafactor, own step': counted(
            bf16["O2"].replace(master="stochastic"), make=torch.optim.Adafactor, own=False
        ),
        "`O3`, own step": counted(bf16["O3"], own=False),
    }
    rows: list[list[str]] = []
    for name, (at, total) in runs.items():
        most = [max(at[moment][place] for moment in MOMENTS) / total for place in WHERE]
        held = sum(most[: len(HELD)])
        peak = max(sum(at[moment].values()) for moment in MOMENTS) / total
        kept = sum(at["between"].values()) / total
        cells = [f"{b:.2f}" if b else "-" for b in most]
        cells.insert(len(HELD), f"{held:.2f}")
        cells += [f"{peak:.2f}", f"{kept:.2f}"]
        if rows and rows[-1][1:] == cells:
            rows[-1][0] += f"; {name}"
        else:
            rows.append([name, *cells])
    return rows


def bytes_by_place() -> str:
    """Return what is there from one moment of a step to another."""
    rows = [row[: 2 + len(HELD)] for row in bytes_rows()]
    return table(["AdamW in bf16", *HELD, "sum"], rows)


def bytes_at_once() -> str:
    """Return what is there while an optimizer steps, at most, and between updates."""
    rows = [[row[0], *row[2 + len(HELD) :]] for row in bytes_rows()]
    return table(["AdamW in bf16", *STEP, "most at once", "between updates"], rows)


def bytes_of_presets() -> str:
    """Return the excerpt of the concept page."""
    rows = [[row[0], *row[-2:]] for row in bytes_rows() if "own step" not in row[0] and '="' not in row[0]]
    return table(["AdamW in bf16", "most at once", "between updates"], rows)


def counted_model() -> str:
    model = small_gpt()
    total = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    places = sum(p.numel() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
    return (
        f"A GPT of 3 layers of 128: {total:,} parameters, of which {norms:,} in norms and {places:,} in embeddings; "
        f"update {UPDATES} of a run."
    )


def byte_blocks() -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    return {
        "bytes": bytes_of_presets(),
        "bytes by place": bytes_by_place(),
        "bytes at once": bytes_at_once(),
        "bytes model": counted_model(),
    }
