"""megengine.functional.elemwise: operators on each element; tensors and numbers mix."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.compat.shared import public
from halfstep.errors import StepError

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "clip", "cos", "cosh", "div",
    "equal", "erf", "erfc", "exp", "expm1", "floor", "floor_div", "gelu", "greater", "greater_equal", "hsigmoid",
    "hswish", "isinf", "isnan", "left_shift", "less", "less_equal", "log", "log1p", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsigmoid", "maximum", "minimum", "mod", "mul", "neg", "not_equal",
    "pow", "relu", "relu6", "right_shift", "round", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt",
    "square", "sub", "tan", "tanh",
]  # fmt: skip


def _of_one(function: Callable[..., Any]) -> Callable[[Any], Tensor]:
    return public(function, lambda x: function(x))


abs, acos, asin, atan = _of_one(torch.abs), _of_one(torch.acos), _of_one(torch.asin), _of_one(torch.atan)
acosh, asinh, atanh = _of_one(torch.acosh), _of_one(torch.asinh), _of_one(torch.atanh)
cos, cosh, sin, sinh = _of_one(torch.cos), _of_one(torch.cosh), _of_one(torch.sin), _of_one(torch.sinh)
tan, tanh, ceil, floor = _of_one(torch.tan), _of_one(torch.tanh), _of_one(torch.ceil), _of_one(torch.floor)
erf, erfc, exp, expm1 = _of_one(torch.erf), _of_one(torch.erfc), _of_one(torch.exp), _of_one(torch.expm1)
log, log1p, neg, sign = _of_one(torch.log), _of_one(torch.log1p), _of_one(torch.neg), _of_one(torch.sign)
sqrt, square, logical_not = _of_one(torch.sqrt), _of_one(torch.square), _of_one(torch.logical_not)
isinf, isnan = _of_one(torch.isinf), _of_one(torch.isnan)
gelu, relu, relu6, sigmoid = _of_one(F.gelu), _of_one(F.relu), _of_one(F.relu6), _of_one(torch.sigmoid)
hsigmoid, hswish, silu = _of_one(F.hardsigmoid), _of_one(F.hardswish), _of_one(F.silu)
logsigmoid, softplus = _of_one(F.logsigmoid), _of_one(F.softplus)


def round(x: Tensor) -> Tensor:
    """Return the nearest whole numbers; halves go away from zero (torch.round: to the even neighbour)."""
    if not x.is_floating_point():
        return x
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.sign(x), whole)


def _of_two(function: Callable[..., Any]) -> Callable[[Any, Any], Tensor]:
    def call(x: Any, y: Any) -> Tensor:
        if not isinstance(x, Tensor) and isinstance(y, Tensor):
            x = torch.as_tensor(x, device=y.device).to(torch.result_type(y, x))
        elif not isinstance(y, Tensor):
            x = torch.as_tensor(x)
            y = torch.as_tensor(y, device=x.device).to(torch.result_type(x, y))
        return cast(Tensor, function(x, y))

    return public(function, call)


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    """Return what division leaves: with the sign of `x` for floats (C's fmod), of `y` for integers (Python's %)."""
    return torch.fmod(x, y) if x.is_floating_point() or y.is_floating_point() else torch.remainder(x, y)


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """Return the floor of the rounded quotient: 10 for 1.0 / 0.1, where torch.floor_divide gives 9."""
    floats = x.is_floating_point() or y.is_floating_point()
    return torch.floor(torch.div(x, y)) if floats else torch.floor_divide(x, y)


add, sub, mul, div = _of_two(torch.add), _of_two(torch.sub), _of_two(torch.mul), _of_two(torch.div)
pow, mod, floor_div = _of_two(torch.pow), _of_two(_remainder), _of_two(_quotient)
atan2, logaddexp = _of_two(torch.atan2), _of_two(torch.logaddexp)
maximum, minimum = _of_two(torch.maximum), _of_two(torch.minimum)
equal, not_equal = _of_two(torch.eq), _of_two(torch.ne)
less, less_equal, greater, greater_equal = _of_two(torch.lt), _of_two(torch.le), _of_two(torch.gt), _of_two(torch.ge)
logical_and, logical_or, logical_xor = _of_two(torch.logical_and), _of_two(torch.logical_or), _of_two(torch.logical_xor)
left_shift, right_shift = _of_two(torch.bitwise_left_shift), _of_two(torch.bitwise_right_shift)


def clip(x: Tensor, lower: Any = None, upper: Any = None) -> Tensor:
    """Bring every element between `lower` and `upper`."""
    if lower is None and upper is None:
        raise StepError("clip: neither lower nor upper is given; give one of them")
    return torch.clamp(x, lower, upper)
