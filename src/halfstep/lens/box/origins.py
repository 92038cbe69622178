"""Origins: where the values of one replay come from: those that are not finite, and those that are large.

Note [origins]: every storage that holds a value that is not finite carries the set of `Source`s it comes from. An
operator whose result is finite ends them; one whose inputs are finite and whose result is not begins one. At the end
the loss, or a gradient, names its sources: infinities that were masked away are never among them. Infinities written on
purpose (``masked_fill(-inf)``, a mask in a buffer) are sources that are not accused; an operator that makes NaN from
nothing but those is, and its source names the masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.lens.calls import (
    DIVIDING,
    NORMALISING,
    Args,
    Kwargs,
    Site,
    constants,
    copied,
    described,
    extremes,
    floats,
    has_storage,
    in_float64,
    pointwise,
    read,
    remark,
    remarked,
    spelled,
    storage,
    writes,
)
from halfstep.trees import map_tensors, tensors

SOURCES_EXAMINED = 32  # sources that are computed again in float64, the first: verdicts name early ones

UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted"}
)
GROWS = frozenset(
    "exp exp2 expm1 special.expm1 sinh cosh pow float_power prod cumprod ldexp matrix_exp matrix_power "
    "linalg.matrix_power linalg.matrix_exp det linalg.det".split()
)
"""Operators that may pass the largest float64 number from moderate fp32 inputs. Of any other, infinity is a pole."""

POLES = frozenset(  # operators whose infinity is taken for a pole where a call cannot be computed again in float64
    "div true_divide reciprocal log log2 log10 log1p rsqrt atanh acos asin logit xlogy sqrt tan digamma lgamma".split()
)

SCALING = frozenset({"mul", "div", "true_divide", "pow", "float_power", "linear", "matmul", "lerp", "addcmul"})
"""Operators of which an infinite argument is a factor, and no mask."""

HUGE = 1e100  # the fourth power of a number this large leaves float64 too, which ends at 1.8e308


@dataclass(eq=False, slots=True)
class CallRecord:
    """What is kept of one operator call: a node of the replay's dataflow."""

    site: Site  # where it was called
    dtypes: tuple[str, ...]  # formats of its input tensors
    shapes: tuple[tuple[int, ...], ...]  # shapes of them
    largest: float  # largest finite magnitude among them; 0.0 if they hold none
    finite_in: bool  # whether all of them were finite
    finite_out: bool = True  # whether its results are, as soon as it has run
    made: float = 0.0  # largest finite magnitude of its results; 0.0 if they hold none
    dtype: torch.dtype | None = None  # format of its first result of floating numbers, None without one
    parents: tuple[CallRecord, ...] = ()  # the calls that made its arguments; views and queries are none
    outside: tuple[tuple[str, str], ...] = ()  # (kind, name) of batch, parameters and buffers among its arguments
    carrier: str = ""  # name of the one of those that holds `largest`, "" if none does

    @property
    def limit(self) -> float:
        """Largest number of the format of its result; 0.0 without one."""
        return torch.finfo(self.dtype).max if self.dtype is not None else 0.0


def upstream(calls: Iterable[CallRecord]) -> Iterator[CallRecord]:
    """Iterate over `calls` and all that their arguments depend on, the nearest first."""
    level = list(dict.fromkeys(calls))
    seen = set(level)
    while level:
        yield from level
        level = [p for p in dict.fromkeys(p for call in level for p in call.parents) if p not in seen]
        seen.update(level)


