"""Calls of MegEngine's functional names with MegEngine's arguments, and what numpy or arithmetic by hand gives."""

# ruff: noqa: E501 - a table, one call a line

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import halfstep.compat.megengine as mge
import halfstep.compat.megengine.functional as F

__all__ = ["CALLS"]

A = np.random.default_rng(7).uniform(0.1, 0.9, (2, 4, 6, 6)).astype(np.float32)
S = (A - 0.5).astype(np.float32)
"""Numbers of both signs."""
B, Y, Z = torch.from_numpy(A[0, 0]), torch.from_numpy(A), torch.from_numpy(S)
WHOLE = np.array([-7, -2, 3, 9], np.int32)
TIES = np.array([-2.5, -1.5, -0.5, 0.49999997, 0.5, 1.5, 2.5], np.float32)

Call = tuple[Any, Any]


def erf(x: Any) -> Any:
    return np.vectorize(math.erf)(x)


def hsigmoid(x: Any) -> Any:
    return np.clip(x + 3, 0, 6) / 6


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs, "acos": np.arccos, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atanh": np.arctanh,
    "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "erf": erf, "erfc": lambda x: 1 - erf(x), "exp": np.exp,
    "expm1": np.expm1, "floor": np.floor, "gelu": lambda x: x * 0.5 * (1 + erf(x / 2**0.5)), "hsigmoid": hsigmoid,
    "hswish": lambda x: x * hsigmoid(x), "isinf": np.isinf, "isnan": np.isnan, "logical_not": np.logical_not,
    "logsigmoid": lambda x: np.log(sigmoid(x)), "neg": np.negative, "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6), "sigmoid": sigmoid, "sign": np.sign, "silu": lambda x: x * sigmoid(x),
    "sin": np.sin, "sinh": np.sinh, "softplus": lambda x: np.log1p(np.exp(x)), "square": np.square, "tan": np.tan,
    "tanh": np.tanh,
}  # fmt: skip
"""Of one tensor with elements of both signs."""

POSITIVE: dict[str, Callable[[Any], Any]] = {"log": np.log, "log1p": np.log1p, "sqrt": np.sqrt}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "atan2": np.arctan2, "div": np.divide, "equal": np.equal, "floor_div": lambda x, y: np.floor(x / y),
    "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal,
    "logaddexp": np.logaddexp, "maximum": np.maximum, "minimum": np.minimum, "mod": np.fmod, "mul": np.multiply,
    "not_equal": np.not_equal, "sub": np.subtract,
}  # fmt: skip

INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "floor_div": np.floor_divide, "mod": np.mod, "mul": np.multiply, "sub": np.subtract,
    "maximum": np.maximum,
}  # fmt: skip

BOOLS: dict[str, Callable[[Any, Any], Any]] = {
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
}  # fmt: skip


