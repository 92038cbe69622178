"""What else shards or overlaps in torch: ZeroRedundancyOptimizer, FullyShardedDataParallel, DDP's casts and updates.

Each works as the loop of one process, or is refused with what to use in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import halfstep as hs
from tests.distributed.checks import deviation
from tests.distributed.strategies import CLIP, Net, batches, loss_of, policy, whole
from tests.two_processes import error_of, in_two_processes

pytestmark = [pytest.mark.dist, pytest.mark.hours]

PRESETS = ("O0", "torch:bf16", "O1:bf16", "mixed:bf16", "mixed:fp16", "O3:bf16")
LOW = ("O2:bf16", "pure:bf16", "pure:bf16:master=split", "pure:bf16:state=low")


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


# ------------------------------------------------------------------ ZeroRedundancyOptimizer


def _zero(rank: int, wanted: str, *, shards: bool) -> dict[str, Any]:
    """Train five updates, the third of which rank 1 makes overflow, and two more from a checkpoint of rank 0."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = hs.prepare(_net(), policy=policy(wanted))
    ddp = DistributedDataParallel(net)
    optimizer: Any = AdamW(net.parameters(), lr=1e-2, foreach=True)
    if shards:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2, foreach=True)
    step = hs.TrainStep(ddp, optimizer, loss_of, clip_norm=CLIP, blackbox=False)
    skipped = []
    for i in range(5):
        factor = float("inf") if i == 2 and rank == 1 else 1.0
        skipped.append(bool(step(*next(batches(i, 0, part=(rank, 2), factor=factor))).skipped))
    for each in range(2):
        if shards:
            optimizer.consolidate_state_dict(each)
        if rank == each:
            saved = step.state_dict()
    step.load_state_dict(saved)
    step.load_state_dict(saved)  # which nothing was taken out of
    for i in range(5, 7):
        step(*next(batches(i, 0, part=(rank, 2))))
    return {"skipped": skipped, "weights": whole(ddp), "scale": step.scaler.get_scale()}


def zeros(rank: int, presets: tuple[str, ...] = PRESETS) -> dict[Any, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[Any, Any] = {
        name: (_zero(rank, name, shards=True), _zero(rank, name, shards=False)) for name in presets
    }
    for name in LOW:
        net = _net()
        sharded = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
        wanted = policy(name)
        found[name] = error_of(partial(hs.TrainStep, net, sharded, loss_of, policy=wanted))
        found[name, "untouched"] = whole(net)
    net = hs.prepare(_net(), policy="mixed")
    overlapping = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2, overlap_with_ddp=True)
    found["overlap"] = error_of(lambda: hs.TrainStep(DistributedDataParallel(net), overlapping, loss_of))
    return found


# ------------------------------------------------------------------ FullyShardedDataParallel, in any order


def flat(rank: int) -> dict[Any, str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped(module: nn.Module, *, original: bool) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=original)

    def parts(net: Net, *, original: bool) -> nn.Module:
        for i, block in enumerate(net.blocks):
            net.blocks[i] = wrapped(block, original=original)
        return net

    batch = next(batches(0, 0))
    found: dict[Any, str] = {}
    for original in (False, True):
        for name in ("mixed:fp16", "pure:bf16"):

            def prepared(shard: Callable[..., nn.Module], name: str = name, original: bool = original) -> nn.Module:
                return shard(hs.prepare(_net(), policy=policy(name)), original=original)

            def step(model: nn.Module) -> hs.TrainStep:
                return hs.TrainStep(model, AdamW(model.parameters()), loss_of)

            def first(name: str = name, original: bool = original) -> None:
                model = wrapped(_net(), original=original)
                hs.prepare(model, AdamW(model.parameters()), policy=policy(name))

            words: dict[str, Callable[[], object]] = {
                "prepared, wrapped, step": lambda: step(prepared(wrapped)),
                "prepared, wrapped, loop": lambda: loss_of(prepared(wrapped), *batch),
                "prepared, parts, step": lambda: step(prepared(parts)),
                "prepared, parts, loop": lambda: loss_of(prepared(parts), *batch),
                "wrapped, prepared": first,
            }
            found |= {(original, name, order): error_of(run) for order, run in words.items()}
    return found


# ------------------------------------------------------------------ what DistributedDataParallel does itself


