"""The document's two programs run, and do what its seven steps say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep.compat.mindspore as ms
from tests.compat.mindspore.nets import FP16, FP32, LeNet5, formats, training, watched

SEEDS = Path(__file__).resolve().parents[3] / "examples" / "seeds"
FILES = sorted(SEEDS.glob("mindspore_*.py"))


def run(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SEEDS / f"mindspore_{name}.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_seed_says_which_document_it_is_and_what_was_changed(file: Path) -> None:
    text = file.read_text()
    header = text.split('"""')[1]
    assert 'tutorial "Mixed Precision"' in header and "Changed:" in header
    code = text.split("# ---", 1)[1]
    assert set(re.findall(r"^from (\S+) import", text, re.M)) <= {
        "halfstep.compat.mindspore",
        "halfstep.compat.mindspore.common",
        "halfstep.compat.mindspore.nn",
        "halfstep.compat.mindspore.ops",
        "halfstep.compat.mindspore.train",
    }
    assert "super(LeNet5, self).__init__()" in code and "train_network(predict, label, scaling_sens)" in code


@pytest.mark.parametrize("name", ["auto", "manual"])
def test_a_seed_runs_and_its_step_returns_loss_overflow_and_the_scale_given(name: str) -> None:
    made = run(name)
    loss, overflow, scale = made["output"]
    assert loss.dtype is FP32 and loss.shape == () and 0 < float(loss) < 1
    assert overflow.dtype is torch.bool and not overflow
    assert float(scale) == 1.0


@pytest.mark.parametrize("name", ["auto", "manual"])
def test_a_seed_goes_on_to_learn_and_its_weights_and_gradients_stay_fp32(name: str) -> None:
    made = run(name)
    step, net, inputs = made["train_network"], made["net"], (made["predict"], made["label"], made["scaling_sens"])
    losses = [float(step(*inputs)[0]) for _ in range(12)]
    assert losses[-1] < 0.2 * losses[0]
    assert {p.dtype for p in net.parameters()} == {FP32}
    state = made["optimizer"].state
    assert {state[p]["momentum_buffer"].dtype for p in net.parameters()} == {FP32}


def test_the_automatic_seed_runs_every_layer_in_fp16_and_the_loss_in_fp32() -> None:
    made = run("auto")
    with watched(made["train_network"]) as seen:
        made["train_network"](made["predict"], made["label"], made["scaling_sens"])
    layers = [f"network.backbone.{n}" for n in ("conv1", "conv2", "fc1", "fc2", "fc3", "relu", "max_pool2d")]
    assert {seen[n][1] for n in layers} == {FP16}
    assert seen["network.loss_fn"] == (FP32, FP32)


def test_the_manual_seed_runs_fc3_in_fp32_and_the_rest_in_fp16() -> None:
    made = run("manual")
    with watched(made["net"]) as seen:
        made["net"](made["predict"])
    assert seen["fc3"] == (FP16, FP32)
    assert {seen[n][1] for n in ("conv1", "conv2", "fc1", "fc2", "relu", "max_pool2d")} == {FP16}


@pytest.mark.parametrize("fp32_first", [True, False])
def test_fc3_is_fp32_in_both_orders_of_the_flags(fp32_first: bool) -> None:
    net = LeNet5(fp32_first=fp32_first)
    net.add_flags_recursive(fp16=True)
    if not fp32_first:
        net.fc3.add_flags_recursive(fp32=True)
    seen = formats(net)
    assert seen["fc3"] is FP32 and seen["fc2"] is FP16 and net.fc3.weight.dtype is FP32
    x = torch.rand(2, 84).half()
    exact = torch.nn.functional.linear(x.float(), net.fc3.weight, net.fc3.bias)
    assert torch.equal(net.fc3(x), exact)  # not computed low and widened


def test_automatic_manual_and_fp32_training_agree_as_closely_as_fp16_allows() -> None:
    curves = {}
    for how in ("fp32", "auto", "manual"):
        torch.manual_seed(0)
        net = LeNet5(fp32_first=how == "manual")
        if how == "manual":
            net.add_flags_recursive(fp16=True)
        with_loss, optimizer = training(net)
        if how == "manual":
            step: Any = ms.nn.TrainOneStepWithLossScaleCell(with_loss, optimizer)
        else:
            step = ms.amp.build_train_network(with_loss, optimizer, level="O2" if how == "auto" else "O0")
        torch.manual_seed(1)
        x, y = torch.rand(8, 1, 32, 32), torch.rand(8, 10)
        sens = ms.Tensor([1024.0])
        curves[how] = [float(torch.as_tensor(step(x, y, sens)[0] if how != "fp32" else step(x, y))) for _ in range(8)]
    assert curves["fp32"][-1] < 0.7 * curves["fp32"][0]
    for how in ("auto", "manual"):
        assert curves[how] != curves["fp32"]
        assert curves[how] == pytest.approx(curves["fp32"], rel=5e-3)


@pytest.mark.filterwarnings("ignore:build_train_network:UserWarning")
def test_without_norms_o1_o2_o3_and_manual_give_identical_numbers_as_measured_in_mindspore() -> None:
    curves = {}
    for how in ("O0", "O1", "O2", "O3", "manual"):
        torch.manual_seed(0)
        net = LeNet5()
        if how == "manual":
            net.add_flags_recursive(fp16=True)
        with_loss, optimizer = training(net)
        level = "O0" if how == "manual" else how
        step = ms.amp.build_train_network(with_loss, optimizer, level=level, loss_scale_manager=None)
        torch.manual_seed(1)
        x, y = torch.rand(8, 1, 32, 32), torch.rand(8, 10)
        curves[how] = [float(step(x, y)) for _ in range(16)]
    assert curves["O1"] == curves["O2"] == curves["O3"] == curves["manual"] != curves["O0"]
    assert curves["O1"] == pytest.approx(curves["O0"], rel=2e-3)
