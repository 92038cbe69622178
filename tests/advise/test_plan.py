"""Plan: what is planned is what a step on this CPU allocates; parts, modules and formats are right; errors help."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from benchmarks.count import small_resnet18
from benchmarks.counts import allocations
from benchmarks.plan import PEAK, PERSISTENT, POLICIES, Case, adamw, momentum, policy_of, scores_loss, trained, words
from halfstep.advise.plan import PARTS, PHASES, MemoryPlan, PlanError, plan_each
from halfstep.advise.plan.ledger import fake_ranks
from halfstep.tasks.gpt import GPT
from halfstep.tasks.images import LeNet5


def gpt() -> nn.Module:
    return GPT(vocabulary=64, width=32, layers=2, heads=2, length=32)


def resnet() -> nn.Module:
    return small_resnet18(width=16, classes=10)


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 16, 16), torch.randint(10, (4,))


def digits() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 1, 32, 32), torch.randint(10, (64,))


WORDS = Case(model=gpt, batch=lambda: words(4, 32, 64), loss_fn=scores_loss, optimizer=adamw)
DIGITS = Case(model=LeNet5, batch=digits, loss_fn=scores_loss, optimizer=adamw)
PICTURES = Case(model=resnet, batch=pictures, loss_fn=scores_loss, optimizer=momentum)


def planned(case: Case, policy: str) -> MemoryPlan:
    return hs.plan(case.model, case.batch(), case.loss_fn, case.optimizer, policy=policy_of(policy), **case.options)


@cache
def plan_of_words(policy: str) -> MemoryPlan:
    return planned(WORDS, policy)


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        (WORDS, "mixed"),
        (DIGITS, "fp32"),  # kernels of convolutions take a seventh of its peak
        *(pytest.param(*both, marks=pytest.mark.hours) for both in product((WORDS, DIGITS, PICTURES), POLICIES)),
    ],
)
def test_planned_bytes_are_those_a_step_allocates_here(case: Case, policy: str) -> None:
    trained(case, policy_of(policy))
    persistent, peak = allocations(lambda: trained(case, policy_of(policy)))
    plan = plan_of_words(policy) if case is WORDS else planned(case, policy)
    assert plan.persistent_bytes == pytest.approx(persistent, rel=PERSISTENT)
    assert plan.peak_bytes == pytest.approx(peak, rel=PEAK)


def test_a_tensor_that_the_model_keeps_is_in_the_plan() -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(64, 10), [torch.zeros(0)]

        def forward(self, x: Tensor) -> Tensor:
            self.kept = [x.repeat(100, 1) for _ in range(3)]
            return self.layer(x)  # type: ignore[no-any-return]

    batch = torch.randn(8, 64), torch.randint(10, (8,))
    plain = hs.plan(lambda: nn.Linear(64, 10), batch, scores_loss, adamw)
    keeps = hs.plan(Keeper, batch, scores_loss, adamw)
    assert keeps.persistent_bytes - plain.persistent_bytes == 3 * 800 * 64 * 4
    assert keeps.by_part(peak=False)["temporaries"] > 3 * 800 * 64 * 4


def test_parts_are_what_a_policy_states() -> None:
    count = sum(p.numel() for p in gpt().parameters())
    pure, lean, fp32 = (plan_of_words(policy).by_part(peak=False) for policy in ("pure", "lean", "fp32"))
    steps = 4 * len(list(gpt().parameters()))
    assert fp32["parameters"] == 4 * count and fp32["optimizer state"] == 8 * count + steps
    assert pure["parameters"] == pure["precise values"] == 2 * count
    assert pure["optimizer state"] == 8 * count + steps
    assert lean["parameters"] == 2 * count and lean["optimizer state"] == 4 * count + steps
    assert "precise values" not in fp32 and sum(v for k, v in lean.items() if k == "precise values") < 64


def test_rows_sum_to_totals_by_part_module_and_format() -> None:
    plan = plan_of_words("mixed")
    for peak in (True, False):
        total = plan.peak_bytes if peak else plan.persistent_bytes
        assert sum(plan.by_part(peak=peak).values()) == total
        assert sum(plan.by_format(peak=peak).values()) == total
        assert sum(plan.by_module(2, peak=peak).values()) == total
    assert max(m.total for m in plan.timeline) in (plan.peak_bytes, max(plan.phase_peaks().values()))
    phases = [m.phase for m in plan.timeline]
    assert phases == sorted(phases, key=PHASES.index) and set(phases) == set(PHASES)
    owners = {name for name in plan.by_module(2, peak=False) if name}
    assert {"blocks.0", "blocks.1", "tokens", "head", "norm"} <= owners


def test_gradients_take_as_much_as_fp32_parameters_when_the_update_begins() -> None:
    plan = plan_of_words("fp32")
    assert most_gradients(plan) == plan.by_part()["parameters"]


def most_gradients(plan: MemoryPlan) -> int:
    return max(m.bytes[PARTS.index("gradients")] for m in plan.timeline)


def test_activations_are_saved_until_their_backward_and_checkpointing_saves_fewer() -> None:
    class Checkpointed(GPT):
        def features(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.norm(x)  # type: ignore[no-any-return]

    def deep(kind: type[GPT]) -> Callable[[], nn.Module]:
        return lambda: kind(vocabulary=64, width=32, layers=4, heads=2, length=64)

    batch = words(4, 64, 64)
    plain, fewer = (hs.plan(deep(kind), batch, scores_loss, adamw) for kind in (GPT, Checkpointed))
    assert fewer.persistent_bytes == plain.persistent_bytes
    assert fewer.by_part()["saved for backward"] < 0.5 * plain.by_part()["saved for backward"]
    assert fewer.peak_bytes < 0.8 * plain.peak_bytes


def test_updates_in_the_backward_pass_need_no_memory_for_all_gradients() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))

    batch = torch.randn(4, 512), torch.randint(512, (4,))
    early, late = (hs.plan(wide, batch, scores_loss, adamw, policy="O0", update_in_backward=on) for on in (True, False))
    assert most_gradients(early) < 0.5 * most_gradients(late)
    assert early.peak_bytes < late.peak_bytes


def test_a_task_and_a_model_that_exists_are_planned_alike_and_unchanged() -> None:
    model = gpt()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    batch = words(4, 32, 64)
    one = hs.plan(model, batch, scores_loss, adamw)
    task = hs.Task(
        name="words", model=gpt, batches=lambda seed, step: batch, loss_fn=scores_loss, optimizer=adamw, clip_norm=None
    )
    other = hs.plan(task)
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == before
    assert (one.peak_bytes, one.persistent_bytes) == (other.peak_bytes, other.persistent_bytes)
    assert hs.prepared_policy(model) is None and other.name == "words"


def test_a_plan_is_a_value_and_a_record_of_plain_values() -> None:
    plan = plan_of_words("mixed")
    names = {**vars(hs.advise.plan), "Policy": hs.Policy, "ScaleRule": hs.ScaleRule}
    assert eval(repr(plan), names) == plan and hash(plan) == hash(eval(repr(plan), names))
    record = json.loads(json.dumps(plan.record()))
    assert record["summary"]["peak_bytes"] == plan.peak_bytes == sum(row["bytes"] for row in record["peak"])
    assert hs.Policy.from_toml(record["policy"]) == plan.policy


class Net(nn.Module):
    """A linear layer, and something done to what it returns."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(8, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x), x)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_values_that_follow_from_the_batch_are_known() -> None:
    x = torch.arange(32).view(4, 8)

    def then(y: Tensor, x: Tensor) -> Tensor:
        positions = torch.arange(4)
        rows = positions[x.sum(1) > 50]  # rows 1 to 3
        assert rows.tolist() == [1, 2, 3] and int(x.max()) == 31 and bool((positions[1:] > 0).all())
        copied = torch.zeros_like(x)
        copied[:, 1:] = x[:, :-1]
        assert int(copied.sum()) == int(x[:, :-1].sum())
        return y[x[:, 0] > 10]

    def floats(model: nn.Module, x: Tensor) -> Tensor:
        return model.then(model.layer(x.float()), x).square().mean()  # type: ignore[no-any-return, operator]

    plan = hs.plan(lambda: Net(then), (x,), floats, adamw, policy="O0")
    assert plan.peak_bytes > plan.persistent_bytes


