"""Audit: what is measured, that nothing is changed, that faults are found with their cause and healthy runs are not."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.errors import AuditError, FormatError
from halfstep.lens.audit.rows import ROLES, AuditRow

BF16, FP16 = hs.Policy.of("mixed", dtype="bf16"), hs.Policy.of("mixed", dtype="fp16")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def data(count: int = 3, factor: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def one() -> tuple[Tensor, Tensor]:
        x = torch.randn(24, 16, generator=generator) * factor
        return x, torch.randint(0, 4, (24,), generator=generator)

    return [one() for _ in range(count)]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr)


def only(audit: hs.lens.Audit, **wanted: Any) -> AuditRow:
    (row,) = audit.filter(**wanted)
    return row


def kinds(audit: hs.lens.Audit) -> set[str]:
    return {finding.kind for finding in audit.findings()}


# ------------------------------------------------------------------ what is measured


def test_each_operator_has_rows_for_what_it_gives_and_what_comes_back_and_for_its_weights() -> None:
    model = mlp()
    audit = hs.audit(model, data(), loss_fn, BF16, adamw(model))
    assert {(r.module, r.op, r.role) for r in audit if not r.op.startswith("AdamW")} == {
        *((m, "linear", role) for m in ("0", "2") for role in ROLES[:4]),
        *((m, op, role) for m, op in (("1", "relu"), ("", "cross_entropy")) for role in ROLES[:2]),
    }
    weight = only(audit, parameter="0.weight", role="weight")
    assert (weight.dtype, weight.numel, weight.bytes, weight.op) == ("float32", 512, 2048, "linear")
    product = only(audit, module="0", role="activation")
    assert (product.dtype, product.calls, product.numel, product.bytes) == ("bfloat16", 3, 24 * 32, 24 * 32 * 2)
    assert product.casts == 3 and product.cast_bytes == 2 * (24 * 16 + 512 + 32)
    assert product.rule == "low" and "products of low numbers have units" in product.reason
    assert product.line.startswith("test_audit.py:") and "model(x)" in product.line
    assert sum(row.time for row in audit) == pytest.approx(1.0)


def test_local_error_is_that_of_the_operator_alone_on_its_own_inputs() -> None:
    model = mlp()
    x, y = data(1)[0]
    audit = hs.audit(model, [(x, y)], loss_fn, BF16)
    first, last = model[0], model[2]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = first(x)
        scores = last(F.relu(hidden))
    with torch.no_grad():
        straight, again, whole = first(x), last(F.relu(hidden).float()), last(F.relu(first(x)))
    for module, wanted, found in (("0", straight, hidden), ("2", again, scores)):
        row = only(audit, module=module, role="activation")
        error = float((found.float() - wanted).norm() / wanted.norm())
        assert row.error == pytest.approx(error, rel=1e-3) and row.worst == pytest.approx(error, rel=1e-3)
    accumulated = float((scores.float() - whole).norm() / whole.norm())
    assert only(audit, module="2", role="activation").accumulated == pytest.approx(accumulated, rel=1e-3)
    assert only(audit, module="1", role="activation").error == 0.0


def test_numbers_in_memory_that_was_used_before_are_not_taken_for_those_before() -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(512, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                third = torch.ones(16, 512) / 3
                freed = [torch.matmul(x, third) for _ in range(64)]  # bf16: off the fp32 run
            places = {tensor.data_ptr() for tensor in freed}
            freed.clear()
            fresh = [torch.zeros(24, 512, dtype=torch.bfloat16) for _ in range(64)]
            given = max(fresh, key=lambda tensor: tensor.data_ptr() in places)
            result: Tensor = self.out(given)
            return result

    torch.manual_seed(0)
    audit = hs.audit(Reusing(), data(1), loss_fn, BF16)
    assert only(audit, op="matmul", role="activation").accumulated > 0
    assert only(audit, module="out", role="activation").given == 0.0


def test_gradient_errors_are_those_of_each_backward_pass_on_the_gradient_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(16, 4, bias=False))
    x, y = data(1)[0]
    audit = hs.audit(model, [(x, y)], loss_fn, hs.Policy.of("torch", dtype="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
    scores.retain_grad()
    loss.backward()
    gradient, found = scores.grad, model.get_parameter("0.weight").grad
    assert gradient is not None and found is not None
    wanted = gradient.float().T @ x
    row = only(audit, role="weight gradient")
    assert row.error == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-2)
    assert row.amax == pytest.approx(float(found.abs().max()), rel=1e-6)
    assert only(audit, module="0", role="activation gradient").amax == pytest.approx(float(gradient.abs().max()))


def test_an_operator_given_one_tensor_twice_has_one_gradient() -> None:
    def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = model(x)
        return F.cross_entropy(hidden * hidden, y)

    row = only(hs.audit(mlp(), data(), squared, BF16), op="mul", role="activation gradient")
    assert 0 < row.error < 0.01


def test_under_fp32_nothing_errs_and_an_fp64_shadow_sees_fp32s_own_rounding() -> None:
    model = mlp()
    audit = hs.audit(model, data(), loss_fn, "O0", adamw(model))
    for row in audit.filter(role="activation"):
        assert (row.error, row.accumulated, row.casts) == (0.0, 0.0, 0)
    deep = hs.audit(model, data(), loss_fn, "O0", shadow="fp64")
    assert all(0 < row.error < 1e-6 for row in deep.filter(op="linear", role="activation"))


@pytest.mark.parametrize("policy", ["mixed", "O2", "torch"])
def test_emulated_fp16_is_seen_as_the_operators_the_user_calls(policy: str) -> None:
    model = mlp()
    audit = hs.audit(model, data(), loss_fn, hs.Policy.of(policy, dtype="fp16"), adamw(model))
    row = only(audit, module="0", op="linear", role="activation")
    assert row.format == "fp16" and 1e-5 < row.error < 2.0**-11
    assert audit.scale == 2.0**16 and only(audit, module="0", op="linear", role="activation gradient").scale == 2.0**16
    assert not audit.findings()


def test_a_simulated_format_counts_as_the_format_of_low_operators() -> None:
    audit = hs.audit(mlp(), data(), loss_fn, hs.Policy.of("mixed", dtype="e5m3"))
    row = only(audit, module="0", op="linear", role="activation")
    assert (row.format, row.dtype) == ("e5m3", "float32") and 0.01 < row.error < 2.0**-4


def test_module_rules_hold_and_are_the_reason_given() -> None:
    policy = BF16.with_modules({"2": "fp32", "0": "low"})
    audit = hs.audit(mlp(), data(), loss_fn, policy)
    kept, low = (only(audit, module=name, op="linear", role="activation") for name in "20")
    assert (kept.format, kept.rule, kept.reason) == ("fp32", "fp32", "modules: '2' = 'fp32'")
    assert (low.format, low.rule) == ("bf16", "low") and low.casts == 3  # seen before its rule casts


def test_parts_of_multi_head_attention_are_seen() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    audit = hs.audit(layer, [(x,)], lambda m, x: m(x).square().mean(), BF16)
    inside = {row.op for row in audit.filter(module="self_attn", role="activation")}
    assert {"linear", "scaled_dot_product_attention"} <= inside and "multi_head_attention_forward" not in inside


def test_dropout_draws_the_same_numbers_in_the_fp32_run_and_in_every_shadow() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    audit = hs.audit(model, data(), loss_fn, BF16)
    row = only(audit, op="dropout", role="activation")
    assert row.error < 0.01 and row.accumulated < 0.01 and only(audit, module="2", role="activation").accumulated < 0.02


def test_shared_modules_are_one_row_whose_calls_are_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.again = self.inner
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.again(self.inner(x)))  # type: ignore[no-any-return]

    audit = hs.audit(Twice(), data(2), loss_fn, BF16)
    row = only(audit, module="inner", op="linear", role="activation")
    assert row.calls == 4 and row.numel == 2 * 24 * 16 and row.accumulated < 0.02
    assert not audit.filter(module="again").rows


# ------------------------------------------------------------------ nothing is changed


@pytest.mark.parametrize("prepared", [False, True])
def test_model_optimizer_and_generators_are_as_before(prepared: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = adamw(model)
        step = hs.TrainStep(model, optimizer, loss_fn, policy=hs.Policy.of("O2", dtype="bf16"))
        for batch in data(2):
            step(*batch)
        if not prepared:
            hs.unprepare(model)
        return model, optimizer

    def losses(audited: bool) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = make()
        if audited:
            before = copy.deepcopy(optimizer.state_dict())
            assert len(hs.audit(model, data(), loss_fn, FP16, optimizer)) > 20
            torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
            assert all(p.grad is None for p in model.parameters())
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        step = hs.TrainStep(model, optimizer, loss_fn, policy=hs.Policy.of("O2", dtype="bf16"))
        return [step(*batch).host().loss for batch in data(3)], model.state_dict()

    plain, seen = losses(False), losses(True)
    assert plain[0] == seen[0]
    assert all(torch.equal(plain[1][name], value) for name, value in seen[1].items())


def test_the_audited_run_is_the_run_that_training_is() -> None:
    """Instruments change no bit: the weights of the audited copy end where a plain run's do."""
    found: list[dict[str, Tensor]] = []

    def spy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return loss_fn(model, x, y)

    model = mlp()
    hs.audit(model, data(4), spy, BF16, adamw(model), steps=4, clip_norm=0.5, reference=False)
    step = hs.TrainStep(model, adamw(model), loss_fn, policy=BF16, clip_norm=0.5)
    for batch, before in zip(data(4), found, strict=True):
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        step(*batch)


