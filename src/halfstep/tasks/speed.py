"""Speed: how fast each format is on this machine, forward and backward, and which preset suits it for that.

A matrix product and a convolution run in turns with fp32 (`Race`), which runs twice: what the two differ by is what
cannot be resolved. A format without units can take hundreds of times fp32's time (torch's fp16 kernels on a CPU), so it
is measured beside fp32 in a small size.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.timing import Race, Ratio, timed

PASSES = 3  # the gradients of input and weight cost a forward pass each
LEAST, MOST = 5, 100  # rounds, whatever the time allows
MOST_SMALL = 15
KERNEL = 3  # of convolutions
TF32_FROM = (8, 0)  # CUDA compute capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is computed, and for how long."""

    product: int  # rows and columns of the matrices
    small_product: int  # the same, for formats without units
    image: tuple[int, int, int]  # (batch, channels, height = width) of a convolution's input; as many channels come out
    small_image: tuple[int, int, int]  # the same, for formats without units
    seconds: float  # for each of the two kinds of work


def sizes_for(device: str, *, quick: bool = False) -> Sizes:
    """Return sizes that keep a device of this type busy; `quick` halves them and takes a tenth of the time."""
    if device == "cpu":
        image = (4, 64, 28) if quick else (8, 64, 56)
        product, seconds = (512, 0.2) if quick else (1024, 1.8)
    else:
        image = (16, 128, 28) if quick else (32, 256, 56)
        product, seconds = (2048, 0.2) if quick else (4096, 1.5)
    small = (256, (1, 64, 28)) if device == "cpu" else (512, (2, 64, 28))
    return Sizes(product=product, small_product=small[0], image=image, small_image=small[1], seconds=seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One format in one kind of work."""

    label: str  # "fp32", "tf32", "bf16", "fp16" or "fp16 emulated"
    gflops: float  # 1e9 floating-point operations a second, from the median time of forward and backward
    faster: Ratio | None  # fp32's time over this format's in the same round: 2 is twice as fast; None for fp32 itself
    decided: bool = False  # whether it differs from fp32's by a larger factor than identical programs here

    @property
    def factor(self) -> float:
        """Return the times fp32's speed to reckon with: 1 where the measurement did not decide."""
        return self.faster.median if self.faster and self.decided else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSpeed:
    """Formats that ran in turns on the same numbers."""

    work: str  # "matrix product" or "convolution"
    size: str  # its size, in words
    control: Ratio  # fp32 over fp32: the ratio of identical programs here
    speeds: tuple[Speed, ...]  # fp32 first


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """What was measured on one device type."""

    device: str  # its type
    works: tuple[WorkSpeed, ...]  # what ran in full size, then what had to run in a small one
    cast_seconds: float  # to cast one element of a weight down to bf16 and its gradient up again


class _Variant(NamedTuple):
    """A format and how to compute in it: tensors of `dtype`, tf32 allowed or not, in halfstep's fp16 region or not."""

    label: str
    dtype: torch.dtype
    tf32: bool = False
    region: bool = False


FP32, AGAIN = _Variant("fp32", torch.float32), _Variant("fp32 again", torch.float32)


class _Work(NamedTuple):
    """A computation: its operator, the shapes of activation and weight, and its operations forward."""

    name: str
    size: str
    call: Callable[[Tensor, Tensor], Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    operations: float


def measure_speed(device: str, sizes: Sizes, *, on_step: Callable[[str], None] = lambda what: None) -> DeviceSpeed:
    """Measure every format that can run on `device`."""
    variants, slow_variants = _variants(device)
    pairs = (
        (_product(sizes.product), _product(sizes.small_product)),
        (_convolution(*sizes.image), _convolution(*sizes.small_image)),
    )
    works, slow = [], []
    for large, small in pairs:
        on_step(f"{large.name} on {device}")
        works.append(_in_turns(large, variants, device, sizes.seconds, MOST))
        if slow_variants:
            slow.append(_in_turns(small, slow_variants, device, sizes.seconds / 2, MOST_SMALL))
    on_step(f"casts on {device}")
    return DeviceSpeed(device=device, works=(*works, *slow), cast_seconds=_cast_seconds(device, sizes))


def _variants(device: str) -> tuple[list[_Variant], list[_Variant]]:
    """Return the formats besides fp32 that `device` has units for (or emulates), and those it lacks units for."""
    there = hs.policy.units(device)
    has: list[_Variant] = []
    lacks: list[_Variant] = []
    if device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= TF32_FROM:
        has.append(_Variant("tf32", torch.float32, tf32=True))
    (has if there.bf16 else lacks).append(_Variant("bf16", torch.bfloat16))
    (has if there.fp16 else lacks).append(_Variant("fp16", torch.float16))
    if not there.fp16:
        has.append(_Variant("fp16 emulated", torch.float16, region=True))
    return has, lacks


def _product(n: int) -> _Work:
    return _Work("matrix product", f"{n} x {n} x {n}", torch.matmul, ((n, n), (n, n)), 2.0 * n**3)


def _convolution(batch: int, channels: int, side: int) -> _Work:
    return _Work(
        name="convolution",
        size=f"{batch} x {channels} x {side} x {side}, {KERNEL}x{KERNEL}",
        call=lambda x, weight: F.conv2d(x, weight, padding=KERNEL // 2),
        shapes=((batch, channels, side, side), (channels, channels, KERNEL, KERNEL)),
        operations=2.0 * batch * channels * side**2 * channels * KERNEL**2,
    )


def _in_turns(work: _Work, variants: Sequence[_Variant], device: str, seconds: float, most: int) -> WorkSpeed:
    """Run fp32 twice and every one of `variants` once a round, for about `seconds`."""
    runs = {variant.label: _runner(work, variant, device) for variant in (FP32, AGAIN, *variants)}
    race = Race(lambda label, number: timed(runs[label], device))
    race.run(list(runs), seconds=seconds, least=LEAST, most=most)
    control = race.ratio(AGAIN.label, FP32.label)
    assert control is not None
    speeds = []
    for label in (label for label in runs if label != AGAIN.label):
        ratio = None if label == FP32.label else race.ratio(FP32.label, label)
        gflops = PASSES * work.operations / race.typical(label) / 1e9
        speeds.append(Speed(label=label, gflops=gflops, faster=ratio, decided=decided(ratio, control)))
    return WorkSpeed(work=work.name, size=work.size, control=control, speeds=tuple(speeds))


def decided(ratio: Ratio | None, control: Ratio) -> bool:
    """Return whether a ratio differs from 1 by a larger factor than that of identical programs."""
    if ratio is None or ratio.low <= 1.0 <= ratio.high:
        return False
    return max(ratio.median, 1 / ratio.median) > max(control.high, 1 / control.low)


def _runner(work: _Work, variant: _Variant, device: str) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).to(device, variant.dtype).requires_grad_() for shape in work.shapes
    )
    region = hs.autocast(device, dtype=torch.float16) if variant.region else nullcontext()
    with torch.no_grad():
        seed = torch.ones_like(work.call(x, weight)) if not variant.region else None

    def run() -> None:
        with _tf32(device, allowed=variant.tf32):
            with region:
                out = work.call(x, weight)
            torch.autograd.grad(out, (x, weight), torch.ones_like(out) if seed is None else seed)

    return run


def _cast_seconds(device: str, sizes: Sizes) -> float:
    weight = torch.zeros(2 * sizes.product, 2 * sizes.product, device=device)  # more than caches hold
    low = weight.bfloat16()

    def run() -> None:
        weight.bfloat16()
        low.float()

    run()
    return statistics.median(timed(run, device) for _ in range(2 * LEAST)) / weight.numel()


@contextmanager
def _tf32(device: str, *, allowed: bool) -> Iterator[None]:
    """Set whether CUDA may compute fp32 products and convolutions in tf32; restore the setting afterwards."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for setting in settings if device == "cuda" else ():
            stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
            setting.fp32_precision = "tf32" if allowed else "ieee"
        yield


# ------------------------------------------------------------------ advice

WORTH_IT = 1.1  # a format has to be a tenth faster in the kernels: casts and everything else take their share
CLEARLY = 1.2  # fp16 has to be this much faster than bf16 to be worth a loss scale
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
        preset, dtype = "O0", "fp32"
        why = [there.reason]
        why += [f"{label} reaches {_words(found)}, forward and backward" for label, found in gains.items() if found]
        open_ = [label for label, found in gains.items() if has[label] and not all(g.decided for g in found.values())]
        if open_:
            why.append(f"undecided for {' and '.join(open_)}, which has units here: measure again on a quiet machine")
        also = [("memory is short", "`mixed` in bf16 saves half the bytes for backward, at the speed above")]
    else:
        preset, dtype = "mixed", "fp16" if best["fp16"] > CLEARLY * best["bf16"] else "bf16"
        why, also = _reasons(there, speed, dtype, gains, best)
    if not there.fp16:
        native = _words(_gains(speed, "fp16"))
        beside = f"; torch's own fp16 kernels reach {native}" if native else ""
        emulated = f"emulated with a GPU's numerics, reaches {_words(_gains(speed, 'fp16 emulated'))}{beside}"
        also.append(("you test fp16 training (overflows, the loss scale) here", f"`mixed` in fp16, {emulated}"))
    auto = hs.resolve(hs.Policy.of(preset), nn.Identity(), speed.device).policy.dtype  # named where it is another
    code = f'policy="{preset}"' if auto == dtype else f'policy=hs.Policy.of("{preset}", dtype="{dtype}")'
    return Advice(device=speed.device, preset=preset, dtype=dtype, code=code, why=tuple(why), also=tuple(also))


def _reasons(
    there: hs.policy.Units, speed: DeviceSpeed, dtype: str, gains: dict[str, dict[str, Speed]], best: dict[str, float]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return why to use a low format, and what else to use in other cases."""
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
    return why, also


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
