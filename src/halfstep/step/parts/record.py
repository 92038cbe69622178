"""The record of a training step: how far it has come, and what it takes to run its last update again.

Its `History` keeps references to each batch of the current window, and of the last update until its verdict is known,
the states of torch's generators (under a microsecond each), and copies of the buffers that a forward pass is known to
change. Python's and NumPy's generators (43 microseconds a step) are kept only where windows run again (`retry`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.accelerators import Landing, capturing, default_generators
from halfstep.arguments import WHOLE, Kind, check
from halfstep.errors import StepError
from halfstep.events import StepResult
from halfstep.kernels.native.calls import number, peek
from halfstep.snapshot import generators_of, noted, put_buffers
from halfstep.step.part import Part
from halfstep.step.parts.signals import Signals
from halfstep.step.parts.statistics import BUFFERS
from halfstep.torch_private.modules import NormBase
from halfstep.trees import tensors

LIMIT = 1 << 30  # bytes of batches
ROWS = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc, torch.jagged}
FIRST_COPY = 1 << 26  # bytes of buffers copied before the first step, when it is not known yet which ones change
VIEWED = 1 << 16  # bytes: a loss that is a view of more is copied to be remembered
JUMP = 10.0  # times that a loss is above those before
FADE = 0.99  # in some hundred updates a large loss is forgotten


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch as it was before its forward pass."""

    batch: tuple[Any, ...]
    named: dict[str, Any]
    random: dict[str, torch.Generator]  # torch's generators as they were, by device
    versions: list[int]  # how often each tensor of the batch had been written to
    loss: Tensor | None = None  # what came out, detached; None until it has
    seed: Tensor | None = None  # what the backward pass began with; None for 1
    tensors: Sequence[Tensor] = ()  # those of the batch; kept where windows run again
    put_generators: Callable[[], None] | None = None  # also those of Python, NumPy and modules; None: not kept
    _bytes: int = -1

    def bytes(self) -> int:
        """Return the bytes of the tensors in its batch; found once."""
        if self._bytes < 0:
            self._bytes = sum(_size(tensor) for tensor in tensors((self.batch, self.named)))
        return self._bytes

    def drop(self) -> None:
        """Drop the batch; it cannot be run again."""
        self.batch, self.named, self.versions, self._bytes = (), {}, [], 0


@dataclass(slots=True, eq=False)
class Window:
    """The micro-batches of one update, and the verdict on it."""

    batches: list[MicroBatch] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)  # those that change, before the window
    last: int = 0  # number of the last micro-batch
    scale: Tensor | None = None  # 0-dim, the loss scale; None: not known
    flag: Tensor | None = None  # 0-dim bool on the device: the update was not applied; None before it
    bad: bool | None = None  # that flag, as soon as it has been read
    lossy: bool | None = None  # whether a loss was not finite, as soon as that has been read
    seen: bool = False  # whether the black box has been given it
    dropped: int = 0  # how many of the first micro-batches have lost their batch to `History.limit`

    @property
    def wrong(self) -> bool:
        """Whether there is something to explain, as far as it has been read."""
        return bool(self.bad or self.lossy)

    def explainable(self) -> bool:
        """Return whether there is something to explain; waits for the device if it has to."""
        return self.wrong or (self.flag is not None and bool(self.flag)) or not self.finite()

    def finite(self) -> bool:
        """Return whether all losses are finite; waits for the device if it has to."""
        return all(math.isfinite(number(loss)) for loss in self.losses())

    def losses(self) -> list[Tensor]:
        """Return the losses that came out."""
        return [kept.loss for kept in self.batches if kept.loss is not None and kept.loss.numel() == 1]


