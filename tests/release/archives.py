"""What a wheel and an sdist must contain, for `tests.release.check`; each check yields what is wrong, one line each."""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SOURCES = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in", "pyproject.toml", "setup.py")
"""Files beside src/ that an sdist holds."""

NEEDED = {"torch", "jinja2", "rich", "typer", "tomli"}
"""What an installation without extras depends on."""


def version_of(root: Path) -> str:
    """Return the one version there is: that of src/halfstep/__init__.py."""
    text = (root / "src" / "halfstep" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.*)"$', text, re.M)
    return str(found)


def in_documents(root: Path, *, final: bool) -> Iterator[str]:
    """Yield where CHANGELOG.md and CITATION.cff do not go with the version; `final`: the release has a date."""
    version = version_of(root)
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    draft = rf"^## \[Unreleased\]: {re.escape(version)}$"
    if not re.search(heading if final else f"{heading}|{draft}", changes, re.M):
        wanted = f"## [{version}] - YYYY-MM-DD" + ("" if final else f" or ## [Unreleased]: {version}")
        yield f"CHANGELOG.md has no heading {wanted}"
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if not re.search(rf"^version: {re.escape(version)}$", citation, re.M):
        yield f"CITATION.cff does not have version: {version}"


def in_wheel(wheel: Path, root: Path, *, native: bool) -> Iterator[str]:
    """Yield what is wrong in a wheel built from the tree at `root`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        yield from _in_metadata(archive.read(f"{info}/METADATA").decode(), root)
        if "halfstep = halfstep.cli:app" not in archive.read(f"{info}/entry_points.txt").decode():
            yield f"{wheel.name} has no command halfstep"
        if archive.read(f"{info}/licenses/LICENSE") != (root / "LICENSE").read_bytes():
            yield f"{wheel.name} has another LICENSE"
    inside = {name for name in names if not name.startswith(f"{info}/")}
    libraries = {name for name in inside if PurePosixPath(name).match("halfstep/kernels/native/portable-*.so")}
    if bool(libraries) is not native:
        yield f"{wheel.name} has {len(libraries)} compiled libraries"
    if wheel.name.endswith("-py3-none-any.whl") is native:
        yield f"{wheel.name} has the wrong tag for {len(libraries)} compiled libraries"
    wanted = packaged(root) | {f"halfstep/{name}" for name in verdicts(root)}
    yield from _differences(inside - libraries, wanted, wheel.name)


def in_sdist(sdist: Path, root: Path) -> Iterator[str]:
    """Yield what is wrong in an sdist built from the tree at `root`."""
    with tarfile.open(sdist) as archive:
        names = [entry.name.partition("/")[2] for entry in archive if entry.isfile()]
    made = {"PKG-INFO", "setup.cfg"}
    inside = {name for name in names if name not in made and ".egg-info/" not in name}
    wanted = {f"src/{name}" for name in packaged(root)} | {f"docs/{name}" for name in verdicts(root)} | set(SOURCES)
    yield from _differences(inside, wanted, sdist.name)


def packaged(root: Path) -> set[str]:
    """Return the files of the package in a tree, as a wheel names them."""
    files = (path for path in (root / "src" / "halfstep").rglob("*") if path.is_file())
    return {path.relative_to(root / "src").as_posix() for path in files if "__pycache__" not in path.parts}


def verdicts(root: Path) -> set[str]:
    """Return the pages of docs/ that `halfstep explain` prints."""
    return {path.relative_to(root / "docs").as_posix() for path in (root / "docs" / "verdicts").glob("*.md")}


def _differences(inside: set[str], wanted: set[str], name: str) -> Iterator[str]:
    for path in sorted(wanted - inside):
        yield f"{name} lacks {path}"
    for path in sorted(inside - wanted):
        yield f"{name} has {path}, which is not in the tree"


def _in_metadata(text: str, root: Path) -> Iterator[str]:
    fields = email.message_from_string(text)
    wanted = {
        "Name": "halfstep",
        "Version": version_of(root),
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.10",
        "Description-Content-Type": "text/markdown",
        "Author": "The halfstep authors",
    }
    for key, value in wanted.items():
        if fields[key] != value:
            yield f"METADATA has {key}: {fields[key]}, not {value}"
    for key in ("Project-URL", "Home-page", "Download-URL"):  # none until the project has an address
        if key in fields:
            yield f"METADATA has {key}: {fields[key]}"
    depends = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    if (names := {re.split(r"[^\w-]", line)[0] for line in depends}) != NEEDED:
        yield f"METADATA requires {', '.join(sorted(names))}"
