"""Regions: torch.autocast's meaning, nesting, re-entry, recursion, exceptions, threads, wrong order, compile."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cast.state import STATE
from halfstep.errors import PolicyError, RegionError
from tests.products import sampled

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32


def ambient() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
        STATE.mode,
        STATE.bound,
        len(STATE.frames),
    )


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = ambient()
    yield
    assert ambient() == before


X, W = torch.randn(4, 8), torch.randn(8, 8)


def mm_dtype() -> torch.dtype:
    return F.linear(X, W).dtype


def test_signature_and_meaning_of_torch_autocast() -> None:
    with hs.autocast("cpu"):
        assert mm_dtype() is BF16
        assert torch.is_autocast_enabled("cpu")
    with hs.autocast("cpu", torch.float16):
        assert mm_dtype() is HALF
    with hs.autocast("cpu", enabled=False):
        assert mm_dtype() is FP32
    with hs.autocast(device_type="cpu", dtype=BF16, cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()


def test_preset_torch_is_torch_autocast_and_pushes_no_mode() -> None:
    with hs.autocast("cpu", dtype=BF16) as region:
        assert region.recipe.mode is None
        ours = [F.linear(X, W), F.softmax(X, -1), F.mse_loss(X, X), torch.cat([X, X.bfloat16()])]
    with torch.autocast("cpu", dtype=BF16):
        theirs = [F.linear(X, W), F.softmax(X, -1), F.mse_loss(X, X), torch.cat([X, X.bfloat16()])]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


def test_regions_of_different_formats_nest() -> None:
    """The weight cache of torch hands the outer format's copy to the inner region (RuntimeError there)."""
    layer = nn.Linear(8, 8)
    with hs.autocast("cpu", dtype=BF16):
        assert layer(X).dtype is BF16
        with hs.autocast("cpu", dtype=HALF):
            assert layer(X).dtype is HALF
        assert layer(X).dtype is BF16
        with hs.autocast("cpu", enabled=False):
            assert layer(X).dtype is FP32
        assert layer(X).dtype is BF16


def test_torch_nested_formats_fail_so_the_test_above_can_fail() -> None:
    layer = nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=BF16):
        layer(X)
        with pytest.raises(RuntimeError), torch.autocast("cpu", dtype=HALF):
            layer(X)
    torch.clear_autocast_cache()


def test_one_object_can_be_entered_again() -> None:
    region = hs.autocast(policy="mixed")
    with region:
        with region:
            assert mm_dtype() is not FP32
        assert mm_dtype() is not FP32
    assert mm_dtype() is FP32


def test_recursion_under_the_decorator() -> None:
    seen: list[torch.dtype] = []

    @hs.autocast("cpu", dtype=BF16)
    def recurse(n: int) -> None:
        seen.append(mm_dtype())
        if n:
            recurse(n - 1)
            seen.append(mm_dtype())

    recurse(3)
    assert set(seen) == {BF16}
    assert mm_dtype() is FP32


@pytest.mark.parametrize("policy", ["torch", "mixed", "O1"])
def test_exceptions_restore(policy: str) -> None:
    with pytest.raises(ZeroDivisionError), hs.autocast(policy=policy), hs.autocast("cpu", dtype=HALF):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), hs.autocast(policy=policy):
        F.linear(X, torch.randn(3, 3))
    with hs.autocast(policy=policy), pytest.raises(RuntimeError):
        F.linear(X, torch.randn(3, 3))


def test_inner_torch_autocast_off_switches_rules_off() -> None:
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
        with torch.autocast("cpu", enabled=False):
            assert F.layer_norm(X, (8,)).dtype is FP32
            assert mm_dtype() is FP32
        assert F.layer_norm(X, (8,)).dtype is BF16


def test_inner_torch_autocast_of_another_format_is_followed() -> None:
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")), torch.autocast("cpu", dtype=HALF):
        assert F.layer_norm(X, (8,)).dtype is HALF


def test_the_inner_policy_decides_alone() -> None:
    outer = hs.Policy.of("mixed", dtype="bf16").with_ops(fp32=["softmax"])
    low = X.bfloat16()
    with hs.autocast(policy=outer):
        assert F.softmax(low, -1).dtype is FP32
        with hs.autocast(policy=hs.Policy.of("torch", dtype="bf16")):
            assert F.softmax(low, -1).dtype is BF16
        with hs.autocast(policy="O0"):
            assert F.softmax(low, -1).dtype is BF16
        assert F.softmax(low, -1).dtype is FP32


def test_other_threads_are_not_in_the_region() -> None:
    found: list[torch.dtype] = []
    with hs.autocast("cpu", dtype=BF16):
        thread = threading.Thread(target=lambda: found.append(mm_dtype()))
        thread.start()
        thread.join()
    assert found == [FP32]


