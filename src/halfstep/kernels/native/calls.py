"""The operators, carried out by `kernels.cpp`: their arguments as addresses and sizes.

Note [one runtime]: two OpenMP runtimes in a process are two pools of threads that wait for each other in busy loops.
So the kernels are linked with none: they are given the entry of the runtime that torch itself calls, found the way the
dynamic linker has found it for torch (what is global first, then what libtorch depends on).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from struct import pack

import torch
from torch import Tensor

from halfstep.kernels.host import peek
from halfstep.kernels.native.compiler import Unavailable
from halfstep.kernels.ops import FORMS

__all__ = ["Kernels"]

ALONE = {"update": 100_000, "norms": 400_000, "exponents": 50_000}
"""Up to so many elements the calling thread works alone: waking the others (5 us and more) costs what it gains."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 3, torch.float64: 4}
FORM_CODES = {form: code for code, form in enumerate(FORMS)}


def _threads() -> tuple[int, int, int]:
    """Return the addresses of what the kernels need to run on torch's threads, see Note [one runtime]; 0: one thread.

    Raises:
        Unavailable: they were not found where they are to be expected.
    """
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    libtorch = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    for name in (None, str(libtorch)):
        try:
            library = ctypes.CDLL(name)
            entries = [ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0 for entry in names]
        except (OSError, AttributeError):
            continue
        return entries[0], entries[1], entries[2]
    if sys.platform == "darwin":
        return 0, 0, 0  # LLVM's runtime need not have this entry there
    raise Unavailable("torch's OpenMP runtime was not found, so the kernels could not use torch's threads")


