"""ExponentSketch: how large the numbers of a tensor are, in a few hundred bytes.

A sketch counts the binary exponents of a tensor's elements. From it follows what any format at any scale would make
of the tensor, without the tensor: what rounds to zero, what becomes subnormal, what overflows. Counts are exact, and
sketches can be added: over steps, ranks and tensors.

Note [bounds]: a scale moves numbers, a format rounds them to its nearest, ties to even, and then ``|x| <= t`` or
``|x| < t`` decides, for a threshold t. A sketch counts how many elements lie below the bin that t cuts, and how many
below its end: these are the bounds. If t is a power of two it lies at the edge of a bin, and since powers of two are
counted apart it is known also what lies exactly there: both bounds are the truth. So it is for rounding to zero at a
scale that is a power of two, in every format: half of the smallest number rounds to zero, and what is above it does
not. Overflow and the upper end of subnormals lie inside a bin (65520 for fp16, between 2**15 and 2**16). The largest
and the smallest magnitude, which are known exactly, make bounds tighter; at the ends of the data they are the truth.

Note [product]: thresholds apply to the exact product of number and scale, rounded once. So does a scale that is a
power of two, unless the product leaves the format it is computed in.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from halfstep.arguments import NOT_NEGATIVE, POSITIVE, WHOLE, Kind, a, check
from halfstep.errors import FormatError
from halfstep.formats import BlockFormat, Format, format_of
from halfstep.kernels.choose import count_exponents_
from halfstep.kernels.reference import exponents as layout


def packed(counts: Mapping[int, int]) -> str:
    """Return the first exponent, and compressed the counts from there to the last that is not zero."""
    if not counts:
        return ""
    listed = " ".join(str(counts.get(exponent, 0)) for exponent in range(min(counts), max(counts) + 1))
    return f"{min(counts)} {base64.b85encode(zlib.compress(listed.encode())).decode()}"


def unpacked(text: str) -> dict[int, int]:
    """Return the counts that `packed` has written; ValueError if it has not, or if the text is cut off."""
    first, _, coded = text.partition(" ")
    try:
        listed = zlib.decompress(base64.b85decode(coded)).split() if text else []
    except zlib.error as error:
        raise ValueError(f"no table of counts: {error}") from error
    return {exponent: int(count) for exponent, count in enumerate(listed, int(first or 0)) if int(count)}


TWO = Fraction(2)
COUNTED = ("zeros", "infs", "nans", "negatives")  # in the order of a row of `layout`

Bounds = tuple[float, float]
AnyFormat = Format | str | torch.dtype


INFINITY = Kind("inf", lambda value: isinstance(value, float) and value == math.inf)


@dataclass(kw_only=True, slots=True)
class ExponentSketch:
    """Counts of the binary exponents of numbers; ``a + b`` counts both.

    Shares are of the finite numbers that are not zero, and 0 where there are none.

    Attributes:
        exponents: exponent e -> finite numbers with ``2**e <= |x| < 2**(e + 1)``, subnormals by their true exponent;
            the outermost, -192 and 191, count what lies beyond them too (only float64 has such numbers).
        powers: exponent -> how many of these are powers of two.
        zeros: numbers that are 0 or -0.
        infs: infinities.
        nans: numbers that are nan.
        negatives: numbers below zero, -inf among them.
        largest: largest finite magnitude, exactly; 0.0 if there is none but zero.
        smallest: smallest magnitude but zero, exactly; inf if there is none.

    Examples:
        >>> sketch = hs.ExponentSketch.of(torch.tensor([1.0, 3.0, 2.0**-30, 0.0]))
        >>> sketch.underflow("fp16")  # the share that fp16 rounds to zero, between these bounds
        (0.3333333333333333, 0.3333333333333333)
        >>> sketch.best_scale("fp16")
        64.0
    """

    exponents: dict[int, int] = field(default_factory=dict)
    powers: dict[int, int] = field(default_factory=dict)
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    negatives: int = 0
    largest: float = 0.0
    smallest: float = math.inf

    def __post_init__(self) -> None:
        counts = {name: (getattr(self, name), WHOLE) for name in COUNTED}
        bars = {name: (getattr(self, name), a(dict)) for name in ("exponents", "powers")}
        ends = {"largest": (self.largest, NOT_NEGATIVE), "smallest": (self.smallest, NOT_NEGATIVE | INFINITY)}
        check("ExponentSketch", FormatError, **bars, **counts, **ends)

    @classmethod
    def of(cls, tensor: Tensor) -> ExponentSketch:
        """Return the sketch of a tensor in one pass over it; waits for its device. `Sketches` does not.

        Args:
            tensor: floating (fp8 too) or complex, of which real and imaginary parts count; any shape, also empty.

        Raises:
            FormatError: it is a tensor of integers, one without numbers (on meta), or none.
        """
        if not isinstance(tensor, Tensor):
            raise FormatError(f"ExponentSketch.of takes a tensor and got {type(tensor).__name__}")
        if tensor.is_meta:
            raise FormatError("a tensor on meta has a shape and no numbers; sketch it where its numbers are")
        return Sketches.of(tensor).read()[0]

    @classmethod
    def from_rows(cls, rows: Tensor) -> list[ExponentSketch]:
        """Return the sketches of rows of counts (`kernels.reference.exponents`), (n, ROW) on the host.

        Of the some 800 places of a row 50 are not zero.
        """
        found = rows.nonzero()
        entries: list[dict[int, int]] = [{} for _ in range(len(rows))]
        for (row, place), count in zip(found.tolist(), rows[found[:, 0], found[:, 1]].tolist(), strict=True):
            entries[row][place] = count
        sketches, first, powers = [], layout.LOWEST, layout.POWERS
        for counts in entries:
            values: dict[str, Any] = {name: counts.pop(place, 0) for place, name in enumerate(COUNTED, layout.ZEROS)}
            values["largest"] = number_of(counts.pop(layout.LARGEST, 0))
            values["smallest"] = number_of(layout.TOP - counts.pop(layout.SMALLEST, 0))
            values["exponents"] = {place + first: count for place, count in counts.items() if place < powers}
            values["powers"] = {place - powers + first: count for place, count in counts.items() if place >= powers}
            sketches.append(cls(**values))
        return sketches

    def merge_(self, other: ExponentSketch) -> ExponentSketch:
        """Count the numbers of `other` too; return self.

        Raises:
            FormatError: `other` is no sketch.
        """
        if not isinstance(other, ExponentSketch):
            raise FormatError(
                f"merge_ takes an ExponentSketch and got {type(other).__name__}; ExponentSketch.of makes one"
            )
        for mine, more in ((self.exponents, other.exponents), (self.powers, other.powers)):
            for exponent, count in list(more.items()):
                mine[exponent] = mine.get(exponent, 0) + count
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        self.smallest = min(self.smallest, other.smallest)
        return self

    def __add__(self, other: ExponentSketch) -> ExponentSketch:
        """Return the sketch of the numbers of both."""
        if not isinstance(other, ExponentSketch):
            return NotImplemented
        return ExponentSketch().merge_(self).merge_(other)

    @property
    def count(self) -> int:
        """Numbers seen; a complex number is two."""
        return self.nonzero + self.zeros + self.infs + self.nans

    @property
    def nonzero(self) -> int:
        """Finite numbers that are not zero: what shares are shares of."""
        return sum(self.exponents.values())

    def bars(self) -> tuple[list[int], list[float]]:
        """Return the counts from the first to the last exponent, and their edges as log2: ``numpy.histogram``'s form.

        Both are empty if there is no number but zero.
        """
        if not self.exponents:
            return [], []
        first, last = min(self.exponents), max(self.exponents)
        counts = [self.exponents.get(e, 0) for e in range(first, last + 1)]
        return counts, [float(e) for e in range(first, last + 2)]

    def underflow(self, format: AnyFormat, scale: float = 1.0) -> Bounds:
        """Return the (least, largest possible) share that rounds to zero in `format` when multiplied by `scale`.

        Both are the same if `scale` is a power of two. Of a block format the least is 0: it is not known which numbers
        share a block.

        Raises:
            FormatError: no such format, or a scale that is not positive and finite.
        """
        return self._share(self._zeroed(*self._placed(format, scale)), format)

    def subnormal(self, format: AnyFormat, scale: float = 1.0) -> Bounds:
        """Return the (least, largest possible) share that rounds to a subnormal number of `format`, not to zero.

        Raises:
            FormatError: as `underflow`.
        """
        return self._share(self._lowered(*self._placed(format, scale)), format)

    def overflow(self, format: AnyFormat, scale: float = 1.0) -> Bounds:
        """Return the (least, largest possible) share beyond `format`: what becomes inf, or saturates where none is.

        Raises:
            FormatError: as `underflow`.
        """
        return self._share(self._beyond(*self._placed(format, scale)), format)

    def headroom(self, format: AnyFormat, scale: float = 1.0) -> float:
        """Return how many bits the largest number lies below the largest of `format`; negative beyond it.

        A scale 2**k takes k bits of it. inf if there is no number but zero.

        Raises:
            FormatError: as `underflow`.
        """
        format, factor = self._placed(format, scale)
        return math.log2(format.max) - math.log2(self.largest) - math.log2(factor) if self.largest else math.inf

    def best_scale(self, format: AnyFormat) -> float:
        """Return the best power of two to multiply these numbers with before they are rounded to `format`.

        That is: nothing overflows; of these scales those under which the fewest numbers round to zero; of these those
        that may make the fewest subnormal; of these the nearest to 1. 1.0 if there is no number but zero.

        Raises:
            FormatError: no such format.
        """
        format = format_of(format)
        if not self.largest or isinstance(format, BlockFormat):
            return 1.0
        top, closed = _limit(format)
        most = _floor_log2(top / Fraction(self.largest))
        if closed and Fraction(self.largest) * TWO**most == top:
            most -= 1
        powers = range(min(most, 0), most + 1)  # the larger the scale, the fewer are lost: find the least as good
        wanted = self._lost(format, most)
        best = powers[bisect_left(powers, True, key=lambda power: self._lost(format, power) <= wanted)]
        return math.ldexp(1.0, max(min(best, 1023), -1074))

    def relative_error(self, format: AnyFormat, scale: float = 1.0) -> Bounds:
        """Return bounds on the mean of ``|rounded - x| / |x|`` over the finite numbers that are not zero.

        What rounds to zero errs by 1; what overflows by inf, or by how much of it is cut off where `format` saturates;
        every other number by at most what its exponent allows, and possibly by nothing.

        Raises:
            FormatError: as `underflow`.
        """
        lower = 0.0 if isinstance(format_of(format), BlockFormat) else 1.0
        format, factor = self._placed(format, scale)
        if not self.nonzero:
            return 0.0, 0.0
        lower *= self._zeroed(format, factor)[0]
        upper = 0.0
        beyond = self._beyond(format, factor)
        top, _ = _limit(format)
        for exponent, count in self.exponents.items():
            begin = Fraction(self.smallest) if exponent == layout.LOWEST else TWO**exponent
            upper += count * _worst(format, begin * factor)
        if beyond[0]:
            lower += beyond[0] * _cut(format, max(top, Fraction(self.smallest) * factor))
        if beyond[1]:
            upper += beyond[1] * _cut(format, Fraction(self.largest) * factor)
        return lower / self.nonzero, upper / self.nonzero

    def _zeroed(self, format: Format, scale: Fraction) -> tuple[int, int]:
        return self._below(Fraction(format.smallest_subnormal) / 2 / scale, closed=True)

    def _lowered(self, format: Format, scale: Fraction) -> tuple[int, int]:
        spacing, normal = Fraction(format.smallest_subnormal), Fraction(format.smallest_normal)
        if spacing == normal:
            return 0, 0
        least, most = self._zeroed(format, scale)
        below = self._below((normal - spacing / 2) / scale, closed=False)
        return max(0, below[0] - most), below[1] - least

    def _lost(self, format: Format, power: int) -> tuple[int, int]:
        """Return how many numbers round to zero at a scale of ``2**power``, and how many may become subnormal."""
        return self._zeroed(format, TWO**power)[1], self._lowered(format, TWO**power)[1]

    def _beyond(self, format: Format, scale: Fraction) -> tuple[int, int]:
        top, closed = _limit(format)
        least, most = self._below(top / scale, closed=not closed)
        return self.nonzero - most, self.nonzero - least

    def _below(self, limit: Fraction, *, closed: bool) -> tuple[int, int]:
        """Return bounds on how many magnitudes are less than `limit`, or up to it if `closed`."""
        total = self.nonzero
        if not total:
            return 0, 0

        def inside(value: float) -> bool:
            return Fraction(value) < limit or (closed and value == limit)

        if inside(self.largest):
            return total, total
        if not inside(self.smallest):
            return 0, 0
        cut = max(min(_floor_log2(limit), layout.HIGHEST), layout.LOWEST)
        below = sum(count for exponent, count in self.exponents.items() if exponent < cut)
        here, powers = self.exponents.get(cut, 0), self.powers.get(cut, 0)
        if layout.LOWEST < cut < layout.HIGHEST and limit == TWO**cut:
            return (below + powers,) * 2 if closed else (below,) * 2
        lower = max(below + powers, 1)  # the smallest is inside, the largest is not
        return lower, min(below + here, total - 1)

    def _share(self, counts: tuple[int, int], format: AnyFormat) -> Bounds:
        total = max(self.nonzero, 1)
        least = 0 if isinstance(format_of(format), BlockFormat) else counts[0]
        return least / total, counts[1] / total

    def _placed(self, format: AnyFormat, scale: float) -> tuple[Format, Fraction]:
        """Return what numbers are rounded to and multiplied with; of a block format as if all were in one block.

        Their own blocks have at most this scale, so what is lost then is the most that may be.
        """
        check("ExponentSketch", FormatError, scale=(scale, POSITIVE))
        form, factor = format_of(format), Fraction(float(scale))
        if not isinstance(form, BlockFormat) or not self.largest:
            return form, factor
        power = _floor_log2(Fraction(self.largest) * factor) - _floor_log2(Fraction(form.element.max))
        return form.element, factor / TWO**power

    def to_dict(self) -> dict[str, Any]:
        """Return the sketch as JSON's values; under 3 KB as JSON, some hundred bytes as a rule.

        Tables of counts are text: the first exponent, and the counts from there on, compressed (`from_dict` reads it).
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        tables = {name: packed(value) for name, value in values.items() if isinstance(value, dict)}
        return {name: None if value == math.inf else value for name, value in values.items()} | tables

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExponentSketch:
        """Return the sketch that `to_dict` has written.

        Raises:
            FormatError: these are not its values.
        """
        kinds = {f.name: str(f.type) for f in fields(cls)}
        try:
            if not isinstance(values, Mapping):
                raise TypeError(f"expected a mapping and got {type(values).__name__}")
            if odd := sorted(set(values) ^ set(kinds)):
                raise ValueError(f"{odd} missing or unknown; expected {[*kinds]}")
            return cls(**{name: _READ[kind](values[name]) for name, kind in kinds.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise FormatError(f"not the values of an ExponentSketch: {error}") from error

    def __str__(self) -> str:
        """Return one line."""
        if not self.count:
            return "no numbers"
        parts = [f"{self.count:,} numbers"]
        if self.nonzero:
            parts[0] += f", {self.smallest:.3g} to {self.largest:.3g}"
        parts += [f"{number:,} {name}" for name in COUNTED[:3] if (number := getattr(self, name))]
        return ", ".join(parts)


class Sketches:
    """Sketches that grow on a device, one for each of many tensors, without a wait until they are read.

    Args:
        count: how many.
        device: where the tensors will be.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        self.rows = layout.rows(count, device)

    @classmethod
    def of(cls, tensor: Tensor) -> Sketches:
        """Return the sketch of one tensor."""
        made = cls(1, tensor.device)
        made.add_([tensor])
        return made

    def add_(self, tensors: Iterable[Tensor], first: int = 0) -> None:
        """Count the n-th tensor's elements in the sketch ``first + n``; waits for nothing.

        Raises:
            FormatError: a tensor is of integers.
        """
        given = list(tensors)
        count_exponents_(self.rows[first : first + len(given)], given)

    def read(self) -> list[ExponentSketch]:
        """Return what was counted; waits for the device."""
        return ExponentSketch.from_rows(self.rows.cpu())


def _limit(format: Format) -> tuple[Fraction, bool]:
    """Return where overflow begins, halfway to the next number that would be, and whether that itself overflows."""
    spacing = Fraction(format.ulp(format.max))
    return Fraction(format.max) + spacing / 2, Fraction(format.max) / spacing % 2 == 1


def _worst(format: Format, begin: Fraction) -> float:
    """Return how much a number from `begin` to twice of it errs at most, relatively, but for overflow.

    A number of spacing s errs by s / 2 at most, worst next to the lower end: s / 2 over ``begin + s / 2``.
    """
    spacing = Fraction(format.smallest_subnormal)
    power = TWO ** _floor_log2(begin)
    if power < spacing:
        return 1.0
    half = (power * Fraction(format.eps) if power >= format.smallest_normal else spacing) / 2
    return float(half / (power + half))


def _cut(format: Format, value: Fraction) -> float:
    """Return how much of `value`, beyond `format`, overflow takes away, relatively."""
    return math.inf if format.has_inf else float((value - Fraction(format.max)) / value)


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if value >= TWO**guess else guess - 1


def number_of(bits: int) -> float:
    """Return the float64 number that has these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


_READ: Mapping[str, Callable[[Any], Any]] = {  # type of a field -> what makes its value of JSON's
    "dict[int, int]": unpacked,
    "int": int,
    "float": lambda value: math.inf if value is None else float(value),
}
