"""The harness: one body, run on halfstep, where it must pass, and on torch.amp, where it must fail as stated.

So the claim "torch.amp has this pain" is tested on the torch that runs, too: when torch cures one, its test here fails.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.pains.libraries import HALFSTEP, TORCH

__all__ = ["REGISTRY", "Pain", "pain"]

Check = Callable[..., None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pain:
    """One test of one pain.

    Attributes:
        number: its row in docs/pains.md.
        test: "file.py::function".
        torch_cured: whether the running torch has no such pain (any more).
        pending: what halfstep still lacks, "" if it passes.
    """

    number: int
    test: str
    torch_cured: bool
    pending: str


REGISTRY: dict[str, Pain] = {}
"""Every test of a pain by "file.py::function"; filled as the test files are imported."""


VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def pain(
    number: int,
    *,
    torch_fails_with: type[BaseException] | None,
    saying: str = "",
    pending: str = "",
    cured_in: tuple[int, int] | None = None,
) -> Callable[[Check], Any]:
    """Make two tests of ``check(amp)``: on halfstep it passes, on torch.amp it raises `torch_fails_with`.

    Args:
        number: which pain of docs/pains.md.
        torch_fails_with: the symptom's type; AssertionError where torch goes on with a wrong result; None where torch
            has cured it, so that the body must pass there as well.
        saying: pattern found in the symptom's text, so that a failure for another reason does not count.
        pending: what halfstep lacks to pass; the test is expected to fail until it is built.
        cured_in: the version of torch from which on the body passes there as well.
    """
    if torch_fails_with is not None and not saying:
        raise ValueError(f"pain {number}: say what the symptom's text is")

    def decorate(check: Check) -> Any:
        file = check.__code__.co_filename.replace("\\", "/").rpartition("/")[2]
        test = f"{file}::{check.__name__}"
        REGISTRY[test] = Pain(number=number, test=test, torch_cured=torch_fails_with is None, pending=pending)

        @functools.wraps(check)
        def run(amp: Any, **others: Any) -> None:
            if amp is HALFSTEP:
                check(amp, **others)
            elif torch_fails_with is None or (cured_in is not None and VERSION >= cured_in):
                _elsewhere(check, amp, others)
            else:
                with pytest.raises(torch_fails_with, match=saying):
                    _elsewhere(check, amp, others)

        marks = [pytest.mark.xfail(reason=pending, strict=True)] if pending else []
        cases = [pytest.param(HALFSTEP, id="halfstep", marks=marks), pytest.param(TORCH, id="torch")]
        return pytest.mark.parametrize("amp", cases)(run)

    return decorate


def _elsewhere(check: Check, amp: Any, others: dict[str, Any]) -> None:
    """Run `check` in a thread of its own, with which any region that torch leaves open goes away."""

    def quiet() -> None:
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(amp, **others)

    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(quiet).result()
    finally:
        torch.clear_autocast_cache()
