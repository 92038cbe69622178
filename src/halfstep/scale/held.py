"""A scale rule and its state, wherever the state is: numbers on the host until there are tensors on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import ScaleRule, plain
from halfstep.scale.choose import check_factor
from halfstep.scale.rule import ScaleState, check_scale, initial_host, kept, load_host, set_scale_, state_to_host
from halfstep.scale.saved import host_from_state_dict, rule_from_state_dict, state_dict_from

__all__ = ["HeldScale"]


class HeldScale:
    """The part of a scaler that is read, set, saved and loaded; the methods are torch.amp.GradScaler's."""

    def __init__(self, rule: ScaleRule, *, enabled: bool) -> None:
        """Hold the state before the first step of `rule`."""
        self._rule = rule
        self._enabled = enabled
        self._host = initial_host(rule)  # the state until there are tensors
        self._state: ScaleState | None = None

    @property
    def rule(self) -> ScaleRule:
        """The numbers in force."""
        return self._rule

    def is_enabled(self) -> bool:
        """Return whether this scaler scales."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the current scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return float(self._host["scale"] if self._state is None else self._state.scale)

    def get_growth_factor(self) -> float:
        """Return the factor the scale grows by."""
        return self._rule.growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor the scale grows by; a rule that divides also backs off by it."""
        new_factor = plain(new_factor)
        check_factor("growth_factor", new_factor)
        backoff = 1.0 / new_factor if self._rule.divide else self._rule.backoff
        self._rule = dataclasses.replace(self._rule, growth=new_factor, backoff=backoff)

    def get_backoff_factor(self) -> float:
        """Return the factor a bad step multiplies the scale by."""
        return self._rule.backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor a bad step multiplies the scale by."""
        new_factor = plain(new_factor)
        check_factor("backoff_factor", new_factor)
        self._rule = dataclasses.replace(self._rule, backoff=new_factor)

    def get_growth_interval(self) -> int:
        """Return how many good steps in a row make the scale grow."""
        return self._rule.interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good steps in a row make the scale grow; if that many are past, the next one does."""
        self._rule = dataclasses.replace(self._rule, interval=new_interval)
        most = self._rule.interval - 1
        self._host["good"] = min(self._host["good"], most)
        if self._state is not None:
            self._state.good.clamp_(max=most)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers under torch's five keys and one of our own; waits for the device.

        torch.amp.GradScaler loads it too. Call it after `update`. Empty if disabled.
        """
        return state_dict_from(self._rule, self._host_state()) if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch.amp.GradScaler returned; nothing changes if that fails.

        Growth, backoff and interval come from the state as in torch; floor, ceiling and the rest stay this scaler's.
        A scale outside them (torch's may be 0) is brought inside with a warning. Does nothing if disabled.

        Raises:
            ScaleError: empty, a key is missing, or a value makes no sense.
        """
        if not self._enabled:
            return
        rule = rule_from_state_dict(self._rule, state_dict)
        host = host_from_state_dict(rule, state_dict)
        self._rule, self._host = rule, host
        if self._state is not None:
            for name, field in zip(ScaleState._fields, self._state, strict=True):
                field.fill_(host[name])

    def scale_on(self, device: torch.device | str) -> Tensor:
        """Return the current scale as a 0-dim fp32 tensor on `device` (1 if disabled), without waiting.

        On the scaler's own device, which is the first one asked for, it is the live tensor (but for a rule that keeps
        fp64): `update` changes it in place, so clone it to keep a value, and do not write to it.
        """
        if not self._enabled:
            return torch.ones((), dtype=torch.float32, device=device)
        return self._state_on(device).scale.to(device=device, dtype=torch.float32, non_blocking=True)

    def _state_on(self, device: torch.device | str) -> ScaleState:
        """Return the tensors, made on `device` if there are none yet."""
        if self._state is None:
            self._state = load_host(self._host, device, self._rule)
        return self._state

    def _started(self, method: str) -> ScaleState:
        if self._state is None:
            raise ScaleError(
                f"{method}(): no loss has been scaled yet; run scaler.scale(loss).backward() instead of loss.backward()"
            )
        return self._state

    def _host_state(self) -> dict[str, Any]:
        return dict(self._host) if self._state is None else state_to_host(self._state)

    def _set_scale(self, value: Any) -> None:
        """Set the scale by hand; a tensor makes the state on its own device if there is none yet."""
        if isinstance(value, Tensor):
            set_scale_(self._rule, self._state_on(value.device), value)
            return
        value = plain(value)
        if self._state is not None:
            set_scale_(self._rule, self._state, value)
        else:
            check_scale(self._rule, value, "update(new_scale=...)")
            self._host["scale"] = kept(self._rule, value)
