"""The ways to train one model in several processes, as data: name -> how to wrap it and which part of a batch is whose.

What is true of all of them (one process with the same global batch, equal ranks, counted collectives) is tested and
measured in loops over `STRATEGIES`: a new one is one entry. `build` makes the TrainStep of one in a running process
group, `plain` the loop of torch alone for the same strategy, and `alone` what both are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import halfstep as hs

__all__ = [
    "BOUNDS",
    "CLIP",
    "STRATEGIES",
    "Net",
    "Strategy",
    "alone",
    "batches",
    "build",
    "loss_of",
    "plain",
    "policy",
    "whole",
]

TOKENS, WIDTH, LENGTH, ROWS = 32, 16, 6, 8  # ROWS: of a global batch; 1, 2 and 4 ranks share them equally
CLIP = 1.0

MakeOptimizer = Callable[[nn.Module], Optimizer]
Wrap = Callable[[nn.Module, "hs.Policy | None", MakeOptimizer], tuple[nn.Module, Optimizer]]
"""(model, policy or None for torch alone, how to make the optimizer) -> the wrapped model and its optimizer."""


# ------------------------------------------------------------------ what is trained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """An embedding, two residual blocks, a norm and a head: 5,152 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, index: Tensor) -> Tensor:
        x = self.rows(index)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out.clone()  # fully_shard warns of views


def loss_of(model: nn.Module, index: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch, times `factor` (0-dim), which is not finite where a step is to be bad."""
    out = model(index)
    return F.cross_entropy(out.float().flatten(0, 1), target.flatten()) * factor


Batch = tuple[Tensor, Tensor, Tensor]


def batches(
    number: int, seed: int, accumulate: int = 1, part: tuple[int, int] = (0, 1), factor: float = 1.0
) -> Iterator[Batch]:
    """Iterate over the micro-batches of global batch `number`.

    Args:
        number: of the update.
        seed: of the data.
        accumulate: how many micro-batches of `ROWS` rows a global batch has.
        part: (i, n): the i-th of n equal parts of each.
        factor: of the loss.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + number)
    for _ in range(accumulate):
        tokens = torch.randint(0, TOKENS, (ROWS, LENGTH + 1), generator=generator)
        mine = tokens.chunk(part[1])[part[0]]
        yield mine[:, :-1].contiguous(), (mine[:, 1:] + mine[:, :-1]).remainder(TOKENS), torch.tensor(factor)


def policy(name: str) -> hs.Policy:
    """Return the policy of a name such as ``mixed:fp16`` or ``pure:bf16:master=split,grads=fp32``."""
    preset, _, rest = name.partition(":")
    dtype, _, more = rest.partition(":")
    fields: dict[str, Any] = dict(pair.split("=") for pair in more.split(",") if pair)
    return hs.Policy.of(preset, **({"dtype": dtype} if dtype else {}), **fields)


# ------------------------------------------------------------------ the strategies

FP32 = ("O0", "torch:bf16", "mixed:bf16", "mixed:fp16")
"""Policies with fp32 parameters."""
LOW = ("O2:bf16", "pure:bf16", "pure:fp16", "pure:bf16:master=split", "pure:bf16:master=kahan", "pure:bf16:state=low")
"""Policies with low parameters."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to train in several processes.

    Attributes:
        wrap: see `Wrap`.
        policies: names of those that it carries out, for `policy`.
        part: (rank, ranks) -> (i, n): the rank trains on the i-th of n parts of each global micro-batch.
        accumulate: micro-batches of an update.
        ranks: the numbers of processes it runs in.
        sums: "ranks": a global batch is summed as one process sums the parts of the ranks as micro-batches, and so is
            the norm, so that two ranks are bit-equal to it; "other": in another order or format.
        sends: the format in which a hook of torch's sends gradients; "": that of the policy.
    """

    wrap: Wrap
    policies: tuple[str, ...]
    part: Callable[[int, int], tuple[int, int]] = field(default=lambda rank, ranks: (rank, ranks))
    accumulate: int = 1
    ranks: tuple[int, ...] = (2, 4)
    sums: str = "ranks"
    sends: str = ""

    def bound(self, policy_name: str) -> float:
        """Return how far from one process it may end: see `BOUNDS`."""
        return max(BOUNDS[policy(policy_name).dtype], BOUNDS[self.sends or "fp32"])


def _ddp(
    model: nn.Module, wanted: hs.Policy | None, make: MakeOptimizer, *, hook: str = "", **options: Any
) -> tuple[nn.Module, Optimizer]:
    optimizer = make(model)
    if wanted is not None:
        hs.prepare(model, optimizer, policy=wanted)
    wrapped = DistributedDataParallel(model, **options)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
    return wrapped, optimizer


