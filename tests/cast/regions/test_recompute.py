"""What activation checkpointing computes again follows the rules it followed first, however the region was opened."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import halfstep as hs
from halfstep.cast.regions import recompute
from halfstep.cast.regions.recompute import backward, recomputing
from halfstep.cast.rules import dispatch
from halfstep.cast.rules.dispatch import mode_here
from halfstep.cast.rules.recipe import recipe_for
from halfstep.cast.state import STATE
from halfstep.errors import RegionError
from tests.cast.checkpointed import FUNCTIONS, Function
from tests.step.cutting import Knife


class Attends(nn.Module):
    """Operators of every rule in a bound method or a function: no module opens a region for those alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(4, 4), how

    def inner(self, z: Tensor) -> Tensor:
        q = z * 0 + 3 + z
        return torch.softmax(q @ q.t(), -1) @ z

    def forward(self, x: Tensor) -> Any:
        h = self.lin(x)
        if self.how == "":
            return self.inner(h)
        function = self.inner if "method" in self.how else lambda z: self.inner(z)
        return checkpoint(function, h, use_reentrant="reentrant" in self.how)


def trained(how: str, policy: hs.Policy) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Attends(how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).float().pow(2).mean(), policy=policy, accumulate=2)
    for k in range(4):
        step(torch.randn(4, 4, generator=torch.Generator().manual_seed(k)))
    assert STATE.mode is None
    assert not STATE.casts
    assert _len_torch_function_stack() == 0
    return model.state_dict()


