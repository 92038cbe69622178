"""Failures that no step shows: each is one line of the log, said at updates that `Signals` samples; nothing waits.

`Kept` finds buffers that are not finite, or that swallow what is added to them; `Learning` finds low parameters that do
not move, modules that return one number, and gradients that are all 0.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.accelerators import Landing
from halfstep.cast.state import STATE
from halfstep.errors import few
from halfstep.events import StepResult
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES
from halfstep.kernels.sharded import local
from halfstep.step.part import Part
from halfstep.torch_private.compiler import is_compiled
from halfstep.torch_private.fake import is_fake
from halfstep.torch_private.modes import DisableTorchFunction, is_functorch_wrapped_tensor
from halfstep.trees import tensors
from halfstep.update.updater import Culprits

LOG = logging.getLogger("halfstep")

PLAIN = frozenset({Tensor, nn.Parameter})
WITH_NORMS = frozenset({*POLICY_DTYPES, torch.float64})

APART = 16
"""Updates from one look to the next from which on it counts that nothing has moved."""

AGAIN = 2
"""Looks in a row that have to find the same."""

FEW = 64
"""Elements of a tensor that are compared from look to look."""

AMONG = 4096
"""Elements of a gradient among which the `FEW` largest are looked for."""

LEAST = 8
"""Elements with a gradient from which on it counts that they do not move: a single one may move and come back."""

STILL = 0.9
"""Share of them that did not move."""

ENOUGH = 0.1
"""Gradients, and learning rates, below this share of the largest so far are those of a run that has converged."""

NOISE = 4
"""Roundings, as a factor of eps: a gradient so much smaller than another one of its module is what rounding left of
zero, such as that of a bias before BatchNorm."""

SWALLOWED = 0.75
"""Times eps that the largest step of a sum was of its size now: half an ulp is from a quarter to a half of that."""

STANDING = 48
"""Updates without a move that are reported."""

STATES = frozenset(
    ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "square_avg", "grad_avg", "sum",
     "momentum_buffer", "acc_delta")
)  # fmt: skip
"""States of torch's optimizers that are no part of a weight: another one may hold what a low weight does not."""

FIRST = 8
"""Update from which on gradients of 0 count: adapters and gates begin with some."""

SHOWN = 3
"""Names in a line of the log."""

NOT_FINITE = (
    "eval() reads it, or a loss will; load it from a checkpoint from before, and look at the batches since for a value "
    "whose square leaves the format"
)
SWALLOWS = (
    "it is written to in each update, and what is added is below half an ulp of it; keep it in fp32, for example with "
    "float() after the model was lowered"
)
UNMOVED = (
    "although their gradients are not 0: each update is below half an ulp; keep precise weights behind low ones "
    "(params='low', master='auto'; or a model in fp32), or raise the learning rate"
)
CONSTANT = (
    "nothing is learned there. A square, a sum or an exponential inside it that leaves its format does this: give it "
    "the rule 'fp32'; or its inputs have grown, or fallen below zero, for good: go back to a checkpoint from before"
)
VANISHED = (
    "and the loss is not: they are below the smallest number of fp16; raise the loss scale (scale='auto' does by "
    "itself), or use bf16"
)


class Trace(NamedTuple):
    """A low buffer as it was at the last look: some of its elements, and their largest steps an update so far."""

    update: int
    tensor: weakref.ref[Tensor]
    version: int
    values: Tensor
    largest: Tensor


