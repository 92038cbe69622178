"""Threads: a training step belongs to one at a time, and says so; prepared models belong to all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.checkpoints import files
from halfstep.errors import StepError


def _in_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("preset", ["mixed", "O2"])
def test_a_second_thread_inside_a_step_is_refused_and_changes_nothing(preset: str, tmp_path: Path) -> None:
    def trained(*, disturbed: bool) -> tuple[dict[str, Tensor], list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        refused: list[Any] = []

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = model(x)
            if disturbed and not refused:
                calls = (
                    lambda: step(x),
                    step.flush,
                    step.state_dict,
                    lambda: step.load_state_dict(state),
                    lambda: hs.save(step=step, path=tmp_path),
                    lambda: hs.load(step, tmp_path),
                )
                refused.extend(map(_in_thread, calls))
            return out.float().square().mean()

        policy = hs.Policy.of(preset, dtype="bf16")
        step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 0.1), loss_fn, policy=policy)
        state = step.state_dict()
        for i in range(3):
            step(torch.full((2, 4), 1.0 + i))
        return step.state_dict()["model"], refused

    found, refused = trained(disturbed=True)
    assert len(refused) == 6
    for name, error in zip(
        ("step(...)", "flush", "state_dict", "load_state_dict", "save", "load"), refused, strict=True
    ):
        assert isinstance(error, StepError) and str(error).startswith(f"{name}: another thread is inside"), error
        assert "call it from one thread" in str(error)
    wanted, _ = trained(disturbed=False)
    assert list(tmp_path.iterdir()) == [] and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_step_that_is_being_saved_by_another_thread_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).float().mean())
    inside: list[Any] = []

    written = files.write_state

    def write_state(*args: Any) -> Any:
        inside.append(_in_thread(lambda: step(torch.ones(2, 4))))
        return written(*args)

    monkeypatch.setattr(files, "write_state", write_state)
    hs.save(step, tmp_path)
    assert inside and all("another thread is inside" in str(error) for error in inside)
    monkeypatch.undo()
    assert _in_thread(lambda: hs.save(step, tmp_path)).path.is_dir()  # between two steps any thread may save
    assert step(torch.ones(2, 4)).host().updated


def test_several_threads_call_prepared_models() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    hs.prepare(model, policy=hs.Policy.of("O2", dtype="bf16"))
    x = torch.randn(4, 8)
    with torch.no_grad():
        wanted = model(x)
    meeting = threading.Barrier(4)

    def called() -> bool:
        meeting.wait()
        with torch.no_grad():
            return all(torch.equal(model(x), wanted) for _ in range(20))

    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(called())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
