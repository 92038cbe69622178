"""Attach an optimizer to a weight store: it steps fp32 values while the model has low weights.

`at_each_step` makes calls around the steps of all optimizers of the process, made after `hs.prepare` too.

Note [substitution]: while an optimizer steps, saves or loads its state, its `param_groups` contain fp32 parameters, the
masters, and its `state` is keyed by them; before and after, they contain the model's own parameters. The storage of the
model's parameters is never replaced: torch would drop their AccumulateGrad nodes, and DistributedDataParallel's hooks
with them.

Note [gradient buffers]: during a step every strategy needs 4 bytes a parameter more for the fp32 gradient that the
optimizer reads. On CPU `master` keeps these buffers from step to step: allocating them again costs more page faults
than the optimizer costs arithmetic. Accelerators have a caching allocator, and the other strategies save bytes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from halfstep.errors import WeightsError
from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.native.calls import peek
from halfstep.kernels.sharded import local
from halfstep.kernels.watched import as_stored
from halfstep.torch_private.foreach import foreach_copy_

if TYPE_CHECKING:
    from halfstep.weights.store import WeightStore

HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class Attachment:
    """One optimizer and one store: the hooks, the substitution and the gradient buffers between them.

    The optimizer's hooks own it and it owns the store; nothing points back, so that all of it goes with the last
    reference to the optimizer and the model, without waiting for the cyclic garbage collector.
    """

    def __init__(self, store: WeightStore, optimizer: Optimizer) -> None:
        self.store = store
        self.optimizer = weakref.ref(optimizer)
        self._kind = type(optimizer).__name__
        self.buffers: dict[int, Tensor] = {}
        self.widened: list[Tensor] | None = None
        self.gradients: dict[int, Tensor] = {}  # the gradients that masters get, by low parameter
        self.own: dict[nn.Parameter, nn.Parameter] | None = None  # by master, while those are in place
        self.handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self.substitute),
            optimizer.register_state_dict_post_hook(self.restore),
            optimizer.register_load_state_dict_pre_hook(self.substitute),
            optimizer.register_load_state_dict_post_hook(self.restore),
        ]
        if store.draws is not None:
            store.draws.save_with(optimizer)
        count = getattr(optimizer, WEIGHTS_ATTRIBUTE, 0)
        setattr(optimizer, WEIGHTS_ATTRIBUTE, count + 1)
        for parameter, state in optimizer.state.items():  # Adagrad's constructor makes some
            if parameter in store:
                state.update({key: value.float() for key, value in state.items() if is_low(value)})

    def remove(self, optimizer: Optimizer) -> None:
        """Take hooks and substitution off `optimizer`."""
        self.restore(optimizer)
        if self.store.draws is not None:
            self.store.draws.leave(optimizer)
        for handle in self.handles:
            handle.remove()
        count = getattr(optimizer, WEIGHTS_ATTRIBUTE) - 1
        if count:
            setattr(optimizer, WEIGHTS_ATTRIBUTE, count)
        else:
            delattr(optimizer, WEIGHTS_ATTRIBUTE)

    def substitute(self, optimizer: Optimizer, *state_dict: Any) -> None:
        """Put masters into the optimizer's groups and re-key its state; `restore` undoes it from any line."""
        self.store.restore()
        self.own = {}
        self.store.substituted.append((self, optimizer))
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter in self.store and not (parameter.grad is None and self.store.is_frozen(parameter)):
                    master = self.store.master(parameter)
                    self.own[master] = parameter
                    master.grad = self.gradients.get(id(parameter))
                    group["params"][i] = master
                    _rename(optimizer, parameter, master)

    def restore(self, optimizer: Optimizer, *state_dict: Any) -> None:
        """Put the model's own parameters back; can be called again after an exception has ended it."""
        own = self.own or {}
        for group in optimizer.param_groups if own else ():  # masters of another store can be among them, and stay
            group["params"][:] = [own.get(p, p) for p in group["params"]]
        for master, parameter in own.items():
            master.grad = None
            _rename(optimizer, master, parameter)
        self.own = None
        self.store.substituted[:] = [entry for entry in self.store.substituted if entry[0] is not self]

    def recover(self, optimizer: Optimizer) -> None:
        """Restore after a step that raised, and repeat a `zero_grad` that has cleared the masters' gradients since."""
        for master, parameter in (self.own or {}).items() if self.widened is not None else ():
            if parameter.grad is not None:
                if master.grad is None:
                    parameter.grad = None
                elif not master.grad.any():
                    parameter.grad.zero_()
        self.drop_gradients()
        self.restore(optimizer)

    @as_stored
    def widen_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Copy low gradients into fp32 buffers and return all gradients that `optimizer` will read, but for None.

        Called again before the step, it returns the same tensors and copies nothing.
        """
        if self.store.editing:
            raise WeightsError(
                f"{type(optimizer).__name__} steps low weights inside `with hs.edit_weights(model):`, where the model "
                "holds fp32 values in their place and gradients are those of the fp32 values; end the block first"
            )
        self.store.restore()
        if self.widened is not None:
            return self.widened
        sources, targets, widened = [], [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if parameter in self.store and gradient.dtype is not torch.float32:
                    if gradient.is_sparse:
                        gradient = gradient.float().coalesce()
                    else:
                        buffer = self.buffers.get(id(parameter))
                        if buffer is None or buffer.shape != gradient.shape or buffer.device != gradient.device:
                            buffer = self.buffers[id(parameter)] = torch.empty_like(parameter, dtype=torch.float32)
                        sources.append(gradient)
                        targets.append(buffer)
                        gradient = buffer
                if parameter in self.store:
                    self.gradients[id(parameter)] = gradient
                widened.append(gradient)
        if targets:
            foreach_copy_([local(t) for t in targets], [local(s) for s in sources])
        self.widened = widened
        return widened

    def check_own_list(self, parameter: nn.Parameter, name: str) -> None:
        """Refuse a step that changes the low `parameter` itself, whose gradient scalers and clipping do not change."""
        gradient, wide = parameter.grad, self.gradients.get(id(parameter))
        if wide is not None and gradient is not None and not torch.equal(gradient.float(), wide):
            raise WeightsError(
                f"{self._kind} changes the low weight {name} from a list of its own, beside its param_groups, where "
                "gradients are not unscaled and not clipped; train under a policy with params='fp32' ('mixed')"
            )

    def drop_gradients(self) -> None:
        """Forget widened gradients, and free their buffers where they are not kept: note [gradient buffers]."""
        self.widened = None
        self.gradients.clear()
        for key in [k for k, b in self.buffers.items() if b.device.type != "cpu" or not self.store.keeps_masters]:
            del self.buffers[key]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if isinstance(optimizer, LBFGS):
            raise WeightsError(
                f"{type(optimizer).__name__}.step(closure) takes differences of gradients, which low gradients are too "
                "coarse for; optimizers that search with closures (LBFGS) work under policies with params='fp32'"
            )
        with torch.no_grad():
            self.widen_gradients(optimizer)
        self.substitute(optimizer)
        if len(args) == 1 and not kwargs:
            return None
        return (
            tuple(self._closed(optimizer, a) if _is_closure(a) else a for a in args),
            {name: self._closed(optimizer, a) if _is_closure(a) else a for name, a in kwargs.items()},
        )

    def _closed(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure` for an optimizer with masters in its groups, which has the model's own while it runs."""
        known = {key: gradient._version for key, gradient in self.gradients.items()}

        @wraps(closure, updated=())
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            nonlocal known
            own = self.own or {}  # keeps the masters alive: some strategies drop unreferenced ones
            for master, parameter in own.items():
                if master.grad is None:  # what zero_grad did to masters
                    parameter.grad = None
                elif (gradient := parameter.grad) is not None and master.grad._version != known.get(id(parameter)):
                    gradient.copy_(master.grad)
            self.restore(optimizer)
            self.drop_gradients()
            self.store.write_back(own.values())  # written through `.data` they have no new version
            result = closure(*args, **kwargs)
            with torch.no_grad():
                self.widen_gradients(optimizer)
            self.substitute(optimizer)
            known = {key: gradient._version for key, gradient in self.gradients.items()}
            return result

        return evaluate

    @as_stored
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not skipped(optimizer):  # first: until then the update exists in the masters alone
            self.store.take_over(list((self.own or {}).values()))  # what it wrote into low weights
            self.store.write_back([p for p in (self.own or {}).values() if p.grad is not None], stepped=True)
        self.restore(optimizer)
        self.drop_gradients()
        self.store.settle()


