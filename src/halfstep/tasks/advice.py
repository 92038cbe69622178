"""Advice: which preset and format suit a device, and why, from its units and what was measured on it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

import halfstep as hs
from halfstep.tasks.speed import DeviceSpeed, Speed

WORTH_IT = 1.1  # a format has to be a tenth faster in the kernels: casts and everything else take their share
CLEARLY = 1.2  # fp16 has to be this much faster than bf16 to be worth a loss scale
PASSES = 3  # a product costs as much again for the gradient of its input and of its weight
SHARE = 0.2  # of the products' time: when casting weights takes more, keep low weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to use on a device."""

    device: str  # its type
    preset: str  # name of a preset
    dtype: str  # "bf16", "fp16" or "fp32"
    code: str  # the argument to write
    why: tuple[str, ...]  # the measured reasons
    also: tuple[tuple[str, str], ...] = ()  # (case, what to use then), for what one number cannot decide


def advise(there: hs.policy.Units, speed: DeviceSpeed) -> Advice:
    """Return what to use on the device that `there` and `speed` describe."""
    has = {"bf16": there.bf16, "fp16": there.fp16}
    gains = {label: _gains(speed, label) for label in has}
    best = {
        label: max((gain.factor for gain in found.values()), default=0.0) if has[label] else 0.0
        for label, found in gains.items()
    }
    if max(best.values()) < WORTH_IT:
        return _stay(there, speed, gains)
    dtype = "fp16" if best["fp16"] > CLEARLY * best["bf16"] else "bf16"
    why = [f"{dtype} reaches {_words(gains[dtype])}, forward and backward"]
    if dtype == "bf16":
        why.append("bf16 has fp32's range: no loss scale is needed and no step is skipped for an overflow")
        if best["fp16"] >= WORTH_IT:
            why.append(f"fp16 is not clearly faster ({_words(gains['fp16'])}) and needs a loss scale")
    else:
        why.append(f"bf16 would need no loss scale, but reaches only {_words(gains['bf16'])} ({there.reason})")
    also = []
    slow = [work for work, gain in gains[dtype].items() if gain.decided and gain.factor < WORTH_IT]
    if slow:
        also.append((f"the model is mostly {slow[0]}s", f"`O0`, which stays in fp32: {dtype} gains nothing there"))
    rows = rows_for_o2(speed, dtype)
    if rows:
        also.append(
            (
                f"weights dominate (fewer than about {rows} rows, batch times positions, in a step)",
                f"`O2` in {dtype}, which keeps low weights: under `mixed` casting weights down and gradients up would "
                f"take over {SHARE:.0%} of the products' time",
            )
        )
    if dtype == "bf16":
        also.append(("weights and optimizer states do not fit", "`lean`: 6 bytes a parameter for both, instead of 12"))
    if not there.fp16:
        also += _rehearsal(speed)
    code = _code("mixed", dtype, speed.device)
    return Advice(device=speed.device, preset="mixed", dtype=dtype, code=code, why=tuple(why), also=tuple(also))


def _stay(there: hs.policy.Units, speed: DeviceSpeed, gains: dict[str, dict[str, Speed]]) -> Advice:
    """Advise fp32: no low format is measurably faster here."""
    why = [there.reason]
    why += [f"{label} reaches {_words(found)}, forward and backward" for label, found in gains.items() if found]
    has = {"bf16": there.bf16, "fp16": there.fp16}
    open_ = [label for label, found in gains.items() if has[label] and not all(g.decided for g in found.values())]
    if open_:
        why.append(f"undecided for {' and '.join(open_)}, which has units here: measure again on a quiet machine")
    memory = ("memory is short", "`mixed` in bf16 saves half the bytes for backward, at the speed above")
    also = (memory, *(() if there.fp16 else _rehearsal(speed)))
    code = _code("O0", "fp32", speed.device)
    return Advice(device=speed.device, preset="O0", dtype="fp32", code=code, why=tuple(why), also=also)


def _rehearsal(speed: DeviceSpeed) -> list[tuple[str, str]]:
    emulated = _words(_gains(speed, "fp16 emulated"))
    native = _words(_gains(speed, "fp16"))
    beside = f"; torch's own fp16 kernels reach {native}" if native else ""
    return [
        (
            "you test fp16 training (overflows, the loss scale) here",
            f"`mixed` in fp16, emulated with a GPU's numerics, reaches {emulated}{beside}",
        )
    ]


def rows_for_o2(speed: DeviceSpeed, dtype: str) -> int:
    """Return below how many rows a step casting weights costs more than `SHARE` of the matrix products, or 0."""
    product = _gains(speed, dtype).get("matrix product")
    if product is None:
        return 0
    # an element of a weight takes part in 2 operations a row in each product, and is cast once
    rows = speed.cast_seconds * product.gflops * 1e9 / (2 * PASSES * SHARE)
    return int(float(f"{rows:.1g}"))


def _gains(speed: DeviceSpeed, label: str) -> dict[str, Speed]:
    """Return work -> what was measured for the format `label` in it."""
    return {
        work.work: each
        for work in speed.works
        for each in work.speeds
        if each.label == label and each.faster is not None
    }


def _words(gains: dict[str, Speed]) -> str:
    """Return "2.1 times fp32's speed in a matrix product, 2.4 times in a convolution"; undecided where it is so."""
    words, unit = [], " fp32's speed"
    for work, gain in gains.items():
        ratio = gain.faster
        assert ratio is not None
        times = f"{ratio.median:.1f}" if ratio.median >= 1.0 else f"{ratio.median:.2g}"
        times = times if gain.decided else f"an undecided {ratio.low:.2f} to {ratio.high:.2f}"
        words.append(f"{times} times{unit} in a {work}")
        unit = ""
    return ", ".join(words)


def _code(preset: str, dtype: str, device: str) -> str:
    """Return the policy argument, with a format only where "auto" would choose another."""
    auto = hs.resolve(hs.Policy.of(preset), nn.Identity(), device).policy.dtype
    return f'policy="{preset}"' if auto == dtype else f'policy=hs.Policy.of("{preset}", dtype="{dtype}")'
