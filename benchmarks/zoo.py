"""Train tiny models of transformers' architectures under five presets in bf16 and fp16, and write a JSON file.

    python -m benchmarks.zoo --json benchmarks/results/zoo.json [--only NAME] [--seconds 60] [--parts out/zoo.jsonl]

Every architecture of `benchmarks.zoo_models` is built tiny from its config, with seeded weights and generated inputs;
nothing is downloaded. It trains for `STEPS` updates of AdamW in fp32, under torch.amp, and under each preset by
`hs.TrainStep`. Compared are, with fp32 as the reference:

- `loss`: the largest difference of two loss curves, in units of the largest loss of the curve in fp32;
- `out`: the same of the first output of the first step.

Bounds (`zoo_tables.bound`), stated before the first run: a preset deviates by at most `FACTOR` times what torch.amp
deviates, plus `FLOOR` roundings of the low format (u = eps / 2). The floor: where torch.amp's errors happen to cancel,
a preset that rounds in other places still has the error of a rounding. `torch`, `O1` and `mixed` move single operators
from one format to the other: twice torch.amp and two roundings. `O2` and `pure` also round weights and the residual
stream, in these models of two layers about as many more roundings as torch.amp makes: four times and four. What is
outside keeps its number and gets a reason (`benchmarks.zoo_tables`). Two measurements help to find it. `control`: how
far fp32 and torch.amp themselves get if the initial weights are changed by at most u, relative, which is the least that
any use of the format does. A deviation of at most twice that is one of the model's conditioning: a choice that flips (a
route, a match). `gradients`: the median relative error of the first gradients. If they are as torch.amp's, AdamW makes
the difference, whose first steps follow signs only, also those of gradients that are zero but for rounding errors.

Also compared: tokens of `generate` with those of torch.amp; `deepcopy`, `state_dict` and `save_pretrained` of a
prepared model, bit for bit. Each architecture runs in a forked process with a limit of time and memory. An architecture
that cannot be built or run in fp32 is a row with the reason. Rows are appended to `--parts` at once, and a second run
with the same file continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import halfstep as hs
from benchmarks import zoo_models
from benchmarks.stamp import commit, stamped
from benchmarks.zoo_models import SEED, Tiny, loss_fn, seed
from benchmarks.zoo_tables import bound
from halfstep.tasks import machine

Region = AbstractContextManager[Any]
PRESETS = ("torch", "O1", "mixed", "O2", "pure")
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 4  # losses of a curve; the first is that of the initial weights
RATE = 1e-3
GENTLE = 2.0**4  # scale of a loss whose gradients are compared
SCALE = 2.0**10  # of fp16's loss at the start: no step is skipped only to find it
MOST_SKIPPED = 15  # updates of a run: from 2**10 down to 2**-5
NEW_TOKENS = 4
MEMORY = 8 << 30  # bytes of address space of one architecture's process
LARGEST = 3_000_000  # parameters; a model above it is not tiny


# ------------------------------------------------------------------ training


class Curve:
    """What a run left: the losses of updates that were applied, the first output, and the number of skipped updates.

    A skipped update changes nothing but the scale, so that it is no part of the curve.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.output: Tensor | None = None
        self.skipped = 0

    @property
    def wants_more(self) -> bool:
        return len(self.losses) < STEPS and self.skipped < MOST_SKIPPED

    def add(self, loss: Tensor, output: Tensor, *, skipped: bool) -> None:
        if skipped:
            self.skipped += 1
        else:
            self.losses.append(loss.item())
        if self.output is None:
            self.output = output.detach().float().clone()

    def deviation(self, reference: Curve) -> dict[str, float]:
        """Return how far this run is from the reference, relative to it."""
        assert self.output is not None and reference.output is not None
        if len(self.losses) < STEPS:
            return {"loss": math.inf, "out": rounded(distance(self.output, reference.output))}
        largest = max(abs(loss) for loss in reference.losses)
        pairs = zip(self.losses, reference.losses, strict=True)
        return {
            "loss": rounded(max(abs(a - b) for a, b in pairs) / max(largest, 1e-30)),
            "out": rounded(distance(self.output, reference.output)),
        }


