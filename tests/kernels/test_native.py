"""The compiled CPU kernels: bit-equal to `updates`, whatever the formats, the sizes and the number of threads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.native import calls, compiler
from halfstep.kernels.reference import operators as reference

REASON = load_kernels("cpu")
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)

FP32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 0, 7, 4097, 20_011)
FORMS = [
    ("plain", FP32, None),
    ("plain", BF16, None),
    ("plain", HALF, None),
    ("copy", FP32, BF16),
    ("copy", FP32, HALF),
    ("split", BF16, torch.int16),
    ("kahan", BF16, BF16),
    ("kahan", HALF, HALF),
    ("stochastic", BF16, None),
]
DRAWS, START = torch.tensor([-(2**61) + 12345, 2**33 + 3]), 5

SPECIAL = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-42, 3.38e38, 65519.0, 65520.0, 6e-8, 1e-8])


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Share the work of few elements too; tests that change the number of threads need not change it back."""
    monkeypatch.setattr(calls, "ALONE", {"update": 0, "norms": 0})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def patterns(tensor: Tensor) -> Tensor:
    """Bits to compare; all NaN are one."""
    if tensor.dtype is torch.int16:
        return tensor
    bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
    return torch.where(tensor.isnan(), torch.full_like(bits, 0x7FC0), bits)


@dataclass(kw_only=True)
class Model:
    """Parameters in one form with everything an update reads and writes."""

    form: str
    weights: list[Tensor] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    factor: Tensor = field(default_factory=lambda: torch.tensor(0.37))
    bad: Tensor = field(default_factory=lambda: torch.tensor(False))
    draws: Tensor = field(default_factory=lambda: DRAWS)
    start: int = START

    def copy(self) -> Model:
        copied = replace(self)
        for name in ("weights", "beside", "first", "second", "steps", "gradients"):
            setattr(copied, name, [t.clone() for t in getattr(self, name)])
        return copied

    def written(self) -> list[Tensor]:
        return [*self.weights, *self.beside, *self.first, *self.second, *self.steps]

    def given(self, rate: Tensor | None = None) -> tuple[Any, ...]:
        return (self.gradients, self.factor, self.bad, self.draws, self.start, self.form, rate)


def make(
    form: str,
    low: torch.dtype,
    beside: torch.dtype | None,
    gradient: torch.dtype = FP32,
    state: torch.dtype = FP32,
    *,
    sizes: tuple[int, ...] = SIZES,
    special: bool = False,
) -> Model:
    draw = torch.Generator().manual_seed(len(form) + 8 * len(sizes))
    model = Model(form=form)
    for n, size in enumerate(sizes):
        values = torch.randn(size, generator=draw) * 10.0 ** (torch.rand(size, generator=draw) * 6 - 4)
        if special and size > 4 * len(SPECIAL):
            values[: len(SPECIAL)] = SPECIAL
        if form == "split":
            halves = reference.split_bf16(values)
            model.weights.append(halves[0])
            model.beside.append(halves[1])
        else:
            model.weights.append(values.to(low))
            if beside is not None:
                rest = values - values.to(beside).float() if form == "kahan" else values
                model.beside.append(rest.nan_to_num(0.0, 0.0, 0.0).to(beside))
        model.gradients.append(torch.randn(size, generator=draw).to(gradient))
        model.first.append((torch.randn(size, generator=draw) * 0.1).to(state))
        model.second.append((torch.randn(size, generator=draw) ** 2 * 0.01).to(state))
        model.steps.append(torch.tensor(float(n % 2) * 6))
    return model


@cache
def noise(tensor: int, stream: int, count: int) -> Tensor:
    return reference.noise(DRAWS, tensor, stream, count)


def noises(model: Model, n: int) -> list[Tensor | None]:
    chance = model.form == "stochastic" or any(t[0].dtype is BF16 for t in (model.first, model.second) if t)
    size = model.weights[n].numel()
    return [noise(START + n, stream, size) if chance else None for stream in range(3)]


def expected(model: Model, optimizer: str, lr: float, settings: dict[str, Any]) -> Model:
    """What `updates` makes of a copy of `model`."""
    model = model.copy()
    for n, weight in enumerate(model.weights):
        beside = model.beside[n] if model.beside else None
        shared = (model.gradients[n], model.factor, noises(model, n), model.form, lr)
        first = model.first[n] if model.first else None
        if optimizer == "adam_":
            assert first is not None
            reference.adam_(weight, beside, first, model.second[n], model.steps[n], *shared, **settings)
        elif optimizer == "sgd_":
            reference.sgd_(weight, beside, first, *shared, **settings)
        else:
            assert first is not None
            reference.lion_(weight, beside, first, *shared, **settings)
    return model


