"""How many files, functions and calls of ``src/halfstep`` a reader passes who follows one program run.

``python -m tests.architecture.walks [--calls NAME]`` (`make walks`) prints the counts beside their limits and, with
--calls, every call of one walk in its order (repeated ones once). A walk is counted the second time it is taken, on
new objects and with another policy, so that imports and tables, which are made once in a process, do not count. A
switch is a call of a function in another file than the call before it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch
from torch import nn

import halfstep as hs

PACKAGE = Path(hs.__file__).parent


@dataclass(frozen=True)
class Limit:
    """The most files, and switches of file, that a walk may take; no limit of switches where they vary by process."""

    files: int
    switches: int | None = None


LIMITS: Mapping[str, Limit] = {
    "a good step": Limit(12, 40),
    "TOML to cast": Limit(9),
    "NaN to verdict": Limit(30),
}
"""Walk -> its limits."""


@dataclass(frozen=True)
class Walk:
    """The calls of one run, in their order: (file below the package, function)."""

    calls: tuple[tuple[str, str], ...]

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def functions(self) -> int:
        """How many different functions were called."""
        return len(set(self.calls))

    @property
    def switches(self) -> int:
        """How many calls were of another file than the call before."""
        return sum(one[0] != other[0] for one, other in zip(self.calls, self.calls[1:], strict=False))


def walk(run: Callable[[], object]) -> Walk:
    """Return the calls of functions of the package in `run`."""
    calls: list[tuple[str, str]] = []
    inside = f"{PACKAGE}/"

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified name
            calls.append((code.co_filename.removeprefix(inside), name))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Walk(tuple(calls))


def trained() -> tuple[hs.TrainStep, torch.Tensor, torch.Tensor]:
    """Return a training step of a small model under `mixed` after four steps, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    loss = nn.CrossEntropyLoss()
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda m, x, y: loss(m(x), y),
        policy=hs.Policy.of("mixed", dtype="bf16"),
    )
    x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
    for _ in range(4):
        step(x, y)
    return step, x, y


NUMBERS = itertools.count()


def good_step() -> Walk:
    """Count one applied step."""
    step, x, y = trained()
    return walk(lambda: step(x, y))


def toml_to_cast() -> Walk:
    """Count from a policy's file to the first operator that it casts."""
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "policy.toml"
        file.write_text(hs.Policy.of("mixed", dtype="bf16", name=f"walk {next(NUMBERS)}").to_toml(), encoding="utf-8")

        def run() -> None:
            with hs.autocast(policy=hs.Policy.of(file)):
                assert model(x).dtype is torch.bfloat16

        return walk(run)


def nan_to_verdict() -> Walk:
    """Count a step that is not finite and the explanation of its cause."""
    step, x, y = trained()

    def run() -> None:
        step(x * float("nan"), y)
        assert step.explain() is not None

    return walk(run)


WALKS: Mapping[str, Callable[[], Walk]] = {
    "a good step": good_step,
    "TOML to cast": toml_to_cast,
    "NaN to verdict": nan_to_verdict,
}


def counted(name: str) -> Walk:
    """Return a walk, taken the second time."""
    WALKS[name]()
    return WALKS[name]()


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--calls", choices=list(WALKS), help="print every call of this walk")
    shown = parser.parse_args().calls
    torch.set_num_threads(1)
    for name in WALKS:
        taken, limit = counted(name), LIMITS[name]
        switches = f"{taken.switches} switches" + (f" (limit {limit.switches})" if limit.switches else "")
        counts = f"{len(taken.files)} files (limit {limit.files}), {switches}, {taken.functions} functions"
        print(f"{name}: {counts}, {len(taken.calls)} calls")
        if name == shown:
            print(*(f"    {file} {function}" for (file, function), _ in itertools.groupby(taken.calls)), sep="\n")
        else:
            print("    " + " ".join(taken.files))


if __name__ == "__main__":
    main()
