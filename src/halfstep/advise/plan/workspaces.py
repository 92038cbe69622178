"""Workspaces: what a CPU's kernels allocate beyond the results that fake tensors show, counted by running them once.

oneDNN copies what a convolution reads into layouts of its own, reductions of low numbers make fp32 copies, recurrent
layers keep what their backward pass reads. A kernel is run on zeros, once for each combination of shapes, strides and
formats, while torch's allocator is followed. Those of a GPU are chosen by cuDNN and cuBLAS while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_private.autograd import profiler_enabled
from halfstep.torch_private.devices import cpu_allocations
from halfstep.torch_private.fake import FakeTensor, unset_fake_temporarily
from halfstep.torch_private.operators import schema_of
from halfstep.torch_private.trees import tree_map_only
from halfstep.trees import tensors

LARGEST = 1 << 25
"""Bytes of arguments and results up to which a kernel is run: matrix products then take half a second on two cores.
A larger convolution is run on a half, a quarter, ... of its samples; other larger kernels count no workspace."""

CONVOLUTIONS = {"aten::convolution": 1, "aten::convolution_backward": 2}
"""Operator -> how many of its first arguments have a dimension of samples."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a kernel allocates, bytes."""

    most: int  # at one time, results included
    results: tuple[int, ...]  # the memory of each result that is a tensor, in the order of `trees.tensors`


def workspace(func: Any, args: Any, kwargs: Any, result: Any, bytes_of: Callable[[Tensor], int]) -> Workspace | None:
    """Return the workspace of a call on fake tensors, None if it is not counted; `bytes_of`: memory of an argument."""
    name = schema_of(func).name
    given, made = tensors((args, kwargs)), tensors(result)
    if (
        not given
        or not name.startswith("aten::")
        or func.is_view
        or torch.Tag.nondeterministic_seeded in func.tags
        or not all(type(t) is FakeTensor and t.layout is torch.strided for t in (*given, *made))
        or profiler_enabled()
    ):
        return None
    share = 1
    while sum(t.nbytes for t in (*given, *made)) > share * LARGEST:
        share *= 2
    if share > 1:
        batched = CONVOLUTIONS.get(name, 0)
        samples = args[0].shape[0] // share if batched else 0
        if not samples:
            return None
        args = (*(t[:samples] for t in args[:batched]), *args[batched:])
    shapes = [(t.shape, t.stride(), t.dtype, bytes_of(t)) for t in tensors((args, kwargs))]
    key = repr((func, shapes, tree_map_only(Tensor, lambda _: None, (args, kwargs))))
    if key not in _KNOWN:
        _KNOWN[key] = _run(func, args, kwargs, bytes_of)
    known = _KNOWN[key]
    return known if known is None or share == 1 else Workspace(known.most * share, ())


_KNOWN: dict[str, Workspace | None] = {}
"""Call, without values -> its workspace on this machine."""


def _run(func: Any, args: Any, kwargs: Any, bytes_of: Callable[[Tensor], int]) -> Workspace | None:
    def zeros(fake: Tensor) -> Tensor:
        if fake.numel() == 0 and (hidden := bytes_of(fake)):  # what a kernel keeps for its backward pass
            return torch.zeros(hidden // fake.element_size(), dtype=fake.dtype)
        extent = 1 + sum((n - 1) * step for n, step in zip(fake.shape, fake.stride(), strict=True))
        return torch.zeros(max(extent, 0), dtype=fake.dtype).as_strided(fake.shape, fake.stride())

    shapes = tree_map_only(Tensor, lambda t: t, (args, kwargs))
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(Tensor, zeros, shapes)
        results: list[Tensor] = []
        try:
            found = cpu_allocations(lambda: results.extend(tensors(func(*args, **kwargs))))
        except Exception:  # a kernel that refuses zeros, such as for lengths
            return None
        most = max(accumulate(found, initial=0))
        return Workspace(most, tuple(t.untyped_storage().nbytes() for t in results))
