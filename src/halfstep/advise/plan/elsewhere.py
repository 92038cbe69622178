"""Elsewhere: plans for a GPU are traced in a process of their own, which has the fake GPU of `halfstep.testing`.

torch looks for devices while it is imported, so a process that runs already cannot get one. The request goes there as a
pickle, as to a worker of `multiprocessing`: functions by their names, with the main script imported again.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import halfstep as hs
from halfstep.advise.plan.ledger import PlanError
from halfstep.testing import FakeCudaError, run_python


def attempt(function: Callable[..., Any], **given: Any) -> Any:
    """Return what a function returns, or the error of halfstep that it raises."""
    try:
        return function(**given)
    except hs.HalfstepError as error:
        return error


def elsewhere(function: Callable[..., Any], requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return ``function(**request)`` of each request, or its error, from one process with the fake GPU."""
    try:
        job = pickle.dumps((function, [dict(request) for request in requests]))
    except Exception as error:  # pickle raises what the objects raise
        raise PlanError(
            f"a plan for a GPU runs in a process of its own, and this cannot be sent there ({error}); use functions of "
            "a module instead of lambdas and closures, or plan 'path/to/file.py:function'"
        ) from error
    with tempfile.TemporaryDirectory(prefix="halfstep-plan-") as folder:
        request, answer = Path(folder, "request"), Path(folder, "answer")
        here = spawn.get_preparation_data("halfstep-plan")
        here.pop("authkey", None)  # multiprocessing's own, which refuses to be sent this way
        request.write_bytes(pickle.dumps((here, job)))
        words = ["-m", "halfstep.advise.plan.elsewhere", str(request), str(answer)]
        paths = os.pathsep.join(filter(None, sys.path))  # the same modules as here, this package's among them
        try:
            done = run_python(
                words, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except FakeCudaError as error:
            raise PlanError(f"a plan for a GPU needs the fake GPU: {error}; or plan for device='cpu'") from error
        if not answer.exists():
            last = (done.stderr or "").strip().splitlines()[-1:] or ["no message"]
            raise PlanError(f"the process that plans for a GPU ended with status {done.returncode}: {last[0]}")
        found: list[Any] = pickle.loads(answer.read_bytes())
    return found


def _answer(request: Path, answer: Path) -> None:
    here, job = pickle.loads(request.read_bytes())
    here.pop("start_method", None)
    spawn.prepare(here)
    function, requests = pickle.loads(job)
    answer.write_bytes(pickle.dumps([attempt(function, **one) for one in requests]))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), Path(sys.argv[2]))
