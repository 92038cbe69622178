"""Calls of operators: where a call stands in the user's program, what its tensors hold, how to compute it again.

Shared by black box, monitor and audit. Computing again leaves the generators of random numbers as they were.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.accelerators import TYPES
from halfstep.cast.arithmetic.rounded import rules_off
from halfstep.cast.regions.autocast import autocast
from halfstep.cast.rules.recipe import Recipe
from halfstep.cast.state import STATE
from halfstep.errors import HalfstepError, PolicyError
from halfstep.formats import LOW_DTYPES, float64_of
from halfstep.kernels import sharded
from halfstep.policy.operators import canonical, known, operator_name
from halfstep.snapshot import same_numbers, torch_states
from halfstep.torch_private.devices import get_privateuse1_backend_name, is_any_autocast_enabled, storage_key
from halfstep.torch_private.modes import (
    DisableTorchFunction,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
)
from halfstep.torch_private.operators import OpOverload, schema_of
from halfstep.trees import map_tensors, tensors

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and named arguments of a loss function after the model

Args = tuple[Any, ...]  # of a call
Kwargs = dict[str, Any]

RUNS_BACKWARD = frozenset({"backward", "grad"})
"""Functions of torch.autograd that report themselves to modes as operators do, and call everything else."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operator was called: its public short name, the module, the user's line, the phase."""

    op: str
    module: str
    line: str
    phase: str = "forward"
    call: int = 0  # how often the module had been entered, for modules called several times


@lru_cache(maxsize=4096)
def spelled(func: Callable[..., Any]) -> str:
    """Return the public short name of a function that a mode received."""
    name = operator_name(func)
    if name is not None:
        return name
    raw = getattr(func, "__name__", str(func))
    if raw.startswith("__i") and raw.endswith("__"):
        raw = raw[3:-2]
    return public(raw)


@cache
def public(raw: str) -> str:
    """Return the operator that an in-place, private or aten name belongs to."""
    for word in (raw, raw.strip("_"), raw.strip("_").removesuffix("_backward")):
        if word in known():
            return word
        try:
            return canonical(word)
        except PolicyError:  # no operator of this name
            continue
    return raw.strip("_") or raw


@lru_cache(maxsize=1024)
def pointwise(op: str) -> bool:
    """Return whether each element of the operator's result comes from the elements in its place alone."""
    packet = getattr(torch.ops.aten, op, None)
    names = [] if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in names)


def region_here() -> Recipe | None:
    """Return the recipe of the `hs.autocast` that is the innermost region here, None if another is or none."""
    owner = STATE.frames[-1].owner() if STATE.frames else None
    return owner.recipe if isinstance(owner, autocast) else None


STATISTICS = ("running_mean", "running_var")
BUILTIN_NORM = ("input", "weight", "bias", *STATISTICS, "training")


def extremes(tensor: Tensor) -> tuple[float, bool, bool]:
    """Return (largest finite magnitude, all finite, any nan) of a tensor's values; integers are finite and 0.0."""
    if is_functorch_wrapped_tensor(tensor):  # inside torch.func; the kernels below see what is in it
        return 0.0, True, False
    values: Any = Tensor.detach(tensor)  # of a low parameter low values
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
    if hasattr(values, "placements"):
        values = sharded.local(values)
    elif is_traceable_wrapper_subclass(values):  # torchao's fp8 tensors; what is made of them is a plain tensor
        return 0.0, True, False
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or not values.numel():
        return 0.0, True, False
    if values.element_size() == 1:
        values = values.float()
    low, high = map(float, torch.aminmax(values))
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high) + 0.0, True, False  # no -0.0
    nan = math.isnan(low)
    finite = values[torch.isfinite(values)]
    return (float(finite.abs().max()) if finite.numel() else 0.0), False, nan