@pytest.mark.parametrize("policy", [BF16, FP16, hs.Policy.of("O2", dtype="fp16")], ids=lambda p: f"{p.name} {p.dtype}")
def test_activation_checkpointing_and_shared_casts_are_undisturbed(policy: hs.Policy) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = (layer(x) for layer in self.inner)  # one cast of x for three layers
            return torch.sigmoid(a @ b.T) @ c  # type: ignore[no-any-return]

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.block, self.head = nn.Linear(16, 16), Block(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, self.first(x).float(), use_reentrant=False))  # type: ignore[no-any-return]

    audit = hs.audit(Checkpointed(), data(), loss_fn, policy)
    assert only(audit, module="block.inner.0", op="linear", role="activation").calls == 3
    casts = [only(audit, module=f"block.inner.{i}", op="linear", role="activation").casts for i in range(3)]
    shared = {"O2 fp16": 0, "mixed fp16": 2, "mixed bf16": 3}  # torch.autocast's own cast of x is not shared
    assert casts[1:] == [shared[f"{policy.name} {policy.dtype}"]] * 2
    assert not audit.findings()


def test_without_an_optimizer_weights_stay_and_there_are_no_rows_of_updates() -> None:
    audit = hs.audit(mlp(), data(), loss_fn, BF16)
    assert {row.role for row in audit} == set(ROLES[:4])
    assert only(audit, parameter="0.weight", role="weight").sketch.count == 3 * 512