def test_one_object_in_several_threads() -> None:
    region = hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16"))
    barrier, found = threading.Barrier(4), list[torch.dtype]()

    def work() -> None:
        with region:
            barrier.wait()
            found.append(mm_dtype())
            barrier.wait()
        found.append(mm_dtype())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(found, key=str) == [BF16] * 4 + [FP32] * 4


def test_wrong_nesting_names_both_places_and_restores_the_state() -> None:
    a = hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16"))
    b = hs.autocast(policy=hs.Policy.of("O1", dtype="fp16"))
    a.__enter__()
    b.__enter__()
    with pytest.raises(RegionError, match=r"test_autocast\.py:\d+.*test_autocast\.py:\d+.*yield or await") as caught:
        a.__exit__(None, None, None)
    assert str(caught.value).count("test_autocast.py") == 2
    assert F.linear(X, W).dtype is HALF  # b is still open
    b.__exit__(None, None, None)


def test_suspended_generator() -> None:
    def suspended() -> Generator[int, None, None]:
        with hs.autocast("cpu", dtype=BF16):
            yield 1

    generator = suspended()
    with pytest.raises(RegionError, match="was left while the one entered"):
        with hs.autocast("cpu", dtype=HALF):
            next(generator)
    with pytest.raises(RegionError) if STATE.frames == [] else _nothing():
        generator.close()


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


def test_generators_and_coroutines_cannot_be_decorated() -> None:
    with pytest.raises(RegionError, match="suspended by yield or await"):

        @hs.autocast("cpu")
        def generate() -> Iterator[int]:
            yield 1


def test_custom_forward_and_backward_see_the_region() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), mm_dtype()))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), mm_dtype()))
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
        y = Double.apply(x)  # type: ignore[no-untyped-call]
    y.sum().backward()
    assert seen == [(True, BF16), (True, BF16)]


def test_custom_forward_with_cast_inputs_runs_with_rules_off() -> None:
    seen: list[torch.dtype] = []

    class Norm(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(F.layer_norm(x, (8,)).dtype)
            return x

    with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
        Norm.apply(X.bfloat16())  # type: ignore[no-untyped-call]
    assert seen == [FP32]


@pytest.mark.parametrize("policy", ["torch", "mixed", "O1"])
def test_weights_changed_in_place_inside_a_region_are_seen(policy: str) -> None:
    if policy == "torch":
        pytest.skip("torch's own cache is in charge there")
    norm = nn.LayerNorm(8)
    with hs.autocast(policy=hs.Policy.of(policy, dtype="bf16")):
        before = norm(X)
        with torch.no_grad():
            norm.weight.mul_(2)
        assert torch.equal(norm(X), before * 2)


def formats_within(region: Any, suspended: Any) -> list[Any]:
    """Return the state of autocast and the format of a product in regions opened in regions that are off."""
    found: list[Any] = []

    def look() -> None:
        found.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), mm_dtype()))

    def nest(*regions: Any) -> None:
        if not regions:
            look()
            return
        with regions[0]():
            look()
            nest(*regions[1:])

    default = lambda: region("cpu")  # noqa: E731
    for outer in (HALF, BF16, FP32, torch.float64):
        for inner in (None, HALF, BF16, FP32, torch.float64):
            off = lambda inner=inner: region("cpu", inner, enabled=False)  # noqa: E731
            on = lambda inner=inner: region("cpu", inner)  # noqa: E731
            nest(lambda outer=outer: region("cpu", outer), off, default)
            nest(lambda outer=outer: region("cpu", outer), on, default, suspended, default)
    made_outside = [region("cpu"), region("cpu", enabled=False)]
    for made in made_outside:
        nest(lambda: region("cpu", HALF), lambda made=made: made, default)
    return found


@pytest.mark.filterwarnings("ignore:In CPU autocast", "ignore:hs.autocast.dtype=torch.float64")
def test_regions_that_are_off_set_their_format_as_torch_does() -> None:
    """Whatever ran in the process before: recipes are kept, the state of a moment is not."""
    expected = formats_within(torch.autocast, lambda: torch.autocast("cpu", enabled=False))
    for _ in range(2):
        assert formats_within(hs.autocast, hs.suspended) == expected
        assert formats_within(torch.autocast, hs.suspended) == expected


def test_a_policy_that_is_off_sets_its_low_format_and_one_without_any_leaves_it() -> None:
    with torch.autocast("cpu", dtype=HALF):
        with hs.autocast("cpu", policy=hs.Policy.of("mixed", dtype="bf16"), enabled=False):
            assert torch.get_autocast_dtype("cpu") is BF16
        for policy in ("O0", hs.Policy.of("mixed", dtype="fp32")):
            with hs.autocast("cpu", policy=policy):
                assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (False, HALF)


