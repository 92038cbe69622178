"""Both libraries behind one small namespace, each used as in its own documentation."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

import halfstep as hs
from halfstep import operator
from halfstep.formats import DTYPES

__all__ = ["HALFSTEP", "TORCH", "Library"]

Weights = Literal["fp32", "low", "masters"]
"""How a training step keeps weights: fp32; low if the library can; low with fp32 masters if the library can."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a training loop."""

    dtype: str = "fp16"
    weights: Weights = "fp32"
    clip_norm: float | None = None
    scheduler: Any = None
    init_scale: float = 2.0**16
    accumulate: int = 1


class Library:
    """What a test may use of either library.

    Attributes:
        name: for messages.
        errors: what it raises when it refuses something and names the remedy.
        autocast: the region, with torch's signature.
        GradScaler: the scaler, with torch's signature.
    """

    name: str
    errors: tuple[type[Exception], ...]
    autocast: Any
    GradScaler: Any

    def region(self, dtype: str = "bf16", device: str = "cpu", **ops: list[str]) -> AbstractContextManager[Any]:
        """Return a region in which operators follow lists, with changes ``fp32=["softmax"]`` if that is possible."""
        raise NotImplementedError

    def region_for_any_device(self) -> AbstractContextManager[Any]:
        """Return a bf16 region made by someone who does not think of the CPU."""
        raise NotImplementedError

    def bind(self, model: nn.Module, dtype: str, modules: Mapping[str, str] | None = None) -> Callable[..., Any]:
        """Return `model` called in a region, with rules for modules if that is possible; outputs as they come."""
        raise NotImplementedError

    def around(self, dtype: str) -> AbstractContextManager[Any]:
        """Return what has to be open around a call of a bound model itself: nothing, if the region is the model's."""
        raise NotImplementedError

    def scaler_for(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str) -> Any:
        """Return the scaler of a training loop that is written once for every dtype."""
        raise NotImplementedError

    def scale_of(self, scaler: Any) -> Tensor:
        """Return the current scale as a tensor, for a log."""
        raise NotImplementedError

    def function(self, forward: Callable[..., Any], backward: Callable[..., Any], rule: str) -> Callable[..., Any]:
        """Return ``apply`` of an autograd.Function whose inputs are cast by `rule`; its backward pass is for fp32."""
        raise NotImplementedError

    def lower(self, op: Any) -> None:
        """Say that a torch.library operator runs in the low format."""
        raise NotImplementedError

    def training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Tensor], **options: Any
    ) -> Callable[..., Any]:
        """Return ``step(*batch)`` of the library's recommended loop, which returns the library's result.

        Args:
            model: to train, as `optimizer` and `loss_fn`.
            optimizer: its optimizer.
            loss_fn: ``loss_fn(model, *batch)``.
            **options: the fields of `Options`.
        """
        raise NotImplementedError


class Halfstep(Library):
    """halfstep: preset `mixed`, or `O2` where low weights are wanted."""

    name = "halfstep"
    errors = (hs.HalfstepError,)
    autocast = hs.autocast
    GradScaler = hs.GradScaler

    def region(self, dtype: str = "bf16", device: str = "cpu", **ops: list[str]) -> AbstractContextManager[Any]:
        with warnings.catch_warnings():  # on fake CUDA tensors: that there is no CUDA device here
            warnings.simplefilter("ignore", UserWarning)
            return hs.autocast(device, policy=hs.Policy.of("mixed", dtype=dtype).with_ops(**ops))

    def region_for_any_device(self) -> AbstractContextManager[Any]:
        return hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16"))

    def bind(self, model: nn.Module, dtype: str, modules: Mapping[str, str] | None = None) -> Callable[..., Any]:
        policy = hs.Policy.of("mixed", dtype=dtype, outputs="keep")
        return hs.prepare(model, policy=policy.with_modules(modules or {}))

    def around(self, dtype: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scaler_for(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str) -> Any:
        return hs.prepare(model, optimizer, policy=hs.Policy.of("mixed", dtype=dtype))[2]

    def scale_of(self, scaler: Any) -> Tensor:
        scale: Tensor = scaler.scale_on("cpu")
        return scale

    def function(self, forward: Callable[..., Any], backward: Callable[..., Any], rule: str) -> Callable[..., Any]:
        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        made: Any = operator(rule, backward="fp32", name=f"pains::{forward.__name__}")(type("Made", (Function,), body))
        return partial(made.apply)

    def lower(self, op: Any) -> None:
        operator("low")(op)

    def training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Tensor], **options: Any
    ) -> Callable[..., Any]:
        chosen = Options(**options)
        policy = hs.Policy.of("mixed" if chosen.weights == "fp32" else "O2", dtype=chosen.dtype)
        return hs.TrainStep(
            model, optimizer, loss_fn, policy=policy,
            clip_norm=chosen.clip_norm, scheduler=chosen.scheduler, accumulate=chosen.accumulate,
            scaler=hs.GradScaler("cpu", init_scale=chosen.init_scale) if chosen.dtype == "fp16" else None,
        )  # fmt: skip


