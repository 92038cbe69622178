"""Every test starts and ends without amp's state: no casts, no registered functions, no name `apex`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfstep.compat import apex
from halfstep.compat.apex.amp import _amp_state
from halfstep.compat.apex.amp.handle import close_casts, take_registered


@pytest.fixture(autouse=True)
def fresh_amp(clean_start: None) -> Iterator[None]:
    """Reset the state of the process; `clean_start` then checks that no region is left."""
    _amp_state.__init__()  # type: ignore[misc]
    yield
    close_casts()
    take_registered()
    apex.uninstall()
    _amp_state.__init__()  # type: ignore[misc]
