"""Errors of torch that mixed formats cause, and what to do about each.

torch names two dtypes; the user wrote neither. A region that ends with one of these errors raises a new one with cause
and remedy, torch's own message last. Other errors pass as they are.

Note [kinds]: the new error is a `RegionError` and of the built-in kind that torch raised, so ``except TypeError``
around a call still catches it.
"""

import re
from typing import Any

import torch

from halfstep.errors import ConversionError, HalfstepError, MissingKernelError, RegionError
from halfstep.trees import tensors

EXPLAINED = (RuntimeError, TypeError)
"""The kinds of errors that `explained` handles; NotImplementedError is a RuntimeError."""

SPELLINGS = {"BFloat16": "bf16", "Half": "fp16", "Float": "fp32", "float": "fp32", "Double": "fp64", "double": "fp64"}
INTEGERS = ("Long", "Int", "Short", "Byte", "Char", "Bool", "long int", "int", "short", "unsigned char")

NAMES = re.compile(r"(?<![A-Za-z])(?:c10::|torch\.|CPU|CUDA)?(BFloat16|Half|Float|float|Double|double)(?![a-z0-9])")
INTEGER = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(sorted(INTEGERS, key=len, reverse=True))})(?![A-Za-z])")
ONE_FORMAT = re.compile(
    r"[Ss]ame (scalar type|datatype|dtype)|same dtypes|should be the same|must be the same|dtypes match|match query"
    r"|[Ee]xpected (scalar type|dtype) .* (found|got)|Found dtype .* but expected|promoting not supported"
    r"|result type .* can't be cast|to be equal to src\.dtype|mixed dtype|with grad_dtype"
)
LABELS = re.compile(r"expected scalar type Long but found")  # labels or indices that are not integers, in any format
NO_KERNEL = re.compile(
    r"not implemented for '(BFloat16|Half)'|Low precision dtypes not supported|Unsupported dtype (BFloat16|Half)"
    r"|(half|Half)?, ?float,? (and|or) double|either float or double|types other than float and double"
    r"|Half, Float or Double",
)
BEYOND = re.compile(r"cannot be converted to type (?:c10::|at::)?(Half|BFloat16) without overflow")
NUMPY = re.compile(r"unsupported ScalarType BFloat16")

FLOAT64 = (
    "a float64 input met weights of another format, and no rule touches float64; if it came from numpy, whose default "
    "that is, pass x.float()"
)
WEIGHT64 = (
    "a float64 tensor met one in {other}, and no rule touches float64: model.float() if it is a weight, x.float() if "
    "the model's code makes it (numpy's default is float64)"
)
OUTSIDE = (
    "numpy has no bf16, and this tensor is low: pass x.float().numpy(); the outputs of a prepared model are fp32 with "
    'the policy\'s outputs="fp32", hs.Policy.of(..., outputs="fp32"); where a module inside the model converts it, as '
    'matchers of detectors do, run that module in fp32: policy.with_modules({"its.path": "fp32"})'
)
WHOLE = (
    "integers met weights or activations in a floating format; a policy casts floating tensors only, since embeddings "
    "and labels stay integers: pass x.float()"
)
UNLIKE = (
    "tensors in {formats} met in an operator that takes one format; what the model's own code makes (a mask, a table, "
    "torch.zeros without dtype) has to follow its activations: y.to(x.dtype), or torch.zeros(..., dtype=x.dtype); or "
    'run that module in fp32: policy.with_modules({{"its.path": "fp32"}})'
)
MISSING = (
    "this operator does not exist in the low format on this device; run it in fp32: x.float() before it, or a rule, "
    'policy.with_ops(fp32=["its_name"]) or policy.with_modules({"its.path": "fp32"})'
)
TOO_LARGE = (
    "a number in the model's code does not fit the low format; take the format's own bound: torch.finfo(x.dtype).min "
    "or .max"
)


def explained(error: BaseException, tree: Any = ()) -> HalfstepError | None:
    """Return an error that names cause and remedy if `error` is one that mixed formats cause, else None."""
    if isinstance(error, HalfstepError) or not isinstance(error, EXPLAINED):
        return None
    text = str(error)
    cause = _cause(text, tree) if not isinstance(error, TypeError) else OUTSIDE if NUMPY.search(text) else ""
    if not cause:
        return None
    kind: type[HalfstepError] = RegionError
    if isinstance(error, TypeError):
        kind = ConversionError
    elif isinstance(error, NotImplementedError):
        kind = MissingKernelError
    return kind(f"{cause}. torch says: {error}")


def _cause(text: str, tree: Any) -> str:
    """Return the sentence for torch's error `text`, or ""."""
    formats = list(dict.fromkeys(SPELLINGS[name] for name in NAMES.findall(text)))
    if "fp64" in formats and any(tensor.dtype is torch.float64 for tensor in tensors(tree)):
        return FLOAT64
    if BEYOND.search(text):
        return TOO_LARGE
    if NO_KERNEL.search(text):
        return MISSING
    if LABELS.search(text) or not ONE_FORMAT.search(text):
        return ""
    if INTEGER.search(text):
        return WHOLE if formats and "can't be cast" not in text else ""
    if "fp64" in formats and len(formats) > 1:
        return WEIGHT64.format(other=next(name for name in formats if name != "fp64"))
    return UNLIKE.format(formats=" and ".join(formats[:2]) if len(formats) > 1 else "two formats")
