"""What the options of other libraries' front-ends promise for each field of a policy.

A user of a front-end writes no policy. The cell of a field is about the values that the front-end's own options lead
to; where no option reaches a field, one value is promised, and the cell says which. The facts are those of
docs/compat_*.md and of the libraries' own documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from halfstep.compat.apex import amp as apex
from halfstep.compat.megengine import amp as megengine
from halfstep.compat.mindspore import add_flags
from halfstep.compat.mindspore import amp as mindspore
from tests.promises.fronts import Apex, Front, MegEngine, MindSpore, TorchAmp
from tests.promises.probe import Facts

__all__ = ["OPTIONS", "Options"]

B, H = torch.bfloat16, torch.float16
O1, O2, O3 = ({"opt_level": level, "cast_model_type": B} for level in ("O1", "O2", "O3"))
"""Apex's levels in bf16."""


@dataclass(frozen=True)
class Options:
    """One field at one front-end.

    Attributes:
        cases: options, and the facts they promise; a single case is a value that no option changes.
        words: what the page says: the option, or the value.
    """

    cases: tuple[tuple[Front, Facts], ...]
    words: str

    @property
    def fixed(self) -> bool:
        """Whether no option reaches the field."""
        return len(self.cases) == 1

    def text(self) -> str:
        """Return what the page says."""
        return f"fixed: {self.words}" if self.fixed else f"works: {self.words}"


def _fixed(front: Front, words: str, **facts: Any) -> Options:
    return Options(((front, {name.replace("_", " "): fact for name, fact in facts.items()}),), words)


def _table(linear: str, softmax: str, norm: str, exp: str) -> Facts:
    return {"linear": linear, "softmax": softmax, "norm": norm, "exp": exp}


TORCH_AMP = {
    "name": _fixed(TorchAmp(), "torch", name="torch"),
    "dtype": Options(
        (
            (TorchAmp(dtype=B), {"linear": "bf16"}),
            (TorchAmp(dtype=H), {"linear": "fp16"}),
            (TorchAmp(enabled=False), {"linear": "fp32"}),
        ),
        "`dtype`, `enabled`",
    ),
    "params": _fixed(TorchAmp(), "as they are", weight="fp32"),
    "norms": _fixed(TorchAmp(), "as they are", norm_weight="fp32"),
    "master": _fixed(TorchAmp(), "fp32 weights are stepped as they are", small_updates=True, digits="24"),
    "grads": _fixed(TorchAmp(), "the weights' own format", sum="fp32"),
    "table": Options(
        (
            (TorchAmp(dtype=B), _table("bf16", "bf16", "bf16", "bf16")),
            (TorchAmp(enabled=False), _table("fp32", "fp32", "fp32", "fp32")),
        ),
        "torch's own lists, or `enabled=False`",
    ),
    "ops": _fixed(TorchAmp(), "torch's lists and `hs.operator`", linear="bf16", exp="bf16", custom="fp32"),
    "modules": _fixed(TorchAmp(), "none", linear="bf16", head="bf16"),
    "residual": _fixed(TorchAmp(), "fp32", embedding="fp32", add="fp32"),
    "inputs": _fixed(TorchAmp(), "as they are", input="fp32"),
    "outputs": _fixed(TorchAmp(), "as computed", output="bf16"),
    "loss": _fixed(TorchAmp(), "fp32, by torch's lists", inner_loss="fp32"),
    "reduce": _fixed(TorchAmp(), "nothing is summed here", summed="nothing"),
    "state": _fixed(TorchAmp(), "the weights' own format", state="fp32"),
    "scale": Options(
        (
            (TorchAmp(dtype=H), {"small gradients": False, "scale": 1.0}),
            (TorchAmp(dtype=H, scaler={"enabled": True}), {"small gradients": True, "scale": 65536.0}),
            (TorchAmp(dtype=H, scaler={"enabled": True, "init_scale": 64.0}), {"small gradients": True, "scale": 64.0}),
        ),
        "`GradScaler(init_scale, enabled)`",
    ),
    "emulate": _fixed(TorchAmp(dtype=H), "where there are no fp16 units", products="fp32"),
}