def softmax(x: np.ndarray, axis: Any) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def conv(x: np.ndarray, w: np.ndarray, stride: int = 1, groups: int = 1) -> np.ndarray:
    """Convolve (batch, channels, *space) with (out, in / groups, *kernel), window by window."""
    k = w.shape[2:]
    space = [(n - m) // stride + 1 for n, m in zip(x.shape[2:], k, strict=True)]
    out = np.zeros((x.shape[0], w.shape[0], *space), np.float64)
    width, share = w.shape[1], w.shape[0] // groups
    for place in np.ndindex(*space):
        window = x[
            (slice(None), slice(None), *(slice(p * stride, p * stride + m) for p, m in zip(place, k, strict=True)))
        ]
        for o in range(w.shape[0]):
            first = (o // share) * width
            part = window[:, first : first + width] * w[o]
            out[(slice(None), o, *place)] = part.reshape(len(x), -1).sum(1)
    return out


def transposed(x: np.ndarray, w: np.ndarray, stride: int = 1) -> np.ndarray:
    """Spread (batch, in, *space) by (in, out, *kernel)."""
    space = [(n - 1) * stride + m for n, m in zip(x.shape[2:], w.shape[2:], strict=True)]
    out = np.zeros((x.shape[0], w.shape[1], *space), np.float64)
    for place in np.ndindex(*x.shape[2:]):
        at = tuple(slice(p * stride, p * stride + m) for p, m in zip(place, w.shape[2:], strict=True))
        out[(slice(None), slice(None), *at)] += np.tensordot(x[(slice(None), slice(None), *place)], w, 1)
    return out


def normal(x: np.ndarray, axis: Any) -> np.ndarray:
    return np.asarray((x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-5))


def pooled(x: np.ndarray, size: int, reduce: Any) -> np.ndarray:
    b, c, h, w = x.shape
    return np.asarray(reduce(x.reshape(b, c, h // size, size, w // size, size), (3, 5)))


def t(data: Any) -> Any:
    return mge.tensor(data)


SEQ, IMG, VOL = A[:, :, 0], A[:, :, :5, :5], A[:, None, :3, :4, :4]
W1, W2 = S[0, :3, 0, :3][:, None].repeat(4, 1), S[0, :3, :2, :2][:, None].repeat(4, 1)
W3, BIAS = S[0, :2, :2, :2][:, None, :, :, None].repeat(2, 4), np.array([1, 2, 3], np.float32)
GROUPED = S[0, :4, :2, :2].reshape(2, 2, 1, 2, 2).repeat(2, 2)
"""(groups, out / groups, in / groups, height, width)"""
LOGITS, LABELS = A[0, 0, :3, :5], np.array([0, 4, 2], np.int32)
LOGP = np.log(softmax(LOGITS, 1))
PICKED = -LOGP[np.arange(3), LABELS]


def applied(name: str, expected: Callable[..., Any], mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> Any:
    return lambda: (getattr(F, name)(*mine), expected(*theirs))


def dropped() -> Call:
    torch.manual_seed(0)
    kept = F.nn.dropout(F.ones((1000,)), 0.25).numpy()
    return (sorted(set(kept.round(4).tolist())), bool(200 < (kept == 0).sum() < 300)), ([0.0, 1.3333], True)


def normalised(inplace: bool) -> Call:
    mean, var = F.zeros((1, 4, 1, 1)), F.ones((1, 4, 1, 1))
    got = F.nn.batch_norm(Y, mean, var, training=True, momentum=0.9, inplace=inplace)
    out, mean, var = (got, mean, var) if inplace else got
    expected = 0.1 * A.mean((0, 2, 3))
    return (out, mean.flatten(), var.flatten()), (
        normal(A, (0, 2, 3)), expected, 0.9 + 0.1 * A.var((0, 2, 3), ddof=1)
    )  # fmt: skip


def left_alone() -> Call:
    mean, var = F.zeros((4,)), F.ones((4,))
    F.nn.batch_norm(Y, mean, var, training=True, inplace=False)
    return (mean, var), (np.zeros(4), np.ones(4))


CALLS: dict[str, Callable[[], Call]] = {
    **{f"functional.{n}": applied(n, f, (Z,), (S,)) for n, f in UNARY.items()},
    **{f"functional.{n}": applied(n, f, (Y,), (A,)) for n, f in POSITIVE.items()},
    **{f"functional.{n}": applied(n, f, (Z, Y,), (S, A,)) for n, f in BINARY.items()},
    **{f"functional.{n} of integers": applied(n, f, (torch.from_numpy(WHOLE), 4), (WHOLE, 4)) for n, f in INTEGERS.items()},
    **{f"functional.{n} of a number": applied(n, f, (0.3, Y,), (0.3, A,)) for n, f in BINARY.items()},
    **{f"functional.{n}": applied(n, f, (Y > 0.5, Z > 0,), (A > 0.5, S > 0,)) for n, f in BOOLS.items()},
    "functional.acosh": lambda: (F.acosh(Y + 1), np.arccosh(A + 1)),
    "functional.pow": lambda: (F.pow(Y, 3), A**3),
    "functional.pow of a number": lambda: (F.pow(2.0, Y), 2.0**A),
    "functional.round": lambda: (F.round(t(TIES)), [-3, -2, -1, 0, 1, 2, 3]),
    "functional.round of large and odd": lambda: (F.round(t([8388609.0, -np.inf])), [8388609.0, -np.inf]),
    "functional.floor_div by a tenth": lambda: (F.floor_div(t([1.0, 0.3]), 0.1), [10.0, 3.0]),
    "functional.mod with signs": lambda: (F.mod(t([-7.0, 7.0]), t([3.0, -3.0])), [-1.0, 1.0]),
    "functional.left_shift": lambda: (F.left_shift(t([1, 2]), 2), [4, 8]),
    "functional.right_shift": lambda: (F.right_shift(t([9, 2]), 1), [4, 1]),
    "functional.clip": lambda: (F.clip(Y, 0.2, 0.4), A.clip(0.2, 0.4)),
    "functional.clip above": lambda: (F.clip(Y, upper=0.4), np.minimum(A, np.float32(0.4))),
    # reductions, products, orders
    "functional.mean": lambda: (F.mean(Y, [1, 2], keepdims=True), A.mean((1, 2), keepdims=True)),
    "functional.mean of integers": lambda: (F.mean(t([1, 2])), 1.5),
    "functional.var": lambda: (F.var(Y, 1), A.var(1)),
    "functional.std": lambda: (F.std(Y), A.std()),
    "functional.sum": lambda: (F.sum(Y, (0, 2)), A.sum((0, 2))),
    "functional.prod": lambda: (F.prod(Y, 1), A.prod(1)),
    "functional.prod of several": lambda: (F.prod(Y, (3, 1), keepdims=True), A.prod((1, 3), keepdims=True)),
    "functional.prod of all": lambda: (F.prod(t([2.0, 3.0])), 6.0),
    "functional.max": lambda: (F.max(Y, (1, 2)), A.max((1, 2))),
    "functional.min": lambda: (F.min(Y), A.min()),
    "functional.norm": lambda: (F.norm(Y, 1, 2, keepdims=True), np.abs(A).sum(2, keepdims=True)),
    "functional.norm of a vector": lambda: (F.norm(t([3.0, 4.0])), 5.0),
    "functional.normalize": lambda: (F.normalize(Y, axis=1), A / np.sqrt((A**2).sum(1, keepdims=True))),
    "functional.normalize by the sum": lambda: (F.normalize(Y, 1, 1), A / A.sum(1, keepdims=True)),
    "functional.argmax": lambda: (F.argmax(Y, 1), A.argmax(1)),
    "functional.argmax of all": lambda: (F.argmax(Y), A.argmax()),
    "functional.argmin": lambda: (F.argmin(Y, 1, keepdims=True), A.argmin(1, keepdims=True)),
    "functional.argsort": lambda: (F.argsort(B, descending=True), (-A[0, 0]).argsort(-1)),
    "functional.sort": lambda: (F.sort(B), (np.sort(A[0, 0]), A[0, 0].argsort())),
    "functional.topk": lambda: (F.topk(B, 2)[0], -np.sort(-A[0, 0])[:, :2]),
    "functional.topk smallest": lambda: (F.topk(B, 2, descending=False)[0], np.sort(A[0, 0])[:, :2]),
    "functional.topk the k-th": lambda: (F.topk(B, 2, kth_only=True)[0], -np.sort(-A[0, 0])[:, 1]),
    "functional.cumsum": lambda: (F.cumsum(Y, 1), A.cumsum(1)),
    "functional.matmul": lambda: (F.matmul(Y, Z, transpose_a=True), A.swapaxes(-1, -2) @ S),
    "functional.matmul of a vector": lambda: (F.matmul(B, B[0], transpose_b=True), A[0, 0] @ A[0, 0, 0]),
    "functional.dot": lambda: (F.dot(B[0], B[1]), A[0, 0, 0] @ A[0, 0, 1]),
    "functional.matinv": lambda: (F.matinv(t([[2.0, 1.0], [0.0, 4.0]])), [[0.5, -0.125], [0.0, 0.25]]),
    "functional.topk_accuracy": lambda: (F.topk_accuracy(t(LOGITS), t(LOGITS.argmax(1).astype(np.int32))), 1.0),
    "functional.topk_accuracy of several": lambda: (
        F.topk_accuracy(t([[1.0, 3.0, 2.0], [3.0, 2.0, 1.0]]), t([2, 2]), (1, 2, 3)), [0.0, 0.5, 1.0],
    ),
    # making and arranging
    "functional.arange": lambda: (F.arange(3), np.arange(3, dtype=np.float32)),
    "functional.arange from": lambda: (F.arange(1, 7, 2, dtype="int32"), np.array([1, 3, 5], np.int32)),
    "functional.broadcast_to": lambda: (F.broadcast_to(B[:1], (3, 6)), A[0, 0, :1].repeat(3, 0)),
    "functional.concat": lambda: (F.concat([Y, Z], 1, device="cpu0"), np.concatenate([A, S], 1)),
    "functional.copy": lambda: (F.copy(Y), A),
    "functional.copy to": lambda: (F.copy(Y, "cpu0"), A),
    "functional.expand_dims": lambda: (F.expand_dims(Y, 0).shape, (1, 2, 4, 6, 6)),
    "functional.expand_dims twice": lambda: (F.expand_dims(Y, [0, 2]).shape, (1, 2, 1, 4, 6, 6)),
    "functional.eye": lambda: (F.eye(2, 3), np.eye(2, 3)),
    "functional.eye of a shape": lambda: (F.eye([2, 3], dtype="int32"), np.eye(2, 3, dtype=np.int32)),
    "functional.flatten": lambda: (F.flatten(Y, 1), A.reshape(2, -1)),
    "functional.full": lambda: (F.full((2, 3), 7), np.full((2, 3), 7, np.int32)),
    "functional.full of floats": lambda: (F.full(2, 0.5), np.full(2, 0.5, np.float32)),
    "functional.full of a kind": lambda: (F.full(2, 1, dtype="float16"), np.full(2, 1, np.float16)),
    "functional.full_like": lambda: (F.full_like(Y, 2), np.full_like(A, 2)),
    "functional.gather": lambda: (F.gather(B, 1, t([[1], [0], [2], [1], [0], [5]])), A[0, 0][range(6), [1, 0, 2, 1, 0, 5]][:, None]),
    "functional.linspace": lambda: (F.linspace(0, 1, 3), [0, 0.5, 1]),
    "functional.ones": lambda: (F.ones([2], dtype="int32"), np.ones(2, np.int32)),
    "functional.ones_like": lambda: (F.ones_like(Y), np.ones_like(A)),
    "functional.repeat": lambda: (F.repeat(Y, 2, 0), A.repeat(2, 0)),
    "functional.repeat of all": lambda: (F.repeat(B, 2), A[0, 0].repeat(2)),
    "functional.reshape": lambda: (F.reshape(Y, (2, -1)), A.reshape(2, -1)),
    "functional.roll": lambda: (F.roll(Y, [1, -1], [0, 2]), np.roll(A, [1, -1], [0, 2])),
    "functional.roll of all": lambda: (F.roll(B, 3), np.roll(A[0, 0], 3)),
    "functional.split": lambda: (F.split(Y, 2, 1), np.split(A, 2, 1)),
    "functional.split at": lambda: (F.split(Y, [1, 3], 1), np.split(A, [1, 3], 1)),
    "functional.squeeze": lambda: (F.squeeze(Y[:1], 0), A[0]),
    "functional.squeeze several": lambda: (F.squeeze(Y[:1, :1], [0, 1]), A[0, 0]),
    "functional.stack": lambda: (F.stack([Y, Z], 1), np.stack([A, S], 1)),
    "functional.swapaxes": lambda: (F.swapaxes(Y, 0, 3), A.swapaxes(0, 3)),
    "functional.tile": lambda: (F.tile(B, (2, 1, 3)), np.tile(A[0, 0], (2, 1, 3))),
    "functional.transpose": lambda: (F.transpose(Y, (0, 2, 3, 1)), A.transpose(0, 2, 3, 1)),
    "functional.transpose with a new axis": lambda: (F.transpose(B, (1, "x", 0)), A[0, 0].T[:, None]),
    "functional.where": lambda: (F.where(Z > 0, Y, Z), np.where(S > 0, A, S)),
    "functional.zeros": lambda: (F.zeros(3), np.zeros(3, np.float32)),
    "functional.zeros_like": lambda: (F.zeros_like(Y), np.zeros_like(A)),
    # layers
    "functional.linear": lambda: (F.linear(Y, Z[0, 0], B[0], "float32"), A @ S[0, 0].T + A[0, 0, 0]),
    "functional.conv1d": lambda: (F.conv1d(t(SEQ), t(W1), t(BIAS.reshape(1, 3, 1)), 2), conv(SEQ, W1, 2) + BIAS[:, None]),
    "functional.conv2d": lambda: (F.conv2d(t(IMG), t(W2), t(BIAS.reshape(1, 3, 1, 1))), conv(IMG, W2) + BIAS[:, None, None]),
    "functional.conv2d with words": lambda: (
        F.conv2d(t(IMG), t(W2), conv_mode="cross_correlation", compute_mode="float32"), conv(IMG, W2),
    ),
    "functional.conv2d in groups": lambda: (
        F.conv2d(t(IMG), t(GROUPED), groups=2), conv(IMG, GROUPED.reshape(4, 2, 2, 2), groups=2),
    ),
    "functional.conv3d": lambda: (F.conv3d(t(VOL), t(W3)), conv(VOL, W3)),
    "functional.conv_transpose2d": lambda: (F.conv_transpose2d(t(IMG), t(S[0, :4, :2, :2][:, None]), None, 2), transposed(IMG, S[0, :4, :2, :2][:, None], 2)),
    "functional.conv_transpose3d": lambda: (F.conv_transpose3d(t(VOL), t(W3[:1])), transposed(VOL, W3[:1])),
    "functional.adaptive_avg_pool2d": lambda: (F.adaptive_avg_pool2d(Y, (2, 2)), pooled(A, 3, np.mean)),
    "functional.adaptive_max_pool2d": lambda: (F.adaptive_max_pool2d(Y, 3), pooled(A, 2, np.max)),
    "functional.max_pool2d": lambda: (F.max_pool2d(Y, 2), pooled(A, 2, np.max)),
    "functional.avg_pool2d": lambda: (F.avg_pool2d(Y, 3), pooled(A, 3, np.mean)),
    "functional.avg_pool2d at the edge": lambda: (F.avg_pool2d(F.ones((1, 1, 2, 2)), 2, padding=1), np.ones((1, 1, 2, 2))),
    "functional.avg_pool2d counting": lambda: (
        F.avg_pool2d(F.ones((1, 1, 2, 2)), 2, padding=1, mode="average"), np.full((1, 1, 2, 2), 0.25),
    ),
    "functional.batch_norm": lambda: normalised(True),
    "functional.batch_norm into new ones": lambda: normalised(False),
    "functional.batch_norm leaves them": left_alone,
    "functional.batch_norm by what was counted": lambda: (
        F.batch_norm(Y, t([1.0] * 4), t([4.0] * 4), eps=0.0), (A - 1) / 2,
    ),
    "functional.layer_norm": lambda: (F.layer_norm(Y, (6, 6), False), normal(A, (2, 3))),
    "functional.layer_norm affine": lambda: (
        F.layer_norm(Y, 6, True, F.full(6, 2.0), F.ones(6)), normal(A, 3) * 2 + 1,
    ),
    "functional.group_norm": lambda: (
        F.group_norm(Y, 2, True, F.full(4, 2.0), F.ones(4)), normal(A.reshape(2, 2, -1), 2).reshape(A.shape) * 2 + 1,
    ),
    "functional.instance_norm": lambda: (F.instance_norm(Y, True, F.full(4, 2.0), F.ones(4)), normal(A, (2, 3)) * 2 + 1),
    "functional.local_response_norm": lambda: (
        F.local_response_norm(F.ones((1, 3, 1, 1)), 3, 2.0, 1.0, 1.0).flatten(), [1 / 4, 1 / 5, 1 / 4],
    ),
    "functional.dropout": dropped,
    "functional.dropout in evaluation": lambda: (F.dropout(Y, 0.5, training=False), A),
    "functional.embedding": lambda: (F.embedding(t([[1, 0]]), B), A[0, 0][[[1, 0]]]),
    "functional.interpolate": lambda: (
        F.interpolate(t([[[[0.0, 1.0]]]]), (1, 3), align_corners=True), [[[[0.0, 0.5, 1.0]]]],
    ),
    "functional.interpolate by a factor": lambda: (
        F.interpolate(t([[[[0.0, 4.0]]]]), scale_factor=2, mode="bilinear"), [[[[0.0, 1.0, 3.0, 4.0]] * 2]],
    ),
    "functional.leaky_relu": lambda: (F.leaky_relu(Z, 0.1), np.where(S > 0, S, S * np.float32(0.1))),
    "functional.prelu": lambda: (F.prelu(Z, t(BIAS[:1])), np.where(S > 0, S, S)),
    "functional.prelu by channels": lambda: (
        F.prelu(Z, t(np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1))), np.where(S > 0, S, S * np.arange(4).reshape(4, 1, 1)),
    ),
    "functional.logsoftmax": lambda: (F.logsoftmax(Y, 1), np.log(softmax(A, 1))),
    "functional.logsoftmax of several": lambda: (F.logsoftmax(Y, [1, 2]), np.log(softmax(A, (1, 2)))),
    "functional.logsumexp": lambda: (F.logsumexp(Y, (1, 2)), np.log(np.exp(A).sum((1, 2)))),
    "functional.one_hot": lambda: (F.one_hot(t([1, 0]), 3), np.array([[0, 1, 0], [1, 0, 0]], np.int32)),
    "functional.pad": lambda: (F.pad(B, ((1, 0), (0, 2)), "CONSTANT", 3.0), np.pad(A[0, 0], ((1, 0), (0, 2)), constant_values=3)),
    "functional.pad the first axes": lambda: (F.pad(Y, ((1, 2),)), np.pad(A, ((1, 2), (0, 0), (0, 0), (0, 0)))),
    "functional.pad edges": lambda: (F.pad(Y, ((1, 2), (0, 1)), "EDGE"), np.pad(A, ((1, 2), (0, 1), (0, 0), (0, 0)), "edge")),
    "functional.pad reflecting": lambda: (F.pad(Y, ((0, 0), (2, 1)), "reflect"), np.pad(A, ((0, 0), (2, 1), (0, 0), (0, 0)), "reflect")),
    "functional.softmax": lambda: (F.softmax(Y), softmax(A, 1)),
    "functional.softmax of three axes": lambda: (F.softmax(Y[0]), softmax(A[0], 0)),
    "functional.softmax of a vector": lambda: (F.softmax(B[0]), softmax(A[0, 0, 0], 0)),
    "functional.softmax by axis": lambda: (F.softmax(Y, -1), softmax(A, -1)),
    # losses
    "functional.nn.cross_entropy": lambda: (F.nn.cross_entropy(t(LOGITS), t(LABELS)), PICKED.mean()),
    "functional.nn.cross_entropy by axis": lambda: (
        F.nn.cross_entropy(t(LOGITS.T.copy()), t(LABELS), axis=0, reduction="sum"), PICKED.sum(),
    ),
    "functional.nn.cross_entropy smoothed": lambda: (
        F.nn.cross_entropy(t(LOGITS), t(LABELS), label_smooth=0.1, reduction="none"), 0.9 * PICKED - 0.1 * LOGP.mean(1),
    ),
    "functional.nn.cross_entropy of probabilities": lambda: (
        F.nn.cross_entropy(t(softmax(LOGITS, 1)), t(LABELS), with_logits=False, label_smooth=0.1),
        (0.9 * PICKED - 0.1 * LOGP.mean(1)).mean(),
    ),
    "functional.nn.binary_cross_entropy": lambda: (
        F.nn.binary_cross_entropy(Z, Y > 0.5), -np.log(np.where(A > 0.5, sigmoid(S), 1 - sigmoid(S))).mean(),
    ),
    "functional.nn.binary_cross_entropy of probabilities": lambda: (
        F.nn.binary_cross_entropy(Y, Z > 0, with_logits=False, reduction="sum"), -np.log(np.where(S > 0, A, 1 - A)).sum(),
    ),
    "functional.nn.hinge_loss": lambda: (F.nn.hinge_loss(t([[0.5, 2.0]]), t([[-1.0, 1.0]])), 1.5),
    "functional.nn.hinge_loss squared": lambda: (
        F.nn.hinge_loss(t([[0.5, 2.0]]), t([[-1.0, 1.0]]), norm="l2", reduction="none"), [2.25],
    ),
    "functional.nn.l1_loss": lambda: (F.nn.l1_loss(Y, Z, reduction="sum"), np.abs(A - S).sum()),
    "functional.nn.square_loss": lambda: (F.nn.square_loss(Y, Z * 2), ((A - 2 * S) ** 2).mean()),
}  # fmt: skip
