"""Run fuzzers for a while and print what they find; exit 1 if they find anything.

python -m tests.fuzz --minutes 10            # all of them in turns
python -m tests.fuzz --only scaler --seed 4711 --programs 1

A finding is printed with its seed. Ctrl-C ends a run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch

from tests.fuzz.fuzzers import FUZZERS, checker, report


def main() -> int:
    """Check programs until time or their number is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=FUZZERS, help="a fuzzer; may be given several times")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--programs", type=int, default=None, help="of each fuzzer; default: as many as time allows")
    options = parser.parse_args()
    if options.programs is None and options.minutes == float("inf"):
        options.minutes = 10.0
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    checks = {name: checker(name) for name in options.only or FUZZERS}
    done, found = Counter[str](), Counter[str]()
    seed = options.seed
    while time.monotonic() < end and (options.programs is None or seed < options.seed + options.programs):
        for name, check in checks.items():
            problem = check(seed)
            done[name] += 1
            if problem:
                found[name] += 1
                print(f"{name} --seed {seed}: {problem}", flush=True)
        seed += 1
    print("".join(f"{table}\n" for table in map(report, checks) if table), end="")
    print(", ".join(f"{name}: {done[name]} programs, {found[name]} findings" for name in checks))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
