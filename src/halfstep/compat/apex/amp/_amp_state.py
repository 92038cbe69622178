"""The state of the process: what the last `initialize` made. Optimizers keep the state they were initialised with."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from halfstep.compat.apex.amp._process_optimizer import Session
    from halfstep.compat.apex.amp.frontend import Properties
    from halfstep.compat.apex.amp.handle import AmpHandle, NoOpHandle
    from halfstep.compat.apex.amp.scaler import LossScaler

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """What code in the wild reads and writes."""

    def __init__(self) -> None:
        self.hard_override = False  # conflicting options are printed as warnings and go through
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1  # 0 prints nothing, 2 prints every cast
        self.opt_properties: Properties | None = None  # the options of the last `initialize`; None before it
        self.handle: AmpHandle | NoOpHandle | None = None  # of the last `init`, or of an `initialize` with O1
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float = 2.0**24
        self.loaded: dict[str, Any] = {}  # a state_dict loaded while amp was off; `state_dict` gives it back
        self._sessions: list[weakref.ref[Session]] = []  # held by their optimizers
        self._without: list[LossScaler] = []  # of a call without optimizers

    @property
    def sessions(self) -> list[Session]:
        """The calls of `initialize` whose optimizers are in use, the last one first."""
        return [session for made in self._sessions if (session := made()) is not None and session.in_use]

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scalers of `sessions`; where there is none, those of a call without optimizers."""
        return [scaler for session in self.sessions for scaler in session.loss_scalers] or self._without

    def begin(self, properties: Properties, session: Session | None, scalers: list[LossScaler]) -> None:
        """Note a call of `initialize`; it takes the place of calls for the same models, or of all if amp is off.

        `session` is what it made; None without optimizers, which use its `scalers`.
        """
        self.opt_properties, self.loaded, self._without = properties, {}, scalers
        for other in self.sessions:
            if not properties.enabled or (session is not None and other.models and other.models <= session.models):
                other.in_use = False
        if session is not None:
            session.earlier.update(other for other in self.sessions if other.trained)
            for other in session.earlier:
                other.trained = False
            self._sessions = [weakref.ref(session), *(made for made in self._sessions if made() is not None)]


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError, or print `msg` if `AmpState.hard_override` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print(f"Warning:  {msg}")


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with `rank0`, on the first process only."""
    if _amp_state.verbosity <= 0:
        return
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank0 and several and torch.distributed.get_rank() != 0:
        return
    print(msg)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over what `optimizer` steps: fp32 masters where its parameters are low, else the parameters.

    After a `scale_loss` block their ``.grad`` is the unscaled fp32 gradient: clip these.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"amp.master_params takes an optimizer and got {type(optimizer).__name__}")
    stash = getattr(optimizer, "_amp_stash", None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter if stash is None else stash.master(parameter)