class Record(Part):
    """What a training step has done."""

    def __init__(self, model: nn.Module, *, replayable: bool) -> None:
        self.done = 0  # micro-batches of the updates made so far, applied or not
        self.micro_batches = 0  # those of the current window whose backward pass has run
        self.host_reads = 0  # how often the host had to wait until the device had done all of its work
        self.scale = torch.ones((), device="cpu")  # 0-dim fp32, the loss scale of this window, or of the last one
        self.bad: Tensor | None = None  # 0-dim bool: the last update was not applied; None once a scheduler has read it
        self.scheduled = False  # whether a scheduler will read it
        self.awaited = False  # whether a scheduler or a black box waits for it
        self.saving: Any = None  # the last `hs.save`, whose writing may be under way
        self.weight: Tensor | None = None  # 0-dim fp32, what the loss of this micro-batch was summed over; None: a mean
        self.weighed: Tensor | None = None  # the sum of the window's, see `gradients.Weights`
        self.share: Tensor | None = None  # 0-dim fp32, what divides the gradients of a weighed window
        history = History(model)
        self.model, self.landing, self.signals = model, history.landing, history.signals
        self.history = history if replayable else None

    @property
    def judged(self) -> bool:
        """Whether the black box has not been given the last update."""
        return self.history is not None and self.history.judged is not None

    def after_update(self, bad: Tensor) -> Exception | None:
        """Count the micro-batches of the window as done; return what keeping them raised."""
        self.bad = bad
        self.done += self.micro_batches
        self.micro_batches = 0
        try:
            if self.history is not None:
                self.history.end(bad, self.scale)
            if self.scheduled:
                self.send_verdict()
        except Exception as error:  # such as a lack of pinned memory: the update is complete without it
            return error
        finally:
            self.awaited = self.scheduled or (self.history is not None and self.history.judged is not None)
        return None

    def send_verdict(self) -> None:
        """Have a scheduler's verdict on the last update copied to the host, unless the history has sent it."""
        bad, landing = self.bad, self.landing
        if self.scheduled and type(bad) is Tensor and landing.flag is not bad and bad.device.type in landing.devices:
            landing.send([bad])

    def end_call(self, result: StepResult, batch: Any) -> None:
        """Remember loss and gradient norm, on a CPU as values: tensors kept cost 4 % of a small network's step."""
        if not result.due or batch is None:  # a flush has no loss
            return
        signals = self.signals
        if self.history is None:  # a graph, which Python does not see, or no black box
            signals.windows += 1
            if signals.windows == signals.due:
                signals.sample(result.step + 1, self.model, None)
        elif signals.learning.open:
            signals.learning.end(result)
        loss, norm = result.loss, result.grad_norm
        if loss.is_cpu and norm.is_cpu and type(loss) is type(norm) is Tensor:
            signals.recent.append((result.step, number(loss), number(norm), None, peek(result.skipped), None))
            return
        if loss.untyped_storage().nbytes() > VIEWED:
            loss = loss.clone()
        versions = loss._version, norm._version
        signals.recent.append((result.step, loss, norm, versions, result.skipped, None))

    def look(self) -> None:
        """Find out whether a scheduler or a black box waits for the verdict on the last update."""
        self.awaited = self.judged or (self.scheduled and self.bad is not None)

    def verdict(self, *, wait: bool) -> bool | None:
        """Return whether the last update was not applied; None: that is not known yet."""
        bad, landing = self.bad, self.landing
        assert bad is not None
        if landing.flag is bad:
            return peek(landing.landed()[0]) if wait or landing.there() else None
        if type(bad) is Tensor and bad.device.type == "cpu":
            return peek(bad)
        self.host_reads += wait
        return bool(bad) if wait else None

    def abort(self, *, written: bool) -> None:
        """Forget the window: its gradients are partial, and dropped when the next one begins."""
        if not written:
            self.micro_batches = 0


