"""Formats: which numbers a format has, how far apart they are, and how any number is rounded to them.

A format with `e` exponent and `m` mantissa bits has the numbers ``±k * 2**(E - m)`` with integer ``k < 2**(m + 1)`` and
``1 - bias <= E <= emax``, where ``bias = 2**(e - 1) - 1``. With infinities the highest exponent is theirs and
``emax = bias``; without them it holds numbers too, but for the largest pattern if that is nan. So fp8_e4m3 (OCP "E4M3",
torch.float8_e4m3fn) has nan and no inf, and the 4- and 6-bit formats of OCP Microscaling have neither. A format without
subnormals has no number between 0 and ``2**(1 - bias)``.

Overflow: rounding is done as if exponents went on, and what then lies beyond `max` becomes inf; a format without inf
saturates instead, infinities too. So do torch's casts (fp8_e4m3 since torch 2.12, pytorch#178817; before, it became
nan). nan stays nan in every format.

Block formats (`BlockFormat`), those of OCP Microscaling (MX) and NVFP4, give numbers along one dimension a common
scale.

Any other format has a name: ``e3m4`` is 3 exponent and 4 mantissa bits with inf, nan and subnormals,
``e3m4-noinf-nonan-nosub`` is without. None is wider than fp32, which represents the values of all others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, overload

import torch
from torch import Tensor

from halfstep.errors import FormatError, did_you_mean

__all__ = [
    "BF16", "BLOCK_FORMATS", "DTYPES", "DTYPE_NAMES", "E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "FORMATS", "FP16", "FP32",
    "LOW_DTYPES", "POLICY_DTYPES", "TF32", "BlockFormat", "Format", "float64_of", "format_of", "widest_dtype",
]  # fmt: skip

EXPONENT_BITS = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}
"""dtype -> an integer dtype of as many bits, and those of the exponent (IEEE 754 binary32 and binary64)."""

EXACT_IN_FP32 = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: short name, e.g. "bf16".
        exponent_bits: bits of the exponent, 2 to 8.
        mantissa_bits: bits of the mantissa that are stored (the leading one is not), 0 to 23.
        torch_dtype: the dtype that stores it, or None: tf32 is what units make of fp32 inputs, others are simulated.
        has_inf: whether it has infinities; if not, overflow saturates.
        has_nan: whether it has nan.
        has_subnormals: whether it has numbers below `smallest_normal`; if not, these become that or zero.

    Raises:
        FormatError: more or fewer bits than that.

    Examples:
        >>> fp16 = hs.formats.FP16
        >>> fp16.max, fp16.smallest_subnormal, fp16.ulp(1000.0)
        (65504.0, 5.960464477539063e-08, 0.5)
        >>> fp16.round(torch.tensor([1 / 3, 70000.0]))
        tensor([0.3333,    inf])
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    torch_dtype: torch.dtype | None = None
    has_inf: bool = True
    has_nan: bool = True
    has_subnormals: bool = True

    def __post_init__(self) -> None:
        allowed = (("exponent", self.exponent_bits, 2, 8), ("mantissa", self.mantissa_bits, 0, 23))
        for what, bits, least, most in allowed:
            if not least <= bits <= most:
                raise FormatError(f"format {self.name!r}: {bits} {what} bits; expected {least} to {most}, as fp32 has")

    @property
    def bias(self) -> int:
        """What is subtracted from a stored exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def bits(self) -> int:
        """Bits of information in a number: sign, exponent, mantissa (19 for tf32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> int:
        """Bytes a number takes in memory (4 for tf32 and whatever else is stored as fp32)."""
        return 4 if self.torch_dtype is None else self.torch_dtype.itemsize

    @property
    def carrier(self) -> Format:
        """The format of an operator's result where this one is simulated: itself, or that which blocks give."""
        return self

    @property
    def is_narrow(self) -> bool:
        """Whether its range is smaller than fp32's, so that gradients reach below it unless they are scaled."""
        return self.exponent_bits < FP32.exponent_bits

    @property
    def max_exponent(self) -> int:
        """Exponent of `max`."""
        return self.bias + (not self.has_inf and (self.mantissa_bits > 0 or not self.has_nan))

    @property
    def max(self) -> float:
        """The largest finite number."""
        nan_on_top = self.has_nan and not self.has_inf and self.mantissa_bits > 0
        top = 2 ** (self.mantissa_bits + 1) - (2 if nan_on_top else 1)
        return math.ldexp(top, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with full precision."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number: `smallest_normal` in a format without subnormals."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits * self.has_subnormals)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number above it; a rounding errs by at most half of it, relatively."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @overload
    def ulp(self, x: float) -> float: ...
    @overload
    def ulp(self, x: Tensor) -> Tensor: ...
    def ulp(self, x: float | Tensor) -> float | Tensor:
        """Return the distance between neighbouring numbers of the format where `x` lies.

        It is that of the binade of `x` (above, at a power of two); near 0 that of subnormals, beyond `max` that of
        `max`. As for `math.ulp`, inf gives inf and nan nan.

        Args:
            x: a number, or a floating tensor of any shape.

        Returns:
            A float for a number; for a tensor one of the same shape, float64 for float64 and else float32.

        Raises:
            FormatError: `x` is a tensor that is not floating.
        """
        if isinstance(x, Tensor):
            wide = _wide(x, "ulp")
            spacing = torch.where(wide.isfinite(), self._spacing(wide), wide.abs())
            return spacing if x.dtype is torch.float64 else spacing.to(x.device, torch.float32)
        return float(self.ulp(torch.tensor(x, dtype=torch.float64, device="cpu")))

    def round(
        self,
        x: Tensor,
        *,
        mode: Literal["nearest", "stochastic"] = "nearest",
        generator: torch.Generator | None = None,
        saturate: bool = False,
    ) -> Tensor:
        """Round every element of `x` once, exactly, to a number of the format.

        "nearest" rounds ties to even and equals torch's cast (from float64, torch's goes through float32 and rounds
        twice; this does not). "stochastic" takes one of the two neighbours, the nearer the likelier: the mean is `x`
        (beyond `max` the upper neighbour overflows, so there it is not); numbers of the format stay. nan stays nan,
        the sign of zero stays.

        Args:
            x: floating tensor of any shape; not changed. On a device without float64 it is rounded on the CPU.
            mode: "nearest" or "stochastic".
            generator: source of random numbers for "stochastic", on the device of `x`; default torch's.
            saturate: numbers beyond `max`, infinities too, become `max` instead of overflowing (fp8_e4m3 always does).

        Returns:
            A new tensor of the shape and dtype of `x`, without gradient. It is exact if that dtype has the format's
            numbers, as float32 and float64 have.

        Raises:
            FormatError: `x` is not a floating tensor, or `mode` is unknown.
        """
        if mode not in (modes := ("nearest", "stochastic")):
            raise FormatError(f"rounding mode {mode!r}; expected one of {modes}{did_you_mean(mode, modes)}")
        wide = _wide(x, "round")
        if mode == "nearest" and x.dtype is torch.float32 and self.torch_dtype in LOW_DTYPES and not saturate:
            return x.detach().to(self.torch_dtype).float()
        if mode == "nearest" and self.is_narrow and x.dtype in EXACT_IN_FP32:
            wide = x.detach().float()
        spacing = self._spacing(wide)
        steps = wide / spacing  # exact: a power of two
        if mode == "nearest":
            steps = steps.round()  # ties to even
        else:
            below = steps.floor()
            chance = torch.rand(x.shape, generator=generator, dtype=widest_dtype(x.device), device=x.device)
            steps = below + (chance.to(wide.device) < steps - below)
        rounded = steps * spacing
        if saturate or not self.has_inf:
            rounded = rounded.clamp(-self.max, self.max)
        else:
            rounded = torch.where(rounded.abs() > self.max, math.inf, rounded)
        return rounded.copysign(wide).to(x)

    def _spacing(self, wide: Tensor) -> Tensor:
        """Return the distance between neighbours at each element, a power of two (anything where not finite)."""
        kind, exponent = EXPONENT_BITS[wide.dtype]
        power = (wide.view(kind) & exponent).view(wide.dtype)  # the largest power of two below; 0 for subnormals
        spacing = power.clamp(self.smallest_normal, math.ldexp(1.0, self.max_exponent)) * self.eps
        if self.has_subnormals:
            return spacing
        return spacing.where(wide.abs() >= self.smallest_normal, self.smallest_subnormal)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat(Format):
    """Numbers of `element`, of which `block` along one dimension share a scale; simulated, as no dtype holds it.

    Products of matrices take blocks along the dimension that they sum over, in the forward pass and in both of the
    backward pass, add up in fp32 and give bf16. Exponents are those of the scales: the range is fp32's.

    Note [scales]: of OCP Microscaling, "e8m0", a scale is the power of two that brings the largest exponent of a block
    to that of `element.max`, so the largest numbers may saturate. Of NVFP4, "fp8_e4m3", a scale is the largest number
    of the block over `element.max`, itself rounded, times an fp32 scale for the tensor. A block with inf or nan is nan.

    Attributes:
        element: the format of an element.
        block: how many elements share a scale; the last block of a dimension may have fewer.
        scale: "e8m0" or "fp8_e4m3".
        gradient: the format of gradients in products; None: this one.
        stochastic: whether gradients are rounded stochastically there.
        hadamard: whether both operands of a weight's gradient are multiplied by a 16 x 16 Hadamard matrix with random
            signs first, which spreads outliers and leaves the product as it is.

    Examples:
        >>> hs.formats.format_of("mxfp4").round(torch.tensor([0.1, 1.0, 3.2, 7.0]))
        tensor([0., 1., 3., 6.])
    """

    exponent_bits: int = 8
    has_inf: bool = False
    element: Format
    block: int
    scale: str
    gradient: BlockFormat | None = None
    stochastic: bool = False
    hadamard: bool = False

    @property
    def bits(self) -> float:  # type: ignore[override]
        """Bits of a number, with its share of the scale."""
        return self.element.bits + 8 / self.block

    @property
    def carrier(self) -> Format:
        """The format of what products give, and of all other operators."""
        return BF16

    def round(  # noqa: D102  # that of `Format`
        self,
        x: Tensor,
        *,
        mode: Literal["nearest", "stochastic"] = "nearest",
        generator: torch.Generator | None = None,
        saturate: bool = False,
        dim: int = -1,
    ) -> Tensor:
        wide = _wide(x, "round").float()
        rows = wide.reshape(1) if wide.dim() == 0 else wide.movedim(dim, -1)
        length = rows.shape[-1]
        blocks = torch.nn.functional.pad(rows, (0, -length % self.block)).unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1, keepdim=True)
        if self.scale == "e8m0":
            exponent = torch.frexp(largest).exponent - math.frexp(self.element.max)[1]
            scale = torch.exp2(exponent.masked_fill(largest == 0, 0).clamp(-126, 127).double()).float()
            steps = blocks / scale
        else:
            whole = (largest.amax() / (E4M3.max * self.element.max)).clamp(min=torch.finfo(torch.float32).tiny)
            scale = E4M3.round((largest / self.element.max / whole).clamp(E4M3.smallest_normal, E4M3.max))
            steps, scale = blocks * (1.0 / whole / scale), scale * whole
        rounded = self.element.round(steps, mode=mode, generator=generator, saturate=True) * scale
        made = torch.where(largest.isfinite(), rounded, math.nan).flatten(-2)[..., :length]
        return (made.reshape(()) if wide.dim() == 0 else made.movedim(-1, dim)).to(x)