def test_a_dynamic_scale_comes_down_before_steps_are_looked_at() -> None:
    model = mlp()
    audit = hs.audit(model, data(factor=60.0), lambda m, x, y: 20 * loss_fn(m, x, y), FP16, adamw(model))
    assert audit.skipped > 0 and audit.scale < 2.0**16
    assert all(row.nonfinite == 0 for row in audit) and audit.notes[-1].endswith("rounding)")
    scaler = hs.GradScaler("cpu", init_scale=2.0**4)
    audit = hs.audit(model, data(), loss_fn, FP16, adamw(model), scaler=scaler)
    assert audit.scale == 16.0 and scaler.get_scale() == 16.0


# ------------------------------------------------------------------ faults


class Sigmoids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def test_underflow_of_gradients_is_found_where_it_happens_and_cured_by_its_remedy() -> None:
    model = Sigmoids()
    audit = hs.audit(model, data(), loss_fn, FP16.replace(scale="none"), adamw(model))
    found = [f for f in audit.findings() if f.kind == "underflow"]
    assert {"layers.0.weight", "layers.1.weight"} <= {f.parameter for f in found}
    culprits = {f.module for f in found if f.role == "activation gradient"}
    assert culprits and "head" not in culprits
    remedy = found[0].policy
    assert remedy is not None and "scale: 'none' -> 'halfstep'" in found[0].diff
    assert not hs.audit(model, data(), loss_fn, remedy, adamw(model)).findings()


def test_what_if_says_from_the_sketches_what_another_scale_would_do() -> None:
    audit = hs.audit(Sigmoids(), data(), loss_fn, BF16)
    first = [a for a in audit.what_if("fp16") if a.parameter == "layers.0.weight" and a.role == "weight gradient"][0]
    assert first.underflow[0] > 0.9
    scaled = audit.what_if("fp16", first.best_scale)
    again = [a for a in scaled if a.parameter == "layers.0.weight" and a.role == "weight gradient"][0]
    assert again.underflow[1] < 0.01 and again.overflow == (0.0, 0.0)
    weight = [a for a in scaled if a.parameter == "layers.0.weight" and a.role == "weight"][0]
    assert weight == [a for a in audit.what_if("fp16") if a.parameter == "layers.0.weight" and a.role == "weight"][0]


def test_what_if_divides_by_the_scale_that_gradients_carry() -> None:
    answers = {}
    for policy in (FP16, BF16):
        audit = hs.audit(mlp(), data(), loss_fn, policy)
        answers[policy] = [a.headroom for a in audit.what_if("fp16", 4.0) if a.role.endswith("gradient")]
    assert answers[FP16] == pytest.approx(answers[BF16], abs=0.1)


