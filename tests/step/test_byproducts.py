"""`(loss, aux)`: any tree comes back in its type and without its graph; a second loss is refused; evaluation."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import HalfstepError, StepError

POLICIES = [hs.Policy.of(name, dtype=dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")]
NAMES = [f"{policy.name} {policy.dtype}" for policy in POLICIES]


class Pair(NamedTuple):
    """A named tuple of by-products."""

    out: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class Record:
    """A dataclass of by-products."""

    out: Tensor
    note: str


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)


def make_step(loss_fn: Callable[..., Any], **options: Any) -> hs.TrainStep:
    model = make_model()
    return hs.TrainStep(model, adam(model), loss_fn, **options)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# ---------------------------------------------------------------------- trees


@pytest.mark.parametrize(
    "tree",
    [
        lambda out: out,
        lambda out: [out, out.argmax(1)],
        lambda out: {"out": out, "nested": ({"deep": out},)},
        lambda out: Pair(out, out.mean()),
        lambda out: Record(out, "kept"),
    ],
    ids=["tensor", "list", "dict", "named tuple", "dataclass"],
)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"retry": True}], ids=["one", "window", "retry"])
def test_any_tree_comes_back_in_its_type_without_a_graph(tree: Callable[[Tensor], Any], options: Any) -> None:
    made: list[Any] = []

    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        made.append(tree(out))
        return F.cross_entropy(out, y), made[-1]

    aux = make_step(both, policy=POLICIES[1], **options)(*make_batch()).aux
    assert type(aux) is type(made[-1])
    got, wanted = hs.trees.tensors(aux), hs.trees.tensors(made[-1])
    assert got and all(not tensor.requires_grad for tensor in got)
    assert all(torch.equal(one, other) and one.dtype is other.dtype for one, other in zip(got, wanted, strict=True))
    assert not isinstance(aux, Record) or aux.note == "kept"


def test_the_output_of_a_hugging_face_model_comes_back_as_one() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        logits = model(x)
        out = outputs.SequenceClassifierOutput(loss=F.cross_entropy(logits, y), logits=logits)
        return out.loss, out

    aux = make_step(both)(*make_batch()).aux
    assert type(aux) is outputs.SequenceClassifierOutput and list(aux) == ["loss", "logits"]
    assert not aux.logits.requires_grad and not aux["loss"].requires_grad and aux.logits is aux["logits"]


def test_what_is_no_container_and_what_has_no_gradient_is_returned_itself() -> None:
    made: list[Any] = []

    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        made.append({"right": (out.argmax(1) == y).sum(), "text": "a", "other": object()})
        return F.cross_entropy(out, y), made[-1]

    assert make_step(both)(*make_batch()).aux is made[-1]


def test_by_products_that_are_kept_keep_no_graph_alive() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        hidden = model.get_submodule("0")(x)
        seen.append(weakref.ref(hidden))
        out = model(x) + hidden.sum() * 0
        return F.cross_entropy(out, y), out

    kept = [make_step(both, blackbox=False)(*make_batch()).aux for _ in range(3)]
    gc.collect()
    assert len(kept) == 3 and all(ref() is None for ref in seen)


class Reader(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.lstm(x, hidden)
        return self.head(out), hidden


def read(model: nn.Module, x: Tensor, y: Tensor, hidden: Any) -> tuple[Tensor, Any]:
    out, hidden = model(x, hidden)
    return F.cross_entropy(out.flatten(0, 1), y.flatten()), hidden


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
@pytest.mark.parametrize("way", ["eager", "retry", "accumulate"])
def test_a_hidden_state_is_carried_as_if_detached_by_hand(policy: hs.Policy, way: str) -> None:
    """The losses are those of a loop that detaches it, bit for bit; without that torch refuses the second batch."""
    ways: dict[str, dict[str, Any]] = {"eager": {}, "retry": {"retry": True}, "accumulate": {"accumulate": 2}}
    x, y = torch.randn(6, 5, 3, 4), torch.randint(0, 2, (6, 5, 3))

    def losses(*, by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Reader()

        def detaching(model: nn.Module, *batch: Any) -> tuple[Tensor, Any]:
            loss, hidden = read(model, *batch)
            return loss, tuple(part.detach() for part in hidden)

        step = hs.TrainStep(model, adam(model), detaching if by_hand else read, policy=policy, **ways[way])
        hidden, found = None, []
        for one, other in zip(x, y, strict=True):
            result = step(one, other, hidden)
            hidden = result.aux
            found.append(result.loss)
        return found

    assert all(torch.equal(one, other) for one, other in zip(losses(by_hand=False), losses(by_hand=True), strict=True))


def test_a_compiled_step_detaches_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        out = model(x)
        return F.cross_entropy(out, y), {"out": out}

    step = hs.TrainStep(model, adam(model), both, compile={"backend": "aot_eager"})
    assert not step(*make_batch()).aux["out"].requires_grad
    assert torch.equal(step.evaluate(*make_batch())[0], step(*make_batch()).loss)
    torch._dynamo.reset()


def test_a_hidden_state_that_is_not_finite_is_named_as_the_cause() -> None:
    torch.manual_seed(0)
    model = Reader()
    step = hs.TrainStep(model, adam(model), read)
    x, y = torch.randn(5, 3, 4), torch.randint(0, 2, (5, 3))
    bad = step(x * float("nan"), y, None)
    again = step(x, y, bad.aux)
    assert bad.host().skipped and again.host().skipped
    verdict = step.explain()
    assert verdict.kind == "bad_batch" and verdict.parameter in {"input 2", "input 3"}  # tensors after x and y
    assert not step(x, y, None).host().skipped


# ---------------------------------------------------------------------- a second loss, and other shapes


def test_a_second_loss_is_refused_and_a_part_of_the_loss_is_not() -> None:
    x, y = make_batch()

    def two(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(model(x), y), model(x).square().mean()

    def part(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one, other = two(model, x, y)
        return one + other, other

    def whole(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_fn(model, x, y)
        return loss, loss

    step = make_step(two)
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(StepError, match=r"two scalars with a gradient.*\(a \+ b, \(a, b\)\)"):
        step(x, y)
    assert all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())
    assert float(make_step(part)(x, y).aux) > 0
    result = make_step(whole)(x, y)
    assert torch.equal(result.aux, result.loss)
    leaf = nn.Parameter(torch.tensor(2.0))
    assert float(make_step(lambda model, x, y: (loss_fn(model, x, y) * leaf, leaf))(x, y).aux) == 2.0
    with pytest.raises(StepError, match="two scalars"):
        make_step(lambda model, x, y: (loss_fn(model, x, y), leaf))(x, y)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda loss: (loss, 1, 2), r"tuple of 3; return \(loss, \(\.\.\.\)\)"),
        (lambda loss: [loss, 1], r"list of 2; return \(loss, \(\.\.\.\)\)"),
        (lambda loss: {"loss": loss, "more": 1}, r"dict; return \(out\['loss'\], out\)"),
        (lambda loss: type("Out", (), {"loss": loss})(), r"Out; return \(out\.loss, out\)"),
        (lambda loss: None, r"NoneType; return the loss, or \(loss, what else there is\)"),
    ],
    ids=["three", "list", "dict", "object", "None"],
)
def test_what_is_returned_in_another_shape_is_an_error_with_the_shape_to_return(
    returned: Callable[[Tensor], Any], text: str
) -> None:
    step = make_step(lambda model, x, y: returned(loss_fn(model, x, y)))
    with pytest.raises(StepError, match=text):
        step(*make_batch())


# ---------------------------------------------------------------------- several losses and optimizers


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_sum_of_losses_updates_as_one_backward_pass_each(policy: hs.Policy) -> None:
    """Only the order of additions differs: the sums of gradients are equal to a rounding of the gradients' format."""
    x, y = make_batch()

    def losses(model: nn.Module) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(model(x), y), model(x.neg()).square().mean()

    def summed(model: nn.Module) -> tuple[Tensor, Any]:
        one, other = losses(model)
        return one + other, (one, other)

    model = make_model()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), summed, policy=policy)
    norm = float(step().grad_norm)
    other = make_model()
    other, optimizer, scaler = hs.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), policy=policy)
    for loss in losses(other):
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    by_hand = float(nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None]))
    assert norm == pytest.approx(by_hand, rel=2**-7 if policy.dtype == "bf16" else 2**-9)


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_one_loss_and_two_optimizers_are_prepared_together(policy: hs.Policy) -> None:
    model, (x, y) = make_model(), make_batch()
    optimizers = [torch.optim.Adam(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[4].parameters(), lr=0.1)]
    model, optimizers, scaler = hs.prepare(model, optimizers, policy=policy)
    found = []
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        found.append(float(loss.detach()))
    assert found[-1] < 0.7 * found[0]


