"""The counter on real tensors: phases, casts, waits for the device, saved bytes, and what it must not disturb."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.testing import Counter, Counts, count_step
from tests.products import sampled

X, Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.long)
DEVICE_PREDICATE: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
    (hs.Lion, {}),
    (torch.optim.NAdam, {}),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train_step(
    name: str, form: str, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **more: Any
) -> hs.TrainStep:
    model = net()
    optimizer = kind(model.parameters(), **more.pop("options", {}))
    if more.pop("scheduled", False):
        more["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    policy = hs.Policy.of(name, dtype=form)
    return hs.TrainStep(model, optimizer, more.pop("loss", loss_fn), policy=policy, clip_norm=1.0, **more)


def autocast_loop(model: nn.Module, *, before_step: Callable[[nn.Module], None] | None = None) -> Callable[..., None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model, x, y)
        loss.backward()
        if before_step is not None:
            before_step(model)
        optimizer.step()

    return step


# ------------------------------------------------------------------------------------------ casts and phases


def test_casts_are_told_apart_by_what_is_cast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    counts = count_step(autocast_loop(model), X, Y)
    # down: the input; up: the logits, which CPU autocast wants in fp32 for the loss; and their gradient down again
    assert [counts.casts(kind) for kind in ("weight", "gradient", "down", "up")] == [4, 4, 2, 1]
    parameters = 8 * 16 + 16 + 16 * 4 + 4
    assert counts.parameters == parameters
    assert counts.cast_bytes("weight") == counts.cast_bytes("gradient") == 6 * parameters
    assert counts.weight_bytes_per_parameter == 12
    assert counts.casts() == 11 and counts.cast_bytes() == 12 * parameters + 6 * (X.numel() + 2 * 16)
    phases = {(row.phase, row.kind): row.casts for row in counts.rows if row.casts}
    assert phases == {
        ("forward", "weight"): 4,
        ("forward", "down"): 1,
        ("forward", "up"): 1,
        ("backward", "down"): 1,
        ("backward", "gradient"): 4,
    }


def test_phases_are_found_by_themselves() -> None:
    seen = []

    def note(model: nn.Module) -> None:
        seen.append(next(model.parameters()).sign())

    counts = count_step(autocast_loop(net(), before_step=note), X, Y)
    where = {row.operator: row.phase for row in counts.rows}
    assert where["aten::native_batch_norm"] == "forward" or where["aten::_native_batch_norm_legit"] == "forward"
    assert where["aten::threshold_backward"] == "backward" and where["aten::sign"] == "tail" and seen
    assert counts.bytes() == sum(counts.bytes(phase) for phase in ("other", "forward", "backward", "tail"))


def test_recomputation_belongs_to_the_backward_pass() -> None:
    model = net()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return F.cross_entropy(out, y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = count_step(hs.TrainStep(model, optimizer, loss, policy="O0"), X, Y)
    products = {row.phase for row in counts.rows if row.operator == "aten::addmm"}
    assert products == {"forward", "backward"}


def test_the_tail_is_where_low_weights_are_written_back() -> None:
    counts = count_step(train_step("O2", "bf16", options={"foreach": True}), X, Y)  # AdamW's own step
    rows = {(row.phase, row.kind): row for row in counts.rows if row.operator == "aten::_foreach_copy_"}
    assert rows["tail", "gradient"].casts == rows["tail", "weight"].casts == 4  # two linear layers
    assert rows["tail", "gradient"].launches + rows["tail", "weight"].launches == 2
    assert counts.tail_bytes_per_parameter > 48


def test_an_update_in_one_pass_is_counted_by_what_its_operators_say_they_read_and_write() -> None:
    counts = count_step(train_step("O2", "bf16"), X, Y)
    tail = {row.operator: row for row in counts.rows if row.phase == "tail"}
    assert {"halfstep::norms", "halfstep::judge", "halfstep::adam_"} <= set(tail)
    low = 2 + (2 + 2 + 4 + 4 + 2 + 2 + 4 + 4)  # norm; gradient, weight, remainder and states in, all but it out
    wide = 4 + (4 + 4 + 4 + 4 + 4 + 4 + 4)  # BatchNorm's weights stay fp32
    assert low < counts.tail_bytes_per_parameter < wide + 2  # and some scalars
    assert counts.casts("weight") == 0


def test_what_the_forward_pass_leaves_for_the_backward_pass_is_counted_without_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().sum(), policy="O0")
    assert count_step(step, X).saved == 4 * (X.numel() + 4 * 4)  # input, and what is squared


def test_a_loop_and_a_train_step_save_the_same() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()
        optimizer.step()

    other = net()
    step = hs.TrainStep(other, torch.optim.SGD(other.parameters(), lr=0.1), loss_fn, policy="O0")
    assert count_step(loop, X, Y).saved == count_step(step, X, Y).saved > 0


# ------------------------------------------------------------------------------------------ waits for the device


@pytest.mark.parametrize(
    ("name", "form", "optimizer"),
    sampled(["torch", "O1", "mixed", "O2", "pure"], ["fp16", "bf16"], DEVICE_PREDICATE, rest=pytest.mark.slow),
)
def test_a_step_reads_nothing(name: str, form: str, optimizer: tuple[Any, dict[str, Any]]) -> None:
    """fp16 scales, bf16 does not; neither forward nor backward nor tail waits."""
    kind, options = optimizer
    step = train_step(name, form, kind, options=options)
    for _ in range(2):  # the first step too
        assert count_step(step, X, Y, warm=0).syncs == ()
    assert step.host_reads == step.scaler.host_reads == 0


@pytest.mark.parametrize("form", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.RAdam])
def test_other_optimizers_cost_one_read_a_step(form: str, kind: Any) -> None:
    step = train_step("mixed", form, kind)
    (sync,) = count_step(step, X, Y, warm=2).syncs
    assert (sync.phase, sync.operator) == ("tail", "aten::_local_scalar_dense")
    assert sync.where.startswith("optimizer_step.py:") and "bad" in sync.where
    assert step.host_reads == 3


def test_a_scheduler_costs_no_read() -> None:
    step = train_step("mixed", "bf16", scheduled=True)
    assert count_step(step, X, Y).syncs == () and step.host_reads == 0


def test_clipping_by_value_and_flushing_read_nothing() -> None:
    model = net()
    step = hs.TrainStep(
        model, torch.optim.AdamW(model.parameters()), loss_fn, policy="O0", clip_value=0.1, accumulate=2
    )

    def short_window(x: Tensor, y: Tensor) -> None:
        step(x, y)
        step.flush()

    assert count_step(short_window, X, Y).syncs == ()


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if gradient.sum().item() > 1e9 else 1)


def reads_forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_fn(model, x, y)
    return loss if loss.item() > 0 else -loss


def reads_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scaled: Tensor = Reads.apply(model(x))  # type: ignore[no-untyped-call]
    return F.cross_entropy(scaled, y)


def compares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    assert not torch.equal(x, x + 1) and len(y.nonzero()) == 0 and not len(x[x > 1e9])
    return loss_fn(model, x, y)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (reads_forward, [("forward", "aten::_local_scalar_dense")]),
        (reads_backward, [("backward", "aten::_local_scalar_dense")]),
        (compares, [("forward", "aten::equal"), ("forward", "aten::nonzero"), ("forward", "aten::index")]),
    ],
)
def test_every_wait_is_found_and_named(loss: Any, found: list[tuple[str, str]]) -> None:
    """The twin of the tests above: a loss that does wait."""
    counts = count_step(train_step("mixed", "bf16", loss=loss), X, Y)
    assert [(sync.phase, sync.operator) for sync in counts.syncs] == found
    assert all(sync.where.startswith("test_counter.py:") for sync in counts.syncs)
    assert f"sync in {found[0][0]}: {found[0][1]} at test_counter.py:" in str(counts)


def test_step_counters_that_torch_keeps_on_the_cpu_are_no_waits() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(x: Tensor, y: Tensor) -> None:
        loss_fn(model, x, y).backward()
        optimizer.step()  # reads its counters: on every device they are on the CPU

    assert count_step(step, X, Y).syncs == ()


# ------------------------------------------------------------------------------------------ what it leaves alone


@pytest.mark.parametrize("name", ["mixed", "pure"])
def test_counting_changes_no_bit_of_the_training(name: str) -> None:
    plain, counted = train_step(name, "bf16"), train_step(name, "bf16")
    for _ in range(4):
        plain(X, Y)
    own = counted.loss_fn
    count_step(counted, X, Y, warm=3)
    assert counted.loss_fn is own
    assert all(map(torch.equal, plain.model.parameters(), counted.model.parameters()))


def test_after_an_error_everything_is_as_before() -> None:
    def fails(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model(x)
        raise KeyError("mine")

    step = train_step("mixed", "bf16", loss=fails)
    before = copy.copy(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(KeyError, match="mine"):
        count_step(step, X, Y, warm=0)
    assert step.loss_fn is fails and before == nn.modules.module._global_forward_pre_hooks
    step.loss_fn = loss_fn
    assert step(X, Y).host().updated


def test_hooks_of_parameters_are_taken_off() -> None:
    model = net()
    count_step(autocast_loop(model), X, Y)
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_counter_may_be_used_alone() -> None:
    model = net()
    with Counter() as counter:
        loss_fn(model, X, Y).backward()
    counts = counter.counts()
    assert isinstance(counts, Counts) and counts.launches("forward") and counts.launches("backward")
