"""Policy: in which number format every operator, module, parameter, gradient and loss lives, as one frozen value.

As text a policy is TOML, without loss: one key a field, ``ops`` and ``modules`` as arrays of ``["pattern", "rule"]`` in
order, a `ScaleRule` as a table ``[scale]``. Every key may be left out; ``preset = "O2"`` starts from a preset instead
of the defaults. Reader and writer walk `dataclasses.fields`, so a new field needs no code there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from halfstep.arguments import TEXT, Kind, check, number, one_of
from halfstep.errors import FormatError, PolicyError, ScaleError, UnbuiltError, did_you_mean
from halfstep.formats import BLOCK_FORMATS, DTYPES, FORMATS, FP32, format_of
from halfstep.policy.engines import ENGINES, EngineConfig, configured
from halfstep.policy.explain import diff, explain
from halfstep.policy.operators import check_custom_pattern, data, is_custom, operator_names
from halfstep.policy.rule_kinds import MODULE_RULES, RULES, Rules, for_every_kind
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule
from halfstep.schema import regular, tomllib

UNBUILT = "cannot run yet: products in fp8 are missing; the nearest that runs is preset 'O2', and dtype='fp8_e4m3' \
simulates the numbers"
"""Of the preset and the operator rule "fp8", which policy files may name."""

BASE = "preset"
"""The one TOML key that is not a field: the preset to start from."""

OTHER_NAMES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
"""Formats as torch calls them."""

MOST_BYTES = 1 << 20  # of a file
MOST_VALUES = 100_000  # keys and values; a rule is three
MOST_TEXT = 1000  # characters of a key or value
MOST_DEPTH = 8  # of arrays and tables, and parts of a key with dots; ops = [["pattern", "rule"]] is 3 deep
MOST_OPS = 2000  # rules for operators: torch has 700 operators

EXAMPLES = {"ops": "('softmax', 'fp32')", "modules": "('class:LayerNorm', 'fp32') or ('head', 'fp32')"}


SCALES = one_of("auto", "none", *SCALE_RULES) | Kind(
    "a positive number in fp32, or a ScaleRule",
    lambda value: isinstance(value, ScaleRule) or number(FP32.smallest_subnormal, FP32.max).has(value),
)

OPERATORS = Kind(
    "a list of operators", lambda names: isinstance(names, Iterable) and not isinstance(names, (bytes, Mapping))
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Policy:
    """What is wanted: plain data, hashable, and ``eval(repr(policy)) == policy``.

    Values "auto" are resolved for a device when the policy is bound (`halfstep.resolve` shows how). In the text, *low*
    is the low format, `dtype`.

    Attributes:
        name: what reports call it.
        dtype: the low format: auto, bf16, fp16 or fp32 (nothing is lowered), or any other format by name, which is
            simulated: "fp8_e4m3", "tf32", "e3m4", ... (`halfstep.formats`). auto: bf16 where the device has units for
            it, else fp16 on accelerators; a CPU without bf16 units stays fp32, with a note.
        params: format of the model's parameters. low: an optimizer steps precise values kept beside them (`master`).
        norms: under ``params="low"``, format of the parameters of normalisation layers (classes ``*Norm*``). Those
            beside fp32 running statistics (BatchNorm) stay fp32: kernels want both alike, and would cast at each call.
        master: where precise weights are kept when parameters are low. master: an fp32 copy. split (bf16 only): the
            other 16 bits of the fp32 value. kahan: a low compensation. stochastic: nowhere, but steps round by chance,
            right on average. none: nowhere. auto: split where `TrainStep` updates bf16 weights in one pass, else
            master.
        grads: format the gradients of low parameters accumulate in: the parameter's, or fp32. A bf16 sum of 64
            micro-batches is 0.8% wrong, an fp32 sum 0.07%.
        table: rules of operators: torch.autocast's, Apex O1's, halfstep's `mixed`, everything low, or none.
        ops: (operator or fnmatch pattern, rule) on top of `table`; the last match wins.
        modules: (pattern, rule) for modules and all below: a pattern is matched against dotted names (``*`` crosses
            dots, "" is the root) or, as ``class:GLOB``, against class names; the last match wins.
        residual: format of the residual stream. low: embeddings give low, and an addition keeps the format of its
            first operand.
        inputs: whether floating inputs of the model are cast to low.
        outputs: whether floating outputs of the model are cast to fp32.
        loss: whether loss functions run in fp32 even where `table` has no rule for them.
        reduce: format `TrainStep` sums gradients in over the processes of DistributedDataParallel: their own, fp32 or
            low.
        state: format of the optimizer's state. low: bf16, rounded stochastically.
        scale: loss scale. auto: the rule "halfstep" if the low format has fewer exponent bits than fp32, as fp16 has,
            else none. A number is a static scale, a name one of `SCALE_RULES`.
        emulate: whether fp16 operators are emulated in fp32 arithmetic. auto: on devices without fp16 units. A format
            that no dtype stores is always simulated.

    Raises:
        PolicyError: a value is not one of those above, an operator does not exist, or a pattern matches no operator;
            the message names the nearest.
        UnbuiltError: an operator has the rule "fp8", which this version cannot carry out.

    Examples:
        >>> policy = hs.Policy.of("mixed", dtype="bf16").with_ops(fp32=["softmax"]).with_modules({"head": "fp32"})
        >>> policy == hs.Policy.from_toml(policy.to_toml())
        True
        >>> print(policy.diff("mixed"))
        dtype: 'bf16' -> 'auto'
        ops: (('softmax', 'fp32'),) -> ()
        modules: (('head', 'fp32'),) -> ()
        fp32 -> keep: softmax
    """

    name: str = ""
    dtype: str = "auto"
    params: Literal["fp32", "low"] = "fp32"
    norms: Literal["fp32", "low"] = "fp32"
    master: Literal["auto", "none", "master", "split", "kahan", "stochastic"] = "auto"
    grads: Literal["param", "fp32"] = "param"
    table: Literal["none", "torch", "apex-o1", "mixed", "all-low"] = "mixed"
    ops: Rules = ()
    modules: Rules = ()
    residual: Literal["fp32", "low"] = "fp32"
    inputs: Literal["keep", "low"] = "keep"
    outputs: Literal["keep", "fp32"] = "keep"
    loss: Literal["fp32", "keep"] = "fp32"
    reduce: Literal["grad", "fp32", "low"] = "grad"
    state: Literal["fp32", "low"] = "fp32"
    scale: str | float | ScaleRule = "auto"
    emulate: Literal["auto", "never", "always"] = "auto"

    def __post_init__(self) -> None:
        """Normalise sequences to tuples and operator names to their short ones; refuse what makes no sense."""
        given = ((name, getattr(self, name), kind) for name, kind in _kinds().items())
        odd = {name: (v, kind) for name, v, kind in given if not isinstance(v, str) or v not in kind.options}
        if odd or not isinstance(self.name, str):
            check("policy", PolicyError, name=(self.name, TEXT), **odd)  # a scale may be a number
        _check_dtype(self.dtype)
        object.__setattr__(self, "ops", _pairs("ops", self.ops, RULES))
        object.__setattr__(self, "modules", _pairs("modules", self.modules, MODULE_RULES))
        if not isinstance(self.scale, (str, ScaleRule)):
            object.__setattr__(self, "scale", float(self.scale))

    @classmethod
    def of(cls, spec: Policy | str | Path, /, **overrides: Any) -> Policy:
        """Return the policy meant by `spec`, with some fields replaced.

        Args:
            spec: the name of a preset, the path of a TOML file (a Path, or a string ending in ".toml"), or a Policy.
            **overrides: fields and their values.

        Raises:
            PolicyError: unknown preset, unreadable file, unknown field or value; the message names the nearest.
        """
        if isinstance(spec, cls):
            base = spec
        elif isinstance(spec, Path) or (isinstance(spec, str) and spec.endswith(".toml")):
            try:
                regular(Path(spec), PolicyError, MOST_BYTES, links=True)
                text = Path(spec).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:  # which PolicyError and UnicodeDecodeError are
                raise PolicyError(f"cannot read the policy file {str(spec)!r}: {error}") from error
            base = cls.from_toml(text)
        elif isinstance(spec, str):
            base = _preset(spec)
        else:
            raise PolicyError(f"a policy is a preset's name, a path or a Policy, not {type(spec).__name__} {spec!r}")
        return base.replace(**overrides) if overrides else base

    def replace(self, **fields: Any) -> Policy:
        """Return this policy with some fields replaced.

        Raises:
            PolicyError: unknown field or value; the message names the nearest.
        """
        _check_keys("a policy has no field {!r}", fields, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **fields)

    def with_ops(
        self,
        *,
        low: Iterable[str] = (),
        fp32: Iterable[str] = (),
        keep: Iterable[str] = (),
        widest: Iterable[str] = (),
        banned: Iterable[str] = (),
    ) -> Policy:
        """Return this policy with rules for operators appended, so that they win over those already there.

        Args:
            low: operators, or fnmatch patterns, to compute in the low format.
            fp32: ... in fp32.
            keep: ... in the format of their first activation.
            widest: ... in fp32 if any argument is fp32.
            banned: ... to refuse with low arguments.

        Raises:
            PolicyError: unknown operator, or a pattern that matches none.
        """
        lists = {"low": low, "fp32": fp32, "keep": keep, "widest": widest, "banned": banned}
        for rule, names in lists.items():
            if isinstance(names, str):
                raise PolicyError(f"with_ops({rule}={names!r}) takes a list of operators: {rule}=[{names!r}]")
            check("with_ops", PolicyError, **{rule: (names, OPERATORS)})
        added = tuple((name, rule) for rule, names in lists.items() for name in names)
        return self.replace(ops=(*self.ops, *added))

    def with_modules(self, rules: Mapping[str, str]) -> Policy:
        """Return this policy with rules for modules appended, so that they win over those already there.

        Args:
            rules: pattern -> "low", "fp32", "keep" or "mixed" (fp32 parameters, each operator by its own rule), e.g.
                ``{"decoder.*.norm": "fp32", "class:LayerNorm": "keep", "*lora_*": "mixed"}``.

        Raises:
            PolicyError: unknown rule.
        """
        if not isinstance(rules, Mapping):
            raise PolicyError(f"with_modules({rules!r}) takes a dict of pattern -> rule, such as {{'head': 'fp32'}}")
        return self.replace(modules=(*self.modules, *rules.items()))

    def diff(self, other: Policy | str | Path) -> str:
        """Return what differs from `other`, one line a field or operator: ``what: mine -> other's``; "" if nothing."""
        return diff(self, Policy.of(other))

    def explain(self, what: str) -> str:
        """Return, readably, which rule decides for an operator, a module path or a ``class:`` pattern, and why.

        Raises:
            PolicyError: neither an operator nor a path.
        """
        return explain(self, what)

    def to_deepspeed(self, *, accept: Iterable[str] = ()) -> EngineConfig:
        """Return DeepSpeed's precision sections; a field that is lost there and not in `accept` raises PolicyError."""
        return configured(ENGINES["deepspeed"], self, accept)

    def to_megatron(self, *, accept: Iterable[str] = ()) -> EngineConfig:
        """Return Megatron-LM's mixed-precision arguments, likewise."""
        return configured(ENGINES["megatron"], self, accept)

    def to_torchtitan(self, *, accept: Iterable[str] = ()) -> EngineConfig:
        """Return the precision keys of torchtitan's section ``training``, likewise."""
        return configured(ENGINES["torchtitan"], self, accept)

    @classmethod
    def from_toml(cls, text: str) -> Policy:
        """Return the policy written in `text`; a key ``preset`` names one to start from.

        Raises:
            PolicyError: not TOML, more of it than a policy has, an unknown key (the message names the nearest) or an
                impossible value.
        """
        if not isinstance(text, str):
            raise PolicyError(f"Policy.from_toml takes the text of a policy, not {text!r}")
        values = _parsed(text)
        base = cls()
        if BASE in values:
            if not isinstance(name := values.pop(BASE), str):
                raise PolicyError(f"{BASE} = {name!r} in a policy's TOML; it is a preset's name, such as \"O2\"")
            base = _preset(name)
        _check_keys("unknown key {!r} in a policy", values, [*(f.name for f in dataclasses.fields(cls)), BASE])
        if isinstance(values.get("scale"), dict):
            values["scale"] = _scale_rule(values["scale"])
        return base.replace(**values)

    def to_toml(self) -> str:
        """Return this policy as TOML, every field with its value; `from_toml` reads it back without loss."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tables = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
        lines = [f"{name} = {_toml(value)}" for name, value in values.items() if name not in tables]
        for name, value in tables.items():  # TOML wants tables last
            lines += ["", f"[{name}]"]
            lines += [f"{f.name} = {_toml(getattr(value, f.name))}" for f in dataclasses.fields(value)]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        """Return the constructor call with the fields that are not the default."""
        shown = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"Policy({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


for_every_kind("Policy.with_ops", Policy.with_ops.__kwdefaults__ or {})


@lru_cache(maxsize=1)
def _kinds() -> Mapping[str, Kind]:
    """Return what fields may be that are neither a format nor rules."""
    hints = get_type_hints(Policy)
    words = {name: one_of(*get_args(hint)) for name, hint in hints.items() if get_origin(hint) is Literal}
    return {**words, "scale": SCALES}


def _check_dtype(dtype: object) -> None:
    if isinstance(dtype, str) and (dtype == "auto" or dtype in DTYPES):
        return
    try:
        if not isinstance(dtype, str):
            raise FormatError("not a name")
        format_of(dtype)
    except FormatError as error:
        options = ("auto", *sorted(DTYPES), *(name for name in (*FORMATS, *BLOCK_FORMATS) if name not in DTYPES))
        described = f" ({error})" if isinstance(dtype, str) and dtype.startswith("e") else ""
        known = OTHER_NAMES.get(str(dtype).removeprefix("torch."))
        hint = f"; did you mean {known!r}?" if known else did_you_mean(str(dtype), options)
        raise PolicyError(
            f"policy: dtype={dtype!r}; expected one of {', '.join(map(repr, options))}, or eXmY to simulate{described}"
            f"{hint}"
        ) from None


def _preset(name: str) -> Policy:
    if name in PRESETS:
        return PRESETS[name]
    if name == "fp8":
        raise UnbuiltError(f"preset 'fp8' {UNBUILT}")
    same = [preset for preset in PRESETS if preset.casefold() == name.casefold()]
    near = f"; did you mean {same[0]!r}?" if same else did_you_mean(name, PRESETS)
    if name == "auto":
        near = "; policy='auto' is measured by hs.TrainStep alone, and as a format it is a field, dtype='auto'"
    elif name in DTYPES or name in OTHER_NAMES:
        near = f"; a format is a field: Policy.of('mixed', dtype={OTHER_NAMES.get(name, name)!r})"
    raise PolicyError(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}, or a path ending in .toml{near}")


def _pairs(field: str, value: object, rules: tuple[str, ...]) -> Rules:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (list, tuple)):
        raise PolicyError(f"policy: {field}={value!r}; expected pairs of (pattern, rule)")
    if field == "ops" and len(value) > MOST_OPS:
        raise PolicyError(f"policy: ops has {len(value)} rules; at most {MOST_OPS} are read: write patterns (conv*)")
    pairs = []
    for pair in value:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise PolicyError(
                f"policy: {field} contains {pair!r}; expected a pair of strings (pattern, rule), such as "
                f"{EXAMPLES[field]}"
            )
        pattern, rule = pair
        if rule == "fp8" and field == "ops":
            raise UnbuiltError(f"policy: rule of {pattern!r} in ops='fp8' {UNBUILT}")
        if rule not in rules:
            check("policy", PolicyError, **{f"rule of {pattern!r} in {field}": (rule, one_of(*rules))})
        pairs.append((_operator(pattern) if field == "ops" else pattern, rule))
    return tuple(pairs)


def _operator(pattern: str) -> str:
    if is_custom(pattern):
        check_custom_pattern(pattern)
        return pattern
    matched = operator_names(pattern)
    return pattern if any(c in pattern for c in "*?[") else matched[0]


# ------------------------------------------------------------------ TOML

TEXTS = re.compile(
    r"""
    \"{3}(?:[^\\]|\\.)*?(?:\"{3}|\Z) | '{3}.*?(?:'{3}|\Z) | "(?:[^"\\\n]|\\.)*"? | '[^'\n]*'? | \#[^\n]*""",
    re.DOTALL | re.VERBOSE,
)
"""Strings and comments, between which dots make keys deeper."""


