"""hs.on_preemption: a signal ends a run after an update, with a checkpoint, on all ranks after the same one.

Schedulers of clusters (and torchrun, for its workers) send SIGTERM and, half a minute later, SIGKILL.

Note [the same update]: a signal reaches ranks at different times, or one of them alone, and a rank may be an update
ahead of another. On the first signal all ranks report how many updates they have finished; the last update is
T = most + 1, and until T is known a rank ends no update beyond its own count + 1, which T is never below. So all
ranks make update T and none begins T + 1. A thread reports, as the main thread may be inside a collective; it waits in
the store of the process group. An update without a signal costs two calls and no communication.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from halfstep.arguments import NONE, Kind, check
from halfstep.checkpoints.save import KEEP, Saving, destination, save
from halfstep.errors import CheckpointError
from halfstep.events import StepResult
from halfstep.meeting import Meeting, processes, store_under
from halfstep.step.arguments import check_saving
from halfstep.step.part import Part

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

LOG = logging.getLogger("halfstep")
AGREEMENT = 15.0  # seconds, of the 30 that torchrun and Kubernetes give
FOREVER = timedelta(days=365)
UNHANDLED = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
NUMBERS = count(1)  # every rank enters its blocks in the same order


def on_preemption(
    step: TrainStep,
    path: str | Path,
    *,
    keep: int | None = KEEP,
    extra: Callable[[], Any] | None = None,
    signals: Iterable[int] = (signal.SIGTERM,),
) -> Preemption:
    """Return a context manager in which a signal ends the run after its update, with a checkpoint.

    ``with hs.on_preemption(step, "checkpoints"): ...`` around the training loop. After a signal the step under way
    completes its update; then the call saves, as ``hs.save(step, path)`` does, and raises SystemExit(128 + signal), by
    which torchrun and schedulers see that the run has not finished. With several processes every rank enters the block,
    and all end after the same update, whichever of them the signal has reached.

    Args:
        step: whose updates to follow.
        path: the folder of the checkpoints, as `hs.save` takes it.
        keep: how many to keep, as `hs.save` takes it.
        extra: called after the last update; what it returns is saved as `extra` of `hs.save`.
        signals: their numbers. SIGUSR1 is what ``sbatch --signal=USR1@120`` sends.

    Raises:
        CheckpointError: with these arguments `hs.save` could not save, or `signals` are none; on entering: outside of
            the main thread, where Python sets no handlers, or inside another such block of the same step.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> with hs.on_preemption(step, "checkpoints"):
        ...     for x, y in batches:
        ...         result = step(x, y)
    """
    check_saving("hs.on_preemption", step, path, keep)
    destination(path)
    several = isinstance(signals, Iterable) and not isinstance(signals, Mapping)
    numbers: tuple[Any, ...] = tuple(signals) if several else (signals,)
    known = Kind("numbers of signals, such as signal.SIGTERM", lambda one: bool(one) and all(map(_is_signal, one)))
    callback = Kind("a function without arguments, such as lambda: {...}", _takes_nothing)
    check("hs.on_preemption", CheckpointError, extra=(extra, callback | NONE), signals=(numbers, known))
    return Preemption(step, lambda: save(step, path, keep=keep, extra=None if extra is None else extra()), numbers)


def _is_signal(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number in signal.valid_signals() - UNHANDLED


def _takes_nothing(function: object) -> bool:
    try:
        inspect.signature(function).bind()  # type: ignore[arg-type]
    except TypeError:  # no function, or one that takes something
        return False
    except ValueError:  # a built-in function without a signature: it may take nothing
        pass
    return True


class Preemption(Part):
    """What `on_preemption` returns; `requested` is the signal that came, 0 for none."""

    def __init__(self, step: TrainStep, save: Callable[[], Saving], signals: tuple[int, ...]) -> None:
        self._step, self._save, self._signals = step, save, signals
        self.requested = 0
        self._finished = 0  # updates in this block
        self._before: dict[int, Any] = {}  # handlers
        self._may_begin: int | None = None  # no update beyond this one before `_last` is known; None: any
        self._last: int | None = None  # the update that ends the run
        self._known = threading.Event()  # `_last` is known, or will not be
        self._lock = threading.Lock()
        self._rank, self._size = processes()
        self._thread: threading.Thread | None = None  # waits for a signal on any rank
        self._store: Any = None  # of the main thread

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError("hs.on_preemption sets signal handlers, which Python allows in the main thread alone")
        if any(isinstance(part, Preemption) for part in self._step.parts):
            raise CheckpointError("hs.on_preemption is open for this step already; leave the block first")
        if self._size > 1:
            number = next(NUMBERS)
            # one connection for the thread, which waits in it, and one for the main thread
            waiting, self._store = (store_under(f"preemption/{number}") for _ in range(2))
            self._thread = threading.Thread(
                target=self._agree, args=(waiting, number), name="halfstep-preemption", daemon=True
            )
            self._thread.start()
        self._step.add_part(self, in_graphs=True)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._step.remove_part(self)
        if self._thread is not None:
            with suppress(RuntimeError):  # the process that has the store is gone, which the thread has seen too
                self._store.set(f"wake/{self._rank}", "")
                self._thread.join(AGREEMENT)
        if kind is None and self.requested:
            LOG.warning(
                "signal %d came after the last update of the block of hs.on_preemption: the run goes on to its end",
                self.requested,
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = int(number)
        if self._thread is None:
            self._last = self._finished + 1
        else:  # wake this rank's thread, which wakes the others
            self._store.set(f"wake/{self._rank}", str(self.requested))

    def end_call(self, result: StepResult, batch: Any) -> None:
        """Count an update; after the last one, save and end the run.

        If it may have been the last one, this waits for the agreement of the ranks: here and not where the next update
        begins, because the caller has not drawn its batch yet.
        """
        if not result.due:
            return
        with self._lock:
            self._finished += 1
            may_be_last = self._may_begin is not None and self._finished >= self._may_begin
        if may_be_last and (not self._known.wait(AGREEMENT) or self._last is None):
            LOG.error("after signal %d ranks have not agreed on a last update: no checkpoint", self.requested)
            raise SystemExit(128 + (self.requested or int(signal.SIGTERM)))
        if self._last is None or self._finished < self._last:
            return
        number = self.requested or int(signal.SIGTERM)
        made = self._save()
        LOG.warning("signal %d: the run ends after its update, with the checkpoint %s", number, made.path)
        raise SystemExit(128 + number)

    def _agree(self, store: Any, number: int) -> None:
        """Wait for a signal on any rank; then agree on the last update: note [the same update]."""
        told = ""
        try:
            store.wait([f"wake/{self._rank}"], FOREVER)
            told = store.get(f"wake/{self._rank}").decode()
            if not told:  # the block was left
                return
            if store.add("requests", 1) == 1:  # the first to know
                for rank in range(self._size):
                    if rank != self._rank:
                        store.set(f"wake/{rank}", told)
            with self._lock:
                self._may_begin = self._finished + 1
                finished = self._finished
            room = Meeting("hs.on_preemption", number)
            last = 1 + max(room.gather(finished, limit=AGREEMENT), default=0)
            last = room.publish(last, limit=AGREEMENT)
            self.requested = self.requested or int(told)
            self._last = last
        except RuntimeError as error:  # of the store: another rank has gone, or did not answer
            if told:
                LOG.error("rank %d: after signal %s no last update was agreed on: %s", self._rank, told, error)
        finally:
            self._known.set()