@dataclass(eq=False, slots=True)
class Source:
    """Where values that are not finite come from first."""

    kind: str  # "operator", "batch", "parameter", "buffer", "constant", "deliberate" or "unwritten"
    order: int  # number of calls before it
    name: str = ""  # of the parameter, buffer or input
    call: CallRecord | None = None  # the operator call that made the values, or the first that read them
    invalid: bool = False  # for an operator: whether float64 gives no number either
    limit: float = 0.0  # largest number of the format of the result
    written: bool = False  # whether the program itself wrote a NaN there
    masks: bool = False  # for tensors from outside: whether -inf is the only infinity in it, as in additive masks
    position: int = 0  # of a tensor among those from outside, in their order
    additive: bool = False  # whether it holds nothing but 0 and -inf besides
    over: tuple[Source, ...] = ()  # innocent sources that the operator made NaN of: the masks
    samples: tuple[int, ...] = ()  # where the result is not finite, in its first dimension; (): everywhere, not known
    features: tuple[int, ...] = ()  # the same in its last dimension
    remark: str = ""  # what the operator's arguments show, in words of data, "" if nothing
    # what the argument that is remarked on comes from: calls, and (kind, name) of batch and state
    needs: tuple[tuple[CallRecord, ...], tuple[tuple[str, str], ...]] = ((), ())

    def roots(self) -> set[tuple[str, str]]:
        """Return (kind, name) of the batch and state tensors that the argument remarked on depends on."""
        calls, outside = self.needs
        return set(outside) | {root for above in upstream(calls) for root in above.outside}

    def rank(self) -> tuple[bool, bool, bool, int, int]:
        """Return a sort key that puts first causes first: state and batch, then operators; innocent ones come last."""
        kernels = self.kind == "constant" and self.call is not None and self.call.site.phase == "backward"
        return self.innocent, kernels, self.kind == "operator", self.order, self.position

    @property
    def innocent(self) -> bool:
        """Whether the program may have written it on purpose."""
        return self.kind in {"deliberate", "unwritten"} or self.masks


