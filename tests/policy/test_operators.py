"""Operators: one name for all spellings, tried with a real TorchFunctionMode."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from halfstep.errors import PolicyError
from halfstep.policy.operators import LINEAR_LOSS, REMOVED, callables, canonical, known, operator_name, operator_names

X = torch.rand(2, 2, generator=torch.Generator().manual_seed(0))
SIGNAL = torch.rand(64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1])

CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("matmul", lambda: X @ X),
    ("matmul", lambda: X.matmul(X)),
    ("matmul", lambda: torch.linalg.matmul(X, X)),
    ("matmul", lambda: X.__rmatmul__(X)),
    ("add", lambda: X + X),
    ("add", lambda: 1 + X),
    ("add", lambda: torch.add(X, X)),
    ("sub", lambda: X - 1),
    ("sub", lambda: 1 - X),
    ("mul", lambda: 2 * X),
    ("div", lambda: X / 2),
    ("reciprocal", lambda: 2 / X),
    ("pow", lambda: X**2),
    ("pow", lambda: 2**X),
    ("pow", lambda: X.pow(2)),
    ("floor_divide", lambda: X // 2),
    ("remainder", lambda: X % 2),
    ("neg", lambda: -X),
    ("abs", lambda: abs(X)),
    ("eq", lambda: X == X),
    ("lt", lambda: X < 2),
    ("lt", lambda: 2 > X),
    ("softmax", lambda: F.softmax(X, 0)),
    ("softmax", lambda: torch.softmax(X, 0)),
    ("softmax", lambda: torch.special.softmax(X, 0)),
    ("softmax", lambda: X.softmax(0)),
    ("log_softmax", lambda: X.log_softmax(0)),
    ("sigmoid", lambda: torch.special.expit(X)),
    ("expm1", lambda: torch.special.expm1(X)),
    ("acos", lambda: torch.arccos(X)),
    ("clamp", lambda: X.clip(0, 1)),
    ("linalg.inv", lambda: torch.linalg.inv(X)),
    ("linalg.inv", lambda: X.inverse()),
    ("linalg.norm", lambda: torch.linalg.norm(X)),
    ("norm", lambda: X.norm()),
    ("norm", lambda: torch.norm(X)),
    ("fft.rfft", lambda: torch.fft.rfft(X)),
    ("stft", lambda: SIGNAL.stft(16, window=torch.ones(16), return_complex=True)),
    ("stft", lambda: torch.stft(SIGNAL, 16, window=torch.ones(16), return_complex=True)),
    ("cat", lambda: torch.cat([X, X])),
    ("cat", lambda: torch.concat([X, X])),
    ("einsum", lambda: torch.einsum("ij,jk", X, X)),
    ("layer_norm", lambda: F.layer_norm(X, (2,))),
    ("layer_norm", lambda: nn.LayerNorm(2)(X)),
    ("rms_norm", lambda: nn.RMSNorm(2)(X)),
    ("gelu", lambda: nn.GELU()(X)),
    ("linear", lambda: nn.Linear(2, 2)(X)),
    ("conv1d", lambda: nn.Conv1d(2, 2, 1)(X)),
    ("lstm", lambda: nn.LSTM(2, 2)(X)),
    ("gru_cell", lambda: nn.GRUCell(2, 2)(X)),
    ("max_pool2d", lambda: F.max_pool2d(X[None], 1)),
    ("max_pool2d", lambda: F.max_pool2d(X[None], 1, return_indices=True)),
    ("interpolate", lambda: F.interpolate(X[None], 2)),
    ("pad", lambda: F.pad(X, (1, 1))),
    ("grid_sample", lambda: F.grid_sample(X[None, None], torch.zeros(1, 1, 1, 2), align_corners=False)),
    ("embedding", lambda: F.embedding(LABELS, X)),
    ("cross_entropy", lambda: F.cross_entropy(X, LABELS)),
    ("nll_loss", lambda: nn.NLLLoss()(X, LABELS)),
    ("scaled_dot_product_attention", lambda: F.scaled_dot_product_attention(X, X, X)),
    ("multi_head_attention_forward", lambda: nn.MultiheadAttention(2, 1)(X, X, X)),
]


class Listener(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CALLS)])
def test_a_mode_hears_a_callable_of_the_operator(name: str, call: Callable[[], Any]) -> None:
    with Listener() as mode:
        call()
    ours = [func for func in mode.heard if operator_name(func) is not None]
    assert name in {operator_name(func) for func in ours}
    assert any(func in callables(name) for func in ours)


def test_names_and_callables_are_each_others_reverse() -> None:
    for name in known():
        if name in (LINEAR_LOSS, *REMOVED) and not callables(name):
            continue  # a torch before 2.13, or one that has removed it
        assert callables(name), name
        assert {operator_name(func) for func in callables(name)} == {name}
        assert canonical(name) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("softmax", "softmax"),
        ("F.softmax", "softmax"),
        ("nn.functional.softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"),
        ("torch.softmax", "softmax"),
        ("Tensor.softmax", "softmax"),
        ("torch.Tensor.softmax", "softmax"),
        ("torch.special.softmax", "softmax"),
        ("special.log1p", "log1p"),
        ("special.expit", "sigmoid"),
        ("linalg.inv", "linalg.inv"),
        ("linalg_inv", "linalg.inv"),
        ("torch.linalg.inv", "linalg.inv"),
        ("inverse", "linalg.inv"),
        ("fft_fft", "fft.fft"),
        ("__rmatmul__", "matmul"),
        ("Tensor.__add__", "add"),
        ("true_divide", "div"),
        ("cross_entropy_loss", "cross_entropy"),
        ("max_pool2d_with_indices", "max_pool2d"),
        ("upsample_bilinear2d", "interpolate"),
    ],
)
def test_every_way_of_writing_it(written: str, name: str) -> None:
    assert canonical(written) == name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("softmx", "unknown operator 'softmx'.*; did you mean 'softmax'?"),
        ("F.cross_entrpy", "did you mean 'cross_entropy'?"),
        ("linalg.invv", "did you mean 'linalg.inv'?"),
        ("add_", "in-place forms are never cast, the operator is 'add'"),
        ("", "unknown operator ''"),
        ("xyzzy", r"name it as you call it, e.g. 'softmax' or 'linalg.inv'$"),
    ],
)
def test_unknown_names_the_nearest(wrong: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message.replace("?", r"\?")):
        canonical(wrong)


def test_patterns() -> None:
    assert operator_names("conv_transpose?d") == ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    assert (
        operator_names("torch.linalg.*")
        == operator_names("linalg.*")
        == tuple(sorted(n for n in known() if n[:7] == "linalg."))
    )
    assert set(operator_names("*")) == known()
    assert operator_names("F.softmax") == ("softmax",)
    with pytest.raises(PolicyError, match=r"operator pattern 'sofmax\*' matches no operator; did you mean 'softmax'\?"):
        operator_names("sofmax*")


@pytest.mark.parametrize(
    "name",
    [
        # administer, convert, create, view, or change in place: casting their arguments would change what they mean
        *("backward", "register_hook", "data_ptr", "numel", "size", "item", "to", "float", "half", "cpu", "detach"),
        *("clone", "zeros_like", "new_empty", "view", "reshape", "transpose", "expand", "chunk", "select", "add_"),
        *("copy_", "requires_grad_", "manual_seed", "broadcast_tensors", "view_copy", "has_torch_function"),
    ],
)
def test_what_is_not_an_operator(name: str) -> None:
    assert name not in known()
    for space in (torch, Tensor, F):
        func = getattr(space, name, None)
        assert func is None or operator_name(func) is None


def test_in_place_forms_belong_to_no_operator() -> None:
    assert all(not re.search(r"[a-z0-9]_$", getattr(f, "__name__", "")) for n in known() for f in callables(n))
    assert operator_name(Tensor.__iadd__) is None


def test_name_of_takes_anything() -> None:
    assert operator_name(print) is None
    assert operator_name(torch.ops.aten.mm) is None  # what autograd and compilers call, not what users write
    assert operator_name([]) is None  # type: ignore[arg-type]
