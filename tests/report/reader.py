"""A reader of pages: what a browser would build from them, and what it would fetch."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link", "source", "area", "base", "col", "embed", "wbr"}
LOADING = {"script", "link", "base", "iframe", "object", "embed", "img"}
FETCHING = ("src", "srcset", "data", "poster", "background", "action", "formaction", "ping")


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        elements: every element in order, as (tag, attributes).
        texts: every piece of text that is not blank, without style sheets.
        problems: tags closed in the wrong order, or not at all.
        styles: the text of style elements and of style attributes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.problems: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.styles += [value for name, value in attrs if name == "style" and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.problems.append(f"</{tag}> inside {'<'.join(self._open[-3:])}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.styles.append(data)
        elif data.strip():
            self.texts.append(data.strip())

    def all(self, tag: str) -> list[dict[str, str]]:
        """Return the attributes of every element `tag`."""
        return [attributes for name, attributes in self.elements if name == tag]

    def pictures(self) -> list[dict[str, str]]:
        """Return the attributes of every picture that is not decoration."""
        found = [a for tag, a in self.elements if tag in {"svg", "img", "canvas", "object", "picture"}]
        return [a for a in found if a.get("aria-hidden") != "true"]

    def fetches(self) -> list[str]:
        """Return what a browser would fetch or run: addresses, scripts, linked files, imports of style sheets."""
        found = [tag for tag, _ in self.elements if tag in LOADING]
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                inside = value.startswith("#") and name in {"href", "xlink:href"}
                if (name in FETCHING or name.endswith("href")) and not inside:
                    found.append(f"{tag} {name}={value}")
                if name.startswith("on"):
                    found.append(f"{tag} {name}")
        for style in self.styles:
            found += [address for address in re.findall(r"url\(([^)]*)\)", style) if not address.startswith("#")]
            found += re.findall(r"@import|@font-face", style)
        return found