def test_a_float64_region_casts_nothing_and_says_so() -> None:
    with pytest.warns(UserWarning, match="casts nothing, as in torch.autocast"), hs.autocast("cpu", torch.float64):
        assert mm_dtype() is FP32
    with hs.autocast("cpu", torch.float64, enabled=False), hs.autocast("cpu"):  # was switched off: no word
        assert mm_dtype() is FP32
    with pytest.raises(PolicyError, match="torch.float64 is not a format"):
        hs.autocast("cpu", torch.float64, policy="mixed")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "needs a device_type"),
        ((3,), "must be a string"),
        (("cpu", torch.int32), "torch.int32 is not a format a region can lower to"),
        (("cpu", torch.float8_e4m3fn), "use torch.bfloat16 or torch.float16"),
        (("meta",), "does not exist for device_type 'meta'"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        hs.autocast(*arguments)


def test_policies_that_need_a_model() -> None:
    with pytest.raises(PolicyError, match="O2' lowers parameters.*hs.prepare"):
        hs.autocast(policy="O2")
    with pytest.raises(PolicyError, match="has module rules"):
        hs.autocast(policy=hs.Policy.of("mixed").with_modules({"head": "fp32"}))
    with pytest.raises(NotImplementedError):
        hs.autocast(policy="fp8")


def test_decorator_needs_a_function() -> None:
    with pytest.raises(TypeError, match="decorates functions"):
        hs.autocast("cpu")(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "dtype"), sampled(["torch", "mixed", "O1", "O0"], ["bf16", "fp16"], rest=pytest.mark.slow)
)
def test_a_region_in_a_compiled_function_traces_whole(policy: str, dtype: str) -> None:
    torch._dynamo.reset()
    chosen = hs.Policy.of(policy) if policy == "O0" else hs.Policy.of(policy, dtype=dtype)
    region = hs.autocast(policy=chosen)
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)

    @region
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        h = layer(norm(x))
        return h, F.softmax(h, -1)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(X), run(X), strict=True):
        assert got.dtype is want.dtype
        assert torch.allclose(got, want, rtol=2e-2, atol=2e-2)


def test_with_in_a_compiled_function_breaks_the_graph_and_works() -> None:
    torch._dynamo.reset()
    region, layer = hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")), nn.Linear(8, 8)

    def run(x: Tensor) -> Tensor:
        with region:
            return layer(x)  # type: ignore[no-any-return]

    assert torch.compile(run, backend="aot_eager")(X).dtype is BF16


@pytest.mark.parametrize("policy", ["torch", "mixed", "O1"])
def test_a_compiled_function_in_a_region(policy: str) -> None:
    torch._dynamo.reset()
    layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    compiled = torch.compile(lambda x: layer(norm(x)), backend="aot_eager", fullgraph=True)
    with hs.autocast(policy=hs.Policy.of(policy, dtype="bf16")):
        assert compiled(X).dtype is BF16
    assert compiled(X).dtype is FP32


def test_a_policy_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "precision.toml"
    for dtype, want in (("bf16", BF16), ("fp16", HALF)):
        path.write_text(hs.Policy.of("mixed", dtype=dtype).to_toml())
        for spec in (path, str(path)):
            with hs.autocast("cpu", policy=spec):
                assert mm_dtype() is want


def test_missing_units_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.cast.rules import recipe
    from halfstep.policy.resolve import cpu_units

    resolve = importlib.import_module("halfstep.policy.resolve")

    bare = cpu_units({}, "x86_64")
    monkeypatch.setattr(resolve, "units", lambda device: bare)
    make = recipe.recipe_for.__wrapped__
    with pytest.warns(UserWarning, match="no bf16 units.*slower than fp32"):
        make(hs.Policy.of("mixed", dtype="bf16"), ("cpu",))
    with pytest.warns(UserWarning, match="everything stays fp32.*emulated"):
        assert not make(hs.Policy.of("mixed"), ("cpu",)).devices[0][2]
    with pytest.warns(UserWarning, match="many times slower"):
        make(hs.Policy.of("mixed", dtype="fp16", emulate="never"), ("cpu",))
    assert make(hs.Policy.of("mixed", dtype="fp16"), ("cpu",)).mode is not None


# ---------------------------------------------------------------------- copies of weights, and casts switched off


