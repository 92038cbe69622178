"""Remarks: what the arguments of an operator whose result is not finite show, in words of data.

Inputs: the operator's public name, its arguments, its results. Output: one clause, "" where there is nothing to remark.
It reads values, so it is called for the few operators only that a replay accuses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.lens.calls import constants
from halfstep.trees import tensors

__all__ = ["DIVIDING", "NORMALISING", "NOTHING", "REDUCING", "SPREADING", "remark", "remarked"]

NORMALISING = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "cross_entropy"})
"""Operators that make NaN of a row that holds nothing but masks."""

REDUCING = frozenset("mean nanmean mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss median".split())
"""Operators without a value for no elements."""

NOTHING = "of no values"
"""What is remarked on them then."""

SPREADING = frozenset({"std", "var", "std_mean", "var_mean", "cov", "corrcoef"})
"""Operators that divide by the number of elements less one."""

MASKED_OUT = "masked out entirely"
DIVIDING = frozenset({"div", "true_divide", "reciprocal", "rsqrt", "floor_divide", "remainder", "fmod"})
DOMAIN = DIVIDING | frozenset("log log2 log10 log1p sqrt acos asin atanh acosh logit digamma lgamma pow xlogy".split())
"""Operators whose last argument of values is outside their domain where they are not finite."""


def remark(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> str:
    """Return what the arguments of a call show; "" if nothing, or if they cannot be read."""
    try:
        return _remark(op, args, kwargs, outputs)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # other arguments than a plain call has
        return ""


def _remark(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> str:
    infinite = next((c for c in constants((*args, *kwargs.values())) if math.isinf(c)), None)
    if infinite is not None:
        return f"{op} with the constant {infinite}: 0 * inf and inf - inf are nan; use masked_fill or where"
    given = tensors((args, kwargs))
    first = given[0]
    if op in REDUCING and not first.numel():
        return f"{op} {NOTHING}: its input has the shape {list(first.shape)}"
    if op in SPREADING and (count := first.numel() // max(outputs[0].numel(), 1)) < 2:
        return f"{op} of {count} value{'' if count == 1 else 's'}: its input has the shape {list(first.shape)}"
    if op in {"cross_entropy", "nll_loss"} and len(given) > 1 and not given[1].is_floating_point():
        ignored = kwargs.get("ignore_index", -100)
        if bool((given[1] == ignored).all()):
            return f"all {given[1].numel()} labels are {ignored}, which {op} leaves out"
    if op == "ctc_loss":
        return _ctc(args, kwargs)
    if op in NORMALISING:
        return _rows(op, args, kwargs)
    if op in DOMAIN:
        bad = ~torch.isfinite(outputs[0].detach())
        read = remarked(op, args, kwargs)
        if not isinstance(read, Tensor):
            return f"{op} has a divisor of {read}"
        argument = read.detach()
        if argument.shape != bad.shape:
            argument = argument.expand(bad.shape)
        values = argument[bad]
        values = values[torch.isfinite(values)]
        if values.numel():
            what = "a divisor" if op in DIVIDING else "an argument"
            return f"{op} has {what} of {float(values[0]):.6g}"
    return ""


def remarked(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument of an operator of `DOMAIN` that decides whether it has a value: a tensor or a number."""
    if op in DIVIDING - {"reciprocal", "rsqrt"}:
        return args[1] if len(args) > 1 else kwargs.get("other")
    return tensors((args, kwargs))[-1]


def _rows(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how many rows hold nothing but -inf, and which is the first."""
    if op == "scaled_dot_product_attention":
        mask: Tensor = kwargs["attn_mask"] if "attn_mask" in kwargs else args[3]
        dim, values = -1, mask.logical_not() if mask.dtype is torch.bool else torch.isneginf(mask)
    else:
        values = torch.isneginf(args[0])
        dim = 1 if op == "cross_entropy" else kwargs.get("dim", args[1] if len(args) > 1 else -1)
    rows = values.all(dim)
    count, size = int(rows.sum()), rows.numel()
    if not count:
        return ""
    first = ", ".join(map(str, rows.nonzero()[0].tolist()))
    place = f", the first at [{first}]" if first else ""
    return f"{count} of {size} rows {'is' if count == 1 else 'are'} {MASKED_OUT}{place}"


def _ctc(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return which target needs more time steps than its input has; a label that repeats needs one more."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, lengths = (torch.as_tensor(named[name]).flatten().tolist() for name in names[2:])
    targets = named["targets"]
    rows = list(targets) if targets.dim() > 1 else targets.split(lengths)
    for sample, (frames, letters, row) in enumerate(zip(inputs, lengths, rows, strict=True)):
        needed = letters + int((row[1:letters] == row[: letters - 1]).sum()) if letters else 0
        if needed > frames:
            return f"sample {sample} has {letters} labels, which need {needed} time steps, and has {frames}"
    return ""
