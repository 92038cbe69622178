"""scale_loss, disable_casts, init and its handles, the old API's optimizer, and rules for functions of one's own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import halfstep as hs
from halfstep.compat.apex.amp._process_optimizer import (
    AmpOptimizerState,
    Session,
    _amp_state,
    backward_pass,
    maybe_print,
)
from halfstep.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.compat.shared import LOW_NAMES
from halfstep.torch_private.modes import current_function_mode_stack, pop_mode, push_mode

__all__ = [
    "disable_casts", "float_function", "half_function", "init", "promote_function", "register_float_function",
    "register_half_function", "register_promote_function", "scale_loss", "step_was_skipped",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

_registered: list[tuple[Any, str, str]] = []
"""(module, name, rule) since the last `init`, which takes them."""

WORDS = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


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
    if any(stash.scaling for stash in stashes):
        raise RuntimeError("scale_loss: this optimizer is in another scale_loss block already; leave that one first")
    with backward_pass(loss, scaler, stashes) as scaled:
        yield scaled
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
            what = "was not passed through amp.initialize" if hasattr(optimizer, "param_groups") else "is no optimizer"
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
    handle = getattr(_open, "handle", None)
    return hs.suspended() if handle is None else handle._disable_casts()


_open = threading.local()  # its `handle`: whose casts are open in this thread; one that ends takes its casts along


def close_casts() -> None:
    """Switch off the casts that this thread has switched on; refused inside a region that was entered since."""
    if (handle := getattr(_open, "handle", None)) is not None:
        handle._deactivate()
    _amp_state.handle = None


# ---------------------------------------------------------------------- O1


IN_PLACE = {
    getattr(space, f"{name}_"): f"{kind} {name}_"
    for space, kind, overrides in ((torch, "function", torch_overrides), (Tensor, "method", tensor_overrides))
    for name in overrides.FP32_FUNCS
    if callable(getattr(space, f"{name}_", None))
}
"""In-place forms of fp32 functions -> how Apex calls them."""

GIVES_FP32 = (Tensor.cpu, Tensor.__ipow__)  # += and its like reach modes as add_, which keeps its format


class _Quirks(TorchFunctionMode):
    """``Tensor.cpu`` and ``**=`` of a low tensor give fp32; in-place functions that want fp32 refuse low tensors.

    If it is `loud`, the casts that the rules of `policy` cause are printed before they happen (verbosity=2).
    """

    def __init__(self, policy: hs.Policy, *, loud: bool) -> None:
        super().__init__()
        operators = hs.resolve(policy, torch.nn.Module(), "cpu").operators if loud else ()
        self.rules = {name: decision.rule for name, decision in operators}  # to print

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.rules:
            self._print_casts(func, hs.trees.tensors((args, kwargs)))
        if func in GIVES_FP32 or func in IN_PLACE:
            tensor: Any = args[0] if args else None
            low = isinstance(tensor, Tensor) and tensor.dtype in LOW_NAMES
            if low and torch.is_autocast_enabled(tensor.device.type):
                if func in GIVES_FP32:
                    return func(tensor.float(), *args[1:], **(kwargs or {}))
                how = IN_PLACE[func]
                raise hs.errors.BannedOperatorError(
                    f"Cannot call in-place {how} with {str(tensor.dtype).removeprefix('torch.')} arguments: its result "
                    "is fp32 and cannot be written into them. Use the form without the underscore, or call it on "
                    "x.float()"
                )
        return func(*args, **(kwargs or {}))

    def _print_casts(self, func: Callable[..., Any], found: list[Tensor]) -> None:
        tensors = [t for t in found if t.dtype in WORDS and torch.is_autocast_enabled(t.device.type)]
        rule = self.rules.get(hs.policy.operator_name(func) or "")
        target = hs.policy.RULE_KINDS[rule].cast_to(tensors[0].device.type, tensors) if rule and tensors else None
        for tensor in tensors:
            if target is not None and tensor.dtype is not target:
                print(f"{WORDS[tensor.dtype]}->{WORDS[target]} ({func.__name__})")


def _nesting() -> int:
    """Return how many regions are open in this thread, torch's and halfstep's."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _refuse_inside() -> None:
    if _nesting():
        here = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if here is None else ("cpu", here.type)
        on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        raise RuntimeError(
            f"amp's O1 casts were switched on inside an autocast region ({', '.join(on) or 'switched off'}), whose "
            "end would switch them off again; call amp.initialize or amp.init outside of `with torch.autocast(...)`, "
            "`hs.autocast(...)` and `amp.disable_casts()`"
        )


