"""Tables of calls: name -> a call with the original's arguments and the value that the original gives.

A key is a name as a page writes it, and after a space what is special about this call. A page and its table agree
when every name that the page lists is called, and every name that is called is on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["Call", "called", "check"]

Call = Callable[[], tuple[Any, Any]]
"""Returns (what came out, what is to come out)."""


def called(calls: Mapping[str, Call] | Iterable[str]) -> set[str]:
    """Return the names that a table calls."""
    return {key.split(" ")[0] for key in calls}


def check(got: Any, expected: Any) -> None:
    """Compare values; tensors and arrays by shape, kind of number and value, within a few fp32 roundings."""
    if isinstance(expected, dict):
        assert sorted(got) == sorted(expected)
        for key, value in expected.items():
            check(got[key], value)
    elif isinstance(got, (tuple, list)):
        assert len(got) == len(expected), (got, expected)
        for one, other in zip(got, expected, strict=True):
            check(one, other)
    elif isinstance(got, torch.Tensor) or isinstance(expected, (np.ndarray, torch.Tensor)):
        mine, wanted = _array(got), _array(expected)
        assert mine.shape == wanted.shape, f"shape {mine.shape} and not {wanted.shape}"
        if isinstance(expected, (np.ndarray, torch.Tensor)):
            assert mine.dtype.kind == wanted.dtype.kind, f"{mine.dtype} and not {wanted.dtype}"
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=1e-6)
    elif isinstance(expected, float) and isinstance(got, (int, float)):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    else:
        assert got == expected, f"{got!r} and not {expected!r}"


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    return np.asarray(value)
