from __future__ import annotations

import pytest

from halfstep.report import Decimals, Size, counted, listed, minus


@pytest.mark.parametrize(
    ("largest", "number", "plain", "signed"),
    [
        (1.0, -0.333333, "−0.33", "−0.33"),
        (0.0217, 0.0007, "0.0007", "+0.0007"),
        (1.5, -0.0001, "0.00", "0.00"),  # a zero has no sign
        (11.3, 8.0, "8.0", "+8.0"),
        (5000.0, 1234.5, "1234", "+1234"),
    ],
)
def test_numbers_have_the_decimals_that_can_matter(largest: float, number: float, plain: str, signed: str) -> None:
    decimals = Decimals(largest)
    assert (decimals(number), decimals.signed(number)) == (plain, signed)


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([18_340_000, 9_370_000], ["18.3 MB", "9.4 MB"]),
        ([741_000], ["741 kB"]),
        ([1_948], ["1.95 kB"]),
        ([0, 12], ["0 B", "12 B"]),
        ([2_000_000_000, 500_000_000], ["2.00 GB", "0.50 GB"]),
    ],
)
def test_bytes_share_a_unit(counts: list[int], shown: list[str]) -> None:
    size = Size(counts)
    assert [f"{size(count)} {size.unit}" for count in counts] == shown


def test_words() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [counted(1, "seed"), counted(3, "seed")] == ["1 seed", "3 seeds"]
    assert minus("-1 [-2, +3]") == "−1 [−2, +3]"
