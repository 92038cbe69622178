"""What is written down of torch's fused kernels is what they do here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels.eager.torch_fused import WITH_KERNELS, fused_works

CORRECTED = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 14)  # SGD of low parameters
FORMATS = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("plain", "transposed", "channels last", "gaps")


def parameter(layout: str, dtype: torch.dtype) -> nn.Parameter:
    values = torch.linspace(-1.0, 1.0, 4 * 8 * 3 * 6).reshape(4, 8, 3, 6).to(dtype)
    shapes = {
        "plain": values,
        "transposed": values.transpose(0, 1),
        "channels last": values.contiguous(memory_format=torch.channels_last),
        "gaps": values[..., ::2],
    }
    return nn.Parameter(shapes[layout])


def stepped(kind: Any, layout: str, dtype: torch.dtype, **form: bool) -> Tensor:
    p = parameter(layout, dtype)
    optimizer = kind([p], lr=0.25, **form)
    for _ in range(2):
        optimizer.zero_grad()
        (p.float() * torch.linspace(1.0, 2.0, p.numel()).reshape(p.shape)).sum().backward()
        optimizer.step()
    return p.detach().float()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", WITH_KERNELS)
def test_a_fused_form_that_is_said_to_work_does_and_another_does_not(kind: Any, dtype: Any, layout: str) -> None:
    fused, usual = (stepped(kind, layout, dtype, **{form: form == "fused"}) for form in ("fused", "foreach"))
    right = torch.allclose(fused, usual, rtol=0.0, atol=4 * torch.finfo(dtype).eps)
    works = fused_works(kind, parameter(layout, dtype))
    corrected = CORRECTED and kind is torch.optim.SGD and dtype is not torch.float32 and layout != "gaps"
    assert right is (works or corrected)


def test_other_devices_are_believed() -> None:
    for kind in WITH_KERNELS:
        assert fused_works(kind, torch.empty(4, 6, dtype=torch.float16, device="meta")[:, ::2])
