"""Resolve: what a policy means on a device (`resolved`), and for operators (`operator_rules`), with reasons.

These functions alone decide which low format a device takes, whether fp16 is emulated, which scale rule applies, which
fp32 values are behind low parameters, and whether halfstep can carry the policy out.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.accelerators import supports_bf16, types
from halfstep.errors import PolicyError, UnbuiltError, did_you_mean
from halfstep.formats import DTYPES, format_of
from halfstep.policy.operators import (
    LINEAR_LOSS,
    custom_operators,
    custom_overrides,
    custom_rule,
    data,
    is_custom,
    losses,
    operator_names,
    table,
)
from halfstep.policy.rule_kinds import RULE_KINDS
from halfstep.policy.scale_rule import SCALE_RULES
from halfstep.torch_private.devices import cpu_instructions

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

FIELDS = data("tables/fields.toml")
"""What fields mean for operators, and which of them rule each other out."""

# ------------------------------------------------------------------ devices

BF16_FROM = (8, 0)
"""CUDA compute capability of the first tensor cores for bf16 (Ampere)."""

FP8_FROM = (8, 9)
"""CUDA compute capability of the first tensor cores for fp8 (Ada)."""

HIP_FP8 = ("gfx94", "gfx95")
"""Beginnings of AMD's architectures with fp8 products (CDNA 3), from the page below."""

HIP_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""Beginnings of AMD's architectures with bf16 products: MFMA from gfx908 (CDNA) and WMMA from gfx11 (RDNA 3).

"Hardware features" in https://rocm.docs.amd.com/projects/HIP/en/latest/reference/hardware_features.html
"""


@dataclass(frozen=True, slots=True)
class Units:
    """Low formats that have arithmetic units on a device.

    Attributes:
        device: the device type.
        bf16: whether products of bf16 numbers have units.
        fp16: whether products of fp16 numbers have units.
        reason: how this is known, in words for a note or an error.
        fp8: whether products of fp8 numbers have units that torchao's layers use.
    """

    device: str
    bf16: bool
    fp16: bool
    reason: str
    fp8: bool = False


@cache
def units(device_type: str) -> Units:
    """Return which low formats have arithmetic units on `device_type` here.

    On the CPU the instruction set decides: bf16 needs avx512_bf16, amx_bf16 or ARM's bf16 extension, fp16 needs
    avx512_fp16, amx_fp16 or ARM's fp16 arithmetic. On CUDA bf16 needs compute capability 8.0 on every visible GPU and
    fp16 is always there; on AMD's GPUs, which torch calls "cuda" too, the architecture decides. Elsewhere fp16 is taken
    to be there, and bf16 if the device's module says so (``torch.npu.is_bf16_supported``); of a module that does not
    say, if bf16 is torch's format for autocast.

    Raises:
        PolicyError: torch.autocast does not exist for this device type.

    Examples:
        >>> hs.policy.units("cpu").device
        'cpu'
    """
    check_device_type(device_type)
    if device_type == "cpu":
        ask = getattr(torch.cpu, "get_capabilities", cpu_instructions)  # private queries where it is not there
        return cpu_units(ask(), platform.machine())
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return Units("cuda", bf16=False, fp16=True, reason="no CUDA device here; fp16 units assumed")
        if torch.version.hip is not None:
            return hip_units(
                [torch.cuda.get_device_properties(i).gcnArchName for i in range(torch.cuda.device_count())]
            )
        return cuda_units([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())])
    if (answer := supports_bf16(device_type)) is not None:
        reason = f"torch.{device_type}.is_bf16_supported() is {answer}"
        return Units(device_type, bf16=answer, fp16=True, reason=reason)
    native = torch.get_autocast_dtype(device_type)
    name = str(native).removeprefix("torch.")
    reason = f"{name} is torch's own format for autocast on {device_type}"
    return Units(device_type, bf16=native is torch.bfloat16 or device_type == "xpu", fp16=True, reason=reason)


def check_device_type(device_type: str) -> None:
    """Raise PolicyError unless `device_type` is a bare device type with torch.autocast, such as "cuda"."""
    try:
        known = ":" not in device_type and torch.amp.is_autocast_available(device_type)
    except (RuntimeError, TypeError):  # not even a device type
        known = False
    if not known:
        there = ("cpu", *types())
        hint = did_you_mean(device_type.partition(":")[0], there) if isinstance(device_type, str) else ""
        raise PolicyError(
            f"device type {device_type!r} has no torch.autocast; expected one of {', '.join(there)} "
            f"(without an index){hint}"
        )


def device_types_of(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the device types of the region of `models`: the accelerators of their parameters, then the CPU."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    # fully_shard computes on the device of its mesh, also where it keeps parts on the host
    meshes = [mesh for parameter in parameters if (mesh := getattr(parameter, "device_mesh", None)) is not None]
    found = {parameter.device.type for parameter in parameters} | {mesh.device_type for mesh in meshes}
    found -= {"meta"}
    return (*sorted(found - {"cpu"}), "cpu") if found else default_device_types()


def default_device_types() -> tuple[str, ...]:
    """Return the device types a region enters by default: the accelerator, if there is one, then the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return (accelerator.type, "cpu")


