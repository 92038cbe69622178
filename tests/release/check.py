"""`make release-check`: build the sdist and the wheels, and try them in empty environments.

Writes dist/ (what would be uploaded), works in a temporary folder and deletes it. Needs the package index that pip is
set up with, some 4 GB of disk, and 15 minutes; with a C++ compiler there is a wheel with compiled kernels, else a pure
one. Each check prints a line; the exit code is 1 if one failed. `--final`: the changelog must have the release's date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.release.archives import in_documents, in_sdist, in_wheel, version_of
from tests.release.programs import EXTRAS, STEP

ROOT = Path(__file__).parents[2]
TOOLS = ("build", "twine", "readme_renderer[md]", "auditwheel", "pyright", "mypy", "cffconvert")
KERNELS = ("test_native.py", "test_exponents.py", "test_cross_entropy.py")
BIN, EXE = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")


class Failed(Exception):
    """A check that did not pass, with what it found."""


class Checks:
    """Runs checks, prints a line for each and counts the failed ones."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, name: str, check: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Run one; it fails by raising `Failed` or by yielding what is wrong."""
        start = time.monotonic()
        try:
            found = check(*args, **options)
            wrong = list(found) if isinstance(found, Iterator) else []
        except Failed as error:
            wrong = [str(error)]
        print(f"{'FAILED' if wrong else 'ok':6} {name} ({time.monotonic() - start:.0f} s)", flush=True)
        for line in wrong:
            print(f"       {line}", flush=True)
        self.failed += [name] if wrong else []


def call(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return its output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, errors="replace", env={**os.environ, **(env or {})}, cwd=cwd, check=False
    )
    if done.returncode:
        tail = "\n       ".join((done.stdout + done.stderr).splitlines()[-25:])
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n       {tail}")
    return done.stdout


