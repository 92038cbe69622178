"""The table of the zoo, from the JSON of `benchmarks.zoo`: what is outside its bounds, with the reason of each.

Input: the report as a dict. Output: Markdown. `REASONS` holds what was found by looking; what the report itself shows
(`shown`) needs no entry: fp32 that moves as far when its weights move by a rounding, and two scores nearer to each
other than a rounding moves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.markdown import table
from benchmarks.stamp import told

EPS = {"bf16": 2.0**-7, "fp16": 2.0**-10}
FACTOR = {"torch": 2.0, "O1": 2.0, "mixed": 2.0, "O2": 4.0, "pure": 4.0}
FLOOR = {"torch": 2.0, "O1": 2.0, "mixed": 2.0, "O2": 4.0, "pure": 4.0}
WORDS = {"loss": "loss curve", "out": "first output", "tokens": "tokens", "raises": "raises", "copies": "copy"}

MATCHER = (
    "the matcher gives its costs to scipy by numpy, which has no bf16; under low weights they are low, and "
    '`with_modules({"criterion.matcher": "fp32"})` trains within the bounds'
)
ROUTES = "the route of a token flips, and its output is that of another expert"
POST_NORM = (
    "`mixed` runs layer_norm low (torch.amp in fp32 where its input is), and where layers end with a norm "
    'the whole stream passes through it: `with_ops(fp32=["layer_norm"])` is within the bounds'
)
FUNCTION = (
    "its autograd.Function multiplies tensors of two formats in its backward pass, where torch.autocast casts nothing: "
    "acos gives fp32 under these policies, as on torch.autocast's CUDA list, and the gradient is low. "
    "`with_modules` of fp32 for each `attention.self` trains within the bounds"
)
REASONS: Mapping[str, str] = {
    "altclip out": POST_NORM,
    "eomt raises": MATCHER,
    "eomt_dinov3 raises": MATCHER,
    "switch_transformers copies": ROUTES,
    "yoso raises": FUNCTION,
}
"""Architecture, or "architecture kind" (loss, out, tokens, raises, copies) -> why it deviates."""

NOTES: Mapping[str, str] = {
    "rt_detr": "queries are the positions with the largest scores. The scores of an untrained model nearly tie; a "
    "low score head leaves few distinct ones, `topk` takes them in another order, and outputs move to other places, "
    'under torch.amp too. With `with_modules({"model.enc_score_head": "fp32"})` the order is that of fp32. In training '
    "the matching of queries and objects flips besides: torch.amp's curves at three loss scales differ as much.",
    "switch_transformers": "the router multiplies its input by noise from `empty_like`, in the format of that input: "
    "under `pure` it is low, and so other noise is drawn than in fp32. The zoo switches this noise off as it does "
    "dropout. What remains begins with the first route of a token that flips, under every preset and torch.amp.",
    "deit": "class token and positions are zero at the start, so that layer_norm, with eps 1e-12, has gradients of 1e6 "
    "times those of its output: in fp16 the scale falls until they fit, by some skipped updates (the audio spectrogram "
    "transformer too). torch.amp on a CPU runs this layer_norm in fp32.",
    "blip-2": "its config initialises the vision model by 1e-10, and fp16 ends at 6e-8: image features are zero in "
    "fp16, under torch.amp too. Weights that were trained, or bf16, have no such numbers.",
}
"""Architecture -> what was found out of it beyond its row."""


@dataclass(frozen=True)
class Deviation:
    """One thing that is not as torch.amp's: where, how much, what was allowed, and the reason ("" if none is known)."""

    name: str
    preset: str
    kind: str
    found: float | None
    allowed: float | None
    reason: str


def bound(preset: str, dtype: str, amp: float) -> float:
    """Return how far a preset may deviate from fp32 where torch.amp deviates by `amp`."""
    return FACTOR[preset] * amp + FLOOR[preset] * EPS[dtype] / 2


def deviation(
    name: str, preset: str, kind: str, value: float | None = None, most: float | None = None, shown: str = ""
) -> Deviation:
    """Return a deviation with the reason that the report shows, else with the known one."""
    known = REASONS.get(f"{name} {kind}") or REASONS.get(name, "")
    return Deviation(name, preset, kind, value, most, shown or known)


