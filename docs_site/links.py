"""Links of a Markdown page: where they are, what they lead to, and which place that has on the site.

The pages in docs/ are written for a code host: links are relative and may leave docs/, to examples, sources and
results. On the site such a file has a page of its own below ``source/``. `hooks.py` rewrites links by these functions,
and tests/docs/test_site.py checks them without building the site.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "source/"
"""Where files outside docs/ are on the site."""

CODE = re.compile(r"^( *)(`{3,}|~{3,}).*?^ *\2[^\n]*$|(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.MULTILINE)
NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
REMOTE = re.compile(r"[a-z]+:|//")


@dataclass(frozen=True)
class Link:
    """A relative link: its target as written, from `start` to `end` in the text; the file, and the anchor or ""."""

    target: str
    start: int
    end: int
    file: str
    anchor: str


def masked(text: str) -> str:
    """Return `text` of the same length with spaces in place of code, in blocks and in lines."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def links(text: str, page: str) -> Iterator[Link]:
    """Yield the relative links of a page; `page` and `Link.file` are paths from the repository's root."""
    for found in TARGET.finditer(masked(text)):
        target = found.group(1)
        if REMOTE.match(target):
            continue
        name, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else page
        yield Link(target, found.start(1), found.end(1), file, anchor)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page as a code host makes them: one for each heading, and those written as HTML."""
    plain = CODE.sub(lambda found: "" if found.group(2) else found.group(), text)
    seen: Counter[str] = Counter()
    made = set(NAMED.findall(plain))
    for title in HEADING.findall(plain):
        slug = slug_of(title)
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made


def slug_of(title: str) -> str:
    """Return the anchor of a heading."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")


def images(text: str) -> list[tuple[str, str]]:
    """Return (alternative text, target) of the images of a page."""
    return IMAGE.findall(masked(text))


def site_uri(file: str) -> str:
    """Return the page or file below docs/ that stands for a file or folder of the repository."""
    if (ROOT / file).is_dir():
        file = f"{file}/README.md"
    elif not file.endswith((".md", ".json", ".svg", ".png")):
        file = f"{file}.md"
    return file.removeprefix("docs/") if file.startswith("docs/") else OUTSIDE + file


def repository_path(uri: str) -> str:
    """Return the file of the repository for which a page of the site stands: the inverse of `site_uri` for pages."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def rewritten(text: str, page: str) -> str:
    """Return the text of a page of the repository with links that lead to the places on the site."""
    here = posixpath.dirname(site_uri(page))
    for link in reversed(list(links(text, page))):
        if link.target.startswith("#"):
            continue
        target = posixpath.relpath(site_uri(link.file), here) + (f"#{link.anchor}" if link.anchor else "")
        text = text[: link.start] + target + text[link.end :]
    return text
