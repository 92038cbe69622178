"""A training step that cannot be built, or was built on trial, leaves model and optimizer as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from halfstep.binding.bind import binding_of, is_bound
from halfstep.binding.prepare import unprepare
from halfstep.binding.wrappers import unwrap
from halfstep.snapshot import Snapshot, optimizer_state
from halfstep.torch_private.autograd import post_accumulate_grad_hooks
from halfstep.weights import WeightStore


@contextmanager
def unchanged_on_failure(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Undo what a block does to `model` and `optimizer` if it raises; see `bound`."""
    snapshot = Snapshot(optimizer_state(optimizer), bound(model))
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


def bound(model: nn.Module) -> Callable[[], None]:
    """Note whether `model` is prepared; return a function that undoes what a training step makes of it.

    It takes off binding, low weights and hooks. A model that was prepared before stays prepared. Low weights with
    nothing behind them (a policy's master="none", frozen parameters) come back rounded, since their fp32 values are
    gone.
    """
    inner = unwrap(model)
    fresh = not is_bound(inner)
    gradients = [(p, p.grad_dtype, set(post_accumulate_grad_hooks(p))) for p in inner.parameters()]

    def undo() -> None:
        if fresh:
            _release(inner)
        for parameter, dtype, hooks in gradients:
            if parameter.grad_dtype is not dtype:
                parameter.grad_dtype = dtype
            for key in set(post_accumulate_grad_hooks(parameter)) - hooks:
                del post_accumulate_grad_hooks(parameter)[key]

    return undo


def _release(model: nn.Module) -> None:
    """Take binding and low weights off `model`, also if preparing it was cut off."""
    behind = {id(store): store for p in model.parameters() if (store := WeightStore.behind(p)) is not None}
    if binding_of(model) is not None:
        unprepare(model)
    for store in behind.values():
        store.release(model.parameters())