class History(Part):
    """The micro-batches of the current window, and those of the last update until its verdict is known.

    `watched`: whether good updates are of interest too; else a CPU drops their batches at once. `examined`: whether a
    black box reads it; else a window is dropped with its update.
    """

    def __init__(self, model: nn.Module, *, watched: bool = False, examined: bool = True) -> None:
        self.model, self.watched, self.examined = model, watched, examined
        self.landing, self.signals = Landing(), Signals()
        self._limit = LIMIT
        self._usual = math.inf  # the largest sum of the losses of a window, fading
        self._own: list[torch.Generator] | None = None  # generators besides the process's; None: none are kept
        self.window = Window()  # the current one
        self.judged: Window | None = None  # of the last update, until its verdict is known and good, or was examined
        self._changing: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._unchanged: list[tuple[nn.Module, str, Tensor, int]] | None = None  # buffers, with their versions

    @property
    def limit(self) -> int:
        """The most bytes of batches; beyond it the oldest are dropped, but not of a window that may run again."""
        return self._limit

    @limit.setter
    def limit(self, limit: object) -> None:
        check("history", StepError, limit=(limit, Kind("a number of bytes, a whole number from 0", WHOLE.has)))
        self._limit = int(limit)  # type: ignore[call-overload]

    def begin_window(self) -> None:
        """Begin a window."""
        old = self.judged
        if old is not None and (old.seen or (old.bad is None and old.flag is not self.landing.flag)):
            self.judged = None  # it was examined, or its device sends no flag
        self.window = window = Window()
        if self._unchanged is None:
            self._note_buffers()
        for module, name in self._changing.values():
            if (value := module._buffers.get(name)) is not None:
                window.buffers.append((module, name, value.clone()))

    def begin_micro_batch(self, number: int, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep micro-batch `number`, the last of the window now, and the states of generators."""
        kept = MicroBatch(batch, named, random_states(), versions_of((*batch, *named.values())))
        if self._own is not None:
            kept.tensors, kept.put_generators = tensors((batch, named)), noted(self._own)
        if not self.window.batches:
            self.signals.windows += 1
            if self.signals.windows == self.signals.due:
                self.signals.sample(number, self.model, tensors((batch, named)))
        self.window.last = number
        self.window.batches.append(kept)
        if self.judged is not None or len(self.window.batches) > 1:
            self._make_room()

    def _make_room(self) -> None:
        windows = [w for w in (self.judged, self.window if self._own is None else None) if w is not None]
        excess = sum(micro.bytes() for window in windows for micro in window.batches) - self._limit
        for window in windows:
            for micro in window.batches[window.dropped :]:
                if excess <= 0 or micro is self.window.batches[-1]:
                    return
                excess -= micro.bytes()
                micro.drop()
                window.dropped += 1

    def end(self, bad: Tensor, scale: Tensor | None) -> None:
        """End the window; waits for nothing."""
        window = self.window
        self._find_changing()
        window.scale = scale
        if not self.examined:
            self.window = Window()
            return
        if type(bad) is not Tensor or (not bad.is_cpu and capturing(bad.device.type)):
            return
        window.flag = bad
        if bad.device.type in self.landing.devices:
            self.landing.send([bad, *window.losses()])
        elif bad.device.type == "cpu":
            window.lossy = self._lossy(window, window.losses())
        if not self.watched and window.lossy is False and not peek(bad):
            self.judged, self.window = None, Window()
        else:
            self.judged = window

    def keep_generators(self) -> None:
        """Keep what windows need to run again inside a step: all generators, and which tensors a batch holds."""
        self._own = generators_of(self.model.modules())

    def unkept(self) -> str:
        """Return the name of a buffer that the window's forward passes changed and that was not kept; "" for none."""
        kept = {(id(module), name) for module, name, _ in self.window.buffers}
        changed = (name for module, name in self._changed() if (id(module), name) not in kept)
        return next(changed, "")

    def restore(self) -> None:
        """Put the buffers that the window's forward passes changed back; BatchNorm's are in `Statistics`."""
        self._find_changing()
        put_buffers([kept for kept in self.window.buffers if (id(kept[0]), kept[1]) in self._changing])

    def arrived(self, *, wait: bool) -> Window | None:
        """Return the window of the last update if its verdict is known and was not seen; drop it if it is good."""
        window = self.judged
        if window is None or window.seen or window.flag is None:
            return None
        if window.bad is None:
            if self.landing.flag is window.flag:
                if not wait and not self.landing.there():
                    return None
                flag, *losses = self.landing.landed()
                window.bad, window.lossy = peek(flag), self._lossy(window, losses)
            elif window.flag.device.type == "cpu":
                window.bad = peek(window.flag)
            else:  # not sent: explain() waits for it
                return None
        if not window.wrong:
            self.judged = None
        return window

    def _lossy(self, window: Window, losses: list[Tensor]) -> bool:
        """Return whether a loss of `window` that is on the host is not finite; the batch of a large one is sampled."""
        found = [abs(number(loss)) for loss in losses if type(loss) is Tensor and loss.is_cpu]
        size, usual = sum(found), FADE * self._usual
        if not size < math.inf:
            return True
        if size > JUMP * usual and len(found) == len(window.batches):
            micro = window.batches[found.index(max(found))]
            self.signals.sample_batch(window.last, tensors((micro.batch, micro.named)))
        self._usual = size if size > usual or usual == math.inf else usual
        return False

    def _find_changing(self) -> None:
        changed = self._changed()
        for module, name in changed:
            self._changing.setdefault((id(module), name), (module, name))
        if changed:
            self._note_buffers()

    def _changed(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers not known to change that have changed."""
        found = []
        for module, name, value, version in self._unchanged or ():
            now = module._buffers.get(name)
            if now is not value or (now is not None and now._version != version):
                found.append((module, name))
        return found

    def _note_buffers(self) -> None:
        """Note the versions of buffers that are not known to change; before the first step, copy them too."""
        first = self._unchanged is None
        self._unchanged = []
        copied = 0
        for module in self.model.modules():
            for name, value in module._buffers.items():
                key = (id(module), name)
                if value is None or key in self._changing or value.is_inference():
                    continue
                if name in BUFFERS and isinstance(module, NormBase):  # `Statistics` has them
                    continue
                self._unchanged.append((module, name, value, value._version))
                size = value.numel() * value.element_size()
                if first and copied + size <= FIRST_COPY:
                    copied += size
                    self.window.buffers.append((module, name, value.detach().clone()))


def _size(tensor: Tensor) -> int:
    """Return the bytes of what a tensor holds; of a sparse one those of its values."""
    if tensor.is_sparse:
        return tensor._values().nbytes
    return (tensor.values() if tensor.layout in ROWS else tensor).nbytes


def versions_of(values: Sequence[Any]) -> list[int]:
    """Return how often each tensor of some values has been written to; those of inference mode do not count it."""
    flat = {Tensor}.issuperset(map(type, values))  # tensors alone need no walk through containers
    return [t._version for t in (values if flat else tensors(values)) if not t.is_inference()]


def _generators() -> dict[str, torch.Generator]:
    """Return torch's generators by device, without those of a device that captures a graph."""
    found, device = {"cpu": torch.default_generator}, torch.accelerator.current_accelerator()
    if device is not None and (others := default_generators()) and not capturing(device.type):
        found |= {f"{device.type}:{index}": one for index, one in enumerate(others)}
    return found


def random_states() -> dict[str, torch.Generator]:
    """Return copies of torch's generators, those of all devices, without waiting for one.

    A copy of the CPU's has half the bytes of the tensor that ``get_state()`` returns.
    """
    return {name: one.clone_state() for name, one in _generators().items()}


def put_random(states: dict[str, torch.Generator]) -> None:
    """Put the states of copies that `random_states` returned back; those of devices that are not here are left out."""
    for name, one in _generators().items():
        if name in states:
            one.set_state(states[name].get_state())
