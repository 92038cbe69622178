"""Tuner: `hs.tune`, from a task, a bound and a target to the cheapest policy on this machine."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration
from halfstep.advise.tune.lab import Lab, Progress
from halfstep.advise.tune.result import TuneError, Tuning, size
from halfstep.advise.tune.search import Search, Weights
from halfstep.arguments import CALLABLE, FLAG, INDEX, NONE, PATH, POSITIVE, TEXT, WHOLE, Kind, a, check, listed, one_of
from halfstep.errors import did_you_mean
from halfstep.tasks.compare import started
from halfstep.tasks.machine import device_type, generators_kept, machine
from halfstep.tasks.task import Task

FORMATS = ("bf16", "fp16")

ALL = 25.0  # short trainings of a whole search, roughly
LARGE = 0.15  # share of the bytes kept for the backward pass that is worth a line of code
OFTEN = 3  # modules of one class beside one another that count as blocks


def tune(
    task: Task,
    *,
    target: str = "time",
    max_loss_rise: float | None = None,
    minutes: float = 10.0,
    device: str = "",
    seed: int = 0,
    seeds: int = 0,
    dtypes: Sequence[str] = (),
    compile: bool = True,
    resume: str | Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Find the cheapest policy for `task` on this machine, and test whether it trains as fp32 does.

    Everything is measured here: the time of each candidate in rounds with fp32, its loss in a short training beside
    fp32 from the same weights on the same batches, the operators by `hs.audit`. Short trainings have `excerpt_steps`
    steps, fewer if the time is short. A candidate that raises or runs out of memory is left out. Ctrl-C ends the search
    and returns the best preset that is safe so far; `finished` is then False. torch's random state is restored.

    Args:
        task: what to train.
        target: "time", "memory", or the weights of both, such as "0.7:0.3".
        max_loss_rise: how much higher than fp32's the loss may end, as a fraction of it; None: no more than fp32's own
            spread from seed to seed, and for the test at the end the task's metric within its margin, if it has one.
        minutes: time for measuring; it is a limit for what is begun.
        device: device type; "": the accelerator, if there is one, else the CPU.
        seed: of weights, batches and orders. With equal seeds and times the search is the same.
        seeds: pairs of trainings of the test at the end, at least; 0: as many as their spread asks for.
        dtypes: low formats to try, "bf16" or "fp16"; (): those that the device has units for, else bf16.
        compile: whether compiled steps are tried.
        resume: a file that keeps what is measured, and whose measurements are used if it exists; None: no file.
        on_progress: called after each round, and with each result.
        clock: seconds; the budget and all timings read it.

    Raises:
        TuneError: arguments that make no sense, a state of another search, or a task that does not train in fp32: its
            loss does not fall or is not finite, or it raises.
        TaskError: no such device, or batches that are not the same when asked for again.

    Examples:
        >>> tuning = hs.tune(task, minutes=0.01, compile=False)  # minutes=10 for a model of some size
        >>> policy = tuning.chosen.policy  # str(tuning) is a report
    """
    check(
        "hs.tune",
        TuneError,
        task=(task, a(Task, words="an hs.Task")),
        max_loss_rise=(max_loss_rise, Kind("a fraction above 0, such as 0.01 for one per cent,", POSITIVE.has) | NONE),
        minutes=(minutes, POSITIVE),
        device=(device, TEXT),
        seed=(seed, INDEX),
        seeds=(seeds, WHOLE),
        dtypes=(dtypes, listed(one_of(*FORMATS), "a list of formats, 'bf16' and 'fp16',")),
        compile=(compile, FLAG),
        resume=(resume, PATH | NONE),
        on_progress=(on_progress, CALLABLE),
        clock=(clock, CALLABLE),
    )
    where = device_type(device)
    weights = weights_of(target)
    formats = tuple(dict.fromkeys(dtypes)) or low_formats(where)
    with generators_kept():
        lab = Lab(
            task, where, seed=seed, seconds=60.0 * minutes, path=None if resume is None else Path(resume), clock=clock,
            on_progress=on_progress,
        )  # fmt: skip
        steps = lab.steps()
        search = Search(lab, weights, steps, bound=max_loss_rise, dtypes=formats, seeds=seeds, compile=compile)
        search.on_choice = lambda: lab.say(found=_result(search, target))
        try:
            reference = lab.reference(steps, max_loss_rise)
            if reference is None:
                search.notes.append(f"the time was too short for fp32 alone, the reference: {search.missing(ALL)}")
            elif flaw := reference.flaw(max_loss_rise):
                if steps >= task.excerpt_steps or not reference.finite:
                    raise TuneError(f"task {task.name!r}: {flaw}")
                search.notes.append(
                    f"in the {steps} of the excerpt's {task.excerpt_steps} steps that the time allows, {flaw}; more "
                    f"steps fit with smaller batches; with these {search.missing(ALL)}"
                )
            else:
                search.run(reference)
        except KeyboardInterrupt:
            search.interrupted = True
            search.fall_back()
            search.notes.append("interrupted: what was measured is kept, and --resume goes on from there")
    return _result(search, target)


