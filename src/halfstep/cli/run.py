"""halfstep run: run an unchanged script, with halfstep's Apex, or with torch.amp's names under a policy.

Processes that the script starts get the same: their path begins with a folder of `shim`, in which Python finds a
package `apex`, or a `sitecustomize` that reads the policy from the environment.
"""

import atexit
import multiprocessing.util
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import typer

import halfstep as hs
from halfstep.compat import apex
from halfstep.compat.torch_amp import install as torch_amp
from halfstep.compat.torch_amp.served import Served
from halfstep.tasks.candidates import policy_named

APEX = str(Path(apex.__file__).parent / "shim")
"""A folder with a package `apex` for processes that the script starts."""

TORCH_AMP = str(Path(__file__).parent / "shim")
"""A folder with a `sitecustomize` that calls `serve_child` when such a process imports torch."""

VARIABLE = "HALFSTEP_RUN_POLICY"
"""The environment variable with the policy, as TOML, for those processes."""

PREPARE = (
    "halfstep run: such a policy takes a line in the script, after model and optimizer are made and before "
    "DistributedDataParallel: model, optimizer, scaler = hs.prepare(model, optimizer, policy={!r})"
)


EVIDENCE = "HALFSTEP_RUN_EVIDENCE"
"""The environment variable with the folder for evidence, for those processes."""


def carry_out(script: Path, args: list[str] | None, policy: str, force: bool, evidence: Path | None) -> int:
    """Run the command; return its exit code."""
    if policy and force:
        raise typer.BadParameter("--force is about Apex; leave it out with --policy")
    variables = {} if evidence is None else {EVIDENCE: str(evidence.resolve()), **_on_path(TORCH_AMP)}
    with mock.patch.dict(os.environ, variables):
        return run_under_policy(policy, script, args or ()) if policy else run_script(script, args or (), force=force)


def run_script(script: Path, args: Sequence[str], *, force: bool = False) -> int:
    """Run `script` as Python would, with halfstep's Apex under the name ``apex``; return the exit status."""
    if not script.is_file():
        what = "option" if str(script).startswith("-") else "file"
        print(f"halfstep run: there is no {what} {str(script)!r}", file=sys.stderr)
        return 2
    if apex.install(force=force):
        with mock.patch.dict(os.environ, _on_path(APEX)):
            _run(script, args, APEX)
    else:
        print("halfstep run: an apex with amp is installed and is used; --force takes halfstep's", file=sys.stderr)
        _run(script, args)
    return 0


def run_under_policy(label: str, script: Path, args: Sequence[str]) -> int:
    """Run a script, or a program such as torchrun, with torch.amp's names under a policy; return the exit status."""
    try:
        policy = policy_named(label, "cpu")
        if label in hs.policy.PRESETS or label.endswith(".toml"):  # without a format, whose dtype="auto" stays
            policy = hs.Policy.of(label)
        served = torch_amp.install(policy)
    except hs.errors.HalfstepError as error:
        print(f"halfstep run: {error}", file=sys.stderr)
        if not isinstance(error, hs.errors.TaskError):
            print(PREPARE.format(label), file=sys.stderr)
        return 2
    variables = {**_on_path(TORCH_AMP), VARIABLE: policy.to_toml()}
    program = None if script.suffix == ".py" else shutil.which(script)
    try:
        if program is not None:
            sys.stdout.flush()
            return _become(program, [str(script), *args], {**os.environ, **variables})
        if not script.is_file():
            print(f"halfstep run: there is no file and no program {str(script)!r}", file=sys.stderr)
            return 2
        _count_forked(served)
        with mock.patch.dict(os.environ, variables):
            try:
                _run(script, args)
            finally:
                _report(served, always=True)
    finally:
        torch_amp.uninstall()
    return 0


def _become(program: str, words: list[str], environment: Mapping[str, str]) -> int:
    """Run a program in the place of this process; on Windows, where a new process would outlive it, as its child."""
    if sys.platform == "win32":
        return subprocess.run([program, *words[1:]], env=environment).returncode
    os.execve(program, words, environment)


def serve_child() -> None:
    """Do in a process that the script has started what its environment says; a line follows at the exit."""
    if VARIABLE in os.environ:
        served = torch_amp.install(hs.Policy.from_toml(os.environ[VARIABLE]))
        _count_forked(served)
        atexit.register(_report, served)
    watched = ExitStack()
    watched.enter_context(_watched())
    atexit.register(watched.close)


@contextmanager
def _watched() -> Iterator[None]:
    """Have bad steps of a block explained, where the environment names a folder for evidence."""
    if EVIDENCE not in os.environ:
        yield
        return
    watch = hs.lens.Watch(os.environ[EVIDENCE])
    try:
        with watch:
            yield
    finally:
        told = [verdict.headline for verdict in watch.verdicts] or ["no step was not finite, or none was explained"]
        for line in told:
            where = f"; the reports are in {os.environ[EVIDENCE]}" if watch.verdicts else ""
            print(f"halfstep run: black box: {line}{where}", file=sys.stderr, flush=True)


def _run(script: Path, args: Sequence[str], *folders: str) -> None:
    """Run `script` as ``__main__``, with its arguments, and its folder and `folders` first on the path."""
    argv, path = [str(script), *args], [str(script.resolve().parent), *folders, *sys.path]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path), _watched():
        runpy.run_path(str(script), run_name="__main__")


def _on_path(folder: str) -> dict[str, str]:
    """Return the variable that puts `folder` first on the path of processes that are started, once."""
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in {"", folder}]
    return {"PYTHONPATH": os.pathsep.join([folder, *rest])}


def _count_forked(served: Served) -> None:
    """Let a forked process count for itself and report at its end, where `atexit` is not called."""

    def begin(served: Served) -> None:
        served.begin()
        multiprocessing.util.Finalize(None, _report, (served,), exitpriority=0)

    multiprocessing.util.register_after_fork(served, begin)


def _report(served: Served, *, always: bool = False) -> None:
    """Print what was served, of a process that used it; of several ranks, of the first and of those that skipped."""
    rank = os.environ.get("RANK", "")
    if always and rank in {"", "0"} or served.used and (rank in {"", "0"} or served.skipped):
        print(f"halfstep run{f' (rank {rank})' if rank else ''}: {served}", file=sys.stderr, flush=True)
