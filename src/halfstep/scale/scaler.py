"""GradScaler: torch.amp.GradScaler's methods over a `ScaleRule`.

Semantics of the methods: https://docs.pytorch.org/docs/stable/amp.html (torch 2.13). Docstrings have the differences.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.arguments import FLAG, Kind, check
from halfstep.errors import ScaleError, warn
from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.formats import FP32, format_of
from halfstep.mistakes import MISTAKES
from halfstep.policy.scale_rule import ScaleRule, plain
from halfstep.scale import finite
from halfstep.scale.alarm import DelayedFlag, ExpectedScaler, alarm_text, is_error
from halfstep.scale.fused import must_not_skip, skips_itself, step_with_flag, takes_scaler, use_working_form
from halfstep.scale.iteration import Iteration, OptimizerWork, Stage
from halfstep.scale.rule import ScaleState, StoredScale, advance, advance_, choose_rule, load_host, state_to_host
from halfstep.torch_private.autograd import execution_engine
from halfstep.torch_private.modes import is_functorch_wrapped_tensor
from halfstep.trees import opened

_T = TypeVar("_T")

_SMALLEST_INVERTIBLE = 2.0**-126
"""The smallest normal fp32 number; 1/scale is inf from 2**-128 down."""

ZERO_OR_ONE = Kind("0 or 1", lambda value: type(value) is int and value in (0, 1))

_PICKLED = ("_device", "_enabled", "_rule", "_warned", "host_reads", "by_hand")

_READ_EVERY = 16
"""Updates between two reads of the alarm where a read costs a launch and the consequence is only a warning."""


class GradScaler(StoredScale):
    """Scale losses so that fp16 gradients do not underflow, and skip steps whose gradients are not finite.

    Takes the place of ``torch.amp.GradScaler`` (same signature, methods, checkpoint keys) and works on the device the
    loss is on. `scale`, `unscale_`, `update` and the step of a fused optimizer never wait for the device; `step` of any
    other optimizer reads one flag, counted in `host_reads`.

    Beyond torch: a floor and a ceiling; one warning with parameter names when the scale is at its floor and gradients
    are still not finite; optimizers without gradients; fp16, bf16, complex and sparse gradients; `skipped`; the rules
    of peers.

    Attributes:
        host_reads: how often `step` and `update` have waited for the device so far.
        by_hand: whether `update` was ever given a scale: it is set from outside, independently of the rule.

    Examples:
        >>> scaler = hs.GradScaler("cpu", init_scale=2.0**10)
        >>> with hs.autocast("cpu", dtype=torch.float16):
        ...     loss = loss_fn(model, x, y)
        >>> scaler.scale(loss).backward()
        >>> scaler.unscale_(optimizer)  # only to clip or read gradients
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        rule: ScaleRule | str | None = None,
        floor: float | None = None,
        ceiling: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        """Make a scaler; its tensors are made on the device of the first scaled loss.

        Args:
            device: a device type; the scaler works where the loss is in any case, but one for "cuda" is disabled, with
                a warning, where there is no CUDA.
            init_scale: the first scale.
            growth_factor: above 1; applied after `growth_interval` good steps in a row.
            backoff_factor: in (0, 1); applied at a bad step.
            growth_interval: number of steps, at least 1.
            enabled: False makes an object with the same methods that does nothing but step.
            rule: all numbers at once, or the name of one of `SCALE_RULES`, instead of the four above.
            floor: the scale never goes below; default 2**-14, or `init_scale` if that is lower, or the rule's.
            ceiling: the scale never goes above; default 2**24, or `init_scale` if that is higher, or the rule's.
            hysteresis: bad steps it takes to back off, given back when the scale grows; default 1 or the rule's.

        Raises:
            ScaleError: a value that makes no sense, or numbers given both in `rule` and beside it.
        """
        enabled = plain(enabled)
        check("GradScaler", ScaleError, enabled=(enabled, FLAG | ZERO_OR_ONE))
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        chosen = choose_rule(numbers, rule, floor, ceiling, hysteresis)
        try:
            self._device = None if device is None else torch.device(device).type
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ScaleError(
                f"GradScaler: device={device!r} is not a device; expected a type such as 'cuda' or 'cpu'"
            ) from error
        if enabled and self._device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warn(
                "GradScaler('cuda') is enabled, but CUDA is not available: it switches itself off, as torch's does. "
                "GradScaler() works where the loss is"
            )
            enabled = False
        super().__init__(chosen, enabled=bool(enabled))
        self._warned = False
        self.host_reads = 0
        self.by_hand = False
        self._begin()

    def _begin(self) -> None:
        self._iteration = Iteration()
        self._waiting = WeakTensorKeyDictionary()  # scaled losses without a hook, as long as they live
        self._unfollowed = 0  # how many losses were scaled in compiled code, where they get no hooks
        self._found: weakref.WeakKeyDictionary[torch.optim.Optimizer, Tensor] = weakref.WeakKeyDictionary()
        self._names: WeakTensorKeyDictionary | None = None
        self._alarm_flag = DelayedFlag()
        self._updates = 0

    @classmethod
    def from_policy(cls, scale: str | float | ScaleRule, dtype: str | torch.dtype | None = None) -> GradScaler:
        """Make the scaler that a policy's `scale` field asks for.

        Args:
            scale: ``"none"`` (disabled), a number (static), a rule, the name of a rule, or ``"auto"``.
            dtype: the policy's low format; only ``"auto"`` reads it: rule ``"halfstep"`` if it has fewer exponent
                bits than fp32, else disabled.

        Raises:
            ScaleError: an unknown name, or a number that cannot be a scale.
        """
        if scale == "auto":
            narrow = dtype is not None and format_of(dtype).exponent_bits < FP32.exponent_bits
            scale = "halfstep" if narrow else "none"
        if scale == "none":
            return cls(enabled=False)
        if isinstance(scale, (ScaleRule, str)):
            return cls(rule=scale)
        return cls(rule=ScaleRule.static(scale))

    def scale(self, outputs: _T) -> _T:
        """Return `outputs` multiplied by the scale.

        Args:
            outputs: the loss, or nested lists, tuples, dicts (or other iterables, which come back as lists) of tensors.

        Raises:
            ScaleError: something inside is not a tensor.
        """
        if not self._enabled:
            return outputs
        scaled: _T = _map_losses(outputs, lambda tensor: self._follow(tensor * self.scale_on(tensor.device)))
        return scaled

    def _follow(self, scaled: Tensor) -> Tensor:
        """Return a scaled loss, noted for the case that an optimizer is unscaled before its backward pass."""
        if torch.compiler.is_compiling():
            self._unfollowed += 1
        elif self._iteration and self._iteration.unscaled():
            self._hook(scaled)
        else:
            self._waiting[scaled] = None
        return scaled

    def _hook(self, scaled: Tensor) -> None:
        if scaled.requires_grad and not is_functorch_wrapped_tensor(scaled):
            scaled.register_hook(self._pass_begins)

    def _pass_begins(self, gradient: Tensor) -> None:
        """Note the gradients of unscaled optimizers when a scaled loss's backward pass begins, and when it ends."""
        begun = [(work, work.begin_pass()) for work in self._iteration.unscaled()]

        def end() -> None:
            for work, gradients in begun:
                work.end_pass(gradients)

        if begun:
            engine: Any = execution_engine
            engine.queue_callback(end)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, in place, to clip or read them before `step`.

        Gradients keep their dtype (fp32 arithmetic, one rounding). fp16 and bf16 parameters whose optimizer steps
        precise weights behind them get an fp32 gradient instead. Sparse low gradients are replaced by coalesced ones.

        Raises:
            ScaleError: called twice for one step, after `step`, or before any loss was scaled.
        """
        if not self._enabled:
            return
        state = self._started("unscale_")
        work = self._work_of(optimizer, "unscale_")
        kind = type(optimizer).__name__
        if work.stage is Stage.UNSCALED and work.found is not None:
            raise ScaleError(
                f"unscale_() has already been called on this {kind} since the last update(); {MISTAKES['HS003'].remedy}"
            )
        if work.stage is Stage.STEPPED:
            raise ScaleError(
                f"unscale_() is called after step() on this {kind}; call it before step(), and "
                f"{MISTAKES['HS004'].remedy}"
            )
        self._unscale(work, finite.gradients(optimizer), state)
        if work.found is not None:
            self._found[optimizer] = work.found
        work.mark_unscaled(self._unfollowed)
        for scaled in list(self._waiting):
            self._hook(scaled)
        self._waiting.clear()

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether all gradients of `optimizer` are as `unscale_` left them; `step` and `update` end that."""
        work = self._iteration.work.get(id(optimizer))
        return work is not None and work.stage is Stage.UNSCALED and work.is_as_unscaled(self._unfollowed)

    def _unscale(self, work: OptimizerWork, pairs: Iterable[tuple[Tensor, Tensor]], state: ScaleState) -> None:
        """Divide gradients of an optimizer by the scale, and add to its flag whether they were finite."""
        wide, small = hasattr(work.optimizer, WEIGHTS_ATTRIBUTE), self._rule.floor < _SMALLEST_INVERTIBLE
        found = finite.unscale_(pairs, state.scale, into_fp32=wide, check_scale=small)
        if found is not None:
            work.found = found if work.found is None else torch.maximum(work.found, found)

    def _work_of(self, optimizer: torch.optim.Optimizer, method: str) -> OptimizerWork:
        work = self._iteration.current(optimizer, method, unfollowed=self._unfollowed, names=self._names)
        ExpectedScaler.drop([optimizer])
        return work

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that has not been done, and step `optimizer` unless a gradient is not finite.

        An optimizer that takes the flag itself (``fused=True``) is called and skips on the device (but see
        `must_not_skip`). One without any gradient is not called.

        Args:
            optimizer: whose ``step(*args, **kwargs)`` is called.
            *args: passed on; a closure is refused.
            **kwargs: passed on.

        Returns:
            What ``optimizer.step`` returned; None if it was not called.

        Raises:
            ScaleError: called twice without `update`, before any loss was scaled, or with a closure.
        """
        if not self._enabled:
            use_working_form(optimizer)
            return optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or any(callable(argument) for argument in args):
            raise ScaleError(
                f"step({type(optimizer).__name__}, closure): a closure runs backward inside the optimizer, where "
                f"gradients would stay scaled and unchecked; {MISTAKES['HS009'].remedy}"
            )
        state = self._started("step")
        work = self._work_of(optimizer, "step")
        if work.stage is Stage.STEPPED:
            raise ScaleError(
                f"step() has already been called on this {type(optimizer).__name__} since the last update(); "
                f"{MISTAKES['HS004'].remedy}"
            )
        if work.stage is Stage.UNSCALED and work.late:  # parameters that had no gradient when it was unscaled
            self._unscale(work, [pair for pair in finite.gradients(optimizer) if id(pair[0]) in work.late], state)
            work.late.clear()
        if takes_scaler(optimizer):
            return self._step_older(work, state, args, kwargs)
        use_working_form(optimizer)
        fused = skips_itself(optimizer)
        if work.stage is Stage.READY and fused:
            work.found = finite.check(finite.gradients(optimizer), state.scale)
        elif work.stage is Stage.READY:
            self.unscale_(optimizer)
        result = None
        if work.found is None:
            self._found.pop(optimizer, None)
        else:
            self._found[optimizer] = work.found
            if not fused or must_not_skip(optimizer):
                work.bad = self._read(work.found)
            if fused and not work.bad:
                scale = state.scale.float() if work.stage is Stage.READY else None
                result = step_with_flag(optimizer, scale, work.found, args, kwargs)
            elif not work.bad:
                result = optimizer.step(*args, **kwargs)
        work.stage = Stage.STEPPED
        return result

    def skipped(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return whether the last `step` of `optimizer` was skipped, as a 0-dim bool tensor on the scale's device.

        Valid from `step` until the next one, also after `update`; from `unscale_` on, whether the `step` to come is
        skipped. Reading it (``bool(...)``) waits for the device.
        """
        found = self._found.get(optimizer)
        if found is not None:
            return found != 0
        if self._state is not None:
            return torch.zeros((), dtype=torch.bool, device=self._state.scale.device)
        first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
        return torch.zeros((), dtype=torch.bool, device="cpu" if first is None else first.device)

    def culprits(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Return the parameters of `optimizer` whose gradients are not finite, and how many of their values.

        For the report of a skipped step: call it after `step` and before ``zero_grad``. Waits for the device.

        Returns:
            At most 5 entries such as ``"head.weight (3 of 20 values)"``, then perhaps ``"and 7 more"``.
        """
        return finite.describe_non_finite([optimizer], self._names)

    def record(self, found_inf: Tensor, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count a step made outside this scaler; the next `update` counts it with the scaler's own steps.

        Args:
            found_inf: one element, bool or number, not zero if a gradient was not finite; never read. A 0-dim bool is
                kept as it is: do not write into it before `update`.
            optimizer: whose parameters a message names if the scale is at its floor.

        Raises:
            ScaleError: not a tensor of one element.
        """
        if not isinstance(found_inf, Tensor) or found_inf.numel() != 1:
            shape = tuple(found_inf.shape) if isinstance(found_inf, Tensor) else type(found_inf).__name__
            raise ScaleError(f"record(found_inf): got {shape}; expected a tensor of one element, bool or number")
        if not self._enabled:
            return
        home = self._state_on(found_inf.device).scale.device
        flag = found_inf.detach()
        if flag.dtype is not torch.bool or flag.dim():
            flag = flag.reshape(()) != 0
        if flag.device != home:
            flag = flag.to(device=home, non_blocking=True)
        self._iteration.record(flag)
        if optimizer is not None:
            self._iteration.of(optimizer, "record").stage = Stage.STEPPED

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by the rule for the steps since the last update, or set it.

        Call it once per iteration, after every `step`, and also when you skip a step yourself.

        Args:
            new_scale: a number within floor and ceiling, or a tensor of one element on any device (clamped, and ignored
                if not positive and finite: checking it would wait). Counters stay as they are.

        Raises:
            ScaleError: nothing was unscaled, stepped or recorded; a scale out of bounds; or the rule is one that raises
                at its floor (the steps have been counted and the next iteration may go on).
        """
        if not self._enabled:
            return
        iteration = self._iteration
        if new_scale is not None:
            self._set_scale(new_scale)
            self._iteration = Iteration()
            self.by_hand = True
            return
        if not iteration:
            raise ScaleError(f"update(): nothing was stepped since the last update(); {MISTAKES['HS002'].remedy}")
        self._iteration = Iteration()
        if (found := iteration.found()) is not None:
            state = self._started("update")
            advance_(self._rule, state, found)
            self._answer_alarm(state, iteration)

    def falls(self, below: float, most: int) -> tuple[int, float] | None:
        """Return how many bad steps would take the scale below `below`, and the scale then; waits for the device.

        None if it is not below it after `most` of them, or one of them raises the alarm.
        """
        if not self._enabled or self._rule.is_static:
            return None
        state, bad = load_host(self._host_state(), "cpu", self._rule), torch.ones((), dtype=torch.bool, device="cpu")
        for steps in range(1, most + 1):
            state = advance(self._rule, state, bad)
            if state.alarm:
                return None
            if (scale := float(state.scale.float())) < below:
                return steps, scale
        return None

    def forget(self) -> None:
        """Discard what has been unscaled, stepped or recorded since the last update."""
        self._iteration = Iteration()

    def _step_older(self, work: OptimizerWork, state: ScaleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``optimizer.step(grad_scaler=self)``; it skips a bad step, or not, by itself, as in torch.

        Not called without any gradient. If it requested no check, its gradients are checked here, for `update`.
        """
        optimizer, result = work.optimizer, None
        if next(finite.gradients(optimizer), None) is None:
            self._found.pop(optimizer, None)
        else:
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            if work.found is None:
                work.found = finite.check(finite.gradients(optimizer), state.scale)
            if work.found is not None:
                self._found[optimizer] = work.found
        work.stage = Stage.STEPPED
        return result

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Check the gradients, which stay as they are, and return the flag (not zero = bad) by device."""
        state = self._started("_check_inf_per_device")
        self._work_of(optimizer, "step").found = finite.check(finite.gradients(optimizer), state.scale)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Return the flag of the last check, or of `unscale_`, on every device that has gradients."""
        found = self._work_of(optimizer, "step").found
        if found is None:
            return {}
        devices = {gradient.device for _, gradient in finite.gradients(optimizer)}
        return {device: found.to(device, non_blocking=True) for device in devices}

    def _get_scale_async(self) -> Tensor | None:
        """Return the scale as a tensor without waiting; None before the first scaled loss."""
        return None if self._state is None else self._state.scale.float()

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Remember names (``model.named_parameters()``) for messages; parameters are not kept alive."""
        if self._names is None:
            self._names = WeakTensorKeyDictionary()
        for name, parameter in named:
            self._names[parameter] = name

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over what `name_parameters` was given, as far as it lives."""
        for parameter, name in (self._names or {}).items():
            yield name, parameter

    def check_alarm(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the alarm after an update that the device made without `update`, as a replayed CUDA graph does.

        Raises:
            ScaleError: as `update`.
        """
        if self._enabled and self._state is not None:
            iteration = Iteration()
            iteration.of(optimizer, "check_alarm")
            iteration.record(self._state.scale)  # stands for a flag that has not been read
            self._answer_alarm(self._state, iteration)

    def _answer_alarm(self, state: ScaleState, iteration: Iteration) -> None:
        """Warn once, or raise, if the scale could not go down after a bad step; waits only where a step already did."""
        strict = is_error(self._rule)
        known = iteration.known_bad()
        if known is False or (self._warned and not strict):
            return
        if known and strict:
            alarm: bool | None = self._read(state.alarm)
        else:
            self._updates += 1
            often = strict or state.alarm.device.type == "cpu"
            alarm = self._alarm_flag.read(state.alarm) if often or self._updates % _READ_EVERY == 0 else None
        if not alarm:
            return
        self.host_reads += 1
        host = state_to_host(state)
        if not host["alarm"]:  # read late, and the scale has recovered meanwhile
            return
        optimizers = [work.optimizer for work in iteration.work.values()]
        text = alarm_text(self._rule, host, finite.describe_non_finite(optimizers, self._names))
        if is_error(self._rule, host):
            raise ScaleError(text)
        if not self._warned:
            self._warned = True
            warn(text)

    def __getstate__(self) -> dict[str, Any]:
        if self._iteration:
            raise ScaleError(
                "a GradScaler can be pickled or copied only between iterations; call update() first (an optimizer has "
                "been unscaled or stepped since the last one)"
            )
        return {name: getattr(self, name) for name in _PICKLED} | {"_host": self._host_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _state=None)
        self._begin()

    def __repr__(self) -> str:
        return f"GradScaler(device={self._device!r}, enabled={self._enabled}, rule={self._rule!r})"

    def _read(self, flag: Tensor) -> bool:
        """Wait for the device and return a flag; the only wait of `step` and `update`."""
        self.host_reads += 1
        return bool(flag)


def _map_losses(value: Any, function: Callable[[Tensor], Tensor], where: str = "outputs") -> Any:
    """Return `value`, a tensor or nested containers of tensors, with every tensor replaced by ``function(tensor)``.

    Containers come back as their own type (a generator as a list); `where` names `value` in a message.
    """
    if isinstance(value, Tensor):
        return function(value)
    if (node := opened(value)) is not None:
        named, rebuild = node
        return rebuild([_map_losses(item, function, where + place) for place, item in named])
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_map_losses(item, function, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ScaleError(
        f"scale: {where} is {value!r} of type {type(value).__name__}; expected a tensor or a (nested) container of "
        "tensors: pass the loss itself, or only the tensors of what the model returned"
    )