def test_swallowed_updates_and_states_that_cannot_follow_are_found_and_masters_cure_them() -> None:
    model = mlp()
    policy = hs.Policy.of("O3", dtype="bf16")
    audit = hs.audit(model, data(), loss_fn, policy, adamw(model, 1e-5))
    row = only(audit, parameter="0.weight", role="update")
    assert row.swallowed > 0.9 and row.swallowed_mass > 0.9 and row.error > 0.9
    found = audit.findings()
    names = {name for name, _ in model.named_parameters()}
    assert {f.parameter for f in found if f.kind == "swallowed_update"} == names
    states = {(f.parameter, f.op) for f in found if f.kind == "low_state"}
    assert states == {(name, "AdamW.exp_avg_sq") for name in names}
    assert kinds(audit) == {"swallowed_update", "low_state"} and found[0].policy is not None
    for master in ("auto", "kahan", "stochastic"):
        cured = hs.audit(model, data(), loss_fn, policy.replace(master=master), adamw(model, 1e-5))
        assert not cured.findings(), master


def test_the_meter_is_the_share_of_updates_below_half_an_ulp() -> None:
    model = nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [1.0], [0.0], [2.0**-6]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def pushed(model: nn.Module, push: Tensor) -> Tensor:
        return (model(torch.ones(1, 1)).float() * push).sum()  # type: ignore[no-any-return]  # module calls are Any

    push = torch.tensor([[2.0**-10, 2.0**-7, 2.0**-20, 2.0**-10]])
    audit = hs.audit(model, [push], pushed, hs.Policy.of("O3", dtype="bf16"), optimizer)
    row = only(audit, role="update")
    assert row.swallowed == 0.25  # of 1 - 2**-10 alone: half an ulp below 1 is 2**-9
    assert row.swallowed_mass == pytest.approx(2.0**-10 / float(push.sum()))


def test_state_in_fp16_whose_squares_vanish_is_found() -> None:
    class Half(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-3})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    square = self.state[p].setdefault("square", torch.zeros_like(p, dtype=torch.float16))
                    square.mul_(0.9).add_(p.grad.square().to(square.dtype), alpha=0.1)
                    p.data.sub_(1e-3 * p.grad / (square.to(p.dtype).sqrt() + 1e-8))

    model = mlp()
    audit = hs.audit(model, data(), lambda m, x, y: 1e-3 * loss_fn(m, x, y), BF16, Half(model.parameters()))
    states = [f for f in audit.findings() if f.kind == "low_state"]
    assert {(f.parameter, f.op) for f in states} == {(name, "Half.square") for name, _ in model.named_parameters()}
    assert "zero in fp16" in states[0].cause


def test_running_averages_in_a_low_format_are_found() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=0.001), nn.Linear(32, 4))
    model.get_submodule("1").bfloat16()

    def halves(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model[2](model[1](model[0](x).bfloat16()).float()), y)

    audit = hs.audit(model, data(), halves, BF16.with_modules({"1": "keep"}), torch.optim.SGD(model.parameters(), 0.1))
    found = {f.parameter: f.kind for f in audit.findings() if f.op == "buffer"}
    assert found == {"1.running_mean": "low_state", "1.running_var": "swallowed_update"}


def variance(model: Any, x: Tensor, y: Tensor) -> Any:
    h = model[0](x) + 30
    spread = (h * h).mean(-1) - h.mean(-1) ** 2
    return F.cross_entropy(model[2](F.relu(h - 30)), y) + spread.mean()


def test_a_difference_of_nearly_equal_numbers_is_named_with_its_line() -> None:
    audit = hs.audit(mlp(), data(), variance, hs.Policy.of("O3", dtype="bf16").with_ops(keep=["add"]))
    found = [f for f in audit.findings() if f.kind == "rounding" and "digits that are left" in f.cause]
    assert found[0].op == "sub" and "spread = " in found[0].line


def test_overflow_and_its_risk_are_told_apart() -> None:
    def inputs(size: float) -> list[tuple[Tensor, Tensor]]:
        return [(torch.full((4, 16), size), torch.zeros(4, dtype=torch.int64))]

    model = mlp()
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(1 / 16)
    policy = FP16.replace(scale="none").with_ops(fp32=["relu"])
    assert kinds(hs.audit(model, inputs(50000.0), loss_fn, policy)) >= {"overflow_risk"}
    over = hs.audit(model, inputs(70000.0), loss_fn, policy)
    first = over.findings()[0]
    assert (first.kind, first.module, first.op) == ("overflow", "0", "linear") and first.policy is not None
    assert any("not finite" in note for note in over.notes)
    cured = hs.audit(model, inputs(70000.0), loss_fn, first.policy).findings()
    assert [f.module for f in cured if f.kind == "overflow"] == ["2"]  # which is given these numbers now


class NormByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        squares = x * x
        return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("scale", ["none", "auto"])
def test_gradients_that_an_overflow_makes_zero_are_told_with_it_and_blame_no_scale(scale: str) -> None:
    def audit(policy: hs.Policy) -> hs.lens.Audit:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), NormByHand(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        batches = [(600 * torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(2)]
        return hs.audit(model, batches, loss_fn, policy)

    found = audit(hs.Policy.of("mixed", dtype="fp16", scale=scale))
    (finding,) = found.findings()
    assert (finding.kind, finding.op, finding.module) == ("overflow", "mul", "1")
    assert "with it gradients are zero that are not in fp32, those of" in finding.cause and "mul in 1" in finding.cause
    assert finding.policy is not None and audit(finding.policy).findings() == ()


def test_gradients_that_underflow_by_themselves_are_findings_beside_an_overflow() -> None:
    model = nn.Sequential(nn.Linear(16, 32), NormByHand(), nn.Linear(32, 4))

    def small(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 1e-6 * loss_fn(model, x, y)

    policy = hs.Policy.of("mixed", dtype="fp16", scale="none")
    audit = hs.audit(model, [(600 * torch.randn(8, 16), torch.randint(0, 4, (8,)))], small, policy)
    kinds = [finding.kind for finding in audit.findings()]
    assert kinds[0] == "overflow" and "underflow" in kinds


def test_a_softmax_that_only_the_format_makes_one_hot_is_found() -> None:
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(self.score(x) * 0 + torch.tensor([8.0, 0.0, 0.0, 0.0]), -1)

    audit = hs.audit(Pick(), data(), lambda m, x, y: m(x)[:, 0].float().mean(), hs.Policy.of("O3", dtype="bf16"))
    row = only(audit, op="softmax", role="activation")
    assert row.saturated == 1.0 and "saturation" in kinds(audit)


class Stream(nn.Module):
    """A stream of numbers around `level`, to which a branch of `size` is added."""

    def __init__(self, level: float, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.level, self.size = level, size
        self.enter, self.branch, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.level
        x = x + self.branch(x) * self.size
        return self.head(x + 1e-3 * x)  # type: ignore[no-any-return]  # a term that x alone makes is no news


@pytest.mark.parametrize(("size", "wanted"), [(1e-3, ["x = x + self.branch(x) * self.size"]), (1.0, [])])
def test_a_term_too_small_to_change_its_sum_is_found_with_its_line(size: float, wanted: list[str]) -> None:
    audit = hs.audit(Stream(8.0, size), data(), loss_fn, hs.Policy.of("O2", dtype="bf16"))
    found = [f for f in audit.findings() if "does not contain them" in f.cause]
    assert [f.line.partition(" ")[2] for f in found] == wanted
    assert all(f.kind == "rounding" and f.policy is not None and f.policy.residual == "fp32" for f in found)


def test_a_softmax_whose_other_entries_vanish_in_fp16_is_found_and_a_mask_is_not() -> None:
    def attend(factor: float, hidden: float) -> Callable[..., Tensor]:
        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            scores = model[0](x)[:, :4] * factor
            scores = scores + torch.tensor([0.0, hidden, hidden, hidden], dtype=scores.dtype)
            return F.cross_entropy(torch.softmax(scores, -1) @ model[2].weight[:, :4].T, y)

        return loss

    policy = hs.Policy.of("mixed", dtype="fp16")
    sharp = hs.audit(mlp(), data(), attend(64.0, 0.0), policy)
    assert [(f.kind, f.op) for f in sharp.findings() if f.kind == "saturation"] == [("saturation", "softmax")]
    masked = hs.audit(mlp(), data(), attend(1.0, -math.inf), policy)
    assert "saturation" not in kinds(masked)
    assert only(masked, op="softmax", role="activation").saturated == 0.0


def test_gradients_of_many_micro_batches_summed_in_bf16_are_found() -> None:
    def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x).float().mean() - 3.0) ** 2  # type: ignore[no-any-return]  # module calls are Any

    def audit(grads: str, accumulate: int, count: int) -> hs.lens.Audit:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        policy = hs.Policy.of("pure", dtype="bf16", grads=grads)
        return hs.audit(model, data(count), mean, policy, adamw(model), accumulate=accumulate, steps=2)

    low = audit("param", 200, 400)
    found = {f.parameter for f in low.findings()}
    assert "2.bias" in found and {f.kind for f in low.findings()} == {"rounding"}
    assert only(low, parameter="2.bias", role="weight gradient").summed > 0.03
    assert low.steps == 2 and only(low, module="0", role="activation").calls == 2  # the first of each window
    assert low.findings()[0].diff == "grads: 'param' -> 'fp32'"
    assert not audit("fp32", 200, 400).findings()
    assert audit("param", 4, 7).steps == 2  # the last window is short
    assert math.isnan(only(audit("param", 1, 2), parameter="2.bias", role="weight gradient").summed)


def test_a_teacher_averaged_in_bf16_is_found() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.student, self.teacher = nn.Linear(16, 4), nn.Linear(16, 4).bfloat16().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight.to(self.teacher.weight.dtype), 1e-3)
            return self.student(x) - self.teacher(x.to(self.teacher.weight.dtype)).float()  # type: ignore[no-any-return]

    audit = hs.audit(Pair(), data(), loss_fn, BF16.with_modules({"teacher": "keep"}))
    found = [(f.kind, f.parameter) for f in audit.findings()]
    assert found == [("swallowed_update", "teacher.weight")]


def test_one_operator_called_from_two_lines_of_a_module_is_two_rows() -> None:
    def twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        small = model(x).half() * 1e-3
        square = small * small
        return F.cross_entropy((square * 1e6).float(), y)

    audit = hs.audit(mlp(), data(), twice, FP16)
    lines = {r.line.partition(" ")[2]: r.underflow for r in audit.filter(op="mul", role="activation")}
    assert len(lines) == 3 and [line for line, lost in lines.items() if lost > 0.01] == ["square = small * small"]
    (finding,) = [f for f in audit.findings() if f.role == "activation" and f.kind == "underflow"]
    assert "square = small * small" in finding.line


def test_what_is_wholly_lost_is_worst() -> None:
    audit = hs.audit(Sigmoids(), data(), loss_fn, FP16.replace(scale="none"))
    worst = audit.filter(role="weight gradient").worst(2)
    assert {row.parameter for row in worst} <= {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}
    assert all(row.missing == 1.0 for row in worst)


def test_layer_norm_of_large_fp16_numbers_is_no_finding() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1e4)
    audit = hs.audit(model, data(), loss_fn, FP16.replace(scale=1.0), adamw(model))
    assert 15000 < only(audit, module="0", role="activation").amax < 50000
    assert audit.findings() == () and "overflow_risk" in {f.kind for f in audit.findings(headroom=3)}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_that_are_zero_but_for_rounding_and_masks_are_no_findings(dtype: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).T / 4
            mask = torch.where(torch.ones_like(scores).tril() > 0, 0.0, torch.finfo(scores.dtype).min)
            return self.head(F.softmax(scores + mask, -1) @ self.value(x))  # type: ignore[no-any-return]

    audit = hs.audit(Attention(), data(), loss_fn, hs.Policy.of("O2", dtype=dtype))
    assert only(audit, parameter="key.bias", role="weight gradient").cancels
    assert audit.findings() == ()


