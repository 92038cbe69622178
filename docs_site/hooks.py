"""Hooks of mkdocs: they make pages written for a code host into pages of the site (mkdocs.yml names this file).

Files outside docs/ to which a page links become pages below ``source/``, links follow, and Markdown that a code host
reads otherwise than Python-Markdown does is written for the latter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs_site.links import CODE, OUTSIDE, ROOT, links, repository_path, rewritten, site_uri

LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".cpp": "cpp", ".cff": "yaml"}
MARKER = re.compile(r"^<!--.*?-->$", re.MULTILINE)
LIST = re.compile(r"^(?! *(?:[-*]|\d+\.) |\||#|>| {2,}|<!--)(.*\S.*\n)(?=(?:[-*]|1\.) )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and for each file outside docs/ to which a page leads, directly or in steps."""
    waiting = [repository_path(file.src_uri) for file in files.documentation_pages()]
    waiting += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    for file in [f.src_uri for f in files if f.src_uri.endswith(".ipynb")]:
        files.append(File.generated(config, f"{file}.md", content=notebook(ROOT / "docs" / file)))
        waiting.append(f"docs/{file}.md")
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        uri, path = site_uri(name), ROOT / name
        if uri.startswith(OUTSIDE):
            files.append(added(config, name, uri))
        if path.is_file() and path.suffix == ".md":
            found = {link.file for link in links(path.read_text(encoding="utf-8"), name)}
            fresh = sorted(f for f in found - seen if (ROOT / f).exists() and not f.startswith("docs/"))
            waiting += fresh
            seen.update(fresh)
    return files


def added(config: MkDocsConfig, name: str, uri: str) -> File:
    """Return the page, or the file as it is, for a file or folder outside docs/."""
    path = ROOT / name
    if not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(path))
    if path.is_dir():
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir() if p.name != "__pycache__")
        content = f"# {name}\n\n" + "\n".join(f"- `{n}`" for n in names) + "\n"
    else:
        content = path.read_text(encoding="utf-8")
    if path.suffix != ".md" and path.is_file():
        language = LANGUAGES.get(path.suffix, "text")
        content = f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n````{language}\n{content}````\n"
    return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def notebook(path: Path) -> str:
    """Return the cells of a notebook, with what they printed, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"````python\n{source}\n````" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", ())
            if text:
                parts.append(f"````text\n{''.join(text).rstrip()}\n````")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and set apart lists and tables that follow a line directly."""
    text = rewritten(markdown, repository_path(page.file.src_uri))
    pieces, end = [], 0
    for block in CODE.finditer(text):
        if block.group(2):
            pieces += [apart(text[end : block.start()]), block.group()]
            end = block.end()
    return "".join([*pieces, apart(text[end:])])


def apart(text: str) -> str:
    """Return Markdown without comments and with an empty line before each list, which Python-Markdown needs."""
    return LIST.sub(r"\1\n", MARKER.sub("", text))