def cpu_units(capabilities: Mapping[str, Any], machine: str) -> Units:
    """Return the units of a CPU whose instruction sets are `capabilities` (name -> present) on a `machine` type."""
    present = {name for name, there in capabilities.items() if there is True}
    if machine.lower() in {"aarch64", "arm64"}:
        bf16 = sorted(present & {"bf16", "sve_bf16"})
        # nothing known (an older torch): 64-bit ARM cores that train models have ARMv8.2's fp16 arithmetic
        fp16 = sorted(present & {"fp16_arith"}) or ([] if present else ["ARMv8.2"])
    else:
        bf16 = sorted(present & {"avx512_bf16", "amx_bf16"})
        fp16 = sorted(present & {"avx512_fp16", "amx_fp16"})
    bf16_words = f"bf16 units ({', '.join(bf16)})" if bf16 else "no bf16 units"
    fp16_words = f"fp16 units ({', '.join(fp16)})" if fp16 else "no fp16 units"
    return Units("cpu", bf16=bool(bf16), fp16=bool(fp16), reason=f"this CPU has {bf16_words} and {fp16_words}")


def cuda_units(capabilities: list[tuple[int, int]]) -> Units:
    """Return the units that all of some GPUs have, given their compute capabilities (major, minor)."""
    oldest = min(capabilities)
    there = "bf16 and fp16 units" if oldest >= BF16_FROM else "fp16 units and none for bf16 (they need 8.0)"
    words = f"compute capability {oldest[0]}.{oldest[1]} has {there}"
    return Units("cuda", bf16=oldest >= BF16_FROM, fp16=True, reason=words, fp8=oldest >= FP8_FROM)


def hip_units(architectures: list[str]) -> Units:
    """Return the units that all of some AMD GPUs have, given their architectures ("gfx942:sramecc+:xnack-").

    What torch calls their compute capability counts otherwise than NVIDIA's ((9, 0) is gfx906, without bf16, and
    gfx90a, with it), and `torch.cuda.is_bf16_supported` is True for all of them.
    """
    names = sorted({name.partition(":")[0] for name in architectures})
    lacking = [name for name in names if not name.startswith(HIP_BF16)]
    there = "fp16 units and none for bf16" if lacking else "bf16 and fp16 units"
    fp8 = all(name.startswith(HIP_FP8) for name in names)
    return Units("cuda", bf16=not lacking, fp16=True, reason=f"{' and '.join(lacking or names)} has {there}", fp8=fp8)


# ------------------------------------------------------------------ a policy on a device


def resolve_dtype(policy: Policy, device_type: str) -> tuple[str, str]:
    """Return the low format of `policy` on a device, and a note: why, or what happens instead of missing units.

    The format "fp32" means that nothing is lowered; the note is "" if there is nothing to say.
    """
    there = units(device_type)
    if policy.dtype != "auto" and policy.dtype not in DTYPES:
        words = f"{policy.dtype} is simulated: operators take and give its numbers, in fp32 tensors and arithmetic"
        return policy.dtype, words
    if policy.dtype == "auto":
        if there.bf16:
            return "bf16", f"dtype auto: {there.reason}"
        if there.fp16 and device_type != "cpu":
            return "fp16", f"dtype auto: {there.reason}"
        remedy = "dtype='bf16' or 'fp16' (emulated) by name works here too"
        return "fp32", f"dtype auto: {there.reason}, so everything stays fp32; {remedy}"
    if policy.dtype == "bf16" and not there.bf16:
        return "bf16", f"{there.reason}: bf16 runs in torch's kernels without units, slower than fp32"
    if policy.dtype == "fp16" and policy.emulate == "always":
        return "fp16", "emulate='always': products take fp16, compute in fp32 and round once"
    if policy.dtype == "fp16" and not there.fp16:
        if policy.emulate == "never":
            return "fp16", f"{there.reason}: emulate='never' runs torch's fp16 kernels, many times slower than fp32"
        return "fp16", f"{there.reason}: fp16 is emulated (fp16 in, fp32 compute, one rounding)"
    return policy.dtype, ""


def surprise(policy: Policy, device_type: str) -> str:
    """Return why `policy` runs on a device in another way, or slower, than its user may expect; "" if it does not."""
    there = units(device_type)
    dtype, note = resolve_dtype(policy, device_type)
    if dtype == "fp16":
        return note if not there.fp16 and policy.emulate == "never" else ""
    return note if not there.bf16 and (dtype == "bf16" or policy.dtype == "auto") else ""