@pytest.mark.parametrize("policy", ["O1", "torch", "mixed", "O2", "pure"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_healthy_model_has_no_findings(policy: str, dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.LayerNorm(128), nn.Linear(128, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4),
    )  # fmt: skip
    batches = [(x.repeat(1, 4).view(-1, 1, 8, 8), y) for x, y in data()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    audit = hs.audit(model, batches, loss_fn, hs.Policy.of(policy, dtype=dtype), optimizer, clip_norm=1.0)
    assert audit.findings() == ()
    assert "no findings" in str(audit)


# ------------------------------------------------------------------ the table


@pytest.fixture(scope="module")
def audited() -> hs.lens.Audit:
    model = mlp()
    return hs.audit(model, data(), loss_fn, BF16, adamw(model))


def test_rows_are_filtered_and_sorted(audited: hs.lens.Audit) -> None:
    assert {row.module for row in audited.filter(module="[02]")} == {"0", "2"}
    assert all(row.error > 1e-3 for row in audited.filter(lambda row: row.error > 1e-3))
    errors = [row.error for row in audited.sorted("error")]
    known = [e for e in errors if not math.isnan(e)]
    assert known == sorted(known, reverse=True) and errors[: len(known)] == known
    assert [r.headroom for r in audited.sorted("headroom", descending=False)][0] == min(r.headroom for r in audited)
    assert len(audited.worst(3)) == 3


def test_an_unknown_column_or_role_is_answered_with_the_nearest(audited: hs.lens.Audit) -> None:
    with pytest.raises(AuditError, match="cannot be sorted by 'eror'; did you mean 'error'"):
        audited.sorted("eror")
    with pytest.raises(AuditError, match="no role 'activations'; did you mean 'activation'"):
        audited.filter(role="activations")
    with pytest.raises(AuditError, match="scale must be a positive finite number or None and is 0.0"):
        audited.what_if("fp16", 0.0)
    with pytest.raises(FormatError, match="unknown number format 'fp17'"):
        audited.what_if("fp17")


def test_records_are_plain_and_json_is_json(audited: hs.lens.Audit, tmp_path: Any) -> None:
    (keys,) = {tuple(record) for record in audited.records()}
    assert keys[:4] == ("module", "op", "role", "parameter") and "sketch" not in keys
    assert all(isinstance(v, (str, int, float)) for record in audited.records() for v in record.values())
    read = json.loads(audited.to_json(tmp_path / "audit.json"))
    assert read == json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert len(read["rows"]) == len(audited) and hs.Policy.from_toml(read["policy"]) == audited.policy


def test_the_page_is_one_file_with_a_picture_for_each_role(audited: hs.lens.Audit, tmp_path: Any) -> None:
    audited.save_html(tmp_path / "audit.html")
    text = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert text.count("<figure>") == 4 and "<script" not in text and "http" not in text.partition("</style>")[2]
    assert "What other formats would do" in text and "2.weight" in text


# ------------------------------------------------------------------ odd models


class Output(NamedTuple):
    scores: Tensor
    extra: dict[str, Any]


def test_containers_complex_numbers_integers_and_views_pass() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Output:
            spectrum = torch.fft.rfft(self.inner(x).float())
            return Output(torch.fft.irfft(spectrum, 4), {"best": x.argmax(-1), "none": None, "pair": (x[:2], [x])})

    audit = hs.audit(
        Odd(), [{"x": x, "y": y} for x, y in data()], lambda m, x, y: (F.cross_entropy(m(x).scores, y), {}), BF16
    )
    assert only(audit, op="fft.irfft", role="activation").error == 0.0
    assert not audit.filter(op="argmax").rows and not audit.findings()


def test_batches_may_come_from_a_generator_and_may_be_one_tensor() -> None:
    model = nn.Linear(16, 4)
    audit = hs.audit(model, (x for x, _ in data(5)), lambda m, x: m(x).square().mean(), BF16, steps=2)
    assert audit.steps == 2 and only(audit, op="linear", role="activation").calls == 2


def test_lazily_created_parameters_are_created_in_the_copy() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4))
    audit = hs.audit(model, data(), loss_fn, BF16)
    assert only(audit, parameter="0.weight", role="weight").numel == 8 * 16
    assert isinstance(model[0].weight, nn.UninitializedParameter) and "created in the copy" in audit.notes[-1]


def test_a_model_that_insists_on_a_low_format_is_audited_without_accumulated_errors() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.inner(x)
            if scores.dtype is not torch.bfloat16:
                raise ValueError("wants bf16")
            return scores

    audit = hs.audit(Strict(), data(), loss_fn, BF16)
    assert any("does not run in fp32: ValueError: wants bf16" in note for note in audit.notes)
    row = only(audit, module="inner", role="activation")
    assert math.isnan(row.accumulated) and row.error > 0


def test_low_formats_that_the_users_code_asks_for_are_fp32_in_the_twin() -> None:
    def cast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.to(torch.bfloat16).float() + x.half().float()), y)

    audit = hs.audit(mlp(), data(), cast, "O0")
    row = only(audit, op="to", role="activation")
    assert row.calls == 6 and 1e-4 < row.error < 2.0**-8
    assert 1e-4 < only(audit, module="0", op="linear", role="activation").accumulated < 0.01


