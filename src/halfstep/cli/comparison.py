"""What was compared, as tables, pictures and sentences: the parts of the pages and the terminal of compare and demo."""

import dataclasses
import datetime
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import halfstep as hs
from halfstep import report as doc
from halfstep.cli.terminal import machine_line
from halfstep.tasks.candidates import AMP, FP32, SUFFIXES, amp_of
from halfstep.tasks.compare import CURVE_POINTS, CandidateRow, Comparison, Cost
from halfstep.tasks.measure import ENOUGH_SEEDS, WITHIN
from halfstep.timing import Ratio

SAME = "as much as fp32"
ALIKE = 1.01  # bytes that differ by less are not worth a decision
MARKS = {"within the margin": "full", "better": "full", "undecided": "hollow", "worse": "cross", "diverged": "cross"}
SMOOTHED = 20  # the curve of differences is a moving mean over one part in this many of its points
MOST_MARKS = 40  # crosses on one curve; a run that skips more is better told by its number


# ------------------------------------------------------------------ the page


def comparison_page(
    comparisons: Sequence[Comparison], *, about: Mapping[str, Any], command: str, day: datetime.date
) -> doc.Document:
    """Return the report of comparisons that ran together."""
    how = doc.method("compare", amp=amp_of(comparisons[0].rows).label, points=CURVE_POINTS)
    return doc.page(
        f"halfstep compare: {', '.join(c.task for c in comparisons)}",
        "What each precision policy did to the result, to the time of a step and to memory, beside fp32 and torch.amp. "
        f"{measured_on(about, day)}",
        [
            *_glance(comparisons),
            *map(comparison_section, comparisons),
            _policies(comparisons),
            measured(how, about, command),
        ],
        "halfstep compare --html",
    )


def measured_on(about: Mapping[str, Any], day: datetime.date) -> str:
    """Return when and on which machine something was measured."""
    sets = f" Instruction sets: {', '.join(about['instruction_sets'])}." if about["instruction_sets"] else ""
    rest = f"{about['system']}, halfstep {hs.__version__}"
    return f"Measured on {day.isoformat()}: {machine_line(about)}, {rest}.{sets}"


def measured(how: doc.Bullets, about: Mapping[str, Any], command: str) -> doc.Section:
    """Return the section on how something was measured, with the command and the machine."""
    facts = (
        (name.replace("_", " "), doc.listed(value) if isinstance(value, list) else str(value) or "none")
        for name, value in about.items()
    )
    again = doc.Paragraph("The command that asks for all of it again:")
    machine = doc.Details("The machine", (doc.table("Machine", ("what", "value"), facts),))
    return doc.Section("How it was measured", (how, again, doc.Code(command), machine))


def _glance(comparisons: Sequence[Comparison]) -> list[doc.Section]:
    """Return verdict and time of every policy, a column a task, of several tasks."""
    if len(comparisons) == 1:
        return []
    headers = ["policy"]
    rows: dict[str, list[str | doc.Cell]] = {}
    for comparison in comparisons:
        headers += [f"{comparison.task}: result", "time / fp32"]
        for row in comparison.rows[1:]:
            cells = rows.setdefault(row.label, [row.label])
            cells += [doc.judged(row.difference.verdict), _ratio(row.to_fp32, comparison.control)]
    table = doc.table("Every policy beside fp32", headers, rows.values())
    return [doc.Section("At a glance", (*_few_seeds(comparisons[0]), table))]


def _few_seeds(comparison: Comparison) -> tuple[doc.Note, ...]:
    count = len(comparison.seeds)
    if count >= ENOUGH_SEEDS:
        return ()
    runs = "one run" if count == 1 else f"{count} runs"
    return (doc.Note(f"An indication, not a verdict: {runs} of each policy. A verdict takes {ENOUGH_SEEDS}."),)


