"""Evidence: a bad step in a file that holds what a replay needs, and its report in another, for their owner alone.

``halfstep-blackbox-STEP.pt`` is plain containers and tensors (``torch.load(weights_only=True)``) and their checksum.
"""

import hashlib
import mmap
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.accelerators import type_here
from halfstep.arguments import Kind, number, whole
from halfstep.binding.fsdp import is_gathered
from halfstep.checkpoints.files import read_state
from halfstep.errors import StepError, few
from halfstep.kernels.sharded import has_parts
from halfstep.lens.box.diagnose import FOREIGN, Subject
from halfstep.lens.verdict import Verdict
from halfstep.optim import stepped_by
from halfstep.schema import Each, check, regular, text
from halfstep.step.parts.record import MicroBatch, Window, versions_of
from halfstep.torch_private.modules import non_persistent_buffers
from halfstep.trees import map_tensors, tensors

VERSION = 4
PLAIN_TYPES = (int, float, bool, str, bytes, type(None), Tensor)  # types of values that are kept as they are
MOST_FILES = 4  # of a run
MOST_IN_FOLDER = 16  # of all runs that share it, for each rank
MOST_BYTES = 1 << 30  # with weights
MOST_BATCHES = 1 << 30  # bytes of micro-batches
MOST_FILE = 3 << 30  # bytes of a file that is read
SHOWN = 3  # weights named that do not fit
SEAL = re.compile(rb"\nsha256 ([0-9a-f]{64})\n")  # the end of a file: the sum of all bytes before it
SEAL_BYTES = 73
SAME = ("scaling", "scale", "floor", "step", "dropped", "clip_value", "rank")  # as the fields of a `Subject`


def _is_tree(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_tree, (*value, *value.values())))
    return all(map(_is_tree, value)) if type(value) in {list, tuple} else isinstance(value, PLAIN_TYPES)


TENSOR = Kind("a tensor of the CPU", lambda value: isinstance(value, Tensor) and value.device.type == "cpu")
TREE = Kind("plain containers of tensors and values", _is_tree)
REAL = Kind("a float", lambda value: type(value) is float)
EVIDENCE = {  # what a file holds
    "halfstep_blackbox": whole(VERSION, VERSION),
    "torch": str,
    "verdict": Each(str, Any),
    "policy": (None, str),
    "region": text(f"|{'|'.join(FOREIGN)}", "where the loop opens its regions"),
    "scaling": text("none|static|dynamic", '"none", "static" or "dynamic"'),
    "scale": number(finite=False),
    "floor": REAL,
    "step": whole(),
    "dropped": whole(),
    "notes": [str, ...],
    "clip_norm": (None, REAL, Each(str, REAL)),
    "clip_value": (None, REAL),
    "signals": {
        "updates": [[whole(), REAL, REAL, bool], ...], "weights": [[whole(), REAL, whole()], ...],
        "inputs": [[whole(), [REAL, ...]], ...],
    },
    "rank": whole(),
    "window": [
        {"batch": [TREE, ...], "named": Each(str, TREE), "loss": (None, TENSOR), "seed": (None, TENSOR),
         "random": Each(text("cpu|[a-z]+:[0-9]{1,3}", "a device"), TENSOR)},
        ...,
    ],
    "buffers": [[str, str, TENSOR], ...],
    "model": Each(str, TENSOR),
    "optimizer": {"groups": [Each(str, TREE), ...], "state": Each(str, Each(str, TREE))},
}  # fmt: skip


def save_evidence(folder: Path, subject: Subject, verdict: Verdict, written: list[Path]) -> str:
    """Write the evidence of a step into `folder`; return the file's name, or in words why there is none.

    The oldest files are removed: of `written`, those of this run, beyond `MOST_FILES`; of all runs `MOST_IN_FOLDER`.
    """
    rank = f"-rank{subject.rank}" if subject.rank else ""
    path = folder / f"halfstep-blackbox-{subject.step}{rank}.pt"
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # whatever the umask
        content, notes = _content(subject, verdict)
        _write(path, verdict, notes, content)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError without that word
        _remove(path.with_suffix(".part"))
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


def restate_evidence(path: Path, verdict: Verdict) -> None:
    """Put another verdict into the evidence and the report in `path`, which say no more than the first one did."""
    if path.exists():
        _write(path, verdict, [], {**load_evidence(path), "verdict": verdict.record()})


