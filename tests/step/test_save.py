"""hs.save and hs.load of one process: what is on the disk, what survives, what is refused, what comes back."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.checkpoints import files
from halfstep.checkpoints.generators import check_saved_states
from halfstep.checkpoints.preemption import Preemption
from halfstep.errors import CheckpointError, StepError
from halfstep.meeting import facts_of
from halfstep.step.saved import check_scheduler

POLICIES = {
    "mixed": hs.Policy.of("mixed", dtype="fp16"),
    "O2": hs.Policy.of("O2", dtype="fp16"),
    "lean": hs.Policy.of("lean", dtype="bf16"),
}


def square(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.float().square().mean()


def made(name: str = "O2", *, seed: int = 0, accumulate: int = 1) -> hs.TrainStep:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    policy = POLICIES[name]
    return hs.TrainStep(model, optimizer, square, policy=policy, scheduler=scheduler, accumulate=accumulate)


def train(step: hs.TrainStep, count: int = 3) -> list[float]:
    """Train on batches of all three global generators; return the losses."""
    losses = []
    for _ in range(count):
        x = torch.randn(4, 8) + random.random() + float(numpy.random.rand())
        losses.append(float(step(x).loss))
    return losses


def same(one: hs.TrainStep, other: hs.TrainStep) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    tensors = all(torch.equal(mine["model"][name], its["model"][name]) for name in mine["model"])
    moments = all(
        torch.equal(mine["optimizer"]["state"][n][key], its["optimizer"]["state"][n][key])
        for n in mine["optimizer"]["state"]
        for key in mine["optimizer"]["state"][n]
    )
    numbers = all(mine[key] == its[key] for key in ("scaler", "scheduler", "step"))
    return tensors and moments and numbers and mine.get("weights") == its.get("weights")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------------- back, bit for bit


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_a_loaded_run_goes_on_bit_for_bit(tmp_path: Path, name: str, wait: bool) -> None:
    step = made(name)
    train(step)
    saving = hs.save(step, tmp_path, extra={"batch": 3}, wait=wait)
    expected = train(step)
    other = made(name, seed=1)
    loaded = hs.load(other, saving.wait())
    assert (loaded.step, loaded.extra, loaded.notes) == (3, {"batch": 3}, ())
    assert train(other) == expected and same(step, other)


def test_without_the_generators_it_would_not(tmp_path: Path) -> None:
    step = made()
    hs.save(step, tmp_path)
    expected = train(step)
    hs.load(step, tmp_path)
    torch.manual_seed(3)
    assert train(step) != expected


def test_torch_reads_the_file_and_the_step_its_state(tmp_path: Path) -> None:
    step = made()
    train(step)
    content = torch.load(hs.save(step, tmp_path).path / "state.pt", weights_only=True)
    other = made(seed=1)
    other.load_state_dict(content["state"])
    assert same(step, other)


def test_parameters_are_matched_by_name_where_their_order_differs(tmp_path: Path) -> None:
    step = made("mixed")
    train(step)
    hs.save(step, tmp_path)
    other = made("mixed", seed=1)
    other.optimizer.param_groups[0]["params"].reverse()
    hs.load(other, tmp_path)
    mine, its = step.optimizer.state, other.optimizer.state
    for one, two in zip(step.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine[one]["exp_avg"], its[two]["exp_avg"]) and torch.equal(one, two)


# ---------------------------------------------------------------------- on the disk


def test_the_last_ones_are_kept_in_the_order_of_saving(tmp_path: Path) -> None:
    step = made()
    for _ in range(4):
        train(step, 1)
        hs.save(step, tmp_path)
    assert names(tmp_path) == ["000003-step-3", "000004-step-4"]
    assert names(tmp_path / "000004-step-4") == ["manifest.json", "state.pt"]
    hs.save(made(), tmp_path, keep=3)  # a run that began anew: its checkpoint is the last, not the one of most steps
    assert names(tmp_path) == ["000003-step-3", "000004-step-4", "000005-step-0"]
    with pytest.warns(UserWarning, match="000005-step-0 was saved by another run, process .*, than this step's"):
        assert hs.load(step, tmp_path).step == 0
    hs.save(step, tmp_path, keep=None)
    assert len(names(tmp_path)) == 4


def test_what_a_cut_off_save_has_left_is_not_read_and_is_removed(tmp_path: Path) -> None:
    step = made()
    train(step)
    first = hs.save(step, tmp_path).path
    (tmp_path / ".writing-000002").mkdir()
    (tmp_path / ".writing-000002" / "state.pt").write_bytes(b"half")
    assert hs.load(made(), tmp_path).path == first
    second = hs.save(step, tmp_path).path
    assert names(tmp_path) == [first.name, second.name]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("size", [0, 100, 3000, 9000])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, size: int, wait: bool) -> None:
    step = made()
    train(step)
    first = hs.save(step, tmp_path).path
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"was not written: .*too large.*the last checkpoint is {first}"):
            hs.save(step, tmp_path, wait=wait).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == [first.name]
    train(step)
    assert hs.save(step, tmp_path).path.name == "000002-step-6"


def test_what_a_background_write_raised_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = made()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        saving = hs.save(step, tmp_path, wait=False)
        while not saving.done():
            pass
    with pytest.raises(CheckpointError, match="No space left on device; there is no earlier checkpoint"):
        hs.save(step, tmp_path)
    hs.save(step, tmp_path)


def test_every_call_that_writes_may_be_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    step = made()
    train(step)
    first = hs.save(step, tmp_path).path
    calls, killed = 0, True

    def watch(patched: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            nonlocal calls, killed
            calls += 1
            if calls == at:
                killed = True
                raise Killed
            return inner(*args, **options)

        patched.setattr(owner, name, watched)

    seen, at = set(), 0
    while killed:  # the last save is made of fewer calls
        at, calls, killed = at + 1, 0, False
        with monkeypatch.context() as patched:
            for owner, name in ((files._Hashed, "write"), (os, "fsync"), (Path, "rename"), (Path, "mkdir")):
                watch(patched, owner, name)
            with suppress(Killed, CheckpointError):  # torch.save raises an error of its own
                hs.save(step, tmp_path)
        whole = files.checkpoints(tmp_path)
        for folder in whole:
            files.check_files(folder)
        assert whole[-1] == first
        seen.add((killed, len(whole)))
        for folder in whole[:-1]:
            shutil.rmtree(folder)
    # killed before the rename, killed between it and the flush of its folder, not killed
    assert at > 10 and seen == {(True, 1), (True, 2), (False, 2)}


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("kind", ["bit", "cut", "gone", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_loaded(tmp_path: Path, kind: str) -> None:
    step = made()
    first = hs.save(step, tmp_path).path
    train(step)
    second = hs.save(step, tmp_path).path
    file = second / ("manifest.json" if kind == "manifest" else "state.pt")
    if kind == "bit":
        damage(file)
    elif kind == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-7])
    with pytest.warns(UserWarning, match=rf"{file} .*; loading {first}, which was saved before"):
        loaded = hs.load(made(seed=1), tmp_path)
    assert loaded.path == first and len(loaded.notes) == 1
    before = step.state_dict()
    with pytest.raises(CheckpointError, match=rf"{file} .*; the one before is {first}; nothing was loaded"):
        hs.load(step, second)
    assert step.state_dict()["step"] == before["step"]
    damage(first / "state.pt")
    with pytest.raises(CheckpointError, match=rf"no checkpoint in {tmp_path} is whole"):
        hs.load(step, tmp_path)


def test_a_checkpoint_of_another_step_changes_nothing(tmp_path: Path) -> None:
    hs.save(made("O2"), tmp_path)
    step = made("mixed", seed=1)
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in step.model.state_dict().items()}
    with pytest.raises(StepError, match="saved under another policy"):
        hs.load(step, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(step.model.state_dict()[name], value) for name, value in state.items())


def test_generators_are_checked_before_anything_changes() -> None:
    with pytest.raises(CheckpointError, match="no states of random generators"):
        check_saved_states({"torch": torch.zeros(3)})


# ---------------------------------------------------------------------- errors


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    step = made(accumulate=2)
    with pytest.raises(CheckpointError, match="writes into a folder.*'run.pt' is the name of a file"):
        hs.save(step, "run.pt")
    with pytest.raises(CheckpointError, match="keep must be a whole number from 1 or None and is 0"):
        hs.save(step, tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="has no checkpoint.*missing_ok=True"):
        hs.load(step, tmp_path / "none")
    assert hs.load(step, tmp_path, missing_ok=True) is None
    with pytest.raises(CheckpointError, match=r"torch.load\(weights_only=True\) refuses to read.*there is no earlier"):
        hs.save(step, tmp_path, extra={"lock": made})
    step(torch.randn(4, 8))
    with pytest.raises(StepError, match="after 1 of 2 micro-batches would lose their gradients"):
        hs.save(step, tmp_path)
    assert names(tmp_path) == []


# ---------------------------------------------------------------------- signals


@pytest.fixture
def sent() -> Iterator[list[int]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield []
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_update(tmp_path: Path, sent: list[int], number: signal.Signals) -> None:
    step = made(accumulate=2)
    done = 0
    signals = (signal.SIGTERM, signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        with hs.on_preemption(step, tmp_path, extra=lambda: {"batch": done + 1}, signals=signals):
            for done in range(10):
                if done == 4:
                    os.kill(os.getpid(), number)
                step(torch.randn(4, 8))
    assert ended.value.code == 128 + number and done == 5  # the window of two was completed
    loaded = hs.load(made(accumulate=2), tmp_path)
    assert (loaded.step, loaded.extra) == (6, {"batch": 6})


def test_without_a_signal_the_run_is_the_same_and_a_late_one_is_reported(
    tmp_path: Path, sent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    step, other = made(), made()
    torch.manual_seed(1)
    expected = train(other)
    torch.manual_seed(1)
    random_state = random.getstate()
    with hs.on_preemption(step, tmp_path):
        with pytest.raises(CheckpointError, match="open for this step already"), hs.on_preemption(step, tmp_path):
            pass
        random.setstate(random_state)
        assert len(train(step)) == len(expected)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (
        "after the last update" in caplog.text
        and names(tmp_path) == []
        and not any(isinstance(part, Preemption) for part in step.parts)
    )


def test_an_update_that_ends_before_ranks_agree_that_it_is_the_last_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = made()
    with pytest.raises(SystemExit), hs.on_preemption(step, tmp_path, extra=lambda: number) as block:
        for number in range(3):
            if number == 1:  # another rank got a signal while update 2 was under way

                def agree(seconds: float) -> bool:
                    block.requested, block._last = signal.SIGTERM, 2
                    return True

                assert block._finished == 1
                block._may_begin = 2
                monkeypatch.setattr(block._known, "wait", agree)
            step(torch.randn(4, 8))
    assert (hs.load(made(), tmp_path).step, number) == (2, 1)


def test_what_is_no_signal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="signals must be numbers of signals, such as signal.SIGTERM"):
        hs.on_preemption(made(), tmp_path, signals=["SIGTERM"])  # type: ignore[list-item]


def test_it_needs_the_main_thread(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def enter() -> None:
        try:
            with hs.on_preemption(made(), tmp_path):
                pass
        except CheckpointError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "the main thread alone" in str(found[0])


# ---------------------------------------------------------------------- checkpoints of others


def plain() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def amp_run(updates: int) -> tuple[dict[str, Any], list[float], nn.Module]:
    """Return what torch.amp's recipe saves after some updates, the losses of three more, and the model before these."""
    (model, optimizer, scheduler), scaler = plain(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    data = torch.Generator().manual_seed(3)
    losses: list[float] = []
    state: dict[str, Any] = {}
    for number in range(updates + 3):
        if number == updates:
            parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
            state = json_copy({name: part.state_dict() for name, part in parts.items()})
        with torch.autocast("cpu", torch.float16):
            loss = square(model, torch.randn(4, 8, generator=data))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return state, losses[updates:], model


def json_copy(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: json_copy(value) for key, value in tree.items()}
    return [json_copy(value) for value in tree] if isinstance(tree, list) else tree


def mine(policy: str = "torch", *, dtype: str = "fp16", scheduled: bool = True) -> hs.TrainStep:
    model, optimizer, scheduler = plain()
    chosen = hs.Policy.of(policy, dtype=dtype)
    return hs.TrainStep(model, optimizer, square, policy=chosen, scheduler=scheduler if scheduled else None)


def test_torchs_recipe_goes_on_as_torch_does(tmp_path: Path) -> None:
    state, losses, _ = amp_run(5)
    torch.save({**state, "epoch": 2}, tmp_path / "run.pt")
    step = mine()
    with pytest.warns(UserWarning, match="recipe; taken: weights, the optimizer's state, the loss scale.*5 updates"):
        loaded = hs.load(step, tmp_path / "run.pt")
    assert loaded.extra == {"epoch": 2} and loaded.step == 5
    data = torch.Generator().manual_seed(3)
    batches = [torch.randn(4, 8, generator=data) for _ in range(8)]
    assert [float(step(x).loss) for x in batches[5:]] == losses


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.net."])
def test_names_may_have_a_prefix(tmp_path: Path, prefix: str) -> None:
    state, _, _ = amp_run(2)
    model = {f"{prefix}{name}": value for name, value in state["model"].items()} | {"metric.total": torch.zeros(1)}
    torch.save({"state_dict": model, "optimizer_state_dict": state["optimizer"]}, tmp_path / "run.pt")
    with pytest.warns(UserWarning, match="not there: a loss scale; it begins at.*not there: .*scheduler.*metric.total"):
        loaded = hs.load(step := mine(), tmp_path / "run.pt")
    assert loaded.step == 2 and torch.equal(step.model.state_dict()["0.weight"], state["model"]["0.weight"])


def test_apex_o2_gives_its_masters_and_its_scale(tmp_path: Path) -> None:
    state, _, _ = amp_run(2)
    masters = list(state["model"].values())
    low = {name: value.half() for name, value in state["model"].items()}
    amp = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}, "loss_scaler1": {"loss_scale": 8.0, "unskipped": 0}}
    torch.save({"model": low, "optimizer": state["optimizer"], "amp": amp, "master_params": masters}, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match=r"Apex; taken: weights \(their fp32 masters\).*dropped: loss_scaler1"):
        hs.load(step := mine("O2", scheduled=False), tmp_path / "a.pt")
    assert step.scaler.state_dict()["scale"] == 512.0 and step.scaler.state_dict()["_growth_tracker"] == 7
    assert all(torch.equal(a, b) for a, b in zip(step.model.state_dict().values(), masters, strict=True))
    torch.save({"model": low, "optimizer": state["optimizer"], "amp": amp}, tmp_path / "b.pt")
    with pytest.warns(UserWarning, match="weights were saved in torch.float16: what their fp32 values had beyond"):
        hs.load(mine("O2", scheduled=False), tmp_path / "b.pt")