def comparison_section(comparison: Comparison) -> doc.Section:
    """Return what was found in a task, for the page and for the terminal."""
    blocks: list[doc.Block] = [doc.Paragraph(setting(comparison)), *_few_seeds(comparison)]
    if not comparison.repeatable:
        blocks.append(
            doc.Note(
                "The two runs of torch.amp did not end with the same result: runs on this machine are not "
                "repeatable, so part of every difference is chance."
            )
        )
    control, margin = comparison.control, f"{comparison.margin:.3g}"
    times = "No times: a run is too short for more than its warm-up."
    if control is not None:
        equal = "the same result, bit for bit" if comparison.repeatable else "NOT the same result"
        times = (
            f"Times are medians of paired ratios; undecided: finer than A/A, torch.amp twice = {control:.3f} ({equal})."
        )
    blocks += [
        doc.Facts(findings(comparison)),
        *galleries(comparison),
        result_table(comparison),
        doc.Paragraph(f"Within the margin: the difference's 90 % interval lies inside ±{margin}, fixed beforehand."),
        cost_table(comparison.rows, control),
        doc.Paragraph(times),
    ]
    return doc.Section(comparison.task, [*blocks, doc.Bullets(notes)] if (notes := _notes(comparison)) else blocks)


def setting(comparison: Comparison) -> str:
    """Return in words what was trained, how long, how often, and where."""
    about = f"{doc.sentence(comparison.about)} " if comparison.about else ""
    steps, seeds = doc.counted(comparison.steps, "step"), doc.counted(len(comparison.seeds), "seed")
    return f"{about}{steps}, {seeds}, on {comparison.device}; same weights, same batches, steps in turns."


def _policies(comparisons: Sequence[Comparison]) -> doc.Section:
    how = doc.Paragraph(
        "Each as a file that halfstep reads: save it as NAME.toml and pass it to --policies or hs.Policy.of(). "
        "fp32 and torch.amp are loops of torch alone."
    )
    texts = {row.label: row.policy for c in comparisons for row in c.rows if row.policy}
    return doc.Section("The policies", (how, *(doc.hidden(label, text) for label, text in texts.items())))


def result_table(comparison: Comparison) -> doc.Table:
    """Return what became of the result under every policy."""
    decimals = doc.Decimals(comparison.margin)
    headers = ("policy", comparison.metric, "minus fp32, 90 % interval", "verdict", "steps skipped", "loss scale")

    def cells(row: CandidateRow) -> tuple[str | doc.Cell, ...]:
        found, mean = row.difference, decimals(statistics.fmean(row.metrics))
        if row.label == FP32:
            return row.label, mean, "", "", _range(row.skipped), _range(row.scale)
        apart = decimals.signed(found.mean) if math.isfinite(found.mean) else ""
        if found.low is not None and found.high is not None:
            apart += f" [{decimals.signed(found.low)}, {decimals.signed(found.high)}]"
        return row.label, mean, apart, doc.judged(found.verdict), _range(row.skipped), _range(row.scale)

    return doc.table("Result", headers, map(cells, comparison.rows))


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def cost_table(rows: Sequence[Cost], control: Ratio | None, *, intervals: bool = False) -> doc.Table:
    """Return what a step takes; `control` is what this machine can resolve."""
    state, saved = doc.Size(row.state_bytes for row in rows), doc.Size(row.saved_bytes for row in rows)
    time = doc.Decimals(max((row.milliseconds for row in rows if math.isfinite(row.milliseconds)), default=1.0))
    headers = (
        "policy", "ms a step", "time / fp32", f"time / {amp_of(rows).label}", f"between steps, {state.unit}",
        f"saved for backward, {saved.unit}",
    )  # fmt: skip
    cells = (
        (
            row.label,
            time(row.milliseconds) if math.isfinite(row.milliseconds) else "",
            left_out(row) or _ratio(row.to_fp32, control, intervals=intervals),
            _ratio(row.to_amp, control, intervals=intervals),
            state(row.state_bytes),
            saved(row.saved_bytes),
        )
        for row in rows
    )
    return doc.table("Time and memory", headers, cells)


def _ratio(ratio: Ratio | None, control: Ratio | None, *, intervals: bool = False) -> doc.Cell:
    text = ratio_text(ratio, control, intervals=intervals)
    return doc.Cell(text, "open" if text.startswith("undecided") else "")


def _notes(comparison: Comparison) -> tuple[str, ...]:
    """Return the notes of the plans, each once behind its policies, and a note on what was left out."""
    notes: dict[str, list[str]] = {}
    for row in comparison.rows:
        for note in row.notes:
            notes.setdefault(note, []).append(row.label)
    lines = [f"{', '.join(labels)}: {note}" for note, labels in notes.items()]
    if comparison.device == "cpu" and not any(row.label == "torch.amp fp16" for row in comparison.rows):
        lines.append(
            "torch.amp fp16 was not run: on CPUs without fp16 units torch's fp16 kernels take many times fp32's time; "
            "--policies torch.amp:fp16 adds it"
        )
    return tuple(lines)