class Kept:
    """What forward passes keep: buffers, and frozen parameters that are written to, such as a teacher's.

    A sum that has become too large for its terms stands still though it is written to in each update; an average whose
    target stands still does so too, but its first steps were large.
    """

    def __init__(self) -> None:
        self._landing, self._sent = Landing(), list[tuple[str, bool]]()  # names, and whether there is a row of counts
        self._finite: set[str] = set()  # with their shapes: a mask may be made anew for longer sequences
        self._traces: dict[str, Trace] = {}
        self._frozen: dict[str, int] = {}  # versions
        self._still = Counter[str]()

    def look(self, number: int, update: int, model: nn.Module) -> None:
        """Look before micro-batch `number`, the first of window `update`, and log what has been found."""
        self._tell(number)
        frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and not is_lazy(p)]
        written = [(n, p) for n, p in frozen if self._frozen.setdefault(n, p._version) != p._version]
        finite, rows, sent = list[Tensor](), list[Tensor](), list[tuple[str, bool]]()
        for name, tensor in (*model.named_buffers(), *written):
            part = _values(tensor)
            if part is None:
                continue
            flag = torch.linalg.vector_norm(part, math.inf).isfinite()
            device = finite[0].device if finite else flag.device
            finite.append(flag.to(device, non_blocking=True))
            row = self._compare(name, tensor, part, update)
            rows += [] if row is None else [row.to(device, non_blocking=True)]
            sent.append((f"{name} {list(tensor.shape)}", row is not None))
        if finite:
            landing = Landing().take([torch.stack(finite), *([torch.stack(rows)] if rows else [])])
            self._landing, self._sent = landing, sent  # together: an exception before leaves nothing
        self._tell(number)

    def _compare(self, name: str, tensor: Tensor, part: Tensor, update: int) -> Tensor | None:
        """Return how many elements have ever moved, and how many of them stand still and may swallow.

        None where nothing can be said: the tensor is not low, or was not written to in each update since the last look.
        """
        if tensor.dtype not in LOW_DTYPES or tensor.is_inference():
            return None
        now, found = _few(part), (update, weakref.ref(tensor), tensor._version)
        before = self._traces.get(name)
        if before is None or before.values.shape != now.shape or before.update == update:
            self._traces[name] = Trace(*found, now, torch.zeros_like(now, dtype=torch.float32))
            return None
        updates = update - before.update
        step = (now.float() - before.values.float()).abs() / updates
        largest = torch.maximum(step, before.largest)
        swallows = (step == 0) & (largest > 0) & (largest <= SWALLOWED * torch.finfo(now.dtype).eps * now.abs().float())
        moves = before.tensor() is not tensor or tensor._version - before.version >= updates
        self._traces[name] = Trace(*found, now, largest)
        return torch.stack([(largest > 0).sum(), swallows.sum()]) if moves and updates >= APART else None

    def _tell(self, number: int) -> None:
        if not self._sent or not self._landing.there():
            return
        flags, *counts = [landed.tolist() for landed in self._landing.landed()]
        rows, finite, swallowing = iter(counts[0] if counts else ()), set[str](), list[str]()
        for (name, judged), is_finite in zip(self._sent, flags, strict=True):
            place = name.partition(" ")[0]
            if is_finite:
                finite.add(name)
            elif name in self._finite:
                LOG.warning("buffer %s is not finite any more before step %d: %s", place, number, NOT_FINITE)
            ever, small = next(rows) if judged else (0, 0)
            self._still[name] = self._still[name] + 1 if ever and small >= STILL * ever else 0
            if self._still[name] == AGAIN:
                swallowing.append(place)
        if swallowing:
            LOG.warning("buffer %s has stopped moving before step %d: %s", few(swallowing, SHOWN), number, SWALLOWS)
        self._finite, self._sent, self._landing = finite, [], Landing()


class Held(NamedTuple):
    """Some elements of a low parameter before an update, those of the largest gradients among `AMONG`."""

    parameter: Tensor
    places: Tensor
    values: Tensor
    counts: Tensor  # bool: the gradient is finite and not 0
    rate: float


class Sent(NamedTuple):
    """Whose numbers are on their way to the host: norms of gradients, rows of `Learning._compare`, outputs."""

    update: int
    before: int  # the update that was looked at before
    gradients: list[str]
    rows: list[str]
    outputs: list[str]


