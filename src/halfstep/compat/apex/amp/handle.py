"""scale_loss, disable_casts, and the handles of O1's casts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.compat.apex.amp._amp_state import _amp_state
from halfstep.compat.apex.amp._process_optimizer import AmpOptimizerState, Session
from halfstep.compat.apex.amp.casts import Casts
from halfstep.compat.apex.amp.opt import OptimWrapper
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.compat.shared import alias

__all__ = ["AmpHandle", "NoOpHandle", "close_own_casts", "disable_casts", "scale_loss", "step_was_skipped"]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor, optimizers: Any, loss_id: int = 0, model: nn.Module | None = None, delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the scaled loss for ``scaled_loss.backward()``; when the block ends, gradients are unscaled and checked.

    Gradients that were there before are set aside meanwhile and added to, so accumulation is exact whatever the scales
    were. If the block raises, they are restored and nothing else changed. After an overflow the next `step` of each
    optimizer is skipped, once.

    Args:
        loss: the loss.
        optimizers: the optimizer, or a list or tuple of all those whose parameters get gradients.
        loss_id: which scaler, below ``num_losses``.
        model: kept for Apex's signature, which does not use it either.
        delay_unscale: leave gradients scaled, for the next pass to add to; unscale in the last one.
        delay_overflow_check: unscale, and update the scale in the next pass.

    Raises:
        RuntimeError: before `initialize`, or an optimizer that was not passed through it.
        IndexError: no such loss.
    """
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    session = _session(listed)
    if session is None:
        yield loss
        return
    stashes: list[AmpOptimizerState] = [optimizer._amp_stash for optimizer in listed]
    scalers = session.loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        raise TypeError(f"scale_loss(loss_id={loss_id!r}): expected a whole number below num_losses")
    if not 0 <= loss_id < len(scalers):
        are = "is 1 loss scaler" if len(scalers) == 1 else f"are {len(scalers)} loss scalers"
        raise IndexError(
            f"scale_loss(loss_id={loss_id}): there {are}; call amp.initialize(..., num_losses={loss_id + 1})"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"scale_loss takes the loss as a tensor and got {type(loss).__name__}")
    scaler, properties = scalers[loss_id], session.properties
    if not scaler.dynamic and not properties.master_weights and properties.low is None and scaler.loss_scale() == 1.0:
        yield loss.float()
        return
    for stash in stashes:
        if stash.scaling:
            raise RuntimeError(
                "scale_loss: this optimizer is in another scale_loss block already; leave that one first"
            )
    for stash in stashes:
        stash.rescale(scaler)
        stash.prepare()
        stash.scaling = True
    try:
        yield scaler.scale(loss)
    except BaseException:
        for stash in stashes:
            stash.restore()
        raise
    finally:
        for stash in stashes:
            stash.scaling = False
    if delay_unscale:
        for stash in stashes:
            stash.params_have_scaled_gradients = True
            stash.scaled_with = scaler.mark(loss.device)
        return
    _unscale(scaler, stashes, loss_id, delay_overflow_check=delay_overflow_check)


def _unscale(scaler: LossScaler, stashes: list[AmpOptimizerState], loss_id: int, *, delay_overflow_check: bool) -> None:
    """Unscale, update the scale, add the gradients set aside, and have steps skipped after an overflow."""
    if not scaler.delayed:
        scaler.clear_overflow_state()
    groups = [group for stash in stashes for group in stash.param_groups]
    scaler.unscale_and_check(groups, masters=any(stash.has_masters for stash in stashes))
    before = scaler.loss_scale() if scaler._has_overflow else 0.0
    try:
        if delay_overflow_check:
            scaler.delayed = True
            return
        scaler.delayed = False
        if scaler.update_scale():
            after = scaler.loss_scale()
            what = f"reducing loss scale to {after}" if after < before else f"keeping loss scale {after}"
            for stash in stashes:
                stash.overflow = f"Gradient overflow.  Skipping step, loss scaler {loss_id} {what}"
    finally:
        for stash in stashes:
            stash.add_up()


