"""How an optimizer comes to step fp32 values while the model holds low weights.

Note [substitution]: while an optimizer steps, saves or loads its state, its `param_groups` hold fp32 parameters, the
masters, and its `state` is keyed by them; before and after they hold the model's own parameters. The model's parameters
are never pointed at other storage: torch would drop their AccumulateGrad nodes, and DistributedDataParallel's hooks
with them.

Note [gradient buffers]: during a step every strategy needs 4 bytes a parameter more for the fp32 gradient that the
optimizer reads. On CPU `master` keeps these buffers from step to step (allocating them again costs more page faults
than the optimizer costs arithmetic); on accelerators they go back to the caching allocator, as they always do under the
other strategies, which are chosen for their bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from halfstep.errors import WeightsError
from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.kernels.native.calls import peek
from halfstep.weights.lows import is_low

if TYPE_CHECKING:
    from halfstep.weights.store import WeightStore

__all__ = ["Attachment", "nested", "refuse_wrapper"]


class Attachment:
    """One optimizer and one store: the hooks, the substitution and the gradient buffers between them.

    The optimizer's hooks own it and it owns the store; nothing points back, so that all of it goes with the last
    reference to the optimizer and the model, without waiting for the cyclic garbage collector.
    """

    def __init__(self, store: WeightStore, optimizer: Optimizer) -> None:
        self.store = store
        self.optimizer = weakref.ref(optimizer)
        self.buffers: dict[int, Tensor] = {}
        self.lifted: list[Tensor] | None = None
        self.gradients: dict[int, Tensor] = {}  # those of them that masters get, by low parameter
        self.own: dict[nn.Parameter, nn.Parameter] | None = None  # by master, while those are in place
        self.handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state),
            optimizer.register_state_dict_post_hook(self._after_state),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_state),
        ]
        count = getattr(optimizer, WEIGHTS_ATTRIBUTE, 0)
        setattr(optimizer, WEIGHTS_ATTRIBUTE, count + 1)
        for parameter, state in optimizer.state.items():  # Adagrad makes some when it is built
            if parameter in store:
                state.update({key: value.float() for key, value in state.items() if is_low(value)})

    def remove(self, optimizer: Optimizer) -> None:
        """Take hooks and substitution off `optimizer`."""
        self.restore(optimizer)
        for handle in self.handles:
            handle.remove()
        count = getattr(optimizer, WEIGHTS_ATTRIBUTE) - 1
        if count:
            setattr(optimizer, WEIGHTS_ATTRIBUTE, count)
        else:
            delattr(optimizer, WEIGHTS_ATTRIBUTE)

    # ------------------------------------------------------------------ substitution

    def substitute(self, optimizer: Optimizer) -> None:
        """Put masters into the optimizer's groups and re-key its state.

        In an order from which `restore` finds its way back wherever an exception ends it.
        """
        self.store.heal()
        self.own = {}
        self.store.substituted.append((self, optimizer))
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter in self.store:
                    master = self.store.master(parameter)
                    self.own[master] = parameter
                    master.grad = self.gradients.get(id(parameter))
                    group["params"][i] = master
                    _rename(optimizer, parameter, master)

    def restore(self, optimizer: Optimizer) -> None:
        """Put the model's own parameters back; may be called again where an exception has ended it."""
        own = self.own or {}
        for group in optimizer.param_groups if own else ():  # masters of another store may be among them, and stay
            group["params"][:] = [own.get(p, p) for p in group["params"]]
        for master, parameter in own.items():
            master.grad = None
            _rename(optimizer, master, parameter)
        self.own = None
        self.store.substituted[:] = [entry for entry in self.store.substituted if entry[0] is not self]

    def recover(self, optimizer: Optimizer) -> None:
        """Restore after a step that raised; a `zero_grad` since then met the masters, and is passed on."""
        for master, parameter in (self.own or {}).items() if self.lifted is not None else ():
            if parameter.grad is not None:
                if master.grad is None:
                    parameter.grad = None
                elif not master.grad.any():
                    parameter.grad.zero_()
        self.drop()
        self.restore(optimizer)

    # ------------------------------------------------------------------ gradients

    def lift(self, optimizer: Optimizer) -> list[Tensor]:
        """Copy low gradients into fp32 buffers and return all gradients, as `WeightStore.lift` says.

        Raises:
            WeightsError: inside `hs.edit_weights`, where a backward pass gives low parameters no gradients.
        """
        if self.store.editing:
            raise WeightsError(
                f"{type(optimizer).__name__} steps low weights inside `with hs.edit_weights(model):`, where the model "
                "holds fp32 values in their place and gradients are those of the fp32 values; end the block first"
            )
        self.store.heal()
        if self.lifted is not None:
            return self.lifted
        sources, targets, lifted = [], [], []
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
                lifted.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.lifted = lifted
        return lifted

    def drop(self) -> None:
        """Forget lifted gradients, and free buffers unless keeping them pays: note [gradient buffers]."""
        self.lifted = None
        self.gradients.clear()
        for key in [k for k, b in self.buffers.items() if b.device.type != "cpu" or not self.store.keeps_buffers]:
            del self.buffers[key]

    # ------------------------------------------------------------------ hooks

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if isinstance(optimizer, LBFGS):
            raise WeightsError(
                f"{type(optimizer).__name__}.step(closure) takes differences of gradients, which low gradients are too "
                "coarse for; optimizers that search with closures (LBFGS) work under policies with params='fp32'"
            )
        with torch.no_grad():
            self.lift(optimizer)
        self.substitute(optimizer)
        if len(args) == 1 and not kwargs:
            return None
        return (
            tuple(self._closed(optimizer, a) if _is_closure(a) else a for a in args),
            {name: self._closed(optimizer, a) if _is_closure(a) else a for name, a in kwargs.items()},
        )

    def _closed(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure` for an optimizer to call while it holds masters: the model is itself while it runs.

        What the optimizer has written into masters by then is what the closure evaluates, and what it leaves in the
        model's gradients is what the optimizer goes on with.
        """
        known = {key: gradient._version for key, gradient in self.gradients.items()}

        @wraps(closure, updated=())
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            nonlocal known
            own = self.own or {}  # holds the masters: some strategies make them for whoever holds them
            for master, parameter in own.items():
                if master.grad is None:  # what zero_grad did to masters
                    parameter.grad = None
                elif (gradient := parameter.grad) is not None and master.grad._version != known.get(id(parameter)):
                    gradient.copy_(master.grad)
            self.restore(optimizer)
            self.drop()
            self.store.write_back(own.values())  # an optimizer may have moved them, and through `.data` unseen
            result = closure(*args, **kwargs)
            with torch.no_grad():
                self.lift(optimizer)
            self.substitute(optimizer)
            known = {key: gradient._version for key, gradient in self.gradients.items()}
            return result

        return evaluate

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _skipped(optimizer):  # first: until they are written back, what an optimizer has done is in the masters
            self.store.write_back([p for p in (self.own or {}).values() if p.grad is not None], stepped=True)
        self.restore(optimizer)
        self.drop()

    def _before_state(self, optimizer: Optimizer) -> None:
        self.substitute(optimizer)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.substitute(optimizer)

    def _after_state(self, optimizer: Optimizer, *state_dict: Any) -> None:
        self.restore(optimizer)


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps parameters through another one, out of reach of hooks on it.

    Raises:
        WeightsError: it is such an optimizer; nothing was changed.
    """
    kind = type(optimizer).__name__
    if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
        raise WeightsError(
            f"{kind} sends low weights from rank to rank and not the fp32 values behind them, so ranks would drift "
            "apart; train under a policy with params='fp32' ('mixed'), or step with the optimizer that it shards "
            "(state='low' keeps its state in 2 bytes an element)"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise WeightsError(
            f"{kind} has no hooks on its step (its __init__ does not call torch's), so it cannot be given fp32 "
            "weights; give hs.prepare the optimizer inside it, or train under a policy with params='fp32' ('mixed')"
        )


def nested(outer: Optimizer, inner: Optimizer) -> str:
    """Say why `inner` cannot step low parameters whose masters `outer` holds, in whose step it is called."""
    return (
        f"{type(outer).__name__} steps low weights through {type(inner).__name__}, which has parameter groups of its "
        f"own: it would pass by the fp32 values that {type(outer).__name__} holds; train under a policy with params="
        "'fp32' ('mixed'), or without the wrapper"
    )


def _is_closure(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, (nn.Module, Optimizer))


def _rename(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Give the state of `old` to `new`; at any moment one of them has it."""
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state[old]
        del optimizer.state[old]


def _skipped(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer was told to leave everything as it is, where asking costs no wait."""
    found = getattr(optimizer, "found_inf", None)
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and type(found) is Tensor and found.device.type == "cpu" and peek(found)