def test_apexs_fused_optimizer_counts_for_a_group(tmp_path: Path) -> None:
    state, _, _ = amp_run(2)
    group = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 2, "params": [0, 1, 2, 3]}
    states = {n: {k: v for k, v in one.items() if k != "step"} for n, one in state["optimizer"]["state"].items()}
    optimizer = {"state": states, "param_groups": [group]}
    amp = {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}
    torch.save({"model": state["model"], "optimizer": optimizer, "amp": amp}, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="Apex.*2 updates"):
        hs.load(step := mine("O2", scheduled=False), tmp_path / "a.pt")
    saved = step.optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == 0.5 and saved["state"][0]["step"] == 2


def test_lightning(tmp_path: Path) -> None:
    state, _, _ = amp_run(3)
    content = {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"net.{name}": value for name, value in state["model"].items()},
        "optimizer_states": [state["optimizer"]],
        "lr_schedulers": [state["scheduler"]],
        "MixedPrecision": state["scaler"],
    }
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="Lightning; taken: weights.*the loss scale.*the scheduler, 3 updates"):
        loaded = hs.load(step := mine(), tmp_path / "last.ckpt")
    assert loaded.step == 3 and loaded.extra["epoch"] == 1
    assert step.scaler.state_dict()["scale"] == state["scaler"]["scale"]
    torch.save({**content, "optimizer_states": [1, 2]}, tmp_path / "gan.ckpt")
    with pytest.raises(CheckpointError, match="it has 2 optimizers, and a TrainStep has one"):
        hs.load(step, tmp_path / "gan.ckpt")


def safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate(tmp_path: Path, safe: bool) -> None:
    state, _, _ = amp_run(3)
    if safe:
        safetensors(state["model"], tmp_path / "model.safetensors")
    else:
        torch.save(state["model"], tmp_path / "pytorch_model.bin")
    torch.save(state["optimizer"], tmp_path / "optimizer.bin")
    torch.save(state["scheduler"], tmp_path / "scheduler.bin")
    torch.save(state["scaler"], tmp_path / "scaler.pt")
    drawn = {
        "step": 3,
        "random_state": random.getstate(),
        "numpy_random_seed": numpy.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(drawn, tmp_path / "random_states_0.pkl")
    expected = random.random(), float(numpy.random.rand()), float(torch.rand(()))
    with pytest.warns(UserWarning, match="accelerate; taken:.*the loss scale.*the scheduler, 3 updates.*random states"):
        hs.load(step := mine(), tmp_path)
    assert (random.random(), float(numpy.random.rand()), float(torch.rand(()))) == expected
    assert all(torch.equal(step.model.state_dict()[name], value) for name, value in state["model"].items())
    (tmp_path / "model.safetensors").write_bytes(b"\x07")
    with pytest.raises(CheckpointError, match="no file of safetensors|2 models"):
        hs.load(step, tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"0.weight": torch.zeros(6, 8)}, "weights and no state of an optimizer"),
        ({"model": {}, "epoch": 1}, "weights and no state of an optimizer"),
        ({"weights": 1, "optimizer": {}}, "none of them is the model's state_dict"),
        ({"module": {}, "ds_version": "0.18"}, "DeepSpeed.*zero_to_fp32"),
        ([1, 2], "it holds a list"),
        ({"model": plain}, "holds objects of .*plain.*add_safe_globals"),
    ],
)
def test_what_no_run_can_go_on_from_is_refused_with_the_reason(tmp_path: Path, content: Any, reason: str) -> None:
    torch.save(content, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=rf"run.pt: .*{reason}.*nothing was loaded"):
        hs.load(mine(), tmp_path / "run.pt")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "DeepSpeed"),
        ("pytorch_model_fsdp_0", "merge-weights"),
        (".metadata", "torch.distributed.checkpoint"),
        ("optimizer.bin", "it has optimizer.bin and no weights"),
        ("model.safetensors", "weights and no state of an optimizer"),
        ("notes.txt", "has no checkpoint; give hs.load the folder that hs.save wrote into"),
    ],
)
def test_folders_too(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=reason):
        hs.load(mine(), tmp_path)


