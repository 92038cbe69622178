"""Instruments for tests of training loops: what a step does, counted, with and without a GPU."""

from halfstep.testing.counter import Counter, CountError, count_step
from halfstep.testing.counts import Counts, Row, Sync
from halfstep.testing.fake_cuda import FakeCudaError, fake_cuda, run_python
from halfstep.testing.own import declare
from halfstep.testing.traffic import DeclarationError, declare_traffic

__all__ = [
    "CountError",
    "Counter",
    "Counts",
    "DeclarationError",
    "FakeCudaError",
    "Row",
    "Sync",
    "count_step",
    "declare_traffic",
    "fake_cuda",
    "run_python",
]

declare()
