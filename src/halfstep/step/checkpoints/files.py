"""Checkpoint folders: written beside, flushed and renamed, with a checksum for each file; the last k are kept.

    runs/                       the folder that the user names
        000001-step-500/        a checkpoint: the first that was saved here, after 500 micro-batches
            state.pt            written by torch.save
            manifest.json       size and SHA-256 of every other file of the checkpoint
        000002-step-1000/
        .writing-000003/        a save under way, or one that was cut off: never read, removed by the next save
        .deleting-000001/       likewise

A checkpoint exists once its folder has its name, and gets it by one rename after all of its files and the folder are on
the disk (fsync). So a kill, a full disk or a power failure leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from halfstep.errors import CheckpointError

__all__ = ["MANIFEST", "STATE", "check_files", "checkpoints", "commit", "digest", "make_folder", "prune", "write_state"]

STATE, MANIFEST = "state.pt", "manifest.json"
NAME = re.compile(r"(\d{6,})-step-(\d+)")
WRITING, DELETING = ".writing-", ".deleting-"
FORMAT = 1
CHUNK = 1 << 20  # bytes read at once

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
    """Write `state` by torch.save, flush it to the disk, and return its entry of the manifest.

    Raises:
        CheckpointError: ``torch.load(weights_only=True)`` would not read the file.
        OSError: it cannot be written.
    """
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


# ---------------------------------------------------------------------- writing


def make_folder(root: Path, step: int) -> tuple[Path, Path]:
    """Make an empty folder to write a checkpoint into; return it, and the name that `commit` will give it.

    Removes what saves that were cut off have left.
    """
    root.mkdir(parents=True, exist_ok=True)
    last = 0
    for path in root.iterdir():
        if path.name.startswith((WRITING, DELETING)):
            shutil.rmtree(path, ignore_errors=True)
        elif match := NAME.fullmatch(path.name):
            last = max(last, int(match[1]))
    folder = root / f"{WRITING}{last + 1:06d}"
    folder.mkdir()
    return folder, root / f"{last + 1:06d}-step-{step}"


def commit(folder: Path, final: Path, step: int, ranks: int, files: Mapping[str, Entry]) -> None:
    """Write the manifest into `folder`, flush all of it to the disk, and give it its name.

    Args:
        folder: as `make_folder` returned it, with all files in it.
        final: the same.
        step: micro-batches done.
        ranks: processes that saved it.
        files: entries by name.
    """
    manifest = {"format": FORMAT, "step": step, "ranks": ranks, "torch": torch.__version__, "files": dict(files)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    folder.rename(final)
    _sync_folder(final.parent)


def prune(root: Path, keep: int) -> None:
    """Delete all checkpoints but the last `keep`; one with files of another size than written does not count."""
    kept = 0
    for folder in checkpoints(root):
        if kept < keep:
            kept += _has_sizes(folder)
            continue
        aside = root / f"{DELETING}{folder.name}"  # by one rename, so that no half of it is ever found
        with suppress(OSError):  # a file system that refuses leaves one too many
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


# ---------------------------------------------------------------------- reading


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in a folder, the one that was saved last first."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a later version of halfstep.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in found["files"].items()}
        known = found["format"] <= FORMAT and isinstance(found["step"], int) and isinstance(found["ranks"], int)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({type(error).__name__}: {error})") from error
    if not known or STATE not in files:
        raise CheckpointError(f"{path} is of another format than {FORMAT}, the one that this version of halfstep reads")
    return dict(found)


def _has_sizes(folder: Path) -> bool:
    try:
        files = manifest_of(folder)["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def check_files(folder: Path, share: int = 0, of: int = 1) -> None:
    """Compare the files of a checkpoint with the checksums of its manifest.

    Args:
        folder: the checkpoint.
        share: which of `of` equal shares of the files to read.
        of: the number of shares.

    Raises:
        CheckpointError: a file is missing or differs, by its name.
    """
    for name, entry in sorted(manifest_of(folder)["files"].items())[share::of]:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(f"{path} is damaged: it has {size} bytes, and {entry['bytes']} were written")
            if digest(path) != entry:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