def overlapping(rank: int) -> dict[str, str]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel.distributed import _MixedPrecision

    def step(ddp: DistributedDataParallel) -> str:
        return error_of(lambda: hs.TrainStep(ddp, AdamW(ddp.parameters()), loss_of, policy="mixed"))

    updating = DistributedDataParallel(_net())
    updating._register_fused_optim(torch.optim.SGD, lr=0.1)
    casting = DistributedDataParallel(_net(), mixed_precision=_MixedPrecision(torch.bfloat16))
    plain = DistributedDataParallel(_net())
    plain.register_comm_hook(None, allreduce_hook)
    return {"updating": step(updating), "casting": step(casting), "plain": step(plain)}


def low_sent(rank: int) -> dict[str, Any]:
    """Train with ``reduce="low"``: by a hook, by a hook over a static graph, by a copy; then without the policy."""

    def trained(step: hs.TrainStep, numbers: range) -> dict[str, torch.Tensor]:
        for i in numbers:
            step(*next(batches(i, 0, part=(rank, 2))))
        return whole(step.model)

    def made(**options: Any) -> hs.TrainStep:
        net = hs.prepare(_net(), policy=policy("mixed:bf16:reduce=low"))
        ddp = DistributedDataParallel(net, **options)
        return hs.TrainStep(ddp, AdamW(net.parameters(), 1e-2), loss_of, blackbox=False)

    first = made()
    found: dict[str, Any] = {"hook": trained(first, range(3)), "static": trained(made(static_graph=True), range(3))}
    other = copy.deepcopy(first)
    found["copied"] = trained(first, range(3, 5)), trained(other, range(3, 5))
    ddp = first.model
    again = hs.TrainStep(ddp, first.optimizer, loss_of, blackbox=False)
    found["again"] = trained(again, range(5, 6)), trained(other, range(5, 6))
    hs.unprepare(ddp)
    plain = DistributedDataParallel(copy.deepcopy(cast(DistributedDataParallel, ddp).module))
    gradients = []
    for model in (ddp, plain):
        model.zero_grad()
        loss_of(model, *next(batches(7, 0, part=(rank, 2)))).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    found["unprepared"] = gradients
    return found


def _all(rank: int) -> dict[str, Any]:
    return {"low sent": low_sent(rank), "zero": zeros(rank), "flat": flat(rank), "overlapping": overlapping(rank)}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two_processes(_all, tmp_path_factory.mktemp("others"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_zero_redundancy_optimizer_trains_as_the_one_it_shards(both: list[dict[str, Any]], name: str) -> None:
    for each in both:
        sharded, whole_one = each["zero"][name]
        assert sharded["skipped"] == whole_one["skipped"] == [False, False, True, False, False]
        assert sharded["scale"] == whole_one["scale"]
        assert deviation(sharded["weights"], whole_one["weights"], whole(_net())) <= 1e-5
        assert deviation(sharded["weights"], both[0]["zero"][name][0]["weights"], whole(_net())) == 0.0


@pytest.mark.parametrize("name", LOW)
def test_a_zero_redundancy_optimizer_is_refused_over_low_weights(both: list[dict[str, Any]], name: str) -> None:
    for each in both:
        assert "WeightsError: ZeroRedundancyOptimizer sends low weights" in each["zero"][name]
        assert "fully_shard" in each["zero"][name]
        assert all(torch.equal(value, whole(_net())[key]) for key, value in each["zero"][name, "untouched"].items())


def test_a_sharded_flat_parameter_is_refused_in_every_order(both: list[dict[str, Any]]) -> None:
    for each in both:
        for (original, name, order), words in each["flat"].items():
            early = original and name == "pure:bf16" and order.startswith("prepared")  # its weights refuse the pieces
            assert ("was given data of shape" if early else "is sharded by FullySharded") in words, (order, words)
            assert early or "use hs.shard(model, policy) in its place" in words


def test_updates_and_casts_inside_the_backward_pass_are_refused(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert "overlap_with_ddp" in each["zero"]["overlap"]
        assert "updates parameters in the backward pass" in each["overlapping"]["updating"]
        assert "mixed_precision" in each["overlapping"]["casting"]
        assert each["overlapping"]["plain"] == "ran"


def test_low_gradients_are_sent_by_a_hook_of_prepared_models_alone(both: list[dict[str, Any]]) -> None:
    for each in (ranks["low sent"] for ranks in both):
        first = both[0]["low sent"]
        for one, other in (
            (each["hook"], first["hook"]),
            (each["hook"], each["static"]),
            each["copied"],
            each["again"],
        ):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert torch.equal(*each["unprepared"])
