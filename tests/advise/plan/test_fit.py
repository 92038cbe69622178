"""Whether a plan fits a GPU, the table of GPUs, and the search for the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from halfstep.advise.plan import MemoryPlan, PlanError, fit_of, gpu_named, gpu_names, largest_batch
from halfstep.advise.plan.memory import MOST_PLANS, gib
from tests.advise.plan.plans import GIB, made


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [(40.0, "fits"), (71.4, "fits"), (71.5, "undecided"), (87.2, "undecided"), (87.3, "does not fit")],
)
def test_a_verdict_holds_for_a_peak_a_tenth_higher_or_lower(peak: float, verdict: str) -> None:
    fit = fit_of(made(peak), "a100-80")  # 78.55 GiB
    assert fit.verdict == verdict
    assert fit.spare == fit.usable - fit.need


def test_the_first_step_and_the_preparation_count_too() -> None:
    first = fit_of(made(40.0, first_peak=60 * GIB), "h100")
    prepared = fit_of(made(40.0, setup_peak=90 * GIB), "h100")
    assert (first.when, first.need, first.verdict) == ("first step", 60 * GIB, "fits")
    assert (prepared.when, prepared.verdict) == ("preparation", "does not fit")


def test_the_table_of_gpus() -> None:
    for name in gpu_names():
        card = gpu_named(name)
        assert card.name == name and card.source.startswith("https://") and card.seen
        assert set(card.formats) <= {"bf16", "fp16"} and "fp16" in card.formats
        assert 0.85 < card.total / card.sold <= 1.0, name  # GiB that torch finds over the gigabytes on the box
        assert 0.5 * GIB < card.total * GIB - card.usable < GIB
    assert {"h200", "h100", "a100-80", "a100-40", "l40s", "4090", "3090", "a10g", "v100-32", "t4", "mi300x"} <= set(
        gpu_names()
    )


@pytest.mark.parametrize(
    ("written", "name"),
    [("H200", "h200"), ("A100", "a100-80"), ("NVIDIA A100 40GB", "a100-40"), ("rtx 4090", "4090"), ("Tesla T4", "t4")],
)
def test_names_as_they_are_written(written: str, name: str) -> None:
    assert gpu_named(written).name == name


def test_a_size_is_a_gpu_and_an_unknown_name_is_an_error() -> None:
    assert gpu_named("96GiB").usable == int(95.4 * GIB)
    for wrong in ("h20", "0.1GiB", "", "96 bananas"):
        with pytest.raises(PlanError, match="unknown GPU .* there are h200, h100"):
            gpu_named(wrong)


# ------------------------------------------------------------------ largest batch


def searched(need: Callable[[int], float], batch: int) -> tuple[int | None, int, bool, list[int]]:
    asked: list[int] = []

    def plan_of(size: int) -> MemoryPlan:
        asked.append(size)
        return made(need(size))

    found = largest_batch(plan_of, made(need(batch)), batch, "a100-80")
    return found.batch, found.plans, found.proved, asked


ROOM = 78.55 / 1.1  # GiB


@pytest.mark.parametrize("batch", [1, 8, 70, 100, 5000])
def test_affine_bytes_take_few_plans_and_the_next_batch_is_planned_too(batch: int) -> None:
    found, plans, proved, asked = searched(lambda size: 2.0 + 0.7 * size, batch)
    assert found == int((ROOM - 2.0) / 0.7) == 99 and proved
    assert {99, 100} <= {*asked, batch} and plans <= 5


def test_bytes_with_steps_are_searched_until_a_batch_fits_and_the_next_does_not() -> None:
    found, _, proved, asked = searched(lambda size: 2.0 + 0.5 * (size + 40 * (size // 60)), 16)
    sizes = range(1, 500)
    wanted = max(size for size in sizes if 2.0 + 0.5 * (size + 40 * (size // 60)) <= ROOM)
    assert found == wanted and proved and {wanted, wanted + 1} <= set(asked)


def test_a_peak_that_parameters_make_before_activations_do() -> None:
    found, plans, proved, _ = searched(lambda size: max(40 + 1e-4 * size, 10 + 5e-3 * size, 0.02 * size - 100), 64)
    assert found == int((ROOM + 100) / 0.02) and proved and plans <= MOST_PLANS


def test_what_never_fits_and_what_does_not_grow() -> None:
    assert searched(lambda size: 100.0 + size, 16)[0] == 0
    assert searched(lambda size: 100.0, 1)[:3] == (0, 1, True)
    assert searched(lambda size: 10.0, 16)[0] is None


def test_a_search_ends() -> None:
    found, plans, proved, _ = searched(lambda size: 2.0 + 1e-3 * (size % 977) * size**0.5, 16)
    assert plans <= MOST_PLANS
    assert found is None or found >= 16 and not proved or proved


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.50 KiB"), (50 * 2**20, "50.0 MiB"), (130 * GIB, "130 GiB")],
)
def test_bytes_for_readers(size: int, text: str) -> None:
    assert gib(size) == text


def test_bytes_for_readers_grow() -> None:
    sizes = [2**n for n in range(42)]
    assert all(gib(a) != gib(b) for a, b in pairwise(sizes))
