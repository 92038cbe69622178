"""hs.save and hs.load: a training step on disk, and back, bit for bit, on any number of processes.

One process, and DistributedDataParallel, write one file; shards are written by the processes that have them.
Note [ranks]: every rank calls `save` and `load` at the same place. They meet through the store (`halfstep.meeting`),
where each reports what it has, or the error that it would raise: then all ranks raise it, and nothing was written or
changed. In a background write (``wait=False``) nothing of a step waits for another rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.arguments import FLAG, check
from halfstep.binding.wrappers import unwrap
from halfstep.checkpoints import files
from halfstep.checkpoints.foreign import converted, is_foreign
from halfstep.checkpoints.generators import check_saved_states, put_saved_states, saved_states
from halfstep.checkpoints.names import names_of, split
from halfstep.errors import CheckpointError, StepError, first_line, lacks_memory, warn
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.sharded import is_sharded
from halfstep.meeting import WRITE_TIME, Meeting
from halfstep.schema import Each
from halfstep.schema import check as check_content
from halfstep.step.arguments import check_saving
from halfstep.step.moments import one_thread
from halfstep.step.saved import PLAIN, SHARDED
from halfstep.step.state import check_state
from halfstep.trees import map_tensors

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

LOG = logging.getLogger("halfstep")
KEEP = 2  # so that damage to the last one costs one interval
FILES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors"})
MEETINGS = count(1)  # every rank calls `save` and `load` in the same order, so its number names a call on all of them
KERNELS = {"compiled": "halfstep's compiled kernels", "none": "torch's operators in place of compiled kernels"}
WEIGHTS = "weights"  # the state of stochastic rounding, which counts on devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What `hs.load` has loaded.

    Attributes:
        path: the checkpoint.
        step: micro-batches done, the number that the last `result.step` had.
        extra: what this rank gave to `hs.save`; with another number of ranks, what rank 0 gave.
        extras: what all ranks gave, in their order.
        notes: what was converted, dropped or not there; () for a checkpoint that is resumed bit for bit.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> saving = hs.save(step, "checkpoints", extra={"epoch": 1})
        >>> loaded = hs.load(step, "checkpoints")
        >>> loaded.extra, loaded.notes
        ({'epoch': 1}, ())
    """

    path: Path
    step: int
    extra: Any = None
    extras: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()


