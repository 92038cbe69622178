"""Which operator runs in which format: lists that can be changed, are the same on every device, and keep norms low.

CUDA's lists are asked on fake CUDA tensors: torch's real dispatcher for that device, without values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from tests.pains.eyes import Calls
from tests.pains.pain import pain

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten


def short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", HALF: "fp16", FP32: "fp32"}[dtype]


@pain(1, torch_fails_with=AssertionError, saying="wanted softmax in fp32")
def test_two_regions_of_one_program_follow_different_lists(amp: Any) -> None:
    scores = torch.randn(4, 8, dtype=BF16)
    with amp.region("bf16", fp32=["softmax"]):
        wide = F.softmax(scores, -1)
    with amp.region("bf16", low=["softmax"]):
        narrow = F.softmax(scores, -1)
    assert wide.dtype is FP32, f"wanted softmax in fp32 and got {wide.dtype}"
    assert narrow.dtype is BF16


@pain(1, torch_fails_with=AssertionError, saying="the head's product ran in bf16")
def test_one_module_is_kept_in_fp32_without_touching_its_code(amp: Any) -> None:
    ran: dict[str, torch.dtype] = {}

    def look(func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func is aten.addmm.default:
            ran["body" if args[2].shape == (8, 8) else "head"] = args[2].dtype

    model = amp.bind(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), "bf16", {"1": "fp32"})
    with Calls(look):
        model(torch.randn(4, 8))
    assert ran["body"] is BF16
    assert ran["head"] is FP32, f"the head's product ran in {short(ran['head'])}"


@pytest.mark.parametrize("norm", ["native_layer_norm", "native_group_norm"])
@pain(2, torch_fails_with=AssertionError, saying="saves for backward was made fp32")
def test_a_norm_saves_low_activations(amp: Any, norm: str) -> None:
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def look(func: Any, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, tuple):
            seen[func._schema.name.removeprefix("aten::")] = (args[0].dtype, result[0].dtype)

    with FakeTensorMode(), Calls(look), amp.region("bf16", "cuda"):
        x = torch.empty(16, 8, device="cuda", dtype=BF16)
        weight, bias = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
        F.layer_norm(x, (8,), weight, bias)
        F.group_norm(x, 2, weight, bias)
    kept, given = seen[norm]
    assert kept is BF16, f"the input that {norm} saves for backward was made {short(kept)}"
    assert given is BF16


@pain(3, torch_fails_with=AssertionError, saying="rms_norm of bf16 gave torch.float32")
def test_rms_norm_of_a_bf16_model_stays_low(amp: Any) -> None:
    with FakeTensorMode(), amp.region("bf16", "cuda"):
        x, weight = torch.empty(4, 8, device="cuda", dtype=BF16), torch.empty(8, device="cuda", dtype=BF16)
        dtype = F.rms_norm(x, (8,), weight).dtype
    assert dtype is BF16, f"rms_norm of bf16 gave {dtype}"


ANYWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "sum": lambda x: x.sum(-1),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x.pow(3),
    "norm": lambda x: x.norm(dim=-1),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "mv": lambda x: torch.mv(x, x.diagonal()),
    "linear": lambda x: F.linear(x, x),
}


@pain(4, torch_fails_with=AssertionError, saying="on CUDA than on the CPU: softmax, .*layer_norm, .*sum, exp")
def test_an_operator_gives_one_format_on_every_device(amp: Any) -> None:
    found: dict[str, dict[str, torch.dtype]] = {}
    for device in ("cpu", "cuda"):
        with FakeTensorMode(), amp.region("bf16", device):
            x = torch.empty(8, 8, device=device, dtype=BF16)
            found[device] = {name: operator(x).dtype for name, operator in ANYWHERE.items()}
    differ = [name for name in ANYWHERE if found["cpu"][name] is not found["cuda"][name]]
    assert not differ, f"another format on CUDA than on the CPU: {', '.join(differ)}"


@pain(5, torch_fails_with=AssertionError, saying="log-probabilities were rounded to torch.bfloat16")
def test_cross_entropy_does_not_round_log_probabilities_on_cuda(amp: Any) -> None:
    made: list[torch.dtype] = []
    look = Calls(lambda func, args, out: made.append(out.dtype) if func is aten._log_softmax.default else None)
    with FakeTensorMode(), look:
        logits = torch.empty(4, 100, device="cuda", dtype=BF16)
        with amp.region("bf16", "cuda"):
            F.cross_entropy(logits, torch.zeros(4, dtype=torch.long, device="cuda"))
    assert made == [FP32], f"log-probabilities were rounded to {made[0]}"


@pain(5, torch_fails_with=AssertionError, saying="saves 6 bytes for each logit")
def test_cross_entropy_saves_the_vocabulary_once_on_cuda(amp: Any) -> None:
    kept: dict[int, Tensor] = {}  # both kernels save log-probabilities for backward; the same tensor counts once

    def look(func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in {"_log_softmax", "nll_loss_forward"}:
            tensor = result if name == "_log_softmax" else args[0]
            kept[id(tensor)] = tensor

    with FakeTensorMode(), Calls(look), amp.region("bf16", "cuda"):
        logits = torch.empty(16, 1000, device="cuda", dtype=BF16)
        F.cross_entropy(logits, torch.zeros(16, dtype=torch.long, device="cuda"))
    size = sum(tensor.element_size() for tensor in kept.values())
    assert size <= 4, f"cross_entropy saves {size} bytes for each logit"


@pain(22, torch_fails_with=AssertionError, saying="fp16 product kernels on a CPU without units: .*mm")
def test_fp16_on_a_cpu_does_not_run_the_slow_kernels(amp: Any) -> None:
    slow: list[str] = []

    def look(func: Any, args: tuple[Any, ...], result: Any) -> None:
        low = any(isinstance(a, Tensor) and a.dtype is HALF for a in args)
        if low and func._schema.name.rpartition("::")[2] in {"mm", "addmm", "bmm", "convolution"}:
            slow.append(func._schema.name)

    layer, conv = nn.Linear(8, 8), nn.Conv2d(1, 2, 3)
    with Calls(look):
        with amp.autocast("cpu", dtype=HALF):
            out = layer(torch.randn(4, 8)).float().sum() + conv(torch.randn(1, 1, 5, 5)).float().sum()
        out.backward()
    assert not slow, f"fp16 product kernels on a CPU without units: {sorted(set(slow))}"


@pain(41, torch_fails_with=UserWarning, saying="[Aa]utocast only supports dtype")
def test_fp32_is_a_format_like_any_other(amp: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp.region("fp32"):
            assert F.linear(torch.randn(2, 4), torch.randn(3, 4)).dtype is FP32
