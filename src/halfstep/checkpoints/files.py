"""Checkpoint folders: written beside, flushed and renamed, with a checksum for each file; the last k are kept.

    runs/                       the folder that the user names
        000001-step-500/        a checkpoint: the first that was saved here, after 500 micro-batches
            state.pt            written by torch.save
            manifest.json       size and SHA-256 of every other file of the checkpoint
        000002-step-1000/
        .writing-000003-5f0c/   a save under way, or one that was cut off: never read, removed by the next save
        .deleting-000001/       likewise
        .lock                   the process that saves at this moment

A checkpoint exists once its folder has its name, and gets it by one rename after all of its files and the folder are on
the disk (fsync). So a kill, a full disk or a power failure leaves the earlier checkpoints as they were.

While a save is under way the folder has a link ``.lock``, whose target names the process: links are made in one call
together with what they say. It is removed when the save ends; what a killed process has left is taken over. A manifest
names the process that saved, and its run: a step that has loaded a checkpoint goes on with its run.

Note [two writers]: another process on this host is refused while the one that saved last is alive, unless it is a child
of that one. Whether a process on another host is alive is unknown, so a new one goes on there, and the earlier one is
refused at its next save, when it finds checkpoints that it has not made. A process whose lock was taken over does not
complete its checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch

from halfstep.arguments import whole
from halfstep.errors import CheckpointError, first_line, lacks_memory
from halfstep.meeting import facts_of
from halfstep.schema import Each, check, is_bounded, read_json, regular, text

STATE, MANIFEST = "state.pt", "manifest.json"
NAME = re.compile(r"(\d{6,})-step-(\d+)")
WRITING, DELETING = ".writing-", ".deleting-"
FORMAT = 1
LOCK = ".lock"
TRIES = 8  # of taking a lock that others take over at the same time
HELD: set[str] = set()  # the locks that this process has
REMEDY = "give each run a folder of its own, or end the other one first"
CHUNK = 1 << 20  # bytes read at once
MOST = 1 << 24  # bytes of a manifest: an entry is about 120
FILE = text(r"\.?\w[\w.-]*", "the name of a file in this folder")
CONTENT = {
    "format": whole(1),
    "step": whole(),
    "ranks": whole(1),
    "torch": str,
    "files": Each(FILE, {"bytes": whole(), "sha256": text("[0-9a-f]{64}", "64 hexadecimal digits")}),
    "run?": text(r"\w*"),
    "kernels?": text("|compiled|none"),
    "process?": str,
}
"""Of `MANIFEST`. Which run saved, and which process of it: note [two writers]."""

Entry = dict[str, Any]
"""Of one file: its ``bytes`` and its ``sha256``."""


class _Hashed:
    """A file that is written from beginning to end, with the checksum of what was given to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._bytes = file, hashlib.sha256(), 0
        self.error: BaseException | None = None  # torch.save raises another one after it

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except BaseException as error:
            self.error = error
            raise
        self._hash.update(data)
        self._bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def entry(self) -> Entry:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


def write_state(path: Path, state: object) -> Entry:
    """Write `state` by torch.save, flush it to the disk, and return its entry of the manifest."""
    with path.open("wb") as file:
        hashed = _Hashed(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type]  # any object with `write` and `flush` is enough
        except BaseException as error:
            raise hashed.error or error from None
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)  # reads no tensor
    except Exception as error:
        if lacks_memory(error):
            raise
        raise CheckpointError(
            "the state holds something that torch.load(weights_only=True) refuses to read, so it could not be loaded "
            "again: use plain containers, numbers, text and tensors in `extra` and in a scheduler of your own. "
            f"{error}"
        ) from error
    return hashed.entry()


