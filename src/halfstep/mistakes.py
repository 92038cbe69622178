"""Mistakes in the order of a training loop's calls: what each is, does, and what to write instead (``mistakes.toml``).

The linter's rules (advise/lint), the verdicts on a loop that runs (lens/box/loop.py), the errors of a loss scaler
(scale/) and the page docs/verdicts/loop.md have their words from here. Each of them adds what it has seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from halfstep.schema import packaged_toml


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake."""

    code: str  # its number: "HS001" to "HS100" if the linter finds it in source, from "HS201" on if only a run shows it
    severity: str  # "error", "warning" or "note"
    title: str  # the mistake in a few words
    why: str  # what it does to training
    fix: str  # what to write instead

    @property
    def remedy(self) -> str:
        """The fix with the number, to stand behind what was seen."""
        return f"{self.fix[0].lower()}{self.fix[1:].rstrip('.').replace('`', '')} ({self.code})"


_TABLE = packaged_toml("mistakes.toml")

MISTAKES: Mapping[str, Mistake] = MappingProxyType({code: Mistake(code, **words) for code, words in _TABLE.items()})
"""Number -> mistake."""
