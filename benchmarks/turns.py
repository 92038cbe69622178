"""Time in turns: all candidates step once a round, in an order shuffled each round, and only times of a round pair."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.cases import Batch
from halfstep.timing import Race, Ratio, ratio_of, timed

Step = Callable[[Batch], Tensor]


@dataclass(slots=True)
class Track:
    """What one candidate did, round by round.

    Attributes:
        seconds: of its step, by round; a rare candidate lacks most rounds.
        faults: page faults of its step, by round: pages that the system had to map and fill with zeros.
        losses: of every step from the first, warm-up included, on the device.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    faults: dict[int, int] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


def beyond(track: Track, floor: Track) -> list[float]:
    """Return the seconds that a candidate's steps take beyond those of `floor` in the same rounds."""
    return [track.seconds[i] - floor.seconds[i] for i in sorted(track.seconds.keys() & floor.seconds.keys())]


def ratio(track: Track, baseline: Track, *, plus: float = 0.0) -> Ratio:
    """Return the paired ratio of step times over the rounds that both took part in.

    Args:
        track: of the candidate.
        baseline: of what it is compared with.
        plus: seconds added to the baseline's time in every round.
    """
    found = ratio_of(track.seconds, baseline.seconds, plus=plus)
    assert found is not None
    return found


def faults() -> int:
    """Return how many pages this process has had mapped without reading a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector out of timed steps: it walks over the objects of all candidates."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turns(
    steps: Mapping[str, Step],
    batches: Callable[[int], Batch],
    tracks: Mapping[str, Track],
    device: str,
    *,
    rounds: Sequence[int],
    rare: Mapping[str, int],
) -> None:
    """Let every candidate step once a round and add seconds and losses to its track.

    Args:
        steps: by label.
        batches: batch of a round.
        tracks: by label.
        device: its type.
        rounds: numbers of the rounds; they choose the batches.
        rare: candidates that take part only so many times.
    """
    batch: Batch = ()

    def measure(label: str, number: int) -> float:
        mapped = faults()
        made: list[Tensor] = []
        seconds = timed(lambda: made.append(steps[label](batch)), device)
        tracks[label].seconds[number] = seconds
        tracks[label].faults[number] = faults() - mapped
        tracks[label].losses.append(made[0].clone())  # a captured step writes the next one in its place
        return seconds

    race = Race(measure, seed=rounds[0] if rounds else 0)
    with quiet_collector():
        for i, number in enumerate(rounds):
            batch = tuple(t.to(device) for t in batches(number))
            race.round([label for label in steps if i < rare.get(label, len(rounds))], number)
