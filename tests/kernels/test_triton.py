"""The CUDA kernels: in Triton's interpreter, as compiled code, their tables, and when they can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch._subclasses import FakeTensorMode

from halfstep.kernels import triton as triton_kernels
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.optimizers import SPECS
from halfstep.kernels.triton import tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPILLED = {"3.6": 40, "3.7": 16}
"""Version of Triton -> bytes of registers that its compiler spills for exponents; later ones: none."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")


def output_of(*arguments: str, **environment: str) -> str:
    """Run Python in a process of its own and return what it printed; fail with that if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ------------------------------------------------------------------ what the kernels compute


@needs_triton
@pytest.mark.parametrize("which", ["not hours", pytest.param("hours", marks=pytest.mark.hours)])
def test_the_kernels_are_their_reference_in_triton_s_interpreter(which: str) -> None:
    file = str(HERE / "triton_interpreted.py")
    said = output_of("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", which, file, TRITON_INTERPRET="1")
    assert " passed" in said and "skipped" not in said


def check_compiled(tmp_path: Path, *arguments: str) -> dict[str, dict[str, int]]:
    """Compile kernels and check what is in their code; return the reports."""
    script = str(HERE / "triton_compiled.py")
    text = output_of(script, *arguments, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found: dict[str, dict[str, int]] = json.loads(text)
    for kernel, counts in found.items():
        assert not counts["contracted"], kernel
        assert not counts["approximate"], kernel
        assert counts["wide loads"] == counts["expected wide loads"], kernel
        assert counts.get("instructions", 0) <= 280, (kernel, counts)  # for 128 numbers whose exponents are near
        # what is left above 64: smoothing together with class weights, whose sums need weights and logits in one layout
        most = 96 if "class weights" in kernel else 64
        assert counts.get("registers", 0) <= most, (kernel, counts)
        spilled = SPILLED.get(version("triton")[:3], 0) if "exponents" in kernel else 0
        assert counts.get("spilled", 0) <= spilled, (kernel, counts)
    return found


@needs_triton
def test_compiled_kernels_round_every_operation_and_load_many_bytes_at_once(tmp_path: Path) -> None:
    found = check_compiled(tmp_path)
    assert sum("registers" in counts for counts in found.values()) == 5


@needs_triton
def test_kernels_compile_for_an_amd_device(tmp_path: Path) -> None:
    script = str(HERE / "triton_compiled.py")
    assert "hsaco" in json.loads(output_of(script, "amd", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))


@needs_triton
def test_offsets_of_every_kernel_reach_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    text = output_of("-m", "tests.kernels.triton_offsets", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found = json.loads(text)
    faults = found["faults"]
    assert len(faults.pop("narrow_kernel")) == 3  # a seeded fault: three ways to end at 2^31
    assert sorted(faults) == found["names"]
    assert not any(faults.values()), faults


def test_amd_devices_need_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    refused = triton_kernels.refused.__wrapped__
    assert "HALFSTEP_ROCM=1 uses them" in refused()
    monkeypatch.setenv("HALFSTEP_ROCM", "1")
    assert refused() == ""


@needs_triton
@pytest.mark.hours
def test_kernels_of_counts_and_losses_need_few_registers_on_every_device(tmp_path: Path) -> None:
    assert len(check_compiled(tmp_path, "every")) == 7 * 12


# ------------------------------------------------------------------ when they can be used


def test_without_a_device_the_kernels_say_so() -> None:
    if torch.cuda.is_available():
        assert load_kernels("cuda") == ""
    else:
        assert load_kernels("cuda") == "there is no CUDA device"


WITHOUT_COMPILER = """
import logging, os, sys, torch
from unittest import mock
from halfstep.kernels import choose, triton

said = []
logging.getLogger("halfstep").addHandler(logging.StreamHandler(mock.Mock(write=said.append)))
functions = (triton.refused, triton.unsupported, choose._loaded, choose._registered)
torch.cuda.is_available = lambda: False
print(choose.load_kernels("cuda"), "triton" in sys.modules)
answers = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "is_current_stream_capturing": lambda: False,
    "get_device_capability": lambda device: (9, 0),
}
for name, answer in answers.items():
    setattr(torch.cuda, name, answer)
for function in functions:
    function.cache_clear()
os.environ["HALFSTEP_TRITON"] = "0"
print(choose.load_kernels("cuda"), len(said), "triton" in sys.modules)
for function in functions:
    function.cache_clear()
