"""Two gloo processes: what ranks share under DDP, FSDP2 and tensor parallelism equals one process, and each other.

All cases run in one pair of processes, which the first test starts; a case that raises gives its error as its result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from tests.two_processes import error_of, run_all

pytestmark = pytest.mark.dist

Case = Callable[[int], Any]
CASES: dict[str, Case] = {}


def case(name: str, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the function as case `name` on both ranks, which it gets as its first argument."""

    def added(run: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = lambda rank: run(rank, *args, **options)
        return run

    return added


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), 2, rank)
    results: dict[str, Any] = {}
    for name, run in CASES.items():
        try:
            results[name] = run(rank)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    torch.save(results, f"{folder}/{rank}")
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort some exits (torch 2.13), after the work is done


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")  # they meet by a file: a free port may be taken before it is used
    run_all(_worker, (str(folder),))
    first, second = (torch.load(folder / str(rank), weights_only=False) for rank in range(2))
    yield lambda name: (first[name], second[name])


# ------------------------------------------------------------------ ranks agree on a skip that only one caused


def _norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def _class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * (float("inf") if x[0, 0] > 90 else 1.0)


@case("agree ddp mixed fp16", "ddp", "mixed", "fp16")
@case("agree ddp O2 bf16", "ddp", "O2", "bf16")
@case("agree fsdp torch fp16", "fsdp", "torch", "fp16")
@case("agree fsdp mixed bf16", "fsdp", "mixed", "bf16")
def _skips(rank: int, kind: str, name: str, dtype: str) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    policy = hs.Policy.of(name, dtype=dtype)
    net = _norm_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    if kind == "ddp":
        hs.prepare(net, optimizer, policy=policy)
        wrapped: nn.Module = DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped = hs.prepare(net, policy=policy)
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    scaler = hs.GradScaler("cpu", init_scale=8.0) if dtype == "fp16" else None
    step = hs.TrainStep(wrapped, optimizer, _class_loss, clip_norm=1.0, scaler=scaler)
    skips, scales = [], []
    for i in range(5):
        generator = torch.Generator().manual_seed(10 * i + rank)
        x, y = torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
        if i == 2 and rank == 1:
            x[0, 0] = 100.0
        result = step(x, y).host()
        skips.append(result.skipped)
        scales.append(result.scale)
    return skips, scales, _whole(net)


def _whole(net: nn.Module) -> dict[str, Tensor]:
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in net.state_dict().items()}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("agree")])
def test_ranks_agree(both: Callable[[str], tuple[Any, Any]], name: str) -> None:
    first, second = both(name)
    assert first[0] == second[0] == [False, False, True, False, False], first
    assert first[1] == second[1]
    if name.endswith("fp16"):
        assert first[1] == [8.0, 8.0, 8.0, 4.0, 4.0]
    assert _equal(first[2], second[2])


# ------------------------------------------------------------------ flush

WINDOW = 3


class Net(nn.Module):
    """A sparse or dense embedding and two layers; the third takes part where `uses` says so."""

    def __init__(self, *, sparse: bool = False, buffers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(12, 8, sparse=sparse)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.uses = [0, 1, 2]
        self.seen = nn.Buffer(torch.zeros(())) if buffers else None  # DDP sends it before the forward pass of a window

    def forward(self, index: Tensor) -> Tensor:
        x = self.rows(index)
        if self.seen is not None:
            self.seen.add_(index.sum())
        for i in self.uses:
            x = x + torch.tanh(self.layers[i](x))
        return cast(Tensor, x)


def _loss(model: nn.Module, index: Tensor) -> Tensor:
    out: Tensor = model(index)
    return out.float().square().mean()


def _batch(rank: int, i: int) -> Tensor:
    return torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(100 * rank + i))


def _sgd(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5, **options)


UNEVEN = [(1, 2), (0, 1), (2, 0), (2, 2), (0, 0)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}
POLICIES = {
    "O0": hs.Policy.of("O0"),
    "pure": hs.Policy.of("pure", dtype="bf16"),
    "pure fp32 sums": hs.Policy.of("pure", dtype="bf16", grads="fp32"),
    "mixed fp16": hs.Policy.of("mixed", dtype="fp16"),
    "mixed low sent": hs.Policy.of("mixed", dtype="bf16", reduce="low"),
    "O2 fp32 sent": hs.Policy.of("O2", dtype="bf16", reduce="fp32"),
}


