"""Tables of an update, made once: whatever changes between two steps, the result is that of tables made anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.kernels.choose import cannot_update
from halfstep.kernels.optimizers import BY_OPERATOR
from halfstep.update.fused import FusedUpdate

pytestmark = pytest.mark.skipif(bool(cannot_update([torch.zeros(1)])), reason=cannot_update([torch.zeros(1)]))

POLICIES = {
    "mixed": hs.Policy.of("mixed", dtype="bf16"),
    "fp16": hs.Policy.of("mixed", dtype="fp16"),
    "O2": hs.Policy.of("O2", dtype="bf16", master="master"),
    "split": hs.Policy.of("pure", dtype="bf16", master="split"),
    "kahan": hs.Policy.of("pure", dtype="bf16", master="kahan"),
    "lean": hs.Policy.of("lean", dtype="bf16"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters = nn.Conv2d(3, 5, 3, padding=1)
        self.one, self.two = nn.Linear(5 * 4, 7), nn.Linear(7, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.filters(x)).mean(3).flatten(1)
        found: Tensor = self.two(F.relu(self.one(hidden)))
        return found


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(i: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(i)
    return torch.randn(4, 3, 4, 4, generator=source), torch.randint(0, 3, (4,), generator=source)


def made(policy: str, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(1)
    model: Any = Net()
    model.to(memory_format=torch.channels_last)  # weights of two kinds of strides
    groups = [{"params": list(model.one.parameters()), "lr": 0.02}, {"params": [*model.filters.parameters()]}]
    optimizer = kind([*groups, {"params": [*model.two.parameters(), *model.unused.parameters()]}], lr=0.01)
    return hs.TrainStep(model, optimizer, loss_fn, policy=POLICIES[policy], clip_norm=0.5, **options)


def plain(step: Any) -> dict[str, Tensor]:
    found = {**step.model.state_dict(), **{f"low {n}": p.detach() for n, p in step.model.named_parameters()}}
    for i, state in step.optimizer.state_dict()["state"].items():
        found |= {f"{i} {name}": value for name, value in state.items()}
    return {name: value.clone() for name, value in found.items()}


def states(step: Any) -> list[dict[str, Any]]:
    return [state for state in step.optimizer.state.values() if state]


def another_state(step: Any) -> None:
    state = states(step)[1]
    state["exp_avg"] = state["exp_avg"] * 2


def another_dict(step: Any) -> None:
    for parameter, state in list(step.optimizer.state.items()):
        step.optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}


def data_of_a_state(step: Any) -> None:
    for state in states(step):
        state["exp_avg_sq"].data = state["exp_avg_sq"] * 4


def data_of_a_weight(step: Any) -> None:
    for parameter in step.model.parameters():
        parameter.data = parameter.data.clone()


def written_data(step: Any) -> None:
    step.model.two.weight.data.mul_(0.5)


def written_again(step: Any) -> None:
    alias = getattr(step, "alias", None)
    alias = step.__dict__.setdefault("alias", step.model.one.weight.data) if alias is None else alias
    alias.mul_(0.5)


def written(step: Any) -> None:
    with torch.no_grad():
        step.model.one.weight.add_(0.25)


def edited(step: Any) -> None:
    with hs.edit_weights(step.model), torch.no_grad():
        step.model.two.weight.mul_(0.75)


def frozen(step: Any) -> None:
    step.model.one.requires_grad_(not step.model.one.weight.requires_grad)


def loaded(step: Any) -> None:
    step.load_state_dict(copy.deepcopy(step.state_dict()))


def loaded_optimizer(step: Any) -> None:
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))


def options(step: Any) -> None:
    group = step.optimizer.param_groups[1]
    group["lr"], group["weight_decay"], group["betas"] = group["lr"] * 0.5, 0.3, (0.7, 0.8)


def groups(step: Any) -> None:
    first, second, *_ = step.optimizer.param_groups
    moved = second["params"].pop(0)
    first["params"].append(moved)


def new_group(step: Any) -> None:
    if len(step.optimizer.param_groups) == 3:
        step.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.5})


def layout(step: Any) -> None:
    weight = step.model.filters.weight
    here = weight.is_contiguous()
    step.model.filters.to(memory_format=torch.channels_last if here else torch.contiguous_format)


def cleared(step: Any) -> None:
    step.optimizer.state.clear()


def evaluated(step: Any) -> None:
    step.evaluate(*batch(99))
    step.model.state_dict()


CHANGES: list[Callable[[Any], None]] = [
    another_state, another_dict, data_of_a_state, data_of_a_weight, written_data, written_again, written, edited,
    frozen, loaded, loaded_optimizer, options, groups, new_group, layout, cleared, evaluated,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*written through .data")
@pytest.mark.parametrize(
    ("policy", "change"),
    [
        pytest.param(policy, change, id=f"{policy}-{change.__name__}")
        for i, policy in enumerate(POLICIES)
        for j, change in enumerate(CHANGES)
        if policy in {"mixed", "split"} or (i + j) % 3 == 0  # all of them where tables differ most
    ],
)
def test_tables_follow_what_changes_between_steps(policy: str, change: Callable[[Any], None]) -> None:
    step, anew = made(policy), made(policy)
    for i in range(9):
        if i in {4, 6}:
            for one in (step, anew):
                change(one)
        anew._updater._fused = None
        results = [one(*batch(i)) for one in (step, anew)]
        assert torch.equal(results[0].loss, results[1].loss)
        assert torch.equal(results[0].grad_norm, results[1].grad_norm)
        assert step.generic == "" and (results[0].culprits == results[1].culprits)
    want = plain(anew)
    assert all(torch.equal(value, want[name]) for name, value in plain(step).items())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_good_step_uses_the_tables_again(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the comparison above would compare nothing."""
    step = made(policy)
    for i in range(3):
        step(*batch(i))
    monkeypatch.setattr(FusedUpdate, "__init__", None)  # none may be made
    for i in range(3, 6):
        step(*batch(i))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, hs.Lion, torch.optim.NAdam])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_watched_update_goes_through_the_dispatcher_with_the_same_bits(policy: str, kind: Any) -> None:
    steps = made(policy, kind), made(policy, kind)
    for i in range(6):
        steps[0](*batch(i))
        with Seen() as seen:
            steps[1](*batch(i))
        assert "halfstep::norms" in seen.names and any(
            name.removeprefix("halfstep::") in BY_OPERATOR for name in seen.names
        )
    want = plain(steps[1])
    assert all(torch.equal(value, want[name]) for name, value in plain(steps[0]).items())


