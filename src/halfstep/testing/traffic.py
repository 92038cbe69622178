"""What one call of an operator costs: bytes read and written, launches, and which tensors it casts.

Conventions. A call that is neither a view nor an allocation is one launch. A tensor that is an argument is read in
full, a result or an argument that the schema marks as written is written in full (``Tensor(a!)``), and an argument that
is only overwritten (`copy_`, ``out=``) is not read: what an eager program has to move if every operator is one pass. A
tensor expanded over a dimension counts as what it has in memory. A cast is an operator whose only work is to write
values in another floating format; a cast inside an operator that computes, without a cast tensor in memory, is none,
and neither is one of a single element.

How often multi-tensor functions launch on CUDA follows the packing of `MultiTensorApply.cuh` (torch 2.11 to 2.13): a
launch has at most 110, 64, 48, 36 or 30 tensors, by its number of lists, and at most 320 chunks of 65,536 elements.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from halfstep.torch_private.operators import schema_of
from halfstep.trees import tensors

FREE = frozenset({"_unsafe_view", "device", "is_same_size", "resize_", "set_", "sym_numel", "sym_size", "sym_stride"})
ALLOCATIONS = ("empty", "new_empty")
OVERWRITE = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_"})
CAST_BY_COPY = frozenset({"aten::copy_", "aten::_foreach_copy_"})
COUNTERS = frozenset({"state_steps"})  # lists beside those that a fused kernel walks

CHUNK = 65536
CHUNKS = 320
TENSORS = (110, 64, 48, 36, 30)  # for 1, 2, ... lists

Arguments = Mapping[str, Any]  # of a call, by name; "result" is what it returned


class DeclarationError(hs.HalfstepError, ValueError):
    """Declared traffic that does not fit the operator's schema, or a call of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one call costs."""

    read: int = 0  # bytes of the tensors read
    written: int = 0  # bytes of the tensors written
    launches: int = 0  # 1, or 0 for views and allocations; as declared for a declared operator
    kernels: int = 0  # the same, with multi-tensor functions as the launches they need on CUDA
    casts: tuple[tuple[Tensor, Tensor], ...] = ()  # (from, to) of each tensor cast


NOTHING = Cost()


_DECLARED: dict[str, Callable[[Any, Arguments], Cost]] = {}
"""Name of an operator -> what a call costs, by its schema and its arguments."""


def declare_traffic(
    operator: str, *, reads: Sequence[str], writes: Sequence[str],
    extra: Callable[[Arguments], tuple[int, int]] | None = None, launches: int = 1,
) -> None:  # fmt: skip
    """Declare what a custom operator reads and writes, where its schema has too much or too little.

    Without a declaration it reads all its tensor arguments once, and writes its results and the arguments that its
    schema marks as written. Checked here as far as the operator is known, and at every call.

    Args:
        operator: its name, ``mylib::adamw_``, or with an overload, ``mylib::adamw_.out``.
        reads: names of the arguments it reads; a name twice for two passes.
        writes: names of the arguments it writes; "result" for what it returns. All that the schema marks as written
            must be among them.
        extra: the call's arguments by name (and "result") -> bytes it reads and writes besides, such as temporaries.
        launches: kernels of one call.

    Raises:
        DeclarationError: a name that is no argument, a written argument that is left out, or no launch.

    Examples:
        >>> from halfstep.testing import declare_traffic
        >>> declare_traffic("mylib::adamw_", reads=["param", "grad"], writes=["param"])  # doctest: +SKIP
    """
    if launches < 1:
        raise DeclarationError(f"{operator}: launches={launches!r}; an operator that does anything launches at least 1")
    reads, writes = tuple(reads), tuple(writes)
    found = _find(operator)
    if found is not None:
        _check(operator, schema_of(found), reads, writes)
    _DECLARED[operator] = partial(_declared_cost, reads=reads, writes=writes, extra=extra, launches=launches)


def _find(operator: str) -> Any:
    """Return the overload called `operator`, or None if it is not registered (yet)."""
    name, _, overload = operator.partition(".")
    space, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, space), short, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def _check(operator: str, schema: Any, reads: Sequence[str], writes: Sequence[str]) -> None:
    names = [a.name for a in schema.arguments]
    for name in (*reads, *writes):
        if name not in names and not (name == "result" and name in writes):
            raise DeclarationError(f"{operator}: {name!r} is none of its arguments {names}")
    left_out = [a.name for a in schema.arguments if _written(a) and a.name not in writes]
    if left_out:
        raise DeclarationError(
            f"{operator}: its schema says that it writes {left_out}, and the declaration leaves that out; "
            f"declared writes are {list(writes)}"
        )