def run(model: Model, optimizer: str, lr: float, settings: dict[str, Any], rate: Tensor | None = None) -> Model:
    """What the operator makes of a copy of `model`."""
    model = model.copy()
    lists = [model.weights, model.beside, model.first]
    if optimizer == "adam_":
        lists += [model.second, model.steps]
    getattr(ops, optimizer)(*lists, *model.given(rate), lr, *settings.values())
    return model


def same(one: Model, other: Model) -> bool:
    pairs = zip(one.written(), other.written(), strict=True)
    return all(a.dtype is b.dtype and torch.equal(patterns(a), patterns(b)) for a, b in pairs)


Settings = dict[str, Any]
ADAM: Settings = {
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": True,
    "maximize": False,
}
SGD: Settings = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "maximize": False}
LION: Settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "maximize": False}
SETTINGS = {"adam_": ADAM, "sgd_": SGD, "lion_": LION}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("adam_", {}),
    ("adam_", {"decoupled": False, "maximize": True}),
    ("adam_", {"decoupled": False, "weight_decay": 0.0}),
    ("sgd_", {}),
    ("sgd_", {"nesterov": False, "maximize": True}),
    ("sgd_", {"weight_decay": 0.0}),
    ("lion_", {}),
    ("lion_", {"maximize": True}),
]


@compiled
@pytest.mark.parametrize("gradient", [FP32, BF16, HALF])
@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize(("form", "low", "beside"), FORMS)
def test_every_update_is_bit_equal_to_its_meaning(
    form: str, low: torch.dtype, beside: torch.dtype | None, state: torch.dtype, gradient: torch.dtype
) -> None:
    model = make(form, low, beside, gradient, state, special=True)
    for optimizer, other in VARIANTS:
        settings = SETTINGS[optimizer] | other
        got = run(model, optimizer, 3e-3, settings)
        assert same(got, expected(model, optimizer, 3e-3, settings)), (optimizer, other)
        assert not same(got, model)


# ------------------------------------------------------------------ how it is shared out, and what is left alone


@compiled
@pytest.mark.parametrize(("form", "low", "beside"), [FORMS[3], FORMS[8]])
def test_results_do_not_depend_on_the_number_of_threads(
    form: str, low: torch.dtype, beside: torch.dtype | None
) -> None:
    model = make(form, low, beside, BF16, BF16, sizes=(3, 70_001, 512, 30_000, 0, 5))
    torch.set_num_threads(1)
    alone, norms = run(model, "adam_", 1e-2, ADAM), ops.norms(model.gradients)
    assert same(alone, expected(model, "adam_", 1e-2, ADAM))
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert same(run(model, "adam_", 1e-2, ADAM), alone)
        assert torch.equal(ops.norms(model.gradients), norms)


@compiled
@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_bad_step_writes_nothing(optimizer: str) -> None:
    model = make("copy", FP32, BF16)
    model.gradients[3][100] = math.nan
    model.bad = torch.tensor(True)
    assert same(run(model, optimizer, 1e-2, SETTINGS[optimizer]), model)


@compiled
def test_gradients_that_are_not_finite_harm_their_own_elements_only() -> None:
    model = make("split", BF16, torch.int16)
    clean = run(model, "adam_", 1e-2, ADAM)
    for gradient in model.gradients:
        gradient[: len(SPECIAL)] = SPECIAL[: len(gradient)]
    got = run(model, "adam_", 1e-2, ADAM)
    assert all(
        torch.equal(a[len(SPECIAL) :], b[len(SPECIAL) :]) for a, b in zip(got.weights, clean.weights, strict=True)
    )
    assert same(got, expected(model, "adam_", 1e-2, ADAM))


@compiled
@pytest.mark.parametrize("optimizer", SETTINGS)
@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_a_rate_on_the_device_goes_before_the_number(optimizer: str, dtype: torch.dtype) -> None:
    model, rate = make("plain", FP32, None), torch.tensor(0.013, dtype=dtype)
    got = run(model, optimizer, math.nan, SETTINGS[optimizer], rate)
    assert same(got, expected(model, optimizer, float(rate), SETTINGS[optimizer]))