def test_a_state_that_torch_saved_loads_as_it_is(tmp_path: Path) -> None:
    step = made()
    train(step)
    torch.save(step.state_dict(), tmp_path / "step.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = hs.load(other := made(seed=1), tmp_path / "step.pt")
    assert same(step, other) and loaded.notes == ()


# ---------------------------------------------------------------------- files of others


def rewritten(checkpoint: Path, change: Any) -> None:
    """Put what `change` makes of the manifest in its place."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    change(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


EMPTY = {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["files"].update({"pipe": EMPTY}), "pipe is a pipe or a device"),
        (lambda m: m["files"].update({"link": EMPTY}), "link is a link"),
        (lambda m: m["files"].update({"/dev/zero": EMPTY}), "the key '/dev/zero'.*the name of a file in this folder"),
        (lambda m: m["files"].update({"../outside": EMPTY}), "the name of a file in this folder"),
        (lambda m: m["files"].update({"..": EMPTY}), "the name of a file in this folder"),
        (lambda m: m["files"].pop("state.pt"), "files: 'state.pt' is missing"),
        (lambda m: m["files"]["state.pt"].update(bytes=-1), "bytes: -1, expected a whole number from 0"),
        (lambda m: m.update(format=2), "of another format than 1"),
        (lambda m: m.update(format=10**400), "format: a number of 1329 bits"),
        (lambda m: m.update(ranks=2), "state.pt is of another checkpoint than manifest.json"),
        (lambda m: m.update(files=[]), "files: a list of 0, expected a dict"),
    ],
)
def test_a_manifest_is_checked_before_a_file_is_read(tmp_path: Path, change: Any, reason: str) -> None:
    checkpoint = hs.save(made(), tmp_path / "run").path
    os.mkfifo(checkpoint / "pipe")
    (tmp_path / "outside").touch()
    (checkpoint / "link").symlink_to(tmp_path / "outside")
    rewritten(checkpoint, change)
    with pytest.raises(CheckpointError, match=rf"{reason}.*; nothing was loaded$"):
        hs.load(made(), checkpoint)


def test_a_compressed_file_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w", 8) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="its parts are compressed"):
        hs.load(made(), tmp_path / "bomb.pt")


# ---------------------------------------------------------------------- several runs in one folder

GONE = f"{socket.gethostname()}:4194305:1"  # no process has this number
ELSEWHERE = "other-host:17:1"


@pytest.fixture
def alive() -> Iterator[str]:
    """A process of this host that has not started this one."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield f"{socket.gethostname()}:{process.pid}:{facts_of(process.pid)[1]}"
        assert process.stdin is not None
        process.stdin.close()


def test_a_folder_in_which_another_process_saves_is_refused_by_its_name(tmp_path: Path, alive: str) -> None:
    (tmp_path / ".lock").symlink_to(f"{alive}:12345678")
    with pytest.raises(CheckpointError, match=rf"another save into .* by process {alive.split(':')[1]} on"):
        hs.save(made(), tmp_path)
    assert names(tmp_path) == [".lock"]


@pytest.mark.parametrize("process", [GONE, ELSEWHERE, "x", files.this_process()], ids=["gone", "elsewhere", "x", "own"])
def test_a_lock_that_was_left_blocks_nothing(tmp_path: Path, process: str) -> None:
    (tmp_path / ".lock").symlink_to(f"{process}:12345678")
    assert hs.save(made(), tmp_path).path.is_dir() and names(tmp_path) == ["000001-step-0"]


def test_a_run_that_is_alive_keeps_its_folder(tmp_path: Path, alive: str) -> None:
    checkpoint = hs.save(made(), tmp_path).path
    rewritten(checkpoint, lambda manifest: manifest.update(process=alive, run="other"))
    step = made()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="000001-step-0 was saved by another run, process .* which is alive"):
            hs.save(step, tmp_path)
    rewritten(checkpoint, lambda manifest: manifest.update(process=GONE))
    hs.save(step, tmp_path)
    assert len(names(tmp_path)) == 2