def test_an_optimizer_in_the_place_of_a_function_is_an_error_with_the_function() -> None:
    made: Any = adamw(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"write def optimizer\(model\): return AdamW\(model.parameters\(\), \.\.\.\)"):
        hs.plan(nn.Linear(2, 2), (torch.randn(4, 2),), lambda model, x: model(x).sum(), made)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda y, x: y if y.sum() > 0 else -y, r"reads a value that depends on weights .*\(test_plan.py:\d+ .*y\.sum"),
        (lambda y, x: y[y[:, 0] > 0], r"the result of aten::index needs values .*\(test_plan.py:\d+ "),
        (lambda y, x: y[torch.rand(4) > 0.5], r"the result of aten::index needs values"),
        (lambda y, x: x[:, :4] + y.detach().nonzero(), r"the result of aten::nonzero needs values"),
        (lambda y, x: x @ y, r"the planned step raises RuntimeError: .*\(test_plan.py:\d+ "),
    ],
)  # fmt: skip
def test_what_needs_values_is_an_error_with_its_line(then: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        hs.plan(lambda: Net(then), (torch.randn(4, 8),), loss_of, adamw)


def test_an_overwritten_value_is_unknown() -> None:
    def then(y: Tensor, x: Tensor) -> Tensor:
        known = torch.arange(4)
        part = known[1:]
        part.copy_(y[0, :3].long())
        return y[: int(known.sum())]

    with pytest.raises(PlanError, match="reads a value that depends on weights"):
        hs.plan(lambda: Net(then), (torch.randn(4, 8),), loss_of, adamw)


BATCH = (torch.randn(4, 8),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3,), "expected an hs.Task, its name, a model or a function"),
        ((gpt,), "a plan of a model also needs batch=, loss_fn=, optimizer="),
        ((lambda: 3, BATCH, loss_of, adamw), "must return a torch.nn.Module and returned 3"),
        ((gpt, BATCH, loss_of, adamw, {"device": "tpu"}), "device must be one of 'cpu', 'cuda' and is 'tpu'"),
        ((gpt, BATCH, loss_of, adamw, {"cuda_graph": True}), "a plan does not take cuda_graph="),
        ((gpt, BATCH, loss_of, adamw, {"nonsense": 1}), "unexpected keyword argument 'nonsense'"),
        ((gpt, BATCH, loss_of, adamw, {"accumulate": 0}), "accumulate"),
        (("nix",), "unknown task 'nix'"),
    ],
)
def test_wrong_arguments_name_what_was_expected(given: tuple[Any, ...], message: str) -> None:
    *places, options = given if isinstance(given[-1], dict) else (*given, {})
    with pytest.raises(hs.HalfstepError, match=message):
        hs.plan(*places, **options)


