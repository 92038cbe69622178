"""Schemas: what a file must hold, declared as a table, and checked before anything of it is used.

A table is made of Python's own literals; `check` raises an error that names the path of the first mistake:

    MANIFEST = {"step": whole(), "files": Each(text(), {"bytes": whole(), "sha256": text("[0-9a-f]{64}")}), "run?": str}

    a dict           a mapping with these keys and no others; ``"key?"`` may be absent, ``...: kind`` allows other keys
    Each(key, kind)  a mapping of any size
    [a, b]           a list or tuple of two; ``[a, ...]``: of any length
    (a, b)           one of several
    a class          an instance of it; a bool is no int, an int is a float
    a Kind           what its test accepts: `whole`, `number`, `text`
    None, Any        None; anything
"""

import json
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from halfstep.arguments import Kind, shown
from halfstep.errors import HalfstepError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

DEEPEST = 100  # levels of containers
NOTHING = "nothing was loaded"


@dataclass(frozen=True, slots=True)
class Each:
    """A mapping of any size: the schemas of its keys and of its values."""

    key: Any
    value: Any


def text(pattern: str = "(?s:.*)", words: str = "text") -> Kind:
    """Return the kind of text that matches all of `pattern`."""
    return Kind(words, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def check(value: object, schema: Any, path: str, error: type[HalfstepError], remedy: str = NOTHING) -> None:
    """Check `value` against `schema`."""
    if problem := _problem(value, schema, path):
        raise error(f"{problem}; {remedy}")


def _problem(value: Any, schema: Any, path: str) -> str:
    """Return the first mistake in words; "" for none."""
    if isinstance(schema, tuple):
        problems = [_problem(value, one, path) for one in schema]
        vague = {_wrong(value, one, path) for one in schema}
        inside = [problem for problem in problems if problem not in vague]  # it is a container like that
        return "" if "" in problems else (inside or [_wrong(value, schema, path)])[0]
    parts: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(schema, Each):
        fits = isinstance(value, Mapping)
        if fits:
            parts = chain.from_iterable(
                ((key, schema.key, f"{path}: the key {shown(key)}"), (item, schema.value, _under(path, key)))
                for key, item in value.items()
            )
    elif isinstance(schema, dict):
        fits = isinstance(value, Mapping)
        if fits:
            if odd := _odd_keys(value, schema):
                return f"{path}: {odd}"
            kinds = {_name(key): kind for key, kind in schema.items()}
            parts = ((item, kinds[key if key in kinds else ...], _under(path, key)) for key, item in value.items())
    elif isinstance(schema, list):
        length = None if ... in schema else len(schema)
        fits = isinstance(value, (list, tuple)) and length in {None, len(value)}
        if fits:
            kinds_of = schema if length is not None else repeat(schema[0])
            parts = ((item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds_of, strict=False)))
    elif isinstance(schema, Kind):
        fits = schema.has(value)
    elif schema is Any or schema is None:
        fits = schema is Any or value is None
    else:
        fits = isinstance(value, (int, float) if schema is float else schema)
        fits = fits and (schema is bool or not isinstance(value, bool))
    if not fits:
        return _wrong(value, schema, path)
    return next(filter(None, (_problem(*part) for part in parts)), "")


def _under(path: str, key: object) -> str:
    """Return the path of an item: PATH.key, or PATH['another key']."""
    name = isinstance(key, str) and key.isidentifier()
    return f"{path}{'.' if path else ''}{key}" if name else f"{path}[{shown(key)}]"


def _odd_keys(value: Mapping[Any, Any], schema: Mapping[Any, Any]) -> str:
    known = {_name(key): None for key in schema}
    missing = [key for key in schema if key is not ... and key == _name(key) and key not in value]
    unknown = [] if ... in schema else [key for key in value if key not in known]
    words = [f"{shown(missing[0])} is missing"] if missing else []
    words += [f"{shown(unknown[0])} is unknown{did_you_mean(str(unknown[0]), map(str, known))}"] if unknown else []
    return " and ".join(words)


def _name(key: Any) -> Any:
    return key.removesuffix("?") if isinstance(key, str) else key


def _wrong(value: Any, schema: Any, path: str) -> str:
    got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else shown(value)
    return f"{path}: {got}, expected {_words(schema)}"


def _words(schema: Any) -> str:
    if isinstance(schema, Kind):
        return schema.words
    if isinstance(schema, tuple):
        return " or ".join(dict.fromkeys(map(_words, schema)))
    if isinstance(schema, (dict, Each)):
        return "a dict"
    if isinstance(schema, list):
        return "a list" + ("" if ... in schema else f" of {len(schema)}")
    return {str: "text", bool: "True or False", int: "a whole number", float: "a number"}.get(
        schema, f"a {schema.__name__}" if isinstance(schema, type) else repr(schema)
    )


def is_bounded(tree: object, most: int) -> bool:
    """Return whether a walk over `tree` ends: a file can name one list twice in each of 60 others."""
    level, count = [tree], 0
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, (Mapping, list, tuple, set, frozenset)):
                inner += [*one, *one.values()] if isinstance(one, Mapping) else one
                if count + len(inner) > most:
                    return False
        if not inner:
            return True
        level, count = inner, count + len(inner)
    return False


# ---------------------------------------------------------------------- files


def regular(path: Path, error: type[HalfstepError], most: int = 1 << 62, *, links: bool = False) -> int:
    """Return the size in bytes of a file that is about to be read; `links`: also of one that a link leads to."""
    try:
        found = path.stat() if links else path.lstat()
    except (OSError, ValueError) as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    if not stat.S_ISREG(found.st_mode):
        kind = next((words for test, words in SPECIAL if test(found.st_mode)), "a pipe or a device")
        raise error(f"{path} is {kind}, and only a plain file is read; {NOTHING}")
    if found.st_size > most:
        raise error(f"{path} has {found.st_size} bytes, and at most {most} are expected; {NOTHING}")
    return found.st_size


SPECIAL: Sequence[tuple[Callable[[int], bool], str]] = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"))


def read_json(path: Path, error: type[HalfstepError], schema: Any, most: int) -> Any:
    """Return the content of a JSON file of at most `most` bytes that fits `schema`."""
    regular(path, error, most)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} is damaged, or no JSON ({type(cause).__name__}: {cause}); {NOTHING}") from cause
    check(found, schema, str(path), error)
    return found


def packaged_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file of halfstep; `path` begins below the package's folder."""
    return tomllib.loads(files("halfstep").joinpath(path).read_text(encoding="utf-8"))