del os.environ["HALFSTEP_TRITON"]
os.environ.pop("CC", None)

from triton.backends import backends
for name, backend in backends.items():
    backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
reasons = {choose.load_kernels("cuda"), choose.load_kernels("cuda", 0), triton.unsupported(torch.device("cuda", 0))}
print(*reasons)
print(*(line.strip() for line in said))
has = torch._C._dispatch_has_kernel_for_dispatch_key
print([name for name in choose.OPERATORS if has(f"halfstep::{name}", "CUDA")])
"""


@needs_triton
def test_without_a_c_compiler_torch_s_operators_run_and_one_sentence_says_why(tmp_path: Path) -> None:
    nowhere = str(tmp_path)  # without compiler, cache and driver
    found = output_of("-c", WITHOUT_COMPILER, PATH=nowhere, TRITON_CACHE_DIR=nowhere, TRITON_LIBCUDA_PATH=nowhere)
    absent, switched, reason, said, registered = found.splitlines()
    assert absent == "there is no CUDA device False", "Triton is not imported without a device"
    assert switched == "the environment variable HALFSTEP_TRITON is 0 0 False"
    assert reason.startswith("Triton cannot launch a kernel on cuda:0 (RuntimeError: Failed to find C compiler.")
    assert said.startswith(f"{reason}; torch's operators run instead") and said.count("Triton cannot launch") == 1
    assert registered == "[]"


# ------------------------------------------------------------------ tables


def covered(rows: torch.Tensor, plan: tables.Layout) -> list[tuple[int, int, int]]:
    """Return (column, begin, end) of every program, after checking that launches take each program once."""
    taken = [n for launch in plan.launches for n in range(launch.first, launch.first + launch.programs)]
    assert sorted(taken) == list(range(plan.programs))
    sizes = rows[-2].tolist()
    return [(c, k * plan.chunk, min((k + 1) * plan.chunk, sizes[c])) for c, k in plan.chunks.here().tolist()]


@pytest.mark.parametrize("small", [0, 1 << 22])
def test_every_number_of_thousands_of_tensors_belongs_to_one_program(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "SMALL", small)
    sizes = [(n * 7919) % 97 for n in range(4000)] + [0, 1, 100_000]
    tensors = [torch.empty(size, dtype=torch.bfloat16 if n % 3 else torch.float32) for n, size in enumerate(sizes)]
    rows, plan = tables.plan_walk([tensors], 16)
    parts: dict[int, int] = {}
    for column, begin, end in covered(rows, plan):
        assert begin == parts.get(column, 0) < end
        parts[column] = end
    names = rows[-1].tolist()
    assert {names[column]: end for column, end in parts.items()} == {n: size for n, size in enumerate(sizes) if size}
    assert sorted(names) == list(range(len(sizes)))
    addresses = rows[0].tolist()
    assert all(addresses[column] == tensors[n].data_ptr() for column, n in enumerate(names))
    assert len(plan.launches) == 2


def test_tensors_beyond_32_bits_are_cut_in_64() -> None:
    layout = tables._layout([(torch.bfloat16,)], (2**33 + 1,), (False,), torch.device("cpu"), 2**20, 0)
    column, part = layout.chunks.tensor[-1].tolist()
    assert (column, part * layout.chunk) == (0, 2**33)


def test_nothing_moved_means_no_new_table() -> None:
    tensors = [torch.empty(5), torch.empty(6)]
    first, again = tables.plan_walk([tensors], 16), tables.plan_walk([list(tensors)], 16)
    assert again[0] is first[0] and again[1] is first[1]
    other = tables.plan_walk([[tensors[0], torch.empty(6)]], 16)
    assert other[0] is not first[0] and other[1] is first[1]
    assert tables.plan_walk([tensors], 16, start=3)[0][-1].tolist() == [3, 4]


def test_a_format_changed_in_place_is_another_plan() -> None:
    memory = torch.empty(8)
    plans = [tables.plan_walk([[memory.view(dtype)[:8]]], 16) for dtype in (torch.float32, torch.int32)]
    assert [plan.launches[0].dtypes for _, plan in plans] == [(torch.float32,), (torch.int32,)]


def test_old_tables_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tables.TableCache()
    monkeypatch.setattr(tables, "_tables", lambda: memory)
    monkeypatch.setattr(tables, "REMEMBERED", 30)
    for size in range(1, 100):
        tables.plan_walk([[torch.empty(size)]], 16)
    assert len(memory.rows) == 10  # of three words
    assert len(memory.layouts) == tables.LAYOUTS


class Graph:
    """Stands for one of CUDA's."""