def test_a_model_that_differs_from_call_to_call_is_audited_without_accumulated_errors() -> None:
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(16, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) * (1 + self.calls % 3)  # type: ignore[no-any-return]

    audit = hs.audit(Drifting(), data(), loss_fn, BF16)
    assert any("gave the losses" in note for note in audit.notes) and not audit.findings()
    row = only(audit, op="mul", role="activation")
    assert math.isnan(row.accumulated) and row.error < 0.01


@pytest.mark.parametrize("way", ["scatter", "index"])
def test_decisions_that_fall_otherwise_than_in_fp32_are_no_rounding(way: str) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.score, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            weights = F.softmax(self.score(x) * 0.01, -1)
            best = weights.topk(2, -1).indices
            if way == "scatter":
                chosen = x * torch.zeros_like(weights).scatter(-1, best, 1.0)
            else:
                chosen = x[torch.arange(len(x)), best[:, 0]][:, None] * x
            return self.head(chosen)  # type: ignore[no-any-return]  # module calls are Any

    audit = hs.audit(Router(), data(), loss_fn, hs.Policy.of("O2", dtype="bf16"))
    assert max(row.accumulated for row in audit.filter(op="mul", role="activation")) > 0.1
    assert not audit.findings()


def test_generators_as_outputs_and_complex_parameters_pass() -> None:
    class Streaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.turn = nn.Linear(16, 4), nn.Parameter(torch.ones(4, dtype=torch.cfloat))
            self.register_buffer("places", torch.arange(4))

        def forward(self, x: Tensor) -> Any:
            yield (self.inner(x).float() * self.turn).abs() + self.places

    def first(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(next(model(x)), y)

    model = Streaming()
    audit = hs.audit(model, data(), first, BF16, torch.optim.SGD(model.parameters(), 0.1))
    assert only(audit, module="inner", role="activation").calls == 3
    assert "no rows of updates: parameters are complex" in audit.notes and not audit.findings()


Case = tuple[Callable[[], Any], str]
ANY: Any = hs.audit  # what a type checker would refuse
WRONG: dict[str, Case] = {
    "a model that is none": (lambda: ANY(loss_fn, data(), loss_fn), "must be a torch.nn.Module and is a function"),
    "one batch": (lambda: hs.audit(mlp(), data()[0], loss_fn), r"\(1 argument\): missing .* 'y'; .* write \[batch\]"),
    "a tensor": (lambda: hs.audit(mlp(), torch.ones(3, 16), loss_fn), "is a Tensor; for one batch write"),
    "nothing": (lambda: hs.audit(mlp(), iter(()), loss_fn), "gave no batch: an iterator may be used up"),
    "no steps": (lambda: hs.audit(mlp(), data(), loss_fn, steps=0), "steps must be a whole number from 1 and is 0"),
    "a shadow": (lambda: hs.audit(mlp(), data(), loss_fn, shadow="bf16"), "one of 'fp32', 'fp64' and is 'bf16'"),
    "no loss": (lambda: ANY(mlp(), data(), 3), "loss_fn must be callable"),
    "no optimizer": (lambda: ANY(mlp(), data(), loss_fn, BF16, 3), "a torch optimizer or None and is 3"),
    "another's": (lambda: hs.audit(mlp(), data(), loss_fn, BF16, adamw(mlp())), "AdamW holds no parameter"),
    "frozen": (lambda: hs.audit(mlp().requires_grad_(False), data(), loss_fn, BF16), "no parameter that requires"),
    "no window": (lambda: hs.audit(mlp(), data(), loss_fn, accumulate=0), "accumulate must be .* from 1 and is 0"),
    "labels elsewhere": (
        lambda: hs.audit(mlp(), [(data()[0][0], data()[0][1].to("meta"))], loss_fn),
        "the batch is on cpu and meta and the model on cpu",
    ),
    "no values": (lambda: hs.audit(mlp().to("meta"), data(), loss_fn), r"parameter 0\.weight is on the meta device"),
    "elsewhere": (
        lambda: hs.audit(mlp(), [tuple(t.to("meta") for t in data()[0])], loss_fn),
        r"the batch is on meta and the model on cpu; move one of them, e\.g\. hs\.trees\.map_tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_answered_in_words(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(AuditError, match=words):
        call()


def test_a_model_that_cannot_be_copied_is_answered_in_words() -> None:
    model = mlp()
    model.cache = model(torch.ones(1, 16))  # a result with a graph
    with pytest.raises(AuditError, match="works on a copy of the model, and Sequential cannot be copied: RuntimeError"):
        hs.audit(model, data(), loss_fn, BF16)


def test_updates_of_a_float64_model_are_measured_from_states_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    batches = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 2, (8,))) for _ in range(2)]
    audit = hs.audit(model, batches, loss_fn, "O0", torch.optim.Adam(model.parameters()), steps=2)
    assert not any("no rows of updates" in note for note in audit.notes)
    rows = audit.filter(role="update").rows
    assert len(rows) == 2 and all(row.error < 1e-6 for row in rows)
