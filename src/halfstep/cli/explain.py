"""``halfstep explain``: the page on a cause that the black box names."""

from pathlib import Path

from rich.markdown import Markdown

import halfstep as hs
from halfstep.cli.terminal import console, say
from halfstep.errors import TaskError, did_you_mean

PACKAGE = Path(hs.__file__).parent
FOLDERS = (PACKAGE / "verdicts", PACKAGE.parents[1] / "docs" / "verdicts")
"""Of an installed package, which setup.py gives a copy, and of a checkout."""


def carry_out(page: str) -> int:
    """Run the command; return its exit code."""
    out = console()
    texts = pages()
    if not page:
        for name, text in texts.items():
            say(out, f"{name:<12}{text.splitlines()[2].partition('. ')[0]}")
    elif page not in texts:
        raise TaskError(f"there is no page {page!r}; there are {', '.join(texts)}{did_you_mean(page, texts)}")
    elif out.is_terminal:
        out.print(Markdown(texts[page]))
    else:
        print(texts[page])
    return 0


def pages() -> dict[str, str]:
    """Return the pages on causes, name -> Markdown, without the marks that `make tables` needs."""
    folder = next(folder for folder in FOLDERS if folder.is_dir())
    return {
        path.stem: "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if "<!--" not in line)
        for path in sorted(folder.glob("*.md"))
    }
