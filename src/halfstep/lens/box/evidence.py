"""Evidence: a bad step in one file, to be replayed later or elsewhere.

``halfstep-blackbox-STEP.pt`` holds what a replay needs: batch, random states, buffers, weights, policy, seeds and the
history of the run, as plain containers and tensors (``torch.load(weights_only=True)`` reads it), and ``.txt`` the
report. Number and size are bounded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.accelerators import type_here
from halfstep.errors import StepError
from halfstep.lens.box.diagnose import Subject
from halfstep.lens.box.sharded import is_gathered, whole_state
from halfstep.lens.calls import PLAIN_TYPES, is_sharded
from halfstep.lens.verdict import Verdict
from halfstep.step.record import MicroBatch, versions_of
from halfstep.trees import map_tensors, tensors

__all__ = ["load_evidence", "load_weights", "save_evidence", "window_of"]

VERSION = 1
MOST_FILES = 4  # of a run
MOST_IN_FOLDER = 16  # of all runs that share it, for each rank
MOST_BYTES = 1 << 30  # with weights
MOST_BATCHES = 1 << 30  # bytes of micro-batches
SHOWN = 3  # weights named that do not fit


def save_evidence(folder: Path, subject: Subject, verdict: Verdict, written: list[Path]) -> str:
    """Write the evidence of a step into `folder`; return the file's name, or in words why there is none.

    Args:
        folder: made if it is not there.
        subject: the step.
        verdict: on the step.
        written: files written so far, the oldest first; beyond `MOST_FILES` the oldest are removed, and in the folder
            those of other runs beyond `MOST_IN_FOLDER`.
    """
    rank = f"-rank{subject.rank}" if subject.rank else ""
    path = folder / f"halfstep-blackbox-{subject.step}{rank}.pt"
    part = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content, notes = _content(subject, verdict)
        path.with_suffix(".txt").write_text("\n".join([str(verdict), *notes]) + "\n", encoding="utf-8")
        if content is not None:
            torch.save(content, part)
            part.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError without that word
        _remove(part)
        hint = "" if isinstance(error, OSError) else " (is the disk full?)"
        outcome = f"evidence of step {subject.step} could not be written to {str(folder)!r}: {error}{hint}"
    else:
        alone = f"evidence of step {subject.step} is its report alone: {notes[-1] if notes else ''}"
        outcome = alone if content is None else str(path)
    if path in written:
        written.remove(path)
    written.append(path)  # also where there is no more than the report
    surplus = [written.pop(0) for _ in range(len(written) - MOST_FILES)]
    for old in [*surplus, *_surplus(folder, rank)]:
        _remove(old)
        _remove(old.with_suffix(".txt"))
    return outcome


def _surplus(folder: Path, rank: str) -> list[Path]:
    """Return the oldest files of a rank in `folder` beyond `MOST_IN_FOLDER`, of all runs."""
    name = re.compile(rf"halfstep-blackbox-\d+{rank}\.txt")
    found = []
    try:
        for path in folder.iterdir():
            if name.fullmatch(path.name):
                found.append((path.stat().st_mtime_ns, path.name, path.with_suffix(".pt")))
    except OSError:  # another run has just removed one, or there is no folder: next time
        return []
    return [path for _, _, path in sorted(found)[:-MOST_IN_FOLDER]]


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # it stays


def _content(subject: Subject, verdict: Verdict) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what to save, None if the micro-batches are too large or not kept, and notes on it."""
    if subject.gone:
        return None, [subject.gone]
    notes: list[str] = []
    window = []
    for kept in subject.replay.window:
        batch = _portable([kept.batch, kept.named], notes)
        window.append({
            "batch": list(batch[0]), "named": dict(batch[1]), "random": {k: v.clone() for k, v in kept.random.items()},
            "loss": _cpu(kept.loss), "seed": _cpu(kept.seed),
        })  # fmt: skip
    names = {id(m): n for n, m in subject.model.named_modules()}
    buffers = [(names[id(m)], n, _cpu(v)) for m, n, v in subject.replay.buffers if id(m) in names]
    state = {n: _cpu(v) for n, v in _state(subject.model).items() if isinstance(v, Tensor)}
    if is_sharded(subject.model):
        notes.append("weights are left out: this rank has a part of them")
    alone = sum(t.numel() * t.element_size() for t in tensors(window))
    if alone > MOST_BATCHES:
        return None, [*notes, f"its micro-batches are {alone >> 20} MiB, more than {MOST_BATCHES >> 20}"]
    size = sum(t.numel() * t.element_size() for t in tensors((window, state)))
    if size > MOST_BYTES:
        notes.append(f"weights are left out: with them it is {size >> 20} MiB, more than {MOST_BYTES >> 20}")
        state = {}
    fields = {f.name: getattr(verdict, f.name) for f in dataclasses.fields(verdict) if f.name != "cures"}
    fields["story"] = [dataclasses.asdict(row) for row in verdict.story]
    fields["cures"] = [
        {"policy": None if c.policy is None else c.policy.to_toml(), "text": c.text, "verified": c.verified}
        for c in verdict.cures
    ]
    return {
        "halfstep_blackbox": VERSION,
        "torch": str(torch.__version__),
        "verdict": fields,
        "policy": None if subject.policy is None else subject.policy.to_toml(),
        "scaling": subject.scaling,
        "scale": subject.scale,
        "step": subject.step,
        "signals": None if subject.signals is None else subject.signals.saved(),
        "rank": subject.rank,
        "window": window,
        "buffers": buffers,
        "model": state,
    }, notes