def resolved(policy: Policy, device_type: str, *, one_pass: bool = False) -> Policy:
    """Return `policy` as it is carried out on a device: no "auto" and no name of a scale rule is left.

    Where the low format is fp32 nothing is lowered: parameters, residual stream and inputs become fp32 too.

    With `one_pass` the optimizer is stepped by halfstep's own operators. They read and write both halves of split
    weights as fast as masters, and these take 2 bytes less: then ``master="auto"`` is split in bf16.
    """
    dtype, _ = resolve_dtype(policy, device_type)
    _refuse_contradictions(policy, dtype)
    if dtype == "fp32":
        policy = policy.replace(params="fp32", norms="fp32", residual="fp32", inputs="keep")
    master = policy.master
    if policy.params == "fp32":
        master = "none"
    elif master == "auto":
        master = "split" if one_pass and dtype == "bf16" else "master"
    scale = policy.scale
    if scale == "auto":  # formats with fewer exponent bits than fp32 need loss scaling
        narrow = dtype == "fp16" or (dtype not in DTYPES and format_of(dtype).is_narrow)
        scale = SCALE_RULES["halfstep"] if narrow else "none"
    elif isinstance(scale, str) and scale != "none":
        scale = SCALE_RULES[scale]
    emulate = policy.emulate
    if emulate == "auto":
        lacking = dtype not in DTYPES or (dtype == "fp16" and not units(device_type).fp16)
        emulate = "always" if lacking else "never"
    return policy.replace(dtype=dtype, master=master, scale=scale, emulate=emulate)


def holds(when: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether what is known of a policy is as a row asks: a value, one of a list, or not empty for true."""
    for name, wanted in when.items():
        value = bool(known[name]) if isinstance(wanted, bool) else known[name]
        if value not in wanted if isinstance(wanted, list) else value != wanted:
            return False
    return True


def _refuse_contradictions(policy: Policy, dtype: str) -> None:
    """Refuse a policy that cannot be carried out with `dtype` as its low format."""
    known = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    known |= {"dtype": dtype, "simulated": dtype not in DTYPES}
    for row in FIELDS["refused"]:
        if holds(row["when"], known):
            error = UnbuiltError if row.get("unbuilt") else PolicyError
            raise error(f"policy {policy.name!r}: {row['words'].format(**known)}")


def reduces_itself(concrete: Policy) -> bool:
    """Return whether a resolved policy needs other averages over processes than in the format of each parameter."""
    low = concrete.params == "low"
    if concrete.reduce == "low":
        return concrete.dtype != "fp32"
    # what was loaded low stays low in modules whose inputs decide
    kept = any(RULE_KINDS[rule].params == "input" for _, rule in concrete.modules)
    return (low and concrete.grads == "fp32") or (concrete.reduce == "fp32" and (low or kept))


# ------------------------------------------------------------------ operators


@dataclass(frozen=True, slots=True)
class Decision:
    """The rule of one operator."""

    rule: str  # one of `RULES`
    origin: str  # what decided: "table", "residual", "loss" or "ops" of the policy, or "operator": its own @hs.operator
    reason: str


def operator_rules(policy: Policy, device_type: str) -> dict[str, Decision]:
    """Return the decision for every operator of torch that has a rule; the others run in their inputs' format.

    The device matters only for ``table="torch"``, whose rows are torch.autocast's lists as data.
    """
    return dict(_operator_rules(policy, "cpu" if device_type == "cpu" else "cuda"))


@lru_cache(maxsize=256)
def _operator_rules(policy: Policy, device_type: str) -> Mapping[str, Decision]:
    rules = {
        op: Decision(row.rule, "table", f"{row.reason} ({row.source})")
        for op, row in table(policy.table, device_type).items()
    }
    if policy.residual == "low":
        for op, (rule, reason) in FIELDS["residual"].items():
            rules[op] = Decision(rule, "residual", reason)
    if policy.loss == "fp32":
        for op in losses():
            if op not in rules or RULE_KINDS[rules[op].rule].may_be_low:
                rules[op] = Decision("fp32", "loss", "loss='fp32': loss functions run in fp32 whatever the table says")
    for pattern, rule in policy.ops:
        for op in () if is_custom(pattern) else operator_names(pattern):
            rules[op] = Decision(rule, "ops", f"ops: {pattern!r} = {rule!r}")
    product = rules.get("linear")
    if LINEAR_LOSS not in rules and product and (policy.table, product.origin) != ("torch", "table"):
        rules[LINEAR_LOSS] = Decision(product.rule, product.origin, "its product as linear, its loss as cross_entropy")
    return rules


def custom_decisions(ops: tuple[tuple[str, str], ...]) -> dict[str, Decision]:
    """Return the decision for every registered custom operator under a policy's ``ops``."""
    made = {}
    for operator in custom_operators():
        decision = Decision(operator.rule, "operator", f"@hs.operator({operator.rule!r}) at {operator.where}")
        for pattern, rule in custom_overrides(ops):
            if custom_rule(((pattern, rule),), operator.name, ""):
                decision = Decision(rule, "ops", f"ops: {pattern!r} = {rule!r}")
        made[operator.name] = decision
    return made
