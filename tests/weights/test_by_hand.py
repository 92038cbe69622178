"""Prepared models whose modules are moved to another format, layout or range, and weights that are written by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep as hs
from halfstep.binding.prepare import store_of
from halfstep.kernels import watched
from halfstep.weights import STRATEGIES
from tests.products import sampled
from tests.promises.probe import one_rank

BF16, FP32 = torch.bfloat16, torch.float32


class Routed(nn.Module):
    """A router that its forward pass moves to fp32, and perhaps back, as mixtures of experts do."""

    def __init__(self, *, back: bool = False) -> None:
        super().__init__()
        self.body, self.router, self.back = nn.Linear(8, 8), nn.Linear(8, 4), back

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).float()
        made: Tensor = self.router.float()(hidden)
        if self.back:
            self.router.bfloat16()
        return made


def policy(master: Any = "auto", name: str = "O2") -> hs.Policy:
    return hs.Policy.of(name, dtype="bf16", master=master)


def image_net(master: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    hs.prepare(model, optimizer, policy=policy(master))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for i in range(steps):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def equal(model: nn.Module, wanted: dict[str, Tensor]) -> bool:
    got = model.state_dict()
    return got.keys() == wanted.keys() and all(torch.equal(got[k], wanted[k]) for k in wanted)


# ------------------------------------------------------------------ other formats


@pytest.mark.parametrize("name", ["O2", "pure"])
@pytest.mark.parametrize("master", STRATEGIES)
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_module_moved_to_fp32_in_its_forward_pass_has_its_precise_weights(
    name: str, master: Any, own_loop: bool
) -> None:
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    hs.prepare(model, optimizer, policy=policy(master, name))
    wanted = model.state_dict()["router.weight"]
    model(torch.randn(2, 8))
    assert model.router.weight.dtype is FP32 and torch.equal(model.router.weight, wanted)
    if own_loop:
        for _ in range(3):
            model(torch.randn(4, 8)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        step = hs.TrainStep(model, optimizer, lambda m, x: m(x).float().square().mean())
        for _ in range(3):
            assert step(torch.randn(4, 8)).updated
        step.load_state_dict(step.state_dict())
    after = model.state_dict()["router.weight"]
    assert after.dtype is FP32 and not torch.equal(after, wanted) and torch.equal(after, model.router.weight)
    assert copy.deepcopy(model).router.weight.dtype is FP32
    hs.unprepare(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {p.dtype for p in model.parameters()} == {FP32}


def test_a_module_that_goes_back_and_forth_loses_nothing() -> None:
    def run(*, back: bool) -> Tensor:
        torch.manual_seed(0)
        model = Routed(back=back)
        optimizer = torch.optim.SGD(model.router.parameters(), 1e-4)
        hs.prepare(model, optimizer, policy=policy("master"))
        for i in range(20):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            loss = model(x).square().mean()
            model.router.float()  # what was computed with fp32 weights has its backward pass with them
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weight: Tensor = model.state_dict()["router.weight"]
        return weight

    assert torch.equal(run(back=True), run(back=False))


@pytest.mark.parametrize("master", STRATEGIES)
def test_a_model_may_change_format_and_layout_between_steps(master: Any) -> None:
    model, optimizer = image_net(master)
    train(model, optimizer)
    wanted = model.state_dict()
    model.to(memory_format=torch.channels_last)
    model.bfloat16().cpu()
    assert equal(model, wanted) and model[0].weight.dtype is BF16
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)

    def stepped(layout: torch.memory_format) -> dict[str, Tensor]:
        other, stepper = image_net(master)
        other.to(memory_format=layout)
        step = hs.TrainStep(other, stepper, lambda m, x: m(x).square().mean())
        step(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3)))
        assert step.generic == ""
        values: dict[str, Tensor] = other.state_dict()
        return values

    if master != "stochastic":  # which draws its bits in memory order
        plain, last = stepped(torch.contiguous_format), stepped(torch.channels_last)
        assert all(torch.allclose(plain[k], last[k], atol=1e-3) for k in plain)
    with pytest.raises(hs.HalfstepError, match=r"parameter 0.weight is held in bfloat16.*torch.float16.*hs.unprepare"):
        model.half()
    assert equal(model, wanted)
    model.float()
    assert model[0].weight.dtype is FP32 and equal(model, wanted)
    train(model, optimizer)
    wanted = model.state_dict()
    model.bfloat16()
    assert model[0].weight.dtype is BF16
    near = {"master": 0.0, "split": 0.0, "kahan": 2.0**-17, "stochastic": 2.0**-8}[master]
    got = model.state_dict()
    assert all(torch.allclose(got[k], wanted[k], rtol=near, atol=1e-6 * bool(near)) for k in wanted)
    train(model, optimizer)
    model.double()
    assert model[0].weight.dtype is torch.float64


def test_data_replaced_by_hand_is_the_weight() -> None:
    model = nn.Linear(4, 4, bias=False)
    hs.prepare(model, policy=policy("split"))
    model.weight.data = torch.full((4, 4), 3.0, dtype=BF16)
    assert torch.equal(model.state_dict()["weight"], torch.full((4, 4), 3.0))
    for value in (1.001, 1.002):
        model.weight.data = torch.full((4, 4), value)
        assert model.weight.dtype is BF16 and torch.equal(model.state_dict()["weight"], torch.full((4, 4), value))


# ------------------------------------------------------------------ changed by hand


@pytest.mark.parametrize("master", STRATEGIES)
def test_writes_through_data_are_exact_where_rounding_would_swallow_them(master: Any) -> None:
    model, optimizer = image_net(master)
    nn.init.ones_(model[3].weight)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            for parameter in (*model.parameters(), *wanted.values()):
                parameter.data.mul_(0.999).add_(1.0, alpha=0.001)
    if master != "stochastic":
        near = 0.0 if master in {"master", "split"} else 2.0**-16
        assert all(torch.allclose(v, wanted[k], rtol=near, atol=near) for k, v in model.state_dict().items())
    assert len(seen) == (master == "stochastic")
    assert not seen or "0.weight was changed by hand, and master='stochastic'" in str(seen[0].message)
    train(model, optimizer)


@pytest.mark.parametrize("look", ["state_dict", "step", "copy", "edit"])
def test_a_write_by_another_way_is_told_when_the_weights_are_next_asked_for(look: str) -> None:
    model, optimizer = image_net("split")
    with torch.no_grad():
        torch.ops.aten.zero_(model[0].weight)
    with pytest.warns(UserWarning, match=r"0.weight was written by no method.*hs\.edit_weights") as told:
        if look == "state_dict":
            assert not model.state_dict()["0.weight"].any()
        elif look == "step":
            train(model, optimizer)
        elif look == "copy":
            assert not copy.deepcopy(model)[0].weight.any()
        else:
            with hs.edit_weights(model):
                assert not model[0].weight.any()
        model.state_dict()
    assert len(told) == 1


@pytest.mark.parametrize("master", STRATEGIES)
def test_the_documented_ways_are_silent(master: Any) -> None:
    model, optimizer = image_net(master)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand, by_state = copy.deepcopy(model), copy.deepcopy(model)
    for i in range(3):
        train(model, optimizer, 1)
        [parameter.data.norm() for parameter in model.parameters()]  # looking is no change
        with hs.edit_weights(model):
            averaged.update_parameters(model)
            for mean, parameter in zip(by_hand.parameters(), model.parameters(), strict=True):
                mean.data.mul_(0.9 * bool(i)).add_(parameter.data, alpha=0.1 if i else 1.0)
        for mean, value in zip(by_state.parameters(), model.state_dict().values(), strict=True):
            mean.data.mul_(0.9 * bool(i)).add_(value, alpha=0.1 if i else 1.0)
    for a, b, c in zip(averaged.module.parameters(), by_hand.parameters(), by_state.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6) and torch.equal(b, c) and a.dtype is FP32
    frozen = copy.deepcopy(model)
    frozen.load_state_dict(model.state_dict())
    frozen(torch.randn(1, 3, 6, 6))
    with torch.no_grad(), hs.edit_weights(model):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    nn.init.zeros_(model[3].bias)
    train(model, optimizer)


# ------------------------------------------------------------------ values beyond the range


@pytest.mark.parametrize("name", ["O2", "pure", "O3"])
@pytest.mark.parametrize(("dtype", "value"), [("fp16", 1e5), ("fp16", -65520.0), ("bf16", 3.4e38)])
def test_a_weight_that_the_low_format_cannot_hold_is_refused_by_name(name: str, dtype: Any, value: float) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight[0, 1] = value
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(hs.HalfstepError, match=r"parameter 1.weight holds a weight of magnitude.*ends at.*'fp32'"):
        hs.prepare(model, policy=hs.Policy.of(name, dtype=dtype))
    assert equal(model, before) and hs.prepared_policy(model) is None and model[0].weight.dtype is FP32
    island = hs.Policy.of(name, dtype=dtype).with_modules({"1": "fp32"})
    hs.prepare(model, policy=island)
    assert equal(model, before) or name == "O3"


def test_the_largest_that_rounds_down_is_taken() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = 65519.0
    hs.prepare(model, policy=hs.Policy.of("O2", dtype="fp16"))
    stored = torch.ops.aten.clone(model.weight)
    assert stored[0, 0] == 65504.0 and model.weight[0, 0] == model.state_dict()["weight"][0, 0] == 65519.0


@pytest.mark.parametrize("master", ["master", "kahan", "stochastic"])
def test_loading_and_editing_beyond_the_range_is_refused_and_changes_nothing(master: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    hs.prepare(model, policy=hs.Policy.of("O2", dtype="fp16", master=master))
    wanted = model.state_dict()
    loaded = {k: v + 1 for k, v in wanted.items()}
    loaded["1.weight"][0, 0] = 1e5
    with pytest.raises(hs.HalfstepError, match=r"parameter 1.weight holds a weight of magnitude 100000"):
        model.load_state_dict(loaded)
    assert equal(model, wanted)
    store = store_of(model)
    assert store is not None
    with pytest.raises(hs.HalfstepError, match="parameter 0.bias"):
        store.assign(model[0].bias, torch.full((4,), 1e6))
    assert equal(model, wanted)
    with pytest.raises(hs.HalfstepError, match=r"parameter 1.weight.*was before"), torch.no_grad():
        with hs.edit_weights(model):
            model[1].weight.data.mul_(1e7)
            model[0].bias.fill_(0.5)
    got = model.state_dict()
    assert torch.isfinite(model[1].weight).all() and (got["0.bias"] == 0.5).all()
    assert torch.allclose(got["1.weight"], wanted["1.weight"], rtol=2.0**-10)


@pytest.mark.parametrize("master", STRATEGIES)
def test_a_low_weight_keeps_its_shape(master: Any) -> None:
    """As `resize_token_embeddings` changes it; its fp32 value and the optimizer's state would keep the old one."""
    model: Any = nn.Embedding(4, 8)
    hs.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy(master))
    before = model.state_dict()
    with pytest.raises(hs.HalfstepError, match=r"weight has shape \(4, 8\).*shape \(6, 8\); hs.unprepare"):
        model.weight.data = torch.randn(6, 8).bfloat16()
    with pytest.raises(hs.HalfstepError, match=r"weight of shape \(4, 8\).*\(6, 8\) in hs.edit_weights"):
        with hs.edit_weights(model):
            model.weight.data = torch.randn(6, 8)
    assert equal(model, before)
    hs.unprepare(model)
    model.weight.data = torch.randn(6, 8)
    hs.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy(master))
    assert model.state_dict()["weight"].shape == (6, 8)