def cost_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """Return what a call of `operator` (an overload of torch.ops) cost."""
    schema = schema_of(operator)
    space, _, short = schema.name.partition("::")
    if space in {"profiler", "prim"} or short in FREE or operator.is_view or short.startswith(ALLOCATIONS):
        return NOTHING
    call = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    call |= {"result": result, **kwargs}
    declared = _DECLARED.get(f"{schema.name}.{schema.overload_name}") or _DECLARED.get(schema.name)
    if declared is not None:
        return declared(schema, call)
    read = written = 0
    for argument in schema.arguments:
        size = sum(map(bytes_of, tensors(call.get(argument.name))))
        changed = _written(argument)
        if not (changed and (short in OVERWRITE or argument.is_out)):
            read += size
        # fused optimizers mark gradients as written, and write them only to unscale
        kept = short.startswith("_fused_") and argument.name == "grads" and call.get("grad_scale") is None
        if changed and not kept:
            written += size
    if not schema.is_mutable:
        written += sum(map(bytes_of, tensors(result)))
    return Cost(
        read=read, written=written, launches=1, kernels=_kernels(schema, short, call),
        casts=tuple(_casts(schema.name, call)),
    )  # fmt: skip


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _declared_cost(
    schema: Any, call: Arguments, reads: Sequence[str], writes: Sequence[str],
    extra: Callable[[Arguments], tuple[int, int]] | None, launches: int,
) -> Cost:  # fmt: skip
    _check(schema.name, schema, reads, writes)
    read, written = (sum(bytes_of(t) for name in names for t in tensors(call.get(name))) for names in (reads, writes))
    if extra is not None:
        more = extra(call)
        if min(more) < 0:
            raise DeclarationError(f"{schema.name}: extra traffic {more}; bytes are not negative")
        read, written = read + more[0], written + more[1]
    return Cost(read=read, written=written, launches=launches, kernels=launches)


def _kernels(schema: Any, short: str, call: Arguments) -> int:
    if not short.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return 1
    named = ((a.name, call.get(a.name)) for a in schema.arguments if a.name not in COUNTERS)
    lists = [value for _, value in named if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    if not lists:
        return 1
    sizes = [t.numel() for t in lists[0]]
    if not short.startswith("_fused_") and any(len({t.dtype for t in each}) > 1 for each in lists):
        return len(sizes)  # torch goes tensor by tensor
    if short == "_foreach_norm":  # partial results are cleared before and summed up after
        return multi_tensor_launches(sizes, 1) + 2
    results = isinstance(call["result"], (list, tuple)) and bool(call["result"]) and not schema.is_mutable
    return max(1, multi_tensor_launches(sizes, len(lists) + results))


def _casts(name: str, call: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (from, to) for each tensor that the call does nothing with but change its format."""
    if name == "aten::_to_copy":
        pairs = [(call["self"], call["result"])]
    elif name in CAST_BY_COPY:
        source, target = call["src"], call["self"]
        pairs = [(source, target)] if isinstance(source, Tensor) else list(zip(source, target, strict=True))
    else:
        return
    for source, target in pairs:
        floating = source.is_floating_point() and target.is_floating_point()
        if floating and source.dtype is not target.dtype and target.numel() > 1:
            yield source, target


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory; one that is expanded over a dimension has them once."""
    if tensor.is_sparse:
        return bytes_of(tensor._values()) + bytes_of(tensor._indices())
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def multi_tensor_launches(sizes: Sequence[int], lists: int) -> int:
    """Return the launches for tensors of `sizes` elements in `lists` lists side by side, those of results included."""
    most = TENSORS[min(max(lists, 1), len(TENSORS)) - 1]
    launches = tensors = chunks = 0
    for size in filter(None, sizes):
        tensors += 1
        needed = -(-size // CHUNK)
        for chunk in range(1, needed + 1):
            chunks += 1
            last = chunk == needed
            if chunks == CHUNKS or (last and tensors == most):
                launches += 1
                chunks, tensors = 0, 0 if last else 1  # a tensor cut in two goes on in the next launch
    return launches + (chunks > 0)


def declare_own() -> None:
    """Declare halfstep's own operators where their schemas do not suffice.

    On CUDA norms are two launches, and an update that counts its steps does so in one of its own.
    """
    declare_traffic("halfstep::norms", reads=("gradients",), writes=("result",), launches=2)
    for operator in torch.ops.halfstep:
        arguments = schema_of(_find(f"halfstep::{operator}")).arguments
        names = [a.name for a in arguments if "Tensor" in str(a.type)]
        if "beside" in names:
            declare_traffic(
                f"halfstep::{operator}", reads=[n for n in names if n != "beside"],
                writes=[a.name for a in arguments if _written(a)],
                extra=_beside, launches=2 if "step" in names else 1,
            )  # fmt: skip


def _beside(call: Arguments) -> tuple[int, int]:
    """A low copy beside a master is written only; what else may be there is read too."""
    return (0 if call["form"] == "copy" else sum(map(bytes_of, call["beside"]))), 0