APEX = {
    "name": Options(
        ((Apex(opt_level="O1"), {"name": "apex O1 fp16"}), (Apex(**O2), {"name": "apex O2 bf16"})), "`opt_level`"
    ),
    "dtype": Options(
        (
            (Apex(opt_level="O1"), {"linear": "fp16"}),
            (Apex(**O1), {"linear": "bf16"}),
            (Apex(opt_level="O0"), {"linear": "fp32"}),
        ),
        "`opt_level`, `cast_model_type`",
    ),
    "params": Options(((Apex(**O1), {"weight": "fp32"}), (Apex(**O2), {"weight": "bf16"})), "`opt_level`"),
    "norms": Options(
        (
            (Apex(**O2), {"batch norm weight": "fp32", "norm weight": "bf16"}),
            (Apex(**O2, keep_batchnorm_fp32=False), {"batch norm weight": "bf16", "norm weight": "bf16"}),
        ),
        "`keep_batchnorm_fp32`, for BatchNorm only",
    ),
    "master": Options(
        (
            (Apex(**O2), {"small updates": True, "digits": "24"}),
            (Apex(**O2, master_weights=False), {"small updates": False, "digits": "8"}),
        ),
        "`master_weights`",
    ),
    "grads": Options(
        ((Apex(**O2), {"sum": "fp32"}), (Apex(**O2, delay_unscale=True), {"sum": "bf16"})),
        "fp32 from `scale_loss` to `scale_loss`; low with `delay_unscale=True`",
    ),
    "table": Options(
        (
            (Apex(**O1), _table("bf16", "fp32", "fp32", "fp32")),
            (Apex(**O2), _table("bf16", "bf16", "bf16", "fp32")),
            (Apex(**O3), _table("bf16", "bf16", "bf16", "bf16")),
        ),
        "`opt_level`",
    ),
    "ops": Options(
        (
            (Apex(**O1), {"exp": "fp32", "linear": "bf16"}),
            (Apex(**O1, register=[(apex.register_half_function, torch, "exp")]), {"exp": "bf16", "linear": "bf16"}),
        ),
        "`register_half_function` and the like, at O1",
    ),
    "modules": _fixed(Apex(**O2), "none but BatchNorm's", linear="bf16", head="bf16", norm="bf16"),
    "residual": Options(
        ((Apex(**O1), {"embedding": "fp32", "add": "fp32"}), (Apex(**O2), {"embedding": "bf16", "add": "bf16"})),
        "`opt_level`",
    ),
    "inputs": Options(((Apex(**O1), {"input": "fp32"}), (Apex(**O2), {"input": "bf16"})), "`opt_level`"),
    "outputs": Options(
        ((Apex(**O2), {"output": "fp32"}), (Apex(**O2, cast_model_outputs=B), {"output": "bf16"})),
        "`cast_model_outputs`",
    ),
    "loss": Options(((Apex(**O2), {"inner loss": "fp32"}), (Apex(**O3), {"inner loss": "bf16"})), "`opt_level`"),
    "reduce": Options(
        (
            (Apex(**O2, parallel={}), {"summed": "bf16"}),
            (Apex(**O2, parallel={"allreduce_always_fp32": True}), {"summed": "fp32"}),
        ),
        "`DistributedDataParallel(allreduce_always_fp32=)`",
    ),
    "state": Options(
        ((Apex(**O2), {"state": "fp32"}), (Apex(**O3), {"state": "bf16"})),
        "`master_weights`: the format of what the optimizer steps",
    ),
    "scale": Options(
        (
            (Apex(opt_level="O1"), {"small gradients": True, "scale": 65536.0}),
            (Apex(opt_level="O1", loss_scale=1.0), {"small gradients": False, "scale": 1.0}),
            (Apex(opt_level="O1", loss_scale=64.0), {"small gradients": True, "scale": 64.0}),
        ),
        "`loss_scale`",
    ),
    "emulate": _fixed(Apex(opt_level="O1"), "where there are no fp16 units", products="fp32"),
}

LOW_PRECISION = {"low_prec_dtype": "bfloat16"}
MEGENGINE = {
    "name": Options(
        (
            (MegEngine(), {"name": "megengine"}),
            (MegEngine(policy=megengine.AS_SHIPPED), {"name": "megengine-1.13"}),
        ),
        "`amp.policy`",
    ),
    "dtype": Options(
        (
            (MegEngine(), {"linear": "fp16"}),
            (MegEngine(**LOW_PRECISION), {"linear": "bf16"}),
            (MegEngine(enabled=False), {"linear": "fp32"}),
        ),
        "`low_prec_dtype`, `enabled`",
    ),
    "params": _fixed(MegEngine(), "as they are", weight="fp32"),
    "norms": _fixed(MegEngine(), "as they are", norm_weight="fp32", batch_norm_weight="fp32"),
    "master": _fixed(MegEngine(), "fp32 weights are stepped as they are", small_updates=True, digits="24"),
    "grads": _fixed(MegEngine(), "the weights' own format", sum="fp32"),
    "table": Options(
        (
            (MegEngine(**LOW_PRECISION), _table("bf16", "fp32", "fp32", "fp32")),
            (MegEngine(**LOW_PRECISION, policy=megengine.AS_SHIPPED), _table("bf16", "bf16", "fp32", "fp32")),
        ),
        "`amp.policy`",
    ),
    "ops": Options(
        (
            (MegEngine(**LOW_PRECISION), {"exp": "fp32", "linear": "bf16"}),
            (MegEngine(**LOW_PRECISION, high_prec_dtype="bfloat16"), {"exp": "bf16", "linear": "bf16"}),
            (
                MegEngine(**LOW_PRECISION, policy=megengine.MEGENGINE.with_ops(fp32=["linear"])),
                {"exp": "fp32", "linear": "fp32"},
            ),
        ),
        "`high_prec_dtype`, `amp.policy`",
    ),
    "modules": _fixed(MegEngine(), "none", linear="fp16", head="fp16"),
    "residual": _fixed(MegEngine(), "fp32", embedding="fp32", add="fp32"),
    "inputs": _fixed(MegEngine(), "as they are", input="fp32"),
    "outputs": _fixed(MegEngine(), "as computed", output="fp16"),
    "loss": _fixed(MegEngine(), "fp32", inner_loss="fp32"),
    "reduce": _fixed(MegEngine(), "nothing is summed here", summed="nothing"),
    "state": _fixed(MegEngine(), "the weights' own format", state="fp32"),
    "scale": Options(
        (
            (MegEngine(), {"small gradients": True, "scale": 16.0}),
            (MegEngine(init_scale=1.0), {"small gradients": False, "scale": 1.0}),
            (MegEngine(init_scale=4096.0), {"small gradients": True, "scale": 4096.0}),
        ),
        "`GradScaler(init_scale)`",
    ),
    "emulate": _fixed(MegEngine(), "where there are no fp16 units", products="fp32"),
}

