"""O1's casts for a whole process: one region of halfstep that stays open, and the two quirks no region has.

The region lies at the bottom of torch's stack of function modes, below what a ``with`` around `initialize` may have put
there. It keeps no low copies of weights (models do, while they run), so none can be stale. It belongs to the thread
that opened it; models are bound to the same policy besides and cast in every thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import halfstep as hs
from halfstep.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from halfstep.compat.shared import LOW_NAMES
from halfstep.errors import BannedOperatorError
from halfstep.torch_private.modes import current_function_mode_stack, pop_mode, push_mode

__all__ = ["Casts", "o1_policy"]

WORDS = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


def o1_policy(low: torch.dtype, rules: Iterable[tuple[str, str]] = (), *, allow_banned: bool = False) -> hs.Policy:
    """Return the policy of O1: the preset ``O1`` with outputs as they come, and the scale left to `LossScaler`."""
    name = LOW_NAMES[low]
    allowed = [(op, "fp32") for op, _ in functional_overrides.BANNED_FUNCS] if allow_banned else []
    return hs.Policy.of("O1", name=f"apex O1 {name}", dtype=name, outputs="keep", scale="none", ops=(*allowed, *rules))


def _in_place() -> dict[Callable[..., Any], str]:
    """Return the in-place forms of fp32 functions -> how Apex calls them."""
    found: dict[Callable[..., Any], str] = {}
    for space, names in ((torch, torch_overrides.FP32_FUNCS), (Tensor, tensor_overrides.FP32_FUNCS)):
        for name in names:
            func = getattr(space, f"{name}_", None)
            if callable(func):
                found[func] = f"function {name}_" if space is torch else f"method {name}_"
    return found


IN_PLACE = _in_place()
GIVES_FP32 = (Tensor.cpu, Tensor.__ipow__)  # += and its like reach modes as add_, which keeps its format
QUIRKS: frozenset[Any] = frozenset((*GIVES_FP32, *IN_PLACE))


class _Quirks(TorchFunctionMode):
    """``Tensor.cpu`` and ``**=`` of a low tensor give fp32; in-place functions that want fp32 refuse low tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in QUIRKS:
            tensor: Any = args[0] if args else None
            low = isinstance(tensor, Tensor) and tensor.dtype in LOW_NAMES
            if low and torch.is_autocast_enabled(tensor.device.type):
                if func in GIVES_FP32:
                    return func(tensor.float(), *args[1:], **(kwargs or {}))
                how = IN_PLACE[func]
                raise BannedOperatorError(
                    f"Cannot call in-place {how} with {str(tensor.dtype).removeprefix('torch.')} arguments: its result "
                    "is fp32 and cannot be written into them. Use the form without the underscore, or call it on "
                    "x.float()"
                )
        return func(*args, **(kwargs or {}))


class _Loud(TorchFunctionMode):
    """Print the casts that the rules of a policy cause, before they happen (verbosity=2)."""

    def __init__(self, policy: hs.Policy) -> None:
        super().__init__()
        plan = hs.resolve(policy, torch.nn.Module(), "cpu")
        self.rules = {name: decision.rule for name, decision in plan.operators}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [t for t in _tensors((args, kwargs)) if t.dtype in WORDS and torch.is_autocast_enabled(t.device.type)]
        rule = self.rules.get(hs.policy.operator_name(func) or "")
        target = hs.policy.RULE_KINDS[rule].cast_to(tensors[0].device.type, tensors) if rule and tensors else None
        for tensor in tensors:
            if target is not None and tensor.dtype is not target:
                print(f"{WORDS[tensor.dtype]}->{WORDS[target]} ({func.__name__})")
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    hs.trees.map_tensors(tree, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


class Casts:
    """The open region of the process and what goes with it.

    Raises:
        RuntimeError: the thread is inside a region, whose end would take the casts with it.
    """

    def __init__(
        self, policy: hs.Policy, functions: Iterable[tuple[Any, str, Callable[..., Any]]] = (), *,
        loud: bool = False,
    ) -> None:  # fmt: skip
        refuse_inside()
        self.policy = policy
        self._thread = threading.get_ident()
        self._region = hs.autocast(policy=policy, cache_enabled=False)
        self._modes: list[TorchFunctionMode] = [_Quirks(), *([_Loud(policy)] if loud else [])]
        with _lifted():
            self._region.__enter__()
            for mode in self._modes:
                push_mode(mode)
        self._originals = [(module, name, getattr(module, name)) for module, name, _ in functions]
        for module, name, function in functions:
            setattr(module, name, function)

    def close(self) -> None:
        """Leave the region and restore functions.

        Raises:
            RuntimeError: called from another thread than the one that opened it, or inside a region that was entered
                since; nothing changed.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("amp's O1 casts belong to the thread that switched them on; switch them off from there")
        if _nesting() != 1:  # more than their own region is open
            raise RuntimeError(
                "amp's O1 casts were to be switched off inside a region that was entered after them; call "
                "amp.initialize or amp.init outside of `with torch.autocast(...)`, `hs.autocast(...)` and "
                "`amp.disable_casts()`"
            )
        for module, name, original in self._originals:
            setattr(module, name, original)
        with _lifted(below=len(self._modes) + 1):
            for _ in self._modes:
                pop_mode()
            self._region.__exit__(None, None, None)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Switch the casts on where `hs.suspended` has switched them off."""
        with hs.autocast(policy=self.policy, cache_enabled=False):
            yield


def _nesting() -> int:
    """Return how many regions are open in this thread, torch's and halfstep's."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def refuse_inside() -> None:
    """Raise RuntimeError inside any region: casts that are switched on there would end with it."""
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
