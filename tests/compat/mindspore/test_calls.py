"""Every name that docs/compat_mindspore.md lists as there is called with MindSpore's arguments, and gives its value."""

from __future__ import annotations

import pytest

from tests.compat.calls import called, check
from tests.compat.mindspore.calls import CALLS
from tests.compat.mindspore.test_docs import ROWS


@pytest.mark.filterwarnings("ignore:.*not finite")  # a step with an inf in its batch is one of the calls
@pytest.mark.parametrize("name", CALLS)
def test_a_name_does_what_mindspores_does(name: str) -> None:
    check(*CALLS[name]())


def test_every_name_of_the_page_is_called() -> None:
    listed = {name for name, status, _ in ROWS if status != "absent"}
    assert listed == called(CALLS), listed ^ called(CALLS)
