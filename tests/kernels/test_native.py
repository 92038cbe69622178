"""The compiled CPU kernels: bit-equal to the reference, for all formats, sizes and numbers of threads."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.native import calls, compiler
from halfstep.kernels.native.calls import number, peek
from halfstep.kernels.optimizers import BY_OPERATOR
from halfstep.kernels.reference import operators as reference
from tests.kernels.cases import (
    BF16,
    COMBINATIONS,
    FORMS,
    FP16,
    FP32,
    OPTIONS,
    SPECIAL,
    Case,
    Options,
    assert_is_reference,
    assert_same,
    bits,
    case,
    run,
)

REASON = load_kernels("cpu")
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)

SIZES = (1, 0, 7, 4097, 20_011)
UPDATES = ops.UPDATES
ADAMW, ADAM, SGD, NESTEROV, PLAIN_SGD, LION, NADAM, COUPLED_NADAM = OPTIONS
DEFAULTS = pytest.mark.parametrize("options", [ADAMW, NESTEROV, LION, NADAM], ids=lambda options: options.method)
VARIANTS = (
    *(options for options in OPTIONS if options is not PLAIN_SGD),
    Options("adam", ADAM.numbers | {"weight_decay": 0.0}),
    Options("lion", LION.numbers | {"maximize": True}),
)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Share the work of few elements too; tests that change the number of threads need not change it back."""
    monkeypatch.setattr(calls, "ALONE", {"update": 0, "norms": 0})
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def updated(given: Case, options: Options) -> Case:
    """Return what the operator makes of a copy of `given`."""
    found = given.to("cpu")
    run(UPDATES[options.method], found, options.numbers)
    return found


def assert_right(given: Case, options: Options) -> None:
    assert_is_reference(UPDATES[options.method], options.method, given, options.numbers, any_nan=True)


@compiled
@pytest.mark.parametrize(("form", "low", "gradient", "state"), COMBINATIONS)
def test_every_update_is_bit_equal_to_the_reference(
    form: str, low: torch.dtype, gradient: torch.dtype, state: torch.dtype
) -> None:
    for options in VARIANTS:
        assert_right(case(options.method, form, low, gradient, state, SIZES, special=True), options)


# ------------------------------------------------------------------ how it is shared out, and what is left alone


@compiled
@pytest.mark.parametrize(("form", "low"), [("copy", BF16), ("stochastic", BF16)])
def test_results_do_not_depend_on_the_number_of_threads(form: str, low: torch.dtype) -> None:
    given = case("adam", form, low, BF16, BF16, (3, 70_001, 512, 30_000, 0, 5))
    torch.set_num_threads(1)
    assert_right(given, ADAMW)
    alone, norms = updated(given, ADAMW), ops.norms(given.gradients)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert_same(updated(given, ADAMW), alone)
        assert torch.equal(ops.norms(given.gradients), norms)


@compiled
@DEFAULTS
def test_a_bad_step_writes_nothing(options: Options) -> None:
    given = case(options.method, "copy", BF16, FP32, FP32, SIZES)
    given.gradients[3][100] = math.nan
    given.bad = torch.tensor(True)
    assert_same(updated(given, options), given)


@compiled
def test_gradients_that_are_not_finite_harm_their_own_elements_only() -> None:
    given = case("adam", "split", BF16, FP32, FP32, SIZES)
    clean = updated(given, ADAMW)
    for gradient in given.gradients:
        gradient[: len(SPECIAL)] = SPECIAL[: len(gradient)]
    assert_right(given, ADAMW)
    found = updated(given, ADAMW)
    pairs = zip(found.lists[0], clean.lists[0], strict=True)
    assert all(torch.equal(a[len(SPECIAL) :], b[len(SPECIAL) :]) for a, b in pairs)


@compiled
@DEFAULTS
@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_a_rate_on_the_device_goes_before_the_number(options: Options, dtype: torch.dtype) -> None:
    given = case(options.method, "plain", FP32, FP32, FP32, SIZES)
    given.rate = torch.tensor(0.013, dtype=dtype)
    assert_right(given, options)


@compiled
def test_sgd_without_momentum_has_no_state() -> None:
    assert_right(case("sgd", "copy", BF16, FP32, FP32, SIZES, momentum=False), PLAIN_SGD)