def test_what_a_wrapper_sends_is_no_change_by_hand_and_a_later_write_is() -> None:
    model = hs.prepare(nn.Linear(4, 4), policy=policy("none", "O3"))
    with one_rank():
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(torch.ones(2, 4)).sum().backward()
        model.state_dict()
        with torch.no_grad():
            torch.ops.aten.zero_(model.weight)
        wrapped(torch.ones(2, 4))
        with pytest.warns(UserWarning, match="weight was changed by hand, and master='none'"):
            model.state_dict()


class Scaled(nn.Module):
    """A norm as transformers writes them: its weight is a factor in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def test_a_weight_that_a_forward_reads_by_hand_costs_no_walk_over_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = hs.prepare(nn.Sequential(nn.Linear(8, 8), Scaled()).requires_grad_(False), policy=policy(name="pure"))

    def walked(tree: Any) -> list[Tensor]:
        raise AssertionError("walked")

    with torch.inference_mode():
        expected = net(torch.ones(2, 8))
        monkeypatch.setattr(watched, "tensors_in", walked)
        assert torch.equal(net(torch.ones(2, 8)), expected)


class Summed(nn.Module):
    """Notes what a function of its weight gives in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        self.seen.append(torch.matmul(self.weight, self.weight).dtype)
        if fails:
            raise ValueError("as a loop does")
        return x @ self.weight


