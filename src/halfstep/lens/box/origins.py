"""Origins: where a value that is not finite comes from, and which operator is to blame.

Note [origins]: every storage that holds a value that is not finite carries the set of `Source`s it comes from. An
operator whose result is finite ends them; one whose inputs are finite and whose result is not begins one. At the end
the loss, or a gradient, names its sources: infinities that were masked away are never among them. Infinities written on
purpose (``masked_fill(-inf)``, a mask in a buffer) are sources that are not accused; an operator that makes NaN from
nothing but those is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.lens.box.values import (
    constant_infinity,
    constant_nan,
    extremes,
    floats,
    held,
    in_float64,
    storage,
    writes,
)
from halfstep.lens.sites import Site, pointwise, spelled

__all__ = ["Call", "Origins", "Ran", "Source"]

SOURCES_EXAMINED = 32  # of the first sources; each is computed again in float64

UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted"}
)

GROWS = frozenset(
    "exp exp2 expm1 special.expm1 sinh cosh pow float_power prod cumprod ldexp matrix_exp matrix_power "
    "linalg.matrix_power linalg.matrix_exp det linalg.det".split()
)
"""Operators that may pass the largest float64 number from moderate fp32 inputs. Of any other, infinity is a pole."""

POLES = frozenset(
    "div true_divide reciprocal log log2 log10 log1p rsqrt atanh acos asin logit xlogy sqrt tan digamma lgamma".split()
)
"""What is taken for a pole where nothing can be computed again in float64."""

HUGE = 1e100  # inputs from which products and quotients of a few may leave float64 too


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call as it was seen.

    Attributes:
        site: where.
        dtypes: formats of its input tensors.
        shapes: shapes of them.
        largest: largest finite magnitude among them; 0.0 if they hold none.
        finite_in: whether all of them were finite.
        finite_out: whether its results were.
    """

    site: Site
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    largest: float
    finite_in: bool
    finite_out: bool