class Learning(Part):
    """Whether parameters learn that are to; a part of a step in sampled updates only, and if it has low parameters.

    Low parameters without precise ones behind them are compared from look to look. Where gradients are exactly 0 look
    by look, leaf modules are watched, and one that returns the same number everywhere is named. What is 0 on purpose is
    left out: adapters and gates whose weight is 0, dropped paths.
    """

    def __init__(self) -> None:
        self._step: Any = None  # returns the training step; None: there is none
        self._moments: Any = None
        self.forget()

    def watch(self, step: object, moments: object) -> None:
        """Look at the updates of the `TrainStep`, by its `Moments`."""
        self._step, self._moments = weakref.ref(step), moments

    def forget(self) -> None:
        """Begin anew."""
        self.open = False  # whether a window is looked at
        self._update = self._before = 0
        self._landing, self._sent = Landing(), None  # type: tuple[Landing, Sent | None]
        self._held: dict[str, Held] = {}
        self._rows: dict[str, Tensor] = {}
        self._tops: dict[str, float] = {}  # largest learning rates
        self._largest: dict[str, float] = {}  # gradients
        self._still: dict[str, int] = {}  # parameter -> update since which it has not moved
        self._silent, self._flat = Counter[str](), Counter[str]()  # looks in a row; of gradients, of modules
        self._hooks: list[Any] = []
        self._outputs: dict[str, Tensor] = {}  # module -> 0-dim bool: it returned one number, given several
        self._told = set[str]()

    def begin(self, update: int, model: nn.Module) -> None:
        """Take part in the window of `update`, which begins."""
        step = None if self._step is None else self._step()
        if step is None:
            return
        self._tell()
        self._before, self._update, self._rows, self._outputs = self._update, update, {}, {}
        self.open = True
        self._unhook()  # a window was cut off
        if self not in self._moments.parts and any(p.dtype in LOW_DTYPES for p in model.parameters()):
            self._moments.add(self)
        suspected = max(self._silent.values(), default=0) >= AGAIN
        if suspected and step.compile in (None, False) and not any(map(is_compiled, model.modules())):
            for name, module in model.named_modules():
                kind = type(module).__name__
                if "Drop" not in kind and not any(True for _ in module.children()):
                    self._hooks.append(module.register_forward_hook(partial(self._see, f"{name} ({kind})")))

    def _see(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note whether a module has returned one number where it was given several."""
        out, given = ([t for t in tensors(tree) if t.numel() >= FEW] for tree in (output, args))
        if STATE.above is not None or not out or not given or not (has_norm(out[0]) and has_norm(given[0])):
            return
        if is_functorch_wrapped_tensor(out[0]) or is_functorch_wrapped_tensor(given[0]):
            return
        with DisableTorchFunction(), torch.no_grad():
            one, (least, most) = torch.aminmax(out[0].detach()), torch.aminmax(given[0].detach())
            flat = (one[0] == one[1]) & (least < most)
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and (numbers := _values(weight)) is not None:
                flat &= numbers.any()
            self._outputs[name] = flat & self._outputs.get(name, flat)

    def before_update(self) -> None:
        """Compare low parameters with what they were at the last look, and keep what the update will change."""
        step = self._step()
        names, store = step._updater.names, step._updater.store
        with DisableTorchFunction(), torch.no_grad():
            for group in step.optimizer.param_groups:
                rate = group.get("lr", 1.0)
                for p in group["params"] if not isinstance(rate, Tensor) else ():
                    if p.dtype in LOW_DTYPES and (store is None or p not in store):
                        if p.grad is not None and STATES.issuperset(step.optimizer.state.get(p, ())):
                            self._compare(names.get(id(p), "?"), p, p.grad, rate)

    def _compare(self, name: str, parameter: Tensor, grad: Tensor, rate: float) -> None:
        value, gradient, before = _values(parameter), _values(grad), self._held.pop(name, None)
        top = self._tops[name] = max(rate, self._tops.get(name, 0.0))
        if value is None or gradient is None or value.numel() != gradient.numel() or not rate:
            return
        flat, steps = value.reshape(-1), gradient.reshape(-1)
        apart = max(1, len(flat) // AMONG)
        some = steps[::apart].abs().float()
        sizes, places = some.topk(min(FEW, len(some)))
        places *= apart
        count = still = torch.zeros_like(sizes[0])
        if before is not None and before.parameter is parameter and ENOUGH * top <= rate <= (1 + ENOUGH) * before.rate:
            count = before.counts.sum().float()
            still = (before.counts & (flat[before.places] == before.values)).sum().float()
        self._rows[name] = torch.stack([sizes[0], count, still])
        self._held[name] = Held(parameter, places, flat[places], (sizes > 0) & sizes.isfinite(), rate)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def end(self, result: StepResult) -> None:
        """Send what the update has shown, and be no part any longer."""
        self.open = False
        self._unhook()
        if self in self._moments.parts:
            self._moments.remove(self)
        found = result.find_culprits
        if not isinstance(found, Culprits) or self._sent is not None or is_fake(found.norms):
            return
        names, device = [found.names.get(id(p), "?") for p in found.parameters], found.norms.device
        sent = Sent(self._update, self._before, names, [*self._rows], [*self._outputs])
        taken = [*self._rows.values()], [*self._outputs.values()], [result.loss.reshape(()), result.scale]
        moved = ([part.to(device, torch.float32, non_blocking=True) for part in parts] for parts in taken if parts)
        landing = Landing().take([found.norms, *map(torch.stack, moved)])
        self._landing, self._sent = landing, sent  # together: an exception before leaves nothing
        self._tell()

    def _tell(self) -> None:
        if self._sent is None or not self._landing.there():
            return
        sent, landed = self._sent, iter([part.tolist() for part in self._landing.landed()])
        norms, rows, flags = next(landed), next(landed) if sent.rows else [], next(landed) if sent.outputs else []
        loss, scale = next(landed)
        self._sent, self._landing = None, Landing()
        if sent.update >= FIRST:
            for name, norm in zip(sent.gradients, norms, strict=True):
                self._silent[name] = self._silent[name] + 1 if norm == 0.0 else 0
        self._tell_still(sent, rows, scale)
        self._tell_flat(sent, flags)
        silent = all(self._silent[name] > AGAIN for name in sent.gradients)
        if silent and not any(flags) and loss and math.isfinite(loss) and self._step().policy.dtype == "fp16":
            self._log("all gradients have been 0 since update %d at least, %s", FIRST, VANISHED)

    def _tell_still(self, sent: Sent, rows: Sequence[Sequence[float]], scale: float) -> None:
        modules: dict[str, float] = {}  # the largest gradient of each
        owners = [name.rpartition(".")[0] for name in sent.rows]
        for owner, (size, _, _) in zip(owners, rows, strict=True):
            modules[owner] = max(modules.get(owner, 0.0), size)
        for name, owner, (size, count, still) in zip(sent.rows, owners, rows, strict=True):
            if size < math.inf:
                self._largest[name] = max(self._largest.get(name, 0.0), size / scale)
            largest = self._largest.get(name, math.inf)
            eps = torch.finfo(self._held[name].values.dtype).eps
            loud = size / scale >= ENOUGH * largest and size >= NOISE * eps * modules[owner]
            if loud and count >= LEAST and still >= STILL * count:
                self._still.setdefault(name, sent.before)
            else:
                self._still.pop(name, None)
        stuck = {name: since for name, since in self._still.items() if sent.update - since >= STANDING}
        if stuck:
            since = max(stuck.values())
            self._log("%s: hardly a number has moved since update %d, %s", few([*stuck], SHOWN), since, UNMOVED)

    def _tell_flat(self, sent: Sent, flags: Sequence[float]) -> None:
        """Name the first module that returns one number, if gradients of it or of its neighbours are 0."""
        places = [name.partition(" (")[0] for name in sent.outputs]
        owners = {name: name.rpartition(".")[0] for name in sent.gradients}
        for number, (module, flag) in enumerate(zip(sent.outputs, flags, strict=True)):
            self._flat[module] = self._flat[module] + 1 if flag else 0
            before = [place for place in places[: number + 1] if place in owners.values()][-1:]
            after = [place for place in places[number + 1 :] if place in owners.values()][:1]
            silent = [name for name, owner in owners.items() if owner in before + after and self._silent[name]]
            if self._flat[module] >= AGAIN and silent:
                names = few(silent, SHOWN)
                self._log("%s returns one number everywhere, and gradients of %s are 0: %s", module, names, CONSTANT)
                return

    def _log(self, text: str, *values: object) -> None:
        if text not in self._told:
            self._told.add(text)
            LOG.warning(text, *values)


def has_norm(tensor: Tensor) -> bool:
    """Return whether torch has norms for a tensor: a plain, strided one, of a format of 16 bits or more."""
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    return plain and tensor.dtype in WITH_NORMS and tensor.numel() > 0


def _values(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor as a plain one that has a norm; None if it is of no kind that has."""
    part = local(Tensor.detach(tensor))
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    if part.is_floating_point() and part.element_size() == 1:
        part = part.float()
    return part if has_norm(part) else None


def _few(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // FEW)][:FEW].clone()