def test_of_two_optimizers_after_one_loss_each_is_skipped_by_its_own_gradients() -> None:
    model, (x, y) = make_model(), make_batch()
    optimizers = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 4)]
    model, optimizers, scaler = hs.prepare(model, optimizers, policy=POLICIES[3])
    scaler.scale(loss_fn(model, x, y)).backward()
    model[0].weight.grad.fill_(float("inf"))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [bool(scaler.skipped(optimizer)) for optimizer in optimizers] == [True, False]


# ---------------------------------------------------------------------- windows that stay short


def test_ten_batches_in_windows_of_four_are_three_updates_and_metrics_see_the_last() -> None:
    step = make_step(loss_fn, accumulate=4)
    metrics, (x, y) = step.metrics(every=1), make_batch()
    for _ in range(10):
        step(x, y)
    last = step.flush()
    assert last is not None and last.host().updated
    assert [record.step for record in metrics.poll()] == [4, 8, 10]
    step(x * float("inf"), y)
    assert step.flush() is not None
    assert [(record.step, record.skipped) for record in metrics.poll()] == [(11, 1)]


def generator_and_discriminator(policy: hs.Policy, accumulate: int) -> tuple[hs.TrainStep, hs.TrainStep]:
    """Return two steps, of which the loss of the second runs through the model of the first."""
    torch.manual_seed(0)
    judge, made = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1)), nn.Linear(2, 4)
    tell = hs.TrainStep(judge, adam(judge), lambda m, x: F.softplus(m(x)).mean(), policy=policy, accumulate=accumulate)
    fool = hs.TrainStep(
        made, adam(made), lambda m, z: F.softplus(-judge(m(z))).mean(), policy=policy, accumulate=accumulate
    )
    return tell, fool