@case("flush sparse", (1, 2), sparse=True)
@case("flush frozen", (1, 2), frozen=True)
@case("flush buffers", (0, 2), buffers=True)
def _flushes(
    rank: int,
    left: tuple[int, int],
    policy: str = "O0",
    options: str = "plain",
    sparse: bool = False,
    frozen: bool = False,
    buffers: bool = False,
) -> Any:
    net = _net(sparse=sparse, frozen=frozen, buffers=buffers)
    optimizer = _sgd(net)
    hs.prepare(net, optimizer, policy=POLICIES[policy])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ddp = DistributedDataParallel(net, **OPTIONS[options])
    step = hs.TrainStep(ddp, optimizer, _loss, accumulate=WINDOW, scheduler=scheduler)
    norms = []
    for i in range(WINDOW):
        result = step(_batch(rank, i))
    norms.append(float(result.grad_norm))
    for i in range(left[rank]):
        step(_batch(rank, 10 + i))
    flushed = step.flush()
    norms.append(-1.0 if flushed is None else float(flushed.grad_norm))
    for i in range(WINDOW):
        result = step(_batch(rank, 20 + i))
    norms.append(float(result.grad_norm))
    step.flush()
    net.seen = None
    return norms, scheduler.last_epoch, step.scaler.get_scale(), _whole(net)


for _left in UNEVEN:
    case(f"flush {_left}", _left)(_flushes)
for _name in list(POLICIES)[1:]:
    case(f"flush {_name}", (0, 2), _name)(_flushes)
for _name in list(OPTIONS)[1:]:
    case(f"flush {_name}", (1, 2), options=_name)(_flushes)


def _net(*, sparse: bool = False, frozen: bool = False, buffers: bool = False) -> Net:
    net = Net(sparse=sparse, buffers=buffers)
    if frozen:
        net.layers[1].requires_grad_(False)
    return net


def _step_by_hand(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> float:
    """Step on the mean over micro-batches of all ranks; return the gradients' norm."""
    optimizer.zero_grad()
    for batch in batches:
        (_loss(net, batch) / len(batches)).backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    optimizer.step()
    return float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients])))


def _by_hand(left: tuple[int, int], *, frozen: bool = False) -> tuple[list[float], int, dict[str, Tensor]]:
    """Do on one process what two ranks do: each update takes the mean over all micro-batches."""
    net = _net(frozen=frozen)
    optimizer = _sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    norms: list[float] = []
    for start, counts in ((0, (WINDOW, WINDOW)), (10, left), (20, (WINDOW, WINDOW))):
        batches = [_batch(rank, start + i) for rank in range(2) for i in range(counts[rank])]
        if not batches:
            norms.append(-1.0)
            continue
        norms.append(_step_by_hand(net, optimizer, batches))
        scheduler.step()
    return norms, scheduler.last_epoch, net.state_dict()


