"""Kill training runs at random points, restart them, and compare the bits they end with; write a JSON file.

    python -m benchmarks.kills --json benchmarks/results/kills.json

Every run saves with `hs.save` after every third update and is started again, with `hs.load`, until it has made all of
its updates. SIGKILL comes at a random time, or at a random call of those that write a checkpoint (a write, a flush to
the disk, the rename); of several ranks one gets it, and the others are killed then, as torchrun does. Runs are forked
from this process, so that they need not import torch again. A full disk is a limit on the size of files (RLIMIT_FSIZE).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # fully_shard imports it, and forked processes need not
import torch.distributed as dist
import torch.distributed.checkpoint  # likewise
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from benchmarks.stamp import write
from halfstep.checkpoints import files
from halfstep.errors import CheckpointError
from halfstep.tasks import machine

UPDATES, EVERY, WIDTH = 24, 3, 96
LIMIT = 120.0  # seconds of one process


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        title: as the table shows it.
        ranks: processes.
        policy: a preset, with dtype fp16 and a scale that overflows at first.
        shard: whether `fully_shard` shards the model; else DistributedDataParallel where there are several ranks.
        moment: "time", or "write": when it is killed.
        wait: as `hs.save` takes it.
    """

    title: str
    ranks: int = 1
    policy: str = "O2"
    shard: bool = False
    moment: str = "time"
    wait: bool = True


CASES = {
    "one": Case("one process, at a random time"),
    "one_writing": Case("one process, while it writes", moment="write"),
    "one_background": Case("one process, `wait=False`, at a random time", wait=False),
    "two": Case("two ranks, DDP, at a random time", ranks=2),
    "two_writing": Case("two ranks, DDP, while rank 0 writes", ranks=2, moment="write"),
    "two_sharded": Case("two ranks, `fully_shard`, at a random time", ranks=2, policy="mixed", shard=True),
    "two_sharded_writing": Case(
        "two ranks, `fully_shard`, while one writes", ranks=2, policy="mixed", shard=True, moment="write"
    ),
}


@dataclass
class Death:
    """Counts the calls that write, and kills the process at call `at`; 0: never.

    Attributes:
        limit: bytes that a file may have, of the second checkpoint of a process; None: any.
    """

    at: int = 0
    calls: int = 0
    limit: int | None = None
    refused: list[str] = field(default_factory=list)

    def watch(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **options)

        setattr(owner, name, watched)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out.float() - x[:, :4]).square().mean() * 100


def built(case: Case, rank: int) -> hs.TrainStep:
    """Build the step of a run; dropout draws from the generator of each rank."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 4))
    policy = hs.Policy.of(case.policy, dtype="fp16", scale=hs.ScaleRule(init=2.0**22, interval=5))
    wrapped: nn.Module = model
    if case.shard:
        hs.prepare(model, policy=policy)
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        hs.prepare(model, optimizer, policy=policy)
        wrapped = DistributedDataParallel(model) if case.ranks > 1 else model
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    return hs.TrainStep(wrapped, optimizer, loss_fn, policy=policy, scheduler=schedule, clip_norm=1.0)


def bits(step: hs.TrainStep, case: Case, rank: int) -> Any:
    """Return all that a run ends with, in plain numbers.

    Without the buffers of DDP's other ranks, in whose place DDP puts those of rank 0 at the next forward pass.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        return full.tolist() if isinstance(full, Tensor) else full

    state = {key: value for key, value in step.state_dict().items() if key != "policy"}
    if rank and not case.shard:
        state["model"] = {name: value for name, value in state["model"].items() if "running_" not in name}
    return [plain(state), torch.get_rng_state().tolist(), random.random()]


def run(case: Case, rank: int, folder: Path, meeting: str, death: Death) -> None:
    """Make the updates that are still to make, in this process; write the bits at the end."""
    if case.ranks > 1:
        dist.init_process_group("gloo", f"file://{folder / meeting}", timedelta(seconds=60), case.ranks, rank)
    step = built(case, rank)
    loaded = hs.load(step, folder / "runs", missing_ok=True)
    for owner, name in ((files._Hashed, "write"), (os, "fsync"), (Path, "rename")):
        death.watch(owner, name)
    for number in range(loaded.step if loaded else 0, UPDATES):
        step(torch.randn(8, 16) + random.random())
        if (number + 1) % EVERY == 0:
            if death.limit is not None:
                small = death.limit if number + 1 == 2 * EVERY else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (small, resource.RLIM_INFINITY))
            try:
                hs.save(step, folder / "runs", wait=case.wait, extra={"number": number})
            except CheckpointError as error:
                death.refused.append(str(error))
                left = torch.load(files.checkpoints(folder / "runs")[0] / files.STATE, weights_only=True)
                assert left["state"]["step"] == EVERY
    if step.record.saving is not None:
        step.record.saving.wait()
    (folder / f"calls-{rank}").write_text(str(death.calls))
    (folder / f"refused-{rank}").write_text(json.dumps(death.refused))
    (folder / f"bits-{rank}").write_text(json.dumps(bits(step, case, rank), sort_keys=True))


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; return its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")
        signal.alarm(int(LIMIT))
        work()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def start(case: Case, folder: Path, attempt: int, deaths: list[Death]) -> list[int]:
    """Fork all ranks of a run."""
    return [
        forked(lambda rank=rank, death=death: run(case, rank, folder, f"meeting-{attempt}", death))  # type: ignore[misc]
        for rank, death in enumerate(deaths)
    ]