# ------------------------------------------------------------------ what was found, in words


def findings(comparison: Comparison) -> tuple[doc.Fact, ...]:
    """Return what the comparison found about result, time and memory."""
    return _result(comparison), _compared_time(comparison), _compared_memory(comparison)


def _result(comparison: Comparison) -> doc.Fact:
    others = [row for row in comparison.rows if row.label != FP32]
    groups: dict[str, list[str]] = {}
    for row in others:
        groups.setdefault(row.difference.verdict, []).append(row.label)
    same = groups.pop(WITHIN, [])
    near = f"{WITHIN} of {comparison.margin:.3g}{comparison.metric.partition(',')[2]}"
    if len(same) == len(others) == 1:
        text = f"{same[0]} ends {near}."
    elif len(same) == len(others):
        text = f"All {len(others)} end {near}."
    elif same:
        text = f"{len(same)} of {len(others)} end {near}: {doc.listed(same)}."
    elif set(groups) == {"undecided"}:
        del groups["undecided"]
        one = len(comparison.seeds) == 1
        text = f"Undecided: {'one seed has no interval' if one else 'the intervals cross the margin'}."
    else:
        text = f"None is {near}."
    words = {
        "better": "Better than fp32",
        "worse": "Worse than fp32",
        "diverged": "Diverged",
        "undecided": "Undecided, the interval crosses the margin",
    }
    more = [f"{words[verdict]}: {doc.listed(groups[verdict])}." for verdict in words if verdict in groups]
    skipped = [row.label for row in others if any(row.skipped)]
    if skipped:
        more.append(f"Skipped steps whose gradients overflowed: {doc.listed(skipped)}.")
    verdicts = {row.difference.verdict for row in others}
    tone = "bad" if verdicts & {"worse", "diverged"} else "open" if "undecided" in verdicts else "good"
    return doc.Fact(f"Result ({comparison.metric})", text, tuple(more), tone)


# ------------------------------------------------------------------ time


def ratio_text(ratio: Ratio | None, control: Ratio | None, *, intervals: bool = False) -> str:
    """Return a ratio, or that it is finer than `control` can resolve; "" if there is none."""
    if ratio is None or control is None:
        return ""
    shown = f"{ratio:.2f}" if intervals else f"{ratio.median:.3f}"
    return f"undecided ({shown})" if ratio.finer_than(control) else shown


def timed(rows: Sequence[Cost]) -> list[tuple[Cost, Ratio]]:
    """Return the rows in low formats that were timed, the fastest first."""
    timed = [(row, row.to_fp32) for row in rows if row.to_fp32 is not None and row.label != "O0"]
    return sorted(timed, key=lambda pair: pair[1].median)


def time_fact(heading: str, rows: Sequence[Cost], control: Ratio) -> doc.Fact:
    """Return which low format is fastest, and how torch.amp and halfstep's own fp32 compare; one was timed."""
    (best, ratio), *others = timed(rows)
    found = f"{ratio:.2f} of fp32's time"
    if ratio.finer_than(control):
        text = f"Undecided: {best.label} comes first with {found}, which this machine cannot tell from 1."
        tone = "open"
    elif ratio.median < 1.0:
        text, tone = f"Fastest: {best.label}, {found}.", "good"
    else:
        text, tone = f"fp32 is fastest. The nearest low format is {best.label}: {found}.", "bad"
    alike = [row.label for row, other in others if _alike(other, ratio, control)]
    more = [f"Cannot be told from it: {doc.listed(alike)}."] if alike else []
    if best.to_amp is not None:
        finer = ", undecided" if best.to_amp.finer_than(control) else ""
        more.append(f"Against {amp_of(rows).label}: {best.to_amp.median:.2f}{finer}.")
    for row in rows:
        if row.to_fp32 is not None and row is not best and row.label.startswith(("O0", AMP)):
            words = "halfstep's step in fp32 (O0)" if row.label == "O0" else row.label
            more.append(f"{words}: {ratio_text(row.to_fp32, control, intervals=True)}.")
    return doc.Fact(heading, text, tuple(more), tone)


def _alike(ratio: Ratio, other: Ratio, control: Ratio) -> bool:
    """Return whether two ratios to the same baseline differ by less than can be resolved."""
    overlap = ratio.low <= other.high and other.low <= ratio.high
    return overlap or abs(ratio.median / other.median - 1.0) <= control.resolution