def test_several_optimizers_have_their_states_in_the_plan() -> None:
    def both(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[0].parameters(), momentum=0.9), torch.optim.AdamW(model[1].parameters())]

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))

    plan = hs.plan(net, (torch.randn(4, 8), torch.randint(4, (4,))), scores_loss, both, policy="O0")
    assert plan.by_part(peak=False)["optimizer state"] == 4 * 8 * 16 + 8 * 16 * 4 + 4
    assert plan.by_module(peak=False)["0"] == 2 * 4 * 8 * 16


def test_what_a_plan_assumes_is_printed() -> None:
    plan = hs.plan(lambda: nn.Linear(8, 4), BATCH, loss_of, adamw, compile=True)
    assert "\n- planned as eager code: what torch.compile fuses" in str(plan)


def test_parameters_that_are_shared_already_are_refused() -> None:
    def parallel() -> nn.Module:
        layer = nn.Linear(8, 4)
        layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]))
        return layer

    with fake_ranks(2, "cpu") as mesh:
        layer = parallel()
        with pytest.raises(PlanError, match="'weight' is a DTensor: tensor parallelism, fully_shard and HSDP"):
            hs.plan(layer, BATCH, loss_of, adamw)


def test_several_plans_keep_their_order_and_their_errors() -> None:
    batch = torch.randn(2, 8), torch.randint(4, (2,))
    good = {"what": lambda: nn.Linear(8, 4), "batch": batch, "loss_fn": scores_loss, "optimizer": adamw}
    first, second, third = plan_each([good, {"what": "nix"}, {**good, "policy": "pure"}])
    assert isinstance(first, MemoryPlan) and isinstance(third, MemoryPlan) and isinstance(second, hs.HalfstepError)
    assert third.policy.params == "low"


def test_nothing_is_left_behind() -> None:
    threads = torch.autograd.is_multithreading_enabled()
    with pytest.raises(PlanError):
        hs.plan(lambda: Net(lambda y, x: y if y.sum() > 0 else -y), BATCH, loss_of, adamw)
    assert torch.autograd.is_multithreading_enabled() == threads
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks
    assert type(torch.empty(2)) is Tensor
    net = nn.Linear(8, 4)
    F.mse_loss(net(torch.randn(2, 8)), torch.zeros(2, 4)).backward()


@pytest.mark.hours
@pytest.mark.parametrize("device", ["cuda"])
def test_a_plan_for_a_gpu_comes_from_another_process(device: str) -> None:
    plan = hs.plan("gpt", policy="pure", device=device)
    assert plan.device == device and all(row.bytes % 512 == 0 for row in plan.peak)
