"""What `on_fake_cuda` does on a device that refuses float64, as mps and some of xpu do; nothing has values there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep as hs
from halfstep import formats
from halfstep.formats import FP16, float64_of
from halfstep.kernels import triton
from halfstep.kernels.choose import check_norms, norms_for
from halfstep.kernels.reference import exponents
from halfstep.lens.audit.updates import intended
from halfstep.lens.calls import in_float64
from halfstep.policy import SCALE_RULES
from halfstep.scale.finite import unscale_
from halfstep.scale.rule import advance, initial_state
from halfstep.testing import count_step
from halfstep.weights.strategies import _stochastic_fp16


class Refuses(TorchDispatchMode):
    """Raises where a tensor of float64 is made on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.dtype is torch.float64 and leaf.device.type == "cuda":
                raise TypeError(f"{func} made float64")
        return found


def widens() -> None:
    torch.empty(3, device="cuda").double()


def scales() -> None:
    for rule in SCALE_RULES.values():
        state = initial_state(rule, "cuda")
        advance(rule, state, torch.empty((), dtype=torch.bool, device="cuda"))
        unscale_([], state.scale.float())


def norms_and_counts() -> None:
    given = [torch.empty(5, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    check_norms(norms_for(given), torch.ones((), device="cuda"), 1.0)
    exponents.count_(exponents.rows(3, "cuda"), given)


def roundings() -> None:
    x = torch.empty(7, device="cuda")
    assert _stochastic_fp16(x, torch.empty(7, dtype=torch.int32, device="cuda")).device == x.device
    for found in (FP16.round(x), FP16.round(x, mode="stochastic"), FP16.ulp(x)):
        assert (found.dtype, found.device) == (torch.float32, x.device)


def samples_and_shadows() -> None:
    model = nn.Linear(4, 4, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
        optimizer.state[p]["momentum_buffer"] = torch.empty_like(p)
    monitor = hs.Monitor(model, optimizer, every=1, format=FP16)
    monitor.before_update(list(model.parameters()))
    monitor.after_update(torch.empty((), dtype=torch.bool, device="cuda"))
    gradients = {p: float64_of(p.grad) for p in model.parameters() if p.grad is not None}
    changes = intended(optimizer, {p: p for p in gradients}, gradients)
    again = in_float64(torch.add, (model.weight, 1.0), {})
    after = [change.after for change in changes.values()]
    assert {(x.dtype, x.device.type) for x in (again, *after)} == {(torch.float64, "cpu")}


def steps() -> None:
    for policy in (
        hs.Policy.of("mixed", dtype="fp16"),
        hs.Policy.of("pure", dtype="bf16", master="split"),
        hs.Policy.of("mixed", dtype="e4m3"),
    ):
        model = nn.Sequential(nn.Linear(8, 8, device="cuda"), nn.BatchNorm1d(8, device="cuda"))
        optimizer = torch.optim.AdamW(model.parameters())
        step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy, clip_norm=1.0)
        count_step(step, torch.empty(4, 8, device="cuda"))


def refused() -> dict[str, str]:
    """Do all this; return what raised, by function."""
    found = {}
    functions: tuple[Callable[[], None], ...] = (
        widens,
        scales,
        norms_and_counts,
        roundings,
        samples_and_shadows,
        steps,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(formats, "WITHOUT_FLOAT64", {"cuda": lambda device: True}))
        stack.enter_context(mock.patch.object(triton, "refused", lambda: "there is none"))
        stack.enter_context(Refuses())  # type: ignore[no-untyped-call]  # torch annotates its modes in part
        for function in functions:
            try:
                function()
            except Exception as error:
                found[function.__name__] = f"{type(error).__name__}: {error}"
    return found
