"""Layers of torch.nn in a region run without the mode where no rule concerns them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import halfstep as hs
from halfstep.binding.bind import binding_of
from halfstep.cast.rules.dispatch import RuleMode
from halfstep.cast.rules.recipe import LAYERS, recipe_for, unruled

BF16 = torch.bfloat16
POLICIES = ("mixed", "O1")
IMAGE = (2, 4, 6, 6)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Linear": (6, 3),
    "PReLU": (),
    "Unflatten": (1, (2, 2)),
    "GroupNorm": (2, 4),
    "LayerNorm": (6,),
    "RMSNorm": (6,),
    "Softmax": (1,),
    "LogSoftmax": (1,),
}


def made(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """A layer of `kind` and an input for it."""
    name = kind.__name__
    dims = int(name[-2]) if name[-2].isdigit() else 2
    x = torch.randn(2, 4, *[6] * dims)
    if name in ARGUMENTS:
        arguments = ARGUMENTS[name]
    elif "Conv" in name:
        arguments = (4, 3, 2)
    elif "BatchNorm" in name:
        arguments = (4,)
    elif "Pool" in name:
        arguments = (2,)
    else:
        arguments = ()
    return kind(*arguments), x


class Seen(TorchFunctionMode):
    """Records every operator and attribute that reaches function modes."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Callable[..., Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def handlers(policy: str, **fields: Any) -> Any:
    mode = recipe_for(hs.Policy.of(policy, dtype="bf16", **fields), ("cpu",)).mode
    assert mode is not None
    return mode.handlers


@pytest.mark.parametrize("kind", sorted(LAYERS, key=str), ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_runs_without_the_mode_calls_nothing_that_has_a_rule(kind: type[nn.Module], policy: str) -> None:
    rules = handlers(policy)
    layer, x = made(kind)
    with Seen() as seen:
        layer(x)
    if unruled(layer, kind, rules):
        assert not [func for func in seen.called if func in rules]


def test_the_layers_of_a_residual_network_run_without_the_mode() -> None:
    rules = handlers("mixed")
    for kind in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear):
        assert unruled(made(kind)[0], kind, rules)


def test_a_layer_that_a_rule_concerns_keeps_the_mode() -> None:
    assert not unruled(nn.LayerNorm(4), nn.LayerNorm, handlers("mixed"))
    assert not unruled(nn.Linear(2, 2), nn.Linear, handlers("mixed", ops=(("linear", "fp32"),)))
    padded = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    assert not unruled(padded, nn.Conv2d, handlers("mixed"))
    assert unruled(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d, handlers("mixed"))


def test_a_subclass_and_a_layer_with_children_keep_the_mode() -> None:
    class Own(nn.Linear):
        pass

    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert not unruled(Own(2, 2), Own, handlers("mixed"))
    assert not unruled(parametrised, nn.Linear, handlers("mixed"))


def test_the_mode_sees_neither_convolution_nor_norm_and_sees_the_operators_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    own = RuleMode.__torch_function__

    def spy(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return own(self, func, types, args, kwargs)

    monkeypatch.setattr(RuleMode, "__torch_function__", spy)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.relu(self.conv(x)))  # type: ignore[no-any-return]

    net = hs.prepare(Net(), policy=hs.Policy.of("mixed", dtype="bf16"))
    net(torch.randn(IMAGE))
    assert [name for name in seen if name != "__get__"] == ["relu"]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.BatchNorm2d(4).eval()], ids=str
)
@pytest.mark.parametrize("preset", ["mixed", "O1", "O2", "pure"])
def test_a_norm_gives_what_its_rule_gives(preset: str, norm: nn.Module) -> None:
    """The layer, beside the same one with another function mode on the stack, which gets every operator."""
    x = torch.randn(IMAGE, generator=torch.Generator().manual_seed(0))
    found = []
    for watched in (False, True):
        net = nn.Sequential(nn.Conv2d(4, 4, 1), copy.deepcopy(norm))
        net.load_state_dict({n: torch.linspace(0.5, 1.5, v.numel()).view(v.shape) for n, v in net.state_dict().items()})
        hs.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), policy=hs.Policy.of(preset, dtype="bf16"))
        with Seen() if watched else nullcontext():
            out = net(x)
        out.float().square().sum().backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        found.append([out, *gradients, *(b for b in net.buffers() if b.is_floating_point())])
    assert len(found[0]) >= 5
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


def test_other_function_modes_see_every_operator() -> None:
    net = hs.prepare(nn.Sequential(nn.Linear(6, 3), nn.ReLU()), policy=hs.Policy.of("mixed", dtype="bf16"))
    for outer in (True, False):
        if outer:
            with Seen() as seen:
                net(torch.randn(2, 6))
        else:
            inner = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
            model = hs.prepare(Under(inner), policy=hs.Policy.of("mixed", dtype="bf16"))
            model(torch.randn(2, 6))
            seen = model.seen
        assert {torch.nn.functional.linear, torch.nn.functional.relu} <= set(seen.called)


class Under(nn.Module):
    """Runs its part under a function mode of its own."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.seen = part, Seen()

    def forward(self, x: Tensor) -> Tensor:
        with self.seen:
            return self.part(x)  # type: ignore[no-any-return]


def test_the_mode_is_back_after_a_layer_that_raises() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match="shapes"):
                self.linear(x[:, :2])
            return torch.softmax(x.bfloat16(), 1)

    net = hs.prepare(Net(), policy=hs.Policy.of("mixed", dtype="bf16", outputs="keep").with_ops(fp32=["softmax"]))
    assert net(torch.randn(2, 6)).dtype is torch.float32


def test_a_region_opened_inside_a_model_rules_its_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            with hs.autocast("cpu", policy=hs.Policy.of("mixed", dtype="bf16").with_ops(fp32=["linear"])):
                return self.linear(x)  # type: ignore[no-any-return]

    net = Net()
    expected = net(torch.ones(2, 128)).square().mean()
    step = hs.TrainStep(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        lambda net, x: net(x).square().mean(),
        policy=hs.Policy.of("mixed", dtype="bf16"),
        accumulate=2,
    )
    assert torch.equal(step(torch.ones(2, 128)).loss, expected)


class Ruled(nn.Module):
    """A user's module whose forward calls an operator with a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2)


class OwnNorm(nn.LayerNorm):
    """A user's class with torch's forward."""


@pytest.mark.parametrize("policy", ["mixed", "O2"])
def test_only_layers_of_torch_do_something_for_the_mode_inside_a_region(policy: str) -> None:
    net = nn.Sequential(nn.Linear(6, 6), Ruled(), OwnNorm(6), nn.GELU())
    hs.prepare(net, policy=hs.Policy.of(policy, dtype="bf16"))
    idle = [binding_of(module).idle for module in net]  # type: ignore[union-attr]  # each is bound
    assert idle == [False, True, False, False]
    seen: list[torch.dtype] = []
    net[1].register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, out.dtype)))
    net(torch.randn(2, 6))
    assert seen == [BF16, torch.float32]
