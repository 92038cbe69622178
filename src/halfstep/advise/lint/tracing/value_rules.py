"""Rules on values: what the numbers of the traced step show, at the operator that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.tracing import numbers
from halfstep.advise.lint.tracing.calls import TracedCall
from halfstep.advise.lint.tracing.examples import example
from halfstep.advise.lint.tracing.trace import Trace
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES, format_of

__all__ = ["VALUE_RULES", "hits"]

GUARDS = frozenset({"add", "clamp", "maximum", "max", "sub"})
"""Operators by which a small constant keeps a divisor or a logarithm from 0."""


def hits(calls: Iterator[tuple[TracedCall, str]]) -> Iterator[Hit]:
    """Yield a hit for each line, with what its first call shows and how many more there are."""
    found: dict[tuple[str, int, str], tuple[str, int]] = {}
    for call, what in calls:
        key = (call.file, call.line, call.op)
        first, times = found.get(key, (what, 0))
        found[key] = first, times + 1
    for (file, line, _), (what, times) in found.items():
        yield Hit(line, what + (f" ({times} calls on this line)" if times > 1 else ""), file)


def _shows(word: str, text: str) -> Callable[[Trace], Iterator[Hit]]:
    def check(trace: Trace) -> Iterator[Hit]:
        return hits((c, text.format(op=c.op, form=_form(c), place=_in(c))) for c in trace.calls if word in c.shows)

    return check


def _form(call: TracedCall) -> str:
    return DTYPE_NAMES.get(call.outputs[0].dtype, str(call.outputs[0].dtype)) if call.outputs else ""


def _in(call: TracedCall) -> str:
    return f" in module {call.module!r}" if call.module else ""


def _not_finite(trace: Trace) -> Iterator[Hit]:
    if trace.loss_finite:
        text = "{op}{place} makes inf or nan of finite numbers, and the loss does not show it"
        yield from _shows(numbers.NOT_FINITE, text)(trace)


def _lost_guards(trace: Trace) -> Iterator[Hit]:
    def found() -> Iterator[tuple[TracedCall, str]]:
        for call in trace.calls:
            if call.op not in GUARDS or not call.outputs or call.outputs[0].dtype not in LOW_DTYPES:
                continue
            least = format_of(call.outputs[0].dtype).smallest_subnormal / 2
            for number in call.numbers:
                if 0.0 < abs(number) <= least:
                    yield call, f"{number:g} in {call.op}{_in(call)} is 0 in {_form(call)}"

    yield from hits(found())


MASK = 'self.register_buffer("mask", torch.ones(16, 16).tril({}).bool())'
SCORES = "scores = self.body(x)[:, None] + self.body(x)[:, :, None]\n"
SOFTMAX = 'return scores.masked_fill(~self.mask, float("-inf")).softmax(-1)'

VALUE_RULES = (
    Rule(
        code="HS121", severity="error", title="a softmax over values that are all -inf",
        why="Such a row is 0 / 0: its result and all gradients through it are nan.",
        fix="Leave one position of each row open, or fill with a large finite number of the scores' format "
        "(torch.finfo(scores.dtype).min).",
        bad=example(SCORES + SOFTMAX, init=MASK.format(-1)), good=example(SCORES + SOFTMAX, init=MASK.format(0)),
        check=_shows(numbers.MASKED_ROW, "{op}{place} gets a row in which everything is masked with -inf"),
    ),
    Rule(
        code="HS122", severity="warning", title="an operator at a point where its derivative is infinite",
        why="The gradient is inf, or nan where it is multiplied by 0; low formats reach such points more often, "
        "because small numbers round to 0.",
        fix="Add a small number under the root, or clamp; torch.where after the operator does not help.",
        bad=example("return self.body(x).relu().sqrt()"), good=example("return (self.body(x).relu() + 1e-3).sqrt()"),
        check=_shows(numbers.INFINITE_DERIVATIVE, "{op}{place} has an infinite derivative at one of its arguments"),
    ),
    Rule(
        code="HS123", severity="warning", title="inf or nan that the loss hides",
        why="The value is masked later; its gradient is 0 * inf = nan, or it is one change of data away from the loss.",
        fix="Make the argument harmless before the operator: torch.where(mask, x, 1) and then the logarithm or "
        "quotient.",
        bad=example("y = self.body(x).relu()\nreturn torch.where(y > 0, y.log(), 0 * x)"),
        good=example("y = self.body(x).relu()\nreturn torch.where(y > 0, torch.where(y > 0, y, 1).log(), 0 * x)"),
        check=_not_finite,
    ),
    Rule(
        code="HS124", severity="error", title="a cast to a low format that makes inf",
        why="The number is beyond the largest of the format: finfo(float32).min as a mask becomes -inf in fp16 and "
        "bf16, and a row of it nan.",
        fix="Take the number from the format that it is used in: torch.finfo(scores.dtype).min.",
        bad=example("mask = torch.full((16,), torch.finfo(torch.float32).min).bfloat16()\n"
                    "return torch.cat([mask[None], self.body(x)]).softmax(-1)"),
        good=example("mask = torch.full((16,), torch.finfo(torch.bfloat16).min).bfloat16()\n"
                     "return torch.cat([mask[None], self.body(x)]).softmax(-1)"),
        check=_shows(numbers.CAST_OVERFLOW, "a cast{place} to {form} makes inf of finite numbers"),
    ),
    Rule(
        code="HS125", severity="warning", title="positions or counts in a low format",
        why="bf16 holds whole numbers up to 256 and fp16 up to 2048; larger ones are rounded, and neighbouring "
        "positions or time steps become equal.",
        fix="Compute positions, time steps and their angles in fp32: hs.suspended() around the product, or "
        '.with_modules({"rotary": "fp32"}).',
        bad=example("t = torch.arange(300.0)[:, None] @ self.frequencies[None]\nreturn self.body(x) + t.cos()[:8]",
                    init='self.register_buffer("frequencies", torch.linspace(0.1, 1, 16))'),
        good=example("t = torch.arange(300.0)[:, None] * self.frequencies[None]\nreturn self.body(x) + t.cos()[:8]",
                     init='self.register_buffer("frequencies", torch.linspace(0.1, 1, 16))'),
        check=_shows(numbers.ROUNDED_INTEGERS, "{op}{place} makes different whole numbers equal in {form}"),
    ),
    Rule(
        code="HS126", severity="warning", title="a small constant that is 0 in the format",
        why="It was meant to keep a divisor, root or logarithm from 0, and adding it changes nothing: fp16 has no "
        "number between 0 and 6e-8.",
        fix="Use a number that the format has (1e-6 in fp16 is subnormal, 1e-4 is safe), or compute this in fp32.",
        bad=example("y = self.body(x)\nreturn y / (y.abs().half() + 1e-8)"),
        good=example("y = self.body(x)\nreturn y / (y.abs().half() + 1e-4)"), check=_lost_guards,
    ),
)  # fmt: skip
