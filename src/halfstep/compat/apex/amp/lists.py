"""The operators that Apex's O1 patches, by module and by list, as its documentation and sources name them.

They are those of halfstep's operator table ``apex-o1``, which also says what is done with them.
Source of the names: https://github.com/NVIDIA/apex, apex/amp/lists.
"""

from __future__ import annotations

from types import SimpleNamespace

from halfstep.schema import packaged_toml


def _listed(file: str, *kinds: str) -> list[str]:
    groups = packaged_toml("policy/tables/apex-o1.toml")["group"]
    return [op for group in groups if file in group["source"] and group["kind"] in kinds for op in group["ops"]]


_PRODUCTS = [op for op in _listed("torch_overrides", "FP16_FUNCS") if op != "linear"]
_CONVOLUTIONS = [op for op in _PRODUCTS if op.startswith("conv")]
_WIDE = _listed("torch_overrides", "FP32_FUNCS")
_PROMOTED = [op for op in _listed("torch_overrides", "CASTS") if op != "sub"]
_BANNED_MESSAGE = (
    "binary_cross_entropy takes probabilities, which fp16 rounds to 0 and 1; use binary_cross_entropy_with_logits (for "
    "nn.BCELoss after a Sigmoid: nn.BCEWithLogitsLoss), or amp.init(allow_banned=True) to compute it in fp32"
)

functional_overrides = SimpleNamespace(
    FP16_FUNCS=[*_CONVOLUTIONS, "linear"],
    FP32_FUNCS=_listed("functional_overrides", "FP32_FUNCS", "loss"),
    BANNED_FUNCS=[("binary_cross_entropy", _BANNED_MESSAGE)],
)
"""Functions of torch.nn.functional."""

torch_overrides = SimpleNamespace(
    FP16_FUNCS=_PRODUCTS, FP32_FUNCS=list(_WIDE), CASTS=_PROMOTED, SEQUENCE_CASTS=["cat", "stack"]
)
"""Functions of torch."""

tensor_overrides = SimpleNamespace(
    FP16_FUNCS=["__matmul__", *(op for op in _PRODUCTS if op not in _CONVOLUTIONS)],
    FP32_FUNCS=["__ipow__", "__pow__", "__rpow__", "cpu", *_WIDE],
    CASTS=[
        *("__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__", "__isub__"),
        *("__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__", "__rmul__", "__rsub__"),
        *("__rtruediv__", "__sub__", "__truediv__", *(op for op in _PROMOTED if op != "bilinear")),
    ],
    SEQUENCE_CASTS=[],
)
"""Methods of torch.Tensor."""