def test_a_run_on_another_host_is_seen_by_its_checkpoints(tmp_path: Path) -> None:
    step = made()
    for _ in range(3):
        hs.save(step, tmp_path, keep=1)
    other = hs.save(made(), tmp_path, keep=1).path
    rewritten(other, lambda manifest: manifest.update(process=ELSEWHERE))
    assert names(tmp_path) == ["000003-step-0", "000004-step-0"]  # each run prunes its own
    with pytest.raises(CheckpointError, match="another run, process 17 on other-host, since this one has"):
        hs.save(step, tmp_path)
    with pytest.warns(UserWarning, match="another run, process 17 on other-host, than that of 000003-step-0, the one"):
        loaded = hs.load(new := made(), tmp_path)
    assert len(loaded.notes) == 1
    hs.save(new, tmp_path, keep=1)  # it goes on with the run that it has loaded
    assert names(tmp_path) == ["000003-step-0", "000005-step-0"]


def test_a_save_whose_lock_was_taken_over_completes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = made()
    write = files.write_state

    def slow(path: Path, state: object) -> Any:
        entry = write(path, state)
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").symlink_to(f"{ELSEWHERE}:12345678")
        return entry

    monkeypatch.setattr(files, "write_state", slow)
    with pytest.raises(CheckpointError, match="another save into .* by process 17 on other-host"):
        hs.save(step, tmp_path)
    assert names(tmp_path) == [".lock"]