@compiled
def test_sizes_that_differ_are_an_error_and_nothing_is_written() -> None:
    given = case("sgd", "plain", FP32, FP32, FP32, SIZES)
    given.gradients[2] = torch.zeros(8)
    before = given.to("cpu")
    with pytest.raises(ValueError, match=r"gradients and weights differ in size: \[1, 0, 8,"):
        run(UPDATES["sgd"], given, SGD.numbers)
    assert_same(given, before)


@compiled
@pytest.mark.parametrize(("form", "state"), [("stochastic", FP32), ("plain", BF16)])
def test_stochastic_rounding_without_draws_is_an_error(form: str, state: torch.dtype) -> None:
    given = case("sgd", form, BF16, FP32, state)
    before = given.to("cpu")
    given.draws = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="which needs `draws`"):
        run(UPDATES["sgd"], given, SGD.numbers)
    assert_same(given, before)


@compiled
@pytest.mark.parametrize(("form", "low"), FORMS)
def test_what_lies_around_a_tensor_is_left_alone(form: str, low: torch.dtype) -> None:
    given = case("adam", form, low, BF16, BF16, (1, 37, 1025))
    fenced, fences = given.to("cpu"), []
    for tensors in fenced.lists[:4]:
        for n, tensor in enumerate(tensors):
            memory = torch.full((tensor.numel() + 200,), 77, dtype=tensor.dtype)
            memory[100:-100] = tensor
            tensors[n] = memory[100:-100]
            fences.append(memory)
    run(UPDATES["adam"], fenced, ADAMW.numbers)
    assert_same(fenced, updated(given, ADAMW))
    assert all(bool((fence[:100] == 77).all() and (fence[-100:] == 77).all()) for fence in fences)


# ------------------------------------------------------------------ rounding, over all there is


STILL: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


def moved_by_nothing(form: str, weight: Tensor, beside: list[Tensor], first: list[Tensor], gradient: Tensor) -> Case:
    """Return one parameter after an update with learning rate 0 and momentum 0.9, if there is a state."""
    one, good = torch.tensor(1.0), torch.tensor(False)
    given = Case(form=form, lists=[[weight], beside, first], gradients=[gradient], factor=one, bad=good, lr=0.0)
    run(UPDATES["sgd"], given, STILL | {"momentum": 0.9 if first else 0.0})
    return given


def same(one: Tensor, other: Tensor) -> bool:
    return bool(((bits(one) == bits(other)) | (one.isnan() & other.isnan())).all())


@compiled
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_every_number_of_16_bits_is_read_and_written_exactly(dtype: torch.dtype) -> None:
    low = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    zeros = torch.zeros(2**16)
    reading = moved_by_nothing("plain", zeros.clone(), [], [-zeros], low)
    assert same(reading.lists[2][0], low.float())  # -0.0 * 0.9 + low
    writing = moved_by_nothing("plain", low.clone(), [], [], zeros)
    assert same(writing.lists[0][0], low)


@compiled
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_rounding_to_even_is_torchs_at_every_number_halfway_point_and_neighbour(dtype: torch.dtype) -> None:
    value = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    value = value[value.isfinite()].float().sort().values
    middle = (value[1:].double() + value[:-1].double()).mul(0.5).float()
    wide = torch.cat([value, middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(0.0))])
    wide = torch.cat([wide, torch.tensor([65519.9, 65520.0, 7e4, 3.4e38, -3.4e38, math.inf, math.nan, 1e-45])])
    given = moved_by_nothing("copy", wide, [torch.zeros_like(wide, dtype=dtype)], [], torch.zeros_like(wide))
    assert same(given.lists[1][0], wide.to(dtype))


# ------------------------------------------------------------------ against torch's own optimizers


def ulps(a: Tensor, b: Tensor) -> float:
    """Largest relative distance, in units of 2**-23."""
    return float(((a - b).abs() / (b.abs().clamp(min=2.0**-10) * 2.0**-23)).max())


