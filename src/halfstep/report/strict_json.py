"""Strict JSON: nan and infinity, which JSON lacks, are written as null."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["strict_json"]


def strict_json(value: Any) -> str:
    """Return a tree of dicts, lists, tuples and plain values as JSON text that ends with a newline."""
    return json.dumps(_plain(value), indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
