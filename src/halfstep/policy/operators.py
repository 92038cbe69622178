"""Operators: one name for all the ways PyTorch spells an operator, and the tables that give each its rule.

``softmax`` means F.softmax, torch.softmax, torch.special.softmax and Tensor.softmax alike; ``matmul`` also ``@``. Names
are the short public ones, with ``linalg.``, ``fft.`` and ``special.`` for three subpackages; synonyms fold into one.
An operator here computes new tensors from tensors: views, factories, conversions, in-place forms and queries are not
operators, so that a pattern such as ``*`` is safe in a policy. Which functions of torch and Tensor compute is read from
the operator schemas of the running torch; of torch.nn.functional all are.

Custom operators (`hs.operator`) are named "namespace::name", as in torch.library. A policy may name an operator that is
not registered yet: policies are read before code is imported. In ``Policy.ops`` a pattern for them is a name, the
beginning of a name with ``*`` behind it ("mylib::*"), or ``*`` for every operator.

A table is a TOML file of groups (operators that share rule, kind, reason and source) in ``tables/``:

* ``mixed``: halfstep's own, the same on every device and torch version;
* ``apex-o1``: the lists of Apex's opt level O1, and what its users found missing;
* ``torch-cpu``, ``torch-cuda``: torch.autocast's lists of one torch version, as data (the region itself uses those of
  the running version);
* ``none`` has no rows, in ``all-low``, made from ``mixed``, every operator with a low kernel is low.
"""

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn import functional

from halfstep.arguments import check, one_of
from halfstep.errors import PolicyError, did_you_mean
from halfstep.schema import packaged_toml
from halfstep.torch_private.operators import grouped_mm, jit_get_all_schemas, nn_functions

PREFIXES = ("torch.nn.functional.", "nn.functional.", "F.", "torch.Tensor.", "Tensor.", "torch.")
SUBPACKAGES = ("linalg", "fft", "special")


