"""GradScaler against torch.amp.GradScaler, and what it does better."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.errors import ScaleError
from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.scale import GradScaler
from tests.scale.loops import INF, OPTIMIZERS, Reads, backward, one_step, parameters, waits


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    bad=st.lists(st.booleans(), min_size=3, max_size=14),
    interval=st.integers(1, 3),
    growth=st.sampled_from([2.0, 1.7]),
)
def test_bit_equal_to_torch(kind: str, clip: bool, bad: list[bool], interval: int, growth: float) -> None:
    """Parameters, scale and tracker after every step, for any pattern of overflows (floor and ceiling far away)."""
    numbers: dict[str, Any] = {
        "init_scale": 1024.0,
        "growth_factor": growth,
        "backoff_factor": 0.6,
        "growth_interval": interval,
    }
    if kind == "sgd-fused":
        bad = [False, *bad]  # torch's momentum is garbage if the first step is skipped
    runs = []
    for make in (torch.amp.GradScaler, GradScaler):
        params = parameters()
        scaler, optimizer = make("cpu", **numbers), OPTIMIZERS[kind](params)
        trace = []
        for step in bad:
            optimizer.zero_grad()
            backward(scaler, params, bad=step)
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
            state = scaler.state_dict()
            trace.append((state["scale"], state["_growth_tracker"], [p.detach().tolist() for p in params]))
        runs.append(trace)
    assert runs[0] == runs[1]


def test_the_comparison_can_fail() -> None:
    scaler, torchs = GradScaler("cpu", growth_interval=2), torch.amp.GradScaler("cpu", growth_interval=3)
    for each in (scaler, torchs):
        optimizer = torch.optim.SGD(parameters(), lr=0.1)
        one_step(each, optimizer)
        one_step(each, optimizer)
    assert scaler.get_scale() != torchs.get_scale()


@pytest.mark.parametrize("shared", [False, True])
def test_several_optimizers_share_one_scale(shared: bool) -> None:
    """Any bad one backs off, each decides its own skip, as in torch."""
    runs = []
    for make in (torch.amp.GradScaler, GradScaler):
        scaler = make("cpu", init_scale=8.0)
        good, bad = parameters(1), parameters(1)
        optimizers = [OPTIMIZERS["sgd"](good), OPTIMIZERS["adamw-fused" if shared else "adam"](bad)]
        torch.autograd.backward(scaler.scale((good[0] ** 2).sum()))
        backward(scaler, bad, bad=True)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        runs.append((scaler.get_scale(), good[0].tolist(), bad[0].tolist()))
        if isinstance(scaler, GradScaler):
            assert [bool(scaler.skipped(optimizer)) for optimizer in optimizers] == [False, True]
    assert runs[0] == runs[1]
    assert runs[0][0] == 4.0


def test_a_loss_in_containers() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    scaled: Any = scaler.scale({"a": one, "b": [one, (one.half(),)]})
    assert scaled["a"].item() == scaled["b"][0].item() == scaled["b"][1][0].item() == 4.0
    assert scaler.scale(torch.tensor(1j)).item() == 4j
    assert isinstance(scaled["b"][1], tuple)
    with pytest.raises(ScaleError, match="pass the loss itself"):
        scaler.scale({"a": one, "b": 3.0})


def test_step_returns_what_the_optimizer_returned() -> None:
    class Returns(torch.optim.SGD):
        def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
            return ("stepped", factor)

    scaler, optimizer = GradScaler("cpu"), Returns(parameters(), lr=0.1)
    assert one_step(scaler, optimizer) == ("stepped", 1.0)
    assert one_step(scaler, optimizer, bad=True) is None
    backward(scaler, optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    backward(scaler, optimizer.param_groups[0]["params"])
    assert scaler.step(optimizer, None, factor=2.0) == ("stepped", 2.0)


def test_accumulation_drops_the_whole_sum_on_one_overflow() -> None:
    scaler, params = GradScaler("cpu", init_scale=2.0), parameters(1)
    optimizer = torch.optim.SGD(params, lr=0.5)
    start = params[0].detach().clone()
    for bad in (False, True, False):
        backward(scaler, params, bad=bad)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(params[0], start) and scaler.get_scale() == 1.0


@pytest.mark.parametrize("kind", ["sgd", "sgd-fused"])
def test_an_optimizer_without_gradients_is_a_no_op(kind: str) -> None:
    scaler, params = GradScaler("cpu", growth_interval=1), parameters()
    optimizer, idle = OPTIMIZERS["sgd"](params), OPTIMIZERS[kind](parameters())
    idle.register_step_pre_hook(lambda *_: pytest.fail("stepped"))
    scaler.scale(torch.ones(()))
    for unscale in (False, True):
        if unscale:
            scaler.unscale_(idle)
        assert scaler.step(idle) is None
        scaler.update()
        assert scaler.get_scale() == 2.0**16 and scaler.skipped(idle).item() is False
    backward(scaler, params)
    scaler.step(idle)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**17
    # torch, for the record:
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(torch.ones(()))
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        torchs.step(OPTIMIZERS["sgd"](parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_gradients(dtype: torch.dtype) -> None:
    """fp32 for an optimizer with precise weights behind it, in place for any other."""
    for precise in (True, False):
        scaler, params = GradScaler("cpu", init_scale=2.0**10), parameters(dtype=dtype)
        optimizer = torch.optim.SGD(params, lr=0.1)
        if precise:
            setattr(optimizer, WEIGHTS_ATTRIBUTE, object())
        backward(scaler, params)
        assert params[0].grad is not None and params[0].grad.dtype == dtype
        expected = params[0].grad.float() / 2.0**10
        scaler.unscale_(optimizer)
        assert params[0].grad.dtype == (torch.float32 if precise else dtype)
        assert torch.equal(params[0].grad, expected if precise else expected.to(dtype))
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match="FP16"):  # torch, for the record
        torchs = torch.amp.GradScaler("cpu")
        params = parameters(dtype=torch.float16)
        torchs.scale(torch.ones(()))
        params[0].grad = torch.ones_like(params[0])
        torchs.unscale_(torch.optim.SGD(params, lr=0.1))


def test_sparse_and_complex_gradients_train() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    weight = torch.nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
    optimizers = [torch.optim.SparseAdam(embedding.parameters()), torch.optim.SGD([weight], lr=0.5)]
    loss = embedding(torch.tensor([1, 1, 3])).sum() + (weight * weight.conj()).real.sum()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(weight, torch.zeros(2, dtype=torch.complex64))
    grad = embedding.weight.grad
    assert grad is not None and grad.is_sparse and grad.to_dense()[1].tolist() == [2.0, 2.0]


def closure() -> float:
    raise AssertionError("a closure must not be called")


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_closures_are_refused_while_enabled(how: str) -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = torch.optim.LBFGS(params)
    backward(scaler, params)
    with pytest.raises(ScaleError, match=r"step\(LBFGS, closure\): a closure runs backward inside the optimizer") as e:
        scaler.step(optimizer, closure) if how == "positional" else scaler.step(optimizer, closure=closure)
    assert "GradScaler(enabled=False)" in str(e.value)
    sgd = torch.optim.SGD(params, lr=0.1)
    scaler.step(sgd, None)
    scaler.update()
    backward(scaler, params)
    scaler.step(sgd, closure=None)


def test_closures_pass_when_disabled() -> None:
    scaler, params = GradScaler(enabled=False), parameters(1)
    optimizer = torch.optim.LBFGS(params)

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = scaler.scale((params[0] ** 2).sum())
        torch.autograd.backward(loss)
        return float(loss.detach())

    first = scaler.step(optimizer, evaluate)
    assert scaler.step(optimizer, closure=evaluate) < first


def test_errors_of_order_say_what_to_do() -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    for method in ("unscale_", "step"):
        with pytest.raises(ScaleError, match=rf"{method}\(\): no loss has been scaled yet; run scaler.scale"):
            getattr(scaler, method)(optimizer)
    with pytest.raises(ScaleError, match="nothing was stepped since the last update"):
        scaler.update()
    backward(scaler, params)
    with pytest.raises(ScaleError, match="nothing was stepped since the last update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(ScaleError, match="already been called on this SGD.*call update\\(\\) also after"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(ScaleError, match="step\\(\\) has already been called on this SGD since the last update"):
        scaler.step(optimizer)
    with pytest.raises(ScaleError, match="called after step\\(\\) on this SGD; call it before step"):
        scaler.unscale_(optimizer)
    scaler.update()
    backward(scaler, params)
    scaler.step(optimizer)
    with pytest.raises(ScaleError, match="unscale_\\(optimizer\\): got Linear, which has no param_groups"):
        scaler.unscale_(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    assert isinstance(ScaleError(), RuntimeError)  # what callers of torch's catch


def test_a_skip_by_hand_leaves_nothing_stale() -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(scaler, params, bad=True)
        scaler.unscale_(optimizer)
        scaler.update()  # the user saw the inf and did not step
    assert scaler.get_scale() == 2.0**13
    one_step(scaler, optimizer)
    assert not scaler.skipped(optimizer)


def test_an_optimizer_is_freed_after_update() -> None:
    scaler = GradScaler("cpu")
    optimizer: Any = torch.optim.SGD(parameters(), lr=0.1)
    one_step(scaler, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["sgd", "sgd-fused"])
def test_skipped_is_a_device_bool_valid_until_the_next_step(kind: str) -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = OPTIMIZERS[kind](params)
    for bad in (True, False, True):
        optimizer.zero_grad()
        backward(scaler, params, bad=bad)
        scaler.step(optimizer)
        flag = scaler.skipped(optimizer)
        assert flag.dtype == torch.bool and flag.shape == () and flag.item() is bad
        scaler.update()
        assert scaler.skipped(optimizer).item() is bad
    assert flag.item() is True
    disabled = GradScaler(enabled=False)
    assert disabled.skipped(optimizer).item() is False
    assert GradScaler("cpu").skipped(torch.optim.SGD(params, lr=0.1)).item() is False


@pytest.mark.parametrize(
    ("flags", "factor"),
    [
        ([torch.tensor(0.0)], 1.0),
        ([torch.tensor(1.0)], 0.5),
        ([torch.tensor(False), torch.tensor([True])], 0.5),
        ([torch.tensor(float("nan"))], 0.5),
        ([torch.tensor(3, dtype=torch.int32), torch.tensor(0)], 0.5),
    ],
)
def test_recorded_flags_are_counted(flags: list[Tensor], factor: float) -> None:
    scaler = GradScaler("cpu", init_scale=64.0)
    with waits(0):
        for flag in flags:
            scaler.record(flag)
        scaler.update()
    assert scaler.get_scale() == 64.0 * factor
    with pytest.raises(ScaleError, match="nothing was stepped"):
        scaler.update()


def test_recorded_and_own_flags_go_together() -> None:
    scaler, params = GradScaler("cpu", init_scale=64.0), parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    backward(scaler, params)
    scaler.step(optimizer)
    scaler.record(torch.tensor(True))
    scaler.update()
    assert scaler.get_scale() == 32.0 and not scaler.skipped(optimizer)
    for wrong, text in ((torch.zeros(2), "got (2,); expected a tensor of one element"), (1.0, "got float")):
        with pytest.raises(ScaleError) as caught:
            scaler.record(wrong)  # type: ignore[arg-type]
        assert text in str(caught.value)


def test_a_recorded_flag_reaches_the_alarm_with_names() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, floor=1.0)
    params = parameters(1)
    optimizer = torch.optim.SGD(params, lr=0.1)
    params[0].grad = torch.full_like(params[0], INF)
    scaler.record(torch.tensor(True), optimizer=optimizer)
    with pytest.warns(UserWarning, match=r"params'\]\[0\] of shape \(3, 2\) \(6 of 6 values\)"):
        scaler.update()


def test_scale_on_is_the_live_scale() -> None:
    scaler = GradScaler("cpu", init_scale=64.0)
    live = scaler.scale_on("cpu")
    assert live.dtype == torch.float32 and live.shape == () and live.item() == 64.0
    scaler.record(torch.tensor(True))
    scaler.update()
    assert live.item() == 32.0 and scaler.scale_on("cpu") is live  # the same address for CUDA graphs
    assert GradScaler(enabled=False).scale_on("cpu").item() == 1.0


@pytest.mark.parametrize("value", [8.0, 8, torch.tensor(8.0), torch.tensor([8])])
@pytest.mark.parametrize("used", [False, True])
def test_update_sets_a_new_scale(value: Any, used: bool) -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    if used:
        backward(scaler, params, bad=True)
        scaler.unscale_(optimizer)
    scaler.update(value)
    assert scaler.get_scale() == 8.0 and scaler.scale(torch.ones(())).item() == 8.0
    backward(scaler, params)
    scaler.unscale_(optimizer)
    with pytest.raises(ScaleError, match=r"the scale's bounds .* and is 0\.0"):
        scaler.update(0.0)


def test_who_waits_for_the_device() -> None:
    scaler, params = GradScaler("cpu"), parameters()
    plain, fused = OPTIMIZERS["adam"](params), OPTIMIZERS["adamw-fused"](parameters())
    for bad in (False, True):
        with waits(0):
            backward(scaler, params, bad=bad)
            scaler.unscale_(plain)
        before = scaler.host_reads
        with Reads() as reads:
            scaler.step(plain)
        assert scaler.host_reads - before == 1
        if bad:
            assert reads.count == 1  # a good step's own bias corrections are read by Adam
        with waits(0):
            backward(scaler, fused.param_groups[0]["params"], bad=bad)
            scaler.step(fused)
            scaler.skipped(fused)
            scaler.update()
        plain.zero_grad()
        fused.zero_grad()
    assert scaler.host_reads == 2


def test_fakes_on_several_devices_never_wait() -> None:
    """FakeTensors raise on any read: one verdict and one scale over two GPUs and the CPU."""
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cuda:1", "cuda:0", "cpu")]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = GradScaler()
        scaled = scaler.scale([torch.ones((), device=device) for device in ("cuda:0", "cpu", "cuda:1")])
        assert [str(loss.device) for loss in scaled] == ["cuda:0", "cpu", "cuda:1"]
        scaler.unscale_(optimizer)
        scaler.record(torch.zeros((), device="cuda:1"))
        verdict = scaler._iteration.found()
        assert verdict is not None and str(verdict.device) == "cuda:0"
        scaler.update()
        assert str(scaler.scale_on("cuda:1").device) == "cuda:1"


def test_disabled_is_a_null_object() -> None:
    scaler, params = GradScaler(enabled=False), parameters()
    other = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, plain = OPTIMIZERS["adam"](params), OPTIMIZERS["adam"](other)
    loss = (params[0] ** 2).sum()
    nothing: Any = object()
    assert scaler.scale(loss) is loss and scaler.scale(nothing) is nothing
    for _ in range(3):
        backward(scaler, params)
        backward(scaler, other)
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        plain.step()
        scaler.record(torch.tensor(True))
        scaler.update()
        scaler.update(4.0)
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.host_reads, scaler.state_dict()) == (1.0, False, 0, {})
    scaler.load_state_dict({})
    scaler.load_state_dict(GradScaler("cpu").state_dict())
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False
    assert scaler.get_growth_factor() == 2.0


def test_scaling_traces_without_a_graph_break() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    torch._dynamo.reset()
    compiled = torch.compile(lambda loss: scaler.scale(loss), fullgraph=True, backend="eager")
    assert compiled(torch.ones(())).item() == 4.0
    scaler.record(torch.tensor(True))
    scaler.update()
    assert compiled(torch.ones(())).item() == 2.0


@pytest.mark.parametrize("bad", [False, True])
def test_after_unscale_it_is_known_whether_the_step_is_skipped(bad: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), GradScaler("cpu", init_scale=8.0)
    for wrong in (not bad, bad):
        scaler.scale((weight * (INF if wrong else 1.0)).sum()).backward()
        scaler.unscale_(optimizer)
        assert bool(scaler.skipped(optimizer)) is wrong
        scaler.step(optimizer)
        assert bool(scaler.skipped(optimizer)) is wrong
        scaler.update()
        optimizer.zero_grad()