def rounded(value: float) -> float:
    """Return a number with three digits."""
    return float(f"{value:.3g}")


def positions(value: Tensor, reference: Tensor, most: float) -> list[int]:
    """Return how many positions (all but the last dimension) differ by more than `most`, and how many there are."""
    real = reference.abs() < 1e4
    unit = reference[real].abs().max().clamp(min=1e-30)
    far = ((value - reference).abs() * real).amax(-1) / unit > most
    return [int(far.sum()), far.numel()]


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference in units of the largest value; masked elements (below -1e4) are left out."""
    if value.shape != reference.shape:
        return math.inf
    real = reference.abs() < 1e4
    value, reference = value[real], reference[real]
    if not reference.numel():
        return 0.0
    found = ((value - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()
    return found if math.isfinite(found) else math.inf


def train_by_hand(model: nn.Module, arguments: dict[str, Any], dtype: torch.dtype | None) -> Curve:
    """Train as with torch alone: in fp32, or under torch.autocast with torch's GradScaler in fp16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype is torch.float16)
    curve = Curve()
    while curve.wants_more:
        seed(SEED + len(curve.losses))
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            loss, output = loss_fn(model, **arguments)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        curve.add(loss.detach(), output, skipped=scaler.get_scale() < before)
    return curve


def train_step(model: nn.Module, policy: hs.Policy) -> hs.TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scaler = hs.GradScaler("cpu", init_scale=SCALE) if policy.dtype == "fp16" else None
    return hs.TrainStep(model, optimizer, loss_fn, policy=policy, scaler=scaler)


def train(model: nn.Module, arguments: dict[str, Any], policy: hs.Policy) -> Curve:
    """Train by hs.TrainStep."""
    step = train_step(model, policy)
    curve = Curve()
    while curve.wants_more:
        seed(SEED + len(curve.losses))
        result = step(**arguments)
        curve.add(result.loss, result.aux, skipped=bool(result.skipped))
    return curve


def control(tiny: Tiny, reference: Curve, dtype: str) -> dict[str, Any]:
    """Return how far fp32 and torch.amp get from the reference if initial weights move by at most a rounding.

    Returns:
        The larger deviation of two draws, in fp32 as "loss" and "out", under torch.amp as "amp_loss" and "amp_out".
    """
    found: dict[str, float] = {}
    eps = torch.finfo(FORMATS[dtype]).eps / 2
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        moved = copy.deepcopy(tiny.model)
        with torch.no_grad():
            for p in moved.parameters():
                p.mul_(1 + eps * (2 * torch.rand(p.shape, generator=generator) - 1))
        for prefix, low in (("", None), ("amp_", FORMATS[dtype])):
            curve, _ = tried(train_by_hand, copy.deepcopy(moved), tiny.arguments, low)
            for key, far in ({} if curve is None else curve.deviation(reference)).items():
                found[prefix + key] = max(found.get(prefix + key, 0.0), far)
    return found