@pytest.mark.parametrize("policy", [*POLICIES, hs.Policy.of("O2", grads="fp32")], ids=[*NAMES, "O2, grads fp32"])
def test_a_loss_that_runs_through_the_model_of_an_unfinished_window_is_refused(policy: hs.Policy) -> None:
    xs, zs = torch.randn(2, 8, 4), torch.randn(2, 8, 2)
    tell, fool = generator_and_discriminator(policy, 2)
    tell(xs[0])
    wanted = tell(xs[1]).grad_norm
    tell, fool = generator_and_discriminator(policy, 2)
    tell(xs[0])
    fool(zs[0])
    with pytest.raises(StepError, match=r"gradient of 0\.weight was written to.*begins anew"):
        tell(xs[1])
    tell(xs[0])
    assert torch.equal(tell(xs[1]).grad_norm, wanted)  # one window after the other
    assert fool(zs[1]).updated


@pytest.mark.parametrize("ends", ["a micro-batch", "flush"])
@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (lambda step: step.optimizer.zero_grad(), "dropped"),
        (lambda step: nn.utils.clip_grad_norm_(step.model.parameters(), 1e-3), "written to"),
        (lambda step: F.cross_entropy(step.model(make_batch()[0]), make_batch()[1]).backward(), "written to"),
    ],
    ids=["zero_grad", "clipping", "backward"],
)
def test_what_a_hand_written_loop_did_in_a_window_is_refused(
    kept: Callable[[hs.TrainStep], object], text: str, ends: str
) -> None:
    step, (x, y) = make_step(loss_fn, accumulate=3), make_batch()
    step(x, y)
    kept(step)
    with pytest.raises(StepError, match=text):
        step.flush() if ends == "flush" else step(x, y)
    assert step.flush() is None
    single = make_step(loss_fn)
    for _ in range(2):
        single(x, y)
        kept(single)  # after a whole window it changes nothing


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_looking_at_a_window_is_no_write(policy: hs.Policy) -> None:
    step, (x, y) = make_step(loss_fn, policy=policy, accumulate=3), make_batch()
    for _ in range(2):
        step(x * float("inf"), y)
    step.flush()
    step(x, y)
    assert step.explain().kind == "bad_batch"
    step.evaluate(x, y)
    assert [p.grad is not None for p in step.model.parameters()]
    step(x, y)
    assert step(x, y).updated


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_evaluate_gives_what_the_step_computes_bit_for_bit(policy: hs.Policy) -> None:
    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, weight = model(x), model.get_parameter("4.weight")
        return F.cross_entropy(F.linear(out, weight), y), out  # a weight that is used outside of its module

    model, (x, y) = make_model(), make_batch()
    model[4] = nn.Linear(16, 16)
    model[1].eval()
    step = hs.TrainStep(model, adam(model), both, policy=policy)
    loss, out = step.evaluate(x, y)
    result = step(x, y)
    assert torch.equal(loss, result.loss) and torch.equal(out, result.aux) and out.dtype is result.aux.dtype
    assert not loss.requires_grad and not out.requires_grad


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_plain_no_grad_evaluation_is_the_same_for_a_loss_of_the_model_s_outputs(policy: hs.Policy) -> None:
    step, (x, y) = make_step(loss_fn, policy=policy), make_batch()
    step(x, y)
    step.model.eval()
    with torch.no_grad():
        assert torch.equal(loss_fn(step.model, x, y), step.evaluate(x, y))


