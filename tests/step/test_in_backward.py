"""Update in backward: the bits of the normal step, without memory for all gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.errors import SettingError, StepError
from halfstep.step.parts import in_backward
from halfstep.trees import tensors
from tests.products import sampled
from tests.step.cutting import Run, cut_everywhere, plain, without_warnings
from tests.step.late import late

X, Y = torch.randint(0, 64, (16,)), torch.randint(0, 64, (16,))

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "lion": lambda p: hs.Lion(p, 1e-3),
}
POLICIES = {
    "O0": hs.Policy.of("O0"),
    "mixed": hs.Policy.of("mixed", dtype="bf16"),
    "O2": hs.Policy.of("O2", dtype="bf16"),
    "pure": hs.Policy.of("pure", dtype="bf16"),
    "kahan": hs.Policy.of("O2", dtype="bf16", master="kahan"),
    "fp32 gradients": hs.Policy.of("pure", dtype="bf16", grads="fp32"),
    "stochastic, low states": hs.Policy.of("pure", dtype="bf16", master="stochastic", state="low"),
    "mixed fp16": hs.Policy.of("mixed", dtype="fp16"),
    "O2 fp16": hs.Policy.of("O2", dtype="fp16"),
}
TWICE = "two passes"


class Net(nn.Module):
    """With an embedding tied to the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.wide, self.norm, self.narrow = nn.Linear(32, 96), nn.BatchNorm1d(96), nn.Linear(96, 32)
        self.last = nn.Linear(32, 64, bias=False)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(self.narrow(self.norm(self.wide(self.table(x))).relu()))
        return h


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def made(
    policy: str = "mixed", optimizer: str = "adamw", on: bool | str = True, loss: Any = loss_fn, **named: Any
) -> Any:
    torch.manual_seed(0)
    model = named.pop("model", Net)()
    own = OPTIMIZERS[optimizer](model.parameters())
    return hs.TrainStep(model, own, loss, policy=POLICIES[policy], update_in_backward=on, **named)