def gradients(tiny: Tiny, policy: hs.Policy | None, region: Region) -> dict[str, Tensor]:
    """Return the gradients of the initial weights, unscaled: of the plain model in a region, or of the prepared one."""
    model = copy.deepcopy(tiny.model)
    if policy is not None:
        hs.prepare(model, policy=policy)
    seed(SEED)
    with region:
        loss, _ = loss_fn(model, **tiny.arguments)
    (GENTLE * loss.float()).backward()
    return {name: p.grad.float() / GENTLE for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the median over parameters of the relative error of their gradients, by 2-norms."""
    errors = [
        ((found[name] - wanted).norm() / wanted.norm().clamp(min=1e-30)).item() if name in found else 1.0
        for name, wanted in reference.items()
    ]
    return rounded(statistics.median(errors)) if errors else 0.0


CHOICES = ("topk", "argmax", "sort", "argsort", "max", "__array__", "numpy", "bincount", "nonzero")


class Choices(TorchFunctionMode):
    """Collect the operators of a forward pass that choose: where two values nearly tie, a rounding decides."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CHOICES:
            self.names.add("matching on the host" if name in ("__array__", "numpy") else name)
        return func(*args, **(kwargs or {}))


def choices(tiny: Tiny) -> list[str]:
    """Return the operators of a model that choose."""
    with Choices() as mode:
        seed(SEED)
        loss_fn(copy.deepcopy(tiny.model), **tiny.arguments)
    return sorted(mode.names)


# ------------------------------------------------------------------ generate


def prompt(tiny: Tiny) -> dict[str, Any]:
    """Return the arguments of generate: copies, since some models write into them."""
    left_out = ("labels", "decoder_input_ids", "decoder_attention_mask", "return_loss")
    return {key: copy.deepcopy(value) for key, value in tiny.arguments.items() if key not in left_out}


def generate(model: nn.Module, arguments: dict[str, Any], region: Region) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens that a model generates greedily, and the scores they were chosen by."""
    model.eval()
    seed(SEED)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    with region, torch.no_grad():
        out = model.generate(**arguments, **options, return_dict_in_generate=True, output_scores=True)  # type: ignore[operator]
    return out.sequences, [scores.float() for scores in out.scores]


def compared_tokens(ours: tuple[Tensor, list[Tensor]], amps: tuple[Tensor, list[Tensor]]) -> dict[str, Any]:
    """Compare generated tokens with torch.amp's.

    Returns:
        {} if they are equal; else "step", where the first tokens differ, "margin": how far torch.amp's two scores lie
        apart, and "moved": the largest difference of the scores there; both relative to the largest score.
    """
    if torch.equal(ours[0], amps[0]):
        return {}
    for number, (mine, its) in enumerate(zip(ours[1], amps[1], strict=True)):
        chosen, other = mine.argmax(-1), its.argmax(-1)
        if not torch.equal(chosen, other):
            first = int((chosen != other).nonzero()[0, 0])
            unit = its[first][its[first] > -1e4].abs().max().item()
            margin = (its[first, other[first]] - its[first, chosen[first]]).item() / unit
            return {
                "step": number,
                "margin": rounded(margin),
                "moved": rounded(distance(mine[first], its[first])),
            }
    return {"step": len(ours[1])}


# ------------------------------------------------------------------ copies


def output_of(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    model.eval()
    seed(SEED)
    with torch.no_grad():
        return loss_fn(model, **arguments)[1].float()


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Return "" if two state_dicts are equal bit for bit, else what differs."""
    if one.keys() != other.keys():
        return f"keys {sorted(one.keys() ^ other.keys())[:3]}"
    for name, value in one.items():
        if value.dtype != other[name].dtype:
            return f"{name} is {other[name].dtype}"
        if not torch.equal(value.nan_to_num(), other[name].nan_to_num()):
            return f"{name} has other values"
    return ""


def copies(tiny: Tiny, model: nn.Module, policy: hs.Policy) -> dict[str, Any]:
    """Copy, save and load a trained prepared model; return what was not equal, by the kind of copy.

    `model` and its copies run in evaluation mode. Each copy must have its state_dict and its output bit for bit. An
    exception: a deep copy of low weights has fp32 weights (docs/concepts/weights.md), so that its output is that of
    other formats: "deepcopy_out" is how far it is.
    """
    found: dict[str, Any] = {}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    output = output_of(model, tiny.arguments)
    for kind, make in (("deepcopy", deep), ("state_dict", reloaded), ("save_pretrained", resaved)):
        if kind == "save_pretrained" and policy.dtype != "bf16":
            continue  # it writes fp32 values, whatever the format of the forward pass
        try:
            other = make(tiny, model, policy)
            said = same_state(state, other.state_dict())
            far = distance(output_of(other, tiny.arguments), output)
        except Exception as error:
            said, far = reason(error), 0.0
        if said:
            found[kind] = said
        elif far and kind == "deepcopy" and policy.params == "low":
            found["deepcopy_out"] = rounded(far)
        elif far:
            found[kind] = f"output differs by {far:.2g}"
    return found


def deep(tiny: Tiny, model: nn.Module, policy: hs.Policy) -> nn.Module:
    return copy.deepcopy(model)


def reloaded(tiny: Tiny, model: nn.Module, policy: hs.Policy) -> nn.Module:
    fresh = copy.deepcopy(tiny.model)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    train_step(fresh, policy)
    fresh.load_state_dict(model.state_dict())
    return fresh


def resaved(tiny: Tiny, model: nn.Module, policy: hs.Policy) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        fresh = type(tiny.model).from_pretrained(folder, dtype=torch.float32)  # type: ignore[attr-defined]
    train_step(fresh, policy)
    return fresh  # type: ignore[no-any-return]


# ------------------------------------------------------------------ one architecture


def reason(error: BaseException) -> str:
    """Return an exception in one line, with the place in the code where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]} ({Path(frame.filename).name}:{frame.lineno})"


def tried(function: Any, *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns and "", or None and the reason."""
    try:
        return function(*arguments), ""
    except Exception as error:
        return None, reason(error)


def measure(name: str, presets: tuple[str, ...] = PRESETS) -> dict[str, Any]:
    """Return the row of one architecture: plain values."""
    began = time.process_time()
    row: dict[str, Any] = {"name": name}
    tiny, why = tried(zoo_models.build, name)
    if tiny is None:
        return row | {"failed": "build", "reason": why}
    row |= {"class": type(tiny.model).__name__, "task": tiny.task, "parameters": zoo_models.count(tiny.model)}
    if row["parameters"] > LARGEST:
        return row | {"failed": "build", "reason": f"{row['parameters']:,} parameters: its config does not shrink"}
    reference, why = tried(train_by_hand, copy.deepcopy(tiny.model), tiny.arguments, None)
    if reference is None:
        return row | {"failed": "fp32", "reason": why}
    if not all(map(math.isfinite, reference.losses)):
        return row | {"failed": "fp32", "reason": f"losses {reference.losses}"}
    row |= {"inputs": sorted(tiny.arguments), "losses": [rounded(loss) for loss in reference.losses]}
    row |= {"amp": {}, "presets": {}, "control": {}}
    speaks = bool(getattr(tiny.model, "can_generate", bool)())
    for dtype, torch_dtype in FORMATS.items():
        curve, why = tried(train_by_hand, copy.deepcopy(tiny.model), tiny.arguments, torch_dtype)
        amp = {"raises": why} if curve is None else {**curve.deviation(reference), "skipped": curve.skipped}
        row["amp"][dtype] = amp
        amps = None
        if speaks:
            region = torch.autocast("cpu", torch_dtype)
            amps, why = tried(generate, copy.deepcopy(tiny.model), prompt(tiny), region)
            if amps is None:
                amp["generate"] = why
        for preset in presets:
            row["presets"][f"{preset}:{dtype}"] = one_preset(tiny, reference, amps, curve, preset, dtype)
        if not all(inside(row, f"{preset}:{dtype}") for preset in presets):
            row["control"][dtype] = control(tiny, reference, dtype) | compared_gradients(tiny, dtype, presets)
    if row["control"]:
        row["chooses"] = tried(choices, tiny)[0] or []
    return row | {"seconds": round(time.process_time() - began, 1)}


def compared_gradients(tiny: Tiny, dtype: str, presets: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return {"gradients": {"torch.amp" or a preset: error of its first gradients}}; what raises is left out."""
    wanted = gradients(tiny, None, nullcontext())
    found: dict[str, float] = {}
    cases: dict[str, tuple[hs.Policy | None, Region]] = {"torch.amp": (None, torch.autocast("cpu", FORMATS[dtype]))}
    cases |= {preset: (hs.Policy.of(preset, dtype=dtype), nullcontext()) for preset in presets}
    for name, (policy, region) in cases.items():
        made, _ = tried(gradients, tiny, policy, region)
        if made is not None:
            found[name] = gradient_error(made, wanted)
    return {"gradients": found}


def one_preset(tiny: Tiny, reference: Curve, amps: Any, amp: Curve | None, preset: str, dtype: str) -> dict[str, Any]:
    """Return what one preset does in one format; `amp` and `amps` are torch.amp's curve and tokens, or None."""
    policy = hs.Policy.of(preset, dtype=dtype)
    model = copy.deepcopy(tiny.model)
    curve, why = tried(train, model, tiny.arguments, policy)
    if curve is None:
        return {"raises": why}
    found: dict[str, Any] = {**curve.deviation(reference), "skipped": curve.skipped}
    allowed = bound(preset, dtype, 0.0 if amp is None else amp.deviation(reference)["out"])
    if allowed < found["out"] < math.inf:
        assert curve.output is not None and reference.output is not None
        found["positions"] = positions(curve.output, reference.output, allowed)
    if preset == "torch" and dtype == "bf16" and amp is not None:
        found["as_amp"] = curve.losses[0] == amp.losses[0] and torch.equal(curve.output, amp.output)  # type: ignore[arg-type]
    if differs := copies(tiny, model, policy):
        found["copies"] = differs
    if amps is not None:
        fresh = copy.deepcopy(tiny.model)
        hs.prepare(fresh, policy=policy)
        ours, why = tried(generate, fresh, prompt(tiny), nullcontext())
        if ours is None:
            found["generate"] = {"raises": why}
        else:
            found["generate"] = compared_tokens(ours, amps)
    return found


def inside(row: dict[str, Any], name: str) -> bool:
    """Return whether a preset of a row is within its bounds and generates torch.amp's tokens."""
    preset, dtype = name.split(":")
    found, amp = row["presets"][name], row["amp"][dtype]
    if "raises" in found or found.get("generate"):
        return False
    return all(found[key] <= bound(preset, dtype, amp.get(key, 0.0)) for key in ("loss", "out"))


# ------------------------------------------------------------------ all of them


def in_child(name: str, presets: tuple[str, ...], seconds: int) -> dict[str, Any]:
    """Measure an architecture in a forked process, which a limit of time ends."""
    read, written = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20 * seconds)  # for what waits; a busy machine may be slow
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            row = measure(name, presets)
        except BaseException as error:
            row = {"name": name, "failed": "measure", "reason": reason(error)}
        os.write(written, json.dumps(row).encode())
        os._exit(0)
    os.close(written)
    with os.fdopen(read, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"name": name, "failed": "time", "reason": f"no result in {seconds} s"}


def rows(names: list[str], presets: tuple[str, ...], parts: Path | None, seconds: int) -> Iterator[dict[str, Any]]:
    """Measure architectures; those in the file `parts` are read from it, and the others are appended."""
    known = {}
    if parts is not None and parts.is_file():
        known = {row["name"]: row for row in map(json.loads, parts.read_text(encoding="utf-8").splitlines())}
    for name in names:
        if name in known:
            yield known[name]
            continue
        row = in_child(name, presets, seconds)
        print(name, row.get("failed", "measured"), row.get("reason", row.get("seconds")), file=sys.stderr, flush=True)
        if parts is not None:
            parts.parent.mkdir(parents=True, exist_ok=True)
            with parts.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def report(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of all rows."""
    import transformers

    return {
        "command": "python -m benchmarks.zoo --parts out/zoo.jsonl --json benchmarks/results/zoo.json",
        "commit": commit(),
        "machine": machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "names": len(zoo_models.names()),
        "rows": found,
    }


def save(path: Path | None, made: dict[str, Any]) -> None:
    """Write a report with one line for each architecture, or print it."""
    head = json.dumps({key: value for key, value in made.items() if key != "rows"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in made["rows"])
    text = f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
    if path is None:
        print(text)
    else:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--only", action="append", metavar="NAME", help="an architecture; may be given several times")
    parser.add_argument("--presets", default=",".join(PRESETS), help="of these presets only")
    parser.add_argument("--seconds", type=int, default=60, help="the limit of one architecture, of the processor")
    parser.add_argument("--parts", type=Path, help="where rows are kept as they are made, and read from")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("llama", "vit"):  # imported once, in this process
        zoo_models.build(name)
    names = options.only or zoo_models.names()
    found = list(rows(names, tuple(options.presets.split(",")), options.parts, options.seconds))
    save(options.json, stamped(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