@compiled
@pytest.mark.parametrize("options", [ADAMW, SGD], ids=lambda options: options.method)
def test_a_hundred_steps_stay_near_torchs_fused_optimizer(options: Options) -> None:
    given = case(options.method, "plain", FP32, FP32, FP32, (1000, 33))
    given.factor, given.lr = torch.tensor(1.0), 1e-3
    given.lists = [[t.abs() + 0.5 for t in given.lists[0]], [], *([t.mul(0) for t in ts] for ts in given.lists[2:])]
    theirs = [torch.nn.Parameter(w.clone()) for w in given.lists[0]]
    torchs: torch.optim.Optimizer = (
        torch.optim.AdamW(theirs, lr=1e-3, fused=True)
        if options is ADAMW
        else torch.optim.SGD(theirs, lr=1e-3, momentum=0.9, fused=True)
    )
    for _ in range(100):
        given.gradients = [torch.randn(w.shape) for w in theirs]
        for parameter, gradient in zip(theirs, given.gradients, strict=True):
            parameter.grad = gradient.clone()
        torchs.step()
        run(UPDATES[options.method], given, options.numbers)
    distance = max(ulps(a, b.detach()) for a, b in zip(given.lists[0], theirs, strict=True))
    assert distance <= 8, distance


# ------------------------------------------------------------------ norms and their check


@compiled
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_norms_are_exact_to_two_ulps(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    tensors = [torch.randn(size, generator=draw).to(dtype) for size in (0, 1, 7, 63, 65, 4095, 4096, 4097, 300_001)]
    exact = torch.stack([t.double().norm() for t in tensors])
    got = ops.norms(tensors)
    assert got.dtype is FP32 and torch.all((got.double() - exact).abs() <= 2 * 2.0**-23 * exact)


@compiled
def test_norms_of_mixed_formats_say_where_something_is_not_finite() -> None:
    tensors = [torch.ones(5000), torch.ones(9000, dtype=BF16), torch.ones(3, dtype=FP16), torch.full((9,), 1e18)]
    assert ops.norms(tensors)[:2].tolist() == pytest.approx([5000**0.5, 9000**0.5])
    tensors[1][8999], tensors[2][0] = math.nan, -math.inf
    got = ops.norms([*tensors, torch.full((9,), 3e19)])
    assert got[1].isnan() and got[2:].tolist() == [math.inf, float(got[3]), math.inf]
    assert got[3] == pytest.approx(3e18)  # 9 squares of 1e18 are below the largest fp32, those of 3e19 above


@compiled
@pytest.mark.parametrize("divisor", [None, 1.0, 0.5, 65536.0])
@pytest.mark.parametrize("clip", [None, 1.0, 0.3, 1e6])
def test_the_check_is_that_of_the_reference(divisor: float | None, clip: float | None) -> None:
    scale = None if divisor is None else torch.tensor(divisor)
    draw = torch.Generator().manual_seed(3)
    for count in (1, 2, 10, 300):
        norms = torch.rand(count, generator=draw) * 100
        norm, bad, factor = ops.check_norms(norms, scale, clip)
        want = reference.check_norms(norms, scale, clip)
        for got, wanted in ((norm, want[0]), (factor, want[2])):
            assert got.shape == () and got.dtype is FP32
            assert abs(float(got) - float(wanted)) <= 2 * 2.0**-23 * abs(float(wanted))
        assert torch.linalg.vector_norm(norms).div(divisor or 1.0).nextafter(norm) == norm, "at most one ulp"
        assert bad.dtype is torch.bool and not bad
        whole = torch.ones(()) if scale is None else scale
        if clip is not None:
            whole = whole * ((norm + reference.CLIP_EPS) / clip).clamp(min=1.0)
        assert torch.equal(factor, 1.0 / whole), "from the same norm the factor is the same"


@compiled
@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_a_norm_that_is_not_finite_is_bad(value: float) -> None:
    norms = torch.tensor([1.0, value, value])
    norm, bad, _ = ops.check_norms(norms, None, 1.0)
    want, really, _ = reference.check_norms(norms, None, 1.0)
    assert bad and really and same(norm, want)


@compiled
def test_no_gradients_are_not_bad() -> None:
    norm, bad, factor = ops.check_norms(torch.zeros(0), None, 1.0)
    assert (float(norm), bool(bad), float(factor)) == (0.0, False, 1.0)


# ------------------------------------------------------------------ threads of the process


SHARED = """
import os, torch
torch.set_num_threads(2)
def runtimes():
    return sorted({l.split()[-1] for l in open("/proc/self/maps") if any(n in l for n in ("gomp", "iomp", "libomp"))})
torch.ones(4_000_000).add_(1)
before, tasks = runtimes(), len(os.listdir("/proc/self/task"))
from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
reason = load_kernels("cpu")
assert not reason, reason
assert ops.norms([torch.ones(4_000_000)]).tolist() == [2000.0]
assert len(before) == 1 and runtimes() == before, (before, runtimes())
assert len(os.listdir("/proc/self/task")) == tasks, "torch's threads did the work"
"""


def python(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(ops.__file__).parents[2])}
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_kernels_run_on_torchs_threads_and_no_second_openmp_is_loaded() -> None:
    done = python(SHARED)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ what the machine has, and has not

