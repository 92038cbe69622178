"""scale_loss and the steps: gradients, accumulation, several losses, overflows, exceptions, checkpoints."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.apex import amp
from halfstep.compat.apex.amp import _amp_state

FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = ("O0", "O1", "O2", "O3")
CASES = [(level, None) for level in LEVELS] + [(level, BF16) for level in LEVELS[1:]]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    x, target = data(number)
    return F.cross_entropy(model(x).float(), target)


def started(level: str = "O2", *, adam: bool = False, **options: Any) -> tuple[nn.Sequential, Any]:
    model = network()
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05, **({} if adam else {"momentum": 0.9}))
    found = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return found  # type: ignore[no-any-return]


def backward(loss: Tensor, optimizers: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------- gradients and steps


@pytest.mark.parametrize(("level", "dtype"), CASES)
def test_every_level_trains_as_fp32_does(level: str, dtype: torch.dtype | None) -> None:
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    options: dict[str, Any] = {} if dtype is None else {"cast_model_type": dtype}
    model, mine = started(level, **options)
    for number in range(12):
        with amp.disable_casts():
            loss = loss_of(plain, number % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine.zero_grad()
        backward(loss_of(model, number % 3), mine)
        mine.step()
    assert loss_of(model).item() == pytest.approx(loss_of(plain).item(), rel=0.02)


def test_o2_is_bit_equal_to_masters_by_hand() -> None:
    model, optimizer = started("O2", adam=True, loss_scale=1024.0)
    by_hand = copy.deepcopy(network())
    masters = [nn.Parameter(p.detach().clone()) for p in by_hand.parameters()]
    theirs = torch.optim.AdamW(masters, lr=0.05)
    for number in range(5):
        backward(loss_of(model, number), optimizer)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None and parameter.grad.dtype is FP32
            master.grad = parameter.grad.clone()
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        assert same(list(amp.master_params(optimizer)), masters)
        assert same([m.half() for m in masters], list(model.parameters()))


def test_after_the_block_gradients_are_unscaled_and_clipping_masters_clips() -> None:
    for level in LEVELS:
        model, optimizer = started(level)
        reference = network()
        with amp.disable_casts():
            loss_of(reference).backward()
        backward(loss_of(model), optimizer)
        for parameter, other in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
            assert parameter.grad is not None and other.grad is not None
            torch.testing.assert_close(parameter.grad.float(), other.grad, atol=2e-3, rtol=2e-2)
        nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1e-3)
        before = weights(model)
        optimizer.step()
        moved = torch.stack([(a - b).norm() for a, b in zip(before, weights(model), strict=True)]).norm()
        assert float(moved) <= 0.05 * 1e-3 * 1.01 + (1e-3 if level == "O3" else 0.0)


def test_gradients_set_on_masters_by_hand_are_the_ones_stepped() -> None:
    model, optimizer = started("O2", loss_scale=8.0)
    backward(loss_of(model), optimizer)
    before = [m.detach().clone() for m in amp.master_params(optimizer)]
    for master in amp.master_params(optimizer):
        master.grad = torch.ones_like(master)
    optimizer.step()
    for old, new in zip(before, amp.master_params(optimizer), strict=True):
        assert torch.equal(new, old - 0.05)
        assert new.grad is None


@pytest.mark.parametrize(("level", "dtype"), CASES)
@pytest.mark.parametrize("delay", [False, True])
def test_accumulation_adds_up_whatever_the_scales_were(level: str, dtype: torch.dtype | None, delay: bool) -> None:
    options: dict[str, Any] = {} if dtype is None else {"cast_model_type": dtype}
    found: list[list[Tensor]] = []
    for scales in ((1.0, 1.0, 1.0), (8.0, 4096.0, 64.0)):
        model, optimizer = started(level, loss_scale="dynamic" if level != "O0" else None, **options)
        for number, scale in enumerate(scales):
            if level != "O0" and not (delay and number):
                _amp_state.loss_scalers[0]._loss_scale = scale
            backward(loss_of(model, number), optimizer, delay_unscale=delay and number < 2)
        found.append([p.grad.float().clone() for p in amp.master_params(optimizer) if p.grad is not None])
        optimizer.step()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-3 if dtype is BF16 else 1e-3, rtol=0.02)


def test_a_step_before_scaled_gradients_are_unscaled_is_refused() -> None:
    model, optimizer = started("O1")
    backward(loss_of(model), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called while gradients are still scaled.*delay_unscale"):
        optimizer.step()
    backward(loss_of(model), optimizer)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="inside `with amp.scale_loss"),
        amp.scale_loss(loss_of(model), optimizer) as s,
    ):
        s.backward()
        optimizer.step()


def test_a_step_without_scale_loss_steps_the_plain_gradients() -> None:
    for level in LEVELS:
        model, optimizer = started(level)
        before = weights(model)
        loss_of(model).backward()
        optimizer.step()
        assert not same(before, weights(model))


def test_zero_grad_takes_torchs_arguments_and_forgets_scaled_gradients() -> None:
    for level in LEVELS:
        model, optimizer = started(level)
        backward(loss_of(model), optimizer, delay_unscale=True)
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model.parameters())
        backward(loss_of(model), optimizer)
        optimizer.step()


def test_a_parameter_group_added_later_is_stepped() -> None:
    for level in LEVELS:
        model, optimizer = started(level)
        extra = nn.Parameter(torch.ones(3).half() if level == "O2" else torch.ones(3))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        for _ in range(2):
            backward(loss_of(model) + extra.float().sum() * 1e-4, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        if level == "O2":  # 0.5 * 1e-4 is less than half an ulp of 1 in fp16: only a master remembers it
            *_, master = amp.master_params(optimizer)
            assert master.dtype is FP32 and 0.9998 < float(master.detach()[0]) < 0.99995
            assert extra.dtype is HALF
        else:
            assert float(extra.detach()[0]) < 1.0


# ---------------------------------------------------------------------- overflows


def overflowing(model: nn.Sequential, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(loss_of(model), optimizer, **options) as scaled:
        (scaled * float("inf")).backward()


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_one_step_and_says_so(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level, loss_scale="dynamic", adam=True)
    _amp_state.verbosity = 1
    before = weights(model)
    overflowing(model, optimizer)
    optimizer.step()
    assert (
        capsys.readouterr().out == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )
    assert same(before, weights(model)) and not optimizer.state and amp.step_was_skipped(optimizer)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert not same(before, weights(model)) and not amp.step_was_skipped(optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}


def test_an_overflow_in_one_of_two_micro_batches_skips_their_step() -> None:
    for order in ((True, False), (False, True)):
        model, optimizer = started("O1")
        before = weights(model)
        for bad in order:
            overflowing(model, optimizer) if bad else backward(loss_of(model), optimizer)
        optimizer.step()
        assert same(before, weights(model))


def test_a_delayed_overflow_check_is_answered_by_the_next_pass() -> None:
    model, optimizer = started("O2")
    before = weights(model)
    overflowing(model, optimizer, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16
    backward(loss_of(model), optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    optimizer.step()
    assert same(before, weights(model))
    optimizer.zero_grad()
    backward(loss_of(model), optimizer, delay_overflow_check=True)
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert not same(before, weights(model))


def test_overflow_flags_leave_with_the_gradients_they_were_about() -> None:
    model, optimizer = started("O1")
    before = weights(model)
    overflowing(model, optimizer)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert not same(before, weights(model))


# ---------------------------------------------------------------------- several losses, models, optimizers


def two() -> tuple[list[nn.Sequential], list[Any]]:
    models = [network(1), network(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    return amp.initialize(models, optimizers, opt_level="O2", verbosity=0, num_losses=3)  # type: ignore[no-any-return]


def test_each_loss_has_its_own_scale() -> None:
    models, optimizers = two()
    overflowing(models[0], optimizers[0], loss_id=1)
    backward(loss_of(models[1]), optimizers[1], loss_id=2)
    scales = {key: (value["loss_scale"], value["unskipped"]) for key, value in amp.state_dict().items()}
    assert scales == {"loss_scaler0": (65536.0, 0), "loss_scaler1": (32768.0, 0), "loss_scaler2": (65536.0, 1)}
    before = [weights(m) for m in models]
    for optimizer in optimizers:
        optimizer.step()
    assert same(before[0], weights(models[0])) and not same(before[1], weights(models[1]))
    with pytest.raises(IndexError, match=r"loss_id=3\): there are 3 loss scalers.*num_losses=4"):
        backward(loss_of(models[0]), optimizers[0], loss_id=3)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_loss_over_several_optimizers_takes_a_list_or_a_tuple(kind: Any) -> None:
    models, optimizers = two()
    reference = [network(1), network(2)]
    for scale in (8.0, 512.0):
        _amp_state.loss_scalers[0]._loss_scale = scale
        backward(loss_of(models[0]) + loss_of(models[1]), kind(optimizers))
    (2 * (loss_of(reference[0]) + loss_of(reference[1]))).backward()
    for model, other in zip(models, reference, strict=True):
        for parameter, wanted in zip(model.parameters(), other.parameters(), strict=True):
            assert parameter.grad is not None and wanted.grad is not None
            torch.testing.assert_close(parameter.grad, wanted.grad, atol=2e-3, rtol=2e-2)


def test_one_optimizer_over_two_models_steps_masters_of_both() -> None:
    models = [network(1), network(2)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O2", verbosity=0)
    before = [weights(m) for m in models]
    for _ in range(3):
        backward(loss_of(models[0]) + loss_of(models[1]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.dtype is HALF for group in optimizer.param_groups for p in group["params"])
    assert all(m.dtype is FP32 for m in amp.master_params(optimizer))
    assert not any(same(b, weights(m)) for b, m in zip(before, models, strict=True))


# ---------------------------------------------------------------------- wrong order


def test_what_is_called_too_early_or_with_the_wrong_thing_is_explained() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="has not been initialized: call"):
        backward(loss_of(model), optimizer)
    with pytest.raises(RuntimeError, match=r"state_dict\(\) was called before amp.initialize"):
        amp.state_dict()
    with pytest.raises(RuntimeError, match="was called before amp.initialize.*restore"):
        amp.load_state_dict({})
    started("O2")
    with pytest.raises(RuntimeError, match="SGD was not passed through amp.initialize"):
        backward(loss_of(model), optimizer)
    with pytest.raises(RuntimeError, match="dict is no optimizer.*passed as a list"):
        backward(loss_of(model), {"a": optimizer})
    with pytest.raises(RuntimeError, match="no optimizer; pass"):
        backward(loss_of(model), [])
    mine, mine_optimizer = started("O2")
    other, other_optimizer = started("O2")
    with pytest.raises(RuntimeError, match="different calls of amp.initialize"):
        backward(loss_of(mine), [mine_optimizer, other_optimizer])
    with pytest.raises(TypeError, match="takes the loss as a tensor and got float"):
        backward(1.0, mine_optimizer)  # type: ignore[arg-type]
    with (
        amp.scale_loss(loss_of(mine), mine_optimizer),
        pytest.raises(RuntimeError, match="in another scale_loss block"),
        amp.scale_loss(loss_of(mine), mine_optimizer),
    ):
        pass


# ---------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_the_block_loses_no_gradient(level: str) -> None:
    model, optimizer = started(level)
    backward(loss_of(model), optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]
    state = amp.state_dict()
    with pytest.raises(ValueError, match="mine"), amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        raise ValueError("mine")
    if level != "O0":  # O0 without a scale is plain PyTorch: the gradients are there
        after = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        assert same(before, after)
    assert amp.state_dict() == state
    backward(loss_of(model), optimizer)
    optimizer.step()


def test_a_step_that_raises_leaves_casts_on_and_can_be_tried_again() -> None:
    class Failing(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise ValueError("mine")
            return super().step(closure)

    for level in ("O1", "O2"):
        model = network()
        optimizer = Failing(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        before = weights(model)
        backward(loss_of(model), optimizer)
        with pytest.raises(ValueError, match="mine"):
            optimizer.step()
        if level == "O1":
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is HALF
        assert same(before, weights(model))
        optimizer.fail = False
        optimizer.step()
        assert not same(before, weights(model))


# ---------------------------------------------------------------------- closures


def test_closures_run_with_casts_on_and_again_after_an_overflow() -> None:
    model, optimizer = started("O1")
    seen: list[torch.dtype] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        output = model(data(0)[0])
        seen.append(output.dtype)
        loss = F.cross_entropy(output, data(0)[1])
        with amp.scale_loss(loss, optimizer) as scaled:
            (scaled * (float("inf") if len(seen) < 3 else 1.0)).backward()
        return loss

    before = weights(model)
    loss = optimizer.step(closure)
    assert seen == [HALF] * 3 and loss.isfinite() and not same(before, weights(model))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**14


def test_lbfgs_learns_under_o1() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss, optimizer)
        return loss

    first = float(optimizer.step(closure).detach())
    for _ in range(3):
        last = float(optimizer.step(closure).detach())
    assert last < 0.2 * first


def test_closures_are_refused_with_masters_and_where_no_scale_helps() -> None:
    model, optimizer = started("O2")
    with pytest.raises(RuntimeError, match=r"SGD.step\(closure\) with master weights.*opt_level='O1'"):
        optimizer.step(lambda: 0.0)
    model, optimizer = started("O1")

    def closure() -> Tensor:
        loss = loss_of(model) * float("nan")
        backward(loss, optimizer)
        return loss

    with pytest.raises(RuntimeError, match="not finite at any loss scale"), pytest.warns(UserWarning, match="floor"):
        optimizer.step(closure)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("level", "dtype"), CASES)
def test_a_resumed_run_has_the_same_bits(level: str, dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {} if dtype is None else {"cast_model_type": dtype}

    def run(model: nn.Sequential, optimizer: Any, steps: range) -> None:
        for number in steps:
            overflowing(model, optimizer) if number == 2 else backward(loss_of(model, number), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    through = started(level, adam=True, loss_scale="dynamic", **options)
    run(*through, range(8))
    expected = weights(through[0]), amp.state_dict()
    model, optimizer = started(level, adam=True, loss_scale="dynamic", **options)
    run(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    for order in ("model first", "optimizer first"):
        file.seek(0)
        checkpoint = torch.load(file)
        assert {v.dtype for v in checkpoint["model"].values()} == {FP32}
        model, optimizer = started(level, adam=True, loss_scale="dynamic", **options)
        backward(loss_of(model, 0), optimizer)  # loading after training began
        optimizer.step()
        optimizer.zero_grad()
        if order == "model first":
            model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        model.load_state_dict(checkpoint["model"])
        amp.load_state_dict(checkpoint["amp"])
        run(model, optimizer, range(4, 8))
        assert same(weights(model), expected[0]) and amp.state_dict() == expected[1]


def test_loading_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    started("O2", num_losses=2)
    states = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}
    amp.load_state_dict(states)
    assert capsys.readouterr().out.splitlines() == [
        "Warning: state_dict contains 3 entries, while 2 loss_scalers are used",
        "Skipping loss_scaler[2], since num_losses was set to 2",
    ]
    assert amp.state_dict() == {key: states[key] for key in ("loss_scaler0", "loss_scaler1")}
    before = amp.state_dict()
    with pytest.raises(RuntimeError, match='unexpected.*"epoch"'):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "epoch": 3})
    assert amp.state_dict() == before
    destination: dict[str, Any] = {"epoch": 1}
    assert amp.state_dict(destination) is destination and set(destination) == {"epoch", *before}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["another loss", "an overflow of another optimizer", "by hand"])
def test_delayed_gradients_follow_the_scale_when_it_moves_before_the_last_pass(level: str, how: str) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, verbosity=0, num_losses=2, loss_scale=None)
    x, optimizer, scalers = torch.rand(4, 3), optimizers[0], amp._amp_state.loss_scalers
    for scaler in scalers:
        scaler._loss_scale = 1024.0

    def gradients() -> list[Tensor]:
        found = [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]
        optimizer.zero_grad()
        return found

    def loss() -> Tensor:
        out: Tensor = models[0](x)
        return out.float().square().sum()

    with amp.scale_loss(2 * loss(), optimizer) as scaled:
        scaled.backward()
    wanted = gradients()
    with amp.scale_loss(loss(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    if how == "another loss":
        scalers[1]._loss_scale = 64.0
    elif how == "by hand":
        scalers[1]._loss_scale = scalers[0]._loss_scale = 2048.0
    else:
        with amp.scale_loss(models[1](x).float().sum() * float("inf"), optimizers[1], loss_id=1) as scaled:
            scaled.backward()
        assert scalers[1].loss_scale() == 512.0
    with amp.scale_loss(loss(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    for found, expected in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