def test_the_tables_of_a_graph_go_with_the_first_capture_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake CUDA tensors."""
    kept = tables.Captures()
    monkeypatch.setattr(tables, "_captures", lambda: kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device, kept.free = torch.device("cuda", 0), torch.empty(1000, dtype=torch.int64)
    pinned = ref(kept.free.untyped_storage())

    def capture() -> None:
        tables.Copied(torch.arange(8), device)
        earlier.stream = object()  # type: ignore[assignment]  # as one that was copied before the capture
        earlier.here()

    with FakeTensorMode(allow_non_fake_inputs=True):
        earlier = tables.Copied(torch.arange(3), device)  # in a capture by others: kept for good
        graphs: list[Graph] = []
        for n in range(6):  # the last two exist at a time
            graphs = [*graphs[-1:], Graph()]
            with tables.tables_of(graphs[-1], device):
                capture()
            assert [len(each) for graph, each in kept.graphs if graph() is not None] == [3] * min(n + 1, 2)
            assert len(kept.graphs) <= 3 and len(kept.now) == 2
        kept.now.clear()
        kept.free = torch.empty(0, dtype=torch.int64)
        graphs.clear()
        assert pinned() is not None
        with tables.tables_of(Graph(), torch.device("cuda", 1)):  # of which those on cuda:0 may be in use
            assert pinned() is not None
        with tables.tables_of(Graph(), device):
            assert not kept.graphs and pinned() is None
    assert not kept.now


def test_tables_are_made_on_the_host_whatever_the_default_device() -> None:
    tensors = [torch.empty(21), torch.empty(22)]
    with torch.device("meta"):
        rows, plan = tables.plan_walk([tensors], 16)
    assert {rows.device.type, plan.chunks.here().device.type, plan.ends.here().device.type} == {"cpu"}


def test_large_tensors_that_begin_unaligned_get_a_launch_of_their_own() -> None:
    aligned, memory = torch.empty(64), torch.empty(65)
    small = torch.empty(9)[1:]
    _, plan = tables.plan_walk([[aligned, memory[1:], small]], 16)
    assert [(launch.aligned, launch.programs) for launch in plan.launches] == [(True, 5), (False, 4)]


# ------------------------------------------------------------------ what is compiled anew


def given(name: str, *, lr: float, dtype: torch.dtype) -> list[object]:
    """Return arguments of the update operator of AdamW (`name` "adam") or of SGD with momentum."""
    states, counters = [2, 1] if name == "adam" else [1, 0]
    lists = [[torch.zeros(40, dtype=dtype)], *[[torch.zeros(40)] for _ in range(states)]]
    lists += [[torch.zeros(())] for _ in range(counters)]
    numbers = (0.9, 0.999, 1e-8, 0.0, True, False) if name == "adam" else (0.9, 0.0, False, False)
    flags = (torch.ones(()), torch.tensor(False), None, 0, "plain", None, lr)
    return [lists[0], [], *lists[1:], [torch.zeros(40, dtype=dtype)], *flags, *numbers]


@needs_triton
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_no_learning_rate_compiles_a_kernel_anew(name: str) -> None:
    from halfstep.kernels.triton import updates
    from tests.kernels.launched import launched

    spec = next(spec for spec in SPECS if spec.name == name)
    with launched() as found:
        for lr in (1e-3, 0.0, 1.0, 16, 0, 2.5e-310):
            updates.update(spec, *given(name, lr=lr, dtype=torch.float32))  # type: ignore[arg-type]
    assert len(found) == (2 if name == "adam" else 1)


@needs_triton
def test_losses_of_any_number_of_classes_are_one_kernel() -> None:
    """Each size of a block has one: from 4,096 classes on all have the same."""
    from halfstep.kernels.triton import loss
    from tests.kernels.launched import launched

    with launched() as found:
        for classes in (4104, 4112, 50304, 128256):
            for first in (0, 1, 16):
                logits = torch.zeros(2, classes, dtype=torch.bfloat16)
                target, row = torch.zeros(2, dtype=torch.int64), torch.ones(2)
                loss.row_sums_(row, row.clone(), row.clone(), logits, target, None, first)
                loss.gradient(logits, row, target, row, row, row, None, first, out=torch.empty_like(logits))
    assert sorted(name for name, _ in found) == ["gradient_kernel", "sums_kernel"]
