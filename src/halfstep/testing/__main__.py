"""``python -m halfstep.testing script.py [arguments]``: run a script in a process that has the fake CUDA device."""

import sys
from collections.abc import Sequence

from halfstep.testing.fake_cuda import FakeCudaError, run_python

USAGE = "usage: python -m halfstep.testing script.py [arguments]   (or: -m module [arguments])"


def main(words: Sequence[str]) -> int:
    """Run the script and return its exit code; 2 where the device cannot be built."""
    if not words or words[0] in {"-h", "--help"}:
        print(USAGE)
        return 0 if words else 2
    try:
        return run_python(words).returncode
    except FakeCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
