"""Goals of speed and size, each with what it may be at most, and where the reports say what was reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.cases import AMP, CHAINS
from benchmarks.curves import FACTOR
from benchmarks.instruments import ON
from benchmarks.reports import Reports, bf16_cases, row

MIB = 2.0**20
PRESETS = ("torch", "mixed", "O2", "pure")
RECOMMENDED = "mixed"
HOST = tuple(case.name for case in CHAINS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What was measured.

    Attributes:
        value: the number.
        low: lower end of its 90 % interval, where it has one.
        high: upper end.
        where: what it was measured on, for goals over several cases.
    """

    value: float
    low: float | None = None
    high: float | None = None
    where: str = ""


Read = Callable[[Reports], Reached | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A bound on a measured number.

    Attributes:
        what: the number, in words.
        bound: what it may be at most, or at least.
        least: whether the bound is a lower one.
        read: how to find the number; it returns None where nothing was measured.
        on: "cpu", "gpu", "counts" or "lens": the report it comes from.
    """

    what: str
    bound: float
    least: bool = False
    read: Read
    on: str = "cpu"

    def met(self, reached: Reached) -> bool:
        """Return whether the number keeps the bound; intervals do not excuse it."""
        return reached.value >= self.bound if self.least else reached.value <= self.bound


# ------------------------------------------------------------------ where numbers are


def step(case: str, label: str, *, to: str = "to_amp", on: str = "cpu") -> Read:
    """Read the paired ratio of a candidate's step time."""

    def read(reports: Reports) -> Reached | None:
        found = row(getattr(reports, on), case, label)
        if found is None or to not in found:
            return None
        return Reached(value=found[to]["median"], low=found[to]["low"], high=found[to]["high"])

    return read


def tail(case: str, label: str) -> Read:
    """Read the paired ratio of a candidate's tail, weights low for the next forward pass included."""

    def read(reports: Reports) -> Reached | None:
        found = reports.cpu.get("cases", {}).get(case, {}).get("stages", {}).get(label)
        if found is None:
            return None
        ratio = found["tail_to_amp"]
        return Reached(value=ratio["median"], low=ratio["low"], high=ratio["high"])

    return read


def host(case: str) -> Read:
    """Read the largest ratio of the time that a preset takes beyond low passes to torch.amp's; medians of each."""

    def read(reports: Reports) -> Reached | None:
        amp = row(reports.cpu, case, AMP)
        found = [
            Reached(value=own["beyond_us"] / amp["beyond_us"], where=f"`{label}`")
            for label in PRESETS
            if amp is not None and "beyond_us" in amp and (own := row(reports.cpu, case, label)) is not None
        ]
        return max(found, key=lambda reached: reached.value, default=None)

    return read


def worst(label: str, to: str) -> Read:
    """Read the largest ratio of a candidate over all bf16 cases."""

    def read(reports: Reports) -> Reached | None:
        found = [
            Reached(value=r[to]["median"], low=r[to]["low"], high=r[to]["high"], where=case["title"])
            for name, case in bf16_cases(reports.cpu).items()
            if (r := row(reports.cpu, name, label)) is not None and to in r
            if to != "to_limit" or name not in HOST  # the limit takes no time on the host
        ]
        return max(found, key=lambda reached: reached.value, default=None)

    return read


def slowest(reports: Reports) -> Reached | None:
    """Read the largest ratio of a preset's time to torch.amp's over the upper end of A/A, over all bf16 cases."""
    found = [
        Reached(value=r["to_amp"]["median"] / case["control"]["high"], where=f"{case['title']}, `{label}`")
        for name, case in bf16_cases(reports.cpu).items()
        for label in PRESETS
        if (r := row(reports.cpu, name, label)) is not None
    ]
    return max(found, key=lambda reached: reached.value, default=None)


def counted(field: str, label: str, case: str = "gpt256") -> Read:
    """Read a candidate's count over torch.amp's."""

    def read(reports: Reports) -> Reached | None:
        own, amp = row(reports.cpu, case, label), row(reports.cpu, case, AMP)
        if own is None or amp is None or own["counts"] is None or amp["counts"] is None:
            return None
        if own["counts"][field] is None:
            return None
        return Reached(value=own["counts"][field] / amp["counts"][field])

    return read


def fake_cuda(value: Callable[[dict[str, float]], float], program: str = "pure:fp16") -> Read:
    """Read a number out of the totals of a GPT's step on fake CUDA tensors."""

    def read(reports: Reports) -> Reached | None:
        found = reports.counts.get("models", {}).get("gpt", {}).get(program)
        return None if found is None else Reached(value=value(found["summary"]))

    return read


def times_faster(case: str, label: str) -> Read:
    """Read how many times a candidate's time torch.amp takes."""

    def read(reports: Reports) -> Reached | None:
        ratio = step(case, label)(reports)
        if ratio is None or ratio.low is None or ratio.high is None:
            return None
        return Reached(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low)

    return read


def slowest_fp16(label: str) -> Read:
    """Read the largest ratio to fp32 over the fp16 cases that products and convolutions bound."""

    def read(reports: Reports) -> Reached | None:
        found = []
        for name in ("resnet18_fp16", "gpt256_fp16"):
            reached = step(name, label, to="to_fp32")(reports)
            if reached is not None:
                title = reports.cpu["cases"][name]["title"]
                found.append(Reached(value=reached.value, low=reached.low, high=reached.high, where=title))
        return max(found, key=lambda reached: reached.value, default=None)

    return read


def furthest_curve(reports: Reports) -> Reached | None:
    """Read the largest deviation of a preset's loss curve from fp32's, over torch.amp's own."""
    found = [
        Reached(value=r["curve"]["of_spread"], where=f"{case['title']}, {label}")
        for case in reports.cpu.get("cases", {}).values()
        for label, r in case["rows"].items()
        if label.split(",")[0].split(" ")[0] in PRESETS and r["curve"] is not None
    ]
    return max(found, key=lambda reached: reached.value, default=None)


def most_faults(reports: Reports) -> Reached | None:
    """Read the most page faults of a step, over all models and presets, alone in a process and among others."""
    found = [
        Reached(value=max(r["alone"], r["together"]), where=f"{case['title']}, {label}")
        for case in reports.pages.get("cases", {}).values()
        for label, r in case["rows"].items()
        if label in PRESETS
    ]
    return max(found, key=lambda reached: reached.value, default=None)


def instrument(case: str, *path: str) -> Read:
    """Read a paired ratio out of what was measured of instruments on a case.

    Args:
        case: its name.
        path: keys that lead to the ratio.
    """

    def read(reports: Reports) -> Reached | None:
        found = reports.lens.get("cases", {}).get(case)
        for key in path:
            if found is None:
                return None
            found = found.get(key)
        return None if found is None else Reached(value=found["median"], low=found["low"], high=found["high"])

    return read


def dearest_audit(reports: Reports) -> Reached | None:
    """Read the largest ratio of an audit to as many training steps."""
    found = [
        Reached(value=r["median"], low=r["low"], high=r["high"], where=case["title"])
        for case in reports.lens.get("cases", {}).values()
        for r in [case["audit"]["ratio"]]
    ]
    return max(found, key=lambda reached: reached.value, default=None)


# ------------------------------------------------------------------ the goals


def goals() -> Iterator[Goal]:
    """Return all goals, in the order of the table."""
    yield Goal(
        what="tail for 25M parameters (AdamW, clipping, weights low for the next forward pass): `pure` / torch.amp",
        bound=0.50,
        read=tail("mlp25m", "pure"),
    )
    yield Goal(what="step of the MLP, 21M: `pure` / torch.amp", bound=0.55, read=step("mlp21m", "pure"))
    yield Goal(
        what="step of the GPT, d = 512, one sequence: `pure` / torch.amp", bound=0.75, read=step("gpt512", "pure")
    )
    yield Goal(what="step of the GPT, d = 256: `pure` / torch.amp", bound=0.97, read=step("gpt256", "pure"))
    yield Goal(
        what="the same, both compiled",
        bound=0.95,
        read=step("gpt256", "pure compiled", to="to_compiled_amp"),
    )
    yield Goal(what="step of ResNet-18: `mixed` / torch.amp", bound=1.0, read=step("resnet18", "mixed"))
    yield Goal(
        what=f"step of any model: `{RECOMMENDED}` (recommended) / torch.amp, the worst",
        bound=1.0,
        read=worst(RECOMMENDED, "to_amp"),
    )
    yield Goal(
        what="step of any model under any preset / torch.amp, over the upper end of A/A, the worst",
        bound=1.0,
        read=slowest,
    )
    yield Goal(what="step over its limit: `pure`, the worst", bound=1.10, read=worst("pure", "to_limit"))
    for case, tensors in zip(HOST, ("10", "148"), strict=True):
        yield Goal(
            what=f"time beyond low passes, {tensors} tiny tensors: any preset / torch.amp, the worst",
            bound=0.5,
            read=host(case),
        )
    for label, bound in (("mixed", 0.87), ("pure", 0.72)):
        yield Goal(
            what=f"bytes saved for backward, GPT, d = 256: `{label}` / torch.amp",
            bound=bound,
            read=counted("saved_bytes", label),
        )
    for label, bound in (("mixed", 0.66), ("pure", 0.60)):
        linear = f"{label}, linear_cross_entropy"
        yield Goal(
            what=f"the same with `hs.linear_cross_entropy`: `{label}`", bound=bound, read=counted("saved_bytes", linear)
        )
        yield Goal(
            what=f"step of the GPT, d = 256, with `hs.linear_cross_entropy`: `{label}` / torch.amp",
            bound=1.0,
            read=step("gpt256", linear),
        )
    yield Goal(what="casts a step, GPT, d = 256: `pure` / torch.amp", bound=0.05, read=counted("casts", "pure"))
    what = "GPT on fake CUDA tensors, `pure` in fp16: "
    yield Goal(what=f"{what}casts a step", bound=4, read=fake_cuda(lambda s: s["casts"]), on="counts")
    yield Goal(what=f"{what}MiB moved a step", bound=560, read=fake_cuda(lambda s: s["bytes"] / MIB), on="counts")
    yield Goal(
        what=f"{what}bytes a parameter around the optimizer",
        bound=32,
        read=fake_cuda(lambda s: s["tail_bytes_per_parameter"] + s["weight_bytes_per_parameter"]),
        on="counts",
    )
    yield Goal(what=f"{what}launches of the tail", bound=6, read=fake_cuda(lambda s: s["launches_tail"]), on="counts")
    for case, name, bound in (
        ("gpt256_fp16", "the GPT, d = 256", 15.0),
        ("resnet18_fp16", "the residual net", 8.0),
        ("lenet5_fp16", "LeNet-5", 1.0),
    ):
        yield Goal(
            what=f"step of {name} in fp16: torch.amp / `mixed`",
            bound=bound,
            least=True,
            read=times_faster(case, "mixed"),
        )
    yield Goal(
        what="step in fp16: `mixed` / fp32, the worse of GPT and residual net", bound=1.35, read=slowest_fp16("mixed")
    )
    yield Goal(
        what="loss curve of 50 steps: deviation from fp32 / torch.amp's, the furthest of all presets",
        bound=FACTOR,
        read=furthest_curve,
    )
    yield Goal(
        what="page faults a step, any model and preset, alone in a process and among eight candidates",
        bound=300,
        read=most_faults,
    )
    for case, name in (("gpt512", "the GPT, d = 512, one sequence"), ("gpt256", "the GPT, d = 256")):
        for label in ("mixed", "mixed, low outputs"):
            yield Goal(
                what=f"forward pass of {name}: `{label}` / torch.amp", bound=1.0, read=step(case, label, on="serving")
            )
    for label in ("mixed", "O2", "pure"):
        yield Goal(
            what=f"decoding with a Llama, d = 256: `{label}` / torch.amp",
            bound=1.0,
            read=step("llama256", label, on="serving"),
        )
    yield Goal(
        what="GPU: step of GPT-2, 124M: `pure` / torch.amp",
        bound=0.80,
        read=step("gpt124m", "pure", on="gpu"),
        on="gpu",
    )
    yield Goal(
        what="GPU: the same, `pure` compiled / torch.amp compiled",
        bound=0.92,
        read=step("gpt124m", "pure compiled", to="to_compiled_amp", on="gpu"),
        on="gpu",
    )
    yield Goal(
        what="GPU: step of LeNet-5: `pure` captured / torch.amp",
        bound=0.20,
        read=step("lenet5", "pure captured", on="gpu"),
        on="gpu",
    )


def instrument_goals() -> Iterator[Goal]:
    """Return the goals of the instruments, in the order of their table."""
    models = (("gpt256", "the GPT, d = 256", 1.01), ("lenet5", "LeNet-5", 1.03))
    for case, name, bound in models:
        yield Goal(
            what=f"step of {name}: black box on / off",
            bound=bound,
            read=instrument(case, "turns", "rows", ON, "ratio"),
            on="lens",
        )
    for case, name, _ in models:
        yield Goal(
            what=f"step of {name}: `hs.Monitor(every=100)` / none",
            bound=1.02,
            read=instrument(case, "turns", "every", "100"),
            on="lens",
        )
    yield Goal(what="audit / as many training steps, the most expensive model", bound=8, read=dearest_audit, on="lens")