def _session(optimizers: list[Any]) -> Session | None:
    """Return the call of `initialize` that `optimizers` went through; None where amp is off."""
    stashes = [getattr(optimizer, "_amp_stash", None) for optimizer in optimizers]
    if _amp_state.opt_properties is None:
        raise RuntimeError(
            "amp.scale_loss was called and amp has not been initialized: call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first"
        )
    if not _amp_state.opt_properties.enabled and all(stash is None for stash in stashes):
        return None
    if not optimizers:
        raise RuntimeError("scale_loss was given no optimizer; pass the one, or a list of those, that step this loss")
    found: dict[int, Session] = {}
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        if stash is None:
            kind = type(optimizer).__name__
            what = (
                "is no optimizer" if not hasattr(optimizer, "param_groups") else "was not passed through amp.initialize"
            )
            raise RuntimeError(
                f"scale_loss: {kind} {what}. Write model, optimizer = amp.initialize(model, optimizer, ...) and use "
                "the optimizer that comes back; several optimizers are passed as a list"
            )
        found[id(stash.session)] = stash.session
    if len(found) > 1:
        raise RuntimeError(
            "scale_loss: these optimizers went through different calls of amp.initialize and have scalers of their "
            "own; pass them through one call as a list"
        )
    session = next(iter(found.values()))
    session.train()
    return session


def step_was_skipped(optimizer: Any) -> bool:
    """Return whether the last ``optimizer.step()`` was skipped because of an overflow. Not in Apex."""
    stash = getattr(optimizer, "_amp_stash", None)
    return stash is not None and bool(stash.skipped)


def disable_casts() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which O1 casts nothing, in this thread; models that O1 prepared included."""
    handle = _open.handle
    return hs.suspended() if handle is None else handle._disable_casts()


class _Open(threading.local):
    """The handle whose casts are open in this thread: a thread that ends takes its casts along."""

    handle: AmpHandle | None = None


_open = _Open()


def close_own_casts() -> None:
    """Switch off the casts that this thread has switched on.

    Raises:
        RuntimeError: inside a region that was entered since; nothing changed.
    """
    if _open.handle is not None:
        _open.handle._deactivate()


class AmpHandle:
    """Owner of O1's casts: they are on from its construction until `_deactivate`.

    Args:
        casts: the open region.
        loss_scale: of the old API, `wrap_optimizer`.
        enable_caching: kept for Apex's signature: outside of a model's call no low copy of a weight is ever kept.
        verbose: whether casts are printed.
    """

    def __init__(
        self, casts: Casts, loss_scale: str | float = "dynamic", enable_caching: bool = True, verbose: bool = False
    ) -> None:
        self._casts: Casts | None = casts
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[Any, Tensor] = {}  # stays empty: a kept cast could be stale
        self._is_active = True
        self._loss_scale = loss_scale
        _open.handle = self

    has_cache = alias("_enable_caching", "Whether caching was asked for.")
    cache = alias("_cache", "Casts that are kept: none, so that none is stale.")
    verbose = alias("_verbose", "Whether casts are printed.")

    def is_active(self) -> bool:
        """Return whether casts are on."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._is_active = self._is_active, False
        try:
            with hs.suspended():
                yield
        finally:
            self._is_active = before

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return the old API's wrapper: with methods ``scale_loss`` (a context, as here) and ``step``."""
        return OptimWrapper(optimizer, self, num_loss, self._loss_scale)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> contextlib.AbstractContextManager[Tensor]:
        """Raise RuntimeError: as in Apex, ``handle.scale_loss`` is gone."""
        raise RuntimeError(
            "handle.scale_loss belongs to an old API of Apex that is no longer supported. Use amp.initialize and `with "
            "amp.scale_loss(loss, optimizer)`, or handle.wrap_optimizer(optimizer) and its scale_loss"
        )

    def _clear_cache(self) -> None:
        self._cache.clear()

    def _deactivate(self) -> None:
        """Switch the casts off for good; functions that were registered are the original ones again."""
        if self._casts is not None:
            self._casts.close()
            self._casts = None
            _open.handle = None
        self._is_active = False

    def remove_cache(self, param: Any) -> None:
        """Forget the cast of `param`, if there were one."""
        self._cache.pop(param, None)


class NoOpHandle:
    """The handle of ``init(enabled=False)``: the same methods, and nothing is cast or scaled."""

    has_cache = verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def _disable_casts(self) -> contextlib.AbstractContextManager[Any]:
        return hs.suspended()

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return a wrapper that scales nothing."""
        return OptimWrapper(optimizer, self, num_loss, 1.0)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the loss."""
        yield loss

    def _clear_cache(self) -> None:
        """There is none."""

    def _deactivate(self) -> None:
        """There is nothing to switch off."""
