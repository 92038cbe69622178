"""Policies as configurations of other engines: every field is expressed or refused, and numbers mean the same there."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import typing
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from halfstep.cli import app
from halfstep.errors import PolicyError
from halfstep.policy import PRESETS, SCALE_RULES, Policy, ScaleRule
from halfstep.policy.engines import ENGINES, Engine, Expressed, configured, expressed
from halfstep.policy.operators import data
from halfstep.scale.rule import advance, initial_state
from tests.policy.deepspeed_runs import exact_losses, in_deepspeed, overflowing_scales
from tests.scale import peers

FIELDS = [f.name for f in dataclasses.fields(Policy)]
HINTS = get_type_hints(Policy)
WORDS = {name: get_args(HINTS[name]) for name in FIELDS if get_origin(HINTS[name]) is typing.Literal}

EXACT = Policy(dtype="bf16", params="low", norms="low", master="master", table="none", residual="low", loss="keep")
"""What a low section of DeepSpeed is, field by field."""

policies = st.builds(
    Policy,
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    ops=st.sampled_from([(), (("softmax", "fp32"),)]),
    modules=st.sampled_from([(), (("head", "fp32"),)]),
    scale=st.sampled_from(["auto", "none", 1.0, 1024.0, *SCALE_RULES]),
    **{name: st.sampled_from(words) for name, words in WORDS.items()},
)
engines = st.sampled_from(sorted(ENGINES))


def every(engine: Engine, policy: Policy) -> tuple[Expressed, ...]:
    """Return what becomes of every field; give the example up if the policy contradicts itself or has no format."""
    try:
        return expressed(engine, policy)
    except PolicyError:
        assume(False)
        raise


# ------------------------------------------------------------------ nothing is dropped


@settings(max_examples=80, deadline=None, derandomize=True)
@given(policy=policies, name=engines)
def test_every_field_is_expressed_once(policy: Policy, name: str) -> None:
    """A new field of Policy fails here until every engine states what becomes of it."""
    assert [e.field for e in every(ENGINES[name], policy)] == FIELDS


def test_a_field_that_an_engine_forgets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data("tables/deepspeed.toml")
    fields = [name for name in whole["fields"] if name != "state"]
    monkeypatch.setattr("halfstep.policy.engines.data", lambda path: {**whole, "fields": fields})
    with pytest.raises(KeyError, match="state"):
        expressed(ENGINES["deepspeed"], EXACT)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(policy=policies, name=engines)
def test_what_is_lost_is_refused_until_it_is_accepted_by_name(policy: Policy, name: str) -> None:
    engine = ENGINES[name]
    made = every(engine, policy)
    lost = [e.field for e in made if e.lost]
    if lost:
        with pytest.raises(PolicyError, match=f"does not carry out {len(lost)} of its fields") as error:
            configured(engine, policy)
        assert [re.match(r"  (\w+)=", line) is not None for line in str(error.value).splitlines()[1:-1]] == [
            True
        ] * len(lost)
        with pytest.raises(PolicyError, match=f"  {lost[-1]}="):
            configured(engine, policy, accept=lost[:-1])
    config = configured(engine, policy, accept=lost)
    for e in made:  # differences are in the notes, accepted ones too
        for text in (e.note, e.lost):
            assert not text or any(note.startswith(f"{e.field}=") and text in note for note in config.notes)
    assert [line for line in config.notes if "\n" in line] == []


@settings(max_examples=80, deadline=None, derandomize=True)
@given(policy=policies, name=engines)
def test_remedies_work(policy: Policy, name: str) -> None:
    """Where a message says ``set field=value``, that value is not lost."""
    for e in every(ENGINES[name], policy):
        remedy = re.search(r"set (\w+)='(\w+)'", e.lost)
        if remedy is None:
            continue
        field, value = remedy.groups()
        changed = {"master": "auto", "norms": "fp32"} if field == "params" else {}
        made = every(ENGINES[name], policy.replace(**{**changed, field: value}))
        assert not next(other.lost for other in made if other.field == e.field), (field, value)


# ------------------------------------------------------------------ what is written


def test_deepspeed() -> None:
    assert EXACT.to_deepspeed().config == {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "bf16",
    }
    assert EXACT.replace(grads="fp32").to_deepspeed().config == {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    assert EXACT.replace(master="none").to_deepspeed().config["bf16"] == {
        "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }  # fmt: skip
    assert EXACT.replace(dtype="fp16", inputs="low").to_deepspeed().config["fp16"] == {
        "enabled": True, "auto_cast": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1,
    }  # fmt: skip
    made = PRESETS["torch"].replace(dtype="bf16").to_deepspeed(accept="outputs")
    assert made.config == {"torch_autocast": {"dtype": "bfloat16", "enabled": True, "lower_precision_safe_modules": []}}
    assert json.loads(str(made)) == made.config
    assert PRESETS["O0"].to_deepspeed().config == {}


def test_megatron() -> None:
    pure = PRESETS["pure"].replace(dtype="bf16")
    assert pure.to_megatron(accept=["table"]).args == ("--bf16", "--grad-reduce-in-bf16")
    wide = pure.replace(grads="fp32", master="split", residual="fp32", table="torch")
    made = wide.to_megatron(accept=["table"])
    assert shlex.split(str(made)) == list(made.args) == [
        "--bf16", "--use-precision-aware-optimizer", "--use-distributed-optimizer",
        "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32", "--fp32-residual-connection",
    ]  # fmt: skip
    assert made.config["accumulate_allreduce_grads_in_fp32"] is True
    half = PRESETS["O3"].replace(
        dtype="fp16", scale=ScaleRule(init=4096.0, floor=0.5, ceiling=SCALE_RULES["megatron"].ceiling, guard=False)
    )
    assert half.to_megatron().args == (
        "--fp16", "--fp16-lm-cross-entropy", "--initial-loss-scale", "4096.0", "--min-loss-scale", "0.5",
        "--loss-scale-window", "2000", "--hysteresis", "1",
    )  # fmt: skip
    assert half.replace(scale=64.0).to_megatron().config["loss_scale"] == 64.0


def test_torchtitan() -> None:
    made = PRESETS["O2"].replace(dtype="bf16", norms="low", table="none").to_torchtitan()
    assert made.config == {
        "training": {
            "dtype": "float32", "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
        }
    }  # fmt: skip
    assert made.args[0] == "--training.mixed_precision_param=bfloat16"
    assert Policy.of("O3", dtype="bf16").to_torchtitan().config["training"]["dtype"] == "bfloat16"
    assert str(made).splitlines() == [
        "[training]", 'mixed_precision_param = "bfloat16"', 'dtype = "float32"', 'mixed_precision_reduce = "float32"',
    ]  # fmt: skip


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("policy", "engine", "text"),
    [
        (Policy.of("O2"), "deepspeed", "dtype='auto' is decided by the device that trains.*policy.replace"),
        (Policy.of("mixed", dtype="fp8_e4m3"), "megatron", "'fp8_e4m3' is simulated by halfstep's regions"),
        (Policy.of("mixed", dtype="fp16"), "torchtitan", "trains in bfloat16 or float32; use dtype='bf16'"),
        (EXACT.with_ops(fp32=["softmax"]), "deepspeed", r"ops=\(\('softmax', 'fp32'\),\): all operators run in the"),
        (EXACT.with_modules({"head": "fp32"}), "deepspeed", "lowers every module; leave modules out"),
        (EXACT.with_modules({"head": "fp32"}), "megatron", "Megatron's modules decide .* leave modules out"),
        (EXACT.replace(scale="megatron"), "deepspeed", "no loss scale under bf16; set scale='none'"),
        (EXACT.replace(dtype="fp16", scale="halfstep"), "deepspeed", "floor 1 in place of 6.10.*set scale='deepspeed'"),
        (EXACT.replace(state="low"), "megatron", "rounded to nearest, not stochastically"),
        (EXACT.replace(params="fp32", norms="fp32", master="split"), "deepspeed", "master='split' is what stands"),
    ],
)
def test_error_texts(policy: Policy, engine: str, text: str) -> None:
    with pytest.raises(PolicyError, match=re.compile(text, re.DOTALL)):
        configured(ENGINES[engine], policy)


def test_an_accepted_name_that_is_no_field() -> None:
    with pytest.raises(PolicyError, match=r"a policy has no field 'norm'; did you mean 'norms'\?"):
        EXACT.to_deepspeed(accept=["norm"])


# ------------------------------------------------------------------ loss scales

numbers = {
    "init": st.integers(0, 30).map(lambda power: 2.0**power),
    "interval": st.integers(1, 6),
    "hysteresis": st.integers(1, 4),
}
sequences = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=14).map(
    lambda runs: [bad for bad, length in runs for _ in range(length)]
)


def scales(rule: ScaleRule, steps: list[bool]) -> list[float]:
    state, found = initial_state(rule, "cpu"), []
    for bad in steps:
        state = advance(rule, state, torch.tensor(float(bad)))
        found.append(state.scale.item())
    return found


def peer_scales(peer: Any, steps: list[bool]) -> list[float]:
    found = []
    for bad in steps:
        peer.step(bad)
        found.append(peer.scale)
    return found


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=sequences, floor=st.sampled_from([1.0, 4.0]), refill=st.sampled_from(["growth", "good"]), **numbers)
def test_deepspeeds_scaler_with_the_written_numbers(steps: list[bool], **changed: Any) -> None:
    assume(changed["init"] >= changed["floor"])
    rule = dataclasses.replace(SCALE_RULES["deepspeed"], **changed)
    made = EXACT.replace(dtype="fp16", scale=rule).to_deepspeed().config["fp16"]
    same = {"scale": 2.0 ** made["initial_scale_power"], "interval": made["loss_scale_window"],
            "minimum": made["min_loss_scale"], "consecutive": made["consecutive_hysteresis"]}  # fmt: skip
    assert peer_scales(peers.DeepSpeed(**same, shift=made["hysteresis"]), steps) == scales(rule, steps)


def test_a_hysteresis_that_is_one_off_is_noticed() -> None:
    rule, steps = SCALE_RULES["deepspeed"], [True, True, True]
    assert peer_scales(peers.DeepSpeed(shift=rule.hysteresis), steps) == scales(rule, steps)
    assert peer_scales(peers.DeepSpeed(shift=rule.hysteresis + 1), steps) != scales(rule, steps)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=sequences, floor=st.sampled_from([1.0, 0.25]), **numbers)
def test_megatrons_scaler_with_the_written_numbers(steps: list[bool], floor: float, **changed: Any) -> None:
    rule = dataclasses.replace(SCALE_RULES["megatron"], floor=floor, **changed)
    made = EXACT.replace(dtype="fp16", scale=rule).to_megatron().config
    peer = peers.Megatron(
        scale=made["initial_loss_scale"], minimum=made["min_loss_scale"], interval=made["loss_scale_window"],
        hysteresis=made["hysteresis"],
    )  # fmt: skip
    assert peer_scales(peer, steps) == scales(rule, steps)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=sequences, **numbers)
def test_deepspeeds_own_classes(steps: list[bool], **changed: Any) -> None:
    """Its pydantic models read what is written, and its scaler moves as the rule does."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    rule = dataclasses.replace(SCALE_RULES["deepspeed"], **changed)
    read = DeepSpeedFP16Config(**EXACT.replace(dtype="fp16", scale=rule).to_deepspeed().config["fp16"])
    scaler = loss_scaler.DynamicLossScaler(**read.dynamic_loss_scale_args(), raise_error_at_min_scale=False)
    found = []
    with patch.object(loss_scaler.dist, "get_rank", lambda: 1):  # rank 0 logs
        for bad in steps:
            scaler.update_scale(bad)
            found.append(scaler.cur_scale)
    assert found == scales(rule, steps)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_trains_as_a_train_step_does(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    bare = EXACT.replace(master="none")  # its update rounds to bf16, which hides the last bit of fp32 arithmetic
    theirs, ours = in_deepspeed(exact_losses, tmp_path, bare, stage)
    assert theirs == ours
    masters, _ = in_deepspeed(exact_losses, tmp_path, EXACT, stage)  # the twin
    assert masters != ours


@pytest.mark.dist
def test_deepspeeds_scale_does_not_back_off_under_torch_autocast(tmp_path: Path) -> None:
    """That is why fp16 with fp32 parameters is lost there; with low parameters the scale backs off."""
    pytest.importorskip("deepspeed")
    wide = PRESETS["torch"].replace(dtype="fp16")
    assert in_deepspeed(overflowing_scales, tmp_path, wide, 2) == [65536.0] * 4
    low = EXACT.replace(dtype="fp16", emulate="never")
    assert in_deepspeed(overflowing_scales, tmp_path, low, 2) == [65536.0, 32768.0, 16384.0, 8192.0]


# ------------------------------------------------------------------ command line


def test_command_line() -> None:
    run = CliRunner()
    made = run.invoke(app, ["engine", "deepspeed", "--policy", "pure", "--accept", "table,outputs, loss"])
    assert made.exit_code == 0
    assert json.loads(made.stdout)["bf16"] == {"enabled": True}
    assert "note: table='mixed': all operators run in the format of their inputs" in made.stderr
    refused = run.invoke(app, ["engine", "megatron", "--policy", "O2:bf16"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "\n  norms='fp32': the parameters of norms are bf16 too" in refused.stderr
    unknown = run.invoke(app, ["engine", "deepsped"])
    assert unknown.exit_code == 2
    assert "did you mean 'deepspeed'?" in unknown.stderr
