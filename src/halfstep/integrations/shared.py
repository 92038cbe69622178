"""What the integrations share: the check for their library, a scaler that checks gradients in every format, its log."""

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MethodType, ModuleType

import torch
from torch import nn
from torch.torch_version import TorchVersion  # compares any versions

import halfstep as hs
from halfstep.errors import IntegrationError

LOG = logging.getLogger("halfstep")


def need(library: str, least: str, *, extra: str | None = None, package: str | None = None) -> ModuleType:
    """Import a library; refuse one that is absent, or older than the oldest that the integration is tested with.

    `extra` is the extra of halfstep that installs it; `package` its name in the package index, if that is another.
    """
    package = package or library
    remedy = f"pip install 'halfstep[{extra}]'" if extra else f"pip install '{package}>={least}'"
    try:
        module = import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library.partition(".")[0]:
            raise
        text = f"hs.integrations: {package} {least} or newer is needed and is not installed: {remedy}"
        raise IntegrationError(text) from error
    try:
        found = version(package)
    except PackageNotFoundError:  # run from source
        found = str(getattr(module, "__version__", least))
    if TorchVersion(found) < least:
        raise IntegrationError(f"hs.integrations: {package} {found} is too old; {least} or newer is needed: {remedy}")
    return module


def checking(scaler: hs.GradScaler) -> hs.GradScaler:
    """Return a scaler that skips a step whose gradients are not finite, in every format.

    That of `hs.prepare` is off where the policy's scale is "none" (bf16): then one with the scale 1, which changes no
    bit of a good step.
    """
    if scaler.is_enabled():
        return scaler
    found = hs.GradScaler(rule=hs.ScaleRule.static(1.0))
    found.name_parameters(scaler.named_parameters())
    return found


def region(policy: hs.Policy, *, enabled: bool = True, cache_enabled: bool | None = None) -> hs.autocast:
    """Return a region of a policy for what a library computes around a prepared model, such as losses.

    It can be entered again and again, also while it is open. Fields about models are left out of the policy, the model
    follows them itself. `cache_enabled` is False where an optimizer steps inside the region.
    """
    plain = hs.Policy()
    about_models = ("params", "norms", "modules", "inputs", "grads", "state", "reduce")
    fields = {name: getattr(plain, name) for name in about_models}
    without = policy.replace(**fields, master="none", scale="none")
    return hs.autocast(policy=without, enabled=enabled, cache_enabled=cache_enabled)


def forward_in_class(model: nn.Module) -> None:
    """Give `model` a class with the forward that a library has set on the instance, such as TRL, in place of that.

    `hs.prepare` refuses a forward on the instance, because it hides that of the class, which opens the region. What
    accelerate has set stays, and is refused: its mixed precision and its hooks.
    """
    forward = vars(model).get("forward")
    if not isinstance(forward, MethodType) or forward.__self__ is not model:
        return
    if hasattr(model, "_original_forward") or hasattr(model, "_old_forward"):
        return
    kind = type(model)
    body = {"forward": forward.__func__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), body)
    del model.forward


def was_skipped(scaler: hs.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the last step of `optimizer` was skipped, and log the names of its culprits on the first rank.

    Call it after the step and before ``zero_grad``. Waits for the device.
    """
    if not scaler.skipped(optimizer):
        return False
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        found = ", ".join(scaler.culprits(optimizer)) or "on another rank"
        LOG.warning("%s: step skipped, gradients are not finite: %s", type(optimizer).__name__, found)
    return True
