"""How what is said of a story is judged. Fixed before any story was scored.

A verdict is any object with the fields of a Verdict; nothing of halfstep's instruments is imported here.

* Place: operator, module, phase and line are exactly right; where no operator is to blame, the kind and the bad
  parameter, buffer or input, if the truth names one.
* Cause: the root cause is the truth's.
* Cure: where the truth has cures, at least one of the verdict is marked verified; where it has none, none is. Each
  that is marked trains 50 steps near fp32 (`story.near`). A loop written by hand has no policy that could
  be changed from outside: if the truth is a setting of its scale, its cures are not judged.
* Words: the headline has at most 160 characters, and headline and report have everything in `Story.says` and nothing
  in `Story.never`.
* Twin: in 300 steps nothing but a scale on its way is accused (`score.HARMLESS`), and the Monitor finds
  nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks.faults.score import LINE
from benchmarks.faults.story import Place, Story, place_of

__all__ = ["HEADLINE", "curable", "cure_right", "parts_right", "place_right", "unsaid"]

HEADLINE = 160
"""Characters that a headline may have."""


def parts_right(verdict: Any, told: Story) -> dict[str, bool]:
    """Return which parts of the place of an operator a verdict names; build the story before."""
    truth = told.truth
    found, place = LINE.search(verdict.line), place_of(told)
    return {
        "op": verdict.op in (truth.op, *truth.also),
        "module": verdict.module in (truth.module, *truth.also),
        "phase": verdict.phase == truth.phase,
        "line": found is not None and place is not None and _inside(found[1], int(found[2]), place),
    }


def place_right(verdict: Any, told: Story) -> bool:
    """Return whether a verdict names the place; build the story before."""
    truth = told.truth
    if verdict is None:
        return False
    if truth.op:
        return all(parts_right(verdict, told).values())
    named = not truth.parameter or verdict.parameter in (truth.parameter, *truth.also)
    return verdict.kind in (truth.kind, *truth.also) and named


def _inside(file: str, line: int, place: Place) -> bool:
    return file == place.file and place.first <= line <= place.last


def curable(told: Story) -> bool | None:
    """Return whether a change of the policy cures a story; None if that cannot be said of its cures."""
    return None if told.loop and told.truth.cause in ("precision", "scale") else bool(told.truth.cures)


def cure_right(verdict: Any, told: Story, trains: Callable[[Any], str]) -> tuple[bool | None, dict[str, str]]:
    """Judge the cures of a verdict.

    Args:
        verdict: what was said; None if nothing was.
        told: the story.
        trains: says how a run of 50 steps under a policy differs from fp32, "" if it does not.

    Returns:
        Whether there is a verified cure where there can be one, and none where not (None: not judged); and the verified
        cures, each with what is wrong with it.
    """
    expected = curable(told)
    if verdict is None or expected is None:
        return (None if expected is None else False), {}
    marked = [cure for cure in verdict.cures if cure.verified]
    if not expected:
        return not marked, {cure.text: "there is no cure" for cure in marked}
    return bool(marked), {cure.text: trains(cure.policy) if cure.policy else "it is no policy" for cure in marked}


def unsaid(verdict: Any, told: Story) -> list[str]:
    """Return what is wrong with the words of a verdict."""
    if verdict is None:
        return ["silent"]
    text = f"{verdict.headline}\n{verdict}"
    wrong = [f"does not say {words!r}" for words in told.says if not re.search(words, text, re.IGNORECASE)]
    wrong += [f"says {words!r}" for words in told.never if re.search(words, text, re.IGNORECASE)]
    length = len(verdict.headline)
    return wrong + ([f"the headline has {length} characters"] if length > HEADLINE else [])