class TorchAmp(Library):
    """torch.amp: its regions, its scaler, and the loop of its documentation ("Automatic Mixed Precision examples")."""

    name = "torch.amp"
    errors = ()
    autocast = torch.autocast
    GradScaler = torch.amp.GradScaler

    def region(self, dtype: str = "bf16", device: str = "cpu", **ops: list[str]) -> AbstractContextManager[Any]:
        if device == "cpu":
            return torch.autocast(device, dtype=DTYPES[dtype])  # no argument for lists
        return _cuda_autocast(DTYPES[dtype])

    def region_for_any_device(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=torch.bfloat16)

    def bind(self, model: nn.Module, dtype: str, modules: Mapping[str, str] | None = None) -> Callable[..., Any]:
        region = torch.autocast("cpu", dtype=DTYPES[dtype])

        def call(*args: Any) -> Any:
            with region:
                return model(*args)

        return call

    def around(self, dtype: str) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=DTYPES[dtype])

    def scaler_for(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str) -> Any:
        return torch.amp.GradScaler("cpu")

    def scale_of(self, scaler: Any) -> Tensor:
        return torch.tensor(scaler.get_scale())

    def function(self, forward: Callable[..., Any], backward: Callable[..., Any], rule: str) -> Callable[..., Any]:
        dtype = {"low": torch.bfloat16, "fp32": torch.float32}[rule]
        body = {
            "forward": staticmethod(torch.amp.custom_fwd(forward, device_type="cpu", cast_inputs=dtype)),
            "backward": staticmethod(torch.amp.custom_bwd(backward, device_type="cpu")),
        }
        made: Any = type("Made", (Function,), body)
        return partial(made.apply)

    def lower(self, op: Any) -> None:
        torch.library.register_autocast(op, "cpu", torch.bfloat16)

    def training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Tensor], **options: Any
    ) -> Callable[..., Any]:
        chosen = Options(**options)
        if chosen.weights == "low":  # there are no "masters"
            model.to(DTYPES[chosen.dtype])
        scaler = torch.amp.GradScaler("cpu", init_scale=chosen.init_scale, enabled=chosen.dtype == "fp16")
        calls = 0

        def step(*batch: Any) -> Any:
            nonlocal calls
            with torch.autocast("cpu", dtype=DTYPES[chosen.dtype]):
                loss = loss_fn(model, *batch) / chosen.accumulate
            torch.autograd.backward(scaler.scale(loss))
            calls += 1
            if calls % chosen.accumulate:
                return None
            if chosen.clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_norm)
            returned = scaler.step(optimizer)
            scaler.update()
            if chosen.scheduler is not None:
                chosen.scheduler.step()
            optimizer.zero_grad()
            return returned

        return step


@contextlib.contextmanager
def _cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Switch on what ``torch.autocast("cuda")`` switches on, which refuses to where there is no CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


HALFSTEP = Halfstep()
TORCH = TorchAmp()