@pytest.mark.parametrize("how", ["method", "function", "method, reentrant", "function, reentrant"])
@pytest.mark.parametrize("name", ["O1", "O2", "mixed", "pure", "torch"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_checkpointed_function_trains_the_bits_of_one_that_is_not(name: str, dtype: str, how: str) -> None:
    policy = hs.Policy.of(name, dtype=dtype, scale=64.0 if dtype == "fp16" else "none")
    plain, recomputed = trained("", policy), trained(how, policy)
    assert all(torch.equal(plain[key], recomputed[key]) for key in plain)


POLICIES = {
    f"{name} {dtype}": hs.Policy.of(name, dtype=dtype, emulate="always", scale="none")
    for name, dtype in [*product(("torch", "mixed", "O1"), ("bf16", "fp16")), ("mixed", "tf32"), ("O1", "fp8_e4m3")]
}
KINDS = {"reentrant": True, "non-reentrant": False}


class Calls(nn.Module):
    """A weight and a function of it and an input, checkpointed or not."""

    def __init__(self, function: Function, reentrant: bool | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
        self.function, self.reentrant = function, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.function(x, self.weight)
        return cast("Tensor", checkpoint(self.function, x, self.weight, use_reentrant=self.reentrant))


def by_hand(model: Calls, x: Tensor, policy: hs.Policy) -> None:
    with hs.autocast("cpu", policy=policy):
        loss = model(x).float().square().mean()
    loss.backward()


def in_a_loop(model: Calls, x: Tensor, policy: hs.Policy) -> None:
    hs.prepare(model, policy=policy)
    model(x).float().square().mean().backward()


def in_a_step(model: Calls, x: Tensor, policy: hs.Policy) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hs.TrainStep(model, optimizer, lambda m, z: m(z).float().square().mean(), policy=policy)(x)


def gradients(
    run: Callable[[Calls, Tensor, hs.Policy], None], policy: hs.Policy, function: Function, reentrant: bool | None
) -> list[Tensor | None]:
    """Return the gradients of input and weight; of the weight what a step of SGD with rate 1 subtracted, if it did."""
    model = Calls(function, reentrant)
    before = model.weight.detach().clone()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    run(model, x, policy)
    assert STATE.mode is None and not STATE.casts and _len_torch_function_stack() == 0
    return [x.grad, before - model.weight.detach(), model.weight.grad]


@pytest.mark.parametrize(
    ("run", "name"),
    [  # every policy in a region and, slow, in one of the others; all pairs are for `make test-hours`
        pytest.param(
            run, name, marks=pytest.mark.hours if i and (i + j) % 2 else pytest.mark.slow if i and j > 2 else ()
        )
        for i, run in enumerate((by_hand, in_a_loop, in_a_step))
        for j, name in enumerate(POLICIES)
    ],
)
def test_gradients_of_every_function_are_those_without_a_checkpoint(
    run: Callable[[Calls, Tensor, hs.Policy], None], name: str
) -> None:
    wrong = []
    for called, function in FUNCTIONS.items():
        plain = gradients(run, POLICIES[name], function, None)
        for kind, reentrant in KINDS.items():
            again = gradients(run, POLICIES[name], function, reentrant)
            if not all(a is b or torch.equal(a, b) for a, b in zip(plain, again, strict=True)):  # type: ignore[arg-type]
                wrong.append(f"{called}, {kind}")
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_rules_gradients_differ(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault of the test above: what torch computes again has torch's own lists."""

    def torn() -> bool:
        try:
            again = gradients(by_hand, POLICIES["O1 bf16"], FUNCTIONS["softmax"], KINDS[kind])
        except torch.utils.checkpoint.CheckpointError:
            return True
        return not torch.equal(again[2], plain[2])  # type: ignore[arg-type]

    plain = gradients(by_hand, POLICIES["O1 bf16"], FUNCTIONS["softmax"], None)
    assert not torn()
    monkeypatch.setattr(recompute, "rules_on", lambda mode, bound: contextlib.nullcontext())
    assert torn()


def loss_of(function: Function, kind: str, *, region: Any, **how: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight of a checkpointed function called in `region`."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with region:
        y = checkpoint(function, x, w, use_reentrant=KINDS[kind], **how) if kind else function(x, w)
    y.float().square().mean().backward()
    assert x.grad is not None and w.grad is not None
    return x.grad, w.grad


def region(name: str = "O1 bf16") -> hs.autocast:
    return hs.autocast("cpu", policy=POLICIES[name])


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", POLICIES)
@pytest.mark.parametrize("inner", [*POLICIES, "off", "suspended"])
def test_a_region_opened_in_the_function_opens_again_inside_the_outer_one(outer: str, inner: str, kind: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        opened = hs.suspended() if inner == "suspended" else hs.autocast("cpu", enabled=False)
        with opened if inner in {"off", "suspended"} else region(inner):
            h = F.linear(x, w).softmax(-1)
        return h.float() @ w.softmax(-1)

    assert same(loss_of(function, kind, region=region(outer)), loss_of(function, "", region=region(outer)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_checkpoints_in_checkpoints(kind: str, inner: str) -> None:
    """The inner function holds every operator: the outer one is seen by its hooks alone."""

    def nested(x: Tensor, w: Tensor) -> Tensor:
        return cast("Tensor", checkpoint(FUNCTIONS["softmax"], x, w, use_reentrant=KINDS[inner]))

    for name in POLICIES:
        expected = loss_of(FUNCTIONS["softmax"], "", region=region(name))
        assert same(loss_of(nested, kind, region=region(name)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_a_suspended_region_stays_in_fp32_when_it_runs_again(kind: str) -> None:
    """Without the region's memory the model would open its own when it is computed again."""
    found = []
    for reentrant in (None, KINDS[kind]):
        torch.manual_seed(0)
        model = hs.prepare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)), policy=POLICIES["O1 bf16"])
        x = torch.ones(2, 4, requires_grad=True)
        with hs.suspended():
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        y.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("how", ["method", "method, reentrant"])
@pytest.mark.parametrize("rule", ["low", "keep", "fp32"])
def test_a_checkpoint_in_a_module_with_a_rule_of_its_own_runs_again_under_that_rule(rule: str, how: str) -> None:
    policy = POLICIES["mixed fp16"].with_modules({"0": rule})
    found = []
    for checkpointed in ("", how):
        torch.manual_seed(0)
        model = hs.prepare(nn.Sequential(Attends(checkpointed), nn.Linear(4, 4)), policy=policy)
        model(torch.eye(4)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("early_stop", [True, False])
def test_options_of_checkpoint(early_stop: bool) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def told(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    expected = loss_of(FUNCTIONS["softmax"], "", region=region())
    how: dict[str, Any] = {"context_fn": lambda: (told("forward"), told("again")), "early_stop": early_stop}
    assert same(loss_of(FUNCTIONS["softmax"], "non-reentrant", region=region(), **how), expected)
    assert entered == ["forward", "again"]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_sequential(kind: str) -> None:
    found = []
    for segments in (0, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)) for _ in range(4)])
        x = torch.ones(2, 4, requires_grad=True)
        with region("O1 fp16"):
            y = checkpoint_sequential(model, segments, x, use_reentrant=KINDS[kind]) if segments else model(x)
        y.float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_hooks_for_saved_tensors_may_lie_over_a_checkpoint() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return F.linear(x, w).softmax(-1)

    assert same(loss_of(function, "non-reentrant", region=region()), loss_of(FUNCTIONS["softmax"], "", region=region()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_may_run_in_another_thread_or_region_and_twice(kind: str) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with region():
        plain = FUNCTIONS["softmax"](x, w).square().mean()
    with region():
        again = checkpoint(FUNCTIONS["softmax"], x, w, use_reentrant=KINDS[kind]).square().mean()

    def gradient(loss: Tensor, around: Callable[[], Any]) -> Tensor:
        w.grad = torch.zeros(4, 4)
        with around():  # what autograd itself computes there is lowered, as under torch.autocast
            loss.backward(retain_graph=True)
        return w.grad

    for around in (contextlib.nullcontext, lambda: region("mixed fp16"), region, hs.suspended):
        expected = gradient(plain, around)
        assert torch.equal(gradient(again, around), expected)
        there: list[Tensor] = []
        thread = threading.Thread(target=lambda around=around, to=there: to.append(gradient(again, around)))
        thread.start()
        thread.join()
        assert torch.equal(there[0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_for_an_operator_of_ones_own_holds_again(kind: str) -> None:
    @hs.operator("low", name="checkpointed::product")
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    for rule in ("low", "fp32"):
        policy = hs.Policy.of("torch", dtype="bf16").with_ops(**{rule: ["checkpointed::product"]})
        opened = hs.autocast("cpu", policy=policy)
        assert same(loss_of(product, kind, region=opened), loss_of(product, "", region=opened))


def test_a_checkpoint_of_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than computed again by other rules."""

    def pack(x: Tensor) -> Tensor:
        return x

    pack.__module__ = "torch.utils.checkpoint"
    x = torch.ones(2, 2, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, pack)
    with region(), hooks, pytest.raises(RegionError, match="use use_reentrant=True|keeps the function of a checkpoint"):
        torch.softmax(x, -1)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_error_in_what_is_computed_again_leaves_nothing_behind() -> None:
    calls: list[int] = []

    def fails(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        h = F.linear(x, w).softmax(-1)
        if len(calls) % 2 == 0:
            raise ValueError("on purpose")
        return h.exp()

    for kind in KINDS:
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(fails, kind, region=region())
        assert STATE.mode is None and STATE.bound is None and _len_torch_function_stack() == 0


def test_an_error_in_the_backward_pass_takes_the_mode_off() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("on purpose")

    fails: Any = Fails.apply
    model = nn.Linear(2, 2)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: fails(m(x)).sum(), policy="O1")
    with pytest.raises(ValueError, match="on purpose"):
        step(torch.randn(2, 2))
    assert STATE.mode is None
    assert _len_torch_function_stack() == 0


def test_rules_do_nothing_in_a_backward_pass_without_recomputation() -> None:
    recipe = recipe_for(hs.Policy.of("mixed", dtype="bf16"), ("cpu",))
    x = torch.randn(3, 3)
    with recomputing(recipe):
        assert (x @ x).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16


def test_a_region_around_the_backward_pass_holds_as_it_is() -> None:
    recipe = recipe_for(hs.Policy.of("mixed", dtype="bf16"), ("cpu",))
    with hs.autocast("cpu", torch.float16):
        depth, mode = _len_torch_function_stack(), STATE.mode
        with recomputing(recipe):
            assert (_len_torch_function_stack(), STATE.mode) == (depth, mode)


def test_the_engines_thread_finds_the_mode_on_the_stack_and_keeps_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device the backward pass runs in another thread, with torch's stack of modes and no region of ours."""
    recipe = recipe_for(hs.Policy.of("O1", dtype="fp16"), ("cpu",))
    seen: list[Any] = []
    weight = nn.Parameter(torch.randn(3, 3))

    def engine() -> None:
        assert recipe.mode is not None
        _push_mode(recipe.mode)
        try:
            for task in (7, -1):  # inside a backward pass, outside
                monkeypatch.setattr(dispatch, "current_graph_task_id", lambda task=task: task)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    seen.append((mode_here() is recipe.mode, torch.softmax(weight @ weight, -1).dtype))
            seen.append((bool(STATE.casts), len(_get_current_function_mode_stack())))
        finally:
            _pop_mode()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [(True, torch.float32), (False, torch.bfloat16), (False, 1)]


@pytest.mark.parametrize("raises", [KeyboardInterrupt, MemoryError])
def test_a_backward_pass_that_is_cut_at_any_line_leaves_no_mode(raises: type[BaseException]) -> None:
    weight = torch.ones(2, requires_grad=True)
    recipe = recipe_for(hs.Policy.of("mixed", dtype="fp16"), ("cpu",))
    for at in range(1000):
        loss, knife = weight.sum(), Knife(at, raises)
        try:
            with knife:
                backward(recipe, loss, torch.ones(()))
        except raises:
            pass
        assert not _len_torch_function_stack() and STATE.mode is None, knife.where
        if not knife.where:
            break
    assert at > 10
