"""fp32 values behind low parameters: any torch optimizer steps them while the model computes with the low ones.

`strategies` define how `WeightStore` keeps fp32 values between steps; `attachment` lets an optimizer step them.

Note [changes by hand]: a low parameter is a `kernels.watched.WatchedParameter`, so functions of it and of its ``.data``
change its fp32 value (`writing`). What writes into low weights by another way is counted in their `_version`, or in
that of ``.data``; every read of a master first takes such values over, with one warning, because the part of a change
that the low format cannot represent is lost. Writes by torch.distributed and by kernels are not counted: the next
change by a function takes them over. All changes can be made inside `hs.edit_weights`.

Note [frozen parameters]: nothing is kept behind a parameter that is frozen when the model is prepared and that no
optimizer has: its low values are its values, rounded once. Its fp32 value begins as these, when an optimizer
first asks for it or it is first changed by hand (`_key`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.errors import WeightsError
from halfstep.kernels.sharded import local, put, sharded_like
from halfstep.kernels.watched import Owner, unwatch, watch
from halfstep.meeting import processes
from halfstep.torch_private.autograd import unsafe_preserve_version_counter
from halfstep.torch_private.distributed import broadcast_coalesced
from halfstep.torch_private.fake import is_fake
from halfstep.weights.attachment import Attachment, Turn, at_each_step, is_low, refuse_wrapper
from halfstep.weights.draws import Draws
from halfstep.weights.ranks import training_wrapper

NEAR = 0.1  # of its norm, or of a value: what differs by less is the next one, and not another model's
SHARE = 0.25  # of the values of a weight; of two weights that have nothing to do with each other 0.05 are near
_version = attrgetter("_version")


class WeightStore(Owner):
    """fp32 values behind low parameters, which it lowers in place: (name, parameter) pairs, also with repetitions.

    A parameter that is low already (a bf16 checkpoint) is adopted with the values it has. `frozen`: ids of those with
    nothing kept behind them. A WeightsError about a parameter comes before anything is changed.
    """

    name: ClassVar[str]  # its value of `Policy.master`
    form: ClassVar[str]  # how two tensors store the fp32 value: note [forms] in `kernels.ops`
    keeps_masters: ClassVar[bool] = False  # fp32 values and, on CPU, gradient buffers stay from step to step
    keeps_more: ClassVar[bool] = True  # fp32 values have bits that the low weights lack
    draws: Draws | None = None  # where the random bits of steps come from, if they need some

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        low: torch.dtype,
        *,
        frozen: Container[int] = (),
        records: Callable[[], bool | None] = lambda: None,
    ) -> None:
        super().__init__(records)
        pairs = list(named)
        self.dtype, self._kind = low, str(low).removeprefix("torch.")
        for name, parameter in pairs:
            if parameter.dtype not in {torch.float32, low}:
                raise WeightsError(
                    f"parameter {name} is {parameter.dtype} and a master is made for float32 or {low} parameters; "
                    "convert it, or give its module the rule 'keep'"
                )
        self._parameters: dict[int, nn.Parameter] = {}
        self._seconds: dict[int, Tensor] = {}  # what is kept beside a low weight
        self._masters: MutableMapping[int, nn.Parameter] = {} if self.keeps_masters else weakref.WeakValueDictionary()
        self._frozen: set[int] = set()  # those with nothing behind them: note [frozen parameters]
        self.generation = 0  # counts up when other tensors store the fp32 value of a parameter
        self._data_read = False  # whether a parameter's ``.data`` was given out: writes into it are in no version
        self._fresh: set[int] = set()  # those that have not been stepped since they got their values
        self.attached = weakref.WeakValueDictionary[int, Attachment]()  # by id of the optimizer; its hooks own them
        self.substituted: list[tuple[Attachment, Optimizer]] = []  # optimizers that have masters now
        self._without_low: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._wrapper: weakref.ref[nn.Module] | None = None  # whose ranks hold the same fp32 values
        self.editing = False  # whether the model contains fp32 values in place of low parameters
        for name, parameter in pairs:
            self.adopt(name, parameter, frozen=id(parameter) in frozen)
        STORES.add(self)
        at_each_step(Turn.ATTACH, self, _attach_if_needed)

    # ------------------------------------------------------------------ what strategies define or replace

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        """Keep what belongs beside the low weight and return that: packing what `_unpack` gave changes nothing."""
        raise NotImplementedError

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        """Return the fp32 value: a new tensor, in the memory layout of `low`, as fused optimizers require."""
        raise NotImplementedError

    def _value(self, key: int) -> nn.Parameter:
        """Return the fp32 value of `key` to be read: the master itself, or one made for the caller."""
        living = self._masters.get(key)
        wide = self._wide(key) if living is None else living.detach().clone()
        return nn.Parameter(wide, requires_grad=self._parameters[key].requires_grad)

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        """Keep the fp32 values of `parameter` under `key` and return the low ones: of its part if it is sharded."""
        return self._pack(key, local(Tensor.detach(parameter)).float(), stepped=False)

    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        """Return the tensors of `form`, `weights` and `beside`; of a sharded parameter this rank's part."""
        return local(Tensor.detach(self._parameters[key])), self._seconds.get(key)

    def _read_low(self, key: int) -> None:
        """Take over the values that were written into the low weight of `key`.

        The second part of the whole parameter becomes zero, because the written elements are unknown.
        """
        if key in self._seconds:
            self._seconds[key].zero_()
        if (living := self._masters.get(key)) is not None:
            local(living).copy_(local(Tensor.detach(self._parameters[key])))

    def _read_unseen(self, key: int) -> None:  # without masters there is nothing to compare
        """Take over values that were written into the low weight of `key` and that no version counts."""

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        """Put masters into low weights and what is kept beside them; return the keys that were written."""
        living = {key: master for key in keys if (master := self._masters.get(key)) is not None}
        for key, master in living.items():  # the others cannot have changed
            low = self._pack(key, local(master.detach()), stepped=stepped)
            local(Tensor.detach(self._parameters[key])).copy_(low)
        return list(living)

    # ------------------------------------------------------------------ what is kept

    def _keep(self, key: int, part: Tensor) -> None:
        """Keep `part` beside the low weight, in the memory of the one before: CUDA graphs have captured its address."""
        known = self._seconds.get(key)
        if known is None or known.shape != part.shape or known.device != part.device:
            self._seconds[key] = part
        else:
            known.copy_(part)

    def _wide(self, key: int) -> Tensor:
        parameter = self._parameters[key]
        return sharded_like(parameter, self._unpack(key, local(Tensor.detach(parameter))))

    def _master(self, key: int) -> nn.Parameter:
        """Return the fp32 parameter of `key` that optimizers and users change: one object while referenced."""
        master = self._masters.get(key)
        if master is None:
            master = self._masters[key] = nn.Parameter(self._wide(key))
        return master

    @torch.no_grad()
    def settle(self) -> None:
        """Set fp32 values that are still referenced, though they exist for a step only, to those that are stored.

        An exception that is kept refers to those of the step that it ended, and some optimizers refer to them always.
        """
        if not (self.keeps_masters or self.editing or self.substituted):
            for key, living in list(self._masters.items()):
                local(living).copy_(local(self._wide(key)))

    def _move(self, key: int, like: Tensor) -> None:
        """Move what is kept under `key` to the device and into the memory layout of `like`."""
        if key in self._seconds:
            self._seconds[key] = torch.empty_like(like, dtype=self._seconds[key].dtype).copy_(self._seconds[key])
        if (living := self._masters.get(key)) is not None:
            living.data = torch.empty_like(like, dtype=torch.float32).copy_(living.detach())

    def _forget(self, key: int) -> None:
        self._seconds.pop(key, None)
        self._masters.pop(key, None)

    def kept(self) -> Iterator[Tensor]:
        """Iterate over the tensors kept beside the low weights from step to step."""
        return iter((self._masters if self.keeps_masters else self._seconds).values())

    def temporaries(self) -> Iterator[Tensor]:
        """Iterate over fp32 values that exist only during a step or an edit."""
        return iter([] if self.keeps_masters else list(self._masters.values()))

    # ------------------------------------------------------------------ the weights

    def adopt(self, name: str, parameter: nn.Parameter, *, frozen: bool = False) -> None:
        """Lower `parameter` in place and, unless it is `frozen`, keep its fp32 values; one adopted before stays."""
        if parameter in self:
            return
        key = id(parameter)
        low = local(Tensor.detach(parameter)).to(self.dtype) if frozen else self._adopt(key, parameter)
        if parameter.dtype is not self.dtype:
            put(parameter, low)
        watch(parameter, self, name)
        self._add(name, parameter)
        if frozen:
            self._frozen.add(key)

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
        return next((store for store in STORES if parameter in store), None)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the low parameters."""
        return iter(self._parameters.values())

    def _key(self, parameter: nn.Parameter) -> int:
        """Return the key of `parameter` after what was written into it by hand has been taken over."""
        key = id(parameter)
        if key in self._frozen:
            self.check(parameter)
            self.generation += 1
            self._adopt(key, parameter)
            self.versions[key] = parameter._version
            self._frozen.remove(key)
        if self.written_unseen(parameter):
            if not (key in self._fresh and processes()[1] > 1):  # else DistributedDataParallel has made ranks equal
                self._warn_unseen(parameter)
            self.versions[key] = parameter._version
            with torch.no_grad():
                self._read_low(key)
        return key

    def check(self, parameter: nn.Parameter) -> None:
        """Warn if low values were written into a frozen parameter."""
        if self.written_unseen(parameter):
            self.versions[id(parameter)] = parameter._version
            self._warn_unseen(parameter)

    def take_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over what was written by hand into low `parameters`: note [changes by hand]."""
        if self._data_read or [*map(_version, parameters)] != [*map(self.versions.get, map(id, parameters))]:
            for parameter in parameters:
                self._key(parameter)

    def data_read(self) -> None:
        """Expect writes through the ``.data`` of a parameter: it was given out."""
        self._data_read = True

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 master of `parameter`, to be changed and written back: one object while referenced."""
        found = self._master(self._key(parameter))
        found.requires_grad_(parameter.requires_grad)
        return found

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 value of `parameter` as a new tensor."""
        value = self.value(parameter).detach()
        return value.clone() if self.keeps_masters and not self.is_frozen(parameter) else value

    def value(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 value of `parameter` to be read, as `_value` does."""
        if not self.is_frozen(parameter):
            return self._value(self._key(parameter))
        self.check(parameter)
        return nn.Parameter(Tensor.detach(parameter).float(), requires_grad=parameter.requires_grad)

    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the fp32 value of `parameter` to `value` (same shape) and round it into the low weight, in place."""
        self.refuse(parameter, value)
        key = id(parameter)
        with torch.no_grad():
            if key in self._frozen:
                Tensor.detach(parameter).copy_(value)
            else:
                master = self._master(key)  # some strategies have it only while it is referenced
                master.copy_(value.detach())  # of a low parameter its fp32 value
                self.write_back([parameter])
                self.settle()
        self.versions[key] = parameter._version

    @torch.no_grad()
    def write_back(self, parameters: Iterable[nn.Parameter] | None = None, *, stepped: bool = False) -> None:
        """Round masters into low weights: all, or those of `parameters`, which an optimizer has moved if `stepped`."""
        wanted = self._parameters if parameters is None else dict.fromkeys(id(p) for p in parameters)
        keys = [key for key in wanted if key not in self._frozen]
        for key in self._write_low(keys, stepped=stepped) if keys else ():
            self.versions[key] = self._parameters[key]._version
        if stepped:
            self._fresh.clear()

    # ------------------------------------------------------------------ updates in one pass

    def cannot_update(self) -> str:
        """Return why an update in one pass cannot change the tensors of `parts`; "" if it can."""
        in_use = self.editing or next(self.temporaries(), None) is not None
        return "fp32 values of low weights are in use" if in_use else ""

    def parts(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor | None]:
        """Return the tensors that store the fp32 value of `parameter` in `form`; who changes them calls `stepped`."""
        if self.is_frozen(parameter) and parameter.grad is None:
            return local(Tensor.detach(parameter)), None
        return self._parts(self._key(parameter))

    def before_forward(self, module: nn.Module) -> None:
        """Prepare for a forward pass of `module`: `restore`, and `broadcast` where a wrapper of it trains."""
        self.restore()
        if (wrapper := training_wrapper(module)) is not None:
            self.broadcast(wrapper)

    @torch.no_grad()
    def broadcast(self, wrapper: DistributedDataParallel) -> None:
        """Give every rank of `wrapper` the fp32 values of its first rank. Collective, once for each wrapper.

        DistributedDataParallel makes low weights equal when it wraps a model, and not what is beside them. That is sent
        at the first call that all ranks are known to reach: `hs.prepare` or `hs.TrainStep` of the wrapped model, or the
        first forward pass that trains it. Where compiled code hides these calls, `master` on every rank takes over the
        broadcast low weights as they are.
        """
        if self._wrapper is not None and self._wrapper() is wrapper:
            return
        self._wrapper = weakref.ref(wrapper)
        named = wrapper.module.named_parameters()
        parameters = [p for name, p in named if p in self and name not in wrapper.parameters_to_ignore]
        parts = [Tensor.detach(p) for p in parameters if self.is_frozen(p)]
        for parameter in parameters:
            if not self.is_frozen(parameter):
                parts += [Tensor.detach(part) for part in self._parts(id(parameter)) if part is not None]
        # backends of torch.distributed take no int16
        sent = [part.view(torch.float16) if part.dtype is torch.int16 else part for part in parts]
        if sent:
            broadcast_coalesced(wrapper.process_group, sent, int(wrapper.broadcast_bucket_size), 0)
        self.stepped(parameters)

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that both parts of low `parameters` were changed."""
        self._fresh.clear()
        self.versions.update(zip(map(id, parameters), map(_version, parameters), strict=True))

    # ------------------------------------------------------------------ manual changes: note [changes by hand]

    @contextmanager
    def writing(self, parameter: nn.Parameter, *, fills: bool, counted: bool) -> Iterator[Tensor]:
        """Give the fp32 value of `parameter` to be changed in place, and round it at the end into the low weight.

        A frozen parameter gets an fp32 value behind it, and `stochastic` rounds by chance, unless values begin anew.
        """
        fills = fills or self.loading
        if fills and self.is_frozen(parameter):
            wide = self.value(parameter).detach()
            yield wide
            Tensor.detach(parameter).copy_(wide)
            self.versions[id(parameter)] = parameter._version
            return
        key = self._key(parameter)
        self._read_unseen(key)
        for attachment, _ in self.substituted:
            attachment.check_own_list(parameter, self.names[key])
        master = self._master(key)
        wide = master.detach()
        yield wide
        chance = not (self.keeps_more or fills)
        if chance and "chance" not in self.warned and not torch.equal(local(wide), local(wide).to(self.dtype).float()):
            self.warn_once(
                "chance",
                f"the weight {self.names[key]} was changed by hand, and master={self.name!r} keeps only its "
                f"{self._kind} value: the change is rounded up or down by chance, right on average; a policy with "
                "master='split' keeps it exactly",
            )
        with nullcontext() if counted else unsafe_preserve_version_counter(parameter):
            self._write_low([key], stepped=chance)
        self.versions[key] = parameter._version

    def moved(self, parameter: nn.Parameter) -> bool:
        """Return whether frozen `parameter` has an fp32 value behind it, since it was changed by hand."""
        return not parameter.requires_grad and not self.is_frozen(parameter)

    def rounded(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Warn if `parameter` is about to be given a low `value` that was computed from its own in low, losing bits."""
        low = Tensor.detach(parameter)
        if "rounded" in self.warned or self.loading or value.shape != low.shape:
            return
        given, own = local(value.detach()).to(low.device).float(), local(low).float()
        change, near = (given - own).norm(), (given - own).abs() <= NEAR * own.abs()
        lost = 0 < change < NEAR * own.norm()
        if lost or (
            not torch.equal(local(self.value(parameter)), own)
            and (near.float().mean() > SHARE or torch.equal(given.flatten().sort()[0], own.flatten().sort()[0]))
        ):
            self.warn_once(
                "rounded",
                f"the weight {self.names[id(parameter)]} was given {self._kind} values that are near its own, or its "
                f"own in another order: what its fp32 values and a small change have beyond {self._kind} is lost; "
                "compute it with operators and methods of the weight or its .data (0.9 * p, p.lerp_), or from "
                "p.float()",
            )

    def _warn_unseen(self, parameter: nn.Parameter) -> None:
        self.warn_once(
            "unseen",
            f"the low weight {self.names[id(parameter)]} was written by no method of its own (but by a "
            f"kernel, torch.ops, low .data or, if it is sharded, out=): what {self._kind} cannot hold of that is lost; "
            "call a method of the weight (add_, mul_, lerp_, copy_), write inside `with hs.edit_weights(model):`, "
            "where weights are fp32, or give its module the rule 'fp32'",
        )

    @torch.no_grad()
    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor, *, converted: bool) -> Tensor:
        """Return the data that `parameter` gets where it is given `value`, as ``module.float()`` or ``.to`` do.

        Its own value in fp32 or a wider format (`converted`) is its precise value, which an optimizer steps as any
        other from then on; back in the low format it is adopted again. Other values in these formats become its fp32
        value. On another device or in another layout, what is kept beside it follows.
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
        self.names[key], self._parameters[key], self.versions[key] = name, parameter, parameter._version
        self._fresh.add(key)

    def _remove(self, parameter: nn.Parameter) -> None:
        self._frozen.discard(id(parameter))
        self._forget(id(parameter))
        self._without_low.clear()
        self.generation += 1
        for entries in (self.names, self._parameters, self.versions):
            entries.pop(id(parameter))

    def refuse(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Refuse finite values for `parameter` that its low format cannot hold; waits for their device."""
        if lost := beyond(self.names[id(parameter)], value, self.dtype):
            raise WeightsError(f"{lost}; clamp it, or prepare the model with dtype='bf16' or its module in fp32")

    @torch.no_grad()
    def undo_beyond(self, parameters: Iterable[nn.Parameter]) -> str:
        """Reset masters with values beyond the low format to their low weights; return the first, "" for none."""
        lost = ""
        for parameter in parameters:
            if found := beyond(self.names[id(parameter)], self.master(parameter), self.dtype):
                self._read_low(id(parameter))
                lost = lost or found
        return lost

    # ------------------------------------------------------------------ optimizers

    def attach(self, optimizer: Optimizer) -> None:
        """Let `optimizer` step the masters of the low parameters it holds."""
        refuse_wrapper(optimizer)
        self.attached[id(optimizer)] = Attachment(self, optimizer)

    def attach_if_needed(self, optimizer: Optimizer) -> None:
        """Attach `optimizer`, which is about to step, if it has low parameters and is not attached yet."""
        for attachment, outer in self.substituted if optimizer.param_groups else ():
            own = set((attachment.own or {}).values())
            if any(p in own for group in optimizer.param_groups for p in group["params"]):
                kind = type(outer).__name__
                raise WeightsError(
                    f"{kind} steps low weights through {type(optimizer).__name__}, which has parameter groups of its "
                    f"own: it would pass by the fp32 values that {kind} holds; train under a policy with params="
                    "'fp32' ('mixed'), or without the wrapper"
                )
        if id(optimizer) in self.attached:
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
                    f"the state of {type(optimizer).__name__} for {self.names[id(parameter)]} was rounded to "
                    f"{self.dtype}, as torch does when it is loaded for low parameters; call hs.prepare(model, "
                    "optimizer) first, then optimizer.load_state_dict"
                )

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
        for attachment in list(self.attached.values()):
            attachment.buffers.clear()
            attachment.drop_gradients()
            if not self._parameters and (optimizer := attachment.optimizer()) is not None:
                del self.attached[id(optimizer)]
                attachment.remove(optimizer)


def beyond(name: str, values: Tensor, low: torch.dtype) -> str:
    """Return a message if a weight in `values` is finite and becomes infinite in `low`, else ""; waits for values."""
    values = local(values.detach())
    if values.is_meta or is_fake(values):
        return ""
    lost = torch.isfinite(values) & torch.isinf(values.to(low))
    if not bool(lost.any()):
        return ""
    worst = values[lost].abs().max().item()
    kind = str(low).removeprefix("torch.")
    return f"parameter {name} holds a weight of magnitude {worst:.8g}, and {kind} ends at {torch.finfo(low).max:.8g}"


STORES = weakref.WeakSet[WeightStore]()
"""All living stores; an optimizer made after `hs.prepare` is attached from here when it steps."""


def _attach_if_needed(optimizer: Optimizer) -> None:
    for store in list(STORES):
        store.attach_if_needed(optimizer)
