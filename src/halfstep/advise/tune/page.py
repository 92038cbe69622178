"""The page of a search: what to use and why in sentences, the front of time and loss, the proof, and all candidates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from halfstep.advise.tune.proof import Proof
from halfstep.advise.tune.result import Tried, Tuning
from halfstep.report import (
    Block,
    Bullets,
    Cell,
    Code,
    Details,
    Document,
    Dot,
    DotChart,
    Fact,
    Facts,
    Figure,
    Gallery,
    Key,
    LineChart,
    Note,
    Paragraph,
    Point,
    PointChart,
    Section,
    Series,
    Table,
)
from halfstep.tasks.candidates import FP32
from halfstep.timing import Ratio

__all__ = ["tuning_page"]

TONES = {"equivalent": "good", "better": "good", "worse": "bad", "diverged": "bad", "undecided": "open"}
SHOWN = {"chosen": "good", "within": "good", "worse": "bad", "failed": "bad"}
KEYS = {"within": Key(colour=3), "worse": Key(colour=2), "failed": Key(colour=2)}
CHOSEN, OTHER = Key(colour=1), Key(colour=4)
LEAST_BOUND = 1e-9
"""Of a loss rise, as the axis has to have one."""

METHOD = (
    "Time: every candidate takes its steps in turns with fp32, with the same batches, in an order shuffled anew; the "
    "median of the ratios within a round and its 90 % interval. Slower ones are dropped early.",
    "Memory: counted, not sampled: what lives between steps, and what autograd keeps for the backward pass.",
    "Loss rise: how much higher the training loss ends than fp32's from the same start with the same batches.",
    "Error of the gradients: relative, against fp32 on the same weights and batches; the root mean square over the "
    "parameters.",
    "Proof: fp32 is trained with several seeds, which fix the margin. Then the policy is trained from the same starts. "
    "Equivalent: the 90 % interval of the difference lies inside the margin (two one-sided tests, each at 5 %). The "
    "number of seeds follows from the spread of the first pairs, not from their mean, and the test is made once.",
    "When a candidate fails the proof, the next one is tested; each test alone lets a policy at the margin pass in 5 % "
    "of the cases.",
)


def tuning_page(tuning: Tuning) -> Document:
    """Return the report of a search."""
    sections = [
        _conclusion(tuning),
        _exceptions(tuning),
        _front(tuning),
        _proof(tuning),
        _table(tuning),
        _policy(tuning),
        _method(tuning),
    ]
    return Document(
        title=f"halfstep tune: {tuning.task}",
        lead=_lead(tuning),
        sections=tuple(section for section in sections if section.blocks),
        footer="Made by halfstep tune. This file is complete: it loads nothing and runs no script.",
    )


# ------------------------------------------------------------------ conclusion


def _lead(tuning: Tuning) -> str:
    here = tuning.machine
    on = f", {here['accelerator']}" if here.get("accelerator") else ""
    return (
        f"The cheapest policy that was found for this task on this machine, with the target {tuning.target}. "
        f"{here.get('cpu', 'unknown processor')}, {here.get('cores')} cores{on}; torch {here.get('torch')}, "
        f"{tuning.seconds / 60:.1f} minutes."
    )


def _conclusion(tuning: Tuning) -> Section:
    chosen, fp32 = tuning.chosen, _fp32(tuning)
    facts = (_time_fact(tuning), _memory_fact(chosen, fp32), _result_fact(tuning))
    blocks: list[Block] = []
    if not tuning.finished:
        blocks.append(Note(text="The search did not come to its end: this is the best candidate so far."))
    blocks += [
        Paragraph(text=_in_words(tuning)),
        Code(text=_how(tuning)),
        Facts(facts=tuple(fact for fact in facts if fact)),
    ]
    if tuning.notes or tuning.advice:
        blocks.append(Bullets(items=tuple(map(_sentence, (*tuning.notes, *tuning.advice)))))
    return Section(heading="Conclusion", blocks=tuple(blocks))


def _in_words(tuning: Tuning) -> str:
    """Return the conclusion as two or three sentences."""
    chosen, proof, fp32 = tuning.chosen, tuning.proof, _fp32(tuning)
    if tuning.is_fp32:
        return f"Stay with fp32, the preset {chosen.label}: {chosen.reason}."
    gains = []
    if chosen.time is not None:
        gains.append(f"{_times(chosen.time)} of fp32's time for a step")
    if chosen.bytes and fp32.bytes:
        gains.append(f"{chosen.bytes / fp32.bytes:.2f} of its memory")
    first = f"Train with {chosen.label}" + (f": it takes {' and '.join(gains)}." if gains else ".")
    first += f" {_sentence(_without_proof(chosen.reason, proof))}"
    if proof is None:
        return f"{first} Whether it trains as fp32 does was not tested."
    ends = {
        "equivalent": "It trains as fp32 does:",
        "better": "It ends better than fp32:",
        "worse": "It ends worse than fp32:",
        "diverged": "Its training failed:",
        "undecided": "Whether it trains as fp32 does is undecided:",
    }
    return f"{first} {ends[proof.verdict]} {proof.reason}."


def _without_proof(reason: str, proof: Proof | None) -> str:
    """Return why a candidate was chosen, without the verdict that has a sentence of its own."""
    return reason if proof is None else reason.partition(f"; {proof.verdict}")[0]


def _how(tuning: Tuning) -> str:
    argument = ", compile=True" if tuning.compile else ""
    return f'step = hs.TrainStep(model, optimizer, loss_fn, policy="policy.toml"{argument})'


def _time_fact(tuning: Tuning) -> Fact | None:
    chosen = tuning.chosen
    if chosen.time is None:
        return None
    more = [f"90 % interval {chosen.time.low:.3f} to {chosen.time.high:.3f}, {chosen.time.rounds} rounds"]
    if math.isfinite(chosen.milliseconds):
        more.append(f"{chosen.milliseconds:.3g} ms a step")
    if math.isfinite(chosen.predicted):
        more.append(f"predicted {chosen.predicted:.3f} from its changes one by one")
    if tuning.control is not None:
        more.append(f"identical runs differ by {tuning.control.low:.3f} to {tuning.control.high:.3f}")
    faster = chosen.time.high < 1.0 and not (tuning.control and chosen.time.finer_than(tuning.control))
    text = f"{_times(chosen.time)} of fp32's"
    return Fact(heading="Time of a step", text=text, more=tuple(map(_sentence, more)), tone="good" if faster else "")


def _memory_fact(chosen: Tried, fp32: Tried) -> Fact | None:
    if not chosen.bytes or not fp32.bytes:
        return None
    more = [
        f"between steps {_mb(chosen.state_bytes)}, fp32 {_mb(fp32.state_bytes)}",
        f"for the backward pass {_mb(chosen.saved_bytes)}, fp32 {_mb(fp32.saved_bytes)}",
    ]
    if chosen.predicted_bytes:
        more.append(f"predicted {_mb(chosen.predicted_bytes)}, counted {_mb(chosen.bytes)}")
    tone = "good" if chosen.bytes < fp32.bytes else ""
    text = f"{chosen.bytes / fp32.bytes:.2f} of fp32's"
    return Fact(heading="Memory", text=text, more=tuple(map(_sentence, more)), tone=tone)


def _result_fact(tuning: Tuning) -> Fact:
    proof = tuning.proof
    if tuning.is_fp32:
        return Fact(heading="Result", text="fp32", more=("It is what the others are compared with.",))
    if proof is None:
        return Fact(heading="Result", text="not tested", more=("No training beside fp32 was made.",), tone="open")
    more = [proof.reason, f"margin: {proof.margin_from}"] if proof.margin_from else [proof.reason]
    if proof.seeds_more > 0 and math.isfinite(proof.seconds_more):
        more.append(f"these would take about {proof.seconds_more:.0f} s")
    return Fact(heading="Beside fp32", text=proof.verdict, more=tuple(map(_sentence, more)), tone=TONES[proof.verdict])


def _exceptions(tuning: Tuning) -> Section:
    chosen = tuning.chosen
    if not chosen.changes:
        return Section(heading="Exceptions", blocks=())
    rows = tuple((Cell(text=str(c)), Cell(text=_sentence(c.why), tone="words")) for c in chosen.changes)
    caption = f"How it differs from the preset {chosen.preset}"
    table = Table(caption=caption, headers=("change", "why"), rows=rows)
    return Section(heading="Exceptions", blocks=(table,))


# ------------------------------------------------------------------ the front


def _front(tuning: Tuning) -> Section:
    fp32 = _fp32(tuning)
    figures = [_plane(tuning, "Time and loss", "time of a step / fp32's", lambda t: t.time.median if t.time else None)]
    if fp32.bytes:
        share = lambda t: t.bytes / fp32.bytes if t.bytes else None  # noqa: E731
        figures.append(_plane(tuning, "Memory and loss", "memory / fp32's", share))
    legend = (("chosen", CHOSEN), ("within the bound", KEYS["within"]), ("beyond it", KEYS["worse"]), ("other", OTHER))
    shown = tuple(figure for figure in figures if figure)
    how = Paragraph(
        text=f"Each point is a candidate; the farther left and the lower, the better. The bound is a loss rise of "
        f"{_percent(tuning.bound)}: {tuning.bound_from}. Crosses failed or lie beyond it. The stepped line joins "
        "candidates that no other undercuts in both."
    )
    return Section(heading="Every candidate", blocks=(how, Gallery(figures=shown, legend=legend)) if shown else ())


def _plane(tuning: Tuning, heading: str, x_label: str, place: Callable[[Tried], float | None]) -> Figure | None:
    points, front = [], []
    order = sorted(tuning.tried, key=lambda t: (t.label == tuning.chosen.label, t.label == FP32, t.verdict == "within"))
    for tried in order:
        x = place(tried)
        if x is None or math.isnan(tried.loss_rise):
            continue
        y = 100 * tried.loss_rise
        chosen = tried.label == tuning.chosen.label
        bad = tried.verdict in {"worse", "failed"} or not math.isfinite(y)
        key = CHOSEN if chosen else Key() if tried.label == FP32 else KEYS.get(tried.verdict, OTHER)
        plain = not tried.changes and not tried.compile
        mark = "chosen" if chosen else "cross" if bad else "full"
        points.append(Point(label=tried.label, x=x, y=y, named=chosen or plain, mark=mark, key=key))
        if math.isfinite(y):
            front.append((x, y))
    if len(points) < 2:
        return None
    lowest = math.inf
    stairs = []
    for x, y in sorted(front):
        if y < lowest:
            stairs.append((x, y))
            lowest = y
    chart = PointChart(
        x_label=x_label, y_label="loss rise, %", points=tuple(points), limit=100 * max(tuning.bound, LEAST_BOUND),
        limit_label="bound", front=tuple(stairs),
    )  # fmt: skip
    missing = sum(1 for tried in tuning.tried if math.isnan(tried.loss_rise))
    caption = f"{len(points)} candidates"
    if missing:
        caption += f", without {missing} whose loss was not measured"
    return Figure(
        heading=heading, caption=f"{caption}.", alt=f"{x_label} and loss rise of every candidate.", chart=chart
    )


# ------------------------------------------------------------------ the proof


def _proof(tuning: Tuning) -> Section:
    proof = tuning.proof
    if proof is None:
        return Section(heading="Proof", blocks=())
    runs = f"{_counted(len(proof.values), 'training')} of {_counted(proof.steps, 'step')}"
    words = [f"{runs} each, from the same starts as fp32, with the same batches. {_sentence(proof.reason)}"]
    if len(tuning.proofs) > 1:
        words.append(f"{len(tuning.proofs)} candidates were tested, one after the other.")
    figures = [_curves(proof, tuning.chosen.label), _interval(tuning)]
    blocks: list[Block] = [Paragraph(text=" ".join(words))]
    legend = ((FP32, Key()), (tuning.chosen.label, CHOSEN))
    if any(figures):
        blocks.append(Gallery(figures=tuple(f for f in figures if f), legend=legend))
    if proof.values:
        blocks.append(Details(summary="Every training", blocks=(_runs(proof),)))
    return Section(heading="Proof", blocks=tuple(blocks))


def _curves(proof: Proof, label: str) -> Figure | None:
    if not proof.losses:
        return None
    fp32 = Series(label=FP32, x=proof.loss_steps, y=proof.fp32_losses)
    own = Series(label=label, x=proof.loss_steps, y=proof.losses, key=CHOSEN)
    return Figure(
        heading="Training loss",
        caption="Mean over the seeds; the wide pale line is fp32.",
        alt=f"Training loss of fp32 and of {label} over {proof.steps} steps.",
        chart=LineChart(x_label="step", series=(fp32, own), log=True),
    )


def _interval(tuning: Tuning) -> Figure | None:
    dots = []
    for label, proof in tuning.proofs or ((tuning.chosen.label, tuning.proof),):
        if proof is None or proof.difference is None or not math.isfinite(proof.margin):
            continue
        found = proof.difference
        mark = "full" if proof.holds else "hollow" if proof.verdict == "undecided" else "cross"
        own = label == tuning.chosen.label
        dots.append(Dot(label=label, text=proof.verdict, value=found.mean, low=found.low, high=found.high, mark=mark,
                        key=CHOSEN if own else OTHER))  # fmt: skip
    chosen = tuning.proof
    if not dots or chosen is None:
        return None
    return Figure(
        heading="Difference from fp32",
        caption=f"Mean difference of the pairs and its 90 % interval; inside the margin it counts as none. "
        f"Margin: {chosen.margin_from}.",
        alt="Difference from fp32 with its interval, beside the margin.",
        chart=DotChart(x_label=f"{chosen.measure} minus fp32's", dots=tuple(dots), margin=chosen.margin),
    )


def _runs(proof: Proof) -> Table:
    rows = []
    for number, (own, fp32) in enumerate(zip(proof.values, proof.fp32, strict=False)):
        texts = (str(number + 1), f"{fp32:.5g}", f"{own:.5g}", f"{own - fp32:+.3g}", str(proof.skipped[number]))
        rows.append(tuple(Cell(text=text) for text in texts))
    if len(proof.fp32) > 1:
        spread = statistics.stdev(proof.fp32) if all(map(math.isfinite, proof.fp32)) else math.nan
        rows.append(tuple(Cell(text=t) for t in ("spread", f"{spread:.3g}", "", "", "")))
    headers = ("seed", "fp32", "policy", "difference", "steps skipped")
    return Table(caption=f"{proof.measure} at the end", headers=headers, rows=tuple(rows))


# ------------------------------------------------------------------ tables


def _table(tuning: Tuning) -> Section:
    fp32 = _fp32(tuning)
    rows = []
    for tried in tuning.tried:
        memory = f"{tried.bytes / fp32.bytes:.2f}" if tried.bytes and fp32.bytes else ""
        time = f"{tried.time.median:.3f} \N{PLUS-MINUS SIGN}{_half(tried.time):.3f}" if tried.time else ""
        rows.append(
            (
                Cell(text=tried.label, tone="words"),
                Cell(text=tried.verdict, tone=SHOWN.get(tried.verdict, "")),
                Cell(text=time),
                Cell(text=memory),
                Cell(text=_percent(tried.loss_rise)),
                Cell(text="" if math.isnan(tried.error) else f"{tried.error:.2g}"),
                Cell(text=_sentence(_without_proof(tried.reason, tuning.proof)), tone="words"),
            )
        )
    table = Table(
        caption=f"{len(rows)} candidates, in the order in which they were tried",
        headers=("candidate", "verdict", "time / fp32", "memory / fp32", "loss rise", "gradient error", "why"),
        rows=tuple(rows),
    )
    return Section(heading="Tried", blocks=(table,))


def _policy(tuning: Tuning) -> Section:
    argument = " and compile=True" if tuning.compile else ""
    how = Paragraph(text=f'Save it as policy.toml and give TrainStep policy="policy.toml"{argument}.')
    return Section(heading="The policy", blocks=(how, Code(text=tuning.to_toml().strip())))


def _method(tuning: Tuning) -> Section:
    machine = tuple((Cell(text=str(name)), Cell(text=str(value))) for name, value in tuning.machine.items())
    blocks: list[Block] = [Bullets(items=METHOD)]
    if tuning.command:
        blocks += [Paragraph(text="The command that asks for all of it again:"), Code(text=tuning.command)]
    table = Table(caption="Machine", headers=("what", "value"), rows=machine)
    blocks.append(Details(summary="The machine", blocks=(table,)))
    return Section(heading="How it was measured", blocks=tuple(blocks))


# ------------------------------------------------------------------ words


def _fp32(tuning: Tuning) -> Tried:
    return next((tried for tried in tuning.tried if tried.label == FP32), tuning.tried[0])


def _times(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}"


def _half(ratio: Ratio) -> float:
    return max(ratio.high - ratio.median, ratio.median - ratio.low)


def _percent(share: float) -> str:
    if math.isnan(share):
        return ""
    return f"{100 * share:+.2f} %".replace("-", "\N{MINUS SIGN}") if math.isfinite(share) else "not finite"


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
