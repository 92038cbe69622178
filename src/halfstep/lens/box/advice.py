"""Advice: what to do where no policy helps, in words that nobody has tried by replay."""

from __future__ import annotations

from halfstep.events import Cure, Verdict
from halfstep.lens.box.diagnose import WRITTEN

__all__ = ["advice"]

OURS = "look at the line: it puts nan or inf there itself; take it out, or mask what comes of it before the loss"

ENDS = "clamp the argument inside (-1, 1): the slope at the ends is infinite"
SPREAD = "it needs two values at least, or correction=0; and an eps before a division by it"
NO_LABELS = (
    "no label counts, and the mean over none is 0/0: skip such a batch, or use reduction='sum' and divide by the "
    "count, at least 1"
)

ADVICE = {
    "bad_batch": "check what loads it: torch.isfinite(x).all() in the data loader names the sample",
    "bad_state": "load the last checkpoint whose weights and optimizer state are finite; then look for what wrote "
    "them: an update with too high a learning rate, an eps that is 0 in the state's format, an edit by hand",
    "not_reproducible": "make what the loss function draws depend on torch's generators alone, and look again",
}

OVERFLOW = {
    "": "it is not finite with every rule in fp32 either: the values themselves are too large, or the code asks for a "
    "low format by name (.half(), dtype=); scale them down, or take the cast out",
    "else": "none of the rules that were tried makes it finite; look at the value: scale it down where it is made",
    "exp": "subtract the maximum first (logsumexp, softmax and log_softmax do), or clamp the argument",
}

INVALID = {
    "": "keep the argument away from the point where the function has no value, by an eps that the format can hold",
    "div": "add an eps to the divisor that the format can hold (fp16: at least 6e-8, better 1e-4)",
    "log": "clamp the argument from below, or use log_softmax, logsigmoid or log1p",
    "sqrt": "add an eps under the root: its slope at 0 is infinite",
    "softmax": "a row is masked out entirely; leave one entry, or use a large negative number instead of -inf",
    "scaled_dot_product_attention": "a row is masked out entirely, or its logits are far too large; let it attend to "
    "something, scale queries and keys down, or normalise them",
    "acos": ENDS,
    "asin": ENDS,
    "pow": "keep the base away from 0 by an eps: a negative power, and the slope of a root, are infinite there",
    "ctc_loss": "a target is longer than its input lets it be (twice as long, if letters repeat): drop that sample, or "
    "pass zero_infinity=True",
    "normalize": "give it an eps that the format can hold (fp16: at least 6e-8, better 1e-4), or fp32",
    "std": SPREAD,
    "var": SPREAD,
    "cross_entropy": NO_LABELS,
    "nll_loss": NO_LABELS,
    "linalg.vector_norm": "add an eps under the root: its slope at 0 is infinite",
    "norm": "add an eps under the root: its slope at 0 is infinite",
}


def advice(verdict: Verdict, *, everywhere: bool = False) -> tuple[Cure, ...]:
    """Return what to do where no policy helps; `everywhere`: the step is not finite in fp32 either."""
    text = ADVICE.get(verdict.kind, "")
    if verdict.kind == "overflow":
        text = OVERFLOW.get(verdict.op, OVERFLOW["" if everywhere else "else"])
    if verdict.kind == "invalid":
        text = OURS if verdict.detail == WRITTEN else INVALID.get(verdict.op, INVALID[""])
    return (Cure(policy=None, text=text, verified=False),) if text else ()