class Call:
    """One operator call with its tensors, for as long as it runs; made before it runs."""

    def __init__(self, origins: Origins, site: Site, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.inputs = read(func, args, kwargs)
        self.before = [extremes(tensor) for tensor in self.inputs]
        self.given = {storage(tensor) for tensor in tensors((args, kwargs))}
        largest = max((value for value, _, _ in self.before), default=0.0)
        finite = all(finite for _, finite, _ in self.before)
        self.record = record = CallRecord(site, *described(self.inputs), largest=largest, finite_in=finite)
        record.parents, record.outside = origins.made_by((args, kwargs))
        record.carrier = origins.carrier(self.inputs, self.before)
        self.again: Any = (args, kwargs)  # with which it can be computed again, None if it overwrites them
        if writes(func):
            self.again = map_tensors(self.again, copied) if finite else None

    def end(self, result: Any, inner: list[Tensor]) -> CallRecord:
        """Read what it returned or wrote to, and the results of the kernels inside; return what is kept of it."""
        self.inner, self.outputs = inner, floats(result)
        self.after = [extremes(tensor) for tensor in self.outputs]
        self.record.finite_out = all(finite for _, finite, _ in self.after)
        self.record.made = max((value for value, _, _ in self.after), default=0.0)
        self.record.dtype = next((t.dtype for t in self.outputs if t.is_floating_point()), None)
        return self.record


class Origins:
    """The origins of the values of one replay that are not finite; note [origins]."""

    def __init__(self) -> None:
        self.sources: list[Source] = []  # operators that made such values, in order
        self._origins: dict[int, tuple[StorageWeakRef, frozenset[Source]]] = {}
        self._outside: dict[int, tuple[str, str]] = {}  # storage -> (kind, name) of batch and state
        self._insides: dict[int, tuple[StorageWeakRef, CallRecord, frozenset[Source]]] = {}
        self._makers: dict[int, tuple[StorageWeakRef, CallRecord]] = {}  # storage -> the call that wrote it last
        self.order = 0  # calls with results

    def expect(self, kind: str, name: str, tensor: Tensor) -> None:
        """Note a tensor that exists before the first call."""
        self._outside.setdefault(storage(tensor), (kind, name))

    def made_by(self, tree: Any) -> tuple[tuple[CallRecord, ...], tuple[tuple[str, str], ...]]:
        """Return the calls that made the tensors of `tree`, and (kind, name) of those from outside."""
        calls, outside = dict[CallRecord, None](), dict[tuple[str, str], None]()
        for tensor in tensors(tree):
            if has_storage(tensor):
                key = storage(tensor)
                if key in self._makers:
                    calls[self._makers[key][1]] = None
                elif key in self._outside:
                    outside[self._outside[key]] = None
        return tuple(calls), tuple(outside)

    def calls(self) -> Iterator[CallRecord]:
        """Iterate over the calls whose results have not been overwritten, in their order."""
        yield from dict.fromkeys(call for _, call in self._makers.values())

    def carrier(self, inputs: list[Tensor], before: list[tuple[float, bool, bool]]) -> str:
        """Return the name of the input with the largest magnitude if it comes from outside, else ""."""
        largest = max(range(len(inputs)), key=lambda index: before[index][0], default=None)
        if largest is None or storage(inputs[largest]) in self._makers:
            return ""
        return self._outside.get(storage(inputs[largest]), ("", ""))[1]

    def follow(self, call: Call, result: Any, inner: list[Tensor]) -> None:
        """Note which call made its results, and where those of their values come from that are not finite."""
        record = call.end(result, inner)
        written = {storage(tensor) for tensor in call.outputs} if writes(call.func) else set[int]()
        for tensor in tensors((result, inner)):  # those that share the memory of an argument are views
            if has_storage(tensor) and (key := storage(tensor)) not in call.given - written:
                self._makers[key] = (StorageWeakRef(tensor.untyped_storage()), record)
        if not call.outputs:
            return
        self.order += 1
        if record.finite_out:
            for tensor in call.outputs:
                self._clear(tensor)
            self._note_inside(call.inner, record, frozenset())
            return
        origins = frozenset[Source]()
        for tensor, (_, finite, _) in zip(call.inputs, call.before, strict=True):
            if not finite:
                origins |= self.of(tensor, record)
        if record.finite_in:
            constant = not all(map(math.isfinite, constants((*call.args, *call.kwargs.values()))))
            # a NaN, such as 0 * -inf, is not meant
            if constant and record.site.op not in SCALING and not any(nan for _, _, nan in call.after):
                origins = frozenset({Source("deliberate", self.order, call=record)})
            elif record.site.op in UNWRITTEN:
                origins = frozenset({Source("unwritten", self.order, call=record)})
            else:
                origins = frozenset({self._source(call)})
        elif _adds(call, origins):
            innocent = all(s.innocent for s in origins)
            over = tuple(sorted(origins, key=Source.rank)) if innocent else ()
            origins = (frozenset() if innocent else origins) | {self._source(call, over)}
        for tensor, (_, finite, _) in zip(call.outputs, call.after, strict=True):
            if finite:
                self._clear(tensor)
            else:
                self._set(tensor, origins)
        self._note_inside(call.inner, record, origins)

    def _note_inside(self, inner: list[Tensor], record: CallRecord, origins: frozenset[Source]) -> None:
        """Note which call made tensors that an operator saves for its backward pass and does not return."""
        for tensor in inner:
            self._insides[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), record, origins)

    def _source(self, call: Call, over: tuple[Source, ...] = ()) -> Source:
        """Return the call as a source; a run in float64 tells overflow from a value that does not exist."""
        op = spelled(call.func)
        limit = next((torch.finfo(t.dtype).max for t in call.outputs if t.is_floating_point()), 0.0)
        nan_only = any(nan for _, _, nan in call.after) and not _any_inf(call.outputs)
        invalid = nan_only
        if len(self.sources) < SOURCES_EXAMINED and call.again is not None:
            wide = in_float64(call.func, *call.again)
            if wide is None:
                invalid = nan_only or op in POLES
            else:
                # NaN although no operator inside overflowed: the format has lost an eps
                lost = nan_only and len(call.inner) > 1 and not _any_inf(call.inner)
                invalid = lost or _invalid(op, call, floats(wide))
        name = ""
        if call.record.largest > limit > 0.0 and not invalid:  # the format of the result cannot hold an input
            name = call.record.carrier
        written = any(map(math.isnan, constants((*call.args, *call.kwargs.values()))))
        words = remark(op, call.args, call.kwargs, call.outputs) if call.again is not None else ""
        everything = call.record.parents, call.record.outside
        divides = op in DIVIDING and not writes(call.func)
        source = Source(
            "operator", self.order, name, call.record, invalid or written, limit, written, over=over,
            samples=_where(call, 0), features=_where(call, -1), remark=words,
            needs=self.made_by(remarked(op, call.args, call.kwargs)) if divides else everything,
        )  # fmt: skip
        self.sources.append(source)
        return source

    def of(self, tensor: Tensor, record: CallRecord | None) -> frozenset[Source]:
        """Return the sources of a tensor that is not finite; `record`: the call that reads it."""
        key = storage(tensor)
        kept = self._origins.get(key)
        if kept is not None:
            return kept[1]
        largest, _, nan = extremes(tensor)
        inside = self._insides.get(key)
        if inside is not None and key not in self._outside:
            _, maker, made = inside
            invalid = nan or maker.site.op in POLES
            made = made or frozenset({Source("operator", self.order, call=maker, invalid=invalid)})
        else:
            kind, name = self._outside.get(key, ("constant", ""))
            masks = kind in {"buffer", "batch", "constant"} and (record is None or record.site.op not in SCALING)
            masks = masks and not nan and not bool((tensor.detach() == math.inf).any())
            position = next((index for index, known in enumerate(self._outside) if known == key), 0)
            additive = masks and largest == 0.0
            made = frozenset(
                {Source(kind, self.order, name, record, masks=masks, position=position, additive=additive)}
            )
        self._set(tensor, made)
        return made

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        if has_storage(tensor):
            self._origins[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), sources)

    def _clear(self, tensor: Tensor) -> None:
        if self._origins and has_storage(tensor):
            if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():  # all of it is written
                self._origins.pop(storage(tensor), None)

    def accused(self, tensor: Tensor) -> list[Source]:
        """Return the sources of `tensor`, a loss or a gradient that is not finite: the first cause first."""
        found = [s for s in self.of(tensor, None) if s.kind != "constant" or s.call is not None]
        found = found or [s for s in self.sources if not s.innocent]  # code that no mode sees has copied the value
        return sorted(found or self.of(tensor, None), key=Source.rank)


