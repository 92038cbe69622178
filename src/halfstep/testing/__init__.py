"""Instruments for tests of training loops: they count what a step does, with and without a GPU."""

from halfstep.testing.counter import Counter, CountError, count_step
from halfstep.testing.counts import Counts, Row, Sync
from halfstep.testing.fake_cuda import FakeCudaError, fake_cuda, run_python
from halfstep.testing.host_device import HostDeviceError, host_device
from halfstep.testing.traffic import DeclarationError, declare_own, declare_traffic

__all__ = [
    "CountError", "Counter", "Counts", "DeclarationError", "FakeCudaError", "HostDeviceError", "Row", "Sync",
    "count_step", "declare_traffic", "fake_cuda", "host_device", "run_python",
]  # fmt: skip

declare_own()
