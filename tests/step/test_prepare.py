"""Binding: what a prepared model survives, and that a failed call changes nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import halfstep as hs
from halfstep.binding import bind
from halfstep.binding.bind import binding_of
from halfstep.binding.prepare import store_of
from halfstep.cast.state import STATE
from halfstep.errors import BindError, PolicyError, WeightsError
from tests.stepping import without_collector

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = ["torch", "O1", "mixed", "O2", "O3"]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(self.norm(x))
        self.seen.append(h.dtype)
        return x + self.fc2(F.gelu(h))  # type: ignore[no-any-return]


class Net(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x * self.table))  # type: ignore[no-any-return]


def block(model: nn.Module, index: int) -> Block:
    assert isinstance(model, Net)
    return cast(Block, model.blocks[index])


def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def policy(name: str, dtype: str = "bf16") -> hs.Policy:
    return hs.Policy.of(name, dtype=dtype)


def test_it_mirrors_its_input_and_returns_the_same_objects() -> None:
    a, b = net(), net()
    oa, ob = torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)
    assert hs.prepare(a, policy=policy("mixed")) is a
    models, optimizers, scaler = hs.prepare([a, b], [oa, ob], policy=policy("mixed"))
    assert models == [a, b] and optimizers == [oa, ob] and not scaler.is_enabled()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_prepared_model_is_in_its_region_from_anywhere(name: str, dtype: str) -> None:
    model = hs.prepare(net(), policy=policy(name, dtype))
    assert isinstance(model, Net)
    out = model(X)
    low = BF16 if dtype == "bf16" else HALF
    assert out.dtype is (low if name == "O3" else FP32)
    assert block(model, 0).seen == [low]
    threads = [threading.Thread(target=model, args=(X,)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(block(model, 0).seen) == {low}
    assert not torch.is_autocast_enabled("cpu") and STATE.bound is None


def test_low_parameters_are_low_and_norms_are_not() -> None:
    model = hs.prepare(net(), policy=policy("O2"))
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert dtypes["head.weight"] is BF16 and dtypes["blocks.0.norm.weight"] is FP32
    assert model.table.dtype is FP32
    model = hs.prepare(net(), policy=policy("O3"))
    assert {p.dtype for p in model.parameters()} == {BF16}


@pytest.mark.parametrize("name", POLICIES)
def test_state_dict_has_the_same_keys_and_fp32_values(name: str) -> None:
    plain = net().state_dict()
    state = hs.prepare(net(), policy=policy(name)).state_dict()
    assert list(state) == list(plain)
    if name != "O3":
        assert all(torch.equal(state[k], plain[k]) and state[k].dtype is FP32 for k in plain)


def test_state_dict_loads_on_root_and_submodule() -> None:
    model = hs.prepare(net(), policy=policy("O2"))
    other = Net()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.state_dict()["head.weight"], other.head.weight)
    assert torch.equal(model.head.weight, other.head.weight.bfloat16())
    value = torch.randn(3, 8)
    model.head.load_state_dict({"weight": value, "bias": torch.zeros(3)})
    assert torch.equal(model.head.state_dict()["weight"], value)
    assert torch.equal(model.head.weight, value.bfloat16())
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.head.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})
    assert torch.equal(model.head.state_dict()["weight"], value)
    with pytest.raises(WeightsError, match="load without assign"):
        model.load_state_dict(other.state_dict(), assign=True)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_deepcopy_and_pickle(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    original = net()
    original.head.weight = nn.Parameter(original.head.weight.detach() + 1e-5)  # not a bf16 value
    want = original.state_dict()
    model = hs.prepare(original, policy=policy(name))
    twin = copied(model)
    assert isinstance(twin, Net) and type(twin) is type(model)
    if name != "O3":
        assert all(p.dtype is FP32 for p in twin.parameters())
        assert all(torch.equal(v, want[k]) for k, v in twin.state_dict().items())
    assert torch.equal(twin(X), model(X))
    assert isinstance(twin, Net)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert model.head.weight.abs().sum() > 0


def test_deepcopy_keeps_ties() -> None:
    model = net()
    block(model, 0).fc1.weight = block(model, 1).fc1.weight
    twin = copy.deepcopy(hs.prepare(model, policy=policy("O2")))
    assert block(twin, 0).fc1.weight is block(twin, 1).fc1.weight


def test_torch_save_of_the_model_and_of_its_state() -> None:
    model = hs.prepare(net(), policy=policy("O2"))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert torch.equal(again(X), model(X))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain = Net()
    plain.load_state_dict(torch.load(buffer))
    assert torch.equal(plain.head.weight, model.state_dict()["head.weight"])


def test_an_average_of_copies_is_fp32() -> None:
    model = hs.prepare(net(), policy=policy("O2"))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    assert all(p.dtype is FP32 for p in average.module.parameters())
    average.update_parameters(model)
    assert average.module(X).dtype is FP32


@pytest.mark.parametrize(
    "name", [name if name in {"torch", "O2"} else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
def test_compile_fullgraph(name: str) -> None:
    torch._dynamo.reset()
    model = hs.prepare(net(), policy=policy(name))
    want = model(X)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(X)
    assert got.dtype is want.dtype
    assert torch.allclose(got.float(), want.float(), atol=3e-2)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(name: str, dtype: str, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = (x * self.table).requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)  # type: ignore[no-any-return]

    def gradients(kind: type[Net]) -> tuple[list[Tensor], set[torch.dtype]]:
        torch.manual_seed(0)
        model = hs.prepare(kind(), policy=policy(name, dtype))
        model(X).float().square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], set(block(model, 0).seen)

    plain, seen = gradients(Net)
    again, seen_again = gradients(Checkpointed)
    assert len(plain) == len(again) and seen == seen_again == {BF16 if dtype == "bf16" else HALF}
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_data_parallel_replicas_in_threads() -> None:
    model = hs.prepare(net(), policy=policy("mixed"))
    replicas = [model._replicate_for_data_parallel() for _ in "ab"]  # type: ignore[no-untyped-call]
    for replica in replicas:
        replica._modules = model._modules
    outs: list[Tensor] = []
    threads = [threading.Thread(target=lambda r=r: outs.append(r(X))) for r in replicas]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(outs) == 2 and all(torch.equal(o, model(X)) for o in outs)


def test_a_slice_of_a_sequential() -> None:
    model = hs.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), policy=policy("mixed"))
    assert model[:2](X).shape == (4, 8)


@pytest.mark.parametrize("name", POLICIES)
def test_unprepare_gives_class_and_fp32_weights_back(name: str) -> None:
    plain = net()
    want, classes = plain.state_dict(), [type(m) for m in plain.modules()]
    want = {k: v.clone() for k, v in want.items()}
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    hs.prepare(plain, optimizer, policy=policy(name))
    assert hs.unprepare(plain) is plain
    assert [type(m) for m in plain.modules()] == classes
    assert all(p.dtype is FP32 for p in plain.parameters())
    if name != "O3":
        assert all(torch.equal(v, want[k]) for k, v in plain.state_dict().items())
    assert plain(X).dtype is FP32
    plain(X).sum().backward()
    optimizer.step()
    with pytest.raises(BindError, match="not prepared"):
        hs.unprepare(plain)


def test_edit_weights() -> None:
    model = hs.prepare(net(), policy=policy("O2"))
    with hs.edit_weights(model), torch.no_grad():
        assert model.head.weight.dtype is FP32
        model.head.weight.clamp_(-0.01, 0.01)
    assert model.head.weight.dtype is BF16
    assert float(model.state_dict()["head.weight"].abs().max()) == pytest.approx(0.01)
    assert torch.equal(model.head.weight, model.state_dict()["head.weight"].bfloat16())
    with pytest.raises(ZeroDivisionError), hs.edit_weights(model):
        raise ZeroDivisionError
    assert model.head.weight.dtype is BF16
    with pytest.raises(BindError, match="not prepared"), hs.edit_weights(net()):
        pass


# ------------------------------------------------------------------------------------------ module rules


@pytest.mark.parametrize("master", ["master", "split"])
def test_no_step_is_made_while_fp32_weights_are_shown(master: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(2, 4)
    own = hs.Policy.of("O2", dtype="bf16", master=master)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=own)
    step(x)
    before = copy.deepcopy(model.state_dict())
    with hs.edit_weights(model):
        with hs.edit_weights(model[0]):
            pass
        with pytest.raises(WeightsError, match=r"inside `with hs.edit_weights"):
            step(x)
        model(x).square().mean().backward()
        with pytest.raises(WeightsError, match=r"inside `with hs.edit_weights"):
            optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    step(x)
    assert not any(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_module_rules() -> None:
    wanted = policy("mixed").with_modules({"blocks.1": "fp32"})
    model = hs.prepare(net(), policy=wanted)
    model(X)
    assert block(model, 0).seen == [BF16] and block(model, 1).seen == [FP32]
    wanted = policy("O2").with_modules({"blocks": "fp32", "blocks.1": "low"})
    model = hs.prepare(net(), policy=wanted)
    model(X)
    assert block(model, 0).seen == [FP32] and block(model, 1).seen == [BF16]
    assert block(model, 0).fc1.weight.dtype is FP32 and block(model, 1).fc1.weight.dtype is BF16


def test_a_module_rule_wins_over_operator_rules() -> None:
    wanted = policy("mixed").with_ops(fp32=["linear"]).with_modules({"blocks.1": "low"})
    model = hs.prepare(net(), policy=wanted)
    model(X)
    assert block(model, 0).seen == [FP32] and block(model, 1).seen == [BF16]


def test_a_class_rule_on_leaves() -> None:
    model = hs.prepare(net(), policy=policy("mixed").with_modules({"class:LayerNorm": "fp32"}))
    dtypes: list[torch.dtype] = []
    block(model, 0).norm.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    model(X)
    assert dtypes == [FP32]


@pytest.mark.parametrize("name", ["mixed", "O2", "pure", "O3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_outputs_of_an_fp32_module_are_not_rounded(name: str, tied: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32, bias=False), nn.Linear(32, 4))
    if tied:
        model[2].weight = model[0].weight
    hs.prepare(model, policy=policy(name).with_modules({"2": "fp32"}))
    seen: list[Tensor] = []
    for layer in (1, 2, 3):
        model[layer].register_forward_hook(lambda m, i, o: seen.append(o))
    model(torch.arange(32))
    assert [output.dtype for output in seen] == [BF16, FP32, BF16] and model[2].weight.dtype is FP32
    assert torch.equal(seen[1], seen[0].float() @ model[2].weight.T)


@pytest.mark.parametrize("rule", ["keep", "low", "fp32"])
def test_a_rule_for_the_root(rule: str) -> None:
    model = hs.prepare(net(), policy=policy("mixed").with_modules({"": rule}))
    assert model(X).dtype is FP32
    assert block(model, 0).seen == [BF16 if rule == "low" else FP32]


def test_containers_keep_their_types() -> None:
    from typing import NamedTuple

    class Pair(NamedTuple):
        a: Tensor
        b: list[Tensor]

    class Wrapped(nn.Linear):
        def forward(self, x: Pair) -> Pair:  # type: ignore[override]
            assert x.a.dtype is BF16
            return Pair(super().forward(x.a), [x.b[0]])

    model = hs.prepare(Wrapped(8, 8), policy=policy("O2"))
    out = model(Pair(X, [X]))
    assert type(out) is Pair and out.a.dtype is FP32 and type(out.b) is list


# ------------------------------------------------------------------------------------------ bad input


def unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    assert type(model) is Net and not any("_halfstep" in m.__dict__ for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_failed_calls_change_nothing() -> None:
    model, other = net(), net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hs.prepare(model, foreign, policy="O2"), BindError, r"parameter 0 of group 0 of SGD.*not a parameter"),
        (lambda: hs.prepare(model, policy="o2"), PolicyError, "O2"),
        (lambda: hs.prepare(model, policy=policy("mixed").with_modules({"haed": "fp32"})), PolicyError, "head"),
        (lambda: hs.prepare(cast(nn.Module, 3), policy="O2"), BindError, "must be a torch Module"),
        (
            lambda: hs.prepare(model, cast(torch.optim.Optimizer, 3), policy="O2"),
            BindError,
            "must be a torch Optimizer",
        ),
        (lambda: hs.prepare(model, policy="fp8"), NotImplementedError, "fp8"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
        unchanged(model, before)


def test_what_is_no_model_gets_a_sentence() -> None:
    model = nn.Linear(4, 4)
    stepper = torch.optim.SGD(model.parameters(), 0.1)
    things: list[Any] = [None, {}, {"a": model}, nn.Linear, "model", X, stepper, lambda x: x, 3]
    for thing in things:
        name = type(thing).__name__
        with pytest.raises(BindError, match=f"models must be a torch Module or a list of them, not {name}"):
            hs.prepare(thing, policy="O2")
        with pytest.raises(BindError, match=rf"hs\.unprepare takes a model, a torch Module, not {name}"):
            hs.unprepare(thing)
        with pytest.raises(BindError, match=rf"hs\.prepared_policy takes a model, a torch Module, not {name}"):
            hs.prepared_policy(thing)
        with (
            pytest.raises(BindError, match=rf"hs\.edit_weights takes a model, a torch Module, not {name}"),
            hs.edit_weights(thing),
        ):
            pass
    with pytest.raises(BindError, match="empty list"):
        hs.prepare([], policy="O2")
    with pytest.raises(BindError, match="not list; call it for each model"):
        hs.unprepare([model])  # type: ignore[type-var]
    steppers: list[Any] = [torch.optim.SGD, model, "adam", torch.optim.lr_scheduler.StepLR(stepper, 1), [None]]
    for thing in steppers:
        with pytest.raises(BindError, match="optimizers must be a torch Optimizer or a list of them"):
            hs.prepare(model, thing, policy="O2")
    policies: list[Any] = [None, 2, {"params": "low"}, torch.bfloat16, "bf16", "missing.toml"]
    for thing in policies:
        with pytest.raises(PolicyError):
            hs.prepare(model, policy=thing)
    assert type(model) is nn.Linear and model.weight.dtype is FP32


def test_nan_before_the_first_step() -> None:
    model = net()
    with torch.no_grad():
        block(model, 1).fc1.weight[0, 0] = float("nan")
    with pytest.raises(BindError, match=r"blocks\.1\.fc1\.weight holds nan or inf before the first step"):
        hs.prepare(model, policy="O2")
    assert type(model) is Net


def test_another_policy_on_a_prepared_model() -> None:
    model = hs.prepare(net(), policy=policy("mixed"))
    hs.prepare(model, policy=policy("mixed"))
    with pytest.raises(BindError, match="already prepared with policy 'mixed'.*unprepare"):
        hs.prepare(model, policy=policy("O1"))


def test_wrapping_before_preparing() -> None:
    with pytest.raises(BindError, match="hs.prepare.* first, then wrap"):
        hs.prepare(nn.DataParallel(net()), policy=policy("O2"))


def test_a_compiled_model_that_raises_leaves_no_region_behind() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, bad: bool = False) -> Tensor:
            out: Tensor = self.layer(x)
            if bad:
                raise ValueError("bad batch")
            return out

    model = hs.prepare(Picky(), policy=hs.Policy.of("torch", dtype="bf16", outputs="keep"))
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="bad batch"):
        compiled(torch.ones(2, 4), True)
    assert model(torch.ones(2, 4)).dtype is torch.bfloat16


def test_prepared_policy_says_what_a_model_and_its_parts_were_prepared_with() -> None:
    model, policy = Net(), hs.Policy.of("mixed", dtype="bf16")
    assert hs.prepared_policy(model) is None
    hs.prepare(model, policy=policy)
    assert hs.prepared_policy(model) == policy
    assert {hs.prepared_policy(m) for m in model.modules() if isinstance(m, Block)} == {policy}
    hs.unprepare(model)
    assert all(hs.prepared_policy(m) is None for m in model.modules())


def test_one_optimizer_over_two_low_models_holds_their_own_parameters_after_every_step() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    plain = copy.deepcopy(nn.Sequential(first, second))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    hs.prepare([first, second], optimizer, policy=hs.Policy.of("O2", dtype="bf16"))
    own = [*first.parameters(), *second.parameters()]
    for _ in range(3):
        for parameter, other in zip(own, plain.parameters(), strict=True):
            parameter.grad = torch.ones_like(parameter)
            other.grad = torch.ones_like(other)
        optimizer.step()
        reference.step()
        saved = optimizer.state_dict()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], own, strict=True))
        assert set(optimizer.state) == set(own)
    assert all(state["momentum_buffer"].dtype is torch.float32 for state in saved["state"].values())
    optimizer.load_state_dict(saved)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], own, strict=True))
    found = [*first.state_dict().values(), *second.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(found, plain.state_dict().values(), strict=True))


def test_weights_changed_by_hand_under_low_parameters_stay_changed() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    hs.prepare(model, optimizer, policy=policy("O2"))
    nn.init.ones_(model[1].weight)  # type: ignore[arg-type]
    assert torch.equal(model.state_dict()["1.weight"], torch.ones(4, 4))
    with hs.edit_weights(model), torch.no_grad():
        assert torch.equal(model[1].weight, torch.ones(4, 4))  # type: ignore[arg-type]
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, torch.ones(4, 4, dtype=BF16))  # type: ignore[arg-type]
    assert float(model.state_dict()["0.weight"].norm(dim=1).max()) <= 0.51


def stepped_once() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model prepared under O2 and its optimizer, after a step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    hs.prepare(model, optimizer, policy=policy("O2"))
    model(X).sum().backward()
    optimizer.step()
    return model, optimizer


def test_nothing_stays_behind_without_the_cyclic_collector() -> None:
    def alive() -> list[weakref.ref[Any]]:
        model, optimizer = stepped_once()
        optimizer.state_dict()
        store = store_of(model)
        assert store is not None
        return [weakref.ref(o) for o in (model, optimizer, store, next(store.kept()))]

    with without_collector():
        assert [r() for r in alive()] == [None] * 4


def test_bound_classes_go_with_the_classes_of_their_user() -> None:
    def prepared() -> weakref.ref[type]:
        class Local(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        hs.prepare(Local(), policy=policy("mixed"))
        return weakref.ref(Local)

    kind = prepared()
    gc.collect()  # the bound class
    gc.collect()  # its base
    assert kind() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_model_and_optimizer_copied_together_stay_together(copied: Callable[[Any], Any], first: str) -> None:
    model, optimizer = stepped_once()
    optimizer.zero_grad()
    if first == "model":
        twin, other = copied((model, optimizer))
    else:
        other, twin = copied((optimizer, model))
    assert all(p is q for p, q in zip(other.param_groups[0]["params"], twin.parameters(), strict=True))
    assert all(p.dtype is FP32 for p in twin.parameters())
    before = twin.state_dict()["head.weight"].clone()
    assert torch.equal(before, model.state_dict()["head.weight"])
    twin(X).sum().backward()
    other.step()
    assert not torch.equal(twin.state_dict()["head.weight"], before)


# ------------------------------------------------------------------------------------------ models that share parts


@pytest.mark.parametrize("order", ["part first", "whole first"])
def test_a_part_and_the_whole_prepared_in_one_call(order: str) -> None:
    part = nn.Linear(4, 4, bias=False)
    whole = nn.Sequential(part, nn.Linear(4, 4))
    want = part.weight.detach().clone()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    models: list[nn.Module] = [part, whole] if order == "part first" else [whole, part]
    hs.prepare(models, optimizer, policy=policy("O2"))
    assert torch.equal(whole.state_dict()["0.weight"], want) and torch.equal(part.state_dict()["weight"], want)
    assert part.weight.dtype is BF16 and part(torch.randn(2, 4)).dtype is FP32
    whole(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(part.state_dict()["weight"], want)
    hs.unprepare(whole)
    assert all(p.dtype is FP32 for p in whole.parameters()) and type(part) is nn.Linear


def test_unprepare_of_one_model_leaves_the_other() -> None:
    a, b = net(), net()
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)
    hs.prepare([a, b], optimizer, policy=policy("O2"))
    hs.unprepare(a)
    assert a.head.weight.dtype is FP32 and b.head.weight.dtype is BF16
    before = b.state_dict()["head.weight"]
    (a(X) + b(X)).sum().backward()
    optimizer.step()
    assert not torch.equal(b.state_dict()["head.weight"], before)


@pytest.mark.parametrize("name", ["mixed", "O1"])
def test_a_part_prepared_before_the_whole_still_works_alone(name: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 3))
    hs.prepare(model[0], policy=policy(name))
    hs.prepare(model, policy=policy(name))
    assert model[0](X).dtype is FP32 and model(X).dtype is FP32


def test_a_part_prepared_before_under_low_parameters_or_another_policy() -> None:
    model = net()
    hs.prepare(model.blocks[1], policy=policy("O2"))
    with pytest.raises(BindError, match=r"parameter blocks\.1\.fc1\.weight is low already.*in one call"):
        hs.prepare(model, policy=policy("O2"))
    with pytest.raises(
        BindError, match=r"module 'blocks\.1' is already prepared with policy 'O2' and was given 'mixed'"
    ):
        hs.prepare(model, policy=policy("mixed"))
    assert type(model) is Net and model.head.weight.dtype is FP32


def test_an_error_in_the_second_model_leaves_the_first() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4).half()
    with pytest.raises(WeightsError, match="parameter weight is torch.float16"):
        hs.prepare([a, b], policy=policy("O2"))
    assert type(a) is nn.Linear and a.weight.dtype is FP32


# ------------------------------------------------------------------------------------------ leaves and parametrizations


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_leaves_are_recomputed_in_the_region(name: str, dtype: str, reentrant: bool) -> None:
    class Whole(nn.Module):
        def __init__(self, *, checkpointed: bool) -> None:
            super().__init__()
            self.checkpointed = checkpointed
            self.seq = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            if self.checkpointed:
                x = checkpoint_sequential(self.seq, 2, x, use_reentrant=reentrant)
            else:
                x = self.seq(x)
            return x.pow(2).sum()

    def gradients(*, checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = hs.prepare(Whole(checkpointed=checkpointed), policy=policy(name, dtype))
        x = X.clone().requires_grad_()
        model(x).backward()
        return [p.grad for p in (x, *model.parameters()) if p.grad is not None]

    plain, again = gradients(checkpointed=False), gradients(checkpointed=True)
    assert len(plain) == len(again) == 7
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_a_leaf_called_by_itself_is_in_the_region(name: str) -> None:
    body, head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4)
    hs.prepare(nn.ModuleDict({"body": body, "head": head}), policy=policy(name))
    hidden = body(X)
    assert hidden.dtype is BF16 and head(hidden).dtype is BF16
    assert STATE.bound is None and not torch.is_autocast_enabled("cpu")


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrizations_come_and_go(name: str, when: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    if when == "after":
        hs.prepare(model, policy=policy(name))
    parametrize.register_parametrization(model[0], "weight", Double())
    if when == "before":
        hs.prepare(model, policy=policy(name))
    assert model(X).isfinite().all()
    hs.unprepare(model)
    assert type(model[0]).__mro__[1] is nn.Linear and model(X).dtype is FP32
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear and model(X).dtype is FP32


@pytest.mark.parametrize("name", ["torch", "O1", "mixed"])
def test_parametrizations_are_removed_from_a_prepared_model(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    parametrize.register_parametrization(model[0], "weight", Double())
    hs.prepare(model, policy=policy(name))
    parametrize.remove_parametrizations(model[0], "weight")
    assert model(X).dtype is FP32
    hs.unprepare(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", POLICIES)
def test_spectral_norm_trains(name: str) -> None:
    model = hs.prepare(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 32))), policy=policy(name))
    model(X).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_parametrised_weight_read_outside_forward() -> None:
    parametrized = nn.utils.parametrizations
    model = nn.Sequential(
        parametrized.spectral_norm(nn.Linear(8, 32)),
        parametrized.orthogonal(nn.Linear(32, 32)),
        parametrized.weight_norm(nn.Linear(32, 8)),
    )
    hs.prepare(model, policy=policy("O2"))
    weights = [cast(Tensor, layer.weight) for layer in model]
    assert all(w.isfinite().all() for w in weights) and model(X).isfinite().all()


# ------------------------------------------------------------------------------------------ parameters without values


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(("make", "remedy"), [(lazy, "run one batch"), (meta, "materialise"), (fake, "materialise")])
def test_parameters_without_values(make: Callable[[], nn.Module], remedy: str) -> None:
    model = make()
    with pytest.raises(BindError, match=rf"parameter 0\.weight has no values yet.*{remedy}"):
        hs.prepare(model, policy=policy("O2"))
    assert not any("_halfstep" in m.__dict__ for m in model.modules())
    hs.prepare(model, policy=policy("mixed"))
    if make is meta:
        model.to_empty(device="cpu")
        model.load_state_dict(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).state_dict())
    if make is not fake:
        assert model(X).dtype is FP32


def test_inside_their_mode_fake_parameters_are_lowered_like_any_other() -> None:
    with FakeTensorMode():
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        step = hs.TrainStep(model, optimizer, lambda m, x: m(x).float().sum(), policy=policy("O2"), clip_norm=1.0)
        assert model.weight.dtype is torch.bfloat16 and optimizer.param_groups[0]["fused"]
        assert step(torch.empty(3, 8)).loss.dtype is FP32


# ------------------------------------------------------------------ states of optimizers that are made later


def _moments(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    return {state["exp_avg"].dtype for state in optimizer.state.values()}


def _trained_later(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("params", ["fp32", "low"])
def test_states_are_low_also_of_an_optimizer_that_is_made_after_prepare(params: str) -> None:
    policy = hs.Policy(dtype="bf16", params=params, state="low")  # type: ignore[arg-type]
    model, plain = hs.prepare(nn.Linear(4, 4), policy=policy), nn.Linear(4, 4)
    optimizer = _trained_later(model)
    assert _moments(optimizer) == {torch.bfloat16}
    assert _moments(_trained_later(plain)) == {torch.float32}, "of another model"
    hs.unprepare(model)
    assert _moments(optimizer) == {torch.float32}
    assert _moments(_trained_later(model)) == {torch.float32}, "of a model that is not prepared any more"


@pytest.mark.parametrize("name", ["O2", "pure"])
def test_a_loss_outside_the_region_is_computed_in_fp32_as_the_policy_says(name: str) -> None:
    """Low outputs would meet an fp32 target in a loss that takes one format, or be a loss in the low format."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    policy = hs.Policy.of(name, dtype="bf16")
    assert policy.loss == "fp32"
    hs.prepare(model, policy=policy)
    output, target = model(torch.rand(2, 4)), torch.rand(2, 1)
    for loss in (nn.BCELoss(), nn.MSELoss(), nn.SmoothL1Loss()):
        assert loss(output, target).dtype is torch.float32
    nn.BCELoss()(output, target).backward()
    with hs.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.rand(2, 4)).dtype is torch.float32