def trained(step: hs.TrainStep, steps: int = 3) -> Any:
    results = []
    for i in range(steps):
        result = step((X + i) % 64, Y)
        assert all(p.grad is None for p in step.model.parameters())
        results.append(repr(result.host()))
    return results, plain(step.state_dict())


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Update each parameter alone, also a small one."""
    monkeypatch.setattr(in_backward, "TOGETHER", 0)


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [*((policy, "adamw") for policy in POLICIES if "fp16" not in policy), ("pure", "sgd"), ("mixed", "lion")],
)
def test_weights_states_and_results_have_the_bits_of_the_normal_step(
    policy: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(made(policy, optimizer, on=False))
    assert trained(made(policy, optimizer)) == expected
    monkeypatch.setattr(in_backward, "TOGETHER", 1 << 13)  # some of them
    assert trained(made(policy, optimizer)) == expected


def test_gradients_that_come_another_way_are_applied_too() -> None:
    """Of a backward pass inside the loss function, and of a group that was added later; others are unused."""

    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused, self.later = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(64))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.inner(torch.ones(1, 2)).sum().backward()
        return F.cross_entropy(model(x) * model.later, y)

    runs = []
    for on in (True, False):
        step = made(on=on, loss=loss, model=More)
        rest = step.optimizer.param_groups[0]["params"]
        rest[:] = [p for p in rest if p is not step.model.later]
        step.optimizer.add_param_group({"params": [step.model.later], "lr": 0.5})
        before = step.model.unused.weight.clone()
        runs.append(trained(step))
        assert torch.equal(step.model.unused.weight, before) and not torch.equal(step.model.later, torch.ones(64))
    assert runs[0] == runs[1]


def test_a_scheduler_and_checkpointing_without_reentry() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    runs = []
    for on, behind in ((True, False), (True, True), (False, False)):
        step = made(on=on, loss=loss)
        step.scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
        landing = late(step) if behind else None
        runs.append(trained(step))
        assert landing is None or (landing.waits == 3 and step.host_reads == 0)  # the last by state_dict
    assert runs[0] == runs[1] == runs[2]


# ---------------------------------------------------------------------- two passes


@pytest.mark.parametrize(("policy", "clip"), sampled(POLICIES, (1e-2, 1e3, None)))
def test_two_passes_clip_as_the_normal_step_does(
    policy: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(made(policy, on=False, clip_norm=clip))
    assert trained(made(policy, on=TWICE, clip_norm=clip)) == expected
    monkeypatch.setattr(in_backward, "TOGETHER", 1 << 13)
    assert trained(made(policy, on=TWICE, clip_norm=clip)) == expected
    if clip == 1e-2:
        assert trained(made(policy, on=False))[1] != expected[1]  # it does clip


def test_two_passes_with_gradients_that_come_another_way() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.inner(torch.ones(1, 2)).sum().backward()
        (model.narrow.weight * 2).sum().backward()  # the pass of the step adds to this one
        h = model.norm(model.wide(model.table(x))).relu()
        return F.cross_entropy(model.last(checkpoint(model.narrow, h, use_reentrant=False)), y)

    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    runs = [trained(made(on=on, loss=loss, model=More, clip_norm=0.1)) for on in (TWICE, False)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("policy", ["mixed fp16", "O2 fp16"])
def test_two_passes_skip_whole_steps_and_move_the_scale(policy: str, retry: bool) -> None:
    """The scale begins far too high: steps are skipped, or run again, until it fits."""
    runs = []
    for on in (TWICE, False):
        step = made(policy, on=on, clip_norm=0.1, retry=retry, scaler=hs.GradScaler("cpu", init_scale=2.0**24))
        before = plain(step.model.state_dict())
        first = step(X, Y)
        assert retry or (first.host().skipped and plain(step.model.state_dict()) == before)
        runs.append((repr(first.host()), trained(step, 14)))
    assert runs[0] == runs[1] and ("skipped=True" in str(runs)) is not retry
    assert "updated=True" in runs[0][1][0][-1] and ("retries=0" in runs[0][0]) is not retry


def test_two_passes_apply_all_or_nothing_where_a_gradient_is_not_finite() -> None:
    for policy in ("mixed", "stochastic, low states"):
        step, model, optimizer = poisoned("inside", on=TWICE, policy=policy, clip_norm=1.0)
        twin, _, _ = poisoned("inside", on=False, policy=policy, clip_norm=1.0)
        found, expected = step(X, Y).host(), twin(X, Y).host()
        assert found.skipped and found.culprits == expected.culprits
        assert plain(step.model.state_dict()) == plain(model) and plain(step.optimizer.state_dict()) == optimizer
        assert "update_in_backward" not in str(step.explain())
        step.loss_fn = twin.loss_fn = loss_fn
        assert trained(step) == trained(twin)


def test_an_exception_in_the_first_pass_changes_nothing_and_one_in_the_second_needs_a_checkpoint() -> None:
    step, twin = (made(on=TWICE, clip_norm=0.1) for _ in range(2))
    step(X, Y), twin(X, Y)
    passes = []

    def raises(gradient: Tensor) -> None:
        passes.append(gradient)
        raise MemoryError("no room")

    handle = step.model.wide.bias.register_hook(raises)
    with pytest.raises(MemoryError):
        step(Y, X)
    handle.remove()
    assert len(passes) == 1 and trained(step) == trained(twin)
    step.model.wide.bias.register_hook(
        lambda gradient: raises(gradient) if len(passes) > 1 else passes.append(gradient)
    )
    with pytest.raises(MemoryError):
        step(Y, X)
    with pytest.raises(StepError, match=r"MemoryError \(no room\) cut off the update"):
        step(X, Y)


def test_the_limit_of_two_passes_may_be_assigned_and_is_one_number() -> None:
    step = made(on=TWICE)
    step.clip_norm = 1e-2
    assert trained(step) == trained(made(on=False, clip_norm=1e-2))
    assert copy.deepcopy(step).update_in_backward == TWICE
    with pytest.raises(SettingError, match="update_in_backward='two passes' sees one gradient at a time"):
        step.clip_value = 1.0
    model = Net()
    pair = {"a": torch.optim.SGD(model.wide.parameters(), 0.1), "b": torch.optim.SGD(model.narrow.parameters(), 0.1)}
    with pytest.raises(StepError, match=r"clip_norm=\{'a': 1.0\} needs a norm for each of several optimizers; leave"):
        hs.TrainStep(model, pair, loss_fn, update_in_backward=TWICE, clip_norm={"a": 1.0})


# ---------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """Counts the bytes of what operators allocate, and the most that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak(step: hs.TrainStep, x: Tensor) -> int:
    """Return the most bytes that a step holds beside weights and optimizer state."""
    for _ in range(2):
        step(x)
    gc.collect()
    with Peak() as counted:
        step(x)
    return int(counted.most)