def _compared_time(comparison: Comparison) -> doc.Fact:
    heading, rows = "Time of a step", comparison.rows
    if comparison.control is None:
        return doc.Fact(heading, "Not measured: a run is too short for more than its warm-up.", tone="open")
    fact = time_fact(heading, rows, comparison.control)
    costs = [(row, ratio.median) for row, ratio in timed(rows) if isinstance(row, CandidateRow)]
    return dataclasses.replace(fact, more=(*fact.more, *_caution(costs[0][0], costs)))


def _caution(best: CandidateRow, costs: Sequence[tuple[CandidateRow, float]]) -> list[str]:
    """Return a warning if the cheapest row did not keep the result, with the cheapest that did; `costs`: of each."""
    if best.difference.verdict in (WITHIN, "better"):
        return []
    safe = [(cost, row.label) for row, cost in costs if row.difference.verdict == WITHIN]
    first = f" First {WITHIN}: {min(safe, key=lambda pair: pair[0])[1]}." if safe else ""
    return [f"Its result is {best.difference.verdict}.{first}"]


# ------------------------------------------------------------------ memory


def saved_words(rows: Sequence[Cost]) -> tuple[str, list[Cost]]:
    """Return what saves least for backward, in words, and the rows that do; [] if none saves less than fp32."""
    fp32, *others = rows
    least = min(others, key=lambda row: row.saved_bytes)
    size = doc.Size(row.saved_bytes for row in rows)
    if least.saved_bytes >= fp32.saved_bytes:
        return f"None saves less for backward than fp32's {size(fp32.saved_bytes)} {size.unit}.", []
    alike = [row for row in others if row.saved_bytes <= ALIKE * least.saved_bytes]
    share = _change(least.saved_bytes, fp32.saved_bytes)
    labels = doc.listed([row.label for row in alike])
    return f"Least saved for backward: {labels}, {size(least.saved_bytes)} {size.unit} ({share}).", alike


def between_steps(rows: Sequence[Cost]) -> list[str]:
    """Return how the bytes between steps compare with fp32's, the smallest first."""
    fp32, *others = rows
    groups: dict[str, list[Cost]] = {}
    for row in sorted(others, key=lambda row: row.state_bytes):
        groups.setdefault(_change(row.state_bytes, fp32.state_bytes), []).append(row)
    if set(groups) == {SAME}:
        return ["Between steps all hold as much as fp32."]
    size = doc.Size(row.state_bytes for row in rows)
    return [
        f"Between steps {change}: {doc.listed([row.label for row in found])}, {size(found[0].state_bytes)} {size.unit}."
        for change, found in groups.items()
        if change != SAME
    ]


def _compared_memory(comparison: Comparison) -> doc.Fact:
    text, least = saved_words(comparison.rows)
    costs = [(row, row.saved_bytes) for row in comparison.rows[1:]]
    cheapest = min(costs, key=lambda pair: pair[1])[0]
    more = _caution(cheapest, costs) if len(least) <= 1 else []
    return doc.Fact("Memory", text, (*more, *between_steps(comparison.rows)), "good" if least else "open")


def _change(count: int, reference: int) -> str:
    change = round(100 * (count / reference - 1)) if reference else 0
    return f"{abs(change)} % {'more' if change > 0 else 'less'} than fp32" if change else SAME


# ------------------------------------------------------------------ pictures


def galleries(comparison: Comparison) -> tuple[doc.Gallery, ...]:
    """Return the pictures: result and time, memory, loss curves; a policy looks the same in all of them."""
    rows, control = comparison.rows, comparison.control
    amp, keys = amp_of(rows).label, _keys(rows)
    times: tuple[doc.Figure, ...] = ()
    if control is not None:
        caption = (
            f"Shorter is faster; medians with their 90 % intervals. Dashed: {amp}. The band behind it is what "
            f"two identical runs differ by, {control:.3f}; differences finer than that are undecided."
        )
        times = (time_figure(f"Time of a step over {amp}'s", caption, rows, amp, control),)
    return (
        doc.Gallery((_result_figure(comparison, keys), *times)),
        memory_gallery(rows, rows),
        doc.Gallery(_loss_figures(comparison, keys), tuple((row.label, keys[row.label]) for row in rows)),
    )


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