class Environment:
    """A virtual environment without this tree.

    Args:
        place: its folder.
        below: an environment whose packages it has too, and which stays as it is.
    """

    def __init__(self, place: Path, below: Environment | None = None) -> None:
        self.place = place
        call(sys.executable, "-m", "venv", place)
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(call(self.program("python"), "-c", asked).strip())
        if below is not None:
            (self.packages / "below.pth").write_text(f"{below.packages}\n", encoding="utf-8")

    def program(self, name: str) -> Path:
        """Return the path of a program in it."""
        return self.place / BIN / (name + EXE)

    def install(self, *what: str | Path, env: dict[str, str] | None = None) -> None:
        """Run pip install, with the versions of constraints.txt: the tools and torch are those CI has."""
        options = ("--disable-pip-version-check", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
        call(self.program("python"), "-m", "pip", *options, *what, env=env)

    def call(self, name: str, *words: str | Path, env: dict[str, str] | None = None) -> str:
        """Run one of its programs, or one of those it inherits, away from any tree."""
        return call(self.program(name), *words, cwd=self.place, env=env)


def copied(place: Path) -> Path:
    """Copy what git tracks or would track, so that nothing ignored can help a build."""
    files = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


def built(tools: Environment, tree: Path, out: Path, *, native: bool) -> None:
    """Build an sdist and wheels: those from the sdist, so that it is complete."""
    call(tools.program("python"), "-m", "build", "--outdir", out, tree, env={"HALFSTEP_WHEEL": "pure"})
    if native:
        (sdist,) = out.glob("*.tar.gz")
        unpacked = out.parent / "unpacked"
        shutil.unpack_archive(sdist, unpacked)
        (source,) = unpacked.iterdir()
        call(
            tools.program("python"), "-m", "build", "--wheel", "--outdir", out, source, env={"HALFSTEP_WHEEL": "native"}
        )


def no_compiler(place: Path) -> dict[str, str]:
    """Return an environment in which no compiler is found, and no compiled kernels of before."""
    return {"CXX": "there-is-no-compiler", "XDG_CACHE_HOME": str(place / "cache")}


def works(there: Environment, version: str, kernels: str) -> Iterator[str]:
    """Import, train a step and ask the commands, where there is no compiler."""
    env = no_compiler(there.place)
    place, origin = there.call("python", "-c", STEP, env=env).splitlines()
    if Path(place) != there.packages / "halfstep" / "__init__.py":
        yield f"halfstep was imported from {place}"
    if not origin.startswith(kernels):
        yield f"CPU kernels: {origin}; expected: {kernels} ..."
    for command in (("halfstep",), ("python", "-m", "halfstep")):
        if (printed := there.call(*command, "--version", env=env).strip()) != version:
            yield f"{' '.join(command)} --version printed {printed!r}"
    report = there.place / "doctor.json"
    there.call("halfstep", "doctor", "--quick", "--json", report, env=env)
    about = json.loads(report.read_text(encoding="utf-8"))
    if (about["halfstep"], about["cpu_kernels"]) != (version, origin):
        yield f"halfstep doctor found version {about['halfstep']}, CPU kernels {about['cpu_kernels']}"


def typed(tools: Environment, there: Environment, place: Path) -> None:
    """Check a program that uses the installed package, strictly, with mypy and pyright."""
    place.mkdir()
    consumer = place / "consumer.py"
    shutil.copy(ROOT / "tests" / "release" / "consumer.py", consumer)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.10"}
    (place / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    python = there.program("python")
    call(tools.program("mypy"), "--strict", "--python-executable", python, consumer, cwd=place)
    call(tools.program("pyright"), "--pythonpath", python, consumer, cwd=place)
    wrong = place / "wrong.py"  # the same with two faults: both must be found
    text = consumer.read_text(encoding="utf-8").replace("clip_norm=1.0", 'clip_norm="1"')
    wrong.write_text(text.replace("assert_type(host.scale, float)", "assert_type(host.scale, int)"), encoding="utf-8")
    for name, words in (("mypy", ("--strict", "--python-executable")), ("pyright", ("--pythonpath",))):
        try:
            call(tools.program(name), *words, python, wrong, cwd=place)
        except Failed as error:
            if "clip_norm" in str(error) and "int" in str(error):
                continue
        raise Failed(f"{name} does not find the faults in {wrong.name}")


def with_extra(extra: str, wheel: Path, base: Environment, place: Path) -> None:
    """Install one extra over the base, run a program that needs it, and delete it."""
    there = Environment(place, below=base)
    try:
        there.install(f"halfstep[{extra}] @ {wheel.as_uri()}")
        names = {"out": there.place, "examples": ROOT / "examples"}
        name, *words = (word.format(**names) if "{" in word and "\n" not in word else word for word in EXTRAS[extra])
        if name == "halfstep":
            name, words = "python", ["-m", "halfstep", *words]
        there.call(name, *words)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def same_bits(wheel: Path, place: Path) -> None:
    """Run the tests of the kernels on each library of the wheel, with this tree's pytest."""
    shutil.unpack_archive(wheel, place, format="zip")
    tests = [str(ROOT / "tests" / "kernels" / name) for name in KERNELS]
    for capability in ("avx512", "avx2"):
        env = {"PYTHONPATH": str(place), "ATEN_CPU_CAPABILITY": capability}
        origin = "import halfstep as hs; print(hs.__file__, hs.step.cpu_kernels())"
        found = call(sys.executable, "-c", origin, env=env, cwd=place)
        if str(place) not in found or "shipped, for avx" not in found:
            raise Failed(f"not the wheel's kernels: {found}")
        command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "pythonpath=.")
        call(*command, *tests, env=env, cwd=ROOT)


def tagged(tools: Environment, wheel: Path) -> Iterator[str]:
    """Check that the wheel runs on every system that its tag names."""
    shown = " ".join(tools.call("auditwheel", "show", wheel).split())
    needed = re.search(r"platform tag: \"manylinux_(\d+)_(\d+)_", shown)
    named = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if needed is None or named is None or tuple(map(int, needed.groups())) > tuple(map(int, named.groups())):
        yield shown


def main(words: Sequence[str] | None = None) -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.check", description=__doc__)
    parser.add_argument("--final", action="store_true", help="the changelog must have the release's date")
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS), help="default: all")
    given = parser.parse_args(words)
    checks, version = Checks(), version_of(ROOT)
    native = sys.platform in ("linux", "darwin") and any(map(shutil.which, ("g++", "clang++", "c++")))
    with tempfile.TemporaryDirectory(prefix="halfstep-release-") as folder:
        place = Path(folder)
        tree, out = copied(place / "tree"), place / "dist"
        tools = Environment(place / "tools")
        tools.install(*TOOLS)
        checks.run("CHANGELOG.md and CITATION.cff have the version", in_documents, ROOT, final=given.final)
        checks.run("CITATION.cff is valid", tools.call, "cffconvert", "--validate", "-i", ROOT / "CITATION.cff")
        checks.run("sdist and wheels are built", built, tools, tree, out, native=native)
        if checks.failed:
            return 1
        (sdist,), pure = out.glob("*.tar.gz"), next(out.glob("*-any.whl"))
        wheel = next((each for each in out.glob("*.whl") if each != pure), pure)
        checks.run("the sdist has the files of the tree", in_sdist, sdist, tree)
        checks.run("the pure wheel has the files of the tree", in_wheel, pure, tree, native=False)
        checks.run("twine: metadata, and the README renders", tools.call, "twine", "check", "--strict", *out.iterdir())
        if native:
            checks.run("the wheel with kernels has the files of the tree", in_wheel, wheel, tree, native=True)
            checks.run("its kernels have the reference's bits, each library", same_bits, wheel, place / "bits")
        if native and sys.platform == "linux":
            checks.run("its tag is what auditwheel finds", tagged, tools, wheel)
        base = Environment(place / "base")
        checks.run("the wheel installs", base.install, wheel)
        checks.run("it works alone", works, base, version, "shipped" if native else "none: ")
        checks.run("a strict consumer's mypy and pyright", typed, tools, base, place / "consumer")
        for name, what in (("pure wheel", pure), ("sdist", sdist)):
            there = Environment(place / "other", below=base)
            options = ("--no-deps", "--ignore-installed", what)
            checks.run(f"the {name} installs without a compiler", there.install, *options, env=no_compiler(place))
            checks.run(f"the {name} works alone", works, there, version, "none: ")
            shutil.rmtree(there.place)
        for extra in given.extras:
            checks.run(f"halfstep[{extra}]", with_extra, extra, wheel, base, place / extra)
        if not checks.failed:
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            shutil.copytree(out, ROOT / "dist")
    print(f"{len(checks.failed)} failed" if checks.failed else f"halfstep {version}: all passed; dist/ has the files")
    return bool(checks.failed)


if __name__ == "__main__":
    sys.exit(main())