def digest(path: Path) -> Entry:
    """Read a file and return its entry of the manifest."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            found.update(data)
            size += len(data)
    return {"bytes": size, "sha256": found.hexdigest()}


def _sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk; file systems that do not open folders have no such call."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(root: Path, step: int, token: str) -> tuple[Path, Path]:
    """Make an empty folder to write a checkpoint into; return it, and the name that `commit` will give it.

    Removes what saves that were cut off have left. `token` tells the folder from one of another process.
    """
    for path in root.iterdir():
        if path.name.startswith((WRITING, DELETING)):
            shutil.rmtree(path, ignore_errors=True)
    number = last_number(root) + 1
    folder = root / f"{WRITING}{number:06d}-{token}"
    folder.mkdir()
    return folder, root / f"{number:06d}-step-{step}"


def last_number(root: Path) -> int:
    """Return the number of the checkpoint that was saved last; 0 for none."""
    return max((number_of(path) for path in root.iterdir()), default=0)


def number_of(path: Path) -> int:
    """Return the number of a checkpoint by its name; 0 for what is none."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def refuse_others(root: Path, seen: int) -> None:
    """Refuse to save where another run saves: note [two writers].

    `seen` is the number of the last checkpoint when this step saved or loaded here; -1: it has not.
    """
    for folder in checkpoints(root)[:1]:
        try:
            process = manifest_of(folder).get("process", "")
        except CheckpointError:
            return
        if process in {"", this_process()} or has_started_this(process):
            return
        late = 0 <= seen < number_of(folder)
        if late or is_alive(process):
            raise CheckpointError(
                f"{folder} was saved by another run, {in_words(process)}, "
                f"{'since this one has saved or loaded here' if late else 'which is alive'}: two writers would lose "
                f"each other's checkpoints; {REMEDY}"
            )


def commit(
    folder: Path, final: Path, step: int, ranks: int, files: Mapping[str, Entry], run: str = "", kernels: str = ""
) -> None:
    """Write the manifest into `folder`, flush all of it to the disk, and give it its name.

    `kernels`: "compiled" or "none": whether halfstep's kernels made its updates; "" where there were no updates.
    """
    manifest = {
        "format": FORMAT, "step": step, "ranks": ranks, "run": run, "kernels": kernels,
        "process": this_process(), "torch": torch.__version__, "files": dict(files),
    }  # fmt: skip
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    folder.rename(final)
    _sync_folder(final.parent)


def prune(root: Path, keep: int, run: str = "") -> None:
    """Delete all checkpoints of a run but the last `keep`; one whose files have other sizes does not count."""
    kept = 0
    for folder in checkpoints(root):
        if run_of(folder) != run:
            continue
        if kept < keep:
            kept += _has_sizes(folder)
            continue
        aside = root / f"{DELETING}{folder.name}"  # by one rename, so that no half of it is ever found
        with suppress(OSError):  # a file system that refuses leaves one too many
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in a folder, the one that was saved last first."""
    return sorted(filter(number_of, root.iterdir()), key=number_of, reverse=True)


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, checked."""
    path = folder / MANIFEST
    found: dict[str, Any] = read_json(path, CheckpointError, {"format": whole(1), ...: Any}, MOST)
    if found["format"] != FORMAT:
        raise CheckpointError(f"{path} is of another format than {FORMAT}, the one that this version of halfstep reads")
    check(found, CONTENT, str(path), CheckpointError)
    check(found["files"], {STATE: Any, ...: Any}, f"{path}.files", CheckpointError)
    return found


def run_of(folder: Path) -> str | None:
    """Return which run has saved a checkpoint; None if it is damaged."""
    with suppress(CheckpointError):
        return str(manifest_of(folder).get("run", ""))
    return None


def _has_sizes(folder: Path) -> bool:
    try:
        files = manifest_of(folder)["files"]
        return all(regular(folder / name, CheckpointError) == entry["bytes"] for name, entry in files.items())
    except CheckpointError:
        return False


def check_files(folder: Path, share: int = 0, of: int = 1) -> None:
    """Compare one of `of` equal shares of the files of a checkpoint with the checksums of its manifest."""
    for name, entry in sorted(manifest_of(folder)["files"].items())[share::of]:
        path = folder / name
        size = regular(path, CheckpointError)
        if size != entry["bytes"]:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and {entry['bytes']} were written")
        try:
            same = digest(path) == entry
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not same:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}")