@compiled
def test_sgd_without_momentum_has_no_state() -> None:
    model = make("copy", FP32, BF16)
    model.first = []
    settings = SGD | {"momentum": 0.0, "nesterov": False}
    assert same(run(model, "sgd_", 1e-2, settings), expected(model, "sgd_", 1e-2, settings))


@compiled
def test_sizes_that_differ_are_an_error_and_nothing_is_written() -> None:
    model = make("plain", FP32, None)
    model.gradients[2] = torch.zeros(8)
    kept = model.copy()
    with pytest.raises(ValueError, match=r"gradients and weights differ in size: \[1, 0, 8,"):
        ops.sgd_(model.weights, [], model.first, *model.given(), 1e-2, *SGD.values())
    assert same(model, kept)


@compiled
def test_rounding_by_chance_without_draws_is_an_error() -> None:
    for model in (make("stochastic", BF16, None), make("plain", FP32, None, state=BF16)):
        kept = model.copy()
        given = (model.gradients, model.factor, model.bad, None, 0, model.form, None)
        with pytest.raises(ValueError, match="which needs `draws`"):
            ops.sgd_(model.weights, [], model.first, *given, 1e-2, *SGD.values())
        assert same(model, kept)


@compiled
@pytest.mark.parametrize(("form", "low", "beside"), FORMS)
def test_what_lies_around_a_tensor_is_left_alone(form: str, low: torch.dtype, beside: torch.dtype | None) -> None:
    model = make(form, low, beside, BF16, BF16, sizes=(1, 37, 1025))
    fenced, fences = model.copy(), []
    for name in ("weights", "beside", "first", "second"):
        for n, tensor in enumerate(getattr(model, name)):
            memory = torch.full((tensor.numel() + 200,), 77, dtype=tensor.dtype)
            memory[100:-100] = tensor
            getattr(fenced, name)[n] = memory[100:-100]
            fences.append(memory)
    lists = (fenced.weights, fenced.beside, fenced.first, fenced.second, fenced.steps)
    ops.adam_(*lists, *fenced.given(), 1e-2, *ADAM.values())
    assert same(fenced, expected(model, "adam_", 1e-2, ADAM))
    assert all(bool((fence[:100] == 77).all() and (fence[-100:] == 77).all()) for fence in fences)


# ------------------------------------------------------------------ rounding, over all there is


STILL: Settings = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


@compiled
def test_every_fp16_and_every_bf16_is_read_and_written_exactly() -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (HALF, BF16):
        low = words.view(dtype)
        zeros = torch.zeros(2**16)
        reading = Model(form="plain", weights=[zeros], first=[-zeros], gradients=[low], factor=torch.tensor(1.0))
        got = run(reading, "sgd_", 0.0, STILL | {"momentum": 0.9})
        assert torch.equal(patterns(got.first[0]), patterns(low.float()))  # -0.0 * 0.9 + low
        writing = Model(form="plain", weights=[low], gradients=[zeros])
        assert same(run(writing, "sgd_", 0.0, STILL), writing)


@compiled
def test_rounding_to_even_is_torchs_at_every_number_halfway_point_and_neighbour() -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (HALF, BF16):
        value = words.view(dtype)
        value = value[value.isfinite()].float().sort().values
        middle = (value[1:].double() + value[:-1].double()).mul(0.5).float()
        wide = torch.cat([value, middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(0.0))])
        wide = torch.cat([wide, torch.tensor([65519.9, 65520.0, 7e4, 3.4e38, -3.4e38, math.inf, math.nan, 1e-45])])
        model = Model(form="copy", weights=[wide], beside=[torch.zeros_like(wide, dtype=dtype)])
        model.gradients = [torch.zeros_like(wide)]
        got = run(model, "sgd_", 0.0, STILL)
        assert torch.equal(patterns(got.beside[0]), patterns(wide.to(dtype)))


# ------------------------------------------------------------------ against torch's own optimizers


def ulps(a: Tensor, b: Tensor) -> float:
    """Largest relative distance, in units of 2**-23."""
    return float(((a - b).abs() / (b.abs().clamp(min=2.0**-10) * 2.0**-23)).max())