def _write(path: Path, verdict: Verdict, notes: list[str], content: dict[str, Any] | None) -> None:
    """Write a report and, if there is one, its content with a checksum; a file is complete or not there."""
    part = path.with_suffix(".part")
    with _private(part) as file:
        file.write("".join(f"{line}\n" for line in (verdict, *notes)).encode())
    part.replace(path.with_suffix(".txt"))
    if content is not None:
        with _private(part) as file:
            torch.save(content, file)
        with part.open("ab") as file:
            file.write(b"\nsha256 %s\n" % _sum(part, part.stat().st_size))
        part.replace(path)


def _surplus(folder: Path, rank: str) -> list[Path]:
    name = re.compile(rf"halfstep-blackbox-\d+{rank}\.txt")
    try:
        found = [path for path in folder.iterdir() if name.fullmatch(path.name)]
        found.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    except OSError:  # another run has just removed one, or there is no folder: next time
        return []
    return [path.with_suffix(".pt") for path in found[:-MOST_IN_FOLDER]]


def _private(path: Path) -> IO[bytes]:
    """Return a new file at `path`, open for writing, that its owner alone can read from its first byte."""
    path.unlink(missing_ok=True)
    file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))
    path.chmod(0o600)  # whatever the umask
    return file


def _sum(path: Path, size: int) -> bytes:
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        return hashlib.sha256(data).hexdigest().encode()


def _remove(path: Path) -> None:
    with suppress(OSError):  # it stays
        path.unlink(missing_ok=True)


