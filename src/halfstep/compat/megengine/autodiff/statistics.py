"""Running statistics of norms while a manager records, so that a step that is not made can put them back.

A forward pass with an inf in it turns the running mean and variance of a BatchNorm to NaN for good, even where the
update itself is left out.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["Statistics"]


class Statistics:
    """Buffers of norms as they were before the first forward pass since `forget` or `restore`."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._saved: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
        self._hook: RemovableHandle | None = None
        self._thread = 0

    def watch(self) -> None:
        """Save the buffers of every norm that this thread calls in training from now on."""
        self._thread = threading.get_ident()  # the hook is every thread's
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._save)

    def unwatch(self) -> None:
        """Save no more; what was saved stays."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forget(self) -> None:
        """The steps so far were good."""
        self._saved.clear()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back in place."""
        for norm, buffers in self._saved.items():
            for name, value in buffers.items():
                getattr(norm, name).copy_(value)
        self._saved.clear()

    def _save(self, module: nn.Module, inputs: Any) -> None:
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            if module not in self._saved and threading.get_ident() == self._thread:
                self._saved[module] = {name: b.clone() for name, b in module.named_buffers(recurse=False)}
