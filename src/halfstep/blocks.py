"""Block formats: low numbers that share a scale, a power of two for every block of neighbours.

OCP Microscaling Formats (MX) Specification v1.0: blocks of 32 elements, one scale in e8m0 (a bare exponent, from
2**-127 to 2**127, or nan), and elements in a format of 4, 6 or 8 bits. Scales and elements are plain tensors of values
here: what the format can say, not how hardware packs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from halfstep.errors import FormatError, did_you_mean
from halfstep.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format

__all__ = ["BLOCK_FORMATS", "BlockFormat", "block_format_of"]

SCALE_EXPONENT = 127  # e8m0 holds 2**-127 to 2**127
TINY = 2.0**-1000  # stands for zero where a logarithm is taken; below every scale


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """Elements of a low format in blocks that share a power of two.

    Attributes:
        name: short name, e.g. "mxfp8_e4m3".
        element: format of an element.
        block: elements that share a scale.
    """

    name: str
    element: Format
    block: int = 32

    @property
    def bits(self) -> float:
        """Bits a number takes, its share of the scale's 8 included."""
        return self.element.bits + 8 / self.block

    def scales(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the scale of every block of `x` along `dim`.

        The scale is the power of two that brings the block's largest magnitude to the element's highest exponent
        (MX v1.0 section 6.3), within e8m0; a block with nan or inf has nan, a block of zeros 2**-127.

        Args:
            x: floating tensor of at least one dimension; the last block along `dim` may be short.
            dim: the dimension blocks lie along.

        Returns:
            float32, the shape of `x` with ``ceil(size / block)`` in place of the size of `dim`.

        Raises:
            FormatError: `x` is not floating or has no such dimension.
        """
        largest = self._blocks(x, dim).abs().amax(-1)
        exponent = (torch.frexp(largest.clamp(min=TINY)).exponent - 1 - self.element.max_exponent).double()
        scale = torch.exp2(exponent.clamp(-SCALE_EXPONENT, SCALE_EXPONENT))
        return scale.masked_fill(~largest.isfinite(), math.nan).movedim(-1, dim).float()

    def quantize(self, x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
        """Return (elements, scales) of `x`: ``elements * scales`` is what the format makes of it.

        Args:
            x: as `scales` takes it.
            dim: the dimension blocks lie along.

        Returns:
            Elements, of the shape and dtype of `x`: numbers of `element`, rounded to nearest, saturating; and `scales`.

        Raises:
            FormatError: as `scales`.
        """
        scales = self.scales(x, dim)
        spread = self._spread(scales, x, dim)
        return self.element.round(x.double() / spread, saturate=True).to(x.dtype), scales

    def round(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return `x` as the format holds it, in its own shape and dtype, without gradient.

        A block that holds nan or inf becomes nan.

        Raises:
            FormatError: as `scales`.
        """
        elements, scales = self.quantize(x, dim)
        return (elements.double() * self._spread(scales, x, dim)).to(x.dtype)

    def _blocks(self, x: Tensor, dim: int) -> Tensor:
        """Return `x` as float64 with `dim` last and cut into blocks: (..., blocks, block), padded with zeros."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise FormatError(f"{self.name} takes a floating tensor and got {got}; convert it first, e.g. x.float()")
        if not -x.dim() <= dim < x.dim():
            raise FormatError(
                f"{self.name}: dim={dim} of a tensor of shape {tuple(x.shape)}; blocks lie along one of it"
            )
        last = x.detach().double().movedim(dim, -1)
        whole = torch.nn.functional.pad(last, (0, -last.shape[-1] % self.block))
        return whole.reshape(*whole.shape[:-1], whole.shape[-1] // self.block, self.block)

    def _spread(self, scales: Tensor, x: Tensor, dim: int) -> Tensor:
        """Return every element's scale, float64, in the shape of `x`."""
        return scales.double().repeat_interleave(self.block, dim).narrow(dim, 0, x.shape[dim])


BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        name: BlockFormat(name=name, element=element)
        for name, element in (
            ("mxfp8_e4m3", E4M3),
            ("mxfp8_e5m2", E5M2),
            ("mxfp6_e3m2", E3M2),
            ("mxfp6_e2m3", E2M3),
            ("mxfp4_e2m1", E2M1),
        )
    }
)
"""The floating formats of MX v1.0, table 1."""


def block_format_of(name: str) -> BlockFormat:
    """Return the block format called `name`.

    Raises:
        FormatError: there is none; the message names the nearest.
    """
    if name in BLOCK_FORMATS:
        return BLOCK_FORMATS[name]
    hint = did_you_mean(name, BLOCK_FORMATS) if isinstance(name, str) else ""
    raise FormatError(f"unknown block format {name!r}; expected one of {', '.join(BLOCK_FORMATS)}{hint}")