def read_state(path: Path, allowed: AbstractContextManager[Any] | None = None, *, mmap: bool = False) -> Any:
    """Return the content of a file of torch.save: plain containers and tensors on the CPU, nothing is executed.

    It takes no more memory than the file has bytes. `allowed` is a context in which torch knows more classes; `mmap`
    reads tensors when they are used.
    """
    size = regular(path, CheckpointError, links=True)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                if sum(part.file_size for part in parts.infolist()) > size:
                    raise ValueError("its parts are compressed, which torch.save does not do")
        with allowed or nullcontext():
            found = torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
        if not is_bounded(found, size):  # an item takes a byte
            raise ValueError("its containers are deeper, or hold more, than such a file can")
        return found
    except Exception as error:
        if lacks_memory(error):
            raise
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except Exception:
            names = []
        reason = f"it is no file of torch.save, or damaged ({type(error).__name__}: {first_line(error)})"
        if names:
            reason = (
                f"it holds objects of {', '.join(sorted(names))}, which torch.load(weights_only=True) does not make. "
                "If you trust the file, allow them by torch.serialization.add_safe_globals([...]), then load again"
            )
        raise refusal(path, reason) from error


def refusal(place: Path, reason: str) -> CheckpointError:
    """Return the error of a load that has changed nothing."""
    return CheckpointError(f"{place}: {reason}; nothing was loaded")


# ---------------------------------------------------------------------- note [two writers]


def this_process() -> str:
    """Return "HOST:PID:START": what tells this process from all others."""
    return f"{socket.gethostname()}:{os.getpid()}:{facts_of(os.getpid())[1]}"


def in_words(process: str) -> str:
    """Return a name that `this_process` returned for a message."""
    host, pid, _ = (f"{process}::").split(":", 2)
    return f"process {pid or '?'} on {host or '?'}"


def is_alive(process: str) -> bool:
    """Return whether a process on this host, other than this one, is alive; False for those on other hosts."""
    host, pid, start = (f"{process}::").split(":")[:3]
    if host != socket.gethostname() or not pid.isdecimal() or process == this_process() or os.name != "posix":
        return False
    if start:
        return facts_of(int(pid))[1] == start
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is there, and another user's
        return True
    return True


def has_started_this(process: str) -> bool:
    """Return whether a process on this host is above this one: one that waits for it."""
    above, known = os.getppid(), {0}
    while above not in known:
        if process.split(":")[1:2] == [str(above)]:
            return True
        known.add(above)
        above = facts_of(above)[0]
    return False


class Lock(AbstractContextManager["Lock"]):
    """The lock of one save on the folder `root`; a file system without links has none."""

    def __init__(self, root: Path) -> None:
        self.root, self._path = root, root / LOCK
        self.token = uuid4().hex[:8]  # two steps of one process
        self._mine = f"{this_process()}:{self.token}"

    def take(self) -> None:
        """Take the lock; refuse to while a process that is alive saves here."""
        for _ in range(TRIES):
            try:
                self._path.symlink_to(self._mine)
            except FileExistsError:
                self.check()
                with suppress(OSError):
                    self._path.unlink()
            except OSError:  # no links, or no folder that can be written to, as the next call says
                return
            else:
                HELD.add(self._mine)
                return

    def check(self) -> None:
        """Refuse a lock that another save has, unless its process is known to have ended."""
        try:
            owner = os.readlink(self._path)
        except OSError:
            return
        process = owner.rpartition(":")[0]
        if owner != self._mine and (owner in HELD or is_alive(process) or self._mine in HELD):
            raise CheckpointError(
                f"another save into {self.root} is under way, by {in_words(process)}: two writers would lose each "
                f"other's checkpoints; {REMEDY}"
            )

    def release(self) -> None:
        """Give the lock back; without effect if this save does not have it."""
        with suppress(OSError):
            if self._mine in HELD and os.readlink(self._path) == self._mine:
                self._path.unlink()
        HELD.discard(self._mine)

    def __exit__(self, *_: Any) -> None:
        self.release()