@cache
def data(path: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    return packaged_toml(f"policy/{path}")


SYNONYMS: Mapping[str, str] = data("tables/synonyms.toml")["synonyms"]
"""Other name -> the name."""

PRIVATE_HALVES = (
    (re.compile(r"_?upsample_\w+"), "interpolate"),
    (re.compile(r"(reflection|replication)_pad[123]d"), "pad"),
    (re.compile(r"(\w+_pool[123]d)_with_indices"), r"\1"),
)
"""What functions of torch.nn.functional call underneath, in torch._C._nn: the same operator seen from inside."""

DUNDERS: Mapping[str, str] = data("tables/synonyms.toml")["dunders"]
"""Methods behind Python's operators -> the operator."""

NOT_OPERATORS = re.compile(
    r"""(?!index_copy$).*_copy | .*_like | new_.* | to_.* | sparse_.* | unsafe_.* | atleast_.* | resize.* | empty_.*
    | (cudnn|miopen|mkldnn|fbgemm|quantized|quantize|q)_.* | batch_norm_.* | choose_qparams_.* | broadcast_tensors
    | meshgrid | linspace | logspace | clone | chalf | type_as | dequantize | int_repr | hash_tensor
    | assert_int_or_pair | boolean_dispatch | (has|handle)_torch_function.*""",
    re.VERBOSE,
)
"""Schemas of these look like an operator's, but they copy, create, convert, or are one vendor's kernel."""

ALSO_OPERATORS = frozenset({"equal", "lu", "view_as_complex"})
"""Operators without a schema that shows it; their arguments need one format all the same."""

LINEAR_LOSS = "linear_cross_entropy"
"""Known on every version of torch: halfstep has one where torch.nn.functional has none."""

REMOVED = ("cholesky", "qr")
"""Known on every version of torch: newer ones have removed them, and tables and policies still name them."""

Function = Callable[..., Any]


def _shorten(name: str) -> str:
    """Strip a written prefix, fold ``linalg_x`` into ``linalg.x`` and replace a synonym."""
    short = DUNDERS.get(name, name)
    for prefix in PREFIXES:
        if short.startswith(prefix) and len(short) > len(prefix):
            short = short.removeprefix(prefix)
            break
    short = DUNDERS.get(short, short)
    for package in SUBPACKAGES:
        if short.startswith(f"{package}_"):
            short = f"{package}.{short.removeprefix(f'{package}_')}"
    if short in SYNONYMS:
        return SYNONYMS[short]
    for pattern, public in PRIVATE_HALVES:
        if match := pattern.fullmatch(short):
            return match.expand(public)
    return short


def _computing() -> frozenset[str]:
    found = set()
    for schema in jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name == schema.name or name.endswith("_") or schema.overload_name.endswith("out"):
            continue
        results = [r for r in schema.returns if "Tensor" in str(r.type)]
        if not results or any(r.alias_info is not None for r in results):
            continue
        if any("Tensor" in str(a.type) for a in schema.arguments):
            found.add(name)
    return frozenset(found)


def _spellings() -> Iterator[tuple[str, Function]]:
    """Yield (name, function) for every operator as it is spelled somewhere in torch; private halves last."""
    plain = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
    computing = _computing() | ALSO_OPERATORS
    packages = ((f"{p}.", getattr(torch, p)) for p in SUBPACKAGES)
    for prefix, space in (("", functional), ("", torch), ("", torch.functional), *packages, ("", torch.Tensor)):
        for name in dir(space):
            if name.startswith("_") or name.endswith("_") or NOT_OPERATORS.fullmatch(name):
                continue
            function = getattr(space, name)
            listed = space is functional or (prefix + name).replace(".", "_") in computing
            if listed and isinstance(function, plain):
                yield prefix + name, function
    if grouped_mm is not None:  # functional.grouped_mm does not report itself to modes
        yield "grouped_mm", grouped_mm
    for method, name in DUNDERS.items():
        function = getattr(torch.Tensor, method, None)
        if function is not None:
            yield name, function
    for name in dir(nn_functions):
        if not name.startswith("_") and not name.endswith("_") and not NOT_OPERATORS.fullmatch(name):
            yield name, getattr(nn_functions, name)


@lru_cache(maxsize=1)
def _index() -> tuple[Mapping[str, tuple[Function, ...]], Mapping[Function, str]]:
    """Return (name -> functions, function -> name)."""
    functions: dict[str, dict[Function, None]] = {name: {} for name in (LINEAR_LOSS, *REMOVED)}
    names: dict[Function, str] = {}
    for spelling, function in _spellings():
        name = _shorten(spelling)
        package, _, rest = name.rpartition(".")
        if package == "special" and rest in functions:  # special.log1p is log1p
            name = rest
        private = getattr(function, "__module__", "") == "torch._C._nn" and not hasattr(functional, spelling)
        if private and name not in functions:
            continue  # an internal kernel that nothing public is named after
        functions.setdefault(name, {})[function] = None
        names.setdefault(function, name)
    return {name: tuple(found) for name, found in functions.items()}, names


@lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """Return the names of all operators of the running torch."""
    return frozenset(_index()[0])


def callables(name: str) -> tuple[Function, ...]:
    """Return every function object that a TorchFunctionMode may receive for the operator `name`."""
    return _index()[0][canonical(name)]


SPELLED: dict[Function, str] = {}
"""Functions that are not torch's -> the operator that they are a spelling of; see `spell`."""


def operator_name(function: Function) -> str | None:
    """Return the operator that `function` is a spelling of, or None.

    Examples:
        >>> hs.policy.operator_name(torch.Tensor.softmax)
        'softmax'
    """
    try:
        return _index()[1].get(function) or SPELLED.get(function)
    except TypeError:  # unhashable
        return None


def spell(function: Function, op: str) -> None:
    """Let `function`, which is not torch's, be a spelling of the operator `op` for the instruments."""
    SPELLED[function] = op


@cache
def canonical(name: str) -> str:
    """Return the one name of an operator: "F.softmax", "torch.softmax", "Tensor.softmax" -> "softmax"."""
    short = _shorten(name)
    if short not in known() and short.startswith("special."):
        short = short.removeprefix("special.")
    if short in known():
        return short
    hint = did_you_mean(short, known() | SYNONYMS.keys())
    if short.endswith("_") and short.rstrip("_") in known():
        hint = f"; in-place forms are never cast, the operator is {short.rstrip('_')!r}"
    raise PolicyError(f"unknown operator {name!r}; name it as you call it, e.g. 'softmax' or 'linalg.inv'{hint}")


def operator_names(pattern: str) -> tuple[str, ...]:
    """Return the operators that a name or an fnmatch pattern ("conv*", "linalg.*") stands for, sorted.

    Raises:
        PolicyError: it stands for none.

    Examples:
        >>> hs.policy.operator_names("conv_transpose*")
        ('conv_transpose1d', 'conv_transpose2d', 'conv_transpose3d')
    """
    if not isinstance(pattern, str):
        raise PolicyError(f"an operator, or a pattern of operators, is a text and not {pattern!r}")
    return _operator_names(pattern)


@cache
def _operator_names(pattern: str) -> tuple[str, ...]:
    if not any(c in pattern for c in "*?["):
        return (canonical(pattern),)
    short = _shorten(pattern)
    found = tuple(sorted(filter(re.compile(translate(short)).match, known())))
    if not found:
        stem = re.split(r"[*?\[]", short)[0]
        raise PolicyError(f"operator pattern {pattern!r} matches no operator{did_you_mean(stem, known())}")
    return found


# ------------------------------------------------------------------ tables

TABLES = ("none", "torch", "apex-o1", "mixed", "all-low")
NO_LOW_KERNEL = "no low kernel"
"""In the kind of rows that are fp32 because torch has no kernel for low formats on some device."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of a table, by the name that `canonical` gives it."""

    op: str
    rule: str
    kind: str  # what it is ("gemm", "loss", "reduction", ...); in the ``torch`` tables torch's category
    reason: str
    source: str  # where the reason is stated


@cache
def table(name: str, device_type: str = "cpu") -> Mapping[str, OperatorRow]:
    """Return the table `name` of `TABLES`, operator -> row.

    The device matters only for ``torch``, whose CPU lists differ from its CUDA lists; other accelerators' lists are
    CUDA's but for vendor kernels.
    """
    check("operator table", PolicyError, name=(name, one_of(*TABLES)))
    if name == "none":
        return types.MappingProxyType({})
    if name == "all-low":
        return types.MappingProxyType({op: _lowered(row) for op, row in table("mixed").items()})
    if name == "torch":
        return _read("torch-cpu" if device_type == "cpu" else "torch-cuda")
    return _read(name)


@lru_cache(maxsize=1)
def losses() -> frozenset[str]:
    """Return the operators that are loss functions: those that a policy's field `loss` applies to."""
    return frozenset(row.op for row in table("mixed").values() if row.kind.startswith("loss"))


def _lowered(row: OperatorRow) -> OperatorRow:
    if NO_LOW_KERNEL in row.kind or row.rule == "low":
        return row
    return replace(row, rule="low", reason=f"everything with a low kernel is low (mixed: {row.rule}, {row.reason})")


@cache
def _read(file: str) -> Mapping[str, OperatorRow]:
    rows: dict[str, OperatorRow] = {}
    for group in data(f"tables/{file}.toml")["group"]:
        shared = {key: value for key, value in group.items() if key != "ops"}
        rows |= {op: OperatorRow(op=op, **shared) for op in group["ops"]}
    return types.MappingProxyType(rows)


# ------------------------------------------------------------------ custom operators

MARK = "::"


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomOperator:
    """A registered operator."""

    name: str  # "namespace::name"
    rule: str  # where the policy has none for it
    backward: str  # the rule of what its backward pass calls, "" for the formats they come in
    where: str  # the file and line, or the library, it comes from


_registered: dict[str, CustomOperator] = {}


def is_custom(pattern: str) -> bool:
    """Return whether `pattern` stands for custom operators only."""
    return MARK in pattern


def check_custom_pattern(pattern: str) -> None:
    """Raise PolicyError unless `pattern` is a name or ends in its only wildcard, ``*``."""
    if any(c in pattern[:-1] for c in "*?[") or pattern[-1] in "?[":
        raise PolicyError(f"operator pattern {pattern!r}: for custom operators only a last * is a wildcard")


def register(operator: CustomOperator) -> None:
    """Register `operator`; the same one may be registered again, as when its module is reloaded."""
    earlier = _registered.get(operator.name)
    if earlier is not None and earlier.where.rpartition(":")[0] != operator.where.rpartition(":")[0]:
        raise PolicyError(
            f"custom operator {operator.name!r} from {operator.where} is already registered from {earlier.where}; "
            "give one of them another name: hs.operator(rule, name='namespace::name')"
        )
    _registered[operator.name] = operator


def custom_operators() -> tuple[CustomOperator, ...]:
    """Return all registered operators, sorted by name."""
    return tuple(_registered[name] for name in sorted(_registered))


def custom_overrides(ops: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return those pairs of a policy's ``ops`` that can match a custom operator."""
    return tuple(pair for pair in ops if is_custom(pair[0]) or pair[0] == "*")


def custom_rule(ops: tuple[tuple[str, str], ...], name: str, default: str) -> str:
    """Return the rule of the operator `name` under ``ops``; the last match wins. Dynamo traces this function."""
    rule = default
    for pattern, wanted in ops:
        if name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern:
            rule = wanted
    return rule
