"""megengine.amp.GradScaler: one `hs.GradScaler` under the rule "megengine", with MegEngine's names."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

import halfstep as hs
from halfstep.compat.megengine.autodiff import GradManagerGroup
from halfstep.compat.megengine.autodiff.grad_manager import MARK, SCALED, UNSCALED, managers_of, mark, marked
from halfstep.compat.shared import listed, unscaled
from halfstep.errors import ScaleError

__all__ = ["GradScaler"]

NUMBERS = ("growth_factor", "backoff_factor", "growth_interval")
KEYS = ("scale_factor", *NUMBERS, "_growth_tracker")


def _number(name: str, kind: Callable[[Any], Any], doc: str) -> Any:
    def change(scaler: GradScaler, value: Any) -> None:
        scaler._go_on({**scaler.state_dict(), name: value})

    return property(lambda scaler: kind(scaler._numbers[name]), change, doc=f"{doc}. Can be set.")


class GradScaler:
    """Scale gradients so that fp16 does not lose small ones, and drop them if one is not finite.

    Args:
        init_scale: the first scale.
        growth_factor: at least 1; applied after `growth_interval` good steps in a row. 0: the scale never moves.
        backoff_factor: above 0 and at most 1; applied at a bad step.
        growth_interval: number of steps. 0: the scale never moves; bad steps are dropped all the same.

    Raises:
        ScaleError: a number that makes no sense.

    Examples:
        >>> with gm:
        ...     scaler.backward(gm, loss_of(net))
        >>> optimizer.step().clear_grad()
    """

    def __init__(
        self, init_scale: float = 2.0**4, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:  # fmt: skip
        self._go_on(dict(zip(KEYS, (init_scale, growth_factor, backoff_factor, growth_interval, 0), strict=True)))
        self._copies: dict[torch.device, Tensor] = {}  # of the scale, until it may have moved
        self._found: bool | None = None  # None: nothing unscaled since the last update

    @property
    def scale_factor(self) -> float:
        """The scale; waits for the device. Can be set."""
        return self._core.get_scale()

    @scale_factor.setter
    def scale_factor(self, value: float) -> None:
        self._core.update(value)
        self._copies = {}

    growth_factor = _number("growth_factor", float, "The scale's factor after `growth_interval` good steps")
    backoff_factor = _number("backoff_factor", float, "The scale's factor at a bad step")
    growth_interval = _number("growth_interval", int, "Good steps in a row that make the scale grow; 0: it never moves")

    found_non_finite = property(
        lambda self: bool(self._found), doc="Whether a gradient unscaled since the last `update` was not finite."
    )

    def backward(
        self, gm: GradManagerGroup, y: Any = None, dy: Any = None, *, unscale_grad: bool = True,
        update_scale: bool | Literal["if_unscale_grad"] = "if_unscale_grad",
    ) -> None:  # fmt: skip
        """Go backward from the scaled `y`, and by default unscale the gradients and update the scale.

        Args:
            gm: the manager, recording.
            y: the loss or several.
            dy: gradient of each, to be scaled; default ones.
            unscale_grad: False leaves gradients scaled, to accumulate several backward passes.
            update_scale: False leaves the scale as it is. Without `unscale_grad` it is never updated.

        Raises:
            ScaleError: an attached tensor has a gradient that is not scaled, to which a scaled one would be added.
        """
        if update_scale not in (True, False, "if_unscale_grad"):
            raise ScaleError(f"backward(update_scale={update_scale!r}): expected True, False or 'if_unscale_grad'")
        if not isinstance(gm, GradManagerGroup):
            raise ScaleError(f"backward(gm={gm!r}): expected the GradManager that records; scaler.backward(gm, loss)")
        for tensor in gm.attached_tensors():
            if tensor.grad is not None and not marked(tensor.grad, SCALED):
                state = "is unscaled already" if marked(tensor.grad, UNSCALED) else "was never scaled"
                raise ScaleError(
                    f"backward: the gradient of an attached tensor of shape {tuple(tensor.shape)} {state}, "
                    "and a scaled one would be added to it. Call optimizer.step().clear_grad() first; to accumulate, "
                    "use backward(..., unscale_grad=False) for all but the last"
                )
        ys = listed(y)
        if not all(isinstance(one, Tensor) for one in ys):
            raise ScaleError(f"backward(y={y!r}): expected the loss as a tensor, or several")
        scaled = self._core.scale([torch.ones_like(one) for one in ys] if dy is None else listed(dy))
        self._rescale(gm.attached_tensors())
        for one in scaled:
            mark(one, SCALED)
        gm.backward(ys, scaled)
        for tensor in gm.attached_tensors():
            if tensor.grad is not None:
                mark(tensor.grad, SCALED, None if unscale_grad else self._present(tensor.grad))
        if unscale_grad:
            self.unscale(gm.attached_tensors())
            if update_scale:
                self.update()

    def unscale(self, grad_tensors: Iterable[Tensor | None]) -> GradScaler:
        """Divide the gradients of `grad_tensors` by the scale; if one is not finite, set all of them to None.

        The running statistics of norms are restored to those before a dropped step.

        Args:
            grad_tensors: tensors with gradients; those without (and None) are passed over.

        Returns:
            This scaler.

        Raises:
            ScaleError: a gradient has been unscaled already.
        """
        attached = [] if grad_tensors is None else [tensor for tensor in grad_tensors if tensor is not None]
        if grad_tensors is None or not all(isinstance(tensor, Tensor) for tensor in attached):
            raise ScaleError("unscale: expected tensors with gradients, such as gm.attached_tensors()")
        tensors = [tensor for tensor in attached if tensor.grad is not None]
        for tensor in tensors:
            if marked(tensor.grad, UNSCALED):
                raise ScaleError(
                    f"unscale: the gradient of a tensor of shape {tuple(tensor.shape)} has been unscaled already; call "
                    "it once for each step (backward() does, unless unscale_grad=False) and clear_grad() after it"
                )
        bad = False
        if tensors:
            self._core.scale_on(tensors[0].device)
            self._rescale(tensors)
            gate = unscaled(self._core, [{"params": tensors}])
            bad = not gate.passed
            gate.param_groups = []  # the scaler keeps the gate up to the next update, which must not keep the tensors
        for tensor in tensors:
            if bad:
                tensor.grad = None
            else:
                mark(tensor.grad, UNSCALED)
        for manager in managers_of(attached):
            manager._settle(bad=bad)
        self._found = bool(self._found) or bad
        return self

    def _rescale(self, tensors: Iterable[Tensor]) -> None:
        """Bring gradients that wait to be unscaled to the present scale, which may have moved since they were made."""
        for tensor in tensors:
            _, made = getattr(tensor.grad, MARK, ("", None))
            if tensor.grad is not None and made is not None and made is not (present := self._present(tensor.grad)):
                tensor.grad = (tensor.grad * (present / made)).to(tensor.grad.dtype)
                mark(tensor.grad, SCALED, present)

    def _present(self, gradient: Tensor) -> Tensor:
        """Return a copy of the scale, the same one as long as the scale does not move."""
        if gradient.device not in self._copies:
            self._copies[gradient.device] = self._core.scale_on(gradient.device).clone()
        return self._copies[gradient.device]

    def update(self, new_scale: float | None = None) -> None:
        """Update the scale after a step, or set it.

        Args:
            new_scale: instead of the rule's; the good steps counted so far stay counted.

        Raises:
            ScaleError: nothing was unscaled since the last update, or a scale that cannot be.
        """
        self._copies = {}
        if new_scale is not None:
            if self.growth_interval == 0 or self.growth_factor == 0:
                warnings.warn(
                    f"update(new_scale={new_scale!r}) does nothing: with growth_interval={self.growth_interval} and "
                    f"growth_factor={self.growth_factor} the scale never moves; set scaler.scale_factor",
                    stacklevel=2,
                )
            else:
                self._core.update(new_scale)
            self._found = None
            return
        if self._found is None:
            raise ScaleError(
                "update(): no gradient has been unscaled since the last update; call "
                "scaler.unscale(gm.attached_tensors()) first (scaler.backward does both)"
            )
        self._core.record(torch.tensor(self._found))
        self._core.update()
        self._found = None

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers and the good steps counted so far."""
        core = self._core.state_dict()
        return {"scale_factor": core["scale"], **self._numbers, "_growth_tracker": core["_growth_tracker"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` (MegEngine's too) returned; nothing changes if that fails.

        Raises:
            ScaleError: a key is missing or a value makes no sense.
        """
        if not isinstance(state, Mapping):
            raise ScaleError(f"load_state_dict({state!r}): expected what state_dict() returned")
        missing = [key for key in KEYS if key not in state]
        if missing:
            raise ScaleError(f"load_state_dict: {', '.join(map(repr, missing))} missing; the state has {sorted(state)}")
        self._go_on(state)
        self._copies, self._found = {}, None

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in self._numbers.items())
        return f"GradScaler(init_scale={self._core.rule.init!r}, {numbers})"

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, which has `KEYS`; nothing changes if a number makes no sense."""
        numbers = {key: state[key] for key in NUMBERS}
        growth, backoff, interval = numbers.values()
        if interval == 0 or growth == 0:  # the scale never moves
            growth, backoff, interval = 1.0, 1.0, 1
        rule = dataclasses.replace(
            hs.GradScaler(rule="megengine").rule, init=state["scale_factor"], growth=growth, backoff=backoff,
            interval=interval,
        )  # fmt: skip
        core = hs.GradScaler(rule=rule)
        core.load_state_dict({**core.state_dict(), "_growth_tracker": state["_growth_tracker"]})
        self._core, self._numbers = core, numbers
