"""Plans for several devices: bytes of a rank and its collectives, beside arithmetic and what real ranks did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep as hs
from halfstep.advise.plan import MemoryPlan
from halfstep.advise.plan.ledger import Ddp, sent
from tests.advise.plan import counted_ranks
from tests.distributed.strategies import Net, batches, loss_of, policy
from tests.two_processes import in_two_processes

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of torch, about views

RECORDED = Path("benchmarks/results/collectives.json")
HSDP = "shard, hsdp"  # on two groups
QUICK = {
    ("ddp", 4, "O2:bf16"),
    (HSDP, 4, "pure:bf16"),
    ("fsdp2", 4, "mixed:bf16"),
    ("fsdp2", 2, "pure:bf16:reduce=fp32"),
}


def plan_of(name: str, shard: str, devices: int, replicas: int = 1) -> MemoryPlan:
    batch = next(batches(0, 0, part=(0, devices // replicas)))
    return hs.plan(
        Net, batch, loss_of, lambda model: torch.optim.AdamW(model.parameters()), policy=policy(name), devices=devices,
        shard=shard, replicas=replicas, clip_norm=1.0,
    )  # fmt: skip


def recorded() -> Iterator[Any]:
    """Yield cases: (way, processes, policy, collectives, bytes put in) of a step, as gloo processes sent them."""
    for row in json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]:
        way = {"ddp": "ddp", "ddp, reduce=low": "ddp", "shard": "fsdp2", HSDP: HSDP}.get(row["strategy"])
        if way is not None and (row["policy"] in {"mixed:bf16", "O2:bf16", "pure:bf16", "pure:bf16:reduce=fp32"}):
            number, size = (row["passes"][key] + row["good"][key] for key in ("number", "bytes"))
            case = way, row["processes"], row["policy"]
            yield pytest.param(*case, number, size, marks=() if case in QUICK else pytest.mark.hours)


@pytest.mark.parametrize(("way", "processes", "name", "number", "size"), list(recorded()))
def test_a_step_sends_what_real_ranks_sent(way: str, processes: int, name: str, number: int, size: int) -> None:
    found = (plan_of(name, "fsdp2", processes, 2) if way == HSDP else plan_of(name, way, processes)).sent
    assert (sum(one.number for one in found), sum(one.put_in for one in found)) == (number, size)


def test_a_rank_keeps_its_padded_part_of_parameters_and_state() -> None:
    devices = 3
    plan = plan_of("pure:bf16:master=split", "fsdp2", devices)
    rows = [-(-p.shape[0] // devices) * (p.numel() // p.shape[0]) for p in Net().parameters()]  # the first rank's
    parts = plan.by_part(peak=False)
    # fully_shard pads a group's parameters to equal parts, as the first rank's are
    assert parts["parameters"] == 2 * sum(rows) and parts["precise values"] == 2 * sum(rows)
    assert 0 <= parts["optimizer state"] - 8 * sum(rows) <= 4 * len(rows)  # counters of steps
    assert sum(rows) > sum(p.numel() for p in Net().parameters()) / devices  # parts are uneven: padding counts


def test_ddp_adds_its_buckets_and_nothing_else() -> None:
    alone = plan_of("mixed:bf16", "none", 1)
    together = plan_of("mixed:bf16", "ddp", 2)
    buckets = sum(4 * p.numel() for p in Net().parameters())
    batch = alone.by_part()["batch"] // 2 - 2  # half of the rows; the factor has none
    assert together.by_part()["communication"] == buckets
    assert abs(together.persistent_bytes - alone.persistent_bytes - buckets) <= batch + 4
    assert together.devices == 2 and together.shard == "ddp"


def test_ddp_sends_low_or_fp32_as_the_policy_says() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    size = sum(p.numel() for p in model.parameters())
    grad, low = (Ddp(model, hs.Policy.of("mixed", dtype="bf16", reduce=each)) for each in ("grad", "low"))
    assert [sum(n for _, n in one.seen) for one in (grad, low)] == [4 * size, 2 * size]
    assert grad.sending == 0 and low.sending == max(n for _, n in low.seen)
    assert len(grad.seen) == 2  # 4 MiB reach the first bucket's cap of 1 MiB, the rest stays below 25
    model.to(torch.bfloat16)
    own = Ddp(model, hs.Policy.of("pure", dtype="bf16", reduce="fp32"))
    assert [n for _, n in own.seen] == [4 * 4, 4 * size] and own.sending == 2 * 4 * size + 2 * size


def test_groups_of_devices_shard_as_one_alone_and_sum_their_gradients() -> None:
    alone, both = plan_of("mixed:bf16", "fsdp2", 2), plan_of("mixed:bf16", "fsdp2", 4, replicas=2)
    for part in ("parameters", "optimizer state", "communication"):
        assert both.by_part(peak=False).get(part) == alone.by_part(peak=False).get(part)
    assert both.replicas == 2 and both.peak_bytes >= alone.peak_bytes
    mine, more = ({one.collective: one for one in plan.sent} for plan in (alone, both))
    assert mine["all-gather"] == more["all-gather"] and mine["reduce-scatter"] == more["reduce-scatter"]
    assert more["all-reduce"].ring == more["all-reduce"].put_in  # twice half of it, to the other group


def test_bytes_of_a_ring() -> None:
    (gather, scatter, reduce) = sent(
        [("_allgather_base_", 10), ("_reduce_scatter_base_", 80), ("allreduce_", 80)], devices=8
    )
    assert (gather.ring, scatter.ring, reduce.ring) == (70, 70, 140)


def test_a_process_group_is_left_as_it_was(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    plan_of("pure:bf16", "fsdp2", 2)
    assert not dist.is_initialized()
    with pytest.raises(hs.HalfstepError, match="ZeroDivisionError"):
        hs.plan(Net, (), lambda model: 1 / 0, lambda m: torch.optim.SGD(m.parameters()), devices=2, shard="fsdp2")
    assert not dist.is_initialized()
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    try:
        with pytest.raises(hs.HalfstepError, match="needs a process group of its own"):
            plan_of("pure:bf16", "fsdp2", 2)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"shard": "fsdp"}, "and is 'fsdp'; did you mean 'fsdp2'"),
        ({"shard": "ddp"}, "shard='ddp' needs devices=2 or more, and devices is 1"),
        ({"devices": 4}, "devices=4 need a way to share the work: shard='ddp' or shard='fsdp2'"),
        ({"devices": 0}, "devices must be a whole number from 1 and is 0"),
        ({"units": ["blocks.*"]}, "they need shard='fsdp2'"),
        ({"devices": 4, "shard": "fsdp2", "replicas": 3}, "replicas=3 with devices=4 and shard='fsdp2': groups of"),
        ({"devices": 4, "shard": "ddp", "replicas": 2}, "groups of devices that shard a model among them need"),
        ({"devices": 2, "shard": "fsdp2", "units": ["blokcs"]}, "'blokcs' is no module of the model"),
        ({"gpu": "h20"}, "unknown GPU 'h20'; did you mean 'h200'?"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1 or None and is 0"),
    ],
)
def test_bad_input_says_what_is_wrong(options: dict[str, Any], answer: str) -> None:
    with pytest.raises(hs.HalfstepError) as error:
        hs.plan(
            Net, next(batches(0, 0)), loss_of, lambda model: torch.optim.SGD(model.parameters()), policy="mixed",
            **options,
        )  # fmt: skip
    assert answer in str(error.value)


# ------------------------------------------------------------------ beside two real processes

PERSISTENT, PEAK = 0.03, 0.10
REAL = [("fsdp2", n) for n in ("O0", "mixed", "O2", "pure", "pure:reduce=fp32", "lean")]
REAL += [("ddp", n) for n in ("O0", "mixed", "O2", "pure", "pure:reduce=fp32", "mixed:reduce=low")]


@pytest.mark.hours
@pytest.mark.dist
@pytest.mark.parametrize(("way", "name"), REAL)
def test_a_plan_is_what_two_processes_allocate_and_send(tmp_path: Path, way: str, name: str) -> None:
    found = in_two_processes(counted_ranks.counted, tmp_path, way, name)[0]
    plan = hs.plan(
        counted_ranks.model, counted_ranks.batch(), counted_ranks.loss_fn, counted_ranks.optimizer,
        policy=counted_ranks.policy(name), devices=2, shard=way,
    )  # fmt: skip
    persistent, peak = found["persistent"], found["peak"]
    assert abs(plan.persistent_bytes / persistent - 1) <= PERSISTENT, (plan.by_part(peak=False), found)
    assert abs(plan.peak_bytes / peak - 1) <= PEAK, (plan.by_part(), found)
    seen = [(one.collective, one.number, one.put_in) for one in sent(found["seen"], 2)]
    assert seen == [(one.collective, one.number, one.put_in) for one in plan.sent]
