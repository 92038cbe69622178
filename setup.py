"""Build a wheel that carries the CPU kernels, compiled; everything else is in pyproject.toml.

The environment variable HALFSTEP_WHEEL chooses: "native" compiles them, and fails where that is impossible; "pure"
leaves them out, for every platform; without it they are compiled where a compiler is found. An editable installation
and the sdist carry none. Without them the kernels are compiled at first use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("halfstep", "kernels", "native")
VERDICTS = Path(__file__).parent / "docs" / "verdicts"  # the pages that `halfstep explain` prints


def compiler() -> ModuleType:
    """Return halfstep.kernels.native.compiler, without importing halfstep, which imports torch."""
    spec = importlib.util.spec_from_file_location("compiler", Path(__file__).parent / "src" / NATIVE / "compiler.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["compiler"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):
    """Copies the package and the pages on causes, and compiles the portable kernels beside their sources."""

    def run(self) -> None:
        """Build."""
        super().run()
        folder = Path(self.build_lib, NATIVE)
        for old in folder.glob("portable-*.so"):  # of an earlier build
            old.unlink()
        if not self.editable_mode:
            shutil.copytree(VERDICTS, Path(self.build_lib, "halfstep", "verdicts"), dirs_exist_ok=True)
        wanted = os.environ.get("HALFSTEP_WHEEL", "")
        if wanted not in ("", "native", "pure"):
            raise SystemExit(f"HALFSTEP_WHEEL is {wanted!r}; it may be 'native', 'pure' or unset")
        if self.editable_mode or wanted == "pure":
            return
        tools = compiler()
        try:
            tools.ship(folder)
        except (tools.Unavailable, OSError) as error:
            if wanted == "native":
                raise SystemExit(f"HALFSTEP_WHEEL is 'native', and the kernels cannot be compiled: {error}") from error
            print(f"halfstep: a wheel without compiled kernels: {error}", file=sys.stderr)


class BdistWheel(bdist_wheel):
    """Tags a wheel with compiled kernels with their platform: any Python 3, any ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return Python, ABI and platform."""
        libraries = sorted(Path(self.bdist_dir or "", NATIVE).glob("portable-*.so"))
        return ("py3", "none", platform_tag(libraries)) if libraries else super().get_tag()

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:
        """Write the file WHEEL."""
        self.root_is_pure = self.get_tag()[2] == "any"
        super().write_wheelfile(wheelfile_base, *args)


def platform_tag(libraries: list[Path]) -> str:
    """Return the platform that the libraries need: on Linux with glibc the oldest version they can be loaded by."""
    machine = platform.machine().lower()
    if sys.platform == "darwin":
        return f"macosx_11_0_{machine}"
    needed = [tuple(map(int, found)) for file in libraries for found in glibc_versions(file)]
    if not needed:  # another C library
        return f"linux_{machine}"
    major, minor = max((2, 28), *needed)  # 2.28: torch's wheels need it, and a libstdc++ of its time
    return f"manylinux_{major}_{minor}_{machine}"


def glibc_versions(library: Path) -> list[tuple[bytes, bytes]]:
    """Return the versions of glibc whose symbols a library uses."""
    return re.findall(rb"\bGLIBC_(\d+)\.(\d+)", library.read_bytes())


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
