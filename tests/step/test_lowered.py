"""hs.lowered: a plain module with low weights and the outputs of the prepared model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import BindError, PolicyError
from tests.step.serving import logits, networks, prepared

NETS = networks()


def policy(name: str, dtype: str = "bf16", **changed: object) -> hs.Policy:
    return hs.Policy.of(name, dtype=dtype).replace(**changed)


def low(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("name", ["O2", "pure", "lean", "O3"])
@pytest.mark.parametrize("net", NETS)
def test_outputs_are_those_of_the_prepared_model_bit_for_bit(net: str, name: str) -> None:
    if (net, name) in {("gated", "O2"), ("gated", "O3")}:
        pytest.skip("a norm written by hand has an fp32 weight under O2, and low operators under O3: bounded below")
    model, x = NETS[net]
    live = prepared(model, policy(name))
    plain = hs.lowered(live)
    with torch.inference_mode():
        expected, got = logits(live(x)), logits(plain(low(x)))
    assert torch.equal(expected.float(), got.float()) and got.dtype is torch.bfloat16
    if net == "attending":  # the test can fail: norms made low are another model under O2
        other = logits(hs.lowered(live, policy=policy("pure"))(x))
        assert torch.equal(other.float(), expected.float()) is (name != "O2")


def test_a_norm_written_by_hand_gets_a_low_weight_under_O2_within_a_bound() -> None:
    model, x = NETS["gated"]
    live = prepared(model, policy("O2"))
    plain = hs.lowered(live)
    assert live[1].weight.dtype is torch.float32 and plain[1].weight.dtype is torch.bfloat16
    expected, got = live(x).detach(), plain(low(x)).float()
    assert float((expected - got).norm() / expected.norm()) < 2.0**-6


def test_it_is_of_the_users_classes_in_evaluation_and_holds_nothing_of_halfstep() -> None:
    model, _ = NETS["attending"]
    live = prepared(model, policy("O2")).train()
    plain = hs.lowered(live)
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    assert not plain.training and not any(p.requires_grad for p in plain.parameters())
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    assert plain.qkv.weight.dtype is torch.bfloat16 and plain.norm.weight.dtype is torch.float32
    assert b"halfstep" not in pickle.dumps(plain)
    assert hs.prepared_policy(live) is not None and live.training and live.qkv.weight.requires_grad


@pytest.mark.parametrize("master", ["master", "split", "kahan", "stochastic"])
def test_after_training_it_has_the_low_weights_of_the_model_under_every_strategy(master: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy("O2", master=master))
    for _ in range(5):
        step(torch.randn(16, 6))
    plain, x = hs.lowered(model), torch.randn(4, 6)
    model.eval()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert torch.equal(model(x), plain(low(x)).float())
    before = plain[0].weight.clone()
    model.train()
    step(torch.randn(16, 6))
    assert torch.equal(before, plain[0].weight)  # no memory is shared


def test_a_plain_model_with_a_policy_is_lowered_as_a_prepared_one() -> None:
    model, x = NETS["attending"]
    state = copy.deepcopy(model.state_dict())
    plain = hs.lowered(model, policy=policy("O2"))
    assert torch.equal(plain(x).float(), prepared(model, policy("O2"))(x))
    pairs = zip(model.state_dict().values(), state.values(), strict=True)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in pairs)


def test_a_low_batchnorm_has_rounded_weights_in_the_format_that_its_kernel_takes() -> None:
    model, x = NETS["convolving"]
    low_norms = policy("O2").with_modules({"class:BatchNorm2d": "low"})
    for plain in (hs.lowered(prepared(model, low_norms)), hs.lowered(model, policy=low_norms)):
        assert plain.m.weight.dtype is torch.float32 and torch.equal(plain.m.weight, plain.m.weight.bfloat16().float())
        expected = prepared(model, low_norms)(x)["logits"]
        assert torch.equal(plain(low(x))["logits"].float(), expected) and not torch.equal(
            plain.m.weight, model.m.weight
        )


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("net", ["attending", "convolving"])
def test_a_model_initialised_by_apex_is_taken_as_it_is(net: str, level: str) -> None:
    from halfstep.compat.apex import amp

    model, x = NETS[net]
    live: Any = amp.initialize(copy.deepcopy(model), opt_level=level, verbosity=0).eval()
    plain = hs.lowered(live)
    with torch.inference_mode():
        expected, got = logits(live(x)), logits(plain(low(x, torch.float16)))
        assert torch.equal(logits(hs.exported(live, (x,)).module()(x)), expected)
    assert float((expected - got).norm() / expected.norm()) < 2.0**-9  # torch's fp16 kernels beside the emulation


def test_shared_weights_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    plain = hs.lowered(prepared(model, policy("O2")))
    assert plain[0].weight is plain[1].weight and plain[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("net", NETS)
def test_fp16_on_a_cpu_runs_in_torchs_kernels_within_a_bound(net: str) -> None:
    model, x = NETS[net]
    live = prepared(model, policy("O2", "fp16"))
    with torch.inference_mode():
        expected, got = logits(live(x)), logits(hs.lowered(live)(low(x, torch.float16)))
    assert float((expected - got).norm() / expected.norm()) < 2.0**-9  # the emulation rounds once, a kernel may not


def test_compiled_and_exported_it_computes_the_same() -> None:
    model, x = NETS["gated"]
    plain, x = hs.lowered(prepared(model, policy("O2"))), low(x)
    program = torch.export.export(plain, (x,))
    assert torch.equal(program.module()(x), plain(x))
    compiled: Any = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(x))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (policy("mixed"), "'mixed' keeps fp32 parameters .* hs.exported.*policy='pure'"),
        (policy("O2").with_ops(fp32=["softmax"]), r"rules for operators .*softmax.*hs\.exported"),
        (policy("O2").with_modules({"head": "fp32"}), r"rules for modules \(modules=.*head.*hs\.exported"),
    ],
)
def test_a_policy_that_no_plain_module_follows_is_refused(given: hs.Policy, text: str) -> None:
    model, _ = NETS["attending"]
    live = prepared(model, given)
    with pytest.raises(PolicyError, match=text):
        hs.lowered(live)
    assert hs.prepared_policy(live) == given


def test_a_model_without_a_policy_is_refused() -> None:
    with pytest.raises(BindError, match="not prepared: pass policy="):
        hs.lowered(NETS["gated"][0])


def test_in_fp32_nothing_changes() -> None:
    model, x = NETS["gated"]
    assert torch.equal(hs.lowered(model, policy="O0")(x), model(x))
