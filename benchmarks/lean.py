"""What training loses when nothing is kept behind bf16 weights: the preset `lean` beside fp32 and its neighbours.

    python -m benchmarks.lean --parts out/lean --json benchmarks/results/lean.json

Three programs. `gpt` and `resnet` are the tasks of ``halfstep compare``, 3,000 steps each from another start with every
seed; the GPT with 8 rows a batch. `tune 1e-5` and `tune 1e-6` go on from the weights that fp32 reached on `gpt` with
seed 0: AdamW at a constant learning rate of that size with weight decay 0.1, on other text (sources of Python's
standard library, where the GPT was trained on its documentation). An update there is a small part of the distance
between two bf16 numbers. A candidate is a loop of `halfstep.tasks.loops`; `to nearest` keeps nothing and rounds to
nearest, which must fail there: it shows that the measurement sees lost updates.

The metric of `tune` is computed in fp32 from the weights that a checkpoint would contain; its margin is a tenth of what
fp32 gained. Distances are norms over all
weights together. Runs are appended to PARTS/runs.jsonl, and those in it are not run again; final weights lie beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import halfstep as hs
from benchmarks.peers import imported
from benchmarks.stamp import commit, write
from halfstep.tasks import Task, load_task, machine
from halfstep.tasks.candidates import Candidate
from halfstep.tasks.gpt import corpus, windows
from halfstep.tasks.loops import Loop, make_loop
from halfstep.tasks.measure import difference, state_bytes
from halfstep.tasks.task import STEPS_OF_A_SEED

STEPS, TUNE_STEPS = 3000, 1000
ROWS, TUNE_ROWS = 8, 4  # sequences a batch: the GPT's own 16 take twice the time
START = ("gpt", "fp32", 0)  # the run whose weights `tune` starts from
RATES = ("1e-5", "1e-6")
DECAY = 0.1
MARGIN = 0.1  # of what fp32 gained in `tune`; the other programs have their task's margin
VALIDATION = 64  # windows of the validation text of `tune`

BF16 = {
    "pure": hs.Policy.of("pure", dtype="bf16"),
    "lean": hs.Policy.of("lean", dtype="bf16"),
    "pure, kahan": hs.Policy.of("pure", dtype="bf16", master="kahan"),
    "to nearest": hs.Policy.of("pure", dtype="bf16", master="none"),
}
AO = "torchao AdamW8bit"
CANDIDATES = {
    "fp32": Candidate(label="fp32", dtype="fp32"),
    "torch.amp": Candidate(label="torch.amp", dtype="bf16"),
    **{label: Candidate(label=label, dtype="bf16", policy=policy) for label, policy in BF16.items()},
    AO: Candidate(label=AO, dtype="fp32"),  # a bf16 model in a loop without a region
}
PLAN: dict[str, tuple[str, ...]] = {
    "gpt": ("fp32", "torch.amp", "pure", "lean", "pure, kahan"),
    "resnet": ("fp32", "torch.amp", "pure", "lean", "pure, kahan"),
    **{f"tune {rate}": ("fp32", "torch.amp", "pure", "lean", "pure, kahan", "to nearest") for rate in RATES},
}
SEEDS = {"gpt": 2, "resnet": 2, **{f"tune {rate}": 3 for rate in RATES}}
SLOW = {f"tune {rate}": 1 for rate in RATES}  # seeds of torchao, which takes three times a step's time


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one candidate.

    Attributes:
        program: `gpt`, `resnet`, `tune 1e-5` or `tune 1e-6`.
        label: the candidate.
        seed: of weights and batches; of batches alone in `tune`.
        steps: how many.
        metric: the task's, at the end.
        bytes: of parameters, buffers, optimizer state and what is kept behind weights, a parameter.
        skipped: steps that were not applied.
        seconds: of the processor.
    """

    program: str
    label: str
    seed: int
    steps: int
    metric: float
    bytes: float
    skipped: int
    seconds: float


# ------------------------------------------------------------------ programs


def program(name: str, start: Callable[[], dict[str, Tensor]]) -> Task:
    """Return the task of a program; `start` returns the weights that `tune` begins with."""
    if name == "resnet":
        return load_task("resnet")
    task = load_task("gpt")
    if name == "gpt":
        about = task.about.replace("batch 16", f"batch {ROWS}")
        return replace(task, batches=lambda seed, step: _rows(task.batches(seed, step), ROWS), about=about)
    rate = float(name.removeprefix("tune "))

    def started() -> nn.Module:
        model = task.model()
        model.load_state_dict(start())
        return model

    def optimizer(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=rate, weight_decay=DECAY)

    return replace(
        task, name=name, model=started, batches=other_batches, optimizer=optimizer, scheduler=None, metric=other_loss,
        about=f"the GPT that fp32 trained, on sources of Python; learning rate {rate:g}, weight decay {DECAY:g}, batch "
        f"{TUNE_ROWS} x 64",
    )  # fmt: skip