@pytest.mark.parametrize("own_loop", [True, False])
def test_functions_of_torch_read_fp32_values_after_any_pass_and_low_ones_in_it(own_loop: bool) -> None:
    model = Summed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = hs.TrainStep(model, optimizer, lambda m, x, fails: m(x, fails=fails).float().sum(), policy=policy("master"))
    x = torch.ones(2, 8)

    def norm_is_exact() -> bool:
        with torch.no_grad():
            return torch.equal(torch.linalg.norm(model.weight), torch.linalg.norm(model.state_dict()["weight"]))

    assert norm_is_exact()
    for fails in (False, True, False):
        with pytest.raises(ValueError, match="as a loop does") if fails else nullcontext():
            model(x, fails=fails).float().sum().backward() if own_loop else step(x, fails)
        assert norm_is_exact()
        optimizer.step()
        assert norm_is_exact()
    with torch.no_grad():
        model(x)
    assert norm_is_exact() and set(model.seen) == {BF16}


# ------------------------------------------------------------------ with gradients: penalties in a loss


def each(distance: Callable[[Any, Tensor], Tensor]) -> Callable[[list[Any], list[Tensor]], Tensor]:
    """Return the sum of a distance over weights and their old values."""
    return lambda weights, olds: torch.stack([distance(p, old) for p, old in zip(weights, olds, strict=True)]).sum()