def _parsed(text: str) -> dict[str, Any]:
    """Return the values in a policy's TOML, of bounded number, size and depth: the parser has no bounds of its own."""
    if len(text) > MOST_BYTES:
        raise PolicyError(f"a policy's TOML has {len(text)} characters; at most {MOST_BYTES} are read")
    text = text.removeprefix("\ufeff")  # the byte order mark that some editors write
    deep = f"a policy's TOML is deeper than {MOST_DEPTH} tables, arrays or parts of a key; a policy needs 3"
    if any(line.count(".") > 2 * MOST_DEPTH for line in TEXTS.sub("", text).splitlines()):
        raise PolicyError(deep)  # the parser needs the square of a key's parts
    try:
        text.encode()  # halves of characters (surrogates) are in no file
        values = tomllib.loads(text)
    except ValueError as error:  # also of an integer with thousands of digits
        raise PolicyError(f"a policy's TOML does not parse: {error}") from error
    except RecursionError:
        raise PolicyError(deep) from None
    count = 0
    level: list[Any] = [values]
    for _ in range(MOST_DEPTH):
        items = [item for one in level for item in (one if isinstance(one, list) else [*one, *one.values()])]
        if (count := count + len(items)) > MOST_VALUES:
            raise PolicyError(f"a policy's TOML has more than {MOST_VALUES} keys and values; write patterns (conv*)")
        for item in items:
            if isinstance(item, str) and len(item) > MOST_TEXT:
                raise PolicyError(f"a policy's TOML has a text of {len(item)} characters; at most {MOST_TEXT} are read")
            if isinstance(item, int) and abs(item) >= 1 << 63:
                raise PolicyError("a policy's TOML has an integer beyond 64 bits, which TOML does not have")
        level = [item for item in items if isinstance(item, (list, dict))]
    if level:
        raise PolicyError(deep)
    return values


def _scale_rule(values: Mapping[str, Any]) -> ScaleRule:
    _check_keys("unknown key {!r} in [scale]", values, [f.name for f in dataclasses.fields(ScaleRule)])
    try:
        return ScaleRule(**values)
    except ScaleError as error:
        raise PolicyError(f"[scale] of a policy: {error}") from error


def _check_keys(words: str, values: Iterable[str], known: list[str]) -> None:
    for key in values:
        if key not in known:
            raise PolicyError(f"{words.format(key)}; it has {', '.join(known)}{did_you_mean(key, known)}")


def _toml(value: object) -> str:
    """Return a plain value as TOML, which writes strings and numbers as JSON does; pairs one a line."""
    if isinstance(value, tuple) and any(isinstance(item, tuple) for item in value):
        return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML forbids in a string


PRESETS: Mapping[str, Policy] = MappingProxyType(
    {name: Policy(name=name, **fields) for name, fields in data("tables/presets.toml").items()}
)
"""Name -> the policy of a preset."""
