"""Every name that docs/compat_megengine.md lists as there is called with MegEngine's arguments, and gives its value."""

from __future__ import annotations

from types import ModuleType

import pytest

import halfstep.compat.megengine as mge
from tests.compat.calls import called, check
from tests.compat.megengine.calls import CALLS as OTHERS
from tests.compat.megengine.functional_calls import CALLS as FUNCTIONS
from tests.compat.name_table import resolve, rows

CALLS = {**OTHERS, **FUNCTIONS}


@pytest.mark.parametrize("name", CALLS)
def test_a_name_does_what_megengines_does(name: str) -> None:
    check(*CALLS[name]())


def test_every_name_of_the_page_is_called() -> None:
    listed = {name for row in rows("compat_megengine.md") if row.verdict != "absent" for name in row.names}
    functions = {name for name in listed if not isinstance(resolve(mge, name), ModuleType)}
    assert functions == called(CALLS), functions ^ called(CALLS)


def test_the_layers_are_under_both_addresses() -> None:
    for name in mge.functional.nn.__all__:
        assert getattr(mge.functional, name) is getattr(mge.functional.nn, name)
    assert mge.functional.vision.interpolate is mge.functional.interpolate
