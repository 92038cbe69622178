"""Operator tables: complete, sourced, and true to torch's dispatcher, its behaviour and Apex's published lists."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.errors import PolicyError
from halfstep.policy.operators import NO_LOW_KERNEL, TABLES, _shorten, canonical, known, losses, table
from halfstep.policy.rule_kinds import RULES

DEVICES = ("cpu", "cuda")

APEX = {  # https://github.com/NVIDIA/apex, apex/amp/lists/, transcribed; RNN functions from apex/amp/rnn_compat.py
    "low": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu addmm addmv
        addr matmul mm mv addbmm baddbmm bmm rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell
        lstm_cell""",
    "fp32": """interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm
        local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy
        hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
        multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss
        soft_margin_loss triplet_margin_loss ctc_loss acos asin cosh erfinv exp expm1 log log10 log2 reciprocal
        rsqrt sinh tan pow cumprod cumsum dist norm prod std sum var renorm""",
    "widest": """addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne sub cat stack""",
    "banned": "binary_cross_entropy",
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_complete(name: str, device: str) -> None:
    for op, row in table(name, device).items():
        assert row.op == op == canonical(op), "the one name of an operator of this torch"
        assert row.rule in RULES
        assert row.kind and row.reason and row.source
    assert (len(table(name, device)) == 0) == (name == "none")


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"operator table: name must be .* and is 'apex'; did you mean 'apex-o1'\?"):
        table("apex")


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        table("mixed")["linear"] = table("mixed")["sum"]  # type: ignore[index]


class TestTorch:
    @pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the data are of torch 2.13")
    @pytest.mark.parametrize("device", DEVICES)
    def test_is_what_the_dispatcher_has_registered(self, device: str) -> None:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
        names = {_shorten(r.removeprefix("aten::").partition(".")[0]) for r in registered if r.startswith("aten::")}
        assert table("torch", device).keys() == (names & known()) - {"pad"}  # reflect and replicate only: see the file

    @pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("op", "call"),
        [
            ("linear", lambda x: F.linear(x, x)),
            ("matmul", lambda x: x @ x),
            ("conv1d", lambda x: F.conv1d(x, x[:, :, None])),
            ("prelu", lambda x: F.prelu(x, x[0, :1])),
            ("mse_loss", lambda x: F.mse_loss(x, x)),
            ("cross_entropy", lambda x: F.cross_entropy(x, torch.tensor([0, 1]))),
            ("prod", lambda x: x.prod()),
            ("trace", lambda x: x.trace()),
            ("linalg.inv", lambda x: torch.linalg.inv(x)),
            ("softmax", lambda x: x.softmax(0)),
            ("layer_norm", lambda x: F.layer_norm(x, (2,))),
            ("exp", lambda x: x.exp()),
            ("mean", lambda x: x.mean()),
        ],
    )
    def test_is_what_autocast_does_on_the_cpu(
        self, op: str, call: Callable[[Tensor], Tensor], source: torch.dtype
    ) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=source)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = call(x).dtype
        row = table("torch", "cpu").get(op)
        want = {"low": torch.bfloat16, "fp32": torch.float32, "": source}[row.rule if row else ""]
        assert made is want

    def test_other_accelerators_have_cudas(self) -> None:
        assert table("torch", "xpu") is table("torch", "cuda") is not table("torch", "cpu")


class TestApex:
    @pytest.mark.parametrize("rule", APEX)
    def test_is_apexs_lists(self, rule: str) -> None:
        rows = {op: row for op, row in table("apex-o1").items() if row.kind != "addition"}
        assert sorted(op for op, row in rows.items() if row.rule == rule) == sorted(APEX[rule].split())

    def test_additions_say_so(self) -> None:
        for row in table("apex-o1").values():
            assert (row.kind == "addition") == row.source.startswith("halfstep") == row.reason.startswith("not in Apex")

    @pytest.mark.parametrize(
        ("op", "rule"),
        [("einsum", "low"), ("scaled_dot_product_attention", "low"), ("logsumexp", "fp32"), ("rms_norm", "fp32")],
    )
    def test_has_what_users_missed(self, op: str, rule: str) -> None:
        assert table("apex-o1")[op].rule == rule


