from __future__ import annotations

import copy
import math
import random
import statistics
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import halfstep as hs
from halfstep.tasks.measure import SavedForBackward, difference, state_bytes, student_quantile
from halfstep.timing import Ratio, paired_ratio

TABLE = {1: 6.313751515, 2: 2.919985580, 3: 2.353363435, 4: 2.131846786, 9: 1.833112933, 30: 1.697260887}
"""95 % quantiles of Student's t, from the printed tables."""


def test_student_quantiles_are_those_of_the_tables() -> None:
    for freedom, value in TABLE.items():
        assert student_quantile(0.95, freedom) == pytest.approx(value, abs=1e-8)
    normal = statistics.NormalDist().inv_cdf(0.95)
    assert student_quantile(0.95, 100_001) == pytest.approx(normal, abs=1e-4)


@given(freedom=st.integers(1, 60), probability=st.floats(0.55, 0.999))
def test_student_quantiles_are_scipys(freedom: int, probability: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert student_quantile(probability, freedom) == pytest.approx(float(stats.t.ppf(probability, freedom)), rel=1e-7)


@pytest.mark.parametrize(
    ("values", "higher", "verdict"),
    [
        ([97.0, 97.1, 96.9, 97.0, 97.1], True, "within the margin"),
        ([95.0, 95.1, 94.9, 95.0, 95.1], True, "worse"),  # the seeded fault: a real loss is never noise
        ([95.0, 95.1, 94.9, 95.0, 95.1], False, "better"),
        ([99.0, 99.1, 98.9, 99.0, 99.1], True, "better"),
        ([99.0, 99.1, 98.9, 99.0, 99.1], False, "worse"),
        ([99.0, 95.0, 97.0, 98.0, 96.0], True, "undecided"),  # equal means, but wide intervals
        ([97.0, 97.0, math.nan, 97.0, 97.0], True, "diverged"),
        ([97.0, 97.0, math.inf, 97.0, 97.0], True, "diverged"),
    ],
)
def test_verdicts(values: list[float], higher: bool, verdict: str) -> None:
    found = difference(values, [97.0] * 5, 1.0, higher=higher)
    assert found.verdict == verdict and found.enough


def test_the_interval_is_students() -> None:
    found = difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 1.0, higher=True)
    half = TABLE[2] / math.sqrt(3)
    assert found.mean == 2.0 and not found.enough
    assert found.low == pytest.approx(2.0 - half) and found.high == pytest.approx(2.0 + half)


def test_one_seed_decides_nothing() -> None:
    found = difference([97.0], [97.0], 1.0, higher=True)
    assert (found.mean, found.low, found.high, found.verdict, found.enough) == (0.0, None, None, "undecided", False)


def test_pairing_cancels_what_disturbs_a_whole_round() -> None:
    """A machine that gets slower and slower: ratios of medians over different rounds would not see 5 %."""
    shuffle = random.Random(0)
    load = [1.0 + i / 10 + shuffle.random() for i in range(200)]
    found = paired_ratio([1.05 * t for t in load], load)
    assert found.median == pytest.approx(1.05, abs=1e-12) and found.rounds == 200
    assert found.low == pytest.approx(1.05) and found.high == pytest.approx(1.05)
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])


def test_the_medians_interval_covers_it_nine_times_in_ten() -> None:
    source = random.Random(1)
    hits = 0
    for _ in range(400):
        found = paired_ratio([source.lognormvariate(0.0, 0.3) for _ in range(60)], [1.0] * 60)
        hits += found.low <= 1.0 <= found.high
    assert 0.87 <= hits / 400 <= 0.97


def test_a_difference_finer_than_identical_programs_is_undecided() -> None:
    control = Ratio(median=1.002, low=0.99, high=1.01, rounds=100)
    assert Ratio(median=1.008, low=1.005, high=1.011, rounds=100).finer_than(control)
    assert Ratio(median=1.03, low=0.99, high=1.08, rounds=100).finer_than(control)
    assert not Ratio(median=1.03, low=1.02, high=1.04, rounds=100).finer_than(control)
    assert not Ratio(median=0.70, low=0.69, high=0.71, rounds=100).finer_than(control)


# ------------------------------------------------------------------ bytes


def test_state_is_counted_to_the_byte() -> None:
    model = nn.Linear(4, 3)  # 15 parameters
    model.register_buffer("table", torch.zeros(5), persistent=False)
    assert state_bytes(model) == 4 * 15 + 4 * 5
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(2, 4)).sum().backward()
    assert state_bytes(model) == 4 * 15 + 4 * 5 + 4 * 15  # gradients that stay are memory too
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert state_bytes(model, optimizer) == 4 * 15 + 4 * 5 + 2 * 4 * 15 + 2 * 4  # two moments, two step counts


def test_shared_memory_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert state_bytes(model) == state_bytes(model, model, {"again": [model[0].weight.T]}) == 64


def test_precise_weights_behind_low_ones_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = hs.Policy.of("O2", dtype="bf16")
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy)
    step(torch.ones(2, 64))
    low, behind = 2 * 64 * 64, {"master": 4, "split": 2}[step.policy.master] * 64 * 64
    assert state_bytes(step) >= low + behind


class Hidden:
    __slots__ = ("inside",)

    def __init__(self) -> None:
        self.inside = {"deep": [(torch.zeros(7),)]}


def test_nothing_hides_behind_an_attribute() -> None:
    assert state_bytes(Hidden()) == 28


def test_weak_references_keep_nothing() -> None:
    other, own = nn.Linear(8, 8), nn.Linear(2, 2, bias=False)
    known = weakref.WeakKeyDictionary({other: own})
    found = weakref.WeakValueDictionary({"other": other})
    assert state_bytes({"known": known, "found": found}) == 16  # the value under the weak key is kept


def test_a_second_step_is_not_counted_with_the_first() -> None:
    def prepared() -> hs.TrainStep:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = hs.Policy.of("pure", dtype="bf16")
        return hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy)

    first, alone = prepared(), prepared()
    alone(torch.ones(2, 64))
    counted = state_bytes(alone)
    first(torch.ones(2, 64))
    alone(torch.ones(2, 64))  # each hears of the other's optimizer
    assert state_bytes(alone) == counted


def test_a_tensor_made_of_others_has_their_bytes() -> None:
    parts = TwoTensor(torch.zeros(4), torch.zeros(4))
    assert state_bytes(parts) == state_bytes([parts, parts.a]) == 32


def test_saved_for_backward_is_counted_to_the_byte_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    twin = copy.deepcopy(model)
    x = torch.randn(3, 6)
    with SavedForBackward(model) as saved:
        loss = model(x).sum()
    assert saved.bytes == 4 * 3 * 6 + 4 * 3 * 5  # the input, and relu's output, which the next layer shares; no weights
    loss.backward()
    twin(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


def test_low_activations_are_seen_to_be_smaller() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    found = {}
    for policy in ("O0", "mixed"):
        for dtype in ("bf16", "fp16"):
            with hs.autocast("cpu", policy=hs.Policy.of(policy, dtype=dtype)), SavedForBackward(model) as saved:
                model(torch.randn(128, 64)).sum()
            found[policy, dtype] = saved.bytes
    assert found["mixed", "bf16"] < 0.75 * found["O0", "bf16"]
    assert found["mixed", "fp16"] < 0.75 * found["O0", "fp16"]  # emulated: its own autograd functions are seen as well