def deviations(row: dict[str, Any]) -> Iterator[Deviation]:
    """Yield what of an architecture is outside its bounds, or not equal to torch.amp's."""
    for preset, found in row["presets"].items():
        name, dtype = preset.split(":")
        amp, moved = row["amp"][dtype], row["control"].get(dtype, {})

        made = partial(deviation, row["name"], preset)
        if "raises" in found:
            same = f"torch.amp raises too: {amp['raises']}" if "raises" in amp else ""
            yield made("raises", shown=same)
            continue
        for kind in ("loss", "out"):
            most = bound(name, dtype, amp.get(kind, 0.0))
            if not found[kind] <= most:
                shown = conditioning(found[kind], moved.get(kind, 0.0), moved.get(f"amp_{kind}", 0.0))
                if kind == "out" and not shown:
                    shown = flips(found.get("positions", [1, 1]), row.get("chooses", []))
                if kind == "loss" and not shown:
                    shown = signs(moved.get("gradients", {}), name)
                if "raises" in amp and not shown:
                    shown = f"torch.amp raises ({amp['raises']}): nothing to compare with"
                yield made(kind, found[kind], most, shown)
        if tokens := found.get("generate"):
            near = tokens.get("margin", 1.0) <= tokens.get("moved", 0.0) <= bound(name, dtype, amp.get("out", 0.0)) * 2
            shown = f"a near tie: two scores {tokens['margin']:.2g} apart, rounding moves them by {tokens['moved']:.2g}"
            yield made("tokens", tokens.get("margin"), tokens.get("moved"), shown if near else "")
        copies = found.get("copies", {})
        far, most = copies.get("deepcopy_out", 0.0), bound(name, dtype, amp.get("out", 0.0))
        if [kind for kind in copies if kind != "deepcopy_out"] or far > most:
            yield made("copies", far or None, most if far else None)


def conditioning(value: float, wide: float, amp: float) -> str:
    """Return the reason of a deviation that the model's conditioning explains: by a rounding of the weights alone."""
    for who, control in (("fp32", wide), ("torch.amp", amp)):
        if value <= 2 * control:
            return f"ill-conditioned: {who} gets {control:.2g} away if its weights move by a rounding"
    return ""


def flips(positions: list[int], chooses: list[str]) -> str:
    """Return the reason of an output of which few positions are outside, in a model that chooses by an operator."""
    few, every = positions
    if not chooses or few > every / 8:
        return ""
    return f"{few} of {every} positions: a choice flips there ({', '.join(chooses)})"


def signs(gradients: dict[str, float], preset: str) -> str:
    """Return the reason of a loss curve whose first gradients are as near to fp32's as torch.amp's, to a half."""
    mine, amp = gradients.get(preset), gradients.get("torch.amp")
    if mine is None or amp is None or mine > 1.5 * amp:
        return ""
    return f"first gradients as torch.amp's (errors {mine:.2g} and {amp:.2g}); AdamW's first steps follow signs"


def zoo_table(report: dict[str, Any]) -> str:
    """Return the tables: counts of each preset, the deviations with their reasons, and the notes."""
    rows = [row for row in report["rows"] if "failed" not in row]
    left = [row for row in report["rows"] if "failed" in row]
    every = [one for row in rows for one in deviations(row)]
    machine = report["machine"]
    text = (
        f"`{report['command']}` on {machine['cpu']}, torch {report['torch']}, transformers {report['transformers']}: "
        f"{len(rows)} architectures, {sum(row['parameters'] for row in rows) // max(1, len(rows)):,} parameters on "
        f"average; {len(left)} more could not be built or trained tiny in fp32 (the JSON has the reason of each). "
        f"{told(report.get('commit', ''))}"
    )
    if unmeasured := report["names"] - len(report["rows"]):
        text += f" {unmeasured} names of transformers' mappings are not measured in this file."
    notes = "\n".join(f"- `{name}`: {note}" for name, note in NOTES.items())
    return "\n\n".join([text, counts(rows, every), listed(every), notes])


def counts(rows: list[dict[str, Any]], every: list[Deviation]) -> str:
    """Return one line for each preset and format."""
    lines = []
    for preset in rows[0]["presets"] if rows else ():
        mine = [d for d in every if d.preset == preset]
        outside = {d.name for d in mine if d.kind in ("loss", "out", "raises")}
        speak = [row["presets"][preset] for row in rows if "generate" in row["presets"][preset]]
        saved = {d.name for d in mine if d.kind == "copies"}
        ran = sum("raises" not in row["presets"][preset] for row in rows)
        lines.append(
            [
                f"`{preset}`",
                f"{len(rows) - len(outside)} of {len(rows)}",
                f"{sum(not found['generate'] for found in speak)} of {len(speak)}",
                f"{ran - len(saved)} of {ran}",
                str(sum(not d.reason for d in mine)),
            ]
        )
    return table(
        ["preset", "within bounds", "tokens of `generate` as torch.amp's", "copied, saved, loaded", "unexplained"],
        lines,
    )


def listed(every: list[Deviation]) -> str:
    """Return the deviations, those of one architecture with one reason in one line."""
    groups: dict[tuple[str, str, str], list[Deviation]] = {}
    for one in every:
        kind = "near tie" if one.reason.startswith("a near tie") else one.reason
        groups.setdefault((one.name, one.kind, kind), []).append(one)
    lines = []
    for (name, kind, _), found in groups.items():
        worst = max(found, key=lambda d: d.found or 0.0)
        number = "-" if worst.found is None else f"{worst.found:.2g}"
        allowed = "-" if worst.allowed is None else f"{worst.allowed:.2g}"
        presets = ", ".join(d.preset for d in found)
        lines.append([f"`{name}`", WORDS[kind], presets, number, allowed, worst.reason or "**unexplained**"])
    return table(["architecture", "what", "presets", "largest", "allowed", "reason"], lines)