def test_outputs_that_are_to_stay_low_stay_low() -> None:
    policy = hs.Policy.of("pure", dtype="bf16", outputs="keep")
    model = nn.Linear(4, 2)
    assert "outputs stay low" in str(hs.resolve(policy, model))
    assert hs.prepare(model, policy=policy)(torch.rand(2, 4)).dtype is torch.bfloat16


def test_a_frozen_parameter_may_hold_infinities() -> None:
    """A mask that is added to scores is often kept as one."""
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.tensor([0.0, float("-inf")]), requires_grad=False)
    assert hs.prepare(model, policy=hs.Policy.of("mixed", dtype="bf16")) is model


def test_a_binding_has_the_policy_as_wanted_and_as_it_is_carried_out() -> None:
    wanted, model = hs.Policy.of("O2", dtype="bf16"), nn.Linear(2, 2)
    hs.prepare(model, torch.optim.AdamW(model.parameters()), policy=wanted)
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).sum())
    binding, store = binding_of(model), store_of(model)
    assert binding is not None and store is not None
    assert binding.wanted == hs.prepared_policy(model) == wanted
    assert step.policy is binding.policy and step.policy.master == store.name == "master"  # as prepare made it


def test_an_optimizer_that_loaded_its_state_before_it_was_prepared_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    policy = hs.Policy.of("O2", dtype="bf16")
    hs.prepare(model, policy=policy)
    late = torch.optim.AdamW(model.parameters())
    late.load_state_dict(saved)  # torch rounds it for low parameters
    with pytest.raises(WeightsError, match=r"was rounded to torch.bfloat16.*hs.prepare\(model, optimizer\) first"):
        hs.prepare(model, late, policy=policy)
    _, late, _ = hs.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
    late.load_state_dict(saved)
    assert late.state_dict()["state"][0]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("policy", ["O0", "mixed"])
