"""Result: what a search for a policy has found, as plain data, as TOML with comments, as text, and as a page."""

import math
import statistics
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import halfstep as hs
from halfstep import report as doc
from halfstep.advise.tune.proof import Proof
from halfstep.report import plain, write_page
from halfstep.report.document import UNITS
from halfstep.tasks.candidates import FP32
from halfstep.timing import Ratio


class TuneError(hs.HalfstepError, ValueError):
    """A search that cannot be made of these arguments, or a task that no policy can be found for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference of a candidate from its preset, and why."""

    field: str  # of the policy, such as "ops", "modules" or "residual"
    pattern: str = ""  # the operator or module, where the field has rules
    value: str | float  # the rule or the field's new value; in words in a `Tried`
    why: str  # one line for people: what was measured, and what the change saves or costs

    def __str__(self) -> str:
        """Return ``softmax keep``, or ``residual = low`` of a field without rules."""
        return f"{self.pattern} {self.value}" if self.pattern else f"{self.field} = {self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One candidate and what was measured of it.

    Attributes:
        error: relative error of the gradients against fp32 on the same weights and batch, the mean over the parameters,
            each at most 1; 0.0 for fp32, nan if not measured.
        loss_rise: how much higher the training loss ends than fp32's from the same start with the same batches, as a
            fraction of fp32's; inf if it is not finite, nan if not measured.
        verdict: "chosen", "within" (loss rise within the bound), "worse" (beyond it, or gradients far off),
            "undecided", "slower" (not cheaper for certain, so that its loss was not judged), "saves" (saves alone, and
            was judged with other changes), "failed" (an error, no memory) or "unmeasured".
    """

    label: str  # its name, unique in a search: "fp32", "mixed bf16", "mixed bf16 + 2 rules"
    policy: hs.Policy  # what it trains under
    preset: str  # the preset that it starts from
    compile: bool = False  # whether its TrainStep has ``compile=True``
    changes: tuple[Change, ...] = ()  # its differences from the preset
    time: Ratio | None = None  # its step time over that of fp32, in paired rounds; None if it was not timed
    milliseconds: float = math.nan  # median time of a step; nan if it was not timed
    state_bytes: int = 0  # bytes between steps; 0 if not counted
    saved_bytes: int = 0  # bytes kept for the backward pass; 0 if not counted
    error: float = math.nan
    loss_rise: float = math.nan
    verdict: str = "unmeasured"
    reason: str = ""  # one sentence: why it was chosen or rejected
    predicted: float = math.nan  # step time over fp32's as its changes, each measured alone, made expect; nan without
    predicted_bytes: int = 0  # likewise, `bytes`; 0 without changes

    @property
    def bytes(self) -> int:
        """Bytes between steps and those kept for the backward pass."""
        return self.state_bytes + self.saved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What a search has found."""

    task: str  # name of the task
    chosen: Tried  # the candidate that was chosen
    tried: tuple[Tried, ...]  # every candidate, fp32 first, then in the order in which they were tried
    target: str  # "time", "memory", or weights such as "0.7:0.3"
    bound: float  # the largest loss rise that was allowed, a fraction of fp32's loss
    bound_from: str  # where the bound is from, in words
    proof: Proof | None  # the equivalence test of the choice; None if it was not made
    proofs: tuple[tuple[str, Proof], ...] = ()  # every equivalence test that was made, (label, Proof), in order
    control: Ratio | None  # fp32 over fp32 in the same rounds: what timings cannot resolve; None if nothing was timed
    steps: int  # of the short trainings
    seed: int  # of the search
    device: str  # device type
    machine: dict[str, Any] = field(hash=False)  # what decides the numbers: processor, versions, threads
    advice: tuple[str, ...] = ()  # lines on what no policy can hold: linear_cross_entropy, checkpointing, compile
    notes: tuple[str, ...] = ()  # what the reader should know: what was left out and what is missing for a decision
    finished: bool = True  # whether the search came to its end; not after Ctrl-C or when the time was up
    interrupted: bool = False  # whether Ctrl-C ended it
    seconds: float = 0.0  # that the search took, all its parts together
    command: str = ""  # the command line that made it, "" from Python

    @property
    def policy(self) -> hs.Policy:
        """The policy that was chosen."""
        return self.chosen.policy

    @property
    def is_fp32(self) -> bool:
        """Whether the choice computes in fp32, as what it is compared with does, and needs no proof."""
        return self.chosen.preset == "O0" and not self.chosen.compile

    @property
    def compile(self) -> bool:
        """Whether to give TrainStep ``compile=True`` with it."""
        return self.chosen.compile

    @property
    def fp32(self) -> Tried:
        """The candidate that the others are compared with."""
        return next((tried for tried in self.tried if tried.label == FP32), self.tried[0])

    def to_toml(self) -> str:
        """Return the policy as TOML, with comments: why each exception, what was rejected; `Policy.of` reads it."""
        lines = [line for text in _head(self) for line in _comment(text)]
        lines += ["", self.policy.to_toml().rstrip(), ""]
        lines += [line for text in _rejected(self) for line in _comment(text)]
        return "\n".join(lines).rstrip() + "\n"

    def save_html(self, path: str | Path) -> None:
        """Write the search as one HTML file with pictures that needs nothing else."""
        write_page(tuning_page(self), path)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values; a policy is its TOML text."""
        record: dict[str, Any] = plain(self)
        return record

    def __str__(self) -> str:
        """Return the choice, what was tried, and the notes, as text."""
        return "\n".join([*_head(self), *_rejected(self)])


KEYS = {"within": doc.Key(colour=3), "worse": doc.Key(colour=2), "failed": doc.Key(colour=2)}
CHOSEN, OTHER = doc.Key(colour=1), doc.Key(colour=4)
LEAST_BOUND = 1e-9  # loss rise at which the axis of a search without a bound changes from linear to logarithmic

WIDTH = 110  # columns of a comment


def _comment(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return [f"# {line}".rstrip() for line in wrapped or [""]]


def _head(tuning: Tuning) -> Iterator[str]:
    chosen = tuning.chosen
    yield f"{chosen.label} for the task {tuning.task}, found by halfstep tune; target {tuning.target}"
    if tuning.command:
        yield f"command: {tuning.command}"
    yield f"machine: {_machine(tuning)}; device {tuning.device}"
    yield f"chosen: {chosen.reason}"
    yield f"time: {'; '.join(_time(tuning)) or 'not measured'}"
    if memory := _memory(tuning):
        yield f"memory: {'; '.join(memory)}"
    if not math.isnan(chosen.error):
        rise = "unknown" if math.isnan(chosen.loss_rise) else f"{100 * chosen.loss_rise:+.2f} %"
        yield f"error of the gradients: {chosen.error:.2g}; loss after {tuning.steps} steps {rise} beside fp32's"
    if tuning.compile:
        yield "compile: give it to hs.TrainStep(..., compile=True), as it was measured"
    yield from (f"{change}: {change.why}" for change in chosen.changes)
    yield from (f"advice: {line}" for line in tuning.advice)
    yield from (f"note: {note}" for note in tuning.notes)


def _machine(tuning: Tuning) -> str:
    here = tuning.machine
    on = f", {here['accelerator']}" if here["accelerator"] else ""
    return f"{here['cpu']}, {here['cores']} cores, torch {here['torch']} with {here['torch_threads']} threads{on}"


def _time(tuning: Tuning) -> list[str]:
    chosen = tuning.chosen
    if chosen.time is None:
        return []
    words = [f"{_ratio(chosen.time)} of fp32's, {chosen.milliseconds:.3g} ms a step"]
    if math.isfinite(chosen.predicted):
        words.append(f"predicted {chosen.predicted:.3f} from its changes one by one")
    if tuning.control is not None:
        words.append(f"fp32 beside itself {_ratio(tuning.control)}")
    return words


def _memory(tuning: Tuning) -> list[str]:
    chosen, fp32 = tuning.chosen, tuning.fp32
    if not chosen.bytes or not fp32.bytes:
        return []
    words = [
        f"{size(chosen.state_bytes)} between steps (fp32 {size(fp32.state_bytes)}), "
        f"{size(chosen.saved_bytes)} kept for the backward pass (fp32 {size(fp32.saved_bytes)})"
    ]
    if chosen.predicted_bytes:
        words.append(f"predicted {size(chosen.predicted_bytes)} together, counted {size(chosen.bytes)}")
    return words


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def size(count: int) -> str:
    """Return a number of bytes with three digits."""
    unit, divisor = next((pair for pair in reversed(UNITS) if count >= pair[1]), UNITS[0])
    return f"{count / divisor:.3g} {unit}"


def _rejected(tuning: Tuning) -> Iterator[str]:
    others = [tried for tried in tuning.tried if tried.label not in {FP32, tuning.chosen.label}]
    if not others:
        return
    yield "tried and not chosen (time over fp32's; error of the gradients; why):"
    for tried in others:
        time = "" if tried.time is None else f"{tried.time.median:.3f}; "
        error = "" if math.isnan(tried.error) else f"{tried.error:.2g}; "
        why = tried.reason or "not measured"
        yield f"  {tried.label}: {time}{error}{tried.verdict}{f': {why}' if why != tried.verdict else ''}"


def tuning_page(tuning: Tuning) -> doc.Document:
    """Return the report of a search."""
    rows = ((str(change), doc.sentence(change.why)) for change in tuning.chosen.changes)
    differs = f"How it differs from the preset {tuning.chosen.preset}"
    exceptions = doc.table(differs, ("change", "why"), rows, words=(1,))
    how = f'Save it as policy.toml and give TrainStep policy="policy.toml"{" and compile=True" * tuning.compile}.'
    return doc.page(
        f"halfstep tune: {tuning.task}",
        f"The cheapest policy that was found for this task on this machine, with the target {tuning.target}. "
        f"{_machine(tuning)}; {tuning.seconds / 60:.1f} minutes.",
        (
            _conclusion(tuning),
            doc.Section("Exceptions", (exceptions,) if tuning.chosen.changes else ()),
            _front(tuning),
            _proof(tuning),
            _tried(tuning),
            doc.Section("The policy", (doc.Paragraph(how), doc.Code(tuning.to_toml().strip()))),
            _method(tuning),
        ),
        "halfstep tune",
    )


def _conclusion(tuning: Tuning) -> doc.Section:
    found: list[doc.Fact] = []
    if time := tuning.chosen.time:
        faster = time.high < 1.0 and not (tuning.control and time.finer_than(tuning.control))
        more = [*_time(tuning), f"the interval holds with 90 %, {time.rounds} rounds"]
        found.append(_fact("Time of a step", f"{time.median:.2f} of fp32's", more, "good" if faster else ""))
    if memory := _memory(tuning):
        share = tuning.chosen.bytes / tuning.fp32.bytes
        found.append(_fact("Memory", f"{share:.2f} of fp32's", memory, "good" if share < 1.0 else ""))
    code = f'step = hs.TrainStep(model, optimizer, loss_fn, policy="policy.toml"{", compile=True" * tuning.compile})'
    facts = doc.Facts((*found, _result_fact(tuning)))
    blocks: list[doc.Block] = [doc.Paragraph(_in_words(tuning)), doc.Code(code), facts]
    if not tuning.finished:
        blocks.insert(0, doc.Note("The search did not come to its end: this is the best candidate so far."))
    if tuning.notes or tuning.advice:
        blocks.append(doc.Bullets(tuple(map(doc.sentence, (*tuning.notes, *tuning.advice)))))
    return doc.Section("Conclusion", blocks)


def _in_words(tuning: Tuning) -> str:
    chosen, proof, fp32 = tuning.chosen, tuning.proof, tuning.fp32
    if tuning.is_fp32:
        return f"Stay with fp32, the preset {chosen.label}: {chosen.reason}."
    gains = [f"{chosen.time.median:.2f} of fp32's time for a step"] if chosen.time is not None else []
    gains += [f"{chosen.bytes / fp32.bytes:.2f} of its memory"] if chosen.bytes and fp32.bytes else []
    first = f"Train with {chosen.label}" + (f": it takes {' and '.join(gains)}." if gains else ".")
    first += f" {doc.sentence(_without_proof(chosen.reason, proof))}"
    if proof is None:
        return f"{first} Whether it trains as fp32 does was not tested."
    ends = {
        "equivalent": "It trains as fp32 does",
        "diverged": "Its training failed",
        "undecided": "Whether it trains as fp32 does is undecided",
    }
    return f"{first} {ends.get(proof.verdict, f'It ends {proof.verdict} than fp32')}: {proof.reason}."


def _without_proof(reason: str, proof: Proof | None) -> str:
    return reason if proof is None else reason.partition(f"; {proof.verdict}")[0]


def _fact(heading: str, text: str, more: list[str], tone: str = "") -> doc.Fact:
    return doc.Fact(heading, text, tuple(map(doc.sentence, more)), tone)


def _result_fact(tuning: Tuning) -> doc.Fact:
    proof = tuning.proof
    if tuning.is_fp32:
        return _fact("Result", "fp32", ["It is what the others are compared with"])
    if proof is None:
        return _fact("Result", "not tested", ["No training beside fp32 was made"], "open")
    more = [proof.reason, *([f"margin: {proof.margin_from}"] if proof.margin_from else [])]
    if proof.seeds_more > 0 and math.isfinite(proof.seconds_more):
        more.append(f"these would take about {proof.seconds_more:.0f} s")
    return _fact("Beside fp32", proof.verdict, more, doc.TONES[proof.verdict])


def _front(tuning: Tuning) -> doc.Section:
    fp32 = tuning.fp32.bytes
    figures = (
        _plane(tuning, "Time and loss", "time of a step / fp32's", lambda t: t.time.median if t.time else None),
        _plane(tuning, "Memory and loss", "memory / fp32's", lambda t: t.bytes / fp32 if t.bytes and fp32 else None),
    )
    legend = (("chosen", CHOSEN), ("within the bound", KEYS["within"]), ("beyond it", KEYS["worse"]), ("other", OTHER))
    shown = tuple(figure for figure in figures if figure)
    how = doc.Paragraph(
        f"Each point is a candidate; the farther left and the lower, the better. The bound is a loss rise of "
        f"{_percent(tuning.bound)}: {tuning.bound_from}. Crosses failed or lie beyond it. The stepped line joins "
        "candidates that no other undercuts in both."
    )
    return doc.Section("Every candidate", (how, doc.Gallery(shown, legend)) if shown else ())


def _plane(tuning: Tuning, heading: str, x_label: str, place: Callable[[Tried], float | None]) -> doc.Figure | None:
    points = []
    order = sorted(tuning.tried, key=lambda t: (t.label == tuning.chosen.label, t.label == FP32, t.verdict == "within"))
    for tried in order:
        x = place(tried)
        if x is None or math.isnan(tried.loss_rise):
            continue
        chosen = tried.label == tuning.chosen.label
        key = CHOSEN if chosen else doc.Key() if tried.label == FP32 else KEYS.get(tried.verdict, OTHER)
        failed = tried.verdict in {"worse", "failed"} or not math.isfinite(tried.loss_rise)
        mark = "chosen" if chosen else "cross" if failed else "full"
        named = chosen or (not tried.changes and not tried.compile)
        points.append(doc.Point(tried.label, x, 100 * tried.loss_rise, named, mark, key))
    if len(points) < 2:
        return None
    front: list[tuple[float, float]] = []
    for x, y in sorted((point.x, point.y) for point in points if math.isfinite(point.y)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    limit = 100 * max(tuning.bound, LEAST_BOUND)
    chart = doc.PointChart(x_label, "loss rise, %", tuple(points), limit, "bound", tuple(front))
    missing = sum(math.isnan(tried.loss_rise) for tried in tuning.tried)
    without = f", without {missing} whose loss was not measured" if missing else ""
    alt = f"{x_label} and loss rise of every candidate."
    return doc.Figure(heading, f"{len(points)} candidates{without}.", alt, chart)


def _proof(tuning: Tuning) -> doc.Section:
    proof = tuning.proof
    if proof is None:
        return doc.Section("Proof", ())
    runs = f"{doc.counted(len(proof.values), 'training')} of {doc.counted(proof.steps, 'step')}"
    words = [f"{runs} each, from the same starts as fp32, with the same batches. {doc.sentence(proof.reason)}"]
    if len(tuning.proofs) > 1:
        words.append(f"{len(tuning.proofs)} candidates were tested, one after the other.")
    blocks: list[doc.Block] = [doc.Paragraph(" ".join(words))]
    figures = tuple(f for f in (_curves(proof, tuning.chosen.label), _interval(tuning, proof)) if f)
    if figures:
        blocks.append(doc.Gallery(figures, ((FP32, doc.Key()), (tuning.chosen.label, CHOSEN))))
    if proof.values:
        blocks.append(doc.Details("Every training", (_runs(proof),)))
    return doc.Section("Proof", blocks)


def _curves(proof: Proof, label: str) -> doc.Figure | None:
    if not proof.losses:
        return None
    fp32 = doc.Series(FP32, proof.loss_steps, proof.fp32_losses)
    own = doc.Series(label, proof.loss_steps, proof.losses, key=CHOSEN)
    return doc.Figure(
        "Training loss",
        "Mean over the seeds; the wide pale line is fp32.",
        f"Training loss of fp32 and of {label} over {proof.steps} steps.",
        doc.LineChart("step", (fp32, own), log=True),
    )


def _interval(tuning: Tuning, chosen: Proof) -> doc.Figure | None:
    dots = []
    for label, proof in tuning.proofs or ((tuning.chosen.label, chosen),):
        found = proof.difference
        if found is None or not math.isfinite(proof.margin):
            continue
        mark = "full" if proof.holds else "hollow" if proof.verdict == "undecided" else "cross"
        key = CHOSEN if label == tuning.chosen.label else OTHER
        dots.append(doc.Dot(label, proof.verdict, found.mean, found.low, found.high, key, mark))
    if not dots:
        return None
    return doc.Figure(
        "Difference from fp32",
        f"Mean difference of the pairs and its interval; inside the margin it counts as none. "
        f"Margin: {chosen.margin_from}.",
        "Difference from fp32 with its interval, beside the margin.",
        doc.DotChart(f"{chosen.measure} minus fp32's", tuple(dots), chosen.margin),
    )


def _runs(proof: Proof) -> doc.Table:
    rows = [
        (str(number + 1), f"{fp32:.5g}", f"{own:.5g}", f"{own - fp32:+.3g}", str(proof.skipped[number]))
        for number, (own, fp32) in enumerate(zip(proof.values, proof.fp32, strict=False))
    ]
    if len(proof.fp32) > 1:
        spread = statistics.stdev(proof.fp32) if all(map(math.isfinite, proof.fp32)) else math.nan
        rows.append(("spread", f"{spread:.3g}", "", "", ""))
    return doc.table(f"{proof.measure} at the end", ("seed", "fp32", "policy", "difference", "steps skipped"), rows)


def _tried(tuning: Tuning) -> doc.Section:
    fp32 = tuning.fp32.bytes
    rows = []
    for tried in tuning.tried:
        time = tried.time
        half = max(time.high - time.median, time.median - time.low) if time else 0.0
        rows.append((
            tried.label, doc.judged(tried.verdict), f"{time.median:.3f} \N{PLUS-MINUS SIGN}{half:.3f}" if time else "",
            f"{tried.bytes / fp32:.2f}" if tried.bytes and fp32 else "", _percent(tried.loss_rise),
            "" if math.isnan(tried.error) else f"{tried.error:.2g}",
            doc.sentence(_without_proof(tried.reason, tuning.proof)),
        ))  # fmt: skip
    headers = ("candidate", "verdict", "time / fp32", "memory / fp32", "loss rise", "gradient error", "why")
    caption = f"{len(rows)} candidates, in the order in which they were tried"
    return doc.Section("Tried", (doc.table(caption, headers, rows, words=(0, 6)),))


def _method(tuning: Tuning) -> doc.Section:
    blocks: list[doc.Block] = [doc.method("tune")]
    if tuning.command:
        blocks += [doc.Paragraph("The command that asks for all of it again:"), doc.Code(tuning.command)]
    machine = ((str(name), str(value)) for name, value in tuning.machine.items())
    blocks.append(doc.Details("The machine", (doc.table("Machine", ("what", "value"), machine),)))
    return doc.Section("How it was measured", blocks)


def _percent(share: float) -> str:
    if math.isnan(share):
        return ""
    return doc.minus(f"{100 * share:+.2f} %") if math.isfinite(share) else "not finite"