class TestMixed:
    @pytest.mark.parametrize("device", DEVICES)
    def test_pins_everything_torch_moves_on_some_device(self, device: str) -> None:
        assert table("torch", device).keys() <= table("mixed").keys()

    def test_is_the_same_on_every_device(self) -> None:
        assert table("mixed", "cpu") == table("mixed", "cuda")

    def test_bans_nothing(self) -> None:
        assert "banned" not in {row.rule for row in table("mixed").values()}

    @pytest.mark.parametrize(
        ("rule", "ops"),
        [
            ("low", "linear matmul bmm einsum conv2d scaled_dot_product_attention lstm layer_norm rms_norm group_norm"),
            ("fp32", "cross_entropy nll_loss mse_loss binary_cross_entropy log_softmax sum exp pow norm linalg.svd"),
            ("keep", "softmax interpolate pad max_pool3d"),
            ("widest", "cat stack index_put scatter_add masked_scatter grid_sample"),
        ],
    )
    def test_has_the_rules_the_design_gives(self, rule: str, ops: str) -> None:
        assert {op: table("mixed")[op].rule for op in ops.split()} == dict.fromkeys(ops.split(), rule)

    @pytest.mark.parametrize(
        "op", ["batch_norm", "instance_norm", "multi_head_attention_forward", "gelu", "mean", "add"]
    )
    def test_leaves_to_their_inputs(self, op: str) -> None:
        assert op not in table("mixed")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: F.layer_norm(x, (8,)),
            lambda x: F.rms_norm(x, (8,)),
            lambda x: F.group_norm(x, 2),
            lambda x: x.softmax(-1),
            lambda x: F.pad(x, (1, 1), mode="reflect"),
            lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
            lambda x: F.grid_sample(x[None], torch.zeros(1, 2, 2, 2, dtype=x.dtype), align_corners=False),
            lambda x: F.max_pool3d(x[None], 2),
        ],
    )
    def test_low_and_keep_rows_have_low_kernels(self, call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        x = torch.ones(2, 4, 8, dtype=dtype, requires_grad=True)
        y = call(x)
        y.sum().backward()
        assert y.dtype is dtype

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: torch.linalg.inv(x),
            lambda x: torch.linalg.svd(x),
            lambda x: torch.linalg.det(x),
            lambda x: torch.linalg.lu_factor(x),
            lambda x: torch.fft.fft(x),
            lambda x: torch.quantile(x, 0.5),
            lambda x: torch.cdist(x, x),
            lambda x: F.pdist(x),
            lambda x: torch.linalg.matrix_norm(x, "nuc"),
            lambda x: F.avg_pool3d(x[None, None].expand(1, 3, 3, 3).contiguous(), 2),
        ],
    )
    def test_rows_without_a_low_kernel_have_none(self, call: Callable[[Tensor], object]) -> None:
        with pytest.raises(RuntimeError, match=re.compile("not implemented|dtype|types? of|Unsupported|support", re.I)):
            call(torch.eye(3, dtype=torch.bfloat16))

    @pytest.mark.parametrize(
        "call",
        [
            lambda a, b: torch.index_put(a, (torch.arange(3),), b),
            lambda a, b: torch.index_copy(a, 0, torch.arange(3), b),
            lambda a, b: torch.index_add(a, 0, torch.arange(3), b),
            lambda a, b: torch.scatter(a, 0, torch.zeros(3, 3, dtype=torch.int64), b),
            lambda a, b: torch.scatter_reduce(a, 0, torch.zeros(3, 3, dtype=torch.int64), b, "sum"),
            lambda a, b: torch.masked_scatter(a, a >= 0, b),
            lambda a, b: torch.cartesian_prod(a[0], b[0]),
            lambda a, b: torch.linalg.cross(a, b),
            lambda a, b: torch.dot(a[0], b[0]),
        ],
    )
    def test_widest_rows_refuse_mixed_formats_by_themselves(self, call: Callable[[Tensor, Tensor], object]) -> None:
        with pytest.raises((RuntimeError, IndexError), match=re.compile("same|match|must|scalar type|equal", re.I)):
            call(torch.zeros(3, 3, dtype=torch.bfloat16), torch.zeros(3, 3))


class TestAllLow:
    def test_lowers_what_has_a_kernel_and_nothing_else(self) -> None:
        mixed = table("mixed")
        for op, row in table("all-low").items():
            assert row.rule == ("fp32" if NO_LOW_KERNEL in mixed[op].kind else "low")
        assert table("all-low").keys() == mixed.keys()

    def test_says_what_mixed_has(self) -> None:
        assert "mixed: fp32" in table("all-low")["sum"].reason


def test_losses_are_named_as_losses() -> None:
    spoken = {op for op in known() if op.endswith(("_loss", "cross_entropy", "_with_logits"))} | {"kl_div"}
    assert losses() == spoken - {"linear_cross_entropy"}  # its product belongs low
