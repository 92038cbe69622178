"""Load a model by repository and entry."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from halfstep.compat.megengine.device import device_of
from halfstep.compat.megengine.hub.resnet import resnet18
from halfstep.errors import StepError, did_you_mean

__all__ = ["list", "load"]

REPOSITORY = "megengine/models"
SOURCES = ("git_host", "use_cache", "commit", "protocol")
"""Arguments about where models are downloaded from."""
ENTRIES: Mapping[str, Callable[..., nn.Module]] = {"resnet18": resnet18}


def load(repo_info: str, entry: str, *args: Any, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return a new model on the default device.

    Args:
        repo_info: "megengine/models", with or without ":branch".
        entry: "resnet18".
        *args: for the model.
        pretrained: must be False: there are no weights here.
        **kwargs: for the model; ``git_host``, ``use_cache``, ``commit`` and ``protocol`` have no meaning here.

    Raises:
        StepError: another repository or model, or pretrained weights; the message says what there is.
    """
    _check(repo_info)
    if entry not in ENTRIES:
        near = did_you_mean(entry, ENTRIES)
        raise StepError(
            f"hub.load: no model {entry!r} here; there is {', '.join(ENTRIES)}{near}. Any torch.nn.Module serves"
        )
    if pretrained:
        raise StepError(
            f"hub.load({entry!r}, pretrained=True): nothing is downloaded; use pretrained=False and load_state_dict"
        )
    options = {k: v for k, v in kwargs.items() if k not in SOURCES}
    try:
        inspect.signature(ENTRIES[entry]).bind(*args, **options)
    except TypeError as error:
        raise StepError(f"hub.load({entry!r}): {error}; it takes {inspect.signature(ENTRIES[entry])}") from None
    return ENTRIES[entry](*args, **options).to(device_of())


def list(repo_info: str, **kwargs: Any) -> builtins.list[str]:
    """Return the models there are.

    Args:
        repo_info: "megengine/models", with or without ":branch".
        **kwargs: those of `SOURCES`, which have no meaning here.

    Raises:
        StepError: another repository than "megengine/models", or an argument that MegEngine does not know.
    """
    unknown = [name for name in kwargs if name not in SOURCES]
    if unknown:
        raise StepError(f"hub.list takes no argument {', '.join(unknown)}")
    _check(repo_info)
    return sorted(ENTRIES)


def _check(repo_info: str) -> None:
    if not isinstance(repo_info, str) or repo_info.partition(":")[0].lower() != REPOSITORY:
        raise StepError(f"hub: repository {repo_info!r}; nothing is downloaded, and only {REPOSITORY!r} is built in")
