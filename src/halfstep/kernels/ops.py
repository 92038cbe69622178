"""The tail's operators, `torch.ops.halfstep.*`: each reads every byte once and writes it once.

They are operators of torch's dispatcher so that whoever watches it sees them: counters, fake tensors, profilers. Their
schemas say what they read and write. `native` carries them out on CPU and `triton` on CUDA; what they compute is said
in `reference`. Who calls them asks `pick.cannot_update` first.

Note [forms]: where the precise value of a parameter lives, told by `form`; `weights` and `beside` are lists.

    form        weights             beside              value
    plain       fp32, bf16, fp16    (empty)             the weight
    copy        fp32                bf16 or fp16        the weight; `beside` gets it rounded half to even
    split       bf16                int16               both halves (`reference.join_bf16`), rounded half up
    kahan       bf16 or fp16        as weights          their sum, renormalised after the update
    stochastic  bf16                (empty)             the weight, rounded stochastically

Note [tensors]: the n-th tensors of all lists belong to one parameter: same shape, dense without overlap or gaps, same
strides, so that kernels may walk memory. All on one device. Gradients are fp32, bf16 or fp16 and finite where `bad` is
False; states are fp32, or bf16 and then rounded stochastically. Arithmetic is fp32 throughout, in `reference`'s order.

Note [noise]: stochastic rounding draws from a counter, not from a generator: `draws` holds (seed, count), int64 on the
device, and element i of parameter n, stream s (0 weight, 1 first state, 2 second) gets the upper 16 bits of
``mix(mix(key) ^ mix(i))`` (see `reference.noise`). The operators read `draws`; the caller counts on.

Two operators only look: `exponents_` adds the elements of each tensor to its row (`kernels.exponents` says what a row
is), `exponents` returns the row of one tensor. They run everywhere, by torch's operators where there are no kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.reference.exponents import ROW, count_, parts, rows

__all__ = ["FORMS", "adam_", "advance_", "exponents", "exponents_", "judge", "lion_", "norms", "sgd_"]

FORMS = ("plain", "copy", "split", "kahan", "stochastic")

LIBRARY = torch.library.Library("halfstep", "DEF")

_WEIGHTS = "Tensor(a!)[] weights, Tensor(b!)[] beside"
_GIVEN = "Tensor[] gradients, Tensor factor, Tensor bad, Tensor? draws, int start, str form, Tensor? rate, float lr"

LIBRARY.define("norms(Tensor[] gradients) -> Tensor")
LIBRARY.define("judge(Tensor norms, Tensor? divisor, float? clip_norm) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    "advance_(Tensor(a!) scale, Tensor(b!) good, Tensor(c!) total, Tensor(d!) alarm, Tensor found, "
    "float growth, float backoff, int interval, float floor, float ceiling) -> ()"
)
LIBRARY.define(
    f"adam_({_WEIGHTS}, Tensor(c!)[] first, Tensor(d!)[] second, Tensor(e!)[] steps, {_GIVEN}, "
    "float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize) -> ()"
)
LIBRARY.define(
    f"sgd_({_WEIGHTS}, Tensor(c!)[] momenta, {_GIVEN}, "
    "float momentum, float weight_decay, bool nesterov, bool maximize) -> ()"
)
LIBRARY.define(
    f"lion_({_WEIGHTS}, Tensor(c!)[] momenta, {_GIVEN}, "
    "float beta1, float beta2, float weight_decay, bool maximize) -> ()"
)
LIBRARY.define("exponents_(Tensor(a!) rows, Tensor[] tensors) -> ()")
LIBRARY.define("exponents(Tensor x) -> Tensor")

norms = torch.ops.halfstep.norms.default
judge = torch.ops.halfstep.judge.default
advance_ = torch.ops.halfstep.advance_.default
adam_ = torch.ops.halfstep.adam_.default
sgd_ = torch.ops.halfstep.sgd_.default
lion_ = torch.ops.halfstep.lion_.default
exponents_ = torch.ops.halfstep.exponents_.default
exponents = torch.ops.halfstep.exponents.default


def _exponents(x: Tensor) -> Tensor:
    into = rows(1, x.device)
    exponents_(into, [parts(x)])
    return into[0]


LIBRARY.impl("exponents_", count_, "CompositeExplicitAutograd")
LIBRARY.impl("exponents", _exponents, "CompositeExplicitAutograd")


# ------------------------------------------------------------------ shapes, for fake tensors


def _norms(gradients: list[Tensor]) -> Tensor:
    return gradients[0].new_empty(len(gradients), dtype=torch.float32)


def _judge(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    return norms.new_empty(()), norms.new_empty((), dtype=torch.bool), norms.new_empty(())


def _row(x: Tensor) -> Tensor:
    return x.new_empty(ROW, dtype=torch.int64)


def _nothing(*args: object) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "norms": _norms,
    "judge": _judge,
    "advance_": _nothing,
    "adam_": _nothing,
    "sgd_": _nothing,
    "lion_": _nothing,
    "exponents_": _nothing,
    "exponents": _row,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"halfstep::{_name}", _fake, lib=LIBRARY)
