"""hs.exported: a torch.export program with the casts of the policy, and no cast of a weight left."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import BindError, UnbuiltError
from tests.step.serving import logits, networks, prepared

NETS = networks()


def policy(name: str, dtype: str = "bf16") -> hs.Policy:
    return hs.Policy.of(name, dtype=dtype)


def casts_of_weights(program: torch.export.ExportedProgram) -> list[str]:
    """Return the casts of parameters in a program."""
    weights = set(program.graph_signature.parameters) | set(program.graph_signature.inputs_to_parameters)
    found = []
    for node in program.graph.nodes:
        if "aten.to" in str(node.target) or "_to_copy" in str(node.target):
            source = node.args[0]
            found += [source.name] if source.name in weights else []
    return found


KINDS = [*((name, "bf16") for name in ("mixed", "torch", "O1", "O2", "pure", "O3")), ("mixed", "fp16"), ("O2", "fp16")]


@pytest.mark.parametrize(
    ("net", "name", "dtype"),
    [  # each policy with one of the nets; all pairs are slow
        pytest.param(net, *kind, marks=() if (i + j) % len(NETS) == 0 else pytest.mark.slow)
        for i, net in enumerate(NETS)
        for j, kind in enumerate(KINDS)
    ],
)
def test_outputs_are_those_of_the_prepared_model_bit_for_bit(net: str, name: str, dtype: str) -> None:
    model, x = NETS[net]
    live = prepared(model, policy(name, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's of its rms_norm, under its own lists
        program = hs.exported(live, (x,))
    with torch.inference_mode():
        expected, got = logits(live(x)), logits(program.module()(x))
    assert torch.equal(expected, got) and expected.dtype is got.dtype
    assert casts_of_weights(program) == [] and "autocast" not in str(program.graph)
    if dtype == "bf16":
        assert any(p.dtype is torch.bfloat16 for p in program.state_dict.values())


def test_the_count_of_casts_can_fail() -> None:
    model, x = NETS["gated"]
    with torch.no_grad():
        raw = torch.export.export(prepared(model, policy("mixed")), (x,))
    assert "autocast" in str(raw.graph)
    assert hs.exported(model, (x,), policy=policy("mixed")).state_dict["0.weight"].dtype is torch.bfloat16
    assert raw.state_dict["0.weight"].dtype is torch.float32


def test_a_size_that_may_change_does() -> None:
    model, x = NETS["attending"]
    live = prepared(model, policy("mixed"))
    program = hs.exported(live, (x,), dynamic_shapes={"tokens": {0: torch.export.Dim("batch", max=64)}})
    more = torch.randint(0, 50, (5, 7))
    assert torch.equal(program.module()(more), live(more))


def test_rules_for_operators_and_modules_are_in_the_program() -> None:
    model, x = NETS["attending"]
    own = policy("mixed").with_ops(fp32=["softmax"]).with_modules({"out": "fp32", "head": "keep"})
    live = prepared(model, own)
    program = hs.exported(live, (x,))
    assert torch.equal(program.module()(x), live(x))
    assert not torch.equal(program.module()(x), prepared(model, policy("mixed"))(x))


def test_exported_and_lowered_files_open_and_run_where_halfstep_is_not_installed(tmp_path: Path) -> None:
    model, x = NETS["convolving"]
    program = hs.exported(model, (x,), policy=policy("mixed"))
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save({"x": x, "expected": program.module()(x)["logits"]}, tmp_path / "data.pt")
    model, x = NETS["gated"]
    plain: Any = hs.lowered(prepared(model, policy("O2")))
    for i, module in enumerate(plain):  # a class of this repository, which the other process could not import
        if type(module).__module__.startswith("tests"):
            plain[i] = nn.Identity()
    x = x.to(torch.bfloat16) if x.is_floating_point() else x
    torch.save({"plain": plain, "x": x, "expected": plain(x)}, tmp_path / "plain.pt")
    script = (
        "import copy, sys; sys.modules['halfstep'] = None\n"
        "import torch; run = torch.export.load(sys.argv[1]).module(); saved = torch.load(sys.argv[2])\n"
        "assert torch.equal(run(saved['x'])['logits'], saved['expected'])\n"
        "saved = torch.load(sys.argv[3], weights_only=False)\n"
        "assert torch.equal(saved['plain'](saved['x']), saved['expected'])\n"
        "assert torch.equal(copy.deepcopy(saved['plain'])(saved['x']), saved['expected'])"
    )
    files = (tmp_path / "program.pt2", tmp_path / "data.pt", tmp_path / "plain.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, *files], check=True, timeout=300)


def test_the_model_stays_as_it_is() -> None:
    model, x = NETS["attending"]
    live = prepared(model, policy("O2")).train()
    before = {name: value.clone() for name, value in live.state_dict().items()}
    hs.exported(live, (x,))
    assert live.training and hs.prepared_policy(live) == policy("O2")
    assert all(torch.equal(before[name], value) for name, value in live.state_dict().items())
    assert live.qkv.weight.requires_grad and live.qkv.weight.dtype is torch.bfloat16


def test_a_program_is_a_module_for_the_compiler() -> None:
    model, x = NETS["gated"]
    run = hs.exported(model, (x,), policy=policy("mixed")).module()
    assert torch.equal(torch.compile(run, backend="aot_eager")(x), run(x))


class Counting(nn.Module):
    """Writes into a buffer that it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count.to(x.dtype)


def test_a_buffer_that_is_written_stays_one() -> None:
    live = hs.prepare(nn.Sequential(nn.Linear(4, 4), Counting()), policy=policy("O2"))
    x = torch.randn(2, 4)
    run = hs.exported(live, (x,)).module()
    with torch.no_grad():
        assert all(torch.equal(run(x), live(x)) for _ in range(3))


class Drawing(nn.Module):
    """Draws random numbers in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_outputs_that_differ_are_reported() -> None:
    with pytest.warns(RuntimeWarning, match=r"differs from the model's by .*random in evaluation"):
        hs.exported(nn.Sequential(nn.Linear(4, 4), Drawing()), (torch.randn(2, 4),), policy=policy("mixed"))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.a, lambda y: F.linear(y, self.a.weight), (x,))  # type: ignore[no-any-return]


def test_control_flow_is_refused() -> None:
    with pytest.raises(UnbuiltError, match="control flow"):
        hs.exported(Branching(), (torch.randn(2, 4),), policy=policy("mixed"))


def test_a_model_without_a_policy_is_refused() -> None:
    with pytest.raises(BindError, match="not prepared: pass policy="):
        hs.exported(NETS["gated"][0], (torch.randn(2, 6),))


@pytest.mark.parametrize("net", ["attending", "convolving"])
def test_an_fp16_program_runs_in_onnxruntime(net: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x = NETS[net]
    program = hs.exported(model, (x,), policy=policy("mixed", "fp16"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "m.onnx")  # type: ignore[union-attr]
    session = runtime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = logits(program.module()(x))
    assert float((torch.from_numpy(got) - expected).norm() / expected.norm()) < 2.0**-9