class Kernels:
    """The operators, with functions of `kernels.cpp` behind them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        text, number, address = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
        self._runtime = _threads()
        self._norms, self._judge, self._advance = (
            library.halfstep_norms,
            library.halfstep_judge,
            library.halfstep_advance,
        )
        self._exponents = library.halfstep_exponents
        self._adam, self._sgd, self._lion = library.halfstep_adam, library.halfstep_sgd, library.halfstep_lion
        self._norms.argtypes = self._exponents.argtypes = (address, text, number, text)
        self._judge.argtypes = (address, number, address, text, address, address, address)
        for update in (self._adam, self._sgd, self._lion):
            update.argtypes = (text, text)
        double, single = ctypes.c_double, ctypes.c_float
        self._advance.argtypes = (*[address] * 4, ctypes.c_bool, double, double, number, single, single)
        for function in (self._norms, self._judge, self._advance, self._adam, self._sgd, self._lion, self._exponents):
            function.restype = None

    def _team(self, work: str, sizes: Sequence[int]) -> tuple[int, int, int, int]:
        """Return who does the work, the `Threads` of `threads.h`."""
        return torch.get_num_threads() if sum(sizes) > ALONE[work] else 1, *self._runtime

    def _threads(self, work: str, tensors: Sequence[Tensor]) -> bytes:
        return pack("4q", *self._team(work, [t.numel() for t in tensors]))

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Carry out `ops.norms`."""
        count = len(gradients)
        norms = torch.empty(count, dtype=torch.float32, device="cpu")
        self._norms(norms.data_ptr(), _columns(gradients), count, self._threads("norms", gradients))
        return norms

    def exponents_(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Carry out `ops.exponents_`."""
        if len(rows) != len(tensors) or not rows.is_contiguous():
            raise ValueError(f"{len(tensors)} tensors need as many rows, contiguous; got {tuple(rows.shape)}")
        dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        self._exponents(rows.data_ptr(), _columns(dense), len(dense), self._threads("exponents", dense))

    def judge(self, norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """Carry out `ops.judge`."""
        norms = norms.contiguous()
        norm, bad, factor = norms.new_empty(()), norms.new_empty((), dtype=torch.bool), norms.new_empty(())
        clip = None if clip_norm is None else pack("f", clip_norm)
        at = None if divisor is None else divisor.data_ptr()
        self._judge(norms.data_ptr(), norms.numel(), at, clip, norm.data_ptr(), bad.data_ptr(), factor.data_ptr())
        return norm, bad, factor

    def advance_(
        self,
        scale: Tensor,
        good: Tensor,
        total: Tensor,
        alarm: Tensor,
        found: Tensor,
        growth: float,
        backoff: float,
        interval: int,
        floor: float,
        ceiling: float,
    ) -> None:
        """Carry out `ops.advance_`."""
        state = (scale.data_ptr(), good.data_ptr(), total.data_ptr(), alarm.data_ptr())
        self._advance(*state, peek(found), growth, backoff, interval, floor, ceiling)

    def adam_(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
        gradients: Sequence[Tensor],
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        maximize: bool,
    ) -> None:
        """Carry out `ops.adam_`."""
        columns, team = self._table(weights, beside, first, second, steps, gradients)
        flags = (decoupled, maximize, False)
        given = _job(len(weights), team, form, start, flags, factor, bad, draws, rate, (first, second))
        self._adam(given + pack("5d", lr, beta1, beta2, eps, weight_decay), columns)

    def sgd_(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
    ) -> None:
        """Carry out `ops.sgd_`."""
        columns, team = self._table(weights, beside, momenta, (), (), gradients)
        flags = (False, maximize, nesterov)
        given = _job(len(weights), team, form, start, flags, factor, bad, draws, rate, (momenta,))
        self._sgd(given + pack("5d", lr, momentum, 0.0, 0.0, weight_decay), columns)

    def lion_(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        maximize: bool,
    ) -> None:
        """Carry out `ops.lion_`."""
        columns, team = self._table(weights, beside, momenta, (), (), gradients)
        flags = (True, maximize, False)
        given = _job(len(weights), team, form, start, flags, factor, bad, draws, rate, (momenta,))
        self._lion(given + pack("5d", lr, beta1, beta2, 0.0, weight_decay), columns)

    def _table(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> tuple[bytes, tuple[int, int, int, int]]:
        """Return the columns of `Parameter` in `updates.h`, and who works on them."""
        count = len(weights)
        sizes = [t.numel() for t in weights]
        if sizes != [t.numel() for t in gradients]:
            raise ValueError(f"gradients and weights differ in size: {[t.numel() for t in gradients]} and {sizes}")
        columns = list(sizes)
        absent = [0] * count
        for tensors in (weights, beside, first, second, gradients):
            columns += [TYPES[t.dtype] for t in tensors] if tensors else absent
        for tensors in (weights, beside, first, second, steps, gradients):
            columns += map(_address, tensors) if tensors else absent
        return pack(f"{len(columns)}q", *columns), self._team("update", sizes)


_address = Tensor.data_ptr


def _columns(tensors: Sequence[Tensor]) -> bytes:
    """Return sizes, types and addresses."""
    sizes, types = [t.numel() for t in tensors], [TYPES[t.dtype] for t in tensors]
    return pack(f"{3 * len(tensors)}q", *sizes, *types, *map(_address, tensors))


def _job(
    count: int,
    team: tuple[int, int, int, int],
    form: str,
    start: int,
    flags: tuple[bool, bool, bool],
    factor: Tensor,
    bad: Tensor,
    draws: Tensor | None,
    rate: Tensor | None,
    states: Sequence[Sequence[Tensor]],
) -> bytes:
    """Return the head of `Job` in `updates.h`."""
    if draws is None and (form == "stochastic" or any(s and s[0].dtype is torch.bfloat16 for s in states)):
        raise ValueError("bf16 is rounded stochastically here, which needs `draws`: (seed, count), int64")
    wide = rate is not None and rate.dtype is torch.float64
    addresses = (factor.data_ptr(), bad.data_ptr(), *(0 if t is None else t.data_ptr() for t in (draws, rate)))
    return pack("15q", count, *team, FORM_CODES[form], start, wide, *flags, *addresses)
