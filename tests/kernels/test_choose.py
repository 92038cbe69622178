"""The table of implementations, and which tensors kernels take; the reason for the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import UnbuiltError
from halfstep.kernels import choose, ops
from halfstep.kernels.choose import OPERATORS, load_kernels, norms_for
from halfstep.kernels.native.calls import Kernels
from halfstep.kernels.reference import operators as reference

REASON = load_kernels("cpu")
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)

DENSE = [
    torch.ones(3, 4).T,
    torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.ones((), dtype=torch.float16),
]


def test_dense_parameters_of_one_device_can_be_updated_where_there_are_kernels() -> None:
    assert choose.cannot_update(DENSE) == load_kernels("cpu")
    assert choose.cannot_update([nn.Parameter(tensor) for tensor in DENSE]) == load_kernels("cpu")


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (torch.ones(3, 8)[:, ::2], "a parameter has gaps in memory, or shares elements with itself"),
        (torch.ones(4).expand(3, 4), "a parameter has gaps in memory, or shares elements with itself"),
        (torch.eye(3).to_sparse_coo(), "a parameter is a Tensor of torch.float32, torch.sparse_coo"),
        (torch.ones(3, dtype=torch.float64), "a parameter is a Tensor of torch.float64, torch.strided"),
        (torch.ones(3, device="meta"), "parameters are on cpu and on meta"),
    ],
)
def test_what_cannot_be_updated_is_said_in_a_sentence(odd: Tensor, reason: str) -> None:
    assert choose.cannot_update([torch.ones(2), odd]) == reason


def test_a_device_without_kernels_is_named() -> None:
    assert choose.cannot_update([torch.ones(2, device="meta")]) == "there are no kernels for the device type 'meta'"


class Called(TorchDispatchMode):
    """Counts the tensors of every call of the norms operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates its modes in part
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ops.norms:
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@compiled
def test_norms_go_through_the_operator_where_memory_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [torch.ones(3, 8)[:, ::2], torch.ones(3, dtype=torch.float64), torch.ones(0), torch.ones(4).expand(3, 4)]
    with Called() as called:
        assert norms_for(DENSE).tolist() == pytest.approx(reference.norms(DENSE).tolist())
        assert called.sizes == [3]
        for odd in others:
            assert norms_for([*DENSE, odd]).tolist() == pytest.approx(reference.norms([*DENSE, odd]).tolist())
        monkeypatch.setenv("HALFSTEP_NATIVE", "0")
        assert norms_for(DENSE).tolist() == pytest.approx(reference.norms(DENSE).tolist())
    assert called.sizes == [3]


def test_the_table_names_every_operator_and_functions_that_exist() -> None:
    defined = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("halfstep::")
    }
    assert set(OPERATORS) == defined - {"exponents"}  # made of exponents_
    folder = Path(choose.__file__).parent
    for method, path in OPERATORS.values():
        assert hasattr(Kernels, method)
        module, _, name = path.rpartition(".")
        assert re.search(rf"def {name}\(", (folder / f"{module.replace('.', '/')}.py").read_text())


@compiled
def test_kernels_of_every_operator_are_registered() -> None:
    for name in OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"halfstep::{name}", "CPU")


def test_an_unknown_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_NATIVE", "bogus")
    with pytest.raises(UnbuiltError, match="HALFSTEP_NATIVE must be one of '0', '1', 'build' and is 'bogus'"):
        load_kernels("cpu")