def _wide(x: object, what: str) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise FormatError(f"Format.{what} takes a floating tensor and got {got}; convert it first, e.g. x.float()")
    return float64_of(x.detach())


WITHOUT_FLOAT64: Mapping[str, Callable[[torch.device], bool]] = MappingProxyType(
    {"mps": lambda device: True, "xpu": lambda device: not torch.xpu.get_device_properties(device).has_fp64}
)
"""Device types of which some devices have no float64 -> whether a device has none."""


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that lacks it: mps, and some of xpu.

    Examples:
        >>> hs.formats.widest_dtype(torch.device("cpu"))
        torch.float64
    """
    lacks = WITHOUT_FLOAT64.get(device.type)
    return torch.float32 if lacks is not None and lacks(device) else torch.float64


def float64_of(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Return `tensor` in float64, on the CPU if its device lacks that; `copy`: never the tensor itself.

    Examples:
        >>> hs.formats.float64_of(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float64
    """
    if not isinstance(tensor, Tensor) or not isinstance(copy, bool):
        raise FormatError(f"float64_of takes a tensor, and copy=True or False, and got {tensor!r} and copy={copy!r}")
    place = tensor.device if widest_dtype(tensor.device) is torch.float64 else "cpu"
    return tensor.to(place, torch.float64, copy=copy)