def wait(children: list[int]) -> bool:
    """Wait for all ranks, and kill the others when one has failed; return whether all have ended well."""
    left, good = set(children), True
    while left:
        child, status = os.waitpid(-1, 0)
        left.discard(child)
        if status and good:
            good = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return good


def finished(folder: Path, ranks: int) -> list[str]:
    return [(folder / f"bits-{rank}").read_text() for rank in range(ranks)]


def trial(case: Case, folder: Path, rng: random.Random, seconds: float, calls: list[int]) -> dict[str, Any]:
    """Kill one run at one random point, and start it again until it is done."""
    rank = rng.randrange(case.ranks)
    writing = case.moment == "write"
    if writing and not case.shard:
        rank = 0
    deaths = [Death(at=rng.randint(1, calls[rank]) if writing and r == rank else 0) for r in range(case.ranks)]
    children = start(case, folder, 0, deaths)
    if not writing:
        time.sleep(rng.uniform(0.0, seconds))
        try:
            os.kill(children[rank], signal.SIGKILL)
        except ProcessLookupError:
            pass
    killed = not wait(children)
    root = folder / "runs"
    left = [p.name for p in root.iterdir()] if root.is_dir() else []
    damaged = count_damaged(root)
    attempt = 0
    for attempt in itertools.count(1):
        if wait(start(case, folder, attempt, [Death() for _ in range(case.ranks)])):
            break
        if attempt > 3:
            raise RuntimeError(f"{case.title}: a run that was killed does not start again")
    return {
        "killed": killed,
        "cut_off": any(name.startswith(files.WRITING) for name in left),
        "damaged": damaged + count_damaged(root),
        "restarts": attempt,
    }


def count_damaged(root: Path) -> int:
    """Return how many checkpoints of a folder are not as they were written."""
    count = 0
    for checkpoint in files.checkpoints(root) if root.is_dir() else ():
        try:
            files.check_files(checkpoint)
        except CheckpointError:
            count += 1
    return count


def measure(name: str, kills: int) -> dict[str, Any]:
    """Kill runs of a case until `kills` have been killed; return how many ended with the bits of an undisturbed run."""
    case, rng = CASES[name], random.Random(f"{name} 0")
    with tempfile.TemporaryDirectory() as place:
        undisturbed = Path(place, "undisturbed")
        undisturbed.mkdir()
        began = time.monotonic()
        if not wait(start(case, undisturbed, 0, [Death() for _ in range(case.ranks)])):
            raise RuntimeError(f"{case.title}: the undisturbed run has failed")
        seconds = time.monotonic() - began
        wanted = finished(undisturbed, case.ranks)
        calls = [int((undisturbed / f"calls-{rank}").read_text()) for rank in range(case.ranks)]
        rows: list[dict[str, Any]] = []
        while sum(row["killed"] for row in rows) < kills:  # a run may end before it is killed
            number = len(rows)
            folder = Path(place, f"{number}")
            folder.mkdir()
            row = trial(case, folder, rng, seconds, calls)
            rows.append({**row, "equal": finished(folder, case.ranks) == wanted})
            shutil.rmtree(folder)
    equal, killed = sum(row["equal"] for row in rows), sum(row["killed"] for row in rows)
    print(f"{case.title}: {equal} of {len(rows)} equal, {killed} killed", file=sys.stderr, flush=True)
    return {
        "title": case.title,
        "runs": len(rows),
        "killed": killed,
        "equal": equal,
        "cut_off": sum(row["cut_off"] for row in rows),
        "damaged": sum(row["damaged"] for row in rows),
        "restarts": sum(row["restarts"] for row in rows),
    }


def full_disk(runs: int) -> dict[str, Any]:
    """Refuse the second checkpoint of `runs` runs after a random number of bytes."""
    case, rng, equal, refused = CASES["one"], random.Random("disk 0"), 0, 0
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place, "whole")
        whole.mkdir()
        wait(start(case, whole, 0, [Death()]))
        size = (files.checkpoints(whole / "runs")[0] / files.STATE).stat().st_size
        for number in range(runs):
            folder = Path(place, f"{number}")
            folder.mkdir()
            good = wait(start(case, folder, 0, [Death(limit=rng.randint(1, size - 1))]))
            equal += good and finished(folder, 1) == finished(whole, 1)
            refused += len(json.loads((folder / "refused-0").read_text()))
            shutil.rmtree(folder)
    print(f"disk full: {equal} of {runs} equal, {refused} refused", file=sys.stderr, flush=True)
    return {"runs": runs, "refused": refused, "equal": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="of each case")
    parser.add_argument("--only", choices=[*CASES, "disk"], action="append", help="a case; default: all")
    parser.add_argument("--json", type=Path, default=None, help="where to write the report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = options.only or [*CASES, "disk"]
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kills", *sys.argv[1:]]),
        "machine": machine(),
        "torch": torch.__version__,
        "updates": UPDATES,
        "every": EVERY,
        "cases": {},
    }
    for name in chosen:
        if name in CASES:
            report["cases"][name] = measure(name, options.kills)
            if options.json is not None:
                write(options.json, report)  # what is done so far
    if "disk" in chosen:
        report["disk"] = full_disk(options.kills)
    if options.json is not None:
        write(options.json, report)
    rows = [*report["cases"].values(), *([report["disk"]] if "disk" in report else [])]
    return int(any(row["equal"] != row["runs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