PENALTIES: dict[str, Callable[[list[Any], list[Tensor]], Tensor]] = {
    "(p - old) ** 2": each(lambda p, old: ((p - old) ** 2).sum()),
    "old - p": each(lambda p, old: (old - p).square().sum()),
    "torch.sub": each(lambda p, old: torch.sub(old, p).pow(2).sum()),
    "p.float()": each(lambda p, old: (p.float() - old).norm() ** 2),
    "mse_loss": each(lambda p, old: nn.functional.mse_loss(p, old, reduction="sum")),
    "dist": each(lambda p, old: torch.dist(p, old) ** 2),
    "vector": lambda ps, olds: (nn.utils.parameters_to_vector(ps) - nn.utils.parameters_to_vector(olds)).square().sum(),
    "flattened": lambda ps, olds: torch.dist(torch.cat([p.flatten() for p in ps]), nn.utils.parameters_to_vector(olds)),
    "rows": each(lambda p, old: torch.stack([((a - b) ** 2).sum() for a, b in zip(p, old, strict=True)]).sum()),
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("name", ["O2", "pure"])
@pytest.mark.parametrize("where", ["loop", "region", "step", "suspended", "evaluate"])
def test_a_penalty_on_weights_reads_their_fp32_values_and_has_its_gradient(penalty: Any, name: str, where: str) -> None:
    """Elastic weight consolidation, FedProx: what weights have moved is far below the spacing of a low format."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    exact = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    seen: list[Tensor] = []

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        net(x)
        with hs.suspended() if where == "suspended" else nullcontext():
            loss: Tensor = penalty(list(model.parameters()), olds)
        seen.append(loss.detach())
        return loss

    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy(name=name))
    olds = [q.detach().clone() for q in exact.parameters()]
    with torch.no_grad():
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            p.mul_(1 + 2e-4)
            q.mul_(1 + 2e-4)
    wanted = penalty(list(exact.parameters()), [o.clone() for o in olds])
    wanted.backward()
    x = torch.randn(4, 8)
    if where == "evaluate":
        step.evaluate(x)
    elif where in ("step", "suspended"):
        step(x)
    else:
        with hs.autocast("cpu", dtype=BF16) if where == "region" else nullcontext():
            loss = loss_fn(model, x)
        loss.backward()
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(p.grad.float(), q.grad, rtol=2**-7, atol=1e-8)  # type: ignore[union-attr]
    torch.testing.assert_close(seen[0].float(), wanted.detach(), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("name", ["O2", "pure"])
def test_what_layers_have_made_meets_low_weights_and_parts_lead_to_their_gradients(name: str) -> None:
    model = hs.prepare(nn.Linear(8, 8), policy=policy(name=name))
    low = torch.randn(4, 8).bfloat16()
    assert (low * model.weight[0]).dtype is (low @ model.weight.T).dtype is BF16
    node: Any = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node.variable is model.weight  # as DistributedDataParallel asks
    first = model.weight[0]
    (gradient,) = torch.autograd.grad((first * first).sum(), first)
    assert torch.equal(gradient, (2 * model.state_dict()["weight"][0]).bfloat16())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_graph_without_gradients_computes_with_low_weights() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 16)
    hs.prepare(model, policy=hs.Policy.of("O2", dtype="fp16", emulate="always"))
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["O2", "pure"])
def test_fast_weights_of_a_model_learn_below_the_spacing_of_the_low_format(name: str) -> None:
    torch.manual_seed(0)
    model, x = hs.prepare(nn.Linear(8, 8), policy=policy(name=name)), torch.randn(4, 8)
    loss = model(x).float().square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    fast = {key: p - 1e-4 * g for (key, p), g in zip(model.named_parameters(), gradients, strict=True)}
    for (key, p), g in zip(model.state_dict().items(), gradients, strict=True):
        assert torch.equal(fast[key], p - (1e-4 * g).float())
    torch.func.functional_call(model, fast, (x,)).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------ in a forward pass: constraints and averages


@torch.no_grad()
def divided(w: Tensor) -> None:
    w.copy_(w / w.norm(dim=1, keepdim=True).clamp(min=1))


@torch.no_grad()
def tied(w: Tensor) -> None:
    w[0] = w[1] * (1 + 2**-12)


CONSTRAINTS: dict[str, Callable[[Any], object]] = {
    "data = renorm(data)": lambda w: setattr(w, "data", torch.renorm(w.data, 2, 0, 1.0)),
    "data.copy_(renorm(data))": lambda w: w.data.copy_(torch.renorm(w.data, 2, 0, 1.0)),
    "data.renorm_": lambda w: w.data.renorm_(2, 0, 1.0),
    "data = normalize(data)": lambda w: setattr(w, "data", nn.functional.normalize(w.data, dim=1)),
    "data = data * 0.9999": lambda w: setattr(w, "data", w.data * 0.9999),
    "without gradients": divided,
    "rows without gradients": tied,
}


class Constrained(nn.Module):
    """Constrains its weight in each forward pass, as networks for EEG do, and keeps its average."""

    def __init__(self, constrain: Callable[[Any], object]) -> None:
        super().__init__()
        self.first, self.last, self.constrain = nn.Linear(16, 32), nn.Linear(32, 4), constrain
        self.average: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.constrain(self.first.weight)
        self.average = 0.99 * self.average + 0.01 * self.first.weight.detach()
        found: Tensor = self.last(torch.tanh(self.first(x)))
        return found


@cache
def constrained(constrain: str, wanted: hs.Policy | None, *, own_loop: bool) -> tuple[Tensor, Tensor]:
    """Return the weight and its average after 100 steps, in fp32 under no policy."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x).float(), y)

    torch.manual_seed(0)
    x, y = torch.randn(64, 16) * 2, torch.randn(64, 4)
    torch.manual_seed(0)
    model = Constrained(CONSTRAINTS[constrain])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step = None
    if wanted is not None and own_loop:
        hs.prepare(model, optimizer, policy=wanted)
    elif wanted is not None:
        step = hs.TrainStep(model, optimizer, loss_fn, policy=wanted)
    for _ in range(100):
        if step is not None:
            step(x, y)
            continue
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()
        optimizer.step()
    return model.state_dict()["first.weight"].clone(), model.average


@pytest.mark.parametrize(
    ("constrain", "name", "own_loop"), sampled(CONSTRAINTS, ("O2", "pure"), (True, False), rest=pytest.mark.slow)
)
def test_a_forward_that_constrains_its_weight_keeps_all_digits(constrain: str, name: str, own_loop: bool) -> None:
    """In low values 100 steps end 8 % from fp32's weights, where autocast ends 0.1 % from them."""
    in_low = constrained(constrain, policy(name=name), own_loop=own_loop)
    for found, exact in zip(in_low, constrained(constrain, None, own_loop=True), strict=True):
        assert found.dtype is FP32 and (found - exact).norm() < 5e-3 * exact.norm()


def test_layers_of_a_forward_compute_with_low_data() -> None:
    class Stopped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = {(x @ self.weight.data.T).dtype, nn.functional.linear(x, self.weight.detach()).dtype}
            return super().forward(x)

    model = hs.prepare(Stopped(8, 8), policy=policy(name="pure"))
    model(torch.randn(8, 8)).sum().backward()
    assert model.seen == {BF16}


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "of the data": lambda p: torch.zeros_like(p.data, memory_format=torch.preserve_format),
    "full_like": lambda p: torch.full_like(p, 0.0),
    "new_zeros": lambda p: p.new_zeros(p.shape),
    "noise": lambda p: torch.randn_like(p).mul_(0.0),
}


