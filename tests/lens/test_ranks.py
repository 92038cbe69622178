"""Gloo processes: every rank names the rank with the fault, and nothing that happens to a rank stops the others."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.lens import Verdict
from halfstep.lens.box import stepbox
from halfstep.lens.box.exchange import Exchange
from halfstep.lens.box.stepbox import StepBox
from tests.step.late import late
from tests.two_processes import in_two_processes, started

pytestmark = pytest.mark.dist

STATIC = hs.Policy.of("mixed", dtype="fp16", scale=64.0)
DYNAMIC = hs.Policy.of("mixed", dtype="fp16")
BF16 = hs.Policy.of("mixed", dtype="bf16")
SHORT = 1.0  # seconds that a rank waits for others in tests that let it wait
FAULTS = ("overflow", "bad_batch", "invalid")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.relu(self.norm(self.first(x))))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, much: Tensor) -> Tensor:
    """Return a loss that is fine for ``much = 1``; 1e6 overflows in fp16, and 0 has no logarithm."""
    h = model(x)
    h = h * much.to(h.dtype)
    return F.cross_entropy(h, y) * (1 + 0 * much.log())


def batch(step: int, rank: int, fault: str = "") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    if fault == "bad_batch":
        x[2, 1] = math.nan
    return x, y, torch.tensor({"overflow": 1e30, "invalid": 0.0, "scale": 3000.0}.get(fault, 1.0))


def built(
    kind: str, policy: hs.Policy, loss: Callable[..., Any] = loss_fn, *, scale: float | None = None, **options: Any
) -> hs.TrainStep:
    net = Net()
    if scale is not None:
        options["scaler"] = hs.GradScaler("cpu", init_scale=scale)
    if kind == "ddp":
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        hs.prepare(net, optimizer, policy=policy)
        return hs.TrainStep(DistributedDataParallel(net), optimizer, loss, **options)
    from torch.distributed.fsdp import fully_shard

    hs.prepare(net, policy=policy)
    for layer in (net.first, net.last):
        fully_shard(layer)
    fully_shard(net)
    return hs.TrainStep(net, torch.optim.AdamW(net.parameters(), 1e-2), loss, **options)


def box_of(step: hs.TrainStep) -> StepBox | None:
    box: StepBox | None = step._verdicts.box
    return box


def weights(step: hs.TrainStep) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in step.model.parameters()]


@contextmanager
def waits() -> Iterator[list[float]]:
    """Yield a list of how long the block waited for other ranks, in seconds: one for each time."""
    seconds: list[float] = []
    collect = Exchange.collect

    def timed(self: Exchange, topic: str, patience: float, **options: Any) -> Any:
        began = time.monotonic()
        answers = collect(self, topic, patience, **options)
        seconds.append(time.monotonic() - began)
        return answers

    Exchange.collect = timed  # type: ignore[method-assign]  # undone below
    try:
        yield seconds
    finally:
        Exchange.collect = collect  # type: ignore[method-assign]


class Collectives(TorchDispatchMode):
    """Counts what is sent by operators of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its type out
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if func.namespace in {"c10d", "_c10d_functional"} and "wait" not in func.__name__:
            self.seen[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ cases, run by both processes of one group


def blamed(rank: int) -> list[Any]:
    """Train through a fault on one rank, for each strategy, policy and fault; return both kinds of explanation."""
    found = []
    for number, (kind, policy) in enumerate((k, p) for k in ("ddp", "fsdp2") for p in (STATIC, DYNAMIC, BF16)):
        scale = 1024.0 if policy is DYNAMIC else None
        step, twin = (built(kind, policy, blackbox=boxed, scale=scale) for boxed in (True, False))
        explained: list[Any] = []
        for i, fault in enumerate(("", FAULTS[number % 3], "", FAULTS[(number + 1) % 3], "")):
            guilty = (number + i) % 2
            given = batch(i, rank, fault if guilty == rank else "")
            twin(*given)
            skipped = step(*given).host().skipped
            box = box_of(step)
            explained.append((fault, guilty, None if box is None else box.verdict, step.explain() if skipped else None))
        same = all(torch.equal(a, b) for a, b in zip(weights(step), weights(twin), strict=True))
        found.append((kind, policy, explained, same))
    return found


def behind(rank: int) -> list[Any]:
    """Train through a fault on the second rank, with flags that arrive late; return the verdicts after each update."""
    found = []
    for kind, accumulate in (("ddp", 1), ("ddp", 2), ("fsdp2", 1)):
        step, twin = (built(kind, STATIC, blackbox=boxed, accumulate=accumulate) for boxed in (True, False))
        landing = late(step)
        verdicts: list[Any] = []
        for i, fault in enumerate(("", "overflow", "", "")):
            for micro in range(accumulate):
                given = batch(10 * i + micro, rank, fault if rank and not micro else "")
                step(*given), twin(*given)
            box = box_of(step)
            verdicts.append(None if box is None else box.verdict)
        same = all(torch.equal(a, b) for a, b in zip(weights(step), weights(twin), strict=True))
        found.append((verdicts, landing.waits, same))
    return found


def torn(rank: int) -> list[Any]:
    """Train a sharded model with a weight that is not finite, in the part of the second rank."""
    step = built("fsdp2", BF16)
    step(*batch(0, rank))
    weight: Any = step.model.get_parameter("first.weight")
    if rank == 1:
        with torch.no_grad():
            weight.to_local()[0, 0] = math.inf
    step(*batch(1, rank))
    return [step.explain()]


def counted(rank: int) -> dict[str, Any]:
    """Return the collectives of a good and of a bad step, with a black box and without."""
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp2"):
        for boxed in (True, False):
            step = built(kind, STATIC, blackbox=boxed)
            for i, fault in enumerate(("", "", "overflow", "", "")):  # the last good one: the box is there
                with Collectives() as one:
                    step(*batch(i, rank, fault if rank else ""))
                found[f"{kind} {i} {boxed}"] = one.seen
    return found


def one_asks(rank: int) -> list[Any]:
    """Call explain() on the first rank alone, of a step that was not explained by itself; train on."""
    found: list[Any] = []
    for kind in ("ddp", "fsdp2"):
        step = built(kind, DYNAMIC, scale=1024.0)
        result = step(*batch(0, rank, "scale")).host()
        began = time.monotonic()
        verdict = step.explain() if rank == 0 else None
        waited = time.monotonic() - began
        step(*batch(1, rank))
        stepbox.PATIENCE = 60.0  # the rank is not taken for one that is missing
        step(*batch(2, rank, "bad_batch" if rank else ""))
        stepbox.PATIENCE = SHORT
        found.append((result.skipped, verdict, waited, step.explain(), weights(step)))
    return found


def off_on_one(rank: int) -> list[Any]:
    """Train with the black box on one rank only, through two bad steps; return verdicts and waits."""
    found = []
    for kind in ("ddp", "fsdp2"):
        step = built(kind, STATIC, blackbox=rank == 0)
        for i, fault in enumerate(("", "overflow", "", "overflow", "")):
            with waits() as seconds:
                step(*batch(i, rank, fault if rank else ""))
            if fault and rank == 0:
                found.append((step.explain(), *seconds))
    return found


def odd_replays(rank: int) -> list[Any]:
    """Train where a forward pass raises in the replay of one rank: that with the fault, or the other; train on."""
    found = []
    for raising in (0, 1):
        calls: list[int] = []

        def loss(model: Any, *given: Any, calls: list[int] = calls, raising: int = raising) -> Tensor:
            calls.append(0)
            if len(calls) != 2 or rank != raising:
                return loss_fn(model, *given)
            handle = model.norm.register_forward_hook(_fail)  # in the middle: fully_shard has begun a pass
            try:
                return loss_fn(model, *given)
            finally:
                handle.remove()

        for kind in ("ddp", "fsdp2"):
            calls.clear()
            step, twin = built(kind, STATIC, loss), built(kind, STATIC, blackbox=False)
            step(*batch(0, rank, "invalid" if rank else ""))
            verdict = step.explain()
            for i in (1, 2):
                step(*batch(i, rank))
                twin(*batch(i, rank))
            same = all(torch.equal(a, b) for a, b in zip(weights(step), weights(twin), strict=True))
            found.append((verdict, same))
    return found


def _fail(*args: Any) -> None:
    raise RuntimeError("the second call")


def left(rank: int) -> list[Any]:
    """Let the second rank run out of batches, and make the first one's steps bad after it."""
    step = built("ddp", STATIC)
    found: list[Any] = []
    with step.join():
        for i, fault in enumerate(("", "", "overflow", "", "bad_batch", "")[: 6 if rank == 0 else 2]):
            with waits() as seconds:
                skipped = step(*batch(i, rank, fault)).host().skipped
            found.append((skipped, step.explain() if skipped else None, *seconds))
    return found


def twins(rank: int) -> list[Any]:
    """Train two equal models, each with its own box, whose bad steps have the same number."""
    steps = [built("ddp", STATIC), built("ddp", STATIC)]
    for number, step in enumerate(steps):
        step(*batch(0, rank, "bad_batch" if rank == number else ""))
    return [step.explain() for step in steps]


def by_hand(rank: int) -> list[Any]:
    """Train a loop written by hand under DistributedDataParallel."""
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    box = hs.BlackBox(model, loss_fn, optimizer)
    found = []
    for i, fault in enumerate(("", "bad_batch", "", "invalid")):
        with model.no_sync() if i == 2 else nullcontext():
            box(*batch(i, rank, fault if rank else "")).backward()
        if fault:
            box.read()  # what the optimizer's step would ask for; without it weights stay finite
            found.append(box.explain())
        optimizer.zero_grad()
    return found


def filed(rank: int, folder: str) -> list[Any]:
    """Train with evidence; return the verdicts."""
    found = []
    for kind in ("ddp", "fsdp2"):
        step = built(kind, STATIC, blackbox=f"{folder}/{kind}")
        step(*batch(0, rank, "overflow" if rank else ""))
        found.append(step.explain())
    return found


def parallel(rank: int) -> list[Any]:
    """Train a tensor parallel model on a batch that is not finite."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    hs.prepare(net, policy=BF16)
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step = hs.TrainStep(net, torch.optim.SGD(net.parameters(), 1e-2), loss_fn)
    found = []
    for i, fault in enumerate(("bad_batch", "", "weight")):
        if fault == "weight" and rank == 1:
            with torch.no_grad():
                weight: Any = net[0].weight
                weight.to_local()[0, 0] = math.inf
        if step(*batch(i, 0, fault)).host().skipped:
            found.append(step.explain())
    return found


def streak(rank: int) -> list[Any]:
    """Train through four steps whose gradients are not finite: at no scale on the second rank, or at this one."""

    def sloped(model: nn.Module, x: Tensor, y: Tensor, much: Tensor) -> Tensor:
        h = model(x).float()
        root = (h * 0).sum().sqrt() if float(much) == 0 else h.new_zeros(())  # finite, with a gradient that is not
        return F.cross_entropy(h, y) * max(float(much), 1.0) + root  # type: ignore[no-any-return]

    found: list[Any] = []
    for kind in ("ddp", "fsdp2"):
        for fault in ("invalid", "scale"):
            step = built(kind, DYNAMIC, sloped, scale=2.0**16)
            said: list[Any] = []
            for i in range(4):
                skipped = step(*batch(i, rank, fault if rank else "")).host().skipped
                box = box_of(step)
                said.append((skipped, None if box is None else box.verdict))
            found.append(said)
    return found


CASES: dict[str, Callable[..., Any]] = {
    "streak": streak,
    "blamed": blamed,
    "behind": behind,
    "torn": torn,
    "counted": counted,
    "one_asks": one_asks,
    "off_on_one": off_on_one,
    "odd_replays": odd_replays,
    "left": left,
    "twins": twins,
    "by_hand": by_hand,
    "parallel": parallel,
}
PATIENT = {
    "blamed",
    "streak",
    "behind",
    "torn",
    "counted",
    "twins",
    "by_hand",
    "odd_replays",
    "parallel",
}  # a wait would hide a fault


def _all(rank: int, folder: str) -> dict[str, Any]:
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of a static scale, about each bad step
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        stepbox.PATIENCE, stepbox.ASKED = (60.0, 60.0) if name in PATIENT else (SHORT, SHORT)
        stepbox.REPLAYS = 30 if name in PATIENT else 0
        began = time.monotonic()
        found[name] = case(rank)
        found[f"{name} seconds"] = time.monotonic() - began
    stepbox.PATIENCE = 60.0
    found["filed"] = filed(rank, folder)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """What the cases return in each of two processes: starting them is what takes long; and the evidence."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    first, second = in_two_processes(_all, folder, str(folder / "evidence"))
    return first, second, folder / "evidence"


Both = tuple[dict[str, Any], dict[str, Any], Path]


def test_every_rank_names_the_rank_with_the_fault_and_trains_as_without_a_box(both: Both) -> None:
    for (kind, policy, mine, same), (_, _, others, also) in zip(both[0]["blamed"], both[1]["blamed"], strict=True):
        assert same and also, (kind, policy.scale)
        for (fault, guilty, by_itself, asked), (_, _, theirs, asked_there) in zip(mine, others, strict=True):
            where = (kind, policy.dtype, policy.scale, fault)
            assert by_itself == theirs and asked == asked_there, where
            if fault:
                assert by_itself == asked and (asked.kind, asked.rank) == (fault, guilty), where
                assert asked.ranks == (guilty,) and f"on rank {guilty}" in asked.headline, where
                assert "no verdict" not in str(asked) and asked.cures, where


def test_the_third_bad_step_in_a_row_is_decided_together(both: Both) -> None:
    assert both[0]["streak"] == both[1]["streak"] and both[0]["streak seconds"] < 60
    for number, steps in enumerate(both[0]["streak"]):
        assert all(skipped for skipped, _ in steps[:3])
        *before, verdict = [verdict for _, verdict in steps[:3]]
        assert before == [None, None]
        if number % 2 == 0:
            assert (verdict.kind, verdict.op, verdict.ranks, verdict.step) == ("invalid", "sqrt", (1,), 3)
        else:  # sharded parameters are gathered for the replay that decides, which makes a verdict
            assert verdict is None if number == 1 else verdict.kind == "scale_too_high"


def test_ranks_whose_flags_are_late_examine_a_bad_update_together_before_the_next(both: Both) -> None:
    assert both[0]["behind"] == both[1]["behind"] and both[0]["behind seconds"] < 60
    for verdicts, waits_, same in both[0]["behind"]:
        assert same and waits_ == 3 and verdicts[:2] == [None, None]
        for verdict in verdicts[2:]:
            assert (verdict.kind, verdict.ranks) == ("overflow", (1,)) and "no verdict" not in str(verdict)


def test_a_sharded_weight_that_is_not_finite_is_named_with_the_rank_that_has_it(both: Both) -> None:
    assert both[0]["torn"] == both[1]["torn"]
    (verdict,) = both[0]["torn"]
    assert (verdict.kind, verdict.parameter, verdict.ranks) == ("bad_state", "first.weight", (1,))
    assert "in the part of it that rank 1 has" in verdict.notes


def test_a_good_step_costs_no_collective_and_a_bad_one_gathers_sharded_parameters_once(both: Both) -> None:
    for seen in (both[0]["counted"], both[1]["counted"]):
        for kind in ("ddp", "fsdp2"):
            for i in (0, 1, 3, 4):
                assert seen[f"{kind} {i} True"] == seen[f"{kind} {i} False"], (kind, i)
            assert seen[f"{kind} 1 True"].total() > 0
        assert seen["ddp 2 True"] == seen["ddp 2 False"]
        more = seen["fsdp2 2 True"] - seen["fsdp2 2 False"]
        assert more == {"allgather_base": 3}  # one for each module of fully_shard


def test_explain_on_one_rank_waits_for_a_bounded_time_and_names_the_missing_rank(both: Both) -> None:
    kinds = ("scale_too_high", "not_reproducible")  # a sharded model is replayed by all ranks or by none
    for kind, mine, others in zip(kinds, both[0]["one_asks"], both[1]["one_asks"], strict=True):
        skipped, verdict, waited, after, weights_here = mine
        assert skipped and others[0] and others[1] is None
        assert any("no verdict came from rank 1" in note for note in verdict.notes), verdict
        assert verdict.kind == kind and SHORT < waited < 60
        assert after == others[3] and (after.kind, after.rank) == ("bad_batch", 1)
        assert all(torch.equal(a, b) for a, b in zip(weights_here, others[4], strict=True))


def test_a_rank_without_a_box_is_waited_for_once(both: Both) -> None:
    assert both[1]["off_on_one"] == []
    for (first, long), (second, short) in zip(*[iter(both[0]["off_on_one"])] * 2, strict=True):
        for verdict in (first, second):
            assert verdict.kind == "not_reproducible", verdict
            assert any("no verdict came from rank 1" in note for note in verdict.notes)
        assert long > SHORT > short


def test_a_replay_that_raises_is_reported_and_the_fault_still_found(both: Both) -> None:
    found = both[0]["odd_replays"]
    assert found == both[1]["odd_replays"]
    assert all(same for _, same in found)
    for verdict, _ in found[:2]:  # the rank without a fault could not be replayed
        assert (verdict.kind, verdict.op, verdict.rank) == ("invalid", "log", 1)
    for verdict, _ in found[2:]:  # the one with it
        assert (verdict.kind, verdict.parameter, verdict.rank) == ("not_reproducible", "the loss", 1)
        assert "is not finite; not replayed" in verdict.headline and "the second call" in verdict.headline


def test_a_rank_that_has_left_by_join_is_waited_for_once(both: Both) -> None:
    assert [skipped for skipped, *_ in both[0]["left"]] == [False, False, True, False, True, False]
    assert [skipped for skipped, *_ in both[1]["left"]] == [False, False]
    (_, first, long), (_, second, short) = (both[0]["left"][i] for i in (2, 4))
    assert (first.kind, first.rank, second.kind, second.rank) == ("overflow", 0, "bad_batch", 0)
    assert long > SHORT > short


def test_boxes_of_equal_models_do_not_mix_their_verdicts(both: Both) -> None:
    assert both[0]["twins"] == both[1]["twins"]
    assert [verdict.rank for verdict in both[0]["twins"]] == [0, 1]


def test_a_loop_written_by_hand_names_the_rank_too(both: Both) -> None:
    assert both[0]["by_hand"] == both[1]["by_hand"]
    assert [(v.kind, v.rank) for v in both[0]["by_hand"]] == [("bad_batch", 1), ("invalid", 1)]


def test_a_tensor_parallel_model_is_not_replayed_and_its_tensors_are_examined(both: Both) -> None:
    assert both[0]["parallel"] == both[1]["parallel"]
    first, second = both[0]["parallel"]
    assert (first.kind, first.parameter, first.ranks) == ("bad_batch", "input 0", (0, 1))
    assert (second.kind, second.parameter, second.rank) == ("bad_state", "0.weight", 1)
    assert all(any("not replayed" in note for note in verdict.notes) for verdict in (first, second))
    assert "in the part of it that rank 1 has" in second.notes


def test_evidence_is_written_by_the_rank_with_the_fault_and_replays_in_one_process(both: Both) -> None:
    assert both[0]["filed"] == both[1]["filed"]
    task = hs.Task(
        name="ranks",
        model=Net,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-2),
        batches=lambda seed, step: (),
    )
    for kind in ("ddp", "fsdp2"):
        files = sorted(path.name for path in (both[2] / kind).iterdir())
        assert files == ["halfstep-blackbox-1-rank1.pt", "halfstep-blackbox-1-rank1.txt"]
        assert "on rank 1" in (both[2] / kind / files[1]).read_text()
        assert torch.load(both[2] / kind / files[0], weights_only=True)["rank"] == 1
        verdict = hs.lens.replay(both[2] / kind / files[0], task)
        assert (verdict.kind, verdict.op) == (both[0]["filed"][0].kind, both[0]["filed"][0].op) == ("overflow", "to")


