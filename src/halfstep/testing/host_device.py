"""A device of torch's PrivateUse1 kind that computes on the host: it stands for accelerators that are not here.

torch_npu (Ascend) and other backends outside of torch are devices of this kind. `host_device` registers one: its
tensors are plain `torch.Tensor` objects with a device type of their own, memory and an allocator, a random generator,
streams and events that do nothing, torch's autocast with the lists for accelerators, and ``torch.<name>``, the module
that such backends have. Each operator runs as the CPU's kernel on the same bytes, so what a program computes there has
the bits of the same program on the CPU, and every difference is one of the program's choices.

Code that asks for CUDA by name finds none, and code that works here works on any device that torch has a place for.
Speed means nothing: nothing is queued, and each call costs a few microseconds more than on the CPU.
"""

import ctypes
import types
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.utils import backend_registration

from halfstep.testing import building
from halfstep.testing.building import DeviceError, built
from halfstep.torch_private.devices import get_privateuse1_backend_name

WHAT = "the host device"

SOURCE = Path(__file__).with_name("host_device.cpp")

FREE = "privateuseone"
"""torch's name for the kind as long as no backend has renamed it."""


class HostDeviceError(DeviceError):
    """The device cannot be built, or the process has another device of its kind."""


missing = partial(building.missing, WHAT)
"""Return what is missing to build the device here, "" if nothing."""


def host_device(name: str = "npu") -> torch.device:
    """Register the device in this process, for as long as it lives, and return it.

    torch has one place for a device of this kind, and one name for it. From now on the device is the accelerator of
    this process (``torch.accelerator.current_accelerator()``) unless torch itself has another.

    Args:
        name: the device type, such as "npu"; ``torch.npu`` becomes its module, and tensors and modules get ``.npu()``.

    Raises:
        HostDeviceError: there is no g++ or no Linux, `name` is a type of torch's or no word, or the process has a
            device of this kind under another name.

    Examples:
        >>> from halfstep.testing import host_device
        >>> device = host_device()  # doctest: +SKIP
        >>> step = hs.TrainStep(model.to(device), optimizer, loss_fn, policy="mixed")  # doctest: +SKIP
    """
    now = get_privateuse1_backend_name()
    if now == name and isinstance(getattr(torch, name, None), _Module):
        return torch.device(name, 0)
    if now != FREE:
        raise HostDeviceError(f"this process has a device of this kind, {now!r}; register {name!r} in another process")
    if not name.isidentifier() or hasattr(torch, name):
        raise HostDeviceError(f"name={name!r}: expected a word that torch does not use, such as 'npu'")
    path = built(WHAT, SOURCE, ("c10", "torch_cpu", "torch_python"), HostDeviceError)
    library = ctypes.PyDLL(str(path))
    library.halfstep_host_device()
    library.halfstep_host_generator.restype = ctypes.py_object
    backend_registration.rename_privateuse1_backend(name)
    torch._register_device_module(name, _Module(name, library.halfstep_host_generator()))
    backend_registration.generate_methods_for_privateuse1_backend()
    return torch.device(name, 0)


class _Module(types.ModuleType):
    """``torch.<name>``: the functions by which programs ask a device, as far as one without streams has any."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        super().__init__(f"torch.{name}", host_device.__doc__)
        self.default_generators = (generator,)
        self.Event = partial(torch.Event, name)
        self.device = nullcontext  # a block on another device: there is one
        self.device_count, self.current_device = lambda: 1, lambda: 0
        self.is_available = self.is_initialized = self.is_bf16_supported = lambda: True
        self._is_in_bad_fork = lambda: False
        self.init = self.set_device = self.synchronize = self.empty_cache = lambda *ignored: None
        self.current_stream = lambda device=None: torch.accelerator.current_stream(device)
        self.Stream, self.stream = lambda priority=0: torch.Stream(name), lambda stream: nullcontext()
        self.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
        self.get_device_name = lambda device=None: "the host, by halfstep.testing.host_device"
        self.manual_seed = self.manual_seed_all = generator.manual_seed
        self.get_rng_state = lambda device=None: generator.get_state()
        self.set_rng_state = lambda state, device=None: generator.set_state(state)