@pytest.mark.parametrize("name", ["O2", "pure"])
@pytest.mark.parametrize("lerp", [False, True])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_an_adam_by_hand_keeps_its_moments_in_fp32(maker: Callable[[Tensor], Tensor], lerp: bool, name: str) -> None:
    """Second moments in bf16 would not decay: 0.999 of them is rounded back to what they were."""

    def run(preset: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        hs.prepare(model, policy=policy(name=preset) if preset != "O0" else "O0")
        states = [(p, maker(p), maker(p)) for p in model.parameters()]
        for p, _, second in states:  # moments of an earlier task, from which gradients are far
            second.add_(1.0)
            p.grad = torch.ones_like(p) * 3
            assert p.grad.dtype is p.dtype and (p.grad == 3).all()
        for t in range(50):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(t))
            model.zero_grad()
            (model(x).float() - x[:, :4]).square().mean().backward()
            with torch.no_grad():
                for p, first, second in states:
                    assert p.grad is not None
                    if lerp:
                        first.lerp_(p.grad, 0.1)
                    else:
                        first.mul_(0.9).add_(p.grad, alpha=0.1)
                    second.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    p.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-2)
        return [copy.deepcopy(second).float() for _, _, second in states]

    for got, wanted in zip(run(name), run("O0"), strict=True):
        assert (got - wanted).abs().max() < 1e-4  # fp32's fall from 1 to 0.951
