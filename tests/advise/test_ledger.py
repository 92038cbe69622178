"""Ledger: blocks begin with the first tensor in them and end with the last, by whatever means."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.advise.plan.ledger import Ledger


def note(ledger: Ledger, tensor: torch.Tensor) -> None:
    ledger.note(tensor, "", "op", "forward")


def test_memory_shared_by_tensors_is_one_block_which_ends_with_the_last_of_them() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        whole = torch.empty(6, 4)
        part = whole[2:]
        note(ledger, whole)
        note(ledger, part)
        assert [block.bytes for block in ledger.live()] == [96]
        assert ledger.of(part) is ledger.blocks[0]
        del whole
        assert len(list(ledger.live())) == 1
        del part
    assert list(ledger.live()) == [] and ledger.events == [0, ~0] and not ledger.blocks[0].alive


def test_what_autograd_saves_is_alive_until_the_graph_is_gone() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        x = torch.empty(8, requires_grad=True)
        y = x.exp()  # saves its result
        note(ledger, y)
        loss = y.sum()
        del y
        assert len(list(ledger.live())) == 1
        del loss
    assert list(ledger.live()) == []


def test_an_address_that_comes_again_is_another_block() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        for _ in range(50):
            note(ledger, torch.empty(3))
    assert len(ledger.blocks) == 50 and ledger.events == [e for n in range(50) for e in (n, ~n)]


def test_blocks_are_rounded_up_as_the_allocator_rounds() -> None:
    ledger = Ledger(512)
    with FakeTensorMode():
        kept = [torch.empty(n, dtype=torch.uint8) for n in (0, 1, 512, 513)]
        for tensor in kept:
            note(ledger, tensor)
    assert [block.bytes for block in ledger.blocks] == [0, 512, 512, 1024]


def test_a_resized_storage_is_a_new_block() -> None:
    ledger = Ledger()
    with FakeTensorMode():
        x = torch.empty(4)
        note(ledger, x)
        x.resize_(16)
        ledger.resized(x)
        ledger.resized(x)
    assert [block.bytes for block in ledger.blocks] == [16, 64] and ledger.events == [0, ~0, 1]


def test_passing_memory_comes_and_goes() -> None:
    ledger = Ledger()
    ledger.passing(100, torch.float32, "a", "op", "backward")
    assert ledger.events == [0, ~0] and list(ledger.live()) == [] and ledger.blocks[0].part == "temporaries"
