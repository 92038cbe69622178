"""Flags: to_float, add_flags and add_flags_recursive, on cells and on torch modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore.precision import PREFIX
from tests.compat.mindspore.nets import BF16, FP16, FP32, LeNet5, Normed, TorchNet, formats, picture, untyped


@pytest.mark.parametrize(("dtype", "flag"), [(FP16, "fp16"), (BF16, "bf16")])
def test_a_flag_and_to_float_run_a_torch_module_low_and_leave_its_weights_fp32(dtype: torch.dtype, flag: str) -> None:
    for mark in (lambda m: ms.to_float(m, dtype), lambda m: ms.add_flags_recursive(m, **{flag: True})):
        net = TorchNet()
        assert mark(net) is net  # type: ignore[no-untyped-call]  # lambdas have no types
        seen = formats(net)
        assert {seen[n] for n in ("conv", "bn", "ln", "fc")} == {dtype}
        assert seen[""] is FP32  # what leaves the outermost low module fits what comes after it
        assert {p.dtype for p in net.parameters()} == {FP32} and net.bn.running_mean.dtype is FP32
        net(picture(net)).sum().backward()
        assert all(p.grad is not None and p.grad.dtype is FP32 for p in net.parameters())


def test_a_lone_low_layer_does_not_break_the_next_one() -> None:
    net = LeNet5()
    net.fc1.to_float(ms.float16)
    seen = formats(net)
    assert {seen[n] for n in ("conv1", "fc2", "fc3")} == {FP32}
    x = torch.rand(3, 400)
    rounded = net.fc1(x)
    assert rounded.dtype is FP32 and torch.equal(rounded, rounded.half().float())  # computed low


def test_the_last_to_float_wins_and_fp32_wins_over_flags_in_any_order() -> None:
    net = LeNet5().to_float(ms.float16).to_float(ms.float32)
    assert set(formats(net).values()) == {FP32}
    net.to_float(ms.bfloat16)
    assert formats(net)["fc1"] is BF16
    net.fc2.to_float(ms.float32)
    net.add_flags_recursive(fp16=True)
    seen = formats(net)
    assert (seen["fc1"], seen["fc2"], seen["fc3"]) == (FP16, FP32, FP16)
    net.fc2.to_float(ms.float16)
    assert formats(net)["fc2"] is FP16


def test_a_flag_taken_off_gives_the_format_around_back() -> None:
    net = ms.amp.auto_mixed_precision(Normed(), "O2")
    net.bn.add_flags(fp32=True)
    net.fc.add_flags_recursive(fp32=True)
    assert formats(net)["fc"] is FP32
    net.fc.add_flags_recursive(fp32=False)
    assert formats(net)["fc"] is FP16 and net.fc.get_flags() == {"fp32": False}


def test_parts_inside_a_flagged_part_follow_it_again_when_their_flag_goes() -> None:
    net = Normed()
    block = ms.nn.SequentialCell([ms.nn.Dense(3, 3), nn.BatchNorm1d(3)])
    net.insert_child_to_cell("tail", block)
    ms.amp.auto_mixed_precision(net, "O2")
    block.add_flags_recursive(fp32=True)
    block.add_flags_recursive(fp32=False)
    policy = hs.prepared_policy(block)
    assert policy is not None and ("class:BatchNorm1d", "fp32") in policy.modules  # O2's exceptions are still there


def test_add_flags_changes_one_cell_and_cells_below_without_flags_follow() -> None:
    net = LeNet5().add_flags(fp16=True)
    assert net.get_flags()["fp16"] and net.fc1.get_flags() == {}
    assert formats(net)["fc1"] is FP16
    net.fc1.add_flags(fp32=True)
    assert formats(net)["fc1"] is FP32


def test_two_low_formats_live_in_one_network() -> None:
    net = LeNet5().to_float(ms.float16)
    net.fc1.to_float(ms.bfloat16)
    seen = formats(net)
    assert (seen["conv1"], seen["fc1"], seen["fc2"]) == (FP16, BF16, FP16)
    assert net(picture(net)).dtype is FP32


def test_flags_on_a_list_of_cells_reach_its_members() -> None:
    cells = ms.nn.CellList([ms.nn.Dense(4, 4), ms.nn.Dense(4, 4)])
    cells.add_flags_recursive(fp16=True)
    assert {hs.prepared_policy(c) and hs.prepared_policy(c).name for c in cells} == {PREFIX + "fp16"}  # type: ignore[union-attr]
    cells.to_float(ms.float32)
    assert {hs.prepared_policy(c) and hs.prepared_policy(c).name for c in cells} == {PREFIX + "fp32"}  # type: ignore[union-attr]


def test_flags_survive_copies_and_pickles() -> None:
    net = LeNet5(fp32_first=True)
    net.add_flags_recursive(fp16=True)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        seen = formats(twin)
        assert seen["fc3"] is FP32 and seen["fc2"] is FP16
        twin.fc2.add_flags_recursive(fp32=True)
        assert formats(twin)["fc2"] is FP32
    assert formats(net)["fc2"] is FP16


def test_the_state_of_a_flagged_network_has_the_plain_networks_keys() -> None:
    net, plain = LeNet5().to_float(ms.float16), LeNet5()
    assert list(net.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(net.state_dict())
    x = picture(plain)
    assert torch.allclose(net(x), plain(x), atol=1e-2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda net: net.to_float(torch.float64),
            ValueError,
            "torch.float64; expected a dtype that a cell can run in",
        ),
        (lambda net: net.to_float("float16"), TypeError, "dst_type='float16' is a str; expected a dtype"),
        (lambda net: net.add_flags(fp8=True), ValueError, "fp8=True.*fp16, fp32, bf16"),
        (lambda net: net.add_flags_recursive(fp16=1), TypeError, "fp16=1.*expected True or False"),
        (lambda net: net.add_flags(fp16=True, bf16=True), ValueError, "one low format"),
        (lambda net: untyped.to_float(net.parameters(), FP16), TypeError, "expected a Cell or a torch module"),
    ],
)
def test_a_wrong_flag_is_refused_and_changes_nothing(call: object, error: type[Exception], text: str) -> None:
    net = LeNet5()
    with pytest.raises(error, match=text):
        call(net)  # type: ignore[operator]
    assert net.get_flags() == {} and hs.prepared_policy(net) is None


def test_a_network_given_to_prepare_is_not_overwritten_by_a_flag_or_a_level() -> None:
    net = LeNet5()
    hs.prepare(net.fc1, policy=hs.Policy.of("mixed", dtype="bf16"))
    for call in (
        lambda: net.add_flags_recursive(fp16=True),
        lambda: ms.amp.auto_mixed_precision(net, "O2"),
        lambda: ms.nn.TrainOneStepCell(ms.nn.WithLossCell(net, ms.nn.MSELoss()), torch.optim.SGD(net.parameters())),
    ):
        with pytest.raises(RuntimeError, match="prepared with hs.prepare and policy 'mixed'"):
            call()
    assert net.get_flags() == {} and hs.prepared_policy(net) is None and hs.prepared_policy(net.fc1) is not None


def test_a_cell_takes_mindspores_constructor_options() -> None:
    class Backbone(ms.nn.Cell):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.dense = ms.nn.Dense(2, 2)

        def construct(self, x: torch.Tensor) -> Any:
            return self.dense(x)

    x = torch.rand(1, 2)
    accepted: list[dict[str, Any]] = [{"auto_prefix": False}, {"auto_prefix": True, "flags": None}, {"flags": {}}]
    for options in accepted:
        net = Backbone(**options)
        assert torch.equal(net(x), net.dense(x)) and len(net.trainable_params()) == 2 and net.cls_name == "Backbone"
    net = Backbone(auto_prefix=False, flags={"fp16": True})
    assert net.get_flags()["fp16"] and torch.equal(net(x), net(x).half().float())
    assert len(list(ms.nn.CellList([net], auto_prefix=False))) == 1
    with pytest.raises(TypeError, match="flags='fp16' is a str; expected a dict"):
        Backbone(flags="fp16")
    with pytest.raises(TypeError, match="auto_prefix=1; expected True or False"):
        Backbone(auto_prefix=1)
