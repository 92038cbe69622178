"""Text: policies as TOML, without loss. Reader and writer walk `dataclasses.fields`; no field is named here.

The form: one key a field, ``ops`` and ``modules`` as arrays of ``["pattern", "rule"]`` in order, a `ScaleRule` as a
table ``[scale]``. In a file every key may be left out; ``preset = "O2"`` starts from a preset instead of the defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from halfstep.errors import PolicyError, ScaleError, did_you_mean
from halfstep.policy.policy import Policy
from halfstep.policy.scale_rule import ScaleRule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["policy_from_toml", "policy_to_toml"]

BASE = "preset"
"""The one key that is not a field: the preset to start from."""


def policy_to_toml(policy: Policy) -> str:
    """Return `policy` as TOML, every field with its value, tables last (as TOML needs it)."""
    values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    tables = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    lines = [f"{name} = {_written(value)}" for name, value in values.items() if name not in tables]
    for name, value in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{f.name} = {_written(getattr(value, f.name))}" for f in dataclasses.fields(value)]
    return "\n".join(lines) + "\n"


def policy_from_toml(text: str) -> Policy:
    """Return the policy written in `text`.

    Raises:
        PolicyError: not TOML, an unknown key (the message names the nearest) or an impossible value.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"a policy's TOML does not parse: {error}") from error
    base = Policy.of(values.pop(BASE)) if BASE in values else Policy()
    fields = [f.name for f in dataclasses.fields(Policy)]
    _check_keys("a policy", values, [*fields, BASE])
    if isinstance(values.get("scale"), dict):
        values["scale"] = _scale_rule(values["scale"])
    return base.replace(**values)


def _scale_rule(values: Mapping[str, Any]) -> ScaleRule:
    _check_keys("[scale]", values, [f.name for f in dataclasses.fields(ScaleRule)])
    try:
        return ScaleRule(**values)
    except ScaleError as error:
        raise PolicyError(f"[scale] of a policy: {error}") from error


def _check_keys(where: str, values: Iterable[str], known: list[str]) -> None:
    for key in values:
        if key not in known:
            raise PolicyError(f"unknown key {key!r} in {where}; it has {', '.join(known)}{did_you_mean(key, known)}")


def _written(value: object) -> str:
    """Return a plain value as TOML; pairs one a line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (int, float)):  # finite; repr is the shortest text that reads back the same
        return repr(value)
    if isinstance(value, tuple):
        if not value:
            return "[]"
        if all(isinstance(item, str) for item in value):
            return f"[{', '.join(_quoted(item) for item in value)}]"
        return "[\n" + "".join(f"    {_written(item)},\n" for item in value) + "]"
    raise TypeError(f"a policy holds {value!r}, which has no TOML form")  # a new field of a new type


def _quoted(text: str) -> str:
    """Return `text` as a TOML basic string."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    out = []
    for char in text:
        if char in escapes:
            out.append(escapes[char])
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append(f"\\u{ord(char):04x}")
        else:
            out.append(char)
    return f'"{"".join(out)}"'
