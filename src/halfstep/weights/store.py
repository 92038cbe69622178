"""What stands behind low parameters: fp32 values that any torch optimizer steps while the model holds low ones.

`WeightStore` is what the strategies share; how the fp32 values are kept between steps is theirs (`master`, `split`,
`kahan`, `stochastic`), how an optimizer comes to step them in `attachment`, what users may do to them in `by_hand`.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import WeightsError
from halfstep.kernels.watched import WatchedParameter, unwatch, watch
from halfstep.weights.attachment import Attachment, nested, refuse_wrapper
from halfstep.weights.by_hand import ByHand
from halfstep.weights.lows import LOWS, is_low
from halfstep.weights.ranks import training_wrapper, unify

__all__ = ["WeightStore", "stores"]


class WeightStore(ByHand):
    """fp32 values behind low parameters.

    Adopting a parameter replaces its values by low ones, in place; its fp32 values live on in the store, as exactly as
    the strategy keeps them. A parameter that is low already (a bf16 checkpoint) is adopted with the values it has.

    Args:
        named: (name, parameter) pairs; a shared parameter may come more than once.
        low: torch.bfloat16 or torch.float16.

    Raises:
        WeightsError: `low` is no format of this strategy, or a parameter is neither fp32 nor low; nothing was changed.
    """

    lows: ClassVar[tuple[torch.dtype, ...]] = LOWS
    name: ClassVar[str]  # what `Policy.master` calls it
    form: ClassVar[str]  # how the fp32 value lives in two tensors: see note [forms] in `kernels.ops`
    keeps_buffers: ClassVar[bool] = False  # fp32 gradient buffers, on CPU, from step to step

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype) -> None:
        if low not in self.lows:
            raise WeightsError(self._refusal(low))
        pairs = list(named)
        for name, parameter in pairs:
            if parameter.dtype not in {torch.float32, low}:
                raise WeightsError(
                    f"parameter {name} is {parameter.dtype} and a master is made for float32 or {low} parameters; "
                    "convert it, or give its module the rule 'keep'"
                )
        self.dtype = low
        self._names: dict[int, str] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._fresh: set[int] = set()  # those that have not been stepped since they got their values
        self._versions: dict[int, int] = {}  # of low weights when they were last known to be their rounded masters
        self._attached = weakref.WeakValueDictionary[int, Attachment]()  # by optimizer; its hooks own them
        self.substituted: list[tuple[Attachment, Optimizer]] = []  # these hold masters now; attachments write it
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._wrapper: weakref.ref[nn.Module] | None = None  # whose ranks hold the same fp32 values
        self._said: set[bool] = set()  # what was warned of, once: a copy or not
        self.editing = False  # whether fp32 values stand in the model, in the place of low parameters
        self.exposed = 0  # how often fp32 values were shown: copies may have been averaged with them
        for name, parameter in pairs:
            self.adopt(name, parameter)
        stores().add(self)

    def _refusal(self, low: torch.dtype) -> str:
        return f"low weights are bfloat16 or float16, not {low}"

    # ------------------------------------------------------------------ what a strategy says

    @abstractmethod
    def _master(self, key: int) -> nn.Parameter:
        """Return the fp32 parameter of `key` that optimizers and users change, the same object while anybody has it."""

    @abstractmethod
    def _fold(self, keys: list[int], *, stepped: bool) -> list[int]:
        """Put masters into low weights and what is kept beside them; return the keys that were written."""

    @abstractmethod
    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        """Return the tensors of `form`: `weights` and `beside`."""

    @abstractmethod
    def value(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 value of `parameter` to be read: the master itself, or one made for the caller."""

    @abstractmethod
    def kept(self) -> Iterator[Tensor]:
        """Iterate over the tensors kept beside the low weights from step to step."""

    @abstractmethod
    def temporaries(self) -> Iterator[Tensor]:
        """Iterate over fp32 values that are there only while somebody uses them (a step, an edit)."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model's fp32 state_dict; {} for nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises:
            WeightsError: it is not that; nothing was changed.
        """
        if state:
            raise WeightsError(f"these weights have no state of their own, and were given {sorted(state)}")

    # ------------------------------------------------------------------ the weights

    def adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Lower `parameter` in place and keep its fp32 values; a parameter adopted before stays as it is."""
        if parameter in self:
            return
        key = id(parameter)
        low = self._begin(key, parameter)
        if parameter.dtype is not self.dtype:
            parameter.data = low
        watch(parameter, self, name)
        self._enter(name, parameter)

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
        unseen = type(parameter) is WatchedParameter and parameter.written()
        if unseen:
            self.data_written(self._names[key], copied=False)
        if unseen or parameter._version != self._versions[key]:
            self._versions[key] = parameter._version
            with torch.no_grad():
                self._follow(key)
        return key

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 master of `parameter`, to be changed and written back: the same object while it is held.

        If the low weight was changed by hand since it was last written back, the master takes what is new in it.
        """
        found = self._master(self._key(parameter))
        found.requires_grad_(parameter.requires_grad)
        return found

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 value of `parameter` as a new tensor."""
        return self.value(parameter).detach().clone()

    def assign(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the fp32 value of `parameter` to `value` (same shape) and round it into the low weight, in place.

        Raises:
            WeightsError: another shape, or values beyond the low format; nothing was changed.
        """
        self.refuse(parameter, value)
        master = self.master(parameter)
        if value.shape != master.shape:
            name = self._names[id(parameter)]
            raise WeightsError(f"{name} has shape {tuple(master.shape)} and was assigned {tuple(value.shape)}")
        with torch.no_grad():
            master.copy_(value)
        self.write_back([parameter])

    @torch.no_grad()
    def write_back(self, parameters: Iterable[nn.Parameter] | None = None, *, stepped: bool = False) -> None:
        """Round masters into low weights, in place: all, or those of `parameters`.

        Args:
            parameters: low parameters of this store.
            stepped: whether an optimizer has moved them; then `stochastic` rounds up or down by chance.
        """
        keys = list(self._parameters if parameters is None else dict.fromkeys(id(p) for p in parameters))
        for key in self._fold(keys, stepped=stepped) if keys else ():
            self._versions[key] = self._parameters[key]._version
        if stepped:
            self._fresh.clear()

    # ------------------------------------------------------------------ updates in one pass

    def busy(self) -> str:
        """Return why the tensors of `parts` are not all there is at the moment; "" if they are."""
        held = self.editing or next(self.temporaries(), None) is not None
        return "somebody holds fp32 values of low weights" if held else ""

    def parts(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor | None]:
        """Return the tensors in which the fp32 value of `parameter` lives, as `form` says, to be changed in place.

        Whoever does so calls `stepped` afterwards.
        """
        return self._parts(self._key(parameter))

    def entered(self, module: nn.Module) -> None:
        """Prepare for a forward pass of `module`: `heal`, and `unify` where a wrapper of it trains."""
        self.heal()
        if (wrapper := training_wrapper(module)) is not None:
            self.unify(wrapper)

    def unify(self, wrapper: DistributedDataParallel) -> None:
        """Give every rank of `wrapper` the same fp32 values. Collective, once for each wrapper."""
        if self._wrapper is None or self._wrapper() is not wrapper:
            self._wrapper = weakref.ref(wrapper)
            self.stepped(unify(self, wrapper))

    def stepped(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note that the parts of those of `parameters` that are low were changed, both of them."""
        self._fresh.clear()
        for parameter in parameters:
            if id(parameter) in self._versions:
                self._versions[id(parameter)] = parameter._version

    # ------------------------------------------------------------------ optimizers

    def attach(self, optimizer: Optimizer) -> None:
        """Let `optimizer` step the masters of the low parameters it holds.

        Raises:
            WeightsError: it is attached already.
        """
        if self.attached(optimizer):
            raise WeightsError(f"{type(optimizer).__name__} already steps these masters; attach it once")
        refuse_wrapper(optimizer)
        self._attached[id(optimizer)] = Attachment(self, optimizer)

    def welcome(self, optimizer: Optimizer) -> None:
        """Attach `optimizer`, which is about to step, if it holds low parameters and nobody has attached it.

        Raises:
            WeightsError: it has loaded its state into low parameters, which rounded it.
        """
        for attachment, outer in self.substituted if optimizer.param_groups else ():
            own = set((attachment.own or {}).values())
            if any(p in own for group in optimizer.param_groups for p in group["params"]):
                raise WeightsError(nested(outer, optimizer))
        if self.attached(optimizer):
            return
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._strangers.get(optimizer) == held:  # looked at before
            return
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self]
        if not mine:
            self._strangers[optimizer] = held
            return
        for parameter in mine:
            state = optimizer.state.get(parameter, {})
            if float(state.get("step", 1)) > 0 and any(is_low(value) for value in state.values()):
                raise WeightsError(
                    f"the state of {type(optimizer).__name__} for {self._names[id(parameter)]} was rounded to "
                    f"{self.dtype}, as torch does when it is loaded for low parameters; call hs.prepare(model, "
                    "optimizer) first, then optimizer.load_state_dict"
                )
        self.attach(optimizer)

    def attached(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` steps these masters."""
        return id(optimizer) in self._attached

    def detach(self, optimizer: Optimizer) -> None:
        """Take the substitution off `optimizer`; it steps the model's parameters as they are from now on."""
        attachment = self._attached.pop(id(optimizer), None)
        if attachment is None:
            raise WeightsError(f"{type(optimizer).__name__} does not step these masters")
        attachment.remove(optimizer)

    def lift(self, optimizer: Optimizer) -> list[Tensor]:
        """Copy low gradients into fp32 and return all gradients `optimizer` will read.

        Args:
            optimizer: an attached optimizer.

        Returns:
            fp32 gradients in the order of `param_groups`, without those that are None; parameters without a master
            give their own gradient. Called again before the step, it returns the same tensors and copies nothing.
        """
        return self._attached[id(optimizer)].lift(optimizer)

    def drop(self, optimizer: Optimizer) -> None:
        """Forget the lifted gradients: the step they were for is over, or was skipped."""
        self._attached[id(optimizer)].drop()

    def heal(self, *, write_back: bool = True) -> bool:
        """Put the model's parameters back into optimizers whose step raised; return whether there were any.

        Args:
            write_back: whether to round masters into low weights: not if nothing has been written to them.
        """
        if not self.substituted:
            return False
        for attachment, optimizer in list(self.substituted):
            if write_back:  # before the masters go
                self.write_back((attachment.own or {}).values())
            attachment.recover(optimizer)
        return True

    def free_buffers(self) -> None:
        """Free the fp32 gradient buffers (4 bytes a parameter); the next step makes them again."""
        for attachment in self._attached.values():
            attachment.buffers.clear()
            attachment.lifted = None
            attachment.gradients.clear()

    def buffers(self) -> Iterator[Tensor]:
        """Iterate over the fp32 gradient buffers that are kept from step to step."""
        for attachment in self._attached.values():
            yield from attachment.buffers.values()

    def unwatch(self) -> None:
        """Let the low parameters be of torch's own class again; writes through ``.data`` are noticed no more."""
        for parameter in self.parameters():
            unwatch(parameter, self)

    def release(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Give parameters (default: all) their fp32 values back, in place; without any left, let go of optimizers."""
        self.heal()
        for parameter in list(self.parameters() if parameters is None else parameters):
            if parameter in self:
                parameter.grad = None
                wide = self.value(parameter).data
                unwatch(parameter, self)
                parameter.data = wide
                self._leave(parameter)
            unwatch(parameter, self)
        self.free_buffers()
        for attachment in [] if self._parameters else list(self._attached.values()):
            if (optimizer := attachment.optimizer()) is not None:
                self.detach(optimizer)


@cache
def stores() -> weakref.WeakSet[WeightStore]:
    """Return the stores there are; optimizers made after `hs.prepare` find theirs here when they step."""
    made = weakref.WeakSet[WeightStore]()

    def welcome(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for store in list(made):
            store.welcome(optimizer)

    register_optimizer_step_pre_hook(welcome)  # torch calls these before an optimizer's own, which may be added here
    return made