# ------------------------------------------------------------------ a rank that is killed


def _killed(rank: int, folder: str) -> None:
    """Let the second rank be killed in its replay, while the first one waits for its verdict."""
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    stepbox.PATIENCE, stepbox.REPLAYS = SHORT, 0
    dist.init_process_group("gloo", Path(folder, "meeting").as_uri(), world_size=2, rank=rank)
    calls: list[int] = []

    def loss(model: nn.Module, *given: Any) -> Tensor:
        calls.append(0)
        if len(calls) == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(model, *given)

    step = built("ddp", STATIC, loss)
    result = step(*batch(0, rank, "invalid" if rank == 0 else "")).host()
    Path(folder, "verdict").write_bytes(pickle.dumps((result.skipped, step.explain())))
    os._exit(0)


def test_a_rank_that_is_killed_while_the_others_wait_for_it_does_not_stop_them(tmp_path: Path) -> None:
    context = started(_killed, (str(tmp_path),))
    for process in context.processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL]
    skipped, verdict = pickle.loads((tmp_path / "verdict").read_bytes())
    assert isinstance(verdict, Verdict)
    assert skipped and (verdict.kind, verdict.op, verdict.rank) == ("invalid", "log", 0)
    assert any("no verdict came from rank 1" in note for note in verdict.notes)