def _result(search: Search, target: str) -> Tuning:
    lab = search.lab
    proof = next((proof for label, proof in search.proofs if label == search.best), None)
    chosen = replace(search[search.best], verdict="chosen", reason=search.reason(proof))
    tried = tuple(chosen if one.label == search.best else one for one in search.measured())
    where_from = "max_loss_rise" if search.given is not None else "fp32's spread from seed to seed"
    return Tuning(
        task=lab.task.name, chosen=chosen, tried=tried, target=target, bound=search.bound,
        bound_from=where_from, proof=proof, proofs=tuple(search.proofs), control=search.control, steps=search.steps,
        seed=lab.seed, device=lab.device, machine=machine(), advice=tuple(_advice(search)), notes=tuple(search.notes),
        finished=search.finished, interrupted=search.interrupted, seconds=lab.spent,
    )  # fmt: skip


def _advice(search: Search) -> Iterator[str]:
    best, lab = search[search.best], search.lab
    if not best.saved_bytes:
        return
    spots = search.audits.get(search.best, Calibration()).spots
    if any(spot.op == "cross_entropy" for spot in spots):
        last = next((spot for spot in reversed(spots) if spot.op == "linear"), None)
        if last is not None and last.bytes > LARGE * best.saved_bytes:
            where = last.module or "the last linear"
            yield (
                f"the result of {where} takes {size(last.bytes)} of {size(best.saved_bytes)} kept for the backward "
                "pass: hs.linear_cross_entropy computes the loss without it"
            )
    if best.saved_bytes > best.state_bytes and (found := _blocks(started(lab.task, lab.seed, "cpu"))):
        count, kind, path = found
        yield (
            f"{size(best.saved_bytes)} are kept for the backward pass and {size(best.state_bytes)} between steps: "
            f"torch.utils.checkpoint around each of the {count} {kind} in {path} keeps their inputs only, "
            "for about one more forward pass"
        )


def _blocks(model: nn.Module) -> tuple[int, str, str] | None:
    found: list[tuple[int, str, str]] = []
    for path, module in model.named_modules():
        kinds = Counter(type(child).__name__ for child in module.children() if any(child.children()))
        found += [(count, kind, path or "the model") for kind, count in kinds.items() if count >= OFTEN]
    return max(found, key=lambda row: row[0], default=None)


def weights_of(target: str) -> Weights:
    """Return what "time", "memory" or "0.7:0.3" means."""
    words = {"time": "1:0", "memory": "0:1"}
    try:
        time_weight, memory_weight = map(float, words.get(str(target), str(target)).split(":"))
        total = time_weight + memory_weight
        if not (time_weight >= 0 and memory_weight >= 0 and 0 < total < math.inf):
            raise ValueError
    except ValueError:
        raise TuneError(
            f'target={target!r}; expected "time", "memory", or the weights of both, such as "0.7:0.3"'
            f"{did_you_mean(str(target), words)}"
        ) from None
    return Weights(time=time_weight / total, memory=memory_weight / total)


def low_formats(device: str) -> tuple[str, ...]:
    """Return the low formats that a device has units for; without any bf16, which every device computes in somehow."""
    there = hs.policy.units(device)
    return tuple(name for name in FORMATS if getattr(there, name)) or ("bf16",)