def _state(model: nn.Module) -> dict[str, Any]:
    """Return the weights of a model; nothing of one that is sharded at the moment."""
    if is_sharded(model):
        return {}
    return whole_state(model) if is_gathered(model) else model.state_dict()


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()


def _portable(tree: Any, notes: list[str]) -> Any:
    """Return `tree` on the CPU, in lists, dicts and tuples; other values become their repr."""
    if isinstance(tree, Tensor):
        return _cpu(tree)
    if isinstance(tree, PLAIN_TYPES):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [_portable(item, notes) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, Mapping):
        return {_portable(k, notes): _portable(v, notes) for k, v in tree.items()}
    notes.append(f"a {type(tree).__name__} of the batch is kept as text")
    return repr(tree)


def load_evidence(path: str | Path) -> dict[str, Any]:
    """Return what `save_evidence` wrote.

    Raises:
        StepError: the file is not there or is no evidence.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition(". ")[0]  # torch goes on with how to load files unsafely
        raise StepError(
            f"cannot read {str(path)!r} as evidence of a black box ({type(error).__name__}: {reason}); expected a "
            "halfstep-blackbox-STEP.pt, complete and as it was written"
        ) from error
    if not isinstance(content, dict) or content.get("halfstep_blackbox") != VERSION:
        raise StepError(f"{str(path)!r} holds no evidence of a halfstep black box of version {VERSION}")
    return content


def load_weights(model: nn.Module, content: Mapping[str, Any], path: str | Path) -> None:
    """Put the weights of an evidence file into `model`; none if the file holds none.

    Raises:
        StepError: they are those of another model; `model` is as before.
    """
    weights = content["model"]
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if not weights:
        return
    odd = [f"{name} is missing" for name in own if name not in weights]
    odd += [f"{name} is not in the model" for name in weights if name not in own]
    odd += [
        f"{name} is {tuple(weights[name].shape)} and {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in weights and not is_lazy(tensor) and weights[name].shape != tensor.shape
    ]
    if odd:
        more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        what = f"{', '.join(odd[:SHOWN])}{more}; is it the model of that run?"
        raise StepError(f"the weights in {str(path)!r} do not fit the task's {type(model).__name__}: {what}")
    model.load_state_dict(weights, strict=False)  # only tensors were kept


def window_of(content: Mapping[str, Any], device: torch.device) -> list[MicroBatch]:
    """Return the micro-batches of an evidence file on `device`."""
    window = []
    for item in content["window"]:
        batch, named = map_tensors((item["batch"], item["named"]), lambda t: t.to(device))
        random = {d: s for d, s in item["random"].items() if d.partition(":")[0] in {"cpu", type_here()}}
        loss, seed = (None if item[n] is None else item[n].to(device) for n in ("loss", "seed"))
        window.append(MicroBatch(tuple(batch), dict(named), random, versions_of((batch, named)), loss, seed))
    return window