FP32 = Format(name="fp32", exponent_bits=8, mantissa_bits=23, torch_dtype=torch.float32)
TF32 = Format(name="tf32", exponent_bits=8, mantissa_bits=10, torch_dtype=None)
BF16 = Format(name="bf16", exponent_bits=8, mantissa_bits=7, torch_dtype=torch.bfloat16)
FP16 = Format(name="fp16", exponent_bits=5, mantissa_bits=10, torch_dtype=torch.float16)
E4M3 = Format(name="fp8_e4m3", exponent_bits=4, mantissa_bits=3, torch_dtype=torch.float8_e4m3fn, has_inf=False)
E5M2 = Format(name="fp8_e5m2", exponent_bits=5, mantissa_bits=2, torch_dtype=torch.float8_e5m2)
# OCP Microscaling Formats (MX) v1.0, section 5.3; their bits have no torch dtype of one element
E3M2 = Format(name="fp6_e3m2", exponent_bits=3, mantissa_bits=2, has_inf=False, has_nan=False)
E2M3 = Format(name="fp6_e2m3", exponent_bits=2, mantissa_bits=3, has_inf=False, has_nan=False)
E2M1 = Format(name="fp4_e2m1", exponent_bits=2, mantissa_bits=1, has_inf=False, has_nan=False)