def _rows(batch: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    return tuple(t[:count] for t in batch)


@cache
def other_text() -> tuple[Tensor, Tensor]:
    """Return the training and the validation part of sources of Python, in the characters of the documentation."""
    from pydoc_data.topics import topics

    index = {c: i for i, c in enumerate(sorted(set("\n".join(topics[name] for name in sorted(topics)))))}
    names = ("argparse", "dataclasses", "inspect", "logging", "subprocess", "tarfile", "typing", "zipfile")
    texts = [Path(import_module(name).__file__ or "").read_text(encoding="utf-8") for name in names]
    tokens = torch.tensor([index[c] for c in "\n".join(texts) if c in index])
    cut = 9 * len(tokens) // 10
    return tokens[:cut], tokens[cut:]


def other_batches(seed: int, step: int) -> tuple[Tensor, ...]:
    """Return batch `step` of a run of `tune`."""
    train, _ = other_text()
    length = len(train) - 65  # of a window and its last target
    generator = torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + step)
    return windows(train, torch.randint(length, (TUNE_ROWS,), generator=generator))


def other_loss(model: nn.Module) -> float:
    """Return the loss on the validation part, nats a character, of the weights of `model`'s checkpoint in fp32."""
    wide = load_task("gpt").model()
    wide.load_state_dict(model.state_dict())
    held_out = other_text()[1]
    tokens, targets = windows(held_out, torch.linspace(0, len(held_out) - 66, VALIDATION).long())
    with torch.autocast("cpu", enabled=False):
        return float(F.cross_entropy(wide.eval()(tokens).flatten(0, 1), targets.flatten()))


def with_torchao(task: Task) -> Task:
    """Return `task` with a bf16 model, fp32 scores and torchao's AdamW with 8-bit states and stochastic rounding."""
    make = imported("torchao.optim").AdamW8bit
    plain = task.optimizer(nn.Linear(1, 1)).defaults

    def optimizer(model: nn.Module) -> Optimizer:
        made: Optimizer = make(
            model.parameters(), lr=plain["lr"], betas=plain["betas"], weight_decay=plain["weight_decay"],
            bf16_stochastic_round=True,
        )  # fmt: skip
        return made

    def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    return replace(task, model=lambda: task.model().bfloat16(), optimizer=optimizer, loss_fn=loss_fn)


# ------------------------------------------------------------------ runs


def train(task: Task, candidate: Candidate, seed: int, steps: int) -> tuple[Loop, Run]:
    """Train `task` once."""
    if candidate.label == AO:
        task = with_torchao(task)
    torch.manual_seed(seed)
    loop = make_loop(candidate, task, task.model(), steps)
    begun = time.process_time()
    for step in range(steps):
        torch.manual_seed(STEPS_OF_A_SEED * seed + step)
        loop(task.batches(seed, step))
    seconds = time.process_time() - begun
    loop.model.eval()
    with torch.no_grad():
        metric = loop.evaluate(task)
    count = sum(p.numel() for p in loop.model.parameters())
    return loop, Run(
        program=task.name, label=candidate.label, seed=seed, steps=steps, metric=metric,
        bytes=state_bytes(*loop.state) / count, skipped=len(loop.skipped()), seconds=seconds,
    )  # fmt: skip


def planned() -> Iterator[tuple[str, str, int]]:
    """Return (program, candidate, seed) of every run, whole seeds first."""
    for seed in range(max(SEEDS.values())):
        yield from ((name, label, seed) for name, labels in PLAN.items() if seed < SEEDS[name] for label in labels)
    for name, seeds in SLOW.items():
        yield from ((name, AO, seed) for seed in range(seeds))


def weights_file(parts: Path, key: tuple[str, str, int]) -> Path:
    return parts / f"{'-'.join(map(str, key)).replace(' ', '_')}.pt"


