"""The seeded faults are faults, the controls are healthy, and what is written about them is so."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.case import Case, Fault, cured, marked_line, run
from tests.faults.catalog import LIST_A
from tests.faults.witness import Witness

A = [pytest.param(fault, id=fault.name) for fault in LIST_A]
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def bad_steps(case: Case, policy: Any = None) -> list[int]:
    """Return the calls whose loss is not finite or whose update was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a scale at its floor says so
        results = [result for _, result in run(case, policy)]
    return [r.step for r in results if r.skipped or not math.isfinite(r.loss)]


@pytest.mark.parametrize("fault", A)
def test_a_fault_of_list_a_breaks_the_stated_step_and_none_before(fault: Fault) -> None:
    bad = bad_steps(fault.build())
    assert bad and bad[0] == fault.truth.step