# MX: OCP Microscaling Formats v1.0, sections 5.2 and 6.3; NVFP4: "Pretraining LLMs with NVFP4" (arXiv 2509.25149)
BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        name: BlockFormat(name=name, mantissa_bits=element.mantissa_bits, element=element, block=block, scale=scale)
        for name, element, block, scale in (
            ("mxfp8_e4m3", E4M3, 32, "e8m0"),
            ("mxfp8_e5m2", E5M2, 32, "e8m0"),
            ("mxfp6_e3m2", E3M2, 32, "e8m0"),
            ("mxfp6_e2m3", E2M3, 32, "e8m0"),
            ("mxfp4", E2M1, 32, "e8m0"),
            ("nvfp4", E2M1, 16, "fp8_e4m3"),
        )
    }
)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {f.name: f for f in (FP32, TF32, BF16, FP16, E4M3, E5M2, E3M2, E2M3, E2M1)}
)

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""The formats that a policy stores tensors in, by name."""

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
"""Their names, by dtype."""

POLICY_DTYPES = frozenset(DTYPE_NAMES)
"""The dtypes whose tensors a policy may cast: never float64, complex, integer or bool."""

LOW_DTYPES = POLICY_DTYPES - {torch.float32}
"""The dtypes of 16 bits: bfloat16 and float16."""

RECIPE = re.compile(r"(\w+?)(?:/(\w+?))?(-stochastic)?(-hadamard)?")
EXMY = re.compile(r"e([0-9]{1,2})m([0-9]{1,2})(-noinf)?(-nonan)?(-nosub)?")


def format_of(what: str | torch.dtype | Format) -> Format:
    """Return the format with a name ("bf16"), that a torch dtype stores (torch.bfloat16) or that ``eXmY`` describes.

    Args:
        what: one of `FORMATS` or `BLOCK_FORMATS`, a torch dtype, or ``eXmY`` with X exponent and Y mantissa bits,
            followed by any of ``-noinf``, ``-nonan``, ``-nosub`` in this order. Note that ``e4m3`` has infinities and
            "fp8_e4m3" has none.
            A block format may be followed by that of its gradients, ``-stochastic`` and ``-hadamard`` (`BlockFormat`).

    Raises:
        FormatError: there is none; the message names the nearest.

    Examples:
        >>> hs.formats.format_of("e3m4").max
        15.5
        >>> hs.formats.format_of(torch.bfloat16).name
        'bf16'
    """
    if isinstance(what, Format):
        return what
    for known in (*FORMATS.values(), *BLOCK_FORMATS.values()):
        if (isinstance(what, str) and what == known.name) or (what is not None and what is known.torch_dtype):
            return known
    if isinstance(what, str) and (match := EXMY.fullmatch(what)):
        exponent, mantissa, noinf, nonan, nosub = match.groups()
        return Format(
            name=what,
            exponent_bits=int(exponent),
            mantissa_bits=int(mantissa),
            has_inf=not noinf,
            has_nan=not nonan,
            has_subnormals=not nosub,
        )
    if isinstance(what, str) and (match := RECIPE.fullmatch(what)):
        forward, gradient, stochastic, hadamard = match.groups()
        if BLOCK_FORMATS.keys() >= {forward, gradient or forward}:
            return replace(
                BLOCK_FORMATS[forward],
                name=what,
                gradient=BLOCK_FORMATS.get(gradient),
                stochastic=bool(stochastic),
                hadamard=bool(hadamard),
            )
    hint = did_you_mean(what, (*FORMATS, *BLOCK_FORMATS)) if isinstance(what, str) else ""
    raise FormatError(
        f"unknown number format {what!r}; expected one of {', '.join(FORMATS)}, their torch dtype, or eXmY as in "
        f"'e3m4' (with -noinf, -nonan, -nosub behind it), or a block format with that of its gradients, as in "
        f"'mxfp8_e4m3/mxfp8_e5m2' (with -stochastic, -hadamard behind it){hint}"
    )