def test_a_model_that_came_low_trains_in_fp32_on_low_and_wide_inputs(policy: str, dtype: torch.dtype) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()  # type: ignore[no-any-return]

    x, found = torch.randn(4, 1, 3, 3).to(dtype), []
    for batch in (x, x.float()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).to(dtype)
        step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy=policy)
        found.append(float(step(batch).loss))
        assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {FP32}
    assert found[0] == found[1]
    wide = nn.Linear(2, 2)
    wide.register_buffer("table", torch.ones(2).to(dtype))
    hs.prepare(wide, policy=policy)
    assert cast(Tensor, wide.table).dtype is dtype  # the user's choice in a model that is not low


def test_a_model_that_was_moved_to_a_device_of_other_formats_and_back_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = nn.Linear(4, 4), hs.Policy.of("mixed")
    hs.prepare(model, policy=wanted)
    there = {"cpu": "bf16", "xpu": "fp16"}
    monkeypatch.setattr(bind, "resolved", lambda policy, device: policy.replace(dtype=there[device]))
    monkeypatch.setattr(bind, "device_types_of", lambda models: ("xpu", "cpu"))
    model.float()
    with pytest.raises(BindError, match="moved to 'xpu', where that means other formats"):
        model(torch.ones(2, 4))
    monkeypatch.setattr(bind, "device_types_of", lambda models: ("cpu",))
    model.float()
    assert model(torch.ones(2, 4)).shape == (2, 4)