def test_an_unusual_gradient_is_read_as_it_is() -> None:
    """Of another layout in memory, or another format, than the last one."""

    def odd(step: Any, i: int) -> None:
        weight = step.model.one.weight
        turned = torch.arange(float(weight.numel())).view(weight.shape[::-1]).T * i
        step.watchers[:] = [Swap(weight, turned if i % 2 else turned.contiguous())]

    class Swap:
        def __init__(self, weight: Tensor, gradient: Tensor) -> None:
            self.weight, self.gradient = weight, gradient

        def wants_update(self) -> bool:
            return True

        def pass_update(self) -> None:
            pass

        def before_update(self, parameters: Any) -> None:
            self.weight.grad = self.gradient

        def after_update(self, bad: Tensor) -> None:
            pass

    step, anew = made("mixed"), made("mixed")
    for i in range(7):
        if i > 3:
            odd(step, i)
            odd(anew, i)
        anew._updater._fused = None
        assert torch.equal(step(*batch(i)).grad_norm, anew(*batch(i)).grad_norm)
    want = plain(anew)
    assert all(torch.equal(value, want[name]) for name, value in plain(step).items())


def test_no_gradient_outlives_its_step() -> None:
    """Neither of an update that was made, nor of a window that runs again."""
    import gc
    import weakref

    step = made("fp16", retry=True)
    kept: list[Any] = []

    def hook(gradient: Tensor) -> None:
        kept.append(weakref.ref(gradient))

    step.model.one.weight.register_post_accumulate_grad_hook(lambda p: hook(p.grad))
    for i in range(4):
        step(*batch(i))
    step(batch(5)[0] * 1e4, batch(5)[1])
    gc.collect()
    assert len(kept) >= 5 and all(reference() is None for reference in kept)
