"""fp32 values behind low parameters: any torch optimizer steps them while the model computes with the low ones.

`WeightStore` is what the strategies share. `master`, `split`, `kahan` and `stochastic` store fp32 values between steps,
`attachment` lets an optimizer step them.

Note [changes by hand]: a low parameter is a `kernels.watched.WatchedParameter`, so methods of it and of its ``.data``
change its fp32 value (`writing`). What writes into low weights by another way is counted in their `_version`, or in
that of ``.data``; every read of a master first takes such values over, with one warning, because the part of a change
that the low format cannot represent is lost. Writes by torch.distributed and by kernels are not counted: the next
change by a method takes them over. All changes can be made inside `hs.edit_weights`.

Note [frozen parameters]: nothing is kept behind a parameter that is frozen when the model is prepared and that no
optimizer has (`lower`): its low values are its values, rounded once. Its fp32 value begins as these, when an optimizer
first asks for it or it is first changed by hand (`_key`).
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.errors import WeightsError
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.sharded import local, put
from halfstep.kernels.watched import Owner, unwatch, watch
from halfstep.torch_private.autograd import unsafe_preserve_version_counter
from halfstep.torch_private.fake import is_fake
from halfstep.weights.attachment import Attachment, is_low, nested_reason, refuse_wrapper
from halfstep.weights.draws import Draws
from halfstep.weights.every_step import Turn, at_each_step
from halfstep.weights.ranks import broadcast, replicated, training_wrapper

NEAR = 0.1  # of its norm: a value that differs by less is the next one, and not another model's
_version = attrgetter("_version")


class WeightStore(Owner):
    """fp32 values behind low parameters.

    Adopting a parameter replaces its values by low ones, in place; its fp32 values live on in the store, as exactly as
    the strategy keeps them. A parameter that is low already (a bf16 checkpoint) is adopted with the values it has.

    Args:
        named: (name, parameter) pairs; a shared parameter may come more than once.
        low: torch.bfloat16 or torch.float16.

    Raises:
        WeightsError: `low` is no format of this strategy, or a parameter is neither fp32 nor low; nothing was changed.
    """

    low_dtypes: ClassVar[frozenset[torch.dtype]] = LOW_DTYPES
    name: ClassVar[str]  # its value of `Policy.master`
    form: ClassVar[str]  # how two tensors store the fp32 value: note [forms] in `kernels.ops`
    keeps_buffers: ClassVar[bool] = False  # fp32 gradient buffers, on CPU, from step to step
    keeps_more: ClassVar[bool] = True  # fp32 values have bits that the low weights lack
    draws: Draws | None = None  # where the random bits of steps come from, if they need some

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype) -> None:
        if low not in self.low_dtypes:
            raise WeightsError(self._refusal(low))
        super().__init__(in_region=lambda: False)
        pairs = list(named)
        self.dtype = low
        self.check(pairs)
        self._parameters: dict[int, nn.Parameter] = {}
        self._frozen: set[int] = set()  # those with nothing behind them: note [frozen parameters]
        self.generation = 0  # counts up when other tensors store the fp32 value of a parameter
        self._data_read = False  # whether a parameter's ``.data`` was given out: writes into it are in no version
        self._fresh: set[int] = set()  # those that have not been stepped since they got their values
        self._attached = weakref.WeakValueDictionary[int, Attachment]()  # by optimizer; its hooks own them
        self.substituted: list[tuple[Attachment, Optimizer]] = []  # optimizers that have masters now
        self._without_low: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._wrapper: weakref.ref[nn.Module] | None = None  # whose ranks hold the same fp32 values
        self.editing = False  # whether the model contains fp32 values in place of low parameters
        for name, parameter in pairs:
            self.adopt(name, parameter)
        stores().add(self)
        at_each_step(Turn.ATTACH, self, _attach_if_needed)

    def check(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Refuse what cannot be lowered."""
        for name, parameter in named:
            if parameter.dtype not in {torch.float32, self.dtype}:
                raise WeightsError(
                    f"parameter {name} is {parameter.dtype} and a master is made for float32 or {self.dtype} "
                    "parameters; convert it, or give its module the rule 'keep'"
                )

    def _refusal(self, low: torch.dtype) -> str:
        return f"low weights are bfloat16 or float16, not {low}"

    # ------------------------------------------------------------------ what a strategy implements

    @abstractmethod
    def _master(self, key: int) -> nn.Parameter:
        """Return the fp32 parameter of `key` that optimizers and users change: one object while referenced."""

    @abstractmethod
    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        """Keep the fp32 values of `parameter` under `key` and return the low ones: of its part if it is sharded."""

    @abstractmethod
    def _read_low(self, key: int) -> None:
        """Take over the values that were written into the low weight of `key`."""

    def _read_unseen(self, key: int) -> None:  # compact strategies have nothing to compare
        """Take over values that were written into the low weight of `key` and that no version counts."""

    @abstractmethod
    def _forget(self, key: int) -> None:
        """Drop what is kept under `key`."""

    @abstractmethod
    def _move(self, key: int, like: Tensor) -> None:
        """Move what is kept under `key` to the device and into the memory layout of `like`."""

    @abstractmethod
    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        """Put masters into low weights and what is kept beside them; return the keys that were written."""

    @abstractmethod
    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        """Return the tensors of `form`, `weights` and `beside`; of a sharded parameter this rank's part."""

    @abstractmethod
    def _value(self, key: int) -> nn.Parameter:
        """Return the fp32 value of `key` to be read: the master itself, or one made for the caller."""

    def settle(self) -> None:  # masters that are always there are what is stored
        """Set fp32 values that are still referenced, though they exist for a step only, to those that are stored."""

    @abstractmethod
    def kept(self) -> Iterator[Tensor]:
        """Iterate over the tensors kept beside the low weights from step to step."""

    @abstractmethod
    def temporaries(self) -> Iterator[Tensor]:
        """Iterate over fp32 values that exist only during a step or an edit."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model's fp32 state_dict; {} for nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        if state:
            raise WeightsError(f"these weights have no state of their own, and were given {sorted(state)}")

    # ------------------------------------------------------------------ the weights

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Lower `parameter` in place and keep its fp32 values; a parameter adopted before stays as it is."""
        if parameter in self:
            return
        key = id(parameter)
        low = self._adopt(key, parameter)
        if parameter.dtype is not self.dtype:
            put(parameter, low)
        watch(parameter, self, name)
        self._add(name, parameter)

    def lower(self, name: str, parameter: nn.Parameter) -> None:
        """Lower `parameter` in place and keep nothing behind it: note [frozen parameters]."""
        if parameter in self:
            return
        if parameter.dtype is not self.dtype:
            put(parameter, local(Tensor.detach(parameter)).to(self.dtype))
        watch(parameter, self, name)
        self._add(name, parameter)
        self._frozen.add(id(parameter))

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep nothing behind `parameters` any more: note [frozen parameters]."""
        for parameter in parameters:
            self._forget(id(parameter))
            self._frozen.add(id(parameter))
            self.generation += 1

    def is_frozen(self, parameter: nn.Parameter) -> bool:
        """Return whether `parameter` is a low one with nothing behind it: note [frozen parameters]."""
        return id(parameter) in self._frozen

    @staticmethod
    def behind(parameter: nn.Parameter) -> WeightStore | None:
        """Return the store that has the fp32 values of `parameter`, or None."""
        return next((store for store in stores() if parameter in store), None)

    def __contains__(self, parameter: object) -> bool:
        """Return whether `parameter` is a low parameter of this store."""
        return id(parameter) in self._parameters

    def __len__(self) -> int:
        """Return the number of low parameters."""
        return len(self._parameters)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the low parameters."""
        return iter(self._parameters.values())

    def _key(self, parameter: nn.Parameter) -> int:
        """Return the key of `parameter` after what was written into it by hand has been taken over."""
        key = id(parameter)
        if key not in self._parameters:
            raise WeightsError(
                f"a parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype} has no fp32 master; "
                "prepare the model after its parameters are made"
            )
        if key in self._frozen:
            self.check_frozen(parameter)
            self.generation += 1
            self._adopt(key, parameter)
            self._versions[key] = parameter._version
            self._frozen.remove(key)
        if self._written_unseen(parameter):
            if not (key in self._fresh and replicated()):  # else DistributedDataParallel has made ranks equal
                self._warn_unseen(parameter)
            self._versions[key] = parameter._version
            with torch.no_grad():
                self._read_low(key)
        return key

    def check_frozen(self, parameter: nn.Parameter) -> None:
        """Warn if low values were written into a frozen parameter."""
        if self._written_unseen(parameter):
            self._versions[id(parameter)] = parameter._version
            self._warn_unseen(parameter)

    def take_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over what was written by hand into low `parameters`: note [changes by hand]."""
        if self._data_read or [*map(_version, parameters)] != [*map(self._versions.get, map(id, parameters))]:
            for parameter in parameters:
                self._key(parameter)

    def data_read(self) -> None:
        """Expect writes through the ``.data`` of a parameter: it was given out."""
        self._data_read = True

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 master of `parameter`, to be changed and written back: one object while referenced.

        If the low weight was changed by hand since it was last written back, the master takes the new values over.
        """
        found = self._master(self._key(parameter))
        found.requires_grad_(parameter.requires_grad)
        return found

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 value of `parameter` as a new tensor."""
        value = self.value(parameter).detach()
        return value if self.is_frozen(parameter) else value.clone()

    def value(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 value of `parameter` to be read: the master itself, or one made for the caller."""
        if not self.is_frozen(parameter):
            return self._value(self._key(parameter))
        self.check_frozen(parameter)
        return nn.Parameter(Tensor.detach(parameter).float(), requires_grad=parameter.requires_grad)

    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the fp32 value of `parameter` to `value` (same shape) and round it into the low weight, in place.

        Raises:
            WeightsError: another shape, or values beyond the low format; nothing was changed.
        """
        self.refuse(parameter, value)
        if value.shape != parameter.shape:
            name = self._names[id(parameter)]
            raise WeightsError(f"{name} has shape {tuple(parameter.shape)} and was assigned {tuple(value.shape)}")
        key = id(parameter)
        with torch.no_grad():
            if key in self._frozen:
                Tensor.detach(parameter).copy_(value)
            else:
                master = self._master(key)  # some strategies have it only while it is referenced
                master.copy_(value)
                self.write_back([parameter])
                self.settle()
        self._versions[key] = parameter._version

    @torch.no_grad()
    def write_back(self, parameters: Iterable[nn.Parameter] | None = None, *, stepped: bool = False) -> None:
        """Round masters into low weights, in place: all, or those of `parameters`.

        Args:
            parameters: low parameters of this store.
            stepped: whether an optimizer has moved them; then `stochastic` rounds up or down by chance.
        """
        wanted = self._parameters if parameters is None else dict.fromkeys(id(p) for p in parameters)
        keys = [key for key in wanted if key not in self._frozen]
        for key in self._write_low(keys, stepped=stepped) if keys else ():
            self._versions[key] = self._parameters[key]._version
        if stepped:
            self._fresh.clear()

    # ------------------------------------------------------------------ updates in one pass

    def cannot_update(self) -> str:
        """Return why an update in one pass cannot change the tensors of `parts`; "" if it can."""
        in_use = self.editing or next(self.temporaries(), None) is not None
        return "fp32 values of low weights are in use" if in_use else ""

    def parts(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor | None]:
        """Return the tensors that store the fp32 value of `parameter` in `form`, to be changed in place.

        Call `stepped` afterwards.
        """
        if self.is_frozen(parameter) and parameter.grad is None:
            return local(Tensor.detach(parameter)), None
        return self._parts(self._key(parameter))

    def before_forward(self, module: nn.Module) -> None:
        """Prepare for a forward pass of `module`: `restore`, and `broadcast` where a wrapper of it trains."""
        self.restore()
        if (wrapper := training_wrapper(module)) is not None:
            self.broadcast(wrapper)

    def broadcast(self, wrapper: DistributedDataParallel) -> None:
        """Give every rank of `wrapper` the same fp32 values. Collective, once for each wrapper."""
        if self._wrapper is None or self._wrapper() is not wrapper:
            self._wrapper = weakref.ref(wrapper)
            self.stepped(broadcast(self, wrapper))

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that both parts of low `parameters` were changed."""
        self._fresh.clear()
        self._versions.update(zip(map(id, parameters), map(_version, parameters), strict=True))

    # ------------------------------------------------------------------ manual changes: note [changes by hand]

    @property
    def _kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @contextmanager
    def writing(self, parameter: nn.Parameter, *, fills: bool, counted: bool) -> Iterator[Tensor]:
        """Give the fp32 value of `parameter` to be changed in place, and round it at the end into the low weight.

        A frozen parameter gets an fp32 value behind it. `stochastic`, which keeps none, rounds by chance, and warns.
        Where the values begin anew (`fills`, `loaded`), neither is done.
        """
        fills = fills or self.loading
        if fills and self.is_frozen(parameter):
            wide = self.value(parameter).detach()
            yield wide
            Tensor.detach(parameter).copy_(wide)
            self._versions[id(parameter)] = parameter._version
            return
        key = self._key(parameter)
        self._read_unseen(key)
        for attachment, _ in self.substituted:
            attachment.check_own_list(parameter, self._names[key])
        master = self._master(key)
        wide = master.detach()
        yield wide
        chance = not (self.keeps_more or fills)
        if chance and "chance" not in self._warned and not torch.equal(local(wide), local(wide).to(self.dtype).float()):
            self._warn(
                "chance",
                f"the weight {self._names[key]} was changed by hand, and master={self.name!r} keeps only its "
                f"{self._kind} value: the change is rounded up or down by chance, right on average; a policy with "
                "master='split' keeps it exactly",
            )
        with nullcontext() if counted else unsafe_preserve_version_counter(parameter):
            self._write_low([key], stepped=chance)
        self._versions[key] = parameter._version

    def moved(self, parameter: nn.Parameter) -> bool:
        """Return whether frozen `parameter` has an fp32 value behind it, since it was changed by hand."""
        return not parameter.requires_grad and not self.is_frozen(parameter)

    def rounded(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Warn if `parameter` is about to be given a low `value` near its own: what was computed in low is lost."""
        low = Tensor.detach(parameter)
        if "rounded" in self._warned or self.loading or value.shape != low.shape:
            return
        change = (value.detach().to(low.device) - low).float().norm()
        if 0 < change < NEAR * low.float().norm():
            self._warn(
                "rounded",
                f"the weight {self._names[id(parameter)]} was given {self._kind} values near its own: of a change that "
                f"was computed in {self._kind} small parts are lost; compute it with operators and methods of the "
                "weight (0.9 * p, p.lerp_), or from p.float()",
            )

    def _warn_unseen(self, parameter: nn.Parameter) -> None:
        """Warn that low values were written."""
        self._warn(
            "unseen",
            f"the low weight {self._names[id(parameter)]} was written by no method of its own (but by out=, "
            f"torch._foreach_..., a view of it, low .data or a kernel): what {self._kind} cannot hold of that is lost; "
            "call a method of the weight (add_, mul_, lerp_, copy_), write inside `with hs.edit_weights(model):`, "
            "where weights are fp32, or give its module the rule 'fp32'",
        )

    @torch.no_grad()
    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor, *, converted: bool) -> Tensor:
        """Return the data that `parameter` gets where it is given `value`, as ``module.float()`` or ``.to`` do.

        Its own value in fp32 or a wider format (`converted`) is its precise value, which an optimizer steps as any
        other from then on; back in the low format it is adopted again. Other values in these formats become its fp32
        value. On another device or in another layout, what is kept beside it follows.

        Raises:
            WeightsError: another low format, none of floating point numbers, or another shape than the fp32 value
                behind it; nothing was changed.
        """
        now, low = Tensor.detach(parameter), value.to(self.dtype)
        if parameter in self and value.shape != now.shape:
            raise WeightsError(
                f"parameter {name} has shape {tuple(now.shape)}, as its fp32 value and its optimizer's state have, and "
                f"was given data of shape {tuple(value.shape)}; hs.unprepare(model), resize it, build the "
                "optimizer anew, then hs.prepare"
            )
        if parameter not in self:
            if value.dtype is not self.dtype:
                return value
            same = value.shape == now.shape and value.device == now.device and bool((now.to(low) == low).all())
            precise = nn.Parameter(now.float() if same else value.float(), requires_grad=parameter.requires_grad)
            low = self._adopt(id(parameter), precise)
            self._add(name, parameter)
            return low
        moved = value.data_ptr() != now.data_ptr() or value.stride() != now.stride() or value.device != now.device
        other = value.dtype is self.dtype and moved and not torch.equal(value, now.to(value.device))
        if other or (not converted and value.dtype in {torch.float32, torch.float64}):  # written by hand
            if other:
                self.rounded(parameter, value)
            with self.writing(parameter, fills=False, counted=False) as wide:
                wide.copy_(value)
            now = Tensor.detach(parameter)
            if now.device != value.device:
                self._move(id(parameter), now := now.to(value.device))
            return now
        self.generation += 1
        if self.is_frozen(parameter):
            if value.dtype is not self.dtype:
                self._remove(parameter)
            return value
        if value.dtype is self.dtype:
            if moved:
                self._move(self._key(parameter), value)
            return value
        if value.dtype not in {torch.float32, torch.float64}:
            raise WeightsError(
                f"parameter {name} is held in {self._kind}, with its fp32 value behind it, and was to become "
                f"{value.dtype}; hs.unprepare(model) before its format is changed"
            )
        wide = self.read(parameter).to(value)
        self._remove(parameter)
        return torch.where(now.to(value) == value, wide, value)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        self._without_low.clear()
        self.generation += 1
        key = id(parameter)
        self._names[key], self._parameters[key], self._versions[key] = name, parameter, parameter._version
        self._fresh.add(key)

    def _remove(self, parameter: nn.Parameter) -> None:
        if self.is_frozen(parameter):
            self._frozen.remove(id(parameter))
        else:
            self._forget(id(parameter))
        self._without_low.clear()
        self.generation += 1
        for entries in (self._names, self._parameters, self._versions):
            entries.pop(id(parameter))

    def refuse(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Refuse finite values for `parameter` that its low format cannot hold; waits for their device."""
        if lost := beyond(self._names[id(parameter)], value, self.dtype):
            raise WeightsError(f"{lost}; clamp it, or prepare the model with dtype='bf16' or its module in fp32")

    @torch.no_grad()
    def undo_beyond(self, parameters: Iterable[nn.Parameter]) -> str:
        """Reset masters with values beyond the low format to their low weights; return the first, "" for none."""
        lost = ""
        for parameter in parameters:
            if found := beyond(self._names[id(parameter)], self.master(parameter), self.dtype):
                self._read_low(id(parameter))
                lost = lost or found
        return lost

    # ------------------------------------------------------------------ optimizers

    def attach(self, optimizer: Optimizer) -> None:
        """Let `optimizer` step the masters of the low parameters it holds."""
        if self.attached(optimizer):
            raise WeightsError(f"{type(optimizer).__name__} already steps these masters; attach it once")
        refuse_wrapper(optimizer)
        self._attached[id(optimizer)] = Attachment(self, optimizer)

    def attach_if_needed(self, optimizer: Optimizer) -> None:
        """Attach `optimizer`, which is about to step, if it has low parameters and is not attached yet."""
        for attachment, outer in self.substituted if optimizer.param_groups else ():
            own = set((attachment.own or {}).values())
            if any(p in own for group in optimizer.param_groups for p in group["params"]):
                raise WeightsError(nested_reason(outer, optimizer))
        if self.attached(optimizer):
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._without_low.get(optimizer) == count:  # checked before
            return
        if not any(p in self for group in optimizer.param_groups for p in group["params"]):
            self._without_low[optimizer] = count
            return
        self.refuse_rounded(optimizer)
        self.attach(optimizer)

    def refuse_rounded(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that was not attached when it loaded its state."""
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if p in self]:
            state = optimizer.state.get(parameter, {})
            if float(state.get("step", 1)) > 0 and any(is_low(value) for value in state.values()):
                raise WeightsError(
                    f"the state of {type(optimizer).__name__} for {self._names[id(parameter)]} was rounded to "
                    f"{self.dtype}, as torch does when it is loaded for low parameters; call hs.prepare(model, "
                    "optimizer) first, then optimizer.load_state_dict"
                )

    def attached(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` steps these masters."""
        return id(optimizer) in self._attached

    def detach(self, optimizer: Optimizer) -> None:
        """Take the substitution off `optimizer`; it steps the model's parameters as they are from now on."""
        attachment = self._attached.pop(id(optimizer), None)
        if attachment is None:
            raise WeightsError(f"{type(optimizer).__name__} does not step these masters")
        attachment.remove(optimizer)

    def widen_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Copy low gradients into fp32 and return all gradients `optimizer` will read.

        Returns:
            fp32 gradients in the order of `param_groups`, without those that are None; parameters without a master
            give their own gradient. Called again before the step, it returns the same tensors and copies nothing.
        """
        return self._attached[id(optimizer)].widen_gradients(optimizer)

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Forget the widened gradients: their step is over, or was skipped."""
        self._attached[id(optimizer)].drop_gradients()

    def restore(self, *, write_back: bool = True) -> bool:
        """Put the model's parameters back into optimizers whose step raised; return whether there were any."""
        if not self.substituted:
            return False
        for attachment, optimizer in list(self.substituted):
            if write_back:  # before the masters go
                self.write_back((attachment.own or {}).values())
            attachment.recover(optimizer)
        self.settle()
        return True

    def free_buffers(self) -> None:
        """Free the fp32 gradient buffers (4 bytes a parameter); the next step makes them again."""
        for attachment in self._attached.values():
            attachment.buffers.clear()
            attachment.widened = None
            attachment.gradients.clear()

    def buffers(self) -> Iterator[Tensor]:
        """Iterate over the fp32 gradient buffers that are kept from step to step."""
        for attachment in self._attached.values():
            yield from attachment.buffers.values()

    def release(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give parameters (default: all) their fp32 values back, in place; if none is left, detach the optimizers."""
        self.restore()
        for parameter in list(self.parameters() if parameters is None else parameters):
            if parameter in self:
                parameter.grad = None
                wide = local(self.value(parameter).detach())
                unwatch(parameter, self)
                put(parameter, wide)
                self._remove(parameter)
            unwatch(parameter, self)
        self.free_buffers()
        for attachment in [] if self._parameters else list(self._attached.values()):
            if (optimizer := attachment.optimizer()) is not None:
                self.detach(optimizer)


def beyond(name: str, values: Tensor, low: torch.dtype) -> str:
    """Return a message if one of `values`, the weights called `name`, is finite and becomes infinite in `low`; else "".

    Waits for the device of `values`.
    """
    values = local(values.detach())
    if values.is_meta or is_fake(values):
        return ""
    lost = torch.isfinite(values) & torch.isinf(values.to(low))
    if not bool(lost.any()):
        return ""
    worst = values[lost].abs().max().item()
    kind = str(low).removeprefix("torch.")
    return f"parameter {name} holds a weight of magnitude {worst:.8g}, and {kind} ends at {torch.finfo(low).max:.8g}"


@cache
def stores() -> weakref.WeakSet[WeightStore]:
    """Return all living stores; an optimizer made after `hs.prepare` is attached from here when it steps."""
    return weakref.WeakSet()


def _attach_if_needed(optimizer: Optimizer) -> None:
    for store in list(stores()):
        store.attach_if_needed(optimizer)
