"""Stand-in of ExponentSketch, replaced at the merge."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import Format, format_of

LOW, HIGH = -160, 140


class ExponentSketch:
    def __init__(self) -> None:
        self.bins = torch.zeros(HIGH - LOW, dtype=torch.int64)
        self.count = self.zeros = self.infs = self.nans = self.negatives = 0
        self.largest = 0.0
        self.smallest = math.inf

    @classmethod
    def of(cls, tensor: Tensor) -> ExponentSketch:
        made = cls()
        x = tensor.detach().float().flatten()
        made.count = x.numel()
        finite = torch.isfinite(x)
        made.nans = int(x.isnan().sum())
        made.infs = int(x.isinf().sum())
        made.negatives = int((x < 0).sum())
        x = x[finite].abs()
        made.zeros = int((x == 0).sum())
        x = x[x > 0]
        if x.numel():
            made.largest, made.smallest = float(x.max()), float(x.min())
            made.bins = torch.bincount(torch.frexp(x).exponent.long() - 1 - LOW, minlength=HIGH - LOW)
        return made

    def merge_(self, other: ExponentSketch) -> ExponentSketch:
        self.bins = self.bins + other.bins
        for name in ("count", "zeros", "infs", "nans", "negatives"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest, self.smallest = max(self.largest, other.largest), min(self.smallest, other.smallest)
        return self

    def _below(self, limit: float) -> tuple[float, float]:
        if not self.count or limit <= 0:
            return 0.0, 0.0
        e = math.frexp(limit)[1] - 1 - LOW
        e = min(max(e, 0), HIGH - LOW)
        low = int(self.bins[:e].sum())
        cut = 0 if math.frexp(limit)[0] == 0.5 or e >= HIGH - LOW else int(self.bins[e])
        return low / self.count, (low + cut) / self.count

    def underflow(self, format: str | Format, scale: float = 1.0) -> tuple[float, float]:
        return self._below(format_of(format).smallest_subnormal / 2 / scale)

    def subnormal(self, format: str | Format, scale: float = 1.0) -> tuple[float, float]:
        form = format_of(format)
        a, b = self.underflow(form, scale)
        c, d = self._below(form.smallest_normal / scale)
        return max(0.0, c - b), d - a

    def overflow(self, format: str | Format, scale: float = 1.0) -> tuple[float, float]:
        low, high = self._below(format_of(format).max / scale)
        finite = int(self.bins.sum()) / max(self.count, 1)
        return max(0.0, finite - high), max(0.0, finite - low)

    def headroom(self, format: str | Format, scale: float = 1.0) -> float:
        return math.log2(format_of(format).max / (self.largest * scale)) if self.largest else math.inf

    def best_scale(self, format: str | Format) -> float:
        return 2.0 ** math.floor(self.headroom(format)) if self.largest else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"bins": self.bins.tolist()}