def _fsdp(model: nn.Module, wanted: hs.Policy | None, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.fsdp import fully_shard

    if wanted is not None:
        hs.prepare(model, policy=wanted)
    for block in cast(Net, model).blocks:
        fully_shard(block)
    fully_shard(model)
    return model, make(model)


def _split(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


def _tensor_parallel(model: nn.Module, wanted: hs.Policy | None, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
    _split(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if wanted is not None:
        hs.prepare(model, policy=wanted)
    return model, make(model)


def _shard(
    model: nn.Module, wanted: hs.Policy | None, make: MakeOptimizer, *, mesh: DeviceMesh | None = None
) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.fsdp import fully_shard

    if wanted is not None:
        hs.shard(model, wanted, mesh=mesh)
    else:
        for block in cast(Net, model).blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, make(model)


def _hsdp(model: nn.Module, wanted: hs.Policy | None, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "parts"))
    return _shard(model, wanted, make, mesh=mesh)


def _shard_of_split(model: nn.Module, wanted: hs.Policy | None, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    _split(model, mesh["tensor"])
    return _shard(model, wanted, make, mesh=mesh["data"])


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy(wrap=_ddp, policies=(*FP32, *LOW)),
    "ddp, windows": Strategy(wrap=_ddp, policies=(*FP32, *LOW, "pure:bf16:grads=fp32"), accumulate=3, sums="other"),
    "ddp, reduce=low": Strategy(
        wrap=_ddp, policies=("mixed:bf16:reduce=low", "mixed:fp16:reduce=low", "O2:bf16:reduce=low"), sums="other"
    ),
    "ddp, static_graph": Strategy(wrap=partial(_ddp, static_graph=True), policies=("O0", "mixed:fp16", "pure:bf16")),
    "ddp, gradient_as_bucket_view": Strategy(
        wrap=partial(_ddp, gradient_as_bucket_view=True), policies=("O0", "mixed:fp16", "pure:bf16")
    ),
    "ddp, fp16_compress_hook": Strategy(
        wrap=partial(_ddp, hook="fp16_compress_hook"), policies=("O0", "mixed:fp16"), sums="other", sends="fp16"
    ),
    "fsdp2": Strategy(wrap=_fsdp, policies=FP32, sums="other"),
    "shard": Strategy(wrap=_shard, policies=(*FP32, *LOW, "pure:bf16:reduce=fp32"), sums="other"),
    "shard, windows": Strategy(wrap=_shard, policies=("mixed:bf16", "pure:bf16"), accumulate=3, sums="other"),
    "shard, hsdp": Strategy(wrap=_hsdp, policies=("mixed:bf16", *LOW), ranks=(4,), sums="other"),
    "shard x tp": Strategy(
        wrap=_shard_of_split,
        policies=("mixed:bf16", *LOW),
        part=lambda rank, ranks: (rank // 2, ranks // 2),
        ranks=(4,),
        sums="other",
    ),
    "tp": Strategy(wrap=_tensor_parallel, policies=(*FP32, *LOW), part=lambda rank, ranks: (0, 1), sums="other"),
}


BOUNDS: Mapping[str, float] = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 3e-2}
"""Of the distance from one process over the distance moved, by the coarsest format: sums in another order differ."""

# ------------------------------------------------------------------ runs


def _optimizer(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 1e-2)


def _net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def build(name: str, policy_name: str, seed: int = 0, **options: Any) -> hs.TrainStep:
    """Return the step of a strategy under a policy, in a running process group.

    Args:
        name: a key of `STRATEGIES`.
        policy_name: see `policy`.
        seed: of the initial weights.
        options: for the TrainStep.
    """
    strategy, wanted = STRATEGIES[name], policy(policy_name)
    model, optimizer = strategy.wrap(_net(seed), wanted, _optimizer)
    given: dict[str, Any] = {"clip_norm": CLIP, "accumulate": strategy.accumulate, "policy": wanted, **options}
    return hs.TrainStep(model, optimizer, loss_of, **given)


def alone(name: str, policy_name: str, parts: int, seed: int = 0, **options: Any) -> hs.TrainStep:
    """Return the step of one process that trains on the global batch; each of `parts` parts is a micro-batch."""
    wanted = policy(policy_name)
    model = _net(seed)
    given: dict[str, Any] = {"clip_norm": CLIP, "policy": wanted, **options}
    count = STRATEGIES[name].accumulate * parts
    return hs.TrainStep(model, _optimizer(model), loss_of, accumulate=count, **given)


class Plain:
    """The loop of torch alone: autocast, GradScaler in fp16, clipping; called with the micro-batches of an update."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, dtype: str, accumulate: int) -> None:
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == "fp16")

    def __call__(self, micro_batches: list[Batch]) -> None:
        self.passes(micro_batches)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def passes(self, micro_batches: list[Batch]) -> None:
        """Run forward and backward passes."""
        self.optimizer.zero_grad()
        for i, batch in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            postponed = not last and isinstance(self.model, DistributedDataParallel)
            with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                if postponed:
                    with cast(DistributedDataParallel, self.model).no_sync():
                        self.scaler.scale(loss_of(self.model, *batch) / self.accumulate).backward()
                    continue
                loss = loss_of(self.model, *batch)
            self.scaler.scale(loss / self.accumulate).backward()


def plain(name: str, policy_name: str, seed: int = 0, parts: int = 0) -> Plain:
    """Return torch's own loop of a strategy, in the policy's low format; with `parts` that of one process alone."""
    strategy, dtype = STRATEGIES[name], policy(policy_name).dtype
    if parts:
        model: nn.Module = _net(seed)
        return Plain(model, _optimizer(model), dtype, strategy.accumulate * parts)
    model, optimizer = strategy.wrap(_net(seed), None, _optimizer)
    return Plain(model, optimizer, dtype, strategy.accumulate)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole fp32 weights of a model, wrapped or not; collective where it is sharded."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    values = {name: value.detach() for name, value in inner.state_dict().items()}
    return {name: cast(Any, v).full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in values.items()}