def test_evaluate_in_the_middle_of_a_window_changes_nothing() -> None:
    x, y = make_batch()
    runs = []
    for looks in (False, True):
        step = make_step(loss_fn, policy=hs.Policy.of("O2", dtype="fp16"), accumulate=2)
        for _ in range(5):
            step(x, y)
            if looks:
                step.evaluate(x * 2, y=y)
        assert step.flush() is not None
        runs.append(step.state_dict())
    plain, looked = (hs.trees.tensors(run) for run in runs)
    assert len(plain) > 20 and all(torch.equal(one, other) for one, other in zip(plain, looked, strict=True))
    assert runs[0]["step"] == runs[1]["step"] == 5


def test_after_evaluate_each_module_is_in_the_mode_it_was_in() -> None:
    seen: list[bool] = []

    class Merging(nn.Linear):
        """Does more than set a mode, as layers with adapters do."""

        merged = False

        def train(self, mode: bool = True) -> Merging:
            self.merged = not mode
            return super().train(mode)

    def watching(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(any(module.training for module in model.modules()))
        if x.shape[0] == 1:
            raise ValueError("one")
        out: Tensor = model(x).square()
        return out.mean()

    model = nn.Sequential(Merging(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    step = hs.TrainStep(model, adam(model), watching)
    model[1].eval()
    step.evaluate(torch.randn(8, 4))
    with pytest.raises(ValueError, match="one"):
        step.evaluate(torch.randn(1, 4))
    assert seen == [False, False] and [module.training for module in model.modules()] == [True, True, False, True]
    assert not model[0].merged and torch.is_grad_enabled()
    model.eval()
    step.evaluate(torch.randn(8, 4))
    assert not any(module.training for module in model.modules())


def test_evaluate_calls_the_model_inside_of_a_wrapper_so_that_no_rank_waits() -> None:
    seen: list[nn.Module] = []

    def watching(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(model)
        return loss_fn(model, x, y)

    model, (x, y) = make_model(), make_batch()
    hs.prepare(model, policy="mixed")
    step = hs.TrainStep(nn.DataParallel(model), adam(model), watching)
    assert torch.isfinite(step.evaluate(x, y)) and seen == [model]


def test_evaluate_explains_a_float64_batch_as_a_step_does() -> None:
    step, (x, y) = make_step(loss_fn), make_batch()
    with pytest.raises(Exception, match=r"float64.*\.float\(\)"):
        step.evaluate(x.double(), y)


# ---------------------------------------------------------------------- closures


def fit(policy: hs.Policy, optimizer: Callable[[Any], torch.optim.Optimizer], *, scaled: bool) -> list[float]:
    """Fit with a closure; return the first and the last loss."""
    model, (x, y) = make_model(), make_batch()
    model, stepped, scaler = hs.prepare(model, optimizer(model.parameters()), policy=policy)

    def closure() -> Tensor:
        stepped.zero_grad()
        loss = loss_fn(model, x, y)
        loss.backward()
        return loss

    first = float(closure().detach())
    for _ in range(10):
        if scaled:
            scaler.step(stepped, closure=closure)
            scaler.update()
        else:
            stepped.step(closure)  # type: ignore[arg-type]  # torch's annotation is float, its optimizers take tensors
    return [first, float(closure().detach())]


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5)


def unscaled(policy: hs.Policy) -> AbstractContextManager[Any]:
    """Expect the warning that a loop in fp16 does not scale its loss."""
    return pytest.warns(UserWarning, match="loss that was not scaled") if policy.dtype == "fp16" else nullcontext()


@pytest.mark.parametrize("scaled", [False, True], ids=["own", "scaler"])
@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_closure_works_or_is_refused_with_a_remedy(policy: hs.Policy, scaled: bool) -> None:
    if scaled and policy.dtype == "fp16":
        for optimizer in (lbfgs, torch.optim.Adam):
            with pytest.raises(HalfstepError, match="enabled=False"):
                fit(policy, optimizer, scaled=scaled)
        return
    with unscaled(policy):
        first, last = fit(policy, torch.optim.Adam, scaled=scaled)
    assert last < first
    if policy.params == "low":
        with pytest.raises(HalfstepError, match="params='fp32'"):
            fit(policy, lbfgs, scaled=scaled)
    else:
        with unscaled(policy):
            first, last = fit(policy, lbfgs, scaled=scaled)
        assert last < 0.1 * first


def test_a_step_refuses_lbfgs_and_names_the_way_that_works() -> None:
    model = make_model()
    with pytest.raises(StepError, match=r"bf16 or fp32.*params='fp32'.*optimizer\.step\(closure\)"):
        hs.TrainStep(model, lbfgs(model.parameters()), loss_fn)
