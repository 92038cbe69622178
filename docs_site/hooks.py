"""Hooks of mkdocs: they make pages written for a code host into pages of the site (mkdocs.yml names this file).

Long tables are put in (`docs_site.tables`). Files outside docs/ to which a page links become pages below ``source/``,
links follow, and Markdown that a code host reads otherwise than Python-Markdown does is written for the latter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs_site.links import CODE, ROOT, links, repository_path, rewritten, site_uri
from docs_site.tables import completed

LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".cpp": "cpp", ".cff": "yaml"}
CELL = re.compile(r"<(table|tr|th|td)>")
ITEM = re.compile(r"(?<=\n)\n {2,3}(?=\S)")
MARKER = re.compile(r"^<!--.*?-->$", re.MULTILINE)
LIST = re.compile(r"^(?! *(?:[-*]|\d+\.) |\||#|>| {2,}|<!--)(.*\S.*\n)(?=(?:[-*]|1\.) )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and for each file or folder outside the pages to which one leads."""
    notebooks = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".ipynb")]
    waiting = [repository_path(file.src_uri) for file in files.documentation_pages()] + notebooks
    waiting += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        uri, path = site_uri(name), ROOT / name
        if not uri.endswith(".md"):
            if uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
            continue
        text = page_of(path, name)
        if uri not in files.src_uris:
            level = InclusionLevel.INCLUDED if name in notebooks else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=text, inclusion=level))
        fresh = {link.file for link in links(text, name if path.is_file() else f"{name}/README.md")} - seen
        waiting += sorted(file for file in fresh if (ROOT / file).exists())
        seen |= fresh
    return files


def page_of(path: Path, name: str) -> str:
    """Return the Markdown of a page, of a notebook, of any other text file, or the list of what a folder has."""
    if path.is_dir():
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir() if p.name[0] not in "._")
        return f"# {name}\n\n" + "\n".join(f"- [{n}]({n})" for n in names) + "\n"
    if path.suffix == ".ipynb":
        return notebook(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return completed(text)
    head = f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n"
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def notebook(path: Path) -> str:
    """Return the cells of a notebook, with what they printed and drew, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"````python\n{source}\n````" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            picture = output.get("data", {}).get("image/png")
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain", ())).rstrip()
            if picture:
                titles = ", ".join(re.findall(r"title\(\"([^\"]+)\"", source)) or "curves"
                data = "".join("".join(picture).split())
                parts.append(f'<img alt="What the cell above draws: {titles}" src="data:image/png;base64,{data}">')
            elif text:
                parts.append(f"````text\n{text}\n````")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in long tables, rewrite the links of a page, and set apart lists and tables that follow a line directly."""
    text = rewritten(completed(markdown), repository_path(page.file.src_uri))
    pieces, end = [], 0
    for block in CODE.finditer(text):
        if block.group(2):
            pieces += [apart(text[end : block.start()]), indented(block)]
            end = block.end()
    return "".join([*pieces, apart(text[end:])])


def apart(text: str) -> str:
    """Return Markdown as Python-Markdown needs it.

    Without comments; with an empty line before each list; paragraphs of a list's item four blanks to the right.
    """
    listed = ITEM.sub(r"\n    ", LIST.sub(r"\1\n", MARKER.sub("", text)))
    return CELL.sub(r'<\1 markdown="1">', listed)


def indented(block: re.Match[str]) -> str:
    """Return a block of code; one that belongs to a list's item four blanks to the right."""
    missing = " " * (4 - len(block.group(1)) if 2 <= len(block.group(1)) < 4 else 0)
    return re.sub(r"^(?=.)", missing, block.group(), flags=re.MULTILINE)
