"""hs.save, hs.load and hs.on_preemption on several processes: shards, other numbers of processes, errors, signals."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.errors import HalfstepError
from tests.two_processes import as_script, run_all

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parent.parent.parent
PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")


def square(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def made(kind: str, accumulate: int = 1) -> hs.TrainStep:
    """Return a step whose layers do not divide evenly: 9 rows, 3 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 3))
    wrapped: nn.Module = model
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        hs.prepare(model, policy="mixed")
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        hs.prepare(model, optimizer, policy="mixed")
        wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return hs.TrainStep(wrapped, optimizer, square, scheduler=scheduler, accumulate=accumulate)


def train(step: hs.TrainStep, count: int = 2) -> list[float]:
    return [float(step(torch.randn(4, 7)).loss) for _ in range(count)]


def whole(step: hs.TrainStep) -> dict[str, Tensor]:
    """Return weights and moments by name, without buffers; collective for shards."""
    state = step.state_dict()
    found = {name: state["model"][name] for name in PARAMETERS}
    for name, entry in zip(PARAMETERS, state["optimizer"]["state"].values(), strict=True):
        found.update({f"{name} {key}": value for key, value in entry.items()})
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in found.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def _work(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/meeting-{size}", timedelta(seconds=60), size, rank)
    found: dict[str, Any] = {}
    for kind in ("fsdp", "ddp"):
        step = made(kind)
        hs.load(step, f"{folder}/plain")
        found[f"{kind} from one process"] = whole(step)
        torch.manual_seed(rank)
        train(step)
        for wait in (True, False):
            path = f"{folder}/{kind}-{size}-{wait}"
            saving = hs.save(step, path, extra={"rank": rank}, wait=wait)
            state, random = whole(step), torch.get_rng_state()
            losses = train(step)  # while it is being written
            saving.wait()
            after = whole(step)
            # a new DDP of three ranks or more adds its first gradients in another order than its later ones
            other = step if kind == "ddp" and size > 2 else made(kind)
            loaded = hs.load(other, path)
            found[f"{kind} {wait}"] = state
            found[f"{kind} {wait} equal"] = (
                torch.equal(torch.get_rng_state(), random)
                and equal(whole(other), state)
                and train(other) == losses
                and equal(whole(other), after)
                and loaded.extra == {"rank": rank}
                and loaded.extras == tuple({"rank": r} for r in range(size))
            )
            hs.load(step, path)
        crossed = made("ddp" if kind == "fsdp" else "fsdp")
        hs.load(crossed, f"{folder}/{kind}-{size}-True")
        found[f"{kind} crossed"] = equal(whole(crossed), found[f"{kind} True"])
    found["errors"] = [_message(_window, rank, folder), _message(_apart, rank, folder), _message(_full, rank, folder)]
    found["errors"] += [_message(_damaged, rank, folder, size)]
    torch.save(found, f"{folder}/{size}-{rank}")
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort some exits (torch 2.13), after the work is done


def _message(work: Any, *args: Any) -> str:
    try:
        work(*args)
    except HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _window(rank: int, folder: str) -> None:
    step = made("plain", accumulate=2)
    if rank:
        train(step, 1)
    hs.save(step, f"{folder}/errors")


def _apart(rank: int, folder: str) -> None:
    step = made("plain")
    train(step, 1 + rank)
    hs.save(step, f"{folder}/errors")


def _full(rank: int, folder: str) -> None:
    step = made("fsdp")
    if rank:
        from halfstep.checkpoints import shards

        def refuse(*args: object) -> None:
            raise OSError(28, "No space left on device")

        original, shards.own_files = shards.own_files, refuse  # type: ignore[assignment]
    try:
        hs.save(step, f"{folder}/errors")
    finally:
        if rank:
            shards.own_files = original


def _damaged(rank: int, folder: str, size: int) -> None:
    path = Path(folder, f"fsdp-{size}-True", f"000001-step-{4}")
    if rank == 0:
        name = sorted(path.glob("*.distcp"))[1]
        name.write_bytes(name.read_bytes()[:-1] + b"?")
    dist.barrier()
    hs.load(made("fsdp"), path)


def _both(size: int, folder: Path) -> None:
    """Save by one process, load and save by `size`, load by one."""
    step = made("plain")
    train(step)
    hs.save(step, folder / "plain")
    run_all(_work, (size, str(folder)), size)
    results = [torch.load(folder / f"{size}-{rank}") for rank in range(size)]
    for found in results:
        for kind in ("fsdp", "ddp"):
            assert equal(found[f"{kind} from one process"], whole(step))
            assert found[f"{kind} True equal"] and found[f"{kind} False equal"] and found[f"{kind} crossed"]
        window, apart, full, damaged = found["errors"]
        assert "StepError: state_dict() after 1 of 2 micro-batches" in window
        assert window.startswith("StepError") or ("rank 1: StepError" in window and "no rank has saved" in window)
        assert f"ranks have done {list(range(1, size + 1))} micro-batches" in apart
        assert "rank 1: OSError: [Errno 28] No space left on device; " in full and "was not written" in full
        assert "__1_0.distcp is damaged: its SHA-256 is not the one in manifest.json" in damaged
    assert list((folder / "errors").iterdir()) == []
    for kind in ("fsdp", "ddp"):
        for wait in (True, False):
            one = made("plain")
            if (kind, wait) == ("fsdp", True):
                continue  # damaged above
            loaded = hs.load(one, folder / f"{kind}-{size}-{wait}")
            assert equal(whole(one), results[0][f"{kind} {wait}"]) and loaded.extra == {"rank": 0}
            assert f"saved by {size} processes and loaded by 1" in loaded.notes[0]


def test_two_processes_and_one_read_what_the_other_wrote(tmp_path: Path) -> None:
    _both(2, tmp_path)


@pytest.mark.hours
def test_four_processes_and_one_read_what_the_other_wrote(tmp_path: Path) -> None:
    _both(4, tmp_path)


# ---------------------------------------------------------------------- signals

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import halfstep as hs

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
hs.prepare(model, optimizer, policy="mixed")
wrapped = torch.nn.parallel.DistributedDataParallel(model)
step = hs.TrainStep(wrapped, optimizer, lambda model, x: model(x).square().mean())
loaded = hs.load(step, sys.argv[1], missing_ok=True)
first = loaded.step if loaded else 0
print("start", rank, size, first, loaded and loaded.extra, flush=True)
with hs.on_preemption(step, sys.argv[1], extra=lambda: {"next": number + 1}):
    for number in range(first, 40):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).chunk(size)[rank]
        step(x)
        time.sleep(0.002 * rank)
        if not loaded and rank == size - 1 and number == 11:
            os.kill(os.getpid(), signal.SIGTERM)
print("end", rank, number, flush=True)
dist.barrier()
os._exit(0)
"""


def test_a_signal_to_one_rank_ends_both_and_one_process_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(script), str(tmp_path / "runs")]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert first.returncode and "end" not in first.stdout and "exitcode  : 143" in first.stderr, first.stderr[-2000:]
    (checkpoint,) = (tmp_path / "runs").iterdir()
    done = int(checkpoint.name.rpartition("-")[2])
    assert done >= 13  # the update after the signal, or one more where a rank was ahead
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    second = as_script([script, tmp_path / "runs"], tmp_path, **group)
    assert f"start 0 1 {done} {{'next': {done}}}" in second.stdout and "end 0 39" in second.stdout, second.stderr[
        -2000:
    ]


# ---------------------------------------------------------------------- kills


def test_runs_that_are_killed_while_they_write_end_with_the_same_bits() -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--only", "one_writing", "--only", "disk", "--kills", "3"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert made.returncode == 0, made.stderr
    assert "3 of 3 equal, 3 killed" in made.stderr and "disk full: 3 of 3 equal, 3 refused" in made.stderr
