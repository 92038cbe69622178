"""Custom operators: their rule holds eager and compiled, forward and backward, and a policy can say otherwise."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import BannedOperatorError, PolicyError

BF16, FP16 = torch.bfloat16, torch.float16
MIXED = hs.Policy.of("mixed", dtype="bf16")
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    x: Tensor
    name: str = "batch"


@hs.operator("fp32", name="tests::energy")
def energy(x: Tensor) -> Tensor:
    assert not torch.is_autocast_enabled("cpu")
    return x * x


@hs.operator("low", name="tests::product")
def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@hs.operator("keep", name="tests::blend")
def blend(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@hs.operator("banned", name="tests::fragile")
def fragile(a: Tensor) -> Tensor:
    return a.log()


SEEN: list[tuple[torch.dtype, ...]] = []


@hs.operator("low", backward="fp32", name="tests::scaled")
class Scaled(torch.autograd.Function):
    """x @ w, with a backward pass that says which formats it sees and gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        to_x, to_w = grads[0] @ w.t(), x.t() @ grads[0]
        if not torch.compiler.is_compiling():
            SEEN.append((grads[0].dtype, x.dtype, to_x.dtype))
        return to_x, to_w


@hs.operator("low", name="tests::halve")
class Halve(torch.autograd.Function):
    """The newer form: forward without context, and setup_context."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


def formats(policy: hs.Policy, func: Callable[..., Tensor], *args: Any) -> torch.dtype:
    with hs.autocast(policy=policy):
        return func(*args).dtype


def test_a_function_runs_in_the_format_of_its_rule() -> None:
    x = torch.ones(2, 2)
    assert formats(MIXED, energy, x.to(BF16)) is torch.float32
    assert formats(MIXED, product, x, x) is BF16
    assert formats(MIXED, blend, x.to(BF16), x) is BF16
    assert formats(MIXED, blend, x, x.to(BF16)) is torch.float32


def test_outside_regions_nothing_changes() -> None:
    assert energy(torch.ones(2, dtype=BF16)).dtype is BF16
    with hs.autocast(policy=MIXED), torch.autocast("cpu", enabled=False):
        assert product(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_the_rule_holds_in_a_plain_torch_region() -> None:
    with torch.autocast("cpu", dtype=FP16):
        assert product(torch.ones(2, 2), torch.ones(2, 2)).dtype is FP16
    with hs.autocast("cpu", dtype=BF16):
        assert product(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16


@pytest.mark.parametrize("pattern", ["tests::product", "tests::*", "*"])
@pytest.mark.parametrize("preset", ["mixed", "torch"])
def test_a_policy_overrules_the_rule_by_name(preset: str, pattern: str) -> None:
    policy = hs.Policy.of(preset, dtype="bf16").with_ops(fp32=[pattern])
    assert formats(policy, product, torch.ones(2, 2, dtype=BF16), torch.ones(2, 2)) is torch.float32
    last = policy.with_ops(low=["tests::product"])
    assert formats(last, product, torch.ones(2, 2), torch.ones(2, 2)) is BF16


def test_integers_and_doubles_stay() -> None:
    @hs.operator("low", name="tests::many")
    def many(*tensors: Tensor) -> list[torch.dtype]:
        return [t.dtype for t in tensors]

    inputs = (torch.ones(1), torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64))
    with hs.autocast(policy=MIXED):
        assert many(*inputs) == [BF16, torch.float64, torch.int64]


def test_a_banned_operator_names_itself() -> None:
    with hs.autocast(policy=MIXED), pytest.raises(BannedOperatorError, match="tests::fragile was called with bfloat16"):
        fragile(torch.ones(2, dtype=BF16))


@hs.operator("low", name="tests::containers")
def containers(batch: Batch, pair: Pair, table: OrderedDict[str, Tensor], *, more: list[Tensor]) -> tuple[Any, ...]:
    kinds = (type(batch), type(pair), type(table))
    return kinds, (batch.x.dtype, pair.left.dtype, table["a"].dtype, more[0].dtype), batch.name


OLD = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Dynamo cannot trace a dataclass' __dict__ before torch 2.12"
)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=OLD)])
def test_containers_keep_their_type(compiled: bool) -> None:
    def call(x: Tensor) -> tuple[Any, ...]:
        return containers(Batch(x), Pair(x, x), OrderedDict(a=x), more=[x])

    run = hs.autocast(policy=MIXED)(call)
    found = (torch.compile(run, fullgraph=True, backend="eager") if compiled else run)(torch.ones(2))
    assert found == ((Batch, Pair, OrderedDict), (BF16, BF16, BF16, BF16), "batch")


def test_gradients_leave_in_the_formats_of_the_inputs() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    SEEN.clear()
    with hs.autocast(policy=MIXED):
        out = Scaled.apply(x, w)  # type: ignore[no-untyped-call]  # torch gives apply no types
    assert out.dtype is BF16
    out.float().sum().backward()
    assert SEEN == [(BF16, BF16, torch.float32)]  # every product of the backward pass ran in fp32
    expected = torch.ones(3, 2) @ w.detach().to(BF16).float().t()
    assert x.grad is not None and torch.equal(x.grad, expected.to(BF16).float())


def test_the_newer_form_of_a_function_works_too() -> None:
    x = torch.randn(3, requires_grad=True)
    with hs.autocast(policy=MIXED):
        out = Halve.apply(x)  # type: ignore[no-untyped-call]
    assert out.dtype is BF16
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 0.5))


def test_a_function_is_not_disturbed_by_a_region_around_its_backward_pass() -> None:
    seen: list[torch.dtype] = []

    @hs.operator("fp32", name="tests::quiet")
    class Quiet(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            made = grads[0] @ x.t() + x.t() @ grads[0]
            seen.append(made.dtype)
            return made  # type: ignore[no-any-return]

    x = torch.randn(3, 3, requires_grad=True)
    with hs.autocast(policy=MIXED):
        Quiet.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [torch.float32]


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # Dynamo does it
@pytest.mark.parametrize("policy", [MIXED, MIXED.with_ops(fp32=["tests::*"]), hs.Policy.of("torch", dtype="bf16")])
def test_compiled_is_eager(policy: hs.Policy) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)

    @hs.autocast(policy=policy)
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return energy(Scaled.apply(x, w)), product(x, w)  # type: ignore[no-untyped-call]

    def gradients(run: Callable[..., tuple[Tensor, Tensor]]) -> list[Any]:
        a, b = run(x, w)
        return [a, b, *torch.autograd.grad(a.sum() + b.float().sum(), (x, w))]

    for eager, compiled in zip(
        gradients(step), gradients(torch.compile(step, fullgraph=True, backend="eager")), strict=True
    ):
        assert eager.dtype is compiled.dtype
        torch.testing.assert_close(eager, compiled, atol=0.02, rtol=0.02)


def test_emulated_fp16_takes_fp16_computes_in_fp32_and_rounds_once() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16", emulate="always")):
        found = product(a, b)
    assert torch.equal(found, (a.to(FP16).float() @ b.to(FP16).float()).to(FP16))


def test_a_library_operator_gets_its_rule_wherever_it_is_called() -> None:
    @hs.operator("low")
    @torch.library.custom_op("halfstep_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    x = torch.ones(2)
    with hs.autocast(policy=MIXED):
        assert twice(x).dtype is torch.ops.halfstep_tests.twice(x).dtype is BF16
    with torch.autocast("cpu", dtype=FP16):
        assert twice(x).dtype is FP16
    assert twice(x).dtype is torch.float32
    assert formats(MIXED.with_ops(fp32=["halfstep_tests::*"]), twice, x.to(BF16)) is torch.float32
    run = hs.autocast(policy=MIXED)(lambda x: twice(x))
    assert torch.compile(run, fullgraph=True, backend="aot_eager")(x).dtype is BF16


def test_plans_explanations_and_differences_know_it() -> None:
    class Net(nn.Module):
        pass

    plan = dict(hs.resolve(MIXED, Net()).operators)
    assert (plan["tests::energy"].rule, plan["tests::energy"].origin) == ("fp32", "operator")
    assert (
        "@hs.operator('fp32') at" in plan["tests::energy"].reason and "test_custom.py" in plan["tests::energy"].reason
    )
    changed = MIXED.with_ops(low=["tests::*"])
    assert dict(hs.resolve(changed, Net()).operators)["tests::energy"].reason == "ops: 'tests::*' = 'low'"
    assert "tests::energy: fp32, decided by @hs.operator" in MIXED.explain("tests::energy")
    assert "fp32 -> low: tests::energy" in MIXED.diff(changed)
    with pytest.raises(
        PolicyError, match="no custom operator 'tests::energi' is registered; did you mean 'tests::energy'"
    ):
        MIXED.explain("tests::energi")


def test_a_policy_may_speak_of_an_operator_that_is_not_there_yet() -> None:
    policy = MIXED.with_ops(fp32=["later::attention"])
    assert hs.Policy.from_toml(policy.to_toml()) == policy
    notes = hs.resolve(policy, nn.Linear(1, 1)).notes
    assert any("no operator 'later::attention' is registered (yet)" in note for note in notes)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hs.operator("fp16"), "rule must be one of 'low', 'fp32'.* and is 'fp16'"),
        (lambda: hs.operator("lwo"), "did you mean 'low'"),
        (lambda: hs.operator("low", backward="hi"), "backward must be one of '', 'low'.* and is 'hi'"),
        (lambda: hs.operator("low", name="plain"), r"name='plain'\): a custom operator is called 'namespace::name'"),
        (lambda: hs.operator("low", backward="fp32")(len), "write a torch.autograd.Function"),
        (
            lambda: hs.operator("low", name="tests::energy")(len),
            "'tests::energy' .* is already registered from .*test_cus",
        ),
        (lambda: hs.operator("low", name="tests::number")(3), "gives a function its rule and got 3"),  # type: ignore[type-var]
        (lambda: MIXED.with_ops(low=["tests::*x"]), r"'tests::\*x': for custom operators only a last \* is a wildcard"),
    ],
)
def test_errors_name_value_and_remedy(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        make()


def test_torchs_queries_return_the_state_of_the_region() -> None:
    def asked() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    fp16 = hs.Policy.of("mixed", dtype="fp16")
    with hs.autocast(policy=MIXED):
        assert asked() == (True, BF16)
        with hs.autocast(policy=fp16):
            assert asked() == (True, FP16)
        with hs.autocast(policy="O0"):
            assert not asked()[0]
        assert asked() == (True, BF16)
    assert not asked()[0]
    answers: list[tuple[bool, torch.dtype]] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            answers.append(asked())
            return x

    model = nn.Sequential(Asks(), nn.Linear(2, 2))
    hs.prepare(model, policy=fp16.with_modules({"class:Asks": "fp32"}))(torch.ones(1, 2))
    hs.prepare(Asks(), policy=fp16)(torch.ones(1, 2))
    assert [on for on, _ in answers] == [False, True]
    assert answers[1][1] is FP16