def _content(subject: Subject, verdict: Verdict) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what to save, None if the micro-batches are too large or not kept, and notes on it."""
    if subject.gone:
        return None, [subject.gone]
    notes: list[str] = []
    window = []
    for kept in subject.window:
        batch = _portable([kept.batch, kept.named], notes)
        window.append({
            "batch": list(batch[0]), "named": dict(batch[1]),
            "random": {k: g.get_state() for k, g in kept.random.items()},
            "loss": _cpu(kept.loss), "seed": _cpu(kept.seed),
        })  # fmt: skip
    names = {id(m): n for n, m in subject.model.named_modules()}
    buffers = [(names[id(m)], n, _cpu(v)) for m, n, v in subject.buffers if id(m) in names]
    state: dict[str, Any] = {}
    if has_parts(subject.model):
        notes.append("weights are left out: this rank has a part of them")
    else:
        held = _whole_state(subject.model) if is_gathered(subject.model) else subject.model.state_dict()
        state = {n: _cpu(v) for n, v in held.items() if isinstance(v, Tensor)}
    alone = sum(t.numel() * t.element_size() for t in tensors(window))
    if alone > MOST_BATCHES:
        return None, [*notes, f"its micro-batches are {alone >> 20} MiB, more than {MOST_BATCHES >> 20}"]
    size = sum(t.numel() * t.element_size() for t in tensors((window, state)))
    if size > MOST_BYTES:
        notes.append(f"weights are left out: with them it is {size >> 20} MiB, more than {MOST_BYTES >> 20}")
        state = {}
    optimizer = _optimizer_state(subject)
    if not state or (size := size + sum(t.nbytes for t in tensors(optimizer))) > MOST_BYTES:
        optimizer["state"] = {}
    limit = subject.clip_norm
    content = {
        "halfstep_blackbox": VERSION,
        "torch": str(torch.__version__),
        "verdict": verdict.record(),
        "policy": None if subject.policy is None else subject.policy.to_toml(),
        "region": subject.foreign,
        **{name: getattr(subject, name) for name in SAME},
        "notes": list(subject.notes),
        "clip_norm": dict(limit) if isinstance(limit, Mapping) else limit,
        "signals": subject.signals.saved(),
        "window": window,
        "buffers": buffers,
        "model": state,
        "optimizer": optimizer,
    }
    try:
        check(content, EVIDENCE, "evidence", StepError, "it could not be read again")
    except StepError as error:
        return None, [*notes, str(error)]
    return content, notes


def _optimizer_state(subject: Subject) -> dict[str, Any]:
    groups = [] if subject.optimizer is None else subject.optimizer.param_groups
    states = {} if subject.optimizer is None else subject.optimizer.state
    names = subject.names
    return {
        "groups": [_plain({k: v for k, v in group.items() if k != "params"}) for group in groups],
        "state": {names[id(p)]: _plain(s) for p, s in states.items() if id(p) in names and isinstance(s, Mapping)},
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: _cpu(v) if type(v) is Tensor and v.layout is torch.strided else v for k, v in values.items()}
    return {k: v for k, v in kept.items() if _is_tree(v) and {Tensor}.issuperset(map(type, tensors(v)))}


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()


def _portable(tree: Any, notes: list[str]) -> Any:
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
    """Return what `save_evidence` wrote; StepError if the file holds anything else, or is damaged."""
    try:
        path = Path(path)
        size = regular(path, StepError, MOST_FILE, links=True)
        with path.open("rb") as file:
            file.seek(max(0, size - SEAL_BYTES))
            seal = SEAL.fullmatch(file.read())
        if seal is None:
            raise StepError("it does not end in its checksum: it was cut off, or written before evidence had one")
        if _sum(path, size - SEAL_BYTES) != seal[1]:
            raise StepError("it is damaged: its SHA-256 is not the one at its end")
        content: dict[str, Any] = read_state(path)
        check(content, EVIDENCE, path.name, StepError)
    except (OSError, TypeError, StepError) as error:
        raise StepError(
            f"cannot read {str(path)!r} as evidence of a black box: {error}; expected a halfstep-blackbox-STEP.pt as "
            "this version of halfstep writes it; let the bad step run again to get another"
        ) from error
    if not content["window"]:
        raise StepError(f"{str(path)!r} holds no micro-batch in its window")
    held = sum(t.numel() * t.element_size() for t in tensors((content["window"], content["buffers"], content["model"])))
    if held > MOST_FILE:
        raise StepError(f"{str(path)!r} holds tensors of {held >> 20} MiB in a file of {size >> 20}")
    return content


def restored(content: Mapping[str, Any], path: str | Path, model: nn.Module, optimizer: Optimizer) -> Window:
    """Put the state of an evidence file into a model and its optimizer, and return its window on the model's device.

    Weights are put if the file has any, options and state of the optimizer as far as they fit.

    Raises:
        StepError: weights or buffers that are another model's.
    """
    _load_weights(model, content["model"], path)
    _load_optimizer(optimizer, model, content["optimizer"])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    window = []
    for item in content["window"]:
        batch, named = map_tensors((item["batch"], item["named"]), lambda t: t.to(device))
        random = {d: torch.Generator(d) for d in item["random"] if d.partition(":")[0] in {"cpu", type_here()}}
        for kind, generator in random.items():
            generator.set_state(item["random"][kind])
        loss, seed = (None if item[n] is None else item[n].to(device) for n in ("loss", "seed"))
        window.append(MicroBatch(tuple(batch), dict(named), random, versions_of((batch, named)), loss, seed))
    modules, buffers = dict(model.named_modules()), []
    for module, name, value in content["buffers"]:
        if module in modules:
            if name not in modules[module]._buffers:
                raise StepError(f"{f'{module}.{name}'!r} is no buffer of the task's {type(model).__name__}")
            buffers.append((modules[module], name, value.to(device)))
    return Window(window, buffers, content["step"], torch.tensor(float(content["scale"]), device="cpu"))


def _load_weights(model: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if not weights:
        return
    unfit = []
    for name, tensor in own.items():
        kept = weights.get(name)
        if kept is None:
            unfit.append(f"{name} is missing")
        elif not is_lazy(tensor) and kept.shape != tensor.shape:
            unfit.append(f"{name} is {tuple(kept.shape)} and {tuple(tensor.shape)} in the model")
        elif _kind(kept) != _kind(tensor):
            unfit.append(f"{name} is {kept.dtype} and {tensor.dtype} in the model")
    unfit += [f"{name} is not in the model" for name in weights if name not in own]
    if unfit:
        what = f"{few(unfit, SHOWN)}; is it the model of that run?"
        raise StepError(f"the weights in {str(path)!r} do not fit the task's {type(model).__name__}: {what}")
    model.load_state_dict(weights, strict=False)  # only tensors were kept


def _load_optimizer(optimizer: Optimizer, model: nn.Module, kept: Mapping[str, Any]) -> None:
    if len(kept["groups"]) == len(optimizer.param_groups):
        for group, options in zip(optimizer.param_groups, kept["groups"], strict=True):
            group.update({k: v for k, v in options.items() if type(v) is type(group.get(k))})
    stepped = {id(p) for p in stepped_by(optimizer)}
    for name, parameter in model.named_parameters():
        if name in kept["state"] and id(parameter) in stepped:
            optimizer.state[parameter] = map_tensors(kept["state"][name], partial(_beside, parameter))


def _beside(parameter: Tensor, value: Tensor) -> Tensor:
    return value.to(parameter.device) if value.dim() else value  # optimizers count steps on the host


def _kind(tensor: Tensor) -> tuple[bool, bool, torch.layout]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.layout


def _whole_state(model: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name, those that are gathered at the moment too.

    Of a model under `fully_shard` its own `state_dict` would return the parts, and take the rest away.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in non_persistent_buffers(module)
    }
    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    found.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in transient)
    return found