def floats(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that may hold what is not finite."""
    return [t for t in tensors(tree) if t.is_floating_point() or t.is_complex()]


def read(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the floating tensors among the arguments of `func` that its result depends on.

    That is all of them but the running statistics of a norm in training, which are written to alone.
    """
    found = floats((args, kwargs))
    name = str(func) if isinstance(func, OpOverload) else getattr(func, "__name__", "")
    if "batch_norm" not in name and "instance_norm" not in name:
        return found
    if isinstance(func, OpOverload):
        names: Sequence[str] = [argument.name for argument in schema_of(func).arguments]
    else:
        names = tuple(inspect.signature(func).parameters) if isinstance(func, FunctionType) else BUILTIN_NORM
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    training = "cudnn" in name or any(given.get(flag) is True for flag in ("training", "train", "use_input_stats"))
    unread = {id(given.get(statistic)) for statistic in STATISTICS} if training else set()
    return [tensor for tensor in found if id(tensor) not in unread]


def described(found: list[Tensor]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the formats and the shapes of tensors."""
    return tuple(str(t.dtype).removeprefix("torch.") for t in found), tuple(tuple(t.shape) for t in found)


def constants(values: Iterable[Any]) -> Iterator[float]:
    """Iterate over the floats among arguments, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, float):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from constants(value)


def numbers_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    """Return the floats among the arguments of a call, with the defaults of a function written in Python."""
    if isinstance(func, FunctionType):
        try:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            return tuple(constants(bound.arguments.values()))
        except (TypeError, ValueError):  # it has no signature
            pass
    return tuple(constants((*args, *kwargs.values())))


def has_storage(tensor: Tensor) -> bool:
    """Return whether `tensor` has a storage of its own, by which its values are known."""
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def storage(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common, as long as one of them, or a weak reference, lives."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return int(storage_key(tensor.untyped_storage())) if has_storage(tensor) else id(tensor)


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """Return the storage of a dense tensor as a key, which no other storage equals while the key lives."""
    return StorageWeakRef(tensor.untyped_storage())


def taken_from(batches: object, most: int, error: type[HalfstepError]) -> list[Batch]:
    """Return the first batches of an iterable, each a tuple, a list, a dict or one argument; `error` if it has none."""
    if isinstance(batches, (Tensor, Mapping, str, bytes, nn.Module)) or not isinstance(batches, Iterable):
        raise error(
            f"batches must be an iterable of batches and is a {type(batches).__name__}; for one batch write [batch]"
        )
    return [
        ((), dict(batch)) if isinstance(batch, Mapping)
        else (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})
        for batch in islice(batches, min(most, sys.maxsize))
    ]  # fmt: skip


def writes(func: Callable[..., Any]) -> bool:
    """Return whether `func` changes an argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    if isinstance(func, OpOverload):
        return bool(schema_of(func).is_mutable)
    return name.endswith("_")


def copied(tensor: Tensor) -> Tensor:
    """Return a copy outside autograd."""
    return Tensor.detach(tensor).clone()


def _in_float64(tensor: Tensor) -> Tensor:
    return float64_of(tensor.detach()) if tensor.is_floating_point() else tensor.detach()


def autocasting() -> list[str]:
    """Return the device types whose autocast, torch's or a region's, is on in this thread; the CPU last."""
    if not is_any_autocast_enabled():
        return []
    return [kind for kind in (*TYPES, get_privateuse1_backend_name(), "cpu") if torch.is_autocast_enabled(kind)]


BELOW_FP32 = LOW_DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}


def widened(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, wide: torch.dtype
) -> tuple[Callable[..., Any], Args, Kwargs]:
    """Return a call that names `wide` where another names a low format: ``x.half()``, ``dtype=torch.float16``."""
    if getattr(func, "__name__", "") in {"half", "bfloat16"} and args:
        return Tensor.to, (args[0], wide), {}
    return (
        func,
        tuple(wide if type(a) is torch.dtype and a in BELOW_FP32 else a for a in args),
        {k: wide if type(v) is torch.dtype and v in BELOW_FP32 else v for k, v in kwargs.items()},
    )


@contextmanager
def unruled() -> Iterator[None]:
    """Run the operators of a block in the formats of their arguments: no region's rules and no autocast."""
    with ExitStack() as stack:
        for device in autocasting():
            stack.enter_context(rules_off(device))
        stack.enter_context(DisableTorchFunction())
        yield


def in_float64(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what `func` gives in float64 without casts, or None if it cannot; generators go on as if it had not."""
    try:
        with unruled(), torch.no_grad(), same_numbers(torch_states()):
            wide_args = map_tensors(list(args), _in_float64)
            wide_kwargs = {k: map_tensors(v, _in_float64) for k, v in kwargs.items() if k != "dtype"}
            wide_args = [torch.float64 if isinstance(a, torch.dtype) else a for a in wide_args]
            return func(*wide_args, **wide_kwargs)
    except Exception:  # no float64 kernel, or an argument that names a format
        return None


# ------------------------------------------------------------------ what the arguments of a bad call show

NORMALISING = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "cross_entropy"})
"""Operators that make NaN of a row that holds nothing but masks."""

REDUCING = frozenset("mean nanmean mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss median".split())
"""Operators without a value for no elements."""

NOTHING = "of no values"  # what is remarked on them then

SPREADING = frozenset({"std", "var", "std_mean", "var_mean", "cov", "corrcoef"})
"""Operators that divide by the number of elements less one."""

MASKED_OUT = "masked out entirely"
DIVIDING = frozenset({"div", "true_divide", "reciprocal", "rsqrt", "floor_divide", "remainder", "fmod"})
DOMAIN = DIVIDING | frozenset("log log2 log10 log1p sqrt acos asin atanh acosh logit digamma lgamma pow xlogy".split())
"""Operators whose last argument of values is outside their domain where they are not finite."""


def remark(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> str:
    """Return what the arguments of a call show; "" if nothing, or if they cannot be read."""
    try:
        return _remark(op, args, kwargs, outputs)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # other arguments than a plain call has
        return ""


def _remark(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> str:
    infinite = next((c for c in constants((*args, *kwargs.values())) if math.isinf(c)), None)
    if infinite is not None:
        return f"{op} with the constant {infinite}: 0 * inf and inf - inf are nan; use masked_fill or where"
    given = tensors((args, kwargs))
    first = given[0]
    if op in REDUCING and not first.numel():
        return f"{op} {NOTHING}: its input has the shape {list(first.shape)}"
    if op in SPREADING and (count := first.numel() // max(outputs[0].numel(), 1)) < 2:
        return f"{op} of {count} value{'' if count == 1 else 's'}: its input has the shape {list(first.shape)}"
    if op in {"cross_entropy", "nll_loss"} and len(given) > 1 and not given[1].is_floating_point():
        ignored = kwargs.get("ignore_index", -100)
        if bool((given[1] == ignored).all()):
            return f"all {given[1].numel()} labels are {ignored}, which {op} leaves out"
    if op == "ctc_loss":
        return _ctc(args, kwargs)
    if op in NORMALISING:
        return _rows(op, args, kwargs)
    if op in DOMAIN:
        bad = ~torch.isfinite(outputs[0].detach())
        read = remarked(op, args, kwargs)
        if not isinstance(read, Tensor):
            return f"{op} has a divisor of {read}"
        values = Tensor.detach(read).expand(bad.shape)[bad]
        values = values[torch.isfinite(values)]
        if values.numel():
            what = "a divisor" if op in DIVIDING else "an argument"
            return f"{op} has {what} of {float(values[0]):.6g}"
    return ""


def remarked(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument of an operator of `DOMAIN` that decides whether it has a value: a tensor or a number."""
    if op in DIVIDING - {"reciprocal", "rsqrt"}:
        return args[1] if len(args) > 1 else kwargs.get("other")
    return tensors((args, kwargs))[-1]


def _rows(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if op == "scaled_dot_product_attention":
        mask: Tensor = kwargs["attn_mask"] if "attn_mask" in kwargs else args[3]
        dim, values = -1, mask.logical_not() if mask.dtype is torch.bool else torch.isneginf(mask)
    else:
        values = torch.isneginf(args[0])
        dim = 1 if op == "cross_entropy" else kwargs.get("dim", args[1] if len(args) > 1 else -1)
    rows = values.all(dim)
    count, size = int(rows.sum()), rows.numel()
    if not count:
        return ""
    first = ", ".join(map(str, rows.nonzero()[0].tolist()))
    place = f", the first at [{first}]" if first else ""
    return f"{count} of {size} rows {'is' if count == 1 else 'are'} {MASKED_OUT}{place}"


def _ctc(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return which target needs more time steps than its input has; a label that repeats needs one more."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, lengths = (torch.as_tensor(named[name], device="cpu").flatten().tolist() for name in names[2:])
    targets = named["targets"]
    rows = list(targets) if targets.dim() > 1 else targets.split(lengths)
    for sample, (frames, letters, row) in enumerate(zip(inputs, lengths, rows, strict=True)):
        needed = letters + int((row[1:letters] == row[: letters - 1]).sum()) if letters else 0
        if needed > frames:
            return f"sample {sample} has {letters} labels, which need {needed} time steps, and has {frames}"
    return ""
