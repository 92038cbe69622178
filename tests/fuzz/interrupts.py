"""Training steps that are cut off at a random line, by Ctrl-C, a lack of memory or a hook of the user's.

What must be true of the state that is left, and how a cut is made, says `tests.step.cutting`. There is nothing to
classify: no difference is intended.
"""

from __future__ import annotations

import random

from tests.step.cutting import OPTIMIZERS, PLACES, POLICIES, SCHEDULERS, UPDATES, Knife, Run, cut_run, without_warnings

__all__ = ["SAMPLE", "check"]

SAMPLE = 30


def check(seed: int) -> str:
    """Cut one run at one place."""
    chance = random.Random(seed)
    accumulate = chance.choice([1, 1, 2, 3])
    run = Run(
        policy=chance.choice([*POLICIES]),
        optimizer=chance.choice([*OPTIMIZERS]),
        scheduler=chance.choice([*SCHEDULERS]),
        accumulate=accumulate,
        norm=chance.random() < 0.7,
        clip_norm=chance.choice([None, 0.1]),
        clip_value=chance.choice([None, None, 0.01]),
        bad=chance.randrange(UPDATES * accumulate) if chance.random() < 0.3 else -1,
    )
    micro = chance.randrange(UPDATES * accumulate)
    kind = chance.choice([KeyboardInterrupt, MemoryError, None])

    def cut() -> str:
        states = run.states()
        if kind is None:
            return cut_run(run, states, micro, chance.choice(PLACES), [])
        whole = Knife(-1, kind)
        cut_run(run, states, micro, whole, [])  # counts the events
        # half of the cuts fall into the last third, where the update is
        first = chance.choice([0, 2 * whole.seen // 3])
        return cut_run(run, states, micro, Knife(chance.randrange(first, whole.seen), kind), [])

    problem = without_warnings(cut)
    return f"{problem}; micro-batch {micro} of {run}" if problem else ""
