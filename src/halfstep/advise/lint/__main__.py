"""``python -m halfstep.advise.lint FILE...``: `halfstep lint` of files and folders, with the standard library alone."""

import argparse
import os
import sys
from collections.abc import Sequence

from halfstep.advise.lint.rule import SEVERITIES, exit_code, lines
from halfstep.advise.lint.run import is_source, lint
from halfstep.errors import HalfstepError, LintError

ANSI = {"red": 31, "yellow": 33, "cyan": 36, "green": 32, "bold": 1}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("python -m halfstep.advise.lint", description=__doc__)
    parser.add_argument("targets", nargs="+", help="files and folders")
    parser.add_argument("--severity", choices=SEVERITIES, default="warning", help="the least that makes exit code 1")
    parser.add_argument("--ignore", default="", help="codes of rules, with commas between them")
    given = parser.parse_args(words)
    try:
        for target in given.targets:
            if not is_source(target):
                raise LintError(f"target {target!r} does not exist; expected a .py file or a folder")
        ignore = [code for code in given.ignore.split(",") if code]
        found = [finding for target in given.targets for finding in lint(target, ignore=ignore)]
    except HalfstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for text, style in lines(found):
        print(f"\033[{ANSI[style]}m{text}\033[0m" if coloured and style else text)
    return exit_code(found, given.severity)


def is_plain(words: Sequence[str]) -> bool:
    """Return whether words behind ``halfstep lint`` are files and folders alone, for which this command does."""
    return bool(words) and all(map(is_source, words))


if __name__ == "__main__":
    raise SystemExit(main())