def is_low(value: object) -> bool:
    """Return whether `value` is a tensor in a low format."""
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps parameters through another one, on which hooks have no effect."""
    kind = type(optimizer).__name__
    if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
        raise WeightsError(
            f"{kind} sends low weights from rank to rank and not the fp32 values behind them, so ranks would drift "
            "apart; train under a policy with params='fp32' ('mixed'), or shard weights and state: hs.shard(...) in "
            "the place of DistributedDataParallel (fully_shard), with the optimizer that it shards"
        )
    refuse_unhooked(optimizer)


def refuse_unhooked(optimizer: Optimizer) -> None:
    """Refuse an optimizer that was not made by torch's `__init__`, or a wrapper that has only a part of it."""
    if name := missing(optimizer):
        raise WeightsError(
            f"{type(optimizer).__name__} has no {name} (its __init__ does not call torch's), so it cannot be given "
            "fp32 weights or states; give hs.prepare the optimizer inside it, or train under a policy with params="
            "'fp32' and state='fp32' ('mixed')"
        )


def missing(optimizer: Optimizer) -> str:
    """Return the name of an attribute that torch.optim.Optimizer.__init__ makes and `optimizer` lacks; "" for none."""
    for name in (f"_optimizer_{hook}_hooks" for hook in HOOKS):
        if not isinstance(getattr(optimizer, name, None), OrderedDict):  # a handle has a weak reference to it
            return name
    return next((name for name in ("defaults", "param_groups", "state") if not hasattr(optimizer, name)), "")