@dataclass(eq=False, slots=True)
class Source:
    """Where values that are not finite begin.

    Attributes:
        kind: "operator", "batch", "parameter", "buffer", "constant", "deliberate" or "unwritten".
        order: number of calls before it.
        name: of the parameter, buffer or input.
        call: the operator call that made it, or the first that met it.
        invalid: for an operator: whether float64 gives no number either.
        limit: largest number of the format of the result.
        written: whether the program itself put a NaN there.
        masks: for tensors from outside: whether it holds no other infinity than -inf, as additive masks do.
    """

    kind: str
    order: int
    name: str = ""
    call: Call | None = None
    invalid: bool = False
    limit: float = 0.0
    written: bool = False
    masks: bool = False

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Return what puts first causes first: state and batch, then operators; what may be meant comes last."""
        kernels = self.kind == "constant" and self.call is not None and self.call.site.phase == "backward"
        return self.innocent, kernels, self.kind == "operator", self.order

    @property
    def innocent(self) -> bool:
        """Whether it may be meant."""
        return self.kind in {"deliberate", "unwritten"} or self.masks


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Ran:
    """One operator call with its tensors, which nobody keeps.

    Attributes:
        call: what is kept of it.
        order: how many calls there were with it.
        func: what was called, with `args` and `kwargs`.
        found: its input tensors that may hold what is not finite.
        before: `extremes` of them before the call.
        outputs: what it returned or wrote to.
        after: `extremes` of them.
        copies: arguments as they were, for what writes to them; None where nobody needs those.
        inner: what the kernels inside returned.
    """

    call: Call
    order: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: list[Tensor]
    before: list[tuple[float, bool, bool]]
    outputs: list[Tensor]
    after: list[tuple[float, bool, bool]]
    copies: Any
    inner: list[Tensor]


class Origins:
    """The origins of what is not finite in one replay; note [origins].

    Attributes:
        sources: operators that made values that are not finite, in order.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._origins: dict[int, tuple[StorageWeakRef, frozenset[Source]]] = {}
        self._outside: dict[int, tuple[str, str]] = {}  # storage -> (kind, name) of batch and state
        self._insides: dict[int, tuple[StorageWeakRef, Call, frozenset[Source]]] = {}
        self._order = 0

    def come_from(self, kind: str, name: str, tensor: Tensor) -> None:
        """Take note of a tensor that is there before the first call."""
        self._outside.setdefault(storage(tensor), (kind, name))

    def judge(self, ran: Ran) -> None:
        """Say of the results of a call where what is not finite in them comes from."""
        call, self._order = ran.call, ran.order
        if call.finite_out:
            for tensor in ran.outputs:
                self._clear(tensor)
            self._keep(ran.inner, call, frozenset())
            return
        inherited = frozenset[Source]()
        for tensor, (_, finite, _) in zip(ran.found, ran.before, strict=True):
            if not finite:
                inherited |= self.of(tensor, call)
        origins = inherited
        if call.finite_in:
            constant = constant_infinity((*ran.args, *ran.kwargs.values()))
            if constant and not any(nan for _, _, nan in ran.after):  # 0 * -inf is not what anybody means
                origins = frozenset({Source("deliberate", ran.order, call=call)})
            elif call.site.op in UNWRITTEN:
                origins = frozenset({Source("unwritten", ran.order, call=call)})
            else:
                origins = frozenset({self._source(ran)})
        elif _adds(ran, inherited):
            source = self._source(ran)
            origins = frozenset({source}) if all(s.innocent for s in inherited) else inherited | {source}
        for tensor, (_, finite, _) in zip(ran.outputs, ran.after, strict=True):
            if finite:
                self._clear(tensor)
            else:
                self._set(tensor, origins)
        self._keep(ran.inner, call, origins)

    def _keep(self, inner: list[Tensor], call: Call, origins: frozenset[Source]) -> None:
        """Remember whose the tensors are that an operator keeps for its backward pass and shows nobody."""
        for tensor in inner:
            self._insides[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), call, origins)

    def _source(self, ran: Ran) -> Source:
        """Return the source that the call is, having computed it again in float64 to tell overflow from the rest."""
        limit = 0.0
        floating = [t.dtype for t in ran.outputs if t.is_floating_point()]
        if floating:
            limit = torch.finfo(floating[0]).max
        nan_only = any(bool(torch.isnan(t).any()) for t in ran.outputs) and not any(
            bool(torch.isinf(t).any()) for t in ran.outputs
        )
        invalid = nan_only
        if len(self.sources) < SOURCES_EXAMINED and (ran.copies is not None or not writes(ran.func)):
            wide = in_float64(ran.func, *(ran.copies or (ran.args, ran.kwargs)))
            if wide is not None:
                invalid = _invalid(spelled(ran.func), ran.call, ran.found, floats(wide))
                # an eps that the format lost: NaN from operators inside, none of which ran over
                lost = nan_only and len(ran.inner) > 1 and not any(bool(torch.isinf(t).any()) for t in ran.inner)
                invalid = invalid or lost
            else:
                invalid = nan_only or spelled(ran.func) in POLES
        name = ""
        largest = max(ran.found, key=lambda tensor: extremes(tensor)[0], default=None)
        if largest is not None and limit and not invalid and extremes(largest)[0] > limit:
            name = self._outside.get(storage(largest), ("", ""))[1]  # what the format of the result cannot hold
        written = constant_nan((*ran.args, *ran.kwargs.values()))
        source = Source("operator", ran.order, name, ran.call, invalid or written, limit, written)
        self.sources.append(source)
        return source

    def of(self, tensor: Tensor, call: Call | None) -> frozenset[Source]:
        """Return the sources of a tensor that is not finite."""
        key = storage(tensor)
        kept = self._origins.get(key)
        if kept is not None:
            return kept[1]
        inside = self._insides.get(key)
        if inside is not None and key not in self._outside:
            invalid = extremes(tensor)[2] or inside[1].site.op in POLES
            made = inside[2] or frozenset({Source("operator", self._order, call=inside[1], invalid=invalid)})
            self._set(tensor, made)
            return made
        kind, name = self._outside.get(key, ("constant", ""))
        _, _, nan = extremes(tensor)
        masks = kind in {"buffer", "batch", "constant"} and not nan and not bool((tensor.detach() == math.inf).any())
        source = frozenset({Source(kind, self._order, name, call, masks=masks)})
        self._set(tensor, source)
        return source

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        if held(tensor):
            self._origins[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), sources)

    def _clear(self, tensor: Tensor) -> None:
        if self._origins and held(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() <= tensor.numel() * tensor.element_size():
                self._origins.pop(storage._cdata, None)

    def accused(self, tensor: Tensor) -> list[Source]:
        """Return the sources of `tensor`, a loss or a gradient that is not finite: the first cause first."""
        found = [s for s in self.of(tensor, None) if s.kind != "constant" or s.call is not None]
        found = found or [s for s in self.sources if not s.innocent]  # somebody copied it where nobody looks
        return sorted(found or self.of(tensor, None), key=Source.rank)


def _adds(ran: Ran, inherited: frozenset[Source]) -> bool:
    """Return whether an operator that met infinities made others of its own; note [origins]."""
    op = ran.call.site.op
    if all(s.innocent for s in inherited):
        had_nan = any(nan for _, _, nan in ran.before)
        if any(nan for _, _, nan in ran.after) and not had_nan:
            return not all(s.kind == "batch" for s in inherited) or op in {
                "softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "cross_entropy",
            }  # fmt: skip
    if not pointwise(op) or len(ran.outputs) != 1:
        return False
    try:
        spoiled = torch.zeros_like(ran.outputs[0], dtype=torch.bool)
        for tensor in ran.found:
            spoiled = spoiled | ~torch.isfinite(tensor)
        return (
            bool((~torch.isfinite(ran.outputs[0]) & ~spoiled).any()) if spoiled.shape == ran.outputs[0].shape else False
        )
    except RuntimeError:
        return False


def _invalid(op: str, call: Call, found: list[Tensor], wide: list[Tensor]) -> bool:
    """Return whether what an operator gave in float64 says that it has no value there, in any format."""
    states = [extremes(t) for t in wide]
    if all(finite for _, finite, _ in states):
        return False
    if any(nan for _, _, nan in states):
        return True
    if call.largest > HUGE or any(t.dtype not in {torch.float64, torch.complex128} for t in wide):
        return False
    if op not in GROWS:
        return True
    return any(t.shape == w.shape and bool((w.isinf() & (t == 0)).any()) for t in found for w in wide)  # 0 ** -1
