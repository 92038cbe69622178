"""Packed: a table of counts as short text, and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping

__all__ = ["packed", "unpacked"]


def packed(counts: Mapping[int, int]) -> str:
    """Return counts from the first to the last that is not zero, each as bytes of 7 bits, low ones first."""
    if not counts:
        return ""
    written = bytearray()
    for exponent in range(min(counts), max(counts) + 1):
        rest = counts.get(exponent, 0)
        while rest > 127:
            written.append(rest & 127 | 128)
            rest >>= 7
        written.append(rest)
    return f"{min(counts)} {base64.b85encode(bytes(written)).decode()}"


def unpacked(text: str) -> dict[int, int]:
    """Return the counts that `packed` has written.

    Raises:
        ValueError: it has not, or the text is cut off.
    """
    if not text:
        return {}
    first, _, coded = text.partition(" ")
    counts, exponent, value, shift = dict[int, int](), int(first), 0, 0
    for byte in base64.b85decode(coded):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            if value:
                counts[exponent] = value
            exponent, value, shift = exponent + 1, 0, 0
    if shift:
        raise ValueError("a table of counts is cut off")
    return counts