def runs(parts: Path) -> list[Run]:
    """Return every planned run, from PARTS/runs.jsonl or trained now."""
    parts.mkdir(parents=True, exist_ok=True)
    file = parts / "runs.jsonl"
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else ()
    known = {(row["program"], row["label"], row["seed"]): Run(**row) for row in rows}
    for key in planned():
        if key in known:
            continue
        name, label, seed = key
        task = program(name, lambda: torch.load(weights_file(parts, START)))
        loop, known[key] = train(task, CANDIDATES[label], seed, TUNE_STEPS if name.startswith("tune") else STEPS)
        torch.save({k: v.float() for k, v in loop.model.state_dict().items()}, weights_file(parts, key))
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(known[key])) + "\n")
        print(*key, known[key].metric, f"{known[key].seconds:.0f} s", file=sys.stderr, flush=True)
    return [known[key] for key in planned()]


# ------------------------------------------------------------------ report


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in weights.values()])


def ways(start: Tensor, fp32: Tensor, found: Tensor) -> dict[str, float]:
    """Compare the way that weights went in `tune` with fp32's.

    Args:
        start: the weights at the beginning, all in one tensor.
        fp32: where fp32 ended on the same batches.
        found: where the candidate ended.

    Returns:
        `distance`: from fp32's end, over the length of fp32's way. `along`: the part of fp32's way that the candidate
        went in its direction; 1 if no update is lost on average.
    """
    way = fp32 - start
    return {
        "distance": float((found - fp32).norm() / way.norm()),
        "along": float((found - start) @ way / (way @ way)),
    }


def candidate_row(name: str, label: str, own: Sequence[Run], fp32: Sequence[Run], margin: float) -> dict[str, Any]:
    metrics = [run.metric for run in own]
    return {
        "label": label,
        "metrics": metrics,
        "difference": asdict(
            difference(metrics, [run.metric for run in fp32[: len(own)]], margin, higher=name == "resnet")
        ),
        "bytes": own[0].bytes,
        "skipped": [run.skipped for run in own],
        "seconds": [run.seconds for run in own],
    }


def report(parts: Path, found: Sequence[Run]) -> dict[str, Any]:
    """Return the report of all runs."""
    programs = {}
    for name, labels in PLAN.items():
        by = {label: [r for r in found if (r.program, r.label) == (name, label)] for label in (*labels, AO)}
        fp32 = by["fp32"]
        task, reached = program(name, dict), statistics.fmean(run.metric for run in fp32)
        before = start_loss(parts) if name.startswith("tune") else None
        margin = task.margin_around(reached) if before is None else MARGIN * (before - reached)
        rows = [candidate_row(name, label, own, fp32, margin) for label, own in by.items() if own]
        programs[name] = {
            "about": task.about,
            "metric": task.metric_name,
            "steps": fp32[0].steps,
            "margin": margin,
            "spread": statistics.stdev(run.metric for run in fp32),
            "rows": rows,
        }
        if before is not None:
            programs[name] |= {"before": before, **tuned(parts, name, rows)}
    return {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.lean --parts out/lean --json benchmarks/results/lean.json",
        "commit": commit(),
        "machine": machine(),
        "torchao": imported("torchao").__version__,
        "programs": programs,
    }


def start_loss(parts: Path) -> float:
    """Return the metric of `tune` before the first step."""
    model = load_task("gpt").model()
    model.load_state_dict(torch.load(weights_file(parts, START)))
    with torch.no_grad():
        return other_loss(model)


def tuned(parts: Path, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the ways of the weights to `rows`, and return what they are to be compared with.

    Returns:
        `between`: the distance between fp32's ends on other batches. `rounded`: the distance of fp32's end rounded to
        bf16, the smallest that bf16 weights can have.
    """
    start = flat(torch.load(weights_file(parts, START)))

    def ends(label: str, count: int) -> list[Tensor]:
        return [flat(torch.load(weights_file(parts, (name, label, seed)))) for seed in range(count)]

    fp32 = ends("fp32", SEEDS[name])
    for row in rows:
        own = [ways(start, wide, end) for wide, end in zip(fp32, ends(row["label"], len(row["metrics"])), strict=False)]
        row |= {key: [way[key] for way in own] for key in ("distance", "along")}
    pairs = [ways(start, one, other)["distance"] for one in fp32 for other in fp32 if one is not other]
    rounded = [ways(start, end, end.bfloat16().double())["distance"] for end in fp32]
    return {"between": statistics.fmean(pairs), "rounded": statistics.fmean(rounded)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, required=True, help="folder of runs and weights, read and added to")
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    corpus()
    write(options.json, report(options.parts, runs(options.parts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