ASK = """
import json, os, sys, torch
from halfstep.kernels.choose import by_foreach, load_kernels, norms_for
from halfstep.kernels import choose
tensors = [torch.arange(9.0), torch.ones(3, dtype=torch.bfloat16)]
for changes in json.loads(sys.argv[1]):
    os.environ.update(changes)
    choose._loaded.cache_clear(), choose._registered.cache_clear()
    reason = load_kernels("cpu")
    assert reason == load_kernels("cpu") == choose.why_no_kernels(tensors[0])
    assert torch.equal(norms_for(tensors), by_foreach(tensors))
    print(reason)
"""


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="needs a shell script as a compiler")
def test_where_it_cannot_be_had_the_reason_is_a_sentence_and_norms_are_as_before(tmp_path: Path) -> None:
    script = tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] || { echo 'In file x:' >&2; echo 'x:1: error: no' >&2; exit 1; }\n"
    )
    script.chmod(0o755)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HALFSTEP_NATIVE": "build"}
    cases = {
        "the environment variable HALFSTEP_NATIVE is 0": cache | {"HALFSTEP_NATIVE": "0"},
        f"{script} could not compile the kernels: x:1: error: no": cache | {"CXX": str(script)},
        "the environment variable CXX names 'no-such-compiler', which is no program here": {"CXX": "no-such-compiler"},
        "no C++ compiler was found (looked for g++, clang++, c++; CXX can name one)": {"CXX": "", "PATH": "/nowhere"},
    }
    done = python(ASK, json.dumps([cache | changes for changes in cases.values()]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(cases)
    assert not list((tmp_path / "cache" / "halfstep").iterdir()), "nothing stays behind"


def test_a_change_in_any_source_makes_another_file_in_the_cache() -> None:
    folder = compiler.SOURCE.parent
    assert {*compiler.INCLUDED} == {file.name for file in folder.iterdir() if file.suffix in (".h", ".cpp")} - {
        compiler.SOURCE.name
    }


@compiled
def test_those_who_compile_at_once_leave_one_whole_file_and_a_damaged_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "FLAGS", tuple(flag for flag in compiler.FLAGS if flag != "-O3"))  # seconds less
    callers = [threading.Thread(target=compiler.compiled) for _ in range(2)]  # as two processes do: without the lock
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    (file,) = (tmp_path / "halfstep").iterdir()
    whole = file.stat().st_size
    file.write_bytes(b"damaged")
    assert compiler.library("")[0].halfstep_norms and file.stat().st_size == whole
    assert compiler.compiled() == file and list(file.parent.iterdir()) == [file]


# ------------------------------------------------------------------ those a wheel ships


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the sources to a folder that may have shipped libraries, and look for them there."""
    folder = tmp_path / "native"
    shutil.copytree(compiler.SOURCE.parent, folder, ignore=shutil.ignore_patterns("portable-*"))
    monkeypatch.setattr(compiler, "SOURCE", folder / compiler.SOURCE.name)
    return folder


def machines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)


def put(folder: Path) -> list[str]:
    """Put in empty files where a wheel for this machine has its libraries; return their instruction sets."""
    libraries = compiler._portable()
    for name, _ in libraries.values():
        (folder / name).touch()
    return list(libraries)


@pytest.mark.parametrize("name", ["x86_64", "AMD64"])
def test_the_best_shipped_library_that_the_cpu_can_run_is_taken(
    name: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines(name, monkeypatch)
    assert compiler.shipped("AVX512") is None, "a source tree has none"
    assert put(elsewhere) == ["avx512", "avx2"]
    taken = {capability: compiler.shipped(capability) for capability in ("AVX512", "AVX2", "NO AVX", "DEFAULT")}
    assert [found and found[1] for found in taken.values()] == ["avx512", "avx2", None, None]
    assert all(found is None or found[0].parent == elsewhere for found in taken.values())
    (elsewhere / compiler._portable()["avx512"][0]).unlink()
    assert (found := compiler.shipped("AVX512")) is not None and found[1] == "avx2"


def test_on_arm_every_cpu_can_run_the_shipped_library(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines("aarch64", monkeypatch)
    assert put(elsewhere) == ["neon"]
    assert (found := compiler.shipped("SVE256")) is not None and found[1] == "neon"
    machines("riscv64", monkeypatch)
    assert compiler.shipped("DEFAULT") is None
    with pytest.raises(compiler.Unavailable, match="no portable kernels for riscv64"):
        compiler.ship(elsewhere)


def test_shipped_libraries_of_other_sources_are_passed_over(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines("x86_64", monkeypatch)
    put(elsewhere)
    header = elsewhere / "norms.h"
    header.write_text(header.read_text().replace("SUMMED = 4096", "SUMMED = 2048"))
    assert compiler.shipped("AVX512") is None


@compiled
def test_a_shipped_library_that_cannot_be_loaded_is_replaced_by_one_compiled_here(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines("x86_64", monkeypatch)
    put(elsewhere)
    monkeypatch.setattr(compiler, "compiled", lambda: Path("nowhere.so"))
    with pytest.raises(OSError, match=r"nowhere\.so"):
        compiler.library("AVX512")


@compiled
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin" or compiler._arch() != "x86_64", reason="compares two instruction sets")
def test_a_shipped_library_has_the_bits_of_the_one_compiled_here(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calls.ALONE, "loss", 0)
    here = calls.Kernels(compiler.library("")[0])
    if "avx2" not in compiler._machine():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(compiler, "PORTABLE", {"x86_64": {"avx2": compiler.PORTABLE["x86_64"]["avx2"]}})
    (made,) = compiler.ship(elsewhere)
    found, origin = compiler.library("AVX2")
    assert origin == "shipped, for avx2" and made.name in str(found)
    other = calls.Kernels(found)
    for options in (ADAMW, NESTEROV, LION):
        for form, low in FORMS:
            given = case(options.method, form, low, FP16, FP32, SIZES, special=True)
            results = []
            for kernels in (here, other):
                mine = given.to("cpu")
                run(partial(kernels.update, BY_OPERATOR[f"{options.method}_"]), mine, options.numbers)
                results.append(mine)
            assert_same(*results)
    tensors = [torch.randn(size).to(dtype) for size in (3, 4097, 70_000) for dtype in (FP32, BF16, FP16)]
    assert torch.equal(here.norms(tensors), other.norms(tensors))
    logits, target = torch.randn(50, 5003).mul(9).to(BF16), torch.randint(0, 5003, (50,))
    both = torch.zeros(2, 3, 50, dtype=torch.float64)
    for kernels, sums in zip((here, other), both, strict=True):
        kernels.row_sums_(*sums, logits, target, torch.rand(5003, generator=torch.Generator().manual_seed(0)), 0)
    assert torch.equal(both[0], both[1]) and both.all()


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_a_cache_that_others_can_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "halfstep"
    (tmp_path / "halfstep").chmod(0o777)
    assert compiler.cache_folder() not in (tmp_path / "halfstep", tmp_path)
    assert compiler.cache_folder().stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "halfstep" / "file"))
    (tmp_path / "halfstep" / "file").write_text("not a folder")
    assert compiler.cache_folder().is_dir()


# ------------------------------------------------------------------ single numbers in host memory


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.int32])
def test_a_flag_is_read_without_torch(dtype: torch.dtype) -> None:
    flags: Tensor = torch.tensor([0, 1, 0]).to(dtype)
    with NoReads():  # type: ignore[no-untyped-call]  # torch annotates its modes in part
        assert [peek(flag) for flag in flags] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_number_is_read_without_torch(dtype: torch.dtype) -> None:
    numbers: Tensor = torch.tensor([0.5, -3.0, float("inf")]).to(dtype)
    with NoReads():  # type: ignore[no-untyped-call]  # torch annotates its modes in part
        assert [number(value) for value in numbers] == [0.5, -3.0, float("inf")]
    assert number(torch.tensor(2.0).to(torch.bfloat16)) == 2.0 and number(torch.tensor(3)) == 3.0
