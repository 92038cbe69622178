"""A CUDA device that computes nothing: torch's CUDA dispatcher, autocast lists and optimizers without a GPU.

Fake tensors with ``device="cuda"`` carry shapes and dtypes through the real CUDA paths of torch. On a torch built for
CPUs only their backward pass fails, because autograd asks for a device it can switch to. A small C++ library, built
here with g++, registers one whose every method does nothing, and chooses the attention kernel that a GPU takes. torch
asks for its devices while it is imported, so the library has to be in the process before: `run_python` starts one, and
``python -m halfstep.testing script.py`` runs a script in it. In the script, inside ``with fake_cuda():``,
``torch.empty(4, device="cuda")`` works as on a GPU, as long as no value is read.
"""

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.cuda.amp.common as amp_common
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses import fake_tensor

import halfstep as hs
from halfstep.testing import building
from halfstep.testing.building import DeviceError, built
from halfstep.torch_private.fake import FakeTensor, FakeTensorMode

WHAT = "the fake CUDA device"

LOADED = "_HALFSTEP_FAKE_CUDA"
"""The environment variable that `run_python` sets in the process it starts with the library."""

SWAP: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

CAPABILITY = (9, 0)
"""Compute capability of the fake device: bf16 and fp16 units."""

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


class FakeCudaError(DeviceError):
    """The library cannot be built or loaded, or this process was started without it."""


missing = partial(building.missing, WHAT)
"""Return what is missing to build the library here, "" if nothing."""


def build() -> Path:
    """Return the library for this torch, built if it is not there yet (two seconds)."""
    return built(WHAT, SOURCE, ("c10", "torch_cpu"), FakeCudaError)


def run_python(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` in a process that has the fake device; `words` begin with a script, or ``-m`` and a module.

    Args:
        words: what follows ``python`` on a command line, without options of Python itself.
        **options: passed on to `subprocess.run`.

    Raises:
        FakeCudaError: the library cannot be built.

    Examples:
        >>> from halfstep.testing import run_python
        >>> done = run_python(["count_on_cuda.py"])  # doctest: +SKIP
    """
    library = build()
    environment = {**(options.pop("env", None) or os.environ), LOADED: str(library)}
    return subprocess.run([sys.executable, "-c", START, str(library), *words], env=environment, text=True, **options)


START = """
import ctypes, os, runpy, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
library.halfstep_fake_cuda()
module = sys.argv[2] == "-m"
del sys.argv[: 3 if module else 2]
sys.path.insert(0, "" if module else os.path.dirname(os.path.abspath(sys.argv[0])))
if module:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class _Mode(FakeTensorMode):
    """torch's mode, which must not initialise a device because `torch.cuda.is_available` is True."""

    @property
    def avoid_device_init(self) -> bool:
        """True: `torch.tensor(..., device="cuda")` is made on the CPU and moved."""
        return True


def _swap(one: Tensor, other: Tensor) -> None:
    """Swap two tensors as `torch.utils.swap_tensors`, of which a module's ``to`` and ``to_empty`` then drop `other`.

    torch refuses tensors with weak references, and its fake mode keeps such references to some of what it makes. So
    `one` gets the data of `other`, as a real parameter does; where their types forbid that (meta), references go first.
    """
    if not isinstance(one, FakeTensor) or not isinstance(other, FakeTensor):
        SWAP(one, other)
    elif torch._has_compatible_shallow_copy_type(one, other):
        one.data, one.fake_device = other, other.fake_device
    else:
        memo = one.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [key for key, kept in memo.items() if kept is one or kept is other]:
            del memo[key]
        SWAP(one, other)


def _deepcopy(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake tensor; torch's own method copies its mode with it, which ends in damaged memory."""
    if id(tensor) not in memo:
        made = tensor.detach().clone(memory_format=torch.preserve_format)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        made.requires_grad_(tensor.requires_grad)
        made.grad = copy.deepcopy(tensor.grad, memo)
        memo[id(tensor)] = made
    found: Tensor = memo[id(tensor)]
    return found


@cache
def _let_adagrad_step() -> torch.library.Library:
    """Give torch's fused Adagrad, alone of its fused optimizers without one, a form for tensors without values."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_adagrad_", lambda *args, **kwargs: None)
    return library


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Let ``device="cuda"`` mean the fake device inside: one GPU of compute capability 9.0 that computes nothing.

    Factory functions give fake tensors, also for the CPU; real tensors may be mixed in. What torch asks Python about
    CUDA (is it there, what can it do) is answered for the fake device, and multi-tensor functions take fake tensors as
    they take real ones. Reading a value fails, except under a `halfstep.testing.Counter`, which counts the read.

    Raises:
        FakeCudaError: this process was not started with the library (`run_python`).

    Examples:
        >>> from halfstep.testing import count_step, fake_cuda
        >>> with fake_cuda():  # doctest: +SKIP
        ...     model = model.to("cuda")
    """
    if LOADED not in os.environ:
        raise FakeCudaError(
            "this process has no fake CUDA device: torch was imported without it. Start the script with "
            "`python -m halfstep.testing script.py`, or with halfstep.testing.run_python([...])"
        )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: SimpleNamespace(major=CAPABILITY[0], minor=CAPABILITY[1]),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "Event": torch.Event,
        "Stream": torch.Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: torch.Stream(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(amp_common, "amp_definitely_not_available", lambda: False))
        # a torch built for CUDA would make a real tensor first, to wake the driver
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swap))
        stack.enter_context(mock.patch.object(FakeTensor, "__deepcopy__", _deepcopy))
        # what decides whether clip_grad_norm_ and optimizers take their multi-tensor path
        for module in (foreach_utils, importlib.import_module("torch.optim.optimizer")):
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))
        _let_adagrad_step()
        hs.policy.units.cache_clear()
        stack.callback(hs.policy.units.cache_clear)
        yield stack.enter_context(_Mode(allow_non_fake_inputs=True))
