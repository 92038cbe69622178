from __future__ import annotations

import pytest

from halfstep.testing.traffic import CHUNK, multi_tensor_launches


@pytest.mark.parametrize(
    ("sizes", "lists", "launches"),
    [
        ([], 1, 0),
        ([0, 0], 1, 0),
        ([1], 1, 1),
        ([1] * 110, 1, 1),  # as many as one list may have
        ([1] * 111, 1, 2),
        ([1] * 53, 4, 2),  # AdamW's four lists hold 36
        ([1] * 30, 5, 1),
        ([1, 0] * 110, 1, 1),  # empty ones take no place
        ([320 * CHUNK], 1, 1),  # all chunks of one launch
        ([320 * CHUNK + 1], 1, 2),
        ([321 * CHUNK] * 2, 1, 3),  # 642 chunks
    ],
)
def test_a_launch_holds_so_many_tensors_and_chunks(sizes: list[int], lists: int, launches: int) -> None:
    assert multi_tensor_launches(sizes, lists) == launches