# ---------------------------------------------------------------------- what is saved can be loaded


class Growing(torch.optim.SGD):
    """An optimizer with options that torch's do not have."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(options)


@pytest.mark.parametrize(
    "options",
    [
        {"growth": math.inf},
        {"low": -math.inf, "unknown": math.nan},
        {"large": 10**400},
        {"pair": (1.0, None), "history": [1.0, 2.0]},
        {"tensor": torch.ones(2), "scalar": torch.tensor(math.inf)},
    ],
)
def test_options_of_any_optimizer_come_back(tmp_path: Path, options: dict[str, Any]) -> None:
    def build(**options: Any) -> hs.TrainStep:
        model = nn.Linear(4, 4)
        optimizer = Growing(model.parameters(), **options)
        group: dict[Any, Any] = optimizer.param_groups[0]
        group[3] = "a key that is no text"
        return hs.TrainStep(model, optimizer, square, policy="mixed")

    hs.save(build(**options), tmp_path)
    for fresh in (build(**options), build(**{str(name): None for name in options}), build()):
        hs.load(fresh, tmp_path)
        group = fresh.optimizer.param_groups[0]
        assert all(repr(group[name]) == repr(value) for name, value in options.items())


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    step = made()
    step.optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(CheckpointError, match=r"could not be loaded again: optimizer.param_groups\[0\].lr: nan"):
        hs.save(step, tmp_path)
    step.optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(CheckpointError, match="refuses to read"):
        hs.save(step, tmp_path, extra=numpy.float64(1.5))
    assert names(tmp_path) == []


def test_a_plateau_before_its_first_metric_comes_back_after_one() -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1))
    state = scheduler.state_dict()
    scheduler.step(1.0)
    check_scheduler(scheduler, state)


# ---------------------------------------------------------------------- arguments of on_preemption


@pytest.mark.parametrize(
    "named",
    [{"keep": 0}, {"keep": 2.5}, {"extra": {"batch": 1}}, {"extra": lambda batch: batch}, {"signals": ()},
     {"signals": [signal.SIGKILL]}, {"path": "run.pt"}, {"path": 3}, {"path": f"{__file__}/below"}],
)  # fmt: skip
def test_arguments_that_could_not_save_are_refused_before_the_block(tmp_path: Path, named: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        hs.on_preemption(made(), **{"path": tmp_path, **named})


def test_a_run_that_goes_on_without_the_compiled_kernels_is_told_so(tmp_path: Path) -> None:
    step = made()
    train(step, 1)
    checkpoint = hs.save(step, tmp_path).path
    kernels = json.loads((checkpoint / files.MANIFEST).read_text())["kernels"]
    assert hs.load(made(), tmp_path).notes == ()
    rewritten(checkpoint, lambda manifest: manifest.update(kernels={"none": "compiled", "compiled": "none"}[kernels]))
    with pytest.warns(UserWarning, match="from here on the bits are not those of a run that was not stopped"):
        (note,) = hs.load(made(), tmp_path).notes
    assert "compiled kernels" in note and "halfstep doctor" in note