@pytest.mark.parametrize("policy", ["O0", "mixed", "pure"])
def test_a_step_holds_one_gradient_at_a_time(policy: str) -> None:
    """Or as many as are updated together."""
    layers, width = 16, 128
    size = width * width * (2 if policy == "pure" else 4)  # of one gradient
    copies = layers * width * width * 2 if policy == "mixed" else 0  # low copies of weights, until they have been used

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()  # type: ignore[no-any-return]

    on, twice, off = (
        peak(made(policy, on=on, model=model, loss=loss), torch.ones(1, width)) for on in (True, TWICE, False)
    )
    assert off > layers * size and on < copies + 4 * size and twice < copies + 4 * size


@pytest.mark.hours
@pytest.mark.parametrize(("policy", "expected"), [("mixed", (2.25, 4.12)), ("pure", (0.46, 2.03))])
def test_the_bytes_that_the_docs_state(
    policy: str, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docs/concepts/step.md`; in bytes a parameter."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x: Tensor) -> Tensor:
            added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
            return x + added

    def model() -> nn.Module:
        return nn.Sequential(*[Block() for _ in range(8)])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()  # type: ignore[no-any-return]

    monkeypatch.setattr(in_backward, "TOGETHER", 1 << 20)
    count = sum(p.numel() for p in model().parameters())
    found = [peak(made(policy, on=on, model=model, loss=loss), torch.randn(64, 512)) / count for on in (True, False)]
    assert found == pytest.approx(expected, abs=0.01)


# ---------------------------------------------------------------------- gradients that are not finite


def poisoned(place: str, on: bool | str = True, **named: Any) -> tuple[Any, Any, Any]:
    """Train a step whose gradients become nan at `place`; return step, model and optimizer state before."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = model.wide(model.table(x))
        if place == "inside":
            h.register_hook(lambda gradient: gradient * float("nan"))
        total = F.cross_entropy(model.last(model.narrow(model.norm(h).relu())), y)
        return total * float("nan") if place == "loss" else total

    step = made(on=on, **named)
    step(X, Y)
    step.loss_fn = loss
    return step, copy.deepcopy(step.model.state_dict()), plain(step.optimizer.state_dict())


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    for policy in ("mixed", "stochastic, low states"):
        step, model, optimizer = poisoned("loss", policy=policy)
        twin, _, _ = poisoned("loss", policy=policy, on=False)
        assert step(X, Y).host().skipped and twin(X, Y).host().skipped
        assert plain(step.model.state_dict()) == plain(model) and plain(step.optimizer.state_dict()) == optimizer
        step.loss_fn = twin.loss_fn = loss_fn
        assert trained(step) == trained(twin)  # random bits are those of the normal step again


def test_a_gradient_that_is_not_finite_ends_the_updates_of_its_step() -> None:
    step, model, _ = poisoned("inside")
    step.scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
    result = step(X, Y).host()
    assert result.skipped and not result.updated
    assert set(result.culprits) == {"table.weight", "wide.weight", "wide.bias"}
    changed = {k for k, v in step.model.state_dict().items() if not torch.equal(v, model[k])}
    before = {"norm.weight", "norm.bias", "narrow.weight", "narrow.bias"}  # and no statistics of BatchNorm
    assert changed == before
    assert "update_in_backward=True: parameters whose gradients came before" in str(step.explain())
    step.loss_fn = loss_fn
    assert step(X, Y).host().updated and step.scheduler.last_epoch == 1  # that of the first


# ---------------------------------------------------------------------- exceptions


class Hook:
    """Raises when the gradient of a parameter arrives."""

    def __init__(self, parameter: Tensor, error: BaseException) -> None:
        self.error = error
        self.handle = parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> None:
        raise self.error


def test_an_exception_before_the_first_update_is_undone() -> None:
    step, twin = made(), made()
    step(X, Y), twin(X, Y)
    hooks = [Hook(parameter, MemoryError("no room")) for parameter in step.model.narrow.parameters()]
    with pytest.raises(MemoryError):
        step(Y, X)
    for hook in hooks:
        hook.handle.remove()
    assert trained(step) == trained(twin)


def test_an_exception_after_an_update_needs_a_checkpoint() -> None:
    step = made()
    state = copy.deepcopy(step.state_dict())
    hook = Hook(step.model.wide.bias, MemoryError("no room"))
    with pytest.raises(MemoryError):
        step(X, Y)
    hook.handle.remove()
    with pytest.raises(StepError, match=r"MemoryError \(no room\) cut off the update after 0 micro-batches"):
        step(X, Y)
    step.load_state_dict(state)
    assert trained(step) == trained(made())


def test_a_weight_that_is_read_detached_too_is_an_error_and_no_wrong_gradient() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.linear(model.narrow(model.wide(model.table(x)).relu()), model.narrow.weight.detach().t())
        total: Tensor = F.linear(h, model.narrow.weight).square().sum()
        return total

    def reused(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.linear(model.table(x), model.narrow.weight.detach().t())  # its backward pass reads the updated weight
        total: Tensor = model.narrow(h).square().sum() + model.wide(model.table(x)).sum()
        return total

    assert trained(made(policy="O0", loss=loss)) == trained(made(policy="O0", loss=loss, on=False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made(policy="O0", loss=reused)(X, Y)


RUN = Run(scheduler="step", in_backward=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # cut off in a generator that ends
@pytest.mark.parametrize("stride", [601, pytest.param(7, marks=pytest.mark.hours)])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_cut_off(kind: type[BaseException], stride: int) -> None:
    def check() -> str:
        outcomes = cut_everywhere(RUN, 1, kind, stride)
        assert outcomes["before"] and (kind is MemoryError or not outcomes["refused"])
        return ""

    without_warnings(check)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"clip_norm": 1.0}, "clip_norm needs the norm of all of them"),
        ({"clip_value": 1.0}, "clip_value clips in a pass of its own"),
        ({"accumulate": 2}, "accumulate adds those of several micro-batches first"),
        ({"scaler": hs.GradScaler("cpu")}, "a loss scale skips a step by the verdict on all of them"),
        ({"scaler": hs.GradScaler("cpu"), "retry": True}, "a loss scale skips a step"),
        ({"compile": {"backend": "eager"}}, "compile makes all gradients of a graph at once"),
        ({"model": lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True))}, "an embedding of the model makes sparse"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_needs_more_than_one_gradient_is_refused(named: dict[str, Any], text: str) -> None:
    first = bool({"clip_norm", "scaler"} & {*named})
    remedy = "use update_in_backward='two passes', with one number" if first else "leave one of the two out"
    with pytest.raises(StepError, match=f"^update_in_backward=True updates each.*and {text}.*; {remedy}"):
        made(**named)
    if not first:
        with pytest.raises(StepError, match=f"^update_in_backward='two passes' updates each.*and {text}.*; {remedy}"):
            made(on=TWICE, **named)


def test_it_is_on_or_off() -> None:
    with pytest.raises(StepError, match="update_in_backward must be True or False or 'two passes' and is 'yes'$"):
        made(on="yes")


def test_other_optimizers_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        StepError, match="needs halfstep's own update: RMSprop is none of Adam, AdamW, SGD, Lion and NAdam"
    ):
        hs.TrainStep(model, torch.optim.RMSprop(model.parameters()), loss_fn, update_in_backward=True)
    assert hs.TrainStep(model, torch.optim.RMSprop(model.parameters()), loss_fn).policy.name == "mixed"


def test_what_is_found_later_is_refused_before_anything_is_written() -> None:
    step = made()
    before = plain(step.state_dict())
    step.watchers.append(object())
    with pytest.raises(StepError, match=r"a watcher \(object\) is shown all of them"):
        step(X, Y)
    step.watchers.clear()
    handle = step.optimizer.register_step_pre_hook(lambda *args: None)
    with pytest.raises(StepError, match="halfstep's own update: it has hooks that run before or after its step"):
        step(X, Y)
    handle.remove()
    assert plain(step.state_dict()) == before
    assert trained(step) == trained(made())


@pytest.mark.parametrize("first", [True, False])
def test_reentrant_checkpoints_are_refused(first: bool) -> None:
    """In the first step before anything is written; in a later one, where they are not looked for, when they show."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = checkpoint(model.wide, model.table(x), use_reentrant=True)
        return F.cross_entropy(model.last(model.narrow(h)), y)

    step = made(loss=loss if first else loss_fn)
    if not first:
        step(X, Y)
        step.loss_fn = loss
    state = copy.deepcopy(step.state_dict())
    with pytest.raises(StepError, match="re-entrant checkpoints hand over parts"):
        step(X, Y)
    if not first:
        step.load_state_dict(state)
    assert plain(step.state_dict()) == plain(state)
    step.loss_fn = loss_fn
    step(X, Y)


def test_copies_keep_it_and_steps_go_with_their_last_reference() -> None:
    step = made()
    assert copy.deepcopy(step).update_in_backward
    gone = weakref.ref(step)
    model = step.model
    del step
    gc.collect()
    assert gone() is None
    loss_fn(model, X, Y).backward()
    assert model.table.weight.grad is not None
