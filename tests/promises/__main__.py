"""Write the tables of docs/promises.md: ``python -m tests.promises``; part of `make tables`."""

from __future__ import annotations

from tests.promises.page import PAGE, made

if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")