def test_copies_of_weights_end_with_the_outermost_region_that_keeps_any() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16"), cache_enabled=False):  # as a process-wide region has
        with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16"), cache_enabled=True):
            before = layer(x)
        layer.weight.data.add_(1.0)  # nothing tells of this write
        layer.bias.data.zero_()
        assert not STATE.casts
        for cache in (False, True):
            with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16"), cache_enabled=cache):
                after = layer(x)
            assert not torch.equal(before, after)
        layer(x)
        assert not STATE.casts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_region_without_a_cache_casts_again_each_time(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4)
    with hs.autocast("cpu", dtype=dtype, cache_enabled=False):
        before = layer(x)
        layer.weight.data.add_(1.0)
        assert torch.allclose((layer(x) - before).float(), torch.tensor(4.0), atol=0.05)


def test_suspended_switches_regions_and_prepared_models_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    expected = model(x)
    hs.prepare(model, policy=hs.Policy.of("mixed", dtype="bf16", outputs="keep"))
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
        assert model(x).dtype is torch.bfloat16 and (x @ x.T).dtype is torch.bfloat16
        with hs.suspended():
            assert torch.equal(model(x), expected) and (x @ x.T).dtype is torch.float32
            with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
                assert (x @ x.T).dtype is torch.bfloat16
        assert (x @ x.T).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="mine"), hs.suspended():
        raise ValueError("mine")
    assert model(x).dtype is torch.bfloat16


def test_a_model_with_low_parameters_keeps_its_region_where_casts_are_suspended() -> None:
    model = nn.Linear(4, 2)
    hs.prepare(model, policy=hs.Policy.of("O2", dtype="fp16"))
    x = torch.randn(3, 4)
    expected = model(x)
    with hs.suspended():
        found = model(x)
    assert torch.equal(found, expected) and found.dtype is torch.float32


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)])
@pytest.mark.parametrize(("dtype", "low"), [("fp16", HALF), ("bf16", BF16)])
def test_low_weights_of_a_norm_meet_its_fp32_statistics(norm: nn.Module, dtype: str, low: torch.dtype) -> None:
    model: Any = copy.deepcopy(norm)
    x = torch.randn(8, 4, 5)
    expected = model(x)
    hs.prepare(model, policy=hs.Policy.of("O3", dtype=dtype).with_modules({"": "low"}))
    found = model(x)
    assert model.weight.dtype is found.dtype is low
    assert torch.allclose(found.float(), expected, atol=0.05)
    found.sum().backward()
    assert model.weight.grad is not None and model.running_mean.dtype is torch.float32


def test_a_default_is_that_of_the_moment_and_not_of_the_first_use() -> None:
    layer, x = nn.Linear(3, 5), torch.randn(2, 3)
    for dtype in (HALF, BF16, HALF):
        with hs.autocast("cpu", dtype=dtype), hs.autocast("cpu"):
            assert layer(x).dtype is dtype
        with hs.autocast("cpu"):
            assert layer(x).dtype is BF16
    for cache in (False, True, False):
        with hs.autocast("cpu", dtype=BF16, cache_enabled=cache), hs.autocast("cpu", enabled=False):
            assert torch.is_autocast_cache_enabled() is cache


@pytest.mark.parametrize("first", [True, False])
def test_the_cache_flag_of_torch_is_left_as_it_is_found(first: bool) -> None:
    chosen = hs.Policy.of("mixed", dtype="bf16", name=f"cache {first}")  # compiled for the first time below
    for flag in (first, not first):
        with torch.autocast("cpu", cache_enabled=flag):
            with hs.autocast(policy=chosen):
                assert torch.is_autocast_cache_enabled() is flag
            assert torch.is_autocast_cache_enabled() is flag


def suspended_region() -> Generator[None, None, None]:
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16")):
        yield


def test_a_generator_closed_in_a_region_of_torch_does_not_switch_it_off() -> None:
    generator = suspended_region()
    next(generator)
    with torch.autocast("cpu", dtype=BF16):
        with pytest.warns(RuntimeWarning, match=r"entered at .*test_autocast\.py:\d+.*torch.autocast was entered"):
            generator.close()
        assert F.linear(X, W).dtype is BF16
    torch.set_autocast_enabled("cpu", False)  # torch puts back what it found when it was entered
    torch.set_autocast_dtype("cpu", BF16)


def test_a_generator_closed_after_the_region_of_torch_it_began_in_does_not_switch_that_on() -> None:
    generator = suspended_region()
    with torch.autocast("cpu", dtype=BF16):
        next(generator)
    with pytest.raises(RegionError, match=r"left and not entered"):
        next(generator)
    assert not torch.is_autocast_enabled("cpu")


def test_a_generator_closed_where_it_began_is_no_error() -> None:
    generator = suspended_region()
    next(generator)
    generator.close()
    assert not torch.is_autocast_enabled("cpu")
