"""MegEngine's document runs as it is written, and its claims hold."""

from __future__ import annotations

import hashlib
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine import amp, hub
from halfstep.compat.megengine.autodiff import GradManager

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "seeds" / "megengine_amp.py"


@pytest.fixture(scope="module")
def seed() -> dict[str, Any]:
    """Run the document; return its names."""
    torch.manual_seed(0)
    return runpy.run_path(str(EXAMPLE))


def test_the_code_is_the_documents_but_for_its_imports() -> None:
    code = EXAMPLE.read_text(encoding="utf-8").split("# fmt: off\n")[1]
    assert code.count("halfstep.compat.megengine") == code.count("halfstep") == 6
    lines = [
        line.rstrip() for line in code.replace("halfstep.compat.megengine", "megengine").splitlines() if line.strip()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()  # of the code on the page, line by line
    assert digest == "dca4a41c6fd42492378b2fb39e515c8d75f802db6233706e9b534f28f43e4bb8"


def test_what_the_document_claims_holds(seed: dict[str, Any]) -> None:
    assert seed["oup"].dtype is torch.float16
    assert not amp.enabled and seed["net"](seed["inp"]).dtype is torch.float32
    assert seed["train_func"](seed["inp"]).dtype is torch.float16
    assert {p.dtype for p in seed["net"].parameters()} == {torch.float32}


def test_the_documents_step_trains(seed: dict[str, Any]) -> None:
    loss = seed["train_step"](seed["image"], seed["label"])
    assert loss.dtype is torch.float32 and loss.item() < 0.5 * math.log(1000)
    assert seed["scaler"].state_dict()["_growth_tracker"] == 3 and seed["scaler"].scale_factor == 16.0
    assert all(p.grad is None for p in seed["net"].parameters())


def test_every_layer_is_fp16_and_the_loss_and_the_gradients_are_fp32() -> None:
    net = hub.load("megengine/models", "resnet18", width=4, num_classes=3)
    seen: dict[str, torch.dtype] = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output.dtype}))
    gm = GradManager().attach(net.parameters())
    with amp.autocast(), gm:
        loss = F.nn.cross_entropy(net(torch.rand(2, 3, 32, 32)), torch.tensor([0, 1]))
        gm.backward(loss)
    assert set(seen.values()) == {torch.float16} and {"conv1", "bn1", "maxpool", "layers.7", "fc", ""} <= seen.keys()
    assert loss.dtype is torch.float32
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}