@contextlib.contextmanager
def _lifted(below: int = 0) -> Iterator[None]:
    """Take all function modes but the `below` lowest off their stack meanwhile."""
    above = list(current_function_mode_stack())[below:]
    for _ in above:
        pop_mode()
    try:
        yield
    finally:
        for mode in above:
            push_mode(mode)


class AmpHandle:
    """Owner of O1's casts for a thread: a region of `policy`, open from construction until `_deactivate`.

    It lies at the bottom of torch's stack of function modes, below what a ``with`` around `initialize` may have put
    there. It keeps no low copies of weights (models do, while they run), so none can be stale. Models are bound to the
    same policy besides and cast in every thread. The policy is the preset ``O1`` in the format `low`, with outputs as
    they come and no loss scale; `loss_scale` is that of the old API. Casts that were on before are switched off first.
    """

    has_cache = True
    verbose = False
    cache: dict[Any, Tensor] = {}  # stays empty: a kept cast could be stale

    def __init__(
        self, loss_scale: str | float = "dynamic", enable_caching: bool = True, verbose: bool = False, *,
        low: torch.dtype = torch.float16, allow_banned: bool = False,
    ) -> None:  # fmt: skip
        close_casts()
        _refuse_inside()
        rules, functions = take_registered()
        if allow_banned:
            rules = [*((op, "fp32") for op, _ in functional_overrides.BANNED_FUNCS), *rules]
        name = LOW_NAMES[low]
        policy = hs.Policy.of("O1", name=f"apex O1 {name}", dtype=name, outputs="keep", scale="none", ops=tuple(rules))
        self.policy, self._loss_scale = policy, loss_scale
        self.has_cache, self.verbose = enable_caching, verbose
        self._is_active = True
        self._thread = threading.get_ident()
        self._region: hs.autocast | None = hs.autocast(policy=policy, cache_enabled=False)
        quirks = _Quirks(policy, loud=verbose)
        with _lifted():
            self._region.__enter__()
            push_mode(quirks)
        self._originals = [(module, name, getattr(module, name)) for module, name, _ in functions]
        for module, name, function in functions:
            setattr(module, name, function)
        _open.handle = _amp_state.handle = self

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
        self.cache.clear()

    def remove_cache(self, param: Any) -> None:
        """Forget the cast of `param`, if there were one."""
        self.cache.pop(param, None)

    def _deactivate(self) -> None:
        """Switch the casts off for good; functions that were registered are the original ones again."""
        if self._region is not None:
            if threading.get_ident() != self._thread:
                raise RuntimeError(
                    "amp's O1 casts belong to the thread that switched them on; switch them off from there"
                )
            if _nesting() != 1:  # more than their own region is open
                raise RuntimeError(
                    "amp's O1 casts were to be switched off inside a region that was entered after them; call "
                    "amp.initialize or amp.init outside of `with torch.autocast(...)`, `hs.autocast(...)` and "
                    "`amp.disable_casts()`"
                )
            for module, name, original in self._originals:
                setattr(module, name, original)
            with _lifted(below=2):  # the region's mode and the quirks
                pop_mode()
                self._region.__exit__(None, None, None)
            self._region = _open.handle = None
        self._is_active = False


class NoOpHandle(AmpHandle):
    """The handle of ``init(enabled=False)``: the same methods, and nothing is cast or scaled."""

    has_cache = False

    def __init__(self) -> None:
        self._loss_scale, self._is_active, self._region = 1.0, False, None

    def scale_loss(self, loss: Tensor, optimizer: Any) -> contextlib.AbstractContextManager[Tensor]:
        """Return a context that yields the loss."""
        return contextlib.nullcontext(loss)