def _is_closure(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, (nn.Module, Optimizer))


def _rename(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Give the state of `old` to `new`; at any moment one of them has it."""
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state[old]
        del optimizer.state[old]


def skipped(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer got a `found_inf` that makes it skip; False where reading it would wait."""
    found = getattr(optimizer, "found_inf", None)
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and type(found) is Tensor and found.device.type == "cpu" and peek(found)


# ------------------------------------------------------------------ around the steps of all optimizers

Call = Callable[[Optimizer], None]


class Turn(IntEnum):
    """The order of calls. A store is attached to an optimizer before its states, which that re-keys, become low."""

    ATTACH = 0
    LOW_STATES = 1
    CHECK = 2


CALLS: dict[Turn, tuple[Call, Call]] = {}  # before and after a step
USERS: set[tuple[Turn, int]] = set()  # what needs the calls of a turn, by id
HANDLES: list[RemovableHandle] = []  # torch's hooks, while there are users


def at_each_step(turn: Turn, user: object, before: Call, after: Call = lambda optimizer: None) -> None:
    """Call `before` and `after`, one pair for all users of a turn, around every step as long as `user` lives."""
    CALLS[turn] = before, after
    if (turn, id(user)) not in USERS:
        USERS.add((turn, id(user)))
        weakref.finalize(user, not_at_each_step, turn, id(user)).atexit = False
    if not HANDLES:
        HANDLES.extend((register_optimizer_step_pre_hook(_before_each), register_optimizer_step_post_hook(_after_each)))


def not_at_each_step(turn: Turn, user: int) -> None:
    """End what `at_each_step` began for the user with this id."""
    USERS.discard((turn, user))
    while HANDLES and not USERS:
        HANDLES.pop().remove()


def _before_each(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for turn in sorted(CALLS):
        CALLS[turn][0](optimizer)


def _after_each(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for turn in sorted(CALLS):
        CALLS[turn][1](optimizer)
