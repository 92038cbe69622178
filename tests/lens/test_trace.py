"""Which operator, where: producers are named, propagators and deliberate infinities are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.lens.box.replay import Trace
from halfstep.lens.calls import extremes, in_float64
from tests.lens.broken import batch, classify, explained, here, transformer


def mark(text: str) -> str:
    """Return the part of a verdict's line that is the source."""
    return text.partition(" ")[2]


def add_twice(m: nn.Module, h: Tensor) -> Tensor:
    large = h * 0 + 60000.0
    return large + large


def zero_division(m: nn.Module, h: Tensor) -> Tensor:
    return h / (h * 0)


def log_of_zero(m: nn.Module, h: Tensor) -> Tensor:
    return torch.log(h * 0)


def root_of_minus_one(m: nn.Module, h: Tensor) -> Tensor:
    return torch.sqrt(h * 0 - 1)


def exp_of_hundred(m: nn.Module, h: Tensor) -> Tensor:
    return torch.exp(h * 0 + 100.0)


def in_place(m: nn.Module, h: Tensor) -> Tensor:
    large = h.half() * 0 + 60000
    large.mul_(2)
    return large


def augmented(m: nn.Module, h: Tensor) -> Tensor:
    large = h.half() * 0 + 60000
    large += large
    return large


def row_masked_out(m: nn.Module, h: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    return torch.softmax((h @ h.t()).masked_fill(mask, -math.inf), -1) @ h


FORWARD = [
    (add_twice, "O2", "add", "overflow"),
    (zero_division, "mixed", "div", "invalid"),
    (log_of_zero, "mixed", "log", "invalid"),
    (root_of_minus_one, "mixed", "sqrt", "invalid"),
    (exp_of_hundred, "mixed", "exp", "overflow"),
    (in_place, "mixed", "mul", "overflow"),
    (augmented, "mixed", "add", "overflow"),
    (row_masked_out, "mixed", "softmax", "invalid"),
]


@pytest.mark.parametrize(("after", "policy", "op", "kind"), FORWARD)
def test_the_first_bad_operator_of_the_forward_pass_is_named(after: Any, policy: str, op: str, kind: str) -> None:
    verdict = explained(after, policy=policy)
    assert (verdict.op, verdict.kind, verdict.phase, verdict.module) == (op, kind, "forward", "")
    assert verdict.line.startswith("test_trace.py:")


def root_of_zero(m: nn.Module, h: Tensor) -> Tensor:
    return torch.sqrt(h * 0)


def log_behind_where(m: nn.Module, h: Tensor) -> Tensor:
    zero = h * 0
    return torch.where(zero > 0, torch.log(zero), zero)


@pytest.mark.parametrize(("after", "op"), [(root_of_zero, "sqrt"), (log_behind_where, "log")])
def test_a_gradient_that_is_none_is_put_down_to_its_operator(after: Any, op: str) -> None:
    verdict = explained(after)
    assert (verdict.op, verdict.kind, verdict.phase) == (op, "invalid", "backward")
    assert f"torch.{op}(" in mark(verdict.line)
    assert any("enter" in note for note in verdict.notes)


@pytest.mark.parametrize("policy", ["mixed", "O1", "O2", "pure", "torch"])
def test_attention_logits_that_overflow_are_found_under_every_policy(policy: str) -> None:
    model = transformer()
    step = hs.TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), classify, policy=hs.Policy.of(policy, dtype="fp16")
    )
    assert step(*batch()).host().skipped
    verdict = step.explain()
    assert (verdict.kind, verdict.op, verdict.module, verdict.phase) == ("overflow", "matmul", "blocks.1", "forward")
    assert verdict.line == here("logits")
    assert verdict.limit == 65504 and 100 < verdict.value < 65504


