"""Every name that docs/compat_apex.md lists as there is called with Apex's arguments, and gives Apex's value."""

from __future__ import annotations

import pytest

from tests.compat.apex.calls import CALLS
from tests.compat.apex.test_page import rows
from tests.compat.calls import called, check


@pytest.mark.parametrize(
    "name",  # those of apex.parallel start a process
    [pytest.param(name, marks=pytest.mark.slow) if name.startswith("parallel.") else name for name in CALLS],
)
def test_a_name_does_what_apexs_does(name: str) -> None:
    check(*CALLS[name]())


def test_every_name_that_works_is_called() -> None:
    listed = rows()
    missing = {name for name, (status, _) in listed.items() if status == "works"} - called(CALLS)
    assert not missing, missing
    unlisted = called(CALLS) - {name for name, (status, _) in listed.items() if status != "absent"}
    assert not unlisted, unlisted
