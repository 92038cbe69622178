"""The pictures of a comparison: result, time, memory and loss curves, with what they say in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from halfstep import report as doc
from halfstep.tasks.candidates import AMP, FP32, SUFFIXES
from halfstep.tasks.compare import Comparison, Cost
from halfstep.timing import Ratio

MARKS = {"within the margin": "full", "better": "full", "undecided": "hollow", "worse": "cross", "diverged": "cross"}
SMOOTHED = 20  # the curve of differences is a moving mean over one part in this many of its points
MOST_MARKS = 40  # crosses on one curve; a run that skips more is better told by its number


def galleries(comparison: Comparison) -> tuple[doc.Gallery, ...]:
    """Return the pictures: result and time, memory, loss curves; a policy looks the same in all of them."""
    rows, control = comparison.rows, comparison.control
    amp, keys = amp_label(rows), _keys(rows)
    times: tuple[doc.Figure, ...] = ()
    if control is not None:
        caption = (
            f"Shorter is faster; medians with their 90 % intervals. Dashed: {amp}. The band behind it is what "
            f"two identical runs differ by, {control.median:.3f} [{control.low:.3f}, {control.high:.3f}]; differences "
            "finer than that are undecided."
        )
        times = (time_figure(f"Time of a step over {amp}'s", caption, rows, amp, control),)
    return (
        doc.Gallery((_result_figure(comparison, keys), *times)),
        memory_gallery(rows, rows),
        doc.Gallery(_loss_figures(comparison, keys), tuple((row.label, keys[row.label]) for row in rows)),
    )


def amp_label(rows: Iterable[Cost]) -> str:
    """Return the label of torch.amp's row."""
    return next(row.label for row in rows if row.label.startswith(AMP))


def interval(ratio: Ratio) -> str:
    """Return ``0.56 [0.55, 0.57]``."""
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def ratio_text(ratio: Ratio | None, control: Ratio | None, *, intervals: bool = False) -> str:
    """Return a ratio, or that it is finer than `control` can resolve; "" if there is none."""
    if ratio is None or control is None:
        return ""
    shown = interval(ratio) if intervals else f"{ratio.median:.3f}"
    return f"undecided ({shown})" if ratio.finer_than(control) else shown


def left_out(row: Cost) -> str:
    """Return why a candidate was not timed."""
    return f"over {row.slow:.0f}, left out" if row.slow else ""


def _keys(rows: Iterable[Cost]) -> dict[str, doc.Key]:
    """Return how each row looks: fp32 in the colour of text, a hue a policy, paler where its second format is."""
    hues: dict[str, int] = {}
    keys = {}
    for row in rows:
        name, _, dtype = row.label.rpartition(" ")
        name = name if name and dtype in SUFFIXES else row.label
        light = name in hues
        keys[row.label] = doc.Key(0 if row.label == FP32 else hues.setdefault(name, len(hues) + 1), light)
    return keys


def _result_figure(comparison: Comparison, keys: Mapping[str, doc.Key]) -> doc.Figure:
    decimals = doc.Decimals(comparison.margin)
    dots = []
    for row in comparison.rows:
        found, key = row.difference, keys[row.label]
        if row.label == FP32:
            dots.append(doc.Dot(row.label, f"reference, {decimals(statistics.fmean(row.metrics))}", 0.0, key=key))
        elif math.isfinite(found.mean):
            text = f"{decimals.signed(found.mean)} {found.verdict}"
            dots.append(doc.Dot(row.label, text, found.mean, found.low, found.high, key, MARKS[found.verdict]))
        else:
            dots.append(doc.Dot(row.label, found.verdict, None, key=key))
    margin = doc.minus(f"{comparison.margin:.3g}")
    better = "right" if comparison.higher_is_better else "left"
    caption = (
        f"Dots are means over the seeds, lines their 90 % intervals; shaded is the margin of ±{margin} within which a "
        f"difference counts as none. Better is to the {better}. Hollow dots are undecided, crosses are worse."
    )
    if len(comparison.seeds) == 1:
        caption = f"Shaded is the margin of ±{margin}. One seed has no interval and decides nothing."
    return doc.Figure(
        "Result, difference from fp32",
        caption,
        doc.spoken(f"Difference of {comparison.metric} from fp32, margin ±{margin}", dots),
        doc.DotChart(f"{comparison.metric}, minus fp32", tuple(dots), comparison.margin),
    )