class Blows(torch.autograd.Function):
    """Its backward pass overflows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        large = grads[0] * 1e30
        return large * 1e30  # type: ignore[no-any-return]


def test_a_custom_function_is_located_inside_its_backward() -> None:
    verdict = explained(lambda m, h: Blows.apply(h))  # type: ignore[no-untyped-call]
    assert (verdict.op, verdict.phase) == ("mul", "backward") and "1e30" in verdict.line


def test_a_custom_function_is_put_down_to_the_module_that_applied_it() -> None:
    """Its node has the name of its forward; the linear after it does not show where it was applied."""
    verdict = explained(lambda m, h: m.part(Blows.apply(h)), part=nn.Linear(8, 8))  # type: ignore[no-untyped-call]
    assert (verdict.op, verdict.module, verdict.phase) == ("mul", "", "backward")


def at_the_end(m: nn.Module, h: Tensor) -> Tensor:
    return torch.acos(torch.ones_like(h) + h - h.detach())


def a_root_as_a_power(m: nn.Module, h: Tensor) -> Tensor:
    return torch.pow(h - h.detach(), 0.5)


def under_vmap(m: nn.Module, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row / (row * 0))(h)  # type: ignore[no-any-return]


def an_eps_that_fp16_loses(m: nn.Module, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.normalize(h.half() * 0, eps=1e-12).float()


def a_root_of_what_is_too_large(m: nn.Module, h: Tensor) -> Tensor:
    return torch.exp(h.float() * 0 + 100).pow(0.5) * h


@pytest.mark.parametrize(
    ("after", "op", "phase", "kind"),
    [
        (at_the_end, "acos", "backward", "invalid"),
        (a_root_as_a_power, "pow", "backward", "invalid"),
        (under_vmap, "div", "forward", "invalid"),
        (an_eps_that_fp16_loses, "normalize", "forward", "invalid"),
        (a_root_of_what_is_too_large, "exp", "forward", "overflow"),
    ],
)
def test_a_pole_is_told_from_an_overflow_by_what_float64_makes_of_it(
    after: Any, op: str, phase: str, kind: str
) -> None:
    verdict = explained(after)
    assert (verdict.op, verdict.phase, verdict.kind) == (op, phase, kind)


def test_a_module_called_twice_is_named_with_the_number_of_the_call() -> None:
    def twice(m: Any, h: Tensor) -> Tensor:
        return m.part(m.part(h * 0 + 1) * 10)  # type: ignore[no-any-return]

    part = nn.Linear(8, 8)
    with torch.no_grad():
        part.weight.fill_(40.0)
    verdict = explained(twice, part=part)
    assert verdict.module == "part" and verdict.op == "linear"
    assert any("call 2" in note for note in verdict.notes)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_are_located(reentrant: bool) -> None:
    class Part(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return torch.exp(h.float() * 0 + 100.0)

    verdict = explained(lambda m, h: checkpoint(m.part, h, use_reentrant=reentrant), part=Part())
    assert (verdict.op, verdict.module, verdict.phase) == ("exp", "part", "forward")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_inside_checkpoints_are_located(reentrant: bool) -> None:
    class Part(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return torch.sqrt(h.float() * 0)

    verdict = explained(lambda m, h: checkpoint(m.part, h, use_reentrant=reentrant), part=Part())
    assert (verdict.op, verdict.module, verdict.phase) == ("sqrt", "part", "backward")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_seen(kind: Any) -> None:
    def after(m: Any, h: Tensor) -> Tensor:
        out: Tensor = m.cell(h[None])[0][0]
        return torch.log(out * 0)

    assert explained(after, cell=kind(8, 8)).op == "log"


def test_a_loss_that_contains_a_gradient_is_seen_through() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        loss: Tensor = (gradient * 0).norm().sqrt() + model(x).float().mean()
        return loss

    verdict = explained(lambda m, h: h, loss_fn=penalty)
    assert verdict.op in {"sqrt", "norm"} and verdict.phase == "backward"


def test_a_bad_batch_a_bad_weight_and_a_bad_buffer_are_told_apart() -> None:
    x = torch.randn(4, 8)
    x[2, 3] = math.nan
    bad_batch = explained(lambda m, h: h, x=x)
    assert (bad_batch.kind, bad_batch.parameter, bad_batch.module) == ("bad_batch", "input 0", "enter")

    def spoil(model: Any) -> None:
        model.enter.weight.data[0, 0] = math.inf

    bad_weight = explained(lambda m, h: h, change=spoil)
    assert (bad_weight.kind, bad_weight.parameter) == ("bad_state", "enter.weight")

    def spoil_buffer(model: Any) -> None:
        model.norm.running_mean.fill_(math.nan)
        model.norm.eval()

    bad_buffer = explained(lambda m, h: m.norm(h), change=spoil_buffer, norm=nn.BatchNorm1d(8))
    assert (bad_buffer.kind, bad_buffer.parameter) == ("bad_state", "norm.running_mean")


def test_label_weights_that_are_not_finite_are_called_what_they_are() -> None:
    weights = torch.ones(8)
    weights[3] = math.nan

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), torch.arange(4), weight=weights)

    verdict = explained(lambda m, h: h, loss_fn=loss_fn)
    assert (verdict.kind, verdict.op) == ("bad_state", "cross_entropy")


def test_masks_are_not_accused_of_what_happens_later() -> None:
    def after(m: nn.Module, h: Tensor) -> Tensor:
        mask = torch.full((4, 4), -math.inf).triu(1)
        weights = torch.softmax(h @ h.t() + mask, -1)
        logs = torch.where(weights > 0, torch.log(weights), 0.0)  # log(0) is dropped
        return (logs.detach() @ h.float()) / (h.float() * 0)

    verdict = explained(after)
    assert verdict.op == "div"


def test_healthy_infinities_leave_no_source_in_the_loss() -> None:
    model = transformer(1.0)
    trace = Trace(model)
    with trace.watching():
        loss = classify(model, *batch())
        torch.autograd.grad(loss, list(model.parameters()))
    assert extremes(loss)[1]
    assert trace.origins.order > 0 and not trace.origins.sources


class Names(TorchFunctionMode):
    """Notes the names of the functions that pass it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_values_are_read_without_passing_a_mode() -> None:
    with Names() as below, Trace(nn.Module()).watching():
        torch.ones(3).exp()
    assert "exp" in below.names and "aminmax" not in below.names


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_computed_again_in_float64_draws_no_random_numbers_of_the_step(device: str) -> None:
    x = torch.ones(100, device=device)
    torch.manual_seed(0)
    wanted = F.dropout(x)
    torch.manual_seed(0)
    assert in_float64(F.dropout, (x,), {}).dtype is torch.float64
    assert torch.equal(F.dropout(x), wanted)


def test_extremes_of_every_kind_of_tensor() -> None:
    assert extremes(torch.tensor([1.0, -3.0])) == (3.0, True, False)
    assert extremes(torch.tensor([1.0, math.inf])) == (1.0, False, False)
    assert extremes(torch.tensor([math.nan, -2.0])) == (2.0, False, True)
    assert extremes(torch.tensor([3 + 4j])) == (4.0, True, False)
    assert extremes(torch.tensor([1, 2])) == (0.0, True, False)
    assert extremes(torch.empty(0)) == (0.0, True, False)
    assert extremes(torch.tensor([1.0, math.inf]).to_sparse())[1] is False
    assert extremes(torch.tensor([448.0]).to(torch.float8_e4m3fn)) == (448.0, True, False)


def test_watching_ends_with_an_exception_and_leaves_nothing_behind() -> None:
    model = transformer()
    trace = Trace(model)
    with pytest.raises(RuntimeError, match="stop"), trace.watching():
        raise RuntimeError("stop")
    count = trace.origins.order
    classify(model, *batch())
    assert trace.origins.order == count