def _where(call: Call, dim: int) -> tuple[int, ...]:
    """Return where along `dim` the first result that is not finite is so; () if everywhere, or if it has one value."""
    for tensor, (_, finite, _) in zip(call.outputs, call.after, strict=True):
        if not finite:
            if not has_storage(tensor) or not tensor.dim():
                return ()
            bad = (~torch.isfinite(tensor.detach())).movedim(dim, 0).reshape(tensor.shape[dim], -1).any(1)
            return () if bool(bad.all()) else tuple(bad.nonzero().flatten().tolist())
    return ()


def _any_inf(found: list[Tensor]) -> bool:
    return any(bool(torch.isinf(t).any()) for t in found)


def _adds(call: Call, inherited: frozenset[Source]) -> bool:
    """Return whether an operator whose inputs were not finite made more such values of its own; note [origins]."""
    op = call.record.site.op
    if all(s.innocent for s in inherited):
        had_nan = any(nan for _, _, nan in call.before)
        if any(nan for _, _, nan in call.after) and not had_nan:
            return op in NORMALISING or not all(s.kind == "batch" and not s.additive for s in inherited)
    if not pointwise(op) or len(call.outputs) != 1:
        return False
    try:
        (output,) = call.outputs
        spoiled = torch.zeros_like(output, dtype=torch.bool)
        for tensor in call.inputs:
            spoiled = spoiled | ~torch.isfinite(tensor)
        return spoiled.shape == output.shape and bool((~torch.isfinite(output) & ~spoiled).any())
    except RuntimeError:
        return False


def _invalid(op: str, call: Call, wide: list[Tensor]) -> bool:
    """Return whether the results in float64 show that the operator has no value there, in any format."""
    states = [extremes(t) for t in wide]
    if all(finite for _, finite, _ in states):
        return False
    if any(nan for _, _, nan in states):
        return True
    if call.record.largest > HUGE or any(t.dtype not in {torch.float64, torch.complex128} for t in wide):
        return False
    if op not in GROWS:
        return True
    # 0 ** -1
    return any(t.shape == w.shape and bool((w.isinf() & (t == 0)).any()) for t in call.inputs for w in wide)
