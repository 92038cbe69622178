"""What every field of a policy promises: values to try, and the facts that the documentation promises for each.

The facts are written down from docs/concepts and the field's own description, not from what the code does. A field that
is ignored gives the same facts for all its values, so that one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import halfstep as hs
from tests.promises.probe import (
    Entry,
    Facts,
    see_formats,
    see_precise_weights,
    see_products,
    see_reduction,
    see_small_gradients,
    see_sum,
)

__all__ = ["FIELDS", "Field", "Value"]

BF16 = hs.Policy(name="probe", dtype="bf16")
FP16 = BF16.replace(dtype="fp16")
LOW = BF16.replace(params="low", master="master")


@dataclass(frozen=True)
class Value:
    """One value of a field.

    Attributes:
        given: the value.
        facts: what is promised for it.
        base: the policy it is set in, where that is not the field's.
    """

    given: Any
    facts: Facts
    base: hs.Policy | None = None


@dataclass(frozen=True)
class Field:
    """One field of `hs.Policy`.

    Attributes:
        name: its name.
        says: what is tested, in words for the page.
        see: observes a training under a policy.
        base: the policy whose field is set.
        values: what it is set to, and what is promised; the first is the default.
    """

    name: str
    says: str
    see: Callable[[Entry, hs.Policy], Facts]
    base: hs.Policy
    values: tuple[Value, ...]

    def policy(self, value: Value) -> hs.Policy:
        """Return the policy with `value` in it."""
        return (value.base or self.base).replace(**{self.name: value.given})


def _table(name: str, linear: str, softmax: str, norm: str, exp: str, loss: str) -> Value:
    return Value(name, {"linear": linear, "softmax": softmax, "norm": norm, "exp": exp, "inner loss": loss})


def _master(name: str, small: bool, digits: str, half_way: str) -> Value:
    return Value(name, {"small updates": small, "digits": digits, "half way": half_way})


FIELDS: tuple[Field, ...] = (
    Field(
        "name",
        "what the region prints, an error of `prepare` says, a checkpoint of TrainStep holds",
        see_formats,
        BF16,
        (Value("probe", {"name": "probe"}), Value("renamed", {"name": "renamed"})),
    ),
    Field(
        "dtype",
        "format of a linear layer's result; for a simulated format: that it holds that format's numbers alone",
        see_formats,
        BF16,
        (
            Value("bf16", {"linear": "bf16", "fp8 numbers": False}),
            Value("fp16", {"linear": "fp16", "fp8 numbers": False}),
            Value("fp32", {"linear": "fp32", "fp8 numbers": False}),
            Value("fp8_e4m3", {"linear": "fp32", "fp8 numbers": True}),
        ),
    ),
    Field(
        "params",
        "format of the weights that operators get",
        see_formats,
        BF16,
        (
            Value("fp32", {"weight": "fp32", "norm weight": "fp32"}),
            Value("low", {"weight": "bf16", "norm weight": "fp32"}),
        ),
    ),
    Field(
        "norms",
        "format of a LayerNorm's weights beside low ones",
        see_formats,
        LOW.replace(master="none"),
        (
            Value("fp32", {"weight": "bf16", "norm weight": "fp32"}),
            Value("low", {"weight": "bf16", "norm weight": "bf16"}),
        ),
    ),
    Field(
        "master",
        "digits of a value that was loaded into a low weight, how a value half way between two bf16 numbers is "
        "rounded, and whether updates smaller than its rounding add up",
        see_precise_weights,
        LOW,
        (
            _master("master", True, "24", "even"),
            _master("split", True, "24", "up"),
            _master("kahan", True, "16", "even"),
            _master("stochastic", True, "8", "even"),
            _master("none", False, "8", "even"),
        ),
    ),
    Field(
        "grads",
        "error of a sum of 64 micro-batches' gradients, seen in the weight: 0.15 % at most in fp32, more in bf16",
        see_sum,
        LOW,
        (Value("param", {"sum": "bf16", "weight": "bf16"}), Value("fp32", {"sum": "fp32", "weight": "bf16"})),
    ),
    Field(
        "table",
        "formats of linear, softmax, layer_norm, exp and mse_loss",
        see_formats,
        BF16.replace(loss="keep"),
        (
            _table("mixed", "bf16", "bf16", "bf16", "fp32", "fp32"),
            _table("torch", "bf16", "bf16", "bf16", "bf16", "fp32"),
            _table("apex-o1", "bf16", "fp32", "fp32", "fp32", "fp32"),
            _table("all-low", "bf16", "bf16", "bf16", "bf16", "bf16"),
            _table("none", "fp32", "fp32", "fp32", "fp32", "fp32"),
        ),
    ),
    Field(
        "ops",
        "formats of linear, exp and an operator of `hs.operator`, each under a rule of its own",
        see_formats,
        BF16,
        (
            Value((), {"linear": "bf16", "exp": "fp32", "custom": "fp32"}),
            Value((("linear", "fp32"),), {"linear": "fp32", "exp": "fp32", "custom": "fp32"}),
            Value((("e?p", "low"),), {"linear": "bf16", "exp": "bf16", "custom": "fp32"}),
            Value((("promises::*", "low"),), {"linear": "bf16", "exp": "fp32", "custom": "bf16"}),
        ),
    ),
    Field(
        "modules",
        "formats in a module under each rule, and beside it",
        see_formats,
        BF16,
        (
            Value((), {"linear": "bf16", "head": "bf16", "exp": "fp32"}),
            Value((("head", "fp32"),), {"linear": "bf16", "head": "fp32", "exp": "fp32"}),
            Value((("class:Head", "keep"), ("inner", "keep")), {"linear": "fp32", "head": "fp32", "exp": "fp32"}),
            Value((("", "low"),), {"linear": "bf16", "head": "bf16", "exp": "bf16"}),
        ),
    ),
    Field(
        "residual",
        "formats of an embedding and of the sum of it and a linear layer's result",
        see_formats,
        BF16,
        (Value("fp32", {"embedding": "fp32", "add": "fp32"}), Value("low", {"embedding": "bf16", "add": "bf16"})),
    ),
    Field(
        "inputs",
        "format in which a model sees an fp32 input",
        see_formats,
        BF16,
        (Value("keep", {"input": "fp32"}), Value("low", {"input": "bf16"})),
    ),
    Field(
        "outputs",
        "format of a model's output where the model is called",
        see_formats,
        BF16,
        (Value("keep", {"output": "bf16"}), Value("fp32", {"output": "fp32"})),
    ),
    Field(
        "loss",
        "format of mse_loss, called in the region, beside a table that makes it low",
        see_formats,
        BF16.replace(table="all-low"),
        (Value("fp32", {"inner loss": "fp32", "exp": "bf16"}), Value("keep", {"inner loss": "bf16", "exp": "bf16"})),
    ),
    Field(
        "reduce",
        "format in which DistributedDataParallel sums gradients, and that another one than theirs is refused",
        see_reduction,
        LOW,
        (Value("grad", {"summed": "bf16"}), Value("fp32", {"summed": "fp32"}), Value("low", {"summed": "bf16"})),
    ),
    Field(
        "state",
        "format of AdamW's moments",
        see_formats,
        BF16,
        (Value("fp32", {"state": "fp32"}), Value("low", {"state": "bf16"})),
    ),
    Field(
        "scale",
        "the scale, and whether gradients of 2^-27 reach the weights in fp16",
        see_small_gradients,
        FP16,
        (
            Value("auto", {"small gradients": True, "scale": 65536.0}),
            Value("none", {"small gradients": False, "scale": 1.0}),
            Value(4096.0, {"small gradients": True, "scale": 4096.0}),
            Value("megengine", {"small gradients": True, "scale": 16.0}),
        ),
    ),
    Field(
        "emulate",
        "format of the arithmetic of fp16 products, below all that halfstep does",
        see_products,
        FP16,
        (Value("never", {"products": "fp16"}), Value("always", {"products": "fp32"})),
    ),
)

BY_NAME: Mapping[str, Field] = MappingProxyType({field.name: field for field in FIELDS})
