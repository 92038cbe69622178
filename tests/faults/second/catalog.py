"""The lists of the second set, written without a look at what the instruments say of it."""

from __future__ import annotations

from tests.faults.case import Control, Fault
from tests.faults.catalog import entries
from tests.faults.second import backward, forward, healthy, losses, quiet, state

__all__ = ["SECOND_A", "SECOND_B", "SECOND_CONTROLS", "SECOND_DEFINITIONS"]

SECOND_DEFINITIONS = ("backward", "common", "forward", "healthy", "losses", "quiet", "state")
"""Files, without their ending, whose hashes `frozen.txt` keeps."""

SECOND_A = entries(Fault, forward, losses, backward, state)
"""Faults that end in a non-finite step."""

SECOND_B = entries(Fault, quiet)
"""Faults that stay finite."""

SECOND_CONTROLS = entries(Control, healthy)
"""Healthy programs."""