def _of(name: str) -> tuple[int, int]:
    return next(
        (left for left in UNEVEN if str(left) in name), (0, 2) if name[6:] in {*POLICIES, "buffers"} else (1, 2)
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("flush")])
def test_flush_takes_the_mean_over_all_micro_batches_of_all_ranks(
    both: Callable[[str], tuple[Any, Any]], name: str
) -> None:
    first, second = both(name)
    assert not isinstance(first, str) and not isinstance(second, str), (first, second)
    assert first[:3] == second[:3] and _equal(first[3], second[3])
    norms, epochs, weights = _by_hand(_of(name), frozen="frozen" in name)
    low = name[6:] in POLICIES
    assert first[1] == epochs
    assert first[0] == pytest.approx(norms, rel=3e-2 if low else 1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(first[3][key], value, rtol=0, atol=2e-2 if low else 1e-6)


@case("unused", find=False)
@case("unused found", find=True)
def _experts(rank: int, find: bool) -> Any:
    net = Net()
    net.uses = [rank]
    optimizer = _sgd(net, weight_decay=0.1, momentum=0.9)
    hs.prepare(net, optimizer, policy="O0")
    step = hs.TrainStep(DistributedDataParallel(net, find_unused_parameters=find), optimizer, _loss, accumulate=WINDOW)
    step(_batch(rank, 0))
    step.flush()
    return _whole(net), sorted(optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", ["unused", "unused found"])
def test_flush_updates_what_any_rank_used_and_nothing_else(both: Callable[[str], tuple[Any, Any]], name: str) -> None:
    first, second = both(name)
    assert _equal(first[0], second[0]), (first, second)
    net = Net()
    optimizer = _sgd(net, weight_decay=0.1, momentum=0.9)
    for rank in range(2):
        net.uses = [rank]
        (_loss(net, _batch(rank, 0)) / 2).backward()
    optimizer.step()
    for key, value in net.state_dict().items():
        torch.testing.assert_close(first[0][key], value, rtol=0, atol=1e-6)
    assert torch.equal(first[0]["layers.2.weight"], Net().state_dict()["layers.2.weight"])
    assert first[1] == second[1] == sorted(optimizer.state_dict()["state"])


@case("overflow")
def _overflow(rank: int) -> Any:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    hs.prepare(net, optimizer, policy=hs.Policy.of("mixed", dtype="fp16"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def loss(model: nn.Module, index: Tensor, factor: float) -> Tensor:
        return _loss(model, index) * factor

    scaler = hs.GradScaler("cpu", init_scale=8.0)
    ddp = DistributedDataParallel(net)
    step = hs.TrainStep(ddp, optimizer, loss, accumulate=WINDOW, scaler=scaler, scheduler=scheduler)
    for i in range(rank):  # rank 0 has nothing left
        step(_batch(rank, i), float("inf"))
    result = step.flush()
    assert result is not None
    step.flush()
    return bool(result.skipped), scaler.get_scale(), scheduler.last_epoch, _whole(net)


def test_an_overflow_of_one_rank_skips_the_flush_of_all(both: Callable[[str], tuple[Any, Any]]) -> None:
    first, second = both("overflow")
    assert first[:3] == second[:3] == (True, 4.0, 0)
    assert _equal(first[3], second[3]) and _equal(first[3], Net().state_dict())


@case("subgroup")
def _subgroup(rank: int) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    net = Net()
    optimizer = _sgd(net)
    ddp = DistributedDataParallel(net, process_group=groups[rank])
    step = hs.TrainStep(ddp, optimizer, _loss, policy="O0", accumulate=WINDOW)
    for i in range(rank):
        step(_batch(rank, i))
    return step.flush() is not None


def test_flush_is_a_matter_of_the_ranks_of_the_process_group(both: Callable[[str], tuple[Any, Any]]) -> None:
    assert both("subgroup") == (False, True)


# ------------------------------------------------------------------ formats in which gradients are summed


def _counted(run: Callable[[], object]) -> dict[str, int]:
    """Return how many elements `run` sends in tensors of more than 64, by format."""
    sent: dict[str, int] = {}
    send = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.numel() > 64:
            kind = str(tensor.dtype).removeprefix("torch.")
            sent[kind] = sent.get(kind, 0) + tensor.numel()
        return send(tensor, *args, **options)

    dist.all_reduce = counting
    try:
        run()
    finally:
        dist.all_reduce = send
    return sent


SENT: dict[str, tuple[hs.Policy, dict[str, int]]] = {
    "pure, fp32 sums": (hs.Policy.of("pure", dtype="bf16", grads="fp32"), {"float32": 272}),
    "pure, fp32 sums, low sent": (hs.Policy.of("pure", dtype="bf16", grads="fp32", reduce="low"), {"bfloat16": 272}),
    "pure, fp32 sent": (hs.Policy.of("pure", dtype="bf16", reduce="fp32"), {"float32": 272}),
    "mixed, low sent": (hs.Policy.of("mixed", dtype="bf16", reduce="low"), {"bfloat16": 272}),
    "mixed fp16, low sent": (hs.Policy.of("mixed", dtype="fp16", reduce="low", scale=8.0), {"float16": 272}),
}


def _sent(rank: int, name: str, accumulate: int, width: int = 16) -> Any:
    """Return what was sent, how far the gradient is from the one made here, and the weights."""
    torch.manual_seed(0)
    policy, _ = SENT[name]
    net = nn.Linear(width, width)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    hs.prepare(net, optimizer, policy=policy)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, width, generator=generator) for _ in range(accumulate)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return (out.float() - 1).square().mean()

    before = net.state_dict()["weight"].clone()
    total, mine = torch.zeros(width, width, dtype=torch.float64), torch.zeros_like(net.weight, dtype=net.weight.dtype)
    for x in batches:
        loss(net, x).div(accumulate).backward()
        assert net.weight.grad is not None
        total += net.weight.grad
        mine += net.weight.grad  # in the parameter's format
        net.weight.grad = None
    net.zero_grad()
    step = hs.TrainStep(DistributedDataParallel(net), optimizer, loss, accumulate=accumulate)
    sent = _counted(lambda: [step(x) for x in batches])
    return sent, before - net.state_dict()["weight"], total, mine


for _name in SENT:
    case(f"sent {_name}", _name, 1)(_sent)
case("sent 64", "pure, fp32 sums", 64)(_sent)
case("sent 64 large", "pure, fp32 sums", 64, 256)(_sent)  # large enough for sums that autograd does not make


@pytest.mark.parametrize("name", SENT)
def test_the_wire_has_the_format_of_the_policy(both: Callable[[str], tuple[Any, Any]], name: str) -> None:
    first, second = both(f"sent {name}")
    assert not isinstance(first, str), first
    assert first[0] == second[0] == SENT[name][1]
    assert torch.equal(first[1], second[1])
    mean = (first[2] + second[2]) / 2
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(next(iter(first[0])))
    if low is not None:  # halves are exact: one rounding when each is sent, one when they are added
        mean = ((first[2] / 2).to(low) + (second[2] / 2).to(low)).double()
    torch.testing.assert_close(first[1].double(), mean, rtol=0, atol=2e-7)  # of subtracting from weights of about 1


@pytest.mark.parametrize("name", ["sent 64", "sent 64 large"])
def test_a_sum_of_64_micro_batches_on_each_rank_is_fp32s(both: Callable[[str], tuple[Any, Any]], name: str) -> None:
    first, second = both(name)
    assert not isinstance(first, str), first
    mean = (first[2] + second[2]) / 2
    assert float((first[1] - mean).norm() / mean.norm()) < 1e-5
    low = (first[3].double() + second[3].double()) / 2
    assert float((low - mean).norm() / mean.norm()) > 1e-3  # what a sum in bf16 would have been


@case("refused")
def _refusals(rank: int) -> dict[str, str]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.fsdp import fully_shard

    def prepared(policy: hs.Policy) -> tuple[nn.Linear, torch.optim.Optimizer]:
        net = nn.Linear(4, 4)
        optimizer = _sgd(net)
        hs.prepare(net, optimizer, policy=policy)
        return net, optimizer

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, model(x).float().sum())

    words: dict[str, str] = {}
    x = torch.ones(2, 4)
    low = hs.Policy.of("mixed", dtype="bf16", reduce="low")
    wide = hs.Policy.of("pure", dtype="bf16", grads="fp32")
    net, optimizer = prepared(low)
    hooked = DistributedDataParallel(net)
    hooked.register_comm_hook(None, fp16_compress_hook)
    words["hook"] = error_of(lambda: hs.TrainStep(hooked, optimizer, loss))
    net, optimizer = prepared(wide)
    static = DistributedDataParallel(net, static_graph=True)
    words["static"] = error_of(lambda: hs.TrainStep(static, optimizer, loss))
    net, optimizer = prepared(hs.Policy.of("mixed", dtype="bf16"))
    hooked = DistributedDataParallel(net)
    hooked.register_comm_hook(None, fp16_compress_hook)
    step = hs.TrainStep(hooked, optimizer, loss, accumulate=2)
    if rank:
        step(x)
    words["flush"] = error_of(step.flush)
    for name, policy in (("low", low), ("wide", wide)):
        for compiled in (False, True):
            net, _ = prepared(policy)
            inner = torch.compile(net, backend="eager") if compiled else net
            ddp = DistributedDataParallel(cast(nn.Module, inner))
            with torch.no_grad():
                ddp(x)
            with ddp.no_sync():
                loss(ddp, x).backward()
            words[f"loop {name} {compiled}"] = error_of(partial(loss, ddp, x))
    net, _ = prepared(low)
    fully_shard(net)
    words["shard loop"] = error_of(lambda: loss(net, x).backward())
    optimizer = _sgd(net)
    words["shard"] = error_of(lambda: hs.TrainStep(net, optimizer, loss))
    return words


@case("hooks")
def _hooks(rank: int) -> dict[str, Any]:
    """Hooks of torch under O2, whose gradients are sent in two buckets, and under mixed, in one."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)

    compressed = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    waiting: list[Any] = [powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook, compressed]
    waiting += [quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook]

    def wrapped(preset: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        net = _norm_net()
        optimizer = _sgd(net)
        hs.prepare(net, optimizer, policy=hs.Policy.of(preset, dtype="bf16"))
        return DistributedDataParallel(net), optimizer

    def step_of(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> hs.TrainStep:
        return hs.TrainStep(ddp, optimizer, lambda model, x: model(x).float().square().mean())

    words: dict[str, Any] = {}
    x = torch.ones(2, 8) + rank
    for i, hook in enumerate(waiting):
        ddp, optimizer = wrapped("O2")
        ddp.register_comm_hook(state() if i < 3 else None, hook)
        words[f"built {i}"] = error_of(partial(step_of, ddp, optimizer))
        words[f"loop {i}"] = error_of(partial(ddp, x))
    ddp, optimizer = wrapped("O2")
    step = step_of(ddp, optimizer)
    ddp.register_comm_hook(state(), powerSGD_hook.powerSGD_hook)
    words["late"] = error_of(partial(step, x))
    working: dict[str, Any] = {"O2": default_hooks.fp16_compress_hook, "mixed": powerSGD_hook.powerSGD_hook}
    for preset, hook in working.items():
        ddp, optimizer = wrapped(preset)
        ddp.register_comm_hook(None if preset == "O2" else state(), hook)
        step = step_of(ddp, optimizer)
        losses = [step(x).host().loss for _ in range(5)]
        words[preset] = losses[-1] < losses[0], [value.tolist() for value in ddp.state_dict().values()]
    return words


def test_a_hook_whose_callbacks_could_wait_for_each_other_is_refused(both: Callable[[str], tuple[Any, Any]]) -> None:
    first, second = both("hooks")
    assert not isinstance(first, str), first
    refused = [name for name in first if name not in {"O2", "mixed"}]
    assert len(refused) == 11
    for name in refused:
        assert first[name] == second[name]
        assert "in the callback of another, and gradients of bfloat16 and float32 (" in first[name], (name, first[name])
        assert "over gloo they wait for each other for good; leave the hook out" in first[name]
    for preset in ("O2", "mixed"):
        assert first[preset][0] and second[preset][0]
        assert first[preset][1] == second[preset][1]


def test_what_is_not_carried_out_is_refused_in_words(both: Callable[[str], tuple[Any, Any]]) -> None:
    first, second = both("refused")
    assert not isinstance(first, str), first
    assert first == second
    assert "reduce='low' needs an average of its own, and the communication hook 'fp16_compress_hook'" in first["hook"]
    assert "grads='fp32' over low parameters needs an average of its own, and static_graph=True" in first["static"]
    assert "flush() averages gradients outside of a backward pass, and the communication hook" in first["flush"]
    for compiled in (False, True):
        assert "so reduce='low' is not what a loop of one's own gets; train with hs" in first[f"loop low {compiled}"]
        assert "so grads='fp32' over low parameters is not what a loop" in first[f"loop wide {compiled}"]
    for name in ("shard loop", "shard"):
        assert "reduce='low', and fully_shard sums gradients in float32; use hs.shard(model, policy)" in first[name]


# ------------------------------------------------------------------ sharded models


@case("fsdp windows")
def _sharded_windows(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    net = hs.prepare(Net(), policy="O0")
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    optimizer = _sgd(net)
    step = hs.TrainStep(net, optimizer, _loss, accumulate=WINDOW)
    norms = []
    for i in range(WINDOW):
        result = step(_batch(rank, i))
    norms.append(float(result.grad_norm))
    step(_batch(rank, 10))
    flushed = step.flush()
    assert flushed is not None
    norms.append(float(flushed.grad_norm))
    return norms, _whole(net)


def test_windows_of_a_sharded_model_are_those_of_one_process(both: Callable[[str], tuple[Any, Any]]) -> None:
    first, second = both("fsdp windows")
    assert not isinstance(first, str), first
    net = Net()
    optimizer = _sgd(net)
    norms = []
    for batches in ([_batch(rank, i) for rank in range(2) for i in range(WINDOW)], [_batch(0, 10), _batch(1, 10)]):
        norms.append(_step_by_hand(net, optimizer, batches))
    assert first[0] == second[0] == pytest.approx(norms, rel=1e-5)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(first[1][key], value, rtol=0, atol=1e-6)
        assert torch.equal(first[1][key], second[1][key])


PARALLEL: dict[str, tuple[hs.Policy, dict[str, Any]]] = {
    "O0": (hs.Policy.of("O0"), {"clip_norm": 0.5}),
    "mixed bf16": (hs.Policy.of("mixed", dtype="bf16"), {"clip_norm": 0.5}),
    "mixed fp16": (hs.Policy.of("mixed", dtype="fp16"), {"clip_norm": 0.5}),
    "clipped values": (hs.Policy.of("O0"), {"clip_value": 0.01, "clip_norm": 0.1}),
    "clipped values fp16": (hs.Policy.of("mixed", dtype="fp16"), {"clip_value": 0.01}),
    "windows": (hs.Policy.of("O0"), {"accumulate": 2}),
    "low state": (hs.Policy.of("mixed", dtype="bf16", state="low"), {}),
}


def _tensor_parallel(rank: int, name: str, sequence: bool = False, alone: bool = False) -> Any:
    policy, options = PARALLEL[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    if not alone:
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (2,))
        if sequence:
            plan = {
                "0": ColwiseParallel(),
                "2": RowwiseParallel(output_layouts=Shard(0)),
                "3": SequenceParallel(sequence_dim=0),
                "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False),
            }
        else:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, mesh, cast(Any, plan))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        return cast(Tensor, (out.float() - 3).square().mean() * (float("inf") if x[0, 0] > 90 else 1.0))

    step = hs.TrainStep(net, optimizer, loss, policy=policy, **options)
    seen = []
    for i in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(i))
        if i == 2 and "accumulate" not in options:
            x[0, 0] = 100.0
        seen.append(step(x).host())
    saved = step.state_dict()
    step.load_state_dict(saved)
    seen.append(step(torch.ones(6, 8)).host())
    if "accumulate" in options:
        flushed = step.flush()
        assert flushed is not None
        seen.append(flushed.host())
    return [(s.loss, s.grad_norm, s.skipped, s.scale, len(s.culprits)) for s in seen], _whole(net)


for _name in PARALLEL:
    case(f"tensor {_name}", _name)(_tensor_parallel)
case("tensor sequence", "clipped values", sequence=True)(_tensor_parallel)  # norms get partial gradients there


@pytest.mark.parametrize("name", [*PARALLEL, "sequence"])
def test_plain_and_sharded_parameters_train_as_on_one_device(both: Callable[[str], tuple[Any, Any]], name: str) -> None:
    first, second = both(f"tensor {name}")
    assert not isinstance(first, str), first
    alone = _tensor_parallel(0, name if name in PARALLEL else "clipped values", alone=True)
    low = "O0" not in name and PARALLEL.get(name, PARALLEL["O0"])[0].dtype != "fp32"
    for mine, others, theirs in zip(first[0], second[0], alone[0], strict=True):
        assert repr(mine) == repr(others)
        assert mine[2:] == theirs[2:]
        assert mine[:2] == pytest.approx(theirs[:2], rel=2e-2 if low else 1e-4, nan_ok=True)
    for key, value in alone[1].items():
        assert torch.equal(first[1][key], second[1][key])
        torch.testing.assert_close(first[1][key], value, rtol=0, atol=2e-2 if low else 2e-5)


@case("tensor lone overflow")
def _lone_overflow(rank: int) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    whole: Any = {"0": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(net, init_device_mesh("cpu", (2,)), whole)
    if rank:
        cast(Tensor, net[1].weight).register_hook(lambda gradient: gradient * float("inf"))
    step = hs.TrainStep(net, _sgd(net), lambda m, x: m(x).float().exp().mean(), policy="O0", blackbox=False)
    before = _whole(net)
    result = step(torch.randn(3, 4)).host()
    return result.skipped, result.culprits, _equal(before, _whole(net))


def test_a_plain_gradient_that_overflows_on_one_rank_skips_the_step_of_all(
    both: Callable[[str], tuple[Any, Any]],
) -> None:
    assert both("tensor lone overflow") == ((True, ("1.weight",), True),) * 2


@case("tensor lowered")
def _lowered(rank: int) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    whole = cast(Any, net[0].weight).full_tensor()
    hs.prepare(net, policy=hs.Policy.of("O2", dtype="bf16"))
    behind = cast(Any, net.state_dict()["0.weight"])
    return str(net[0].weight.dtype), str(behind.dtype), bool(torch.equal(behind.full_tensor(), whole))


def test_parameters_sharded_before_are_lowered_part_by_part(both: Callable[[str], tuple[Any, Any]]) -> None:
    for found in both("tensor lowered"):
        assert found == ("torch.bfloat16", "torch.float32", True)
