"""Schemas of halfstep's operators, `torch.ops.halfstep.*`: norms and their check, updates, loss scale, counts, losses.

`kernels.choose` has the table of their implementations, `kernels.reference` computes the same in plain PyTorch. Call
`choose.cannot_update` before an update operator. Each spec of `kernels.optimizers` makes an update operator: after
`weights` and `beside` it takes the lists of its states and counters, then what all updates take, then its options.

Note [forms]: where the fp32 value of a parameter is stored, named by `form`; `weights` and `beside` are lists.

    form        weights             beside              value
    plain       fp32, bf16, fp16    (empty)             the weight
    copy        fp32                bf16 or fp16        the weight; `beside` gets it rounded half to even
    split       bf16                int16               both halves (`join_bf16`), rounded half up
    kahan       bf16 or fp16        as weights          their sum, renormalised after the update
    stochastic  bf16                (empty)             the weight, rounded stochastically

Note [tensors]: the n-th tensors of all lists belong to one parameter: same shape, same strides, dense without overlap
or gaps, so that kernels can walk memory. All are on one device. Gradients are fp32, bf16 or fp16, and finite where
`bad` is False; states are fp32, or bf16 and then rounded stochastically. Arithmetic is fp32, in the reference's order.

Note [noise]: stochastic rounding takes its bits from a counter: `draws` holds (seed, count), int64 on the device, and
element i of parameter n, stream s (0 weight, 1 first state, 2 second) gets the upper 16 bits of
``mix(mix(key) ^ mix(i))`` (`reference.operators.noise`). The operators read `draws`; the caller increments the count.

`exponents_` and `exponents` only read: they count the elements of tensors by exponent (`reference.exponents`), on every
device, by torch's operators where no kernels are loaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.optimizers import BY_OPERATOR, SPECS, OptimizerSpec
from halfstep.kernels.reference.exponents import ROW, count_, parts, rows

FORMS = ("plain", "copy", "split", "kahan", "stochastic")

LIBRARY = torch.library.Library("halfstep", "DEF")

_GIVEN = "Tensor[] gradients, Tensor factor, Tensor bad, Tensor? draws, int start, str form, Tensor? rate, float lr"


def _definition(spec: OptimizerSpec) -> str:
    written = enumerate(("weights", "beside", *spec.states, *spec.counters))
    lists = ", ".join(f"Tensor({'abcdef'[n]}!)[] {name}" for n, name in written)
    options = ", ".join(f"{kind.__name__} {name}" for name, kind in spec.options.items())
    return f"{spec.operator}({lists}, {_GIVEN}, {options}) -> ()"


LIBRARY.define("norms(Tensor[] gradients) -> Tensor")
LIBRARY.define("judge(Tensor norms, Tensor? divisor, float? clip_norm) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    "advance_(Tensor(a!) scale, Tensor(b!) good, Tensor(c!) total, Tensor(d!) alarm, Tensor found, "
    "float growth, float backoff, int interval, float floor, float ceiling) -> ()"
)
for _update in SPECS:
    LIBRARY.define(_definition(_update))
LIBRARY.define("exponents_(Tensor(a!) rows, Tensor[] tensors) -> ()")
LIBRARY.define("exponents(Tensor x) -> Tensor")
LIBRARY.define(
    "row_sums_(Tensor(a!) lse, Tensor(b!) own, Tensor(c!) dot, Tensor logits, Tensor target, Tensor? by_class, "
    "int first) -> ()"
)
LIBRARY.define(
    "slope(Tensor logits, Tensor lse, Tensor label, Tensor own, Tensor every, Tensor scale, Tensor? by_class, "
    "int first, *, Tensor(a!) out) -> ()"
)

norms = torch.ops.halfstep.norms.default
check_norms = torch.ops.halfstep.judge.default
advance_ = torch.ops.halfstep.advance_.default
UPDATES: Mapping[str, Any] = {spec.name: getattr(torch.ops.halfstep, spec.operator).default for spec in SPECS}
exponents_ = torch.ops.halfstep.exponents_.default
exponents = torch.ops.halfstep.exponents.default
row_sums_ = torch.ops.halfstep.row_sums_.default
logits_gradient = torch.ops.halfstep.slope.default


def _exponents(x: Tensor) -> Tensor:
    into = rows(1, x.device)
    exponents_(into, [parts(x)])
    return into[0]


LIBRARY.impl("exponents_", count_, "CompositeExplicitAutograd")
LIBRARY.impl("exponents", _exponents, "CompositeExplicitAutograd")


_FAKES: dict[str, Callable[..., Any]] = {
    "norms": lambda gradients: gradients[0].new_empty(len(gradients), dtype=torch.float32),
    "judge": lambda norms, *rest: (norms.new_empty(()), norms.new_empty((), dtype=torch.bool), norms.new_empty(())),
    "exponents": lambda x: x.new_empty(ROW, dtype=torch.int64),
    **dict.fromkeys(("advance_", "exponents_", "row_sums_", "slope", *BY_OPERATOR), lambda *args, **kwargs: None),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"halfstep::{_name}", _fake, lib=LIBRARY)