class OptimWrapper:
    """An optimizer whose losses are scaled one after the other, each by its own scaler.

    `scale_loss` is called `num_loss` times before `step`; nothing is scaled while `amp_handle` is not active. All else
    (state_dict, zero_grad, add_param_group, ...) is the wrapped optimizer's.
    """

    def __init__(
        self, optimizer: Optimizer, amp_handle: AmpHandle, num_loss: int, loss_scale: str | float = "dynamic"
    ) -> None:
        self._optimizer, self._amp_handle = optimizer, amp_handle
        self._num_loss, self._loss_idx = num_loss, 0
        self._loss_scaler = [LossScaler(loss_scale) for _ in range(num_loss)]
        self._stash = AmpOptimizerState(optimizer, Session(None, self._loss_scaler))

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the loss scaled by the next scaler; gradients are unscaled and added up at the end of the block."""
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._loss_idx + 1} times since the last step() and the optimizer was wrapped "
                f"for {self._num_loss}: wrap_optimizer(optimizer, num_loss={self._loss_idx + 1})"
            )
        scaler = self._loss_scaler[self._loss_idx]
        with backward_pass(loss, scaler, [self._stash]) as scaled:
            yield scaled
        _unscale(scaler, [self._stash], self._loss_idx, delay_overflow_check=False)
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer with O1's casts off, unless a loss since the last step overflowed."""
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure)
        if closure is not None:
            raise hs.errors.UnbuiltError(
                "step(closure) is not supported by the old API's optimizer wrapper: run forward and backward before "
                "step(), or use amp.initialize with opt_level='O1'"
            )
        self._loss_idx = 0
        skip, self._stash.overflow = self._stash.overflow, ""
        if skip:
            maybe_print("Gradient overflow, skipping update")
            return None
        with self._amp_handle._disable_casts():
            return self._optimizer.step()

    def __getattr__(self, attr: str) -> Any:
        if attr == "_optimizer":  # copy and pickle look it up before it exists
            raise AttributeError(attr)
        return getattr(self._optimizer, attr)

    def __getstate__(self) -> Any:
        raise RuntimeError("this wrapper cannot be pickled; save its state_dict()")

    def __repr__(self) -> str:
        return repr(self._optimizer)


# ---------------------------------------------------------------------- init, and functions of one's own


def _decorator(name: str, rule: str, format: str) -> Callable[[F], F]:
    def decorate(fn: F) -> F:
        if not callable(fn):
            raise TypeError(f"amp's decorators take a function and got {fn!r}")
        return hs.operator(rule)(fn)

    decorate.__doc__ = f"Cast the tensors that `fn` is given to {format} while O1's casts are on; a decorator."
    decorate.__name__ = decorate.__qualname__ = name
    return decorate


def _registering(name: str, rule: str, format: str) -> Callable[[Any, str], None]:
    def register(module: Any, name: str) -> None:
        if not hasattr(module, name):
            raise ValueError(f"No function named {name} in module {module}.")
        _registered.append((module, name, rule))

    register.__doc__ = f"Have what ``module.name`` is given cast to {format} from the next `initialize` or `init` on."
    register.__name__ = register.__qualname__ = name
    return register


half_function = _decorator("half_function", "low", "the low format")
float_function = _decorator("float_function", "fp32", "fp32")
promote_function = _decorator("promote_function", "widest", "the widest of its formats")
register_half_function = _registering("register_half_function", "low", "the low format")
register_float_function = _registering("register_float_function", "fp32", "fp32")
register_promote_function = _registering("register_promote_function", "widest", "the widest of its formats")


def take_registered() -> tuple[list[tuple[str, str]], list[tuple[Any, str, Callable[..., Any]]]]:
    """Return and forget what was registered: rules for operators of torch, and replacements for other functions."""
    rules: list[tuple[str, str]] = []
    functions: list[tuple[Any, str, Callable[..., Any]]] = []
    for module, name, rule in _registered:
        original = getattr(module, name)
        operator = hs.policy.operator_name(original) if module in (torch, torch.Tensor, torch.nn.functional) else None
        if operator is not None:
            rules.append((operator, rule))
            continue
        title = f"{getattr(module, '__name__', type(module).__name__)}::{name}"
        try:
            functions.append((module, name, hs.operator(rule, name=title)(original)))
        except hs.errors.PolicyError:  # the name is taken by a function from elsewhere
            functions.append((module, name, hs.operator(rule, name=f"{title}@{id(original):x}")(original)))
    _registered.clear()
    return rules, functions


def init(
    enabled: bool = True, loss_scale: str | float = "dynamic", enable_caching: bool = True, verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:  # fmt: skip
    """Switch O1's casts on in this thread, without models; casts that were on before are switched off first.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: of optimizers wrapped by the handle's ``wrap_optimizer``.
        enable_caching: kept for Apex's signature; see `AmpHandle`.
        verbose: print every cast.
        allow_banned: compute F.binary_cross_entropy in fp32 instead of refusing low inputs.
    """
    if enabled:
        return AmpHandle(loss_scale, enable_caching, verbose, allow_banned=allow_banned)
    close_casts()
    _registered.clear()
    _amp_state.handle = handle = NoOpHandle()
    return handle