MINDSPORE = {
    "name": Options(
        ((MindSpore(level="O1"), {"name": "mindspore-O1"}), (MindSpore(level="O3"), {"name": "mindspore-O3"})),
        "`amp_level`",
    ),
    "dtype": Options(
        (
            (MindSpore(level="O1"), {"linear": "bf16"}),
            (MindSpore(level="O1", dtype=H), {"linear": "fp16"}),
            (MindSpore(level="O0"), {"linear": "fp32"}),
        ),
        "`amp_level`, `dtype`",
    ),
    "params": _fixed(MindSpore(level="O3"), "fp32 at every level", weight="fp32"),
    "norms": _fixed(MindSpore(level="O3"), "fp32 at every level", norm_weight="fp32", batch_norm_weight="fp32"),
    "master": _fixed(MindSpore(level="O3"), "fp32 weights are stepped as they are", small_updates=True, digits="24"),
    "grads": _fixed(MindSpore(level="O3"), "fp32, the weights' own format", sum="fp32"),
    "table": Options(
        (
            (MindSpore(level="O1"), _table("bf16", "fp32", "fp32", "fp32")),
            (MindSpore(level="O3"), _table("bf16", "bf16", "bf16", "bf16")),
            (MindSpore(level="O0"), _table("fp32", "fp32", "fp32", "fp32")),
        ),
        "`amp_level`",
    ),
    "ops": Options(
        (
            (MindSpore(level="O1"), {"linear": "bf16", "head": "bf16"}),
            (MindSpore(white_list=[torch.nn.Conv2d]), {"linear": "fp32", "head": "fp32"}),
        ),
        "`custom_mixed_precision(white_list=)`",
    ),
    "modules": Options(
        (
            (MindSpore(black_list=[torch.nn.Conv2d]), {"linear": "bf16", "head": "bf16"}),
            (MindSpore(black_list=[torch.nn.Linear]), {"linear": "fp32", "head": "fp32"}),
            (MindSpore(level="O3", flags=[(add_flags, "head", {"fp32": True})]), {"linear": "bf16", "head": "fp32"}),
        ),
        "`custom_mixed_precision(black_list=)`, `add_flags`",
    ),
    "residual": Options(
        (
            (MindSpore(level="O1"), {"embedding": "fp32", "add": "fp32"}),
            (MindSpore(level="O3"), {"embedding": "bf16", "add": "bf16"}),
        ),
        "`amp_level`",
    ),
    "inputs": _fixed(MindSpore(level="O3"), "as they are; operators cast them", input="fp32"),
    "outputs": _fixed(MindSpore(level="O3"), "fp32 at every level", output="fp32"),
    "loss": _fixed(MindSpore(level="O3"), "fp32 at every level", inner_loss="fp32", loss="fp32"),
    "reduce": _fixed(MindSpore(level="O3"), "nothing is summed here", summed="nothing"),
    "state": _fixed(MindSpore(level="O3"), "fp32, the weights' own format", state="fp32"),
    "scale": Options(
        (
            (MindSpore(level="O3", dtype=H), {"small gradients": False, "scale": 1.0}),
            (
                MindSpore(level="O3", dtype=H, loss_scale_manager=mindspore.DynamicLossScaleManager(65536, 2, 1000)),
                {"small gradients": True, "scale": 65536.0},
            ),
            (
                MindSpore(level="O3", dtype=H, loss_scale_manager=mindspore.FixedLossScaleManager(64.0, False)),
                {"small gradients": True, "scale": 64.0},
            ),
        ),
        "`loss_scale_manager`",
    ),
    "emulate": _fixed(MindSpore(level="O3", dtype=H), "where there are no fp16 units", products="fp32"),
}

OPTIONS: Mapping[str, Mapping[str, Options]] = MappingProxyType(
    {"torch_amp": TORCH_AMP, "apex": APEX, "megengine": MEGENGINE, "mindspore": MINDSPORE}
)
"""Front-end -> field -> what its options promise."""