class Saving:
    """A checkpoint that is being written, or has been.

    Attributes:
        path: its folder, there from the moment it is complete.

    Examples:
        >>> saving = hs.save(hs.TrainStep(model, optimizer, loss_fn), "checkpoints", wait=False)
        >>> folder = saving.wait()  # complete on the disk from here on
    """

    def __init__(self, path: Path, group: dist.ProcessGroup | None, run: str, seen: int) -> None:
        self.path, self.group, self.run = path, group, run
        self.seen = seen  # the last number in the folder when this run saved or loaded there
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None], lock: files.Lock, *, wait: bool) -> None:
        """Do the work and release the lock, here or in a thread that the interpreter waits for before it exits."""
        if wait:
            with lock:
                work()
            return

        def background() -> None:
            try:
                with lock:
                    work()
            except BaseException as error:
                self._error = error
                LOG.error("hs.save(wait=False) to %s: %s", self.path, error)

        self._thread = threading.Thread(target=background, name="halfstep-save")
        self._thread.start()

    def done(self) -> bool:
        """Return whether writing has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is on the disk; return its folder.

        Raises:
            CheckpointError: it could not be written; raised once, here or by the next `hs.save`.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path


@one_thread
def save(step: TrainStep, path: str | Path, *, keep: int | None = KEEP, extra: Any = None, wait: bool = True) -> Saving:
    """Write a checkpoint of `step` into the folder `path`, and delete all but the last `keep` there.

    When it returns, the checkpoint is complete on the disk, on every rank. A kill or a full disk before that leaves the
    earlier ones. With several processes every rank calls it, at the same place.

    Args:
        step: between two updates.
        path: a folder for the checkpoints of this run; made if it is not there.
        keep: how many checkpoints to keep there, at least 1; None: all.
        extra: plain containers, numbers, text and tensors: a position in the data, or the state_dict of something that
            the step does not own. Each rank has its own.
        wait: False copies the state to the host, returns, and writes in a thread; the next `save` waits for it.

    Raises:
        StepError: in the middle of an accumulation window, or another thread is inside the step.
        CheckpointError: the checkpoint cannot be written (the error of the system is its cause), or `extra` could not
            be loaded again; or ranks do not all call it.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> saving = hs.save(step, "checkpoints", extra={"epoch": 1})
        >>> hs.load(step, "checkpoints").extra
        {'epoch': 1}
    """
    check_saving("hs.save", step, path, keep)
    check("hs.save", CheckpointError, wait=(wait, FLAG))
    root = destination(path)
    previous = step.record.saving
    room = Meeting("hs.save", next(MEETINGS))
    state, names, mine = _together(room, lambda: _gathered(step, previous, extra), "saved")
    told = room.gather(mine if wait else _copied(mine))
    lock = files.Lock(root)
    try:
        planned = _together(room, lambda: None if room.rank else _planned(lock, previous, told), "saved")
        plan: dict[str, Any] = room.publish(planned)
        group = None if previous is None else previous.group
        if plan["sharded"] and group is None:
            group = dist.new_group(backend="gloo")  # of its own: a thread may use it while the step uses the others
        saving = step.record.saving = Saving(root / plan["final"], group, plan["run"], plan["seen"])
        write = _Write(lock, root / plan["folder"], saving, keep, room, told, _kernels(step))
        if plan["sharded"]:
            work = write.shards(state, names, unwrap(step.model), every=plan["stages"], wait=wait)
        else:
            work = write.file(state, names, wait=wait)
        saving.begin(work, lock, wait=wait)
    except BaseException:
        lock.release()
        raise
    return saving


def destination(path: str | Path) -> Path:
    """Return the folder that `save` will write into; refuse a file, and what cannot be written to."""
    root = Path(path).absolute()
    if root.is_file() or root.suffix in FILES:
        raise CheckpointError(
            f"hs.save writes into a folder, where it keeps the last checkpoints of a run, and {str(path)!r} is the "
            "name of a file; give it a folder, such as 'checkpoints'"
        )
    there = next(place for place in (root, *root.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(f"{root} cannot be written to: {there} is no folder in which this process may write")
    return root


def _gathered(
    step: TrainStep, previous: Saving | None, extra: Any
) -> tuple[dict[str, Any], list[list[str]], dict[str, Any]]:
    """Return the state of the step, the names of the optimizer's parameters, and what rank 0 is told of both."""
    if previous is not None:
        previous.wait()
    state, names = step.state_dict(), names_of(unwrap(step.model), step.optimizer)
    try:
        check_state(step, state, tensors=False)
    except StepError as error:
        raise CheckpointError(f"the state could not be loaded again: {error}") from error
    tensors = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
    layout = repr([(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]) + repr(names)
    told = {
        "step": state["step"],
        "layout": hashlib.sha256(layout.encode()).hexdigest(),
        "sharded": any(map(is_sharded, tensors.values())),
        "own": {"random": saved_states(), "extra": extra, WEIGHTS: state.get(WEIGHTS, {})},
    }
    return state, names, told


def _planned(lock: files.Lock, previous: Saving | None, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the lock; return what all ranks do."""
    if len(steps := {one["step"] for one in told}) > 1:
        raise CheckpointError(
            f"ranks have done {sorted(steps)} micro-batches; call hs.save on all after the same update"
        )
    whole = len({one["layout"] for one in told}) == 1
    root = lock.root
    here = previous is not None and previous.path.parent == root
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.take()
        files.refuse_others(root, previous.seen if previous is not None and here else -1)
        folder, final = files.make_folder(root, told[0]["step"], lock.token)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{root} cannot be written to: {error}") from error
    sharded = any(one["sharded"] for one in told) or not whole
    run = previous.run if previous is not None and previous.run else uuid4().hex[:12]
    names = {"folder": folder.name, "final": final.name, "run": run, "seen": files.number_of(final) - 1}
    return {**names, "sharded": sharded, "stages": not whole}


@dataclass(frozen=True, slots=True)
class _Write:
    """The writing of one checkpoint: on rank 0 all of it, on others their shards."""

    lock: files.Lock
    folder: Path
    saving: Saving
    keep: int | None
    room: Meeting
    told: list[dict[str, Any]]  # on rank 0
    kernels: str

    def file(self, state: dict[str, Any], names: list[list[str]], *, wait: bool) -> Callable[[], None]:
        mine = state if wait or self.room.rank else _copied(state)
        return lambda: self._finish(lambda: self._commit(mine, {}, names=names))

    def shards(
        self, state: dict[str, Any], names: list[list[str]], model: nn.Module, *, every: bool, wait: bool
    ) -> Callable[[], None]:
        """Return the work of a checkpoint in shards; with ``wait=False`` they are copied to the host first.

        `every`: ranks have other parameters each, so that all of them tell what besides tensors they have.
        """
        from halfstep.checkpoints import shards  # torch.distributed.checkpoint takes half a second to import

        group = self.saving.group
        assert group is not None
        tensors, rest = split(state, model, names, self.room.rank)
        others = {key: value for key, value in state.items() if key not in {"model", "optimizer"}}
        writer = shards.Writer(self.folder)
        if not wait:
            others, rest = _copied(others), _copied(rest)
        write = writer.write(tensors, group, wait=wait)

        def work() -> None:
            mine: dict[str, Any] = {"error": "", "files": {}, "rest": rest if every else None}
            try:
                write()
                mine["files"] = {p.name: files.digest(p) for p in shards.own_files(self.folder, self.room.rank)}
            except BaseException as error:  # torch's own for errors of ranks is none of Exception
                mine["error"] = f"rank {self.room.rank}: {_in_a_line(error)}"
            found = self.room.gather(mine, limit=WRITE_TIME)

            def commit() -> None:
                if wrong := [one["error"] for one in found if one["error"]]:
                    raise CheckpointError("; ".join(wrong))
                entries = {name: entry for one in found for name, entry in one["files"].items()}
                rests = [one["rest"] for one in found] if every else [rest]
                self._commit(others, entries, rests=rests, shards=writer.table)

            self._finish(commit)

        return work

    def _commit(self, state: Any, entries: dict[str, files.Entry], **more: Any) -> None:
        content = {"state": state, "ranks": [one["own"] for one in self.told], **more}
        entry = files.write_state(self.folder / files.STATE, content)
        self.lock.check()
        every, run = {files.STATE: entry, **entries}, self.saving.run
        files.commit(self.folder, self.saving.path, state["step"], self.room.size, every, run, self.kernels)
        if self.keep is not None:
            files.prune(self.lock.root, self.keep, run)

    def _finish(self, commit: Callable[[], None]) -> None:
        problem = ""
        cause: BaseException | None = None
        try:
            if self.room.rank == 0:
                commit()
        except BaseException as error:
            cause, problem = error, _in_a_line(error)
            if not self.folder.is_dir():
                problem = f"another process has removed {self.folder} and saves into this folder too ({problem})"
            shutil.rmtree(self.folder, ignore_errors=True)
        problem = self.room.publish(problem, limit=WRITE_TIME, last=True)
        if cause is not None and (not isinstance(cause, Exception) or lacks_memory(cause)):
            raise cause  # Ctrl-C
        if problem:
            before = files.checkpoints(self.lock.root)
            left = f"the last checkpoint is {before[0]}" if before else "there is no earlier checkpoint"
            raise CheckpointError(f"{self.saving.path} was not written: {problem}; {left}") from cause


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return dict(map_tensors(state, lambda tensor: tensor.detach().to("cpu", copy=True)))


def _in_a_line(error: BaseException) -> str:
    """Return the error in one line; of torch's report of several ranks, what the first of them raised."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, *_) = next(iter(failures.items()))
        return f"rank {rank}: {_in_a_line(inner)}"
    text = first_line(error)
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


@overload
def load(step: TrainStep, path: str | Path, *, missing_ok: Literal[False] = ...) -> Loaded: ...
@overload
def load(step: TrainStep, path: str | Path, *, missing_ok: bool) -> Loaded | None: ...


@one_thread
def load(step: TrainStep, path: str | Path, *, missing_ok: bool = False) -> Loaded | None:
    """Load the last checkpoint in the folder `path`, or the checkpoint `path`, into `step`; its run goes on from there.

    All of it is verified before anything changes: checksums of the files, then names, shapes, formats and numbers. The
    number of processes and the sharding may differ from those that saved. The global random generators of torch, Python
    and NumPy are set too, if there are as many processes as saved. With several processes every rank calls it.

    Checkpoints of torch.amp's recipe, Apex, accelerate and Lightning are converted, with a warning that lists what was
    taken and what was not there.

    Args:
        step: built as the one that was saved, with the same policy.
        path: the folder given to `hs.save`: if its last checkpoint is damaged, a warning names the file, and the one
            before is loaded. Or one checkpoint: if that is damaged, it is refused.
        missing_ok: whether to return None where `path` has no checkpoint: the first start of a run.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is none of a format that is known.
        StepError, ScaleError, WeightsError, PolicyError: as `TrainStep.load_state_dict`; nothing was changed.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> loaded = hs.load(step, "checkpoints", missing_ok=True)  # None at the first start of a run
        >>> begin = loaded.extra["epoch"] + 1 if loaded else 0
    """
    check_saving("hs.load", step, path)
    check("hs.load", CheckpointError, missing_ok=(missing_ok, FLAG))
    room = Meeting("hs.load", next(MEETINGS))
    place = Path(path).absolute()
    if step.record.saving is not None:
        step.record.saving.wait()
    found = room.publish(_together(room, lambda: _find(place), "loaded anything"))
    if found == "nothing":
        if missing_ok:
            return None
        raise CheckpointError(
            f"{place} has no checkpoint; give hs.load the folder that hs.save wrote into, or missing_ok=True for the "
            "first start of a run"
        )
    if found == "foreign":
        return _load_foreign(step, place, room)
    folder, notes = _choose(room, place, [Path(one) for one in found], step.record.saving)
    return _load_folder(step, folder, room, notes)


def _find(place: Path) -> Any:
    """Return the folders of checkpoints at `place`, the newest first; or "foreign", or "nothing"."""
    if place.name == files.STATE and (place.parent / files.MANIFEST).is_file():
        place = place.parent
    if (place / files.MANIFEST).is_file() or files.NAME.fullmatch(place.name):
        return [str(place)]
    if place.is_file():
        return "foreign"
    if not place.is_dir():
        return "nothing"
    found = [str(folder) for folder in files.checkpoints(place)]
    return found or ("foreign" if is_foreign(place) else "nothing")


def _together(room: Meeting, work: Callable[[], Any], done: str) -> Any:
    """Return what `work` returns once it has succeeded on all ranks; else raise on all, none of which has `done`."""
    value, mine = None, None
    try:
        value = work()
    except Exception as error:
        mine = error
    told = room.gather("" if mine is None else _in_a_line(mine))
    problems = room.publish([f"rank {rank}: {text}" for rank, text in enumerate(told) if text])
    if mine is not None:
        raise mine
    if problems:
        raise CheckpointError(f"{problems[0]}; no rank has {done}")
    return value


def _choose(room: Meeting, place: Path, found: list[Path], last: Saving | None) -> tuple[Path, list[str]]:
    """Return the newest checkpoint whose files are as they were written, and notes on newer ones and on other runs."""
    notes: list[str] = []
    for folder in found:
        problem = ""
        try:
            files.check_files(folder, room.rank, room.size)
        except CheckpointError as error:
            problem = str(error).removesuffix("; nothing was loaded")
        problem = room.publish(next(filter(None, room.gather(problem)), ""))
        if not problem:
            notes = [f"{'; '.join(notes)}; loading {folder}, which was saved before"] if notes else []
            notes += _another_run(found[found.index(folder) :], last)
            if notes and room.rank == 0:
                warn("; ".join(notes))
            return folder, notes
        notes.append(problem)
        if len(found) == 1:
            before = [one for one in files.checkpoints(folder.parent) if one.name < folder.name]
            offer = f"; the one before is {before[0]}" if before and place == folder else ""
            raise CheckpointError(f"{problem}{offer}; nothing was loaded")
    raise CheckpointError(f"no checkpoint in {place} is whole: {'; '.join(notes)}; nothing was loaded")


def _another_run(found: list[Path], last: Saving | None) -> list[str]:
    """Return a note if the first of the checkpoints is of another run than this step, or than the one before it."""
    run = files.run_of(found[0])
    there = {place.parent for place in found}
    own = (last.run, "this step's") if last is not None and last.path.parent in there else None
    if own is None and found[1:]:
        own = files.run_of(found[1]) or "", f"that of {found[1].name}, the one before"
    if not run or own is None or not own[0] or own[0] == run:
        return []
    process = files.in_words(files.manifest_of(found[0]).get("process", ""))
    return [f"{found[0]} was saved by another run, {process}, than {own[1]}: two runs have saved into one folder"]


def _load_folder(step: TrainStep, folder: Path, room: Meeting, notes: list[str]) -> Loaded:
    manifest = files.manifest_of(folder)

    def read() -> tuple[dict[str, Any], list[dict[str, Any]], int]:
        state, ranks = _read(step, folder, room, manifest)
        own = room.rank if len(ranks) == room.size else 0
        if weights := ranks[own][WEIGHTS]:
            state[WEIGHTS] = _on_own_device(weights, step)
        if room.rank < len(ranks):
            check_saved_states(ranks[room.rank]["random"])
        check_state(step, state)
        return state, ranks, own

    state, ranks, own = _together(room, read, "loaded anything")
    step.load_state_dict(state)
    group = None if step.record.saving is None else step.record.saving.group
    step.record.saving = Saving(folder, group, manifest.get("run", ""), files.last_number(folder.parent))
    if room.rank < len(ranks):
        put_saved_states(ranks[room.rank]["random"])
    if (here := _kernels(step)) != (before := manifest.get("kernels") or here):
        notes.append(
            f"{folder} was saved with {KERNELS[before]} and goes on with {KERNELS[here]}: from here on the bits are "
            "not those of a run that was not stopped; `halfstep doctor` says which kernels this machine has, and why"
        )
        if room.rank == 0:
            warn(notes[-1])
    if len(ranks) != room.size:
        notes.append(
            f"saved by {len(ranks)} processes and loaded by {room.size}: ranks that did not save keep their own random "
            "states, and `extra` is that of rank 0"
        )
    extras = tuple(one["extra"] for one in ranks)
    return Loaded(path=folder, step=state["step"], extra=extras[own], extras=extras, notes=tuple(notes))


def _kernels(step: TrainStep) -> str:
    """Return whether compiled kernels make the updates of `step`: "compiled" or "none"; "" before the first update."""
    if not step.record.done:  # loading them may take seconds
        return ""
    device = _device(step)
    return "none" if load_kernels(device.type, device.index) else "compiled"


def _device(step: TrainStep) -> torch.device:
    return next((p.device for group in step.optimizer.param_groups for p in group["params"]), torch.device("cpu"))


def _read(
    step: TrainStep, folder: Path, room: Meeting, manifest: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state of the step, in the sharding that it has here, and what each rank has saved."""
    model, optimizer = unwrap(step.model), step.optimizer
    have = model.state_dict()
    whole = not any(map(is_sharded, have.values()))
    place = folder / files.STATE
    content = files.read_state(place, mmap=not whole)
    check_content(content, Each(str, Any), str(place), CheckpointError)
    check_content(content, SHARDED if "rests" in content else PLAIN, str(place), CheckpointError)
    state, ranks = content["state"], content["ranks"]
    same = {"step": state.get("step"), "ranks": len(ranks)}
    if same != {key: manifest[key] for key in same}:
        raise CheckpointError(f"{place} is of another checkpoint than {files.MANIFEST}; nothing was loaded")
    names = names_of(model, optimizer)
    if "rests" not in content and whole and content["names"] == names:
        return state, ranks
    from halfstep.checkpoints import shards  # torch.distributed.checkpoint takes half a second to import

    _check_groups(content.get("rests", [content]), names)
    if "rests" in content:
        check_content(content, {"shards": shards.TABLE, ...: Any}, str(place), CheckpointError)
        shards.check_parts(content["shards"], folder)
    elif [*map(sorted, content["names"])] != [*map(sorted, names)]:
        return state, ranks  # the checks of the state say what is wrong
    else:
        content = shards.of_whole(state, model, content["names"])
    rests = content["rests"]
    if not rests:
        raise CheckpointError(f"{place}: 'rests' is empty; nothing was loaded")
    if wrong := next((rest for rest in rests if not len(rest["groups"]) == len(rest["names"]) == len(names)), None):
        raise CheckpointError(
            f"the saved optimizer has {len(wrong['groups'])} groups of parameters, and here it has "
            f"{len(names)}; build it with the groups it was saved with; nothing was loaded"
        )
    rank = room.rank if len(ranks) == room.size else None
    state["model"], state["optimizer"] = shards.read(folder, content, have, optimizer, names, rank)
    return state, ranks


def _check_groups(rests: list[Any], names: list[list[str]]) -> None:
    place = {name: i for rest in rests for i, group in enumerate(rest["names"]) for name in group}
    for i, group in enumerate(names):
        for name in group:
            if place.get(name, i) != i or name not in place:
                where = f"in group {place[name]}" if name in place else "not in it"
                raise CheckpointError(
                    f"optimizer: parameter {name} is in group {i} here, and was {where} when it was saved; nothing was "
                    "loaded"
                )


def _on_own_device(weights: Mapping[str, Any], step: TrainStep) -> dict[str, Any]:
    """Return the state of rounding with a count of one device as that of the device that trains here."""
    counts = dict(weights.get("counts", {}))
    if len(counts) == 1:
        counts = {str(_device(step)): next(iter(counts.values()))}
    return {**weights, "counts": counts}


def _load_foreign(step: TrainStep, place: Path, room: Meeting) -> Loaded:
    def read() -> tuple[dict[str, Any], tuple[str, ...], Any, Any]:
        state, notes, random, extra = converted(step, place, room.rank, room.size)
        check_state(step, state)
        if random is not None:
            check_saved_states(random)
        return state, notes, random, extra

    state, notes, random, extra = _together(room, read, "loaded anything")
    step.load_state_dict(state)
    if random is not None:
        put_saved_states(random)
    if notes and room.rank == 0:
        warn(f"{place} was converted: {'; '.join(notes)}")
    return Loaded(path=place, step=state["step"], extra=extra, notes=notes)