def time_figure(heading: str, caption: str, rows: Sequence[Cost], baseline: str, control: Ratio) -> doc.Figure:
    """Return the time of a step over that of the candidate `baseline`, fp32 or torch.amp, as bars."""
    keys, bars = _keys(rows), []
    for row in rows:
        ratio = row.to_fp32 if baseline == FP32 else row.to_amp
        if ratio is not None:
            text, ends = ratio_text(ratio, control), (ratio.median, ratio.low, ratio.high)
            bars.append(doc.Bar(row.label, text, *ends, keys[row.label]))
        else:
            why = left_out(row)
            bars.append(doc.Bar(row.label, why or "reference", None if why else 1.0, key=keys[row.label]))
    band = (min(control.low, 1.0), max(control.high, 1.0))
    chart = doc.BarChart(f"time / {baseline}", tuple(bars), 1.0, band)
    return doc.Figure(heading, caption, doc.spoken(f"Time of a step over that of {baseline}", bars), chart)


def memory_gallery(state: Sequence[Cost], saved: Sequence[Cost], of_state: str = "", of_saved: str = "") -> doc.Gallery:
    """Return the bytes between steps, and those kept for backward, of models that are named if they are not one."""
    between = f"Parameters, buffers, optimizer states, fp32 masters and gradients that stay.{of_state}"
    kept = f"What autograd keeps from forward to backward in one step; it grows with the batch.{of_saved}"
    return doc.Gallery(
        (
            _bytes_figure("Memory between steps", between, state, "state_bytes"),
            _bytes_figure("Memory saved for backward", kept, saved, "saved_bytes"),
        )
    )


def _bytes_figure(heading: str, caption: str, rows: Sequence[Cost], field: str) -> doc.Figure:
    """Return the bytes in a field of each row as bars, fp32's, the first ones, as a line across them."""
    keys, counts = _keys(rows), {row.label: getattr(row, field) for row in rows}
    size, reference = doc.Size(counts.values()), counts[FP32]
    bars = tuple(
        doc.Bar(label, f"{size(n)} {size.unit}{_share(n, reference)}", n / size.bytes, key=keys[label])
        for label, n in counts.items()
    )
    chart = doc.BarChart(size.unit, bars, line=reference / size.bytes)
    return doc.Figure(heading, f"{caption} Dashed: fp32.", doc.spoken(heading, bars), chart)


def _share(count: int, reference: int) -> str:
    change = round(100 * (count / reference - 1)) if reference else 0
    return doc.minus(f" ({change:+} %)") if change else ""


def _loss_figures(comparison: Comparison, keys: Mapping[str, doc.Key]) -> tuple[doc.Figure, ...]:
    steps = comparison.loss_steps
    curves = []
    for row in comparison.rows:
        skipped = sorted({step + 1 for seed in row.skipped_steps for step in seed})
        marks = tuple(map(float, skipped)) if len(skipped) <= MOST_MARKS else ()
        curves.append(doc.Series(row.label, steps, row.losses, marks, keys[row.label]))
    width = max(1, len(steps) // SMOOTHED)
    differences = ([a - b for a, b in zip(curve.y, curves[0].y, strict=True)] for curve in curves[1:])
    apart = tuple(
        doc.Series(curve.label, steps, _smoothed(values, width), key=curve.key)
        for curve, values in zip(curves[1:], differences, strict=True)
    )
    per = math.ceil(comparison.steps / len(steps))
    mean = "A mean over the seeds" if len(comparison.seeds) > 1 else "Of the one seed"
    points = f", and over {per} steps a point" if per > 1 else ""
    crosses = " Crosses mark steps that were skipped." if any(curve.marks for curve in curves) else ""
    ends = [f"{c.label} {_said(c.y[0], '.3g')} to {_said(c.y[-1], '.3g')}" for c in curves]
    last = [f"{c.label} {_said(c.y[-1], '+.2g')}" for c in apart]
    finite = [y for c in curves for y in c.y if math.isfinite(y)]
    log = bool(finite) and min(finite) > 0 and max(finite) > 10 * min(finite)
    moving = f"; a moving mean over {width} points" if width > 1 else ""
    return (
        doc.Figure(
            "Training loss",
            f"{mean}{points}.{crosses}{' The scale is logarithmic.' if log else ''}",
            f"Training loss over {comparison.steps} steps, from its first to its last point: {'; '.join(ends)}.",
            doc.LineChart("step", tuple(curves), log),
        ),
        doc.Figure(
            "Training loss minus fp32's",
            f"On the same batches{moving}. Zero is fp32; around it is the noise of rounding.",
            f"Difference of the training loss from fp32's, at the end: {'; '.join(last)}.",
            doc.LineChart("step", apart, zero_line=True),
        ),
    )


def _said(number: float, form: str) -> str:
    return doc.minus(f"{number:{form}}") if math.isfinite(number) else "not finite"


def _smoothed(values: Sequence[float], width: int) -> tuple[float, ...]:
    """Return the mean of the finite values among `width` around each; a gap where the value itself is not finite."""
    smooth = []
    for place, value in enumerate(values):
        around = values[max(0, place - width // 2) : place + width // 2 + 1]
        smooth.append(statistics.fmean(filter(math.isfinite, around)) if math.isfinite(value) else math.nan)
    return tuple(smooth)
