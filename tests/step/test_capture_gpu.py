"""cuda_graph= and compile= on a CUDA device: what the tape in `test_graphed` stands for, on the real thing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import StepError
from halfstep.kernels.triton import tables
from halfstep.step.graphs import WARM_UPS

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(16, 8, generator=generator)
    return (x * (float("inf") if i == 6 else 1.0)).cuda(), torch.randint(0, 3, (16,), generator=generator).cuda()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 2**-7),
    "sgd": lambda p: torch.optim.SGD(p, 2**-5, momentum=0.9),
}


def trained(preset: str, dtype: str, optimizer: str, *, drop: float = 0.0, **named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = Net(drop).cuda()
    made = OPTIMIZERS[optimizer](model.parameters())
    return hs.TrainStep(model, made, loss_fn, policy=hs.Policy.of(preset, dtype=dtype), clip_norm=1.0, **named)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("preset", "dtype"), [("mixed", "fp16"), ("mixed", "bf16"), ("O2", "fp16"), ("O2", "bf16")])
def test_replays_are_eager_training(preset: str, dtype: str, accumulate: int, optimizer: str) -> None:
    """Within one rounding of the learning rate and of kernels that add in another order."""
    eager = trained(preset, dtype, optimizer, accumulate=accumulate)
    graph = trained(preset, dtype, optimizer, accumulate=accumulate, cuda_graph=True)
    for i in range(12 * accumulate):
        a, b = eager(*batch(i)).host(), graph(*batch(i)).host()
        assert (a.updated, a.skipped, a.scale) == (b.updated, b.skipped, b.scale)
        torch.testing.assert_close(b.loss, a.loss, rtol=2**-7, atol=1e-5, equal_nan=True)
    assert graph._graphs is not None and graph._graphs.replays > 0


def test_a_replay_waits_for_nothing() -> None:
    step = trained("mixed", "fp16", "adamw", cuda_graph=True)
    for i in range(WARM_UPS + 1):
        step(*batch(i))
    inputs = batch(9)
    assert step._graphs is not None
    before = step._graphs.replays
    torch.cuda.set_sync_debug_mode("error")  # a wait raises
    try:
        for _ in range(5):
            step(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step._graphs.replays == before + 5


def test_dropout_draws_anew_in_every_replay() -> None:
    step = trained("mixed", "bf16", "sgd", drop=0.5, cuda_graph=True)
    step.optimizer.param_groups[0]["lr"] = 0.0
    x, y = batch(0)
    losses = {float(step(x, y).loss) for _ in range(12)}
    assert len(losses) > 6


def test_a_failed_capture_names_the_line_and_training_goes_on() -> None:
    def waits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        return loss if loss.item() < 1e9 else loss * 0

    step = trained("O2", "bf16", "adamw", cuda_graph=True)
    failing = hs.TrainStep(step.model, step.optimizer, waits, cuda_graph=True)
    for i in range(WARM_UPS):
        failing(*batch(i))
    with pytest.raises(StepError, match=r"cannot be captured at .*test_capture_gpu.py:\d+ `return loss if loss.item"):
        failing(*batch(4))
    on = hs.TrainStep(step.model, step.optimizer, loss_fn, cuda_graph=True)
    for i in range(6):
        assert on(*batch(i)).host().updated


def test_a_failed_capture_leaves_nothing_behind() -> None:
    """Stream, memory and generators are those before it, and the same step is captured once its loss is fixed."""
    waits = [False]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        large = torch.ones(1 << 26, device="cuda")  # 256 MiB in the pool
        loss = F.cross_entropy(model(x), y) + 0 * large.sum()
        if waits[0]:
            loss.item()
        return loss

    torch.manual_seed(0)
    model = Net(0.5).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 2**-7)
    step = hs.TrainStep(model, optimizer, loss, policy=hs.Policy.of("mixed", dtype="bf16"), cuda_graph=True)
    for i in range(WARM_UPS):
        step(*batch(i))
    torch.cuda.empty_cache()
    reserved, stream, state = torch.cuda.memory_reserved(), torch.cuda.current_stream(), torch.cuda.get_rng_state()
    waits[0] = True
    for _ in range(2):  # the second is a warm-up, which may wait, and the third a capture again
        with pytest.raises(StepError, match="cannot be captured"):
            step(*batch(4))
        assert torch.cuda.current_stream() == stream and torch.equal(torch.cuda.get_rng_state(), state)
        torch.rand(8, device="cuda")  # raises where the generator still draws for a capture
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved + (1 << 24)
        assert step(*batch(5)).host().updated
        state = torch.cuda.get_rng_state()
        torch.cuda.empty_cache()
    waits[0] = False
    for i in range(3):
        assert step(*batch(i)).host().updated
    assert step._graphs is not None and step._graphs.captures == 1


def test_graphs_are_captured_again_after_all_were_dropped() -> None:
    """Into a new memory pool: torch refuses the one whose graphs are gone. Their tables are freed."""
    step = trained("O2", "bf16", "adamw", cuda_graph=True)
    held = []
    for k in range(4):
        step.optimizer.param_groups[0]["weight_decay"] = 0.125 * k
        for i in range(WARM_UPS + 2):
            assert step(*batch(i)).host().updated
        held.append(sum(len(each) for _, each in tables._captures().graphs))
    assert step._graphs is not None and step._graphs.captures == 4
    assert held[1:] == held[:1] * 3


def test_batches_on_the_host_are_brought_to_the_device() -> None:
    step = trained("mixed", "bf16", "adamw", cuda_graph=True)
    for i in range(6):
        x, y = batch(i)
        assert step(x.cpu().pin_memory(), y.cpu()).host().updated


@pytest.mark.parametrize("preset", ["mixed", "O2"])
def test_compiled_and_captured(preset: str) -> None:
    eager = trained(preset, "bf16", "adamw")
    both = trained(preset, "bf16", "adamw", compile=True, cuda_graph=True)
    for i in range(6):
        torch.testing.assert_close(both(*batch(i)).loss, eager(*batch(i)).loss, rtol=2**-6, atol=1e-4)
