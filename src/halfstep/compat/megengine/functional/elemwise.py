"""megengine.functional.elemwise: operators on each element; tensors and numbers mix."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

abs, acos, asin, atan, ceil = torch.abs, torch.acos, torch.asin, torch.atan, torch.ceil
acosh, asinh, atanh, cos, cosh, sin, sinh, tan, tanh = (
    torch.acosh, torch.asinh, torch.atanh, torch.cos, torch.cosh, torch.sin, torch.sinh, torch.tan, torch.tanh,
)  # fmt: skip
erf, erfc, exp, expm1, floor, log, log1p = (
    torch.erf, torch.erfc, torch.exp, torch.expm1, torch.floor, torch.log, torch.log1p,
)  # fmt: skip
logical_not, neg, round, sign, sqrt, square = (
    torch.logical_not, torch.neg, torch.round, torch.sign, torch.sqrt, torch.square,
)  # fmt: skip
gelu, hsigmoid, hswish, logsigmoid, relu, relu6, sigmoid, silu, softplus = (
    F.gelu, F.hardsigmoid, F.hardswish, F.logsigmoid, F.relu, F.relu6, torch.sigmoid, F.silu, F.softplus,
)  # fmt: skip
isinf, isnan = torch.isinf, torch.isnan

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "clip", "cos", "cosh", "div",
    "equal", "erf", "erfc", "exp", "expm1", "floor", "floor_div", "gelu", "greater", "greater_equal", "hsigmoid",
    "hswish", "isinf", "isnan", "left_shift", "less", "less_equal", "log", "log1p", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsigmoid", "maximum", "minimum", "mod", "mul", "neg", "not_equal",
    "pow", "relu", "relu6", "right_shift", "round", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt",
    "square", "sub", "tan", "tanh",
]  # fmt: skip


def _of_two(function: Callable[..., Any]) -> Callable[[Any, Any], Tensor]:
    """Return `function` taking numbers in either place."""

    @wraps(function)
    def call(x: Any, y: Any) -> Tensor:
        if not isinstance(x, Tensor) and isinstance(y, Tensor):
            x = torch.as_tensor(x, device=y.device).to(torch.result_type(y, x))
        elif not isinstance(y, Tensor):
            x = torch.as_tensor(x)
            y = torch.as_tensor(y, device=x.device).to(torch.result_type(x, y))
        result: Tensor = function(x, y)
        return result

    return call


add = _of_two(torch.add)
sub = _of_two(torch.sub)
mul = _of_two(torch.mul)
div = _of_two(torch.div)
pow = _of_two(torch.pow)
mod = _of_two(torch.remainder)
floor_div = _of_two(torch.floor_divide)
atan2 = _of_two(torch.atan2)
logaddexp = _of_two(torch.logaddexp)
maximum = _of_two(torch.maximum)
minimum = _of_two(torch.minimum)
equal = _of_two(torch.eq)
not_equal = _of_two(torch.ne)
less = _of_two(torch.lt)
less_equal = _of_two(torch.le)
greater = _of_two(torch.gt)
greater_equal = _of_two(torch.ge)
logical_and = _of_two(torch.logical_and)
logical_or = _of_two(torch.logical_or)
logical_xor = _of_two(torch.logical_xor)
left_shift = _of_two(torch.bitwise_left_shift)
right_shift = _of_two(torch.bitwise_right_shift)


def clip(x: Tensor, lower: Any = None, upper: Any = None) -> Tensor:
    """Bring every element between `lower` and `upper`."""
    return torch.clamp(x, lower, upper)
