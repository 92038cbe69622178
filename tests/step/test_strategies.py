"""Weight strategies under prepare, TrainStep and edits by hand: what holds for masters holds for all of them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.binding.prepare import store_of
from halfstep.errors import PolicyError, StepError, WeightsError
from halfstep.weights import STRATEGIES, WeightStore
from tests.products import sampled
from tests.weights.small import buffers

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [("split", "bf16"), ("kahan", "bf16"), ("kahan", "fp16"), ("stochastic", "bf16"), ("stochastic", "fp16")]
NAMES = [*STRATEGIES]
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-loop": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
}


def policy(master: str, dtype: str = "bf16") -> hs.Policy:
    return hs.Policy.of("O2", dtype=dtype, master=master)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    model[2].bias = model[0].bias  # shared
    return model


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + i)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def stepper(master: str, dtype: str = "bf16", optimizer: str = "adamw", **options: Any) -> hs.TrainStep:
    model = net()
    return hs.TrainStep(
        model, OPTIMIZERS[optimizer](model.parameters()), loss_fn, policy=policy(master, dtype), **options
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(), **{f"low {n}": p.detach().clone() for n, p in model.named_parameters()}}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def behind(model: nn.Module) -> WeightStore:
    store = store_of(model)
    assert store is not None
    return store


@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_it_trains_and_its_state_dict_is_fp32(master: str, dtype: str) -> None:
    step = stepper(master, dtype)
    assert type(behind(step.model)) is STRATEGIES[master]
    losses = [float(step(*batch(i % 3)).loss) for i in range(40)]
    assert sum(losses[-3:]) < sum(losses[:3]) / 2
    state, plain = step.model.state_dict(), net().state_dict()
    assert state.keys() == plain.keys() and all(v.dtype is FP32 for v in state.values())
    low = BF16 if dtype == "bf16" else HALF
    for name, parameter in step.model.named_parameters():
        assert parameter.dtype is (FP32 if name.startswith("3.") else low)
        assert (state[name] - parameter.float()).abs().max() <= 2.0**-8 * state[name].abs().max()
    assert not list(behind(step.model).temporaries())


def test_split_trains_as_master_does() -> None:
    """Their low weights differ in ties only, of which this run has none."""
    runs = []
    for master in ("split", "master"):
        step = stepper(master)
        for i in range(50):
            step(*batch(i))
        runs.append(weights(step.model))
    assert same(*runs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_resume_is_bit_exact(master: str, dtype: str, optimizer: str) -> None:
    step = stepper(master, dtype, optimizer, clip_norm=1.0)
    for i in range(4):
        step(*batch(i))
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    file.seek(0)
    again = stepper(master, dtype, optimizer, clip_norm=1.0)
    again(*batch(9))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert same(weights(step.model), weights(again.model))
    for i in range(4, 8):
        assert torch.equal(step(*batch(i)).loss, again(*batch(i)).loss)
    assert same(weights(step.model), weights(again.model))


def test_a_resume_without_the_state_of_rounding_is_refused_and_changes_nothing() -> None:
    step = stepper("stochastic")
    step(*batch(0))
    state = step.state_dict()
    assert set(state["weights"]) == {"seed", "counts"} and "weights" not in stepper("split").state_dict()
    del state["weights"]
    before = weights(step.model)
    with pytest.raises(WeightsError, match="stochastic rounding does not fit here"):
        step.load_state_dict(state)
    with pytest.raises(StepError, match="another policy"):
        step.load_state_dict(stepper("kahan").state_dict())
    assert same(weights(step.model), before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_a_copied_step_goes_on_bit_for_bit(master: str, dtype: str, how: str) -> None:
    step = stepper(master, dtype)
    for i in range(3):
        step(*batch(i))
    before = weights(step.model)
    again: hs.TrainStep = copy.deepcopy(step) if how == "deepcopy" else pickle.loads(pickle.dumps(step))
    assert same(weights(step.model), before) and same(weights(again.model), before)
    for i in range(3, 6):
        step(*batch(i))
        again(*batch(i))
    assert same(weights(step.model), weights(again.model))
    assert again.model.get_parameter("2.bias") is again.model.get_parameter("0.bias")


@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_a_copied_model_is_fp32_and_keeps_ties(master: str, dtype: str) -> None:
    step = stepper(master, dtype)
    step(*batch(0))
    for twin in (copy.deepcopy(step.model), pickle.loads(pickle.dumps(step.model))):
        assert all(p.dtype is FP32 for p in twin.parameters())
        assert twin.get_parameter("2.bias") is twin.get_parameter("0.bias")
        assert all(torch.equal(v, step.model.state_dict()[k]) for k, v in twin.state_dict().items())
    assert not list(behind(step.model).temporaries())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_bad_steps_leave_no_trace(master: str, dtype: str, optimizer: str) -> None:
    looked_at = optimizer == "adamw"
    plain, hurt = (stepper(master, dtype, optimizer, blackbox=looked_at) for _ in range(2))
    for i in range(6):
        plain(*batch(i))
        if i in {0, 3}:
            x, y = batch(i)
            before = weights(hurt.model)
            assert bool(hurt(x * float("nan"), y).skipped)
            assert same(weights(hurt.model), before)
            assert not list(behind(hurt.model).temporaries()) and not buffers(behind(hurt.model))
        hurt(*batch(i))
    if dtype == "bf16":  # in fp16 the bad step has lowered the scale, and the gradients' roundings with it
        assert same(weights(plain.model), weights(hurt.model))


@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_edits_reach_the_low_weights_and_may_be_nested(master: str, dtype: str) -> None:
    step = stepper(master, dtype)
    step(*batch(0))
    model = step.model
    with torch.no_grad(), hs.edit_weights(model):
        assert all(p.dtype is FP32 for p in model.parameters())
        model[0].weight.fill_(0.5)  # type: ignore[index]
        with hs.edit_weights(model):
            model[2].weight.fill_(0.25)  # type: ignore[index]
        model[2].weight.add_(1.0)  # type: ignore[index]
    state = model.state_dict()
    assert (state["0.weight"] == 0.5).all() and (state["2.weight"] == 1.25).all()
    assert (model.get_parameter("2.weight") == 1.25).all() and not list(behind(model).temporaries())
    step(*batch(1))


@pytest.mark.parametrize(("master", "dtype"), CASES)
def test_unprepare_and_load_state_dict(master: str, dtype: str) -> None:
    step = stepper(master, dtype)
    step(*batch(0))
    saved = step.model.state_dict()
    other = stepper(master, dtype)
    other.model.load_state_dict(saved)
    assert same(weights(other.model), weights(step.model))
    optimizer = step.optimizer
    hs.unprepare(step.model)
    assert all(torch.equal(p, saved[n]) and p.dtype is FP32 for n, p in step.model.named_parameters())
    loss_fn(step.model, *batch(1)).backward()
    optimizer.step()


def accumulated(model: nn.Module, scaler: hs.GradScaler, *, apart: bool, count: int = 64) -> dict[str, Tensor]:
    """Return the gradients of `count` micro-batches: added up by autograd or, apart, in fp64 here."""
    total: dict[str, Tensor] = {}
    for i in range(count):
        scaler.scale(loss_fn(model, *batch(i))).backward()
        for name, parameter in model.named_parameters() if apart else ():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad.double()
            parameter.grad = None
    return total if apart else {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("case", "grads"),
    sampled([("master", "bf16"), ("master", "fp16"), *CASES], ["fp32", "param"], rest=pytest.mark.slow),
)
def test_gradients_of_a_loop_of_ones_own_accumulate_in_the_format_of_the_policy(
    case: tuple[str, str], grads: str
) -> None:
    master, dtype = case
    wanted = policy(master, dtype).replace(grads=grads, scale=256.0 if dtype == "fp16" else "none")
    sums = []
    for apart in (True, False):
        model = net()
        _, _, scaler = hs.prepare(model, torch.optim.SGD(model.parameters(), 0.05), policy=wanted)
        sums.append(accumulated(model, scaler, apart=apart))
    right, got = sums
    low = BF16 if dtype == "bf16" else HALF
    for name, gradient in got.items():
        wide = grads == "fp32" or name.startswith("3.")
        assert gradient.dtype is (FP32 if wide else low)
        error = float((gradient - right[name]).norm() / right[name].norm())
        # the gradient of the shared bias is added up low within each backward pass, wherever it goes afterwards
        assert error < 1e-6 if wide else error > 1e-4, name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_optimizer_reads_the_fp32_sums_unscaled_and_clipped(dtype: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    wanted = policy("master", dtype).replace(grads="fp32", scale=256.0 if dtype == "fp16" else "none")
    _, _, scaler = hs.prepare(model, optimizer, policy=wanted)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scale = scaler.get_scale()
    gradients = {n: g.clone() / scale for n, g in accumulated(model, scaler, apart=False).items()}
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())
    scaler.step(optimizer)
    scaler.update()
    factor = 0.5 / (norm + 1e-6)
    for name, value in model.state_dict().items():
        right = gradients["0.bias" if name == "2.bias" else name] * factor
        torch.testing.assert_close(before[name] - value, right, rtol=0, atol=2e-7)


def test_gradients_from_before_are_taken_along() -> None:
    model = net().bfloat16()
    loss_fn(model, batch(0)[0].bfloat16(), batch(0)[1]).backward()
    before = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    hs.prepare(model, policy=policy("master").replace(grads="fp32", norms="low"))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype is FP32
        assert torch.equal(parameter.grad, before[name].float())


def test_the_next_policy_finds_no_trace_of_fp32_sums() -> None:
    model = net()
    hs.unprepare(hs.prepare(model, policy=policy("master").replace(grads="fp32")))
    loss_fn(model, *batch(0)).backward()
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())
    model.zero_grad()
    hs.prepare(model, policy=policy("master"))
    loss_fn(model, *batch(0)).backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.dtype is BF16


def test_fp32_sums_without_masters_are_refused_before_anything_changes() -> None:
    model = net()
    with pytest.raises(PolicyError, match="grads='fp32' under master='none'.*use master='stochastic'"):
        hs.prepare(model, policy=policy("none").replace(grads="fp32"))
    assert all(p.dtype is FP32 for p in model.parameters())


def test_split_in_fp16_is_refused_before_anything_changes() -> None:
    model = net()
    with pytest.raises(PolicyError, match="use master='master' or 'kahan', or dtype='bf16'"):
        hs.prepare(model, policy=policy("split", "fp16"))
    assert all(p.dtype is FP32 for p in model.parameters())