@compiled
@pytest.mark.parametrize(("optimizer", "bound"), [("adam_", 8), ("sgd_", 8)])
def test_a_hundred_steps_stay_near_torchs_fused_optimizer(optimizer: str, bound: int) -> None:
    model = make("plain", FP32, None, sizes=(1000, 33))
    model.weights = [torch.rand_like(w) + 0.5 for w in model.weights]
    model.first, model.second = ([torch.zeros_like(w) for w in model.weights] for _ in range(2))
    model.steps = [torch.tensor(0.0) for _ in model.weights]
    model.factor = torch.tensor(1.0)
    theirs = [torch.nn.Parameter(w.clone()) for w in model.weights]
    torchs: torch.optim.Optimizer = (
        torch.optim.AdamW(theirs, lr=1e-3, fused=True)
        if optimizer == "adam_"
        else torch.optim.SGD(theirs, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True)
    )
    draw = torch.Generator().manual_seed(1)
    for _ in range(100):
        model.gradients = [torch.randn(w.shape, generator=draw) for w in model.weights]
        for parameter, gradient in zip(theirs, model.gradients, strict=True):
            parameter.grad = gradient.clone()
        torchs.step()
        model = run(model, optimizer, 1e-3, SETTINGS[optimizer])
    distance = max(ulps(a, b.detach()) for a, b in zip(model.weights, theirs, strict=True))
    assert distance <= bound, distance


# ------------------------------------------------------------------ norms and the verdict


@compiled
@pytest.mark.parametrize("dtype", [FP32, BF16, HALF])
def test_norms_are_exact_to_two_ulps(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    tensors = [torch.randn(size, generator=draw).to(dtype) for size in (0, 1, 7, 63, 65, 4095, 4096, 4097, 300_001)]
    exact = torch.stack([t.double().norm() for t in tensors])
    got = ops.norms(tensors)
    assert got.dtype is FP32 and torch.all((got.double() - exact).abs() <= 2 * 2.0**-23 * exact)


@compiled
def test_norms_of_mixed_formats_say_where_something_is_not_finite() -> None:
    tensors = [torch.ones(5000), torch.ones(9000, dtype=BF16), torch.ones(3, dtype=HALF), torch.full((9,), 1e18)]
    assert ops.norms(tensors)[:2].tolist() == pytest.approx([5000**0.5, 9000**0.5])
    tensors[1][8999], tensors[2][0] = math.nan, -math.inf
    got = ops.norms([*tensors, torch.full((9,), 3e19)])
    assert got[1].isnan() and got[2:].tolist() == [math.inf, float(got[3]), math.inf]
    assert got[3] == pytest.approx(3e18)  # 9 squares of 1e18 are below the largest fp32, those of 3e19 above


@compiled
@pytest.mark.parametrize("divisor", [None, 1.0, 0.5, 65536.0])
@pytest.mark.parametrize("clip", [None, 1.0, 0.3, 1e6])
def test_the_verdict_is_that_of_its_meaning(divisor: float | None, clip: float | None) -> None:
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
    assert bad and really and torch.equal(patterns(norm), patterns(want))


@compiled
def test_the_verdict_of_no_gradients_is_that_nothing_is_wrong() -> None:
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
from halfstep.kernels.choose import load_kernels, norms_for
from halfstep.kernels.eager import norms as eager_norms
from halfstep.kernels import choose
tensors = [torch.arange(9.0), torch.ones(3, dtype=torch.bfloat16)]
for changes in json.loads(sys.argv[1]):
    os.environ.update(changes)
    choose._loaded.cache_clear()
    reason = load_kernels("cpu")
    assert reason == load_kernels("cpu") == choose.why_no_kernels(tensors[0])
    assert torch.equal(norms_for(tensors), eager_norms.norms(tensors))
    print(reason)
"""


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="needs a shell script as a compiler")
def test_where_it_cannot_be_had_the_reason_is_a_sentence_and_norms_are_as_before(tmp_path: Path) -> None:
    script = tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] || { echo 'In file x:' >&2; echo 'x:1: error: no' >&2; exit 1; }\n"
    )
    script.chmod(0o755)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HALFSTEP_NATIVE": ""}
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
    callers = [threading.Thread(target=compiler.compiled) for _ in range(2)]  # as two processes do: without the lock
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    (file,) = (tmp_path / "halfstep").iterdir()
    whole = file.stat().st_size
    file.write_bytes(b"damaged")
    assert compiler.library().halfstep_norms and file.stat().st_size == whole
    assert compiler.compiled() == file and list(file.parent.iterdir()) == [file]


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
