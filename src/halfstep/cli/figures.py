"""The pictures of a comparison: result, time, memory and loss curves, with what they say in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from halfstep.cli.numbers import Decimals, Size, minus
from halfstep.cli.tables import amp_label, ratio_text
from halfstep.report import Bar, BarChart, Dot, DotChart, Figure, Gallery, Key, LineChart, Series
from halfstep.tasks.candidates import FP32, SUFFIXES
from halfstep.tasks.compare import Comparison
from halfstep.timing import Ratio

__all__ = ["galleries"]

MARKS = {"within noise": "full", "better": "full", "undecided": "hollow", "worse": "cross", "diverged": "cross"}
SMOOTHED = 20  # the curve of differences is a moving mean over one part in this many of its points
MOST_MARKS = 40  # crosses on one curve; a run that skips more is better told by its number


def galleries(comparison: Comparison) -> tuple[Gallery, ...]:
    """Return the pictures: result and time, memory, loss curves; a policy looks the same in all of them."""
    keys = _keys(comparison)
    return (
        Gallery(figures=(_result_figure(comparison, keys), *_time_figures(comparison, keys))),
        Gallery(figures=_byte_figures(comparison, keys)),
        Gallery(
            figures=_loss_figures(comparison, keys),
            legend=tuple((row.label, keys[row.label]) for row in comparison.rows),
        ),
    )


def _keys(comparison: Comparison) -> dict[str, Key]:
    """Return how each row looks: fp32 in the colour of text, a hue a policy, paler where its second format is."""
    hues: dict[str, int] = {}
    keys = {}
    for row in comparison.rows:
        name, _, dtype = row.label.rpartition(" ")
        name = name if name and dtype in SUFFIXES else row.label
        light = name in hues
        hue = 0 if row.label == FP32 else hues.setdefault(name, len(hues) + 1)
        keys[row.label] = Key(colour=hue, light=light)
    return keys


def _result_figure(comparison: Comparison, keys: Mapping[str, Key]) -> Figure:
    decimals = Decimals.of(comparison.margin)
    dots = []
    for row in comparison.rows:
        if row.label == FP32:
            mean = decimals(statistics.fmean(row.metrics))
            dots.append(Dot(label=row.label, text=f"reference, {mean}", value=0.0, key=keys[row.label]))
            continue
        difference = row.difference
        finite = math.isfinite(difference.mean)
        dots.append(
            Dot(
                label=row.label,
                text=f"{decimals.signed(difference.mean)} {difference.verdict}" if finite else difference.verdict,
                value=difference.mean if finite else None,
                low=difference.low,
                high=difference.high,
                mark=MARKS[difference.verdict],
                key=keys[row.label],
            )
        )
    margin = minus(f"{comparison.margin:.3g}")
    better = "right" if comparison.higher_is_better else "left"
    caption = (
        f"Dots are means over the seeds, lines their 90 % intervals; shaded is the margin of ±{margin} within which a "
        f"difference counts as none. Better is to the {better}. Hollow dots are undecided, crosses are worse."
    )
    if len(comparison.seeds) == 1:
        caption = f"Shaded is the margin of ±{margin}. One seed has no interval and decides nothing."
    return Figure(
        heading="Result, difference from fp32",
        caption=caption,
        alt=_alt(f"Difference of {comparison.metric} from fp32, margin ±{margin}", dots),
        chart=DotChart(x_label=f"{comparison.metric}, minus fp32", dots=tuple(dots), margin=comparison.margin),
    )


def _time_figures(comparison: Comparison, keys: Mapping[str, Key]) -> tuple[Figure, ...]:
    control, amp = comparison.control, amp_label(comparison)
    if control is None:
        return ()
    bars = []
    for row in comparison.rows:
        ratio = row.to_amp or Ratio(median=1.0, low=1.0, high=1.0, rounds=control.rounds)
        bars.append(
            Bar(
                label=row.label,
                text=ratio_text(row.to_amp, control) if row.to_amp else "reference",
                value=ratio.median,
                low=ratio.low if row.to_amp else None,
                high=ratio.high if row.to_amp else None,
                key=keys[row.label],
            )
        )
    return (
        Figure(
            heading=f"Time of a step over {amp}'s",
            caption=f"Shorter is faster; medians with their 90 % intervals. Dashed: {amp}. The band behind it is what "
            f"two identical runs differ by, {control.median:.3f} [{control.low:.3f}, {control.high:.3f}]; differences "
            "finer than that are undecided.",
            alt=_alt(f"Time of a step over that of {amp}", bars),
            chart=BarChart(
                x_label=f"time / {amp}",
                bars=tuple(bars),
                line=1.0,
                band=(min(control.low, 1.0), max(control.high, 1.0)),
            ),
        ),
    )


def _byte_figures(comparison: Comparison, keys: Mapping[str, Key]) -> tuple[Figure, ...]:
    fp32 = comparison.rows[0]
    kinds = (
        (
            "Memory between steps",
            "Parameters, buffers, optimizer state and fp32 masters.",
            {row.label: row.state_bytes for row in comparison.rows},
            fp32.state_bytes,
        ),
        (
            "Memory saved for backward",
            "What autograd keeps from forward to backward in one step; it grows with the batch.",
            {row.label: row.saved_bytes for row in comparison.rows},
            fp32.saved_bytes,
        ),
    )
    figures = []
    for heading, caption, found, reference in kinds:
        size = Size.of(found.values())
        bars = tuple(
            Bar(
                label=label,
                text=f"{size(count)} {size.unit}{_share(count, reference)}",
                value=count / size.bytes,
                key=keys[label],
            )
            for label, count in found.items()
        )
        figures.append(
            Figure(
                heading=heading,
                caption=f"{caption} Dashed: fp32.",
                alt=_alt(heading, bars),
                chart=BarChart(x_label=size.unit, bars=bars, line=reference / size.bytes),
            )
        )
    return tuple(figures)


def _share(count: int, reference: int) -> str:
    """Return the difference from fp32 in whole per cent, "" if there is none."""
    change = round(100 * (count / reference - 1)) if reference else 0
    return minus(f" ({change:+} %)") if change else ""


def _loss_figures(comparison: Comparison, keys: Mapping[str, Key]) -> tuple[Figure, ...]:
    steps = comparison.loss_steps
    curves = []
    for row in comparison.rows:
        skipped = sorted({step + 1 for seed in row.skipped_steps for step in seed})
        marks = tuple(map(float, skipped)) if len(skipped) <= MOST_MARKS else ()
        curves.append(Series(label=row.label, x=steps, y=row.losses, marks=marks, key=keys[row.label]))
    width = max(1, len(steps) // SMOOTHED)
    reference = curves[0].y
    apart = tuple(
        Series(
            label=curve.label,
            x=steps,
            y=_smoothed([a - b for a, b in zip(curve.y, reference, strict=True)], width),
            key=curve.key,
        )
        for curve in curves[1:]
    )
    per = math.ceil(comparison.steps / len(steps))
    mean = "A mean over the seeds" if len(comparison.seeds) > 1 else "Of the one seed"
    points = f", and over {per} steps a point" if per > 1 else ""
    crosses = " Crosses mark steps that were skipped." if any(curve.marks for curve in curves) else ""
    ends = [f"{c.label} {_said(c.y[0], '.3g')} to {_said(c.y[-1], '.3g')}" for c in curves]
    last = [f"{c.label} {_said(c.y[-1], '+.2g')}" for c in apart]
    positive = [y for c in curves for y in c.y if math.isfinite(y)]
    log = bool(positive) and min(positive) > 0 and max(positive) > 10 * min(positive)
    scale = " The scale is logarithmic." if log else ""
    return (
        Figure(
            heading="Training loss",
            caption=f"{mean}{points}.{crosses}{scale}",
            alt=f"Training loss over {comparison.steps} steps, from its first to its last point: {'; '.join(ends)}.",
            chart=LineChart(x_label="step", series=tuple(curves), log=log),
        ),
        Figure(
            heading="Training loss minus fp32's",
            caption=f"On the same batches{f'; a moving mean over {width} points' if width > 1 else ''}. "
            "Zero is fp32; around it is the noise of rounding.",
            alt=f"Difference of the training loss from fp32's, at the end: {'; '.join(last)}.",
            chart=LineChart(x_label="step", series=apart, zero_line=True),
        ),
    )


def _said(number: float, form: str) -> str:
    return minus(f"{number:{form}}") if math.isfinite(number) else "not finite"


def _smoothed(values: Sequence[float], width: int) -> tuple[float, ...]:
    """Return the mean of the finite values among `width` around each; a gap where the value itself is not finite."""
    smooth = []
    for place, value in enumerate(values):
        around = values[max(0, place - width // 2) : place + width // 2 + 1]
        smooth.append(statistics.fmean(filter(math.isfinite, around)) if math.isfinite(value) else math.nan)
    return tuple(smooth)


def _alt(what: str, rows: Sequence[Bar] | Sequence[Dot]) -> str:
    return f"{what}: {'; '.join(f'{row.label} {row.text}' for row in rows)}."
