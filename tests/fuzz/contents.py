"""Wrong contents of files: what a file holds never executes, hangs, raises another's error, or changes a step halfway.

A program takes real files that halfstep has written (checkpoints of three training steps and of a sharded one, a state
by torch.save, evidence, a policy, the measurements of a search), makes one of them wrong in one to three ways, with
right or wrong checksums, and loads it in a child process that has loaded many before. The ways: other values, types,
names, missing and unknown keys, values in each other's places, hostile tensors, deep, wide and endless containers,
pickles that execute, damaged bytes, hostile archives, and things that are no files.

What is found, by the first words of a finding:

- execution: code of the file ran;
- hang: no answer within `LIMIT` seconds; the child is ended, and another one goes on;
- crash: the child ended;
- raw error: an exception that is no HalfstepError;
- change: the load was refused, and the step or the generators of the process are others than before;
- nonsense: the load was accepted, and the step holds other kinds of values than before, a number beyond 64 bits or
  nan, or cannot train; a policy is not the one that it writes; a verdict cannot be printed.

Intended, and no findings: contents whose damage changes nothing that is used; numbers and weights within what a step
can have, such as another learning rate; what is free (`extra`, the name of a policy, the state of a scheduler, further
options of an optimizer).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import hashlib
import io
import json
import os
import pickle
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["SAMPLE", "check", "report"]

SAMPLE = 100
LIMIT = 60.0  # seconds of one program; most take a tenth of one
START = 300.0  # seconds until a child is ready
MEMORY = 16 << 30  # bytes of address space of a child: what asks for more than a small file can need gets MemoryError

# ---------------------------------------------------------------------- the parent


class _Child:
    """A process that loads wrong contents, one after the other; started again after a hang or a crash."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lines = queue.SimpleQueue[str]()
        atexit.register(self.end)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _line(self, limit: float) -> str:
        """Return the next line of the child; "" if it ended, "hang" if there is none within `limit` seconds."""
        try:
            return self.lines.get(timeout=limit)
        except queue.Empty:
            return "hang"

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.contents"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process, self.lines = process, (lines := queue.SimpleQueue[str]())
        assert process.stdout is not None
        output = process.stdout

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        if self._line(START) != "ready\n":
            self.end()
            raise RuntimeError("the child of the fuzzer does not start; run python -m tests.fuzz.contents")

    def run(self, seed: int) -> dict[str, str]:
        """Return what the child tells of a program."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        made = json.loads(self._line(LIMIT))  # an error here is one of the fuzzer
        line = self._line(LIMIT)
        if line.endswith("\n"):
            found: dict[str, str] = json.loads(line)
            return found
        self.end()
        return {"what": made["what"], "kind": line or "crash", "words": ""}


_child = _Child()
_counts: Counter[tuple[str, str]] = Counter()

KINDS = ("refused", "accepted", "execution", "hang", "crash", "raw error", "change", "nonsense")


def check(seed: int) -> str:
    """Check the program of `seed`; "" if all that must hold holds."""
    found = _child.run(seed)
    _counts[found["what"].partition(":")[0], found["kind"]] += 1
    return "" if found["kind"] in KINDS[:2] else f"{found['kind']}: {found['what']}: {found['words']}"


def report() -> str:
    """Return a table: of each kind of file, how the programs ended that were checked so far."""
    names = sorted({name for name, _ in _counts})
    rows = [("file", *KINDS), *((name, *(str(_counts[name, kind]) for kind in KINDS)) for name in names)]
    rows.append(("all", *(str(sum(_counts[name, kind] for name in names)) for kind in KINDS)))
    return "\n".join("  ".join(cell.rjust(9) for cell in row) for row in rows)


# ---------------------------------------------------------------------- trees: other values in real contents

DELETED = object()
NAMES = ("../../outside", "/dev/zero", "/etc/hostname", "pipe", "a\0b", "", ".", "..", "state.pt/", "a/../b", "x" * 300)
TEXTS = (*NAMES, "e３m４", "\u202eеЗ\u0430", "\N{GRINNING FACE}" * 50, "k" * 100_000, "nan", "cpu:99", "preset", "None")
NUMBERS = (0, -1, True, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e-320, 1e308)
ODD_NUMBERS = (float("inf"), float("-inf"), float("nan"))


def _deep(depth: int, kind: str = "list") -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def _endless() -> Any:
    value: list[Any] = []
    value += [value, value]
    return value


def _doubled() -> Any:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    return value


def _plain(draw: random.Random) -> Any:
    """Return a value that JSON has too."""
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice(TEXTS),
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(ODD_NUMBERS),
        lambda: draw.choice([[], {}, [None] * 1000, {"a": 1}, [[]], {"": {}}, ["x", 1]]),
        lambda: _deep(draw.choice([5, 120, 900]), draw.choice(["list", "dict"])),
    ]
    return draw.choice(makers)()


def _tensor(draw: random.Random, like: Any) -> Any:
    """Return a hostile tensor, some of them in the shape of `like`."""
    import torch

    shape = tuple(like.shape) if isinstance(like, torch.Tensor) and like.numel() < 1 << 20 else (2,)
    dtype = draw.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8])
    makers: list[Callable[[], Any]] = [
        lambda: torch.zeros(shape, dtype=dtype),
        lambda: torch.full(shape, draw.choice([*ODD_NUMBERS, 1e38])),
        lambda: torch.zeros(draw.choice([(), (0,), (1,), (3, 5), (1,) * 40])),
        lambda: torch.ones(1).as_strided((1 << 40,), (0,)),
        lambda: torch.ones(()).expand(shape),
        lambda: torch.empty(shape, device="meta"),
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (1 << 40,)),
        lambda: torch.zeros(shape).to_sparse() if shape else torch.zeros(()),
        lambda: torch.nn.Parameter(torch.ones(shape)),
        lambda: torch.zeros(5056, dtype=torch.uint8),
    ]
    return draw.choice(makers)()


def _value(draw: random.Random, old: Any) -> Any:
    """Return a value that torch.load(weights_only=True) makes."""
    import torch

    makers: list[Callable[[], Any]] = [
        lambda: _plain(draw),
        lambda: _plain(draw),
        lambda: _tensor(draw, old),
        lambda: draw.choice([b"x", (), (1, 2), complex(1, 2), {1: 2}, {None: 3}, {(1, 2): 3}, {1, 2}, torch.float16]),
        lambda: draw.choice([_endless, _doubled])(),
    ]
    return draw.choice(makers)()


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a tree, outermost first; a bounded number."""
    found: list[tuple[Any, ...]] = []
    todo: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    for path, value in todo:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        found.append(path)
        if len(todo) < 5000 and len(path) < 12:
            todo += [((*path, key), item) for key, item in items]
    return found


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _edited(tree: Any, path: tuple[Any, ...], edit: Callable[[Any], Any]) -> Any:
    """Return a tree with another value at `path`; without it where `edit` returns DELETED."""
    if not path:
        return edit(tree)
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    there = [(k, _edited(v, path[1:], edit) if k == path[0] else v) for k, v in items]
    there = [(k, v) for k, v in there if v is not DELETED]
    return dict(there) if isinstance(tree, dict) else type(tree)(v for _, v in there)


def _wrong(draw: random.Random, tree: Any, value: Callable[[random.Random, Any], Any]) -> tuple[Any, str]:
    """Return a tree that is wrong in one place, and how."""
    paths = _paths(tree)
    depth = draw.randrange(1 + max(map(len, paths)))  # else most are deep in lists
    path = draw.choice([p for p in paths if len(p) == depth])
    old = _at(tree, path)
    way = draw.choice(["replace"] * 4 + ["delete", "add", "rename", "swap", "nest", "twice"])
    if way == "replace" or not path:
        new = value(draw, old)
    elif way == "delete":
        new = DELETED
    elif way == "swap":
        new = _at(tree, draw.choice(paths))
    elif way == "nest":
        new = draw.choice([[old], {"a": old}, (old,)])
    elif way == "twice":
        new = old * 2 if isinstance(old, (list, tuple, str, int, float)) else [old, old]
    else:  # a key of the container
        key = draw.choice([*TEXTS, "x", *((1, None) if value is _value else ())])
        container = dict(old) if isinstance(old, dict) else {"old": old}
        container[key] = (
            container.pop(draw.choice(list(container)), 0) if way == "rename" and container else value(draw, 0)
        )
        new = container
    words = "deleted" if new is DELETED else f"{type(new).__name__} {_words(new)}"
    return _edited(tree, path, lambda _: new), f"{way} {list(path)} -> {words}"


def _words(value: object) -> str:
    if isinstance(value, (str, bytes, int, float, type(None))):
        return repr(value)[:60]
    return str(getattr(value, "shape", ""))


# ---------------------------------------------------------------------- pickles and bytes


class Attack:
    """An object whose pickle makes the folder `mark`."""

    def __init__(self, draw: random.Random, mark: Path) -> None:
        self.way, self.mark = draw.randrange(4), str(mark)

    def __reduce__(self) -> Any:
        ways: list[tuple[Any, tuple[Any, ...]]] = [
            (os.mkdir, (self.mark,)),
            (exec, (f"import os; os.mkdir({self.mark!r})",)),
            (subprocess.call, (["mkdir", self.mark],)),
            (eval, (f"__import__('os').mkdir({self.mark!r})",)),
        ]
        return ways[self.way]


def _saved(content: object, *, new: bool = True) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=new)
    return buffer.getvalue()


def _damaged(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Return other bytes, and how."""
    way = draw.choice(["bits", "bits", "cut", "zeros", "more", "empty", "random"])
    data = data or b"\0"
    place = draw.randrange(len(data))
    if way == "bits":
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 8, 100])):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed), way
    if way == "cut":
        return data[:place], way
    if way == "zeros":
        return data[:place] + bytes(min(100, len(data) - place)) + data[place + 100 :], way
    if way == "more":
        return data + draw.randbytes(100), way
    return (b"" if way == "empty" else draw.randbytes(1000)), way


def _archive(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Return a file of torch.save with a hostile archive, and how."""
    way = draw.choice(["compressed", "bomb", "missing part", "other part", "two of one name", "names", "deep"])
    packed = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if way in {"compressed", "bomb"} else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(data)) as plain, zipfile.ZipFile(packed, "w", kind) as archive:
        names = plain.namelist()
        chosen = draw.choice(names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name twice
            for name in names:
                content = plain.read(name)
                if name == chosen:
                    if way == "missing part":
                        continue
                    if way == "bomb":
                        content = bytes(1 << 26)
                    if way == "other part":
                        content = _damaged(draw, content)[0]
                if way == "deep" and name.endswith("data.pkl"):
                    content = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
                archive.writestr(f"../{name}" if way == "names" else name, content)
                if name == chosen and way == "two of one name":
                    archive.writestr(name, draw.randbytes(len(content)))
    return packed.getvalue(), f"archive, {way}: {chosen}"


def _no_file(draw: random.Random, path: Path, *, sparse: bool) -> str:
    """Put something in the place of a file that is none, or none of its size, and return what."""
    way = draw.choice(["pipe", "folder", "link to a device", "link in a circle", "missing", "sparse", "no rights"])
    path.unlink()
    if way == "pipe":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    elif way == "link to a device":
        path.symlink_to("/dev/zero")
    elif way == "link in a circle":
        path.symlink_to(path.name)
    elif way == "sparse" and sparse:
        with path.open("wb") as file:
            file.truncate(1 << 42)
    elif way == "no rights":
        path.write_bytes(b"")
        path.chmod(0)
    return way


# ---------------------------------------------------------------------- policies as text


def _policy_text(draw: random.Random, text: str) -> tuple[bytes, str]:
    lines = text.splitlines() or [""]
    literals = [
        "1", "-1", "0x" + "f" * 40, "9" * 400, "9" * 5000, "1e999", "nan", "inf", "true", "''", "'auto'", "'ｂf16'",
        "'е5m2'", "'e٣m٤'", "'e99m99'", "'../x.toml'", "'/dev/zero.toml'", "[]", "[[]]", "{}", "[['*', 'low']]",
        "[['', '']]", "[['a::', 'low']]", "[['::', 'fp8']]", "[['[', 'keep'], ['[]', 'keep']]", "1979-05-27",
        "07:32:00", "'\\u0000'", "'''\n'''", "{init = 1e39}", "{interval = 0}", "{init = 'x', growth = []}",
        "[" * 500 + "]" * 500, "{a = " * 200 + "1" + "}" * 200, "'" + "k" * 100_000 + "'", "[" + "1," * 50_000 + "]",
    ]  # fmt: skip
    extra = [
        "k = 1", "[[ops]]", "[scale]", "[scale.scale]", "[ops]\nsoftmax = 'low'", "preset = 'O2'", "preset = 3",
        "preset = 'policy.toml'", ".".join("a" * 5000) + " = 1", "[" + ".".join("a" * 5000) + "]", "'' = 1",
        "\"a\\u0000\" = 1", "dtype = 'bf16'", "ｄtype = 'bf16'", 'a = """', "# \x00", "\\",
        "\n".join(f"k{i} = {i}" for i in range(20_000)),
        "modules = [" + ",".join(f"['m{i}', 'fp32']" for i in range(20_000)) + "]",
        "ops = [" + ",".join(f"['*[a-z{i}]*', 'low']" for i in range(20_000)) + "]",
    ]  # fmt: skip
    way = draw.choice(["value", "value", "value", "key", "extra", "extra", "order", "encoding", "bytes"])
    i = draw.randrange(len(lines))
    if way == "value":
        lines[i] = f"{lines[i].partition(' = ')[0]} = {draw.choice(literals)}"
    elif way == "key":
        lines[i] = f"{draw.choice(['', 'x', 'scale', 'Dtype', 'a.b', '?'])} = {lines[i].partition(' = ')[2]}"
    elif way == "extra":
        lines.insert(draw.choice([0, i, len(lines)]), draw.choice(extra))
    elif way == "order":
        draw.shuffle(lines)
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if way == "encoding":
        data = "\n".join(lines).encode(draw.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]), "replace")
    if way == "bytes":
        data, how = _damaged(draw, data)
        way = f"bytes, {how}"
    return data, f"{way} {lines[min(i, len(lines) - 1)][:60]}"


# ---------------------------------------------------------------------- the child: real files, and how they are loaded


@dataclass(frozen=True)
class _Target:
    """A kind of files.

    Attributes:
        good: a folder of real ones.
        load: loads those in another folder; raises what is found.
        state: returns what a refused load must leave as it is.
        restore: makes all as it was, after a load that was accepted.
    """

    good: Path
    load: Callable[[Path], str]
    state: Callable[[], Any] = lambda: None
    restore: Callable[[], None] = lambda: None


def _flat(tree: Any) -> dict[str, Any]:
    """Return path -> value of the parts of a tree, a bounded number; tensors as their kind and a checksum."""
    import torch

    found: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", tree)]
    for path, value in todo:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            data = bytes(local.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
            found[path] = str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest()
        elif isinstance(value, (dict, list, tuple)):
            found[path] = "dict" if isinstance(value, dict) else "list"
            items = value.items() if isinstance(value, dict) else enumerate(value)
            todo += [(f"{path}/{key}", item) for key, item in items if len(todo) < 5000]
        else:
            found[path] = value
    return found


def _kind(value: Any) -> Any:
    if isinstance(value, tuple):  # a tensor
        return value[:2]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number" if value != value or abs(value) >= 2**64 else "a number"
    return type(value).__name__ if value not in {"dict", "list"} else value


class _Steps:
    """Training steps, their checkpoints, and what a load may do to them."""

    def __init__(self, folder: Path) -> None:
        import torch

        import halfstep as hs

        self.folder = folder
        self.batch = (torch.randn(4, 3, generator=torch.Generator().manual_seed(1)),)
        self.steps: dict[str, Any] = {}
        fp16 = hs.Policy.of("mixed", dtype="fp16", scale="halfstep")
        for name, policy in {
            "fp16": fp16,
            "low": hs.Policy.of("O2", dtype="bf16"),
            "pure": hs.Policy.of("O2", dtype="bf16", master="kahan", state="low"),
        }.items():
            self.steps[name] = self.made(policy, scheduler=name == "fp16")

    def made(self, policy: Any, *, shard: bool = False, scheduler: bool = False) -> Any:
        import torch
        from torch import nn

        import halfstep as hs

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        if shard:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 5) if scheduler else None
        step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy, scheduler=plan)
        for _ in range(2):
            step(*self.batch)
        return step

    def state(self, step: Any) -> Any:
        import torch

        return _flat({"step": step.state_dict(), "torch": torch.get_rng_state(), "random": random.getstate()})

    def target(self, name: str, *, plain: bool = False) -> _Target:
        """Return the target of a step's checkpoint, or (`plain`) of its state by torch.save."""
        import torch

        import halfstep as hs

        step = self.steps[name]
        good = self.folder / f"{name}-{plain}"
        good.mkdir()
        if plain:
            torch.save(step.state_dict(), good / "state.pt")
        else:
            hs.save(step, self.folder / f"saved-{name}", extra={"epoch": 1}).wait()
            (saved,) = [p for p in (self.folder / f"saved-{name}").iterdir() if not p.name.startswith(".")]
            good.rmdir()
            good = self.folder / f"{name}-saved"
            good.mkdir()
            shutil.copytree(saved, good / "000001-step-2")
        before = copy.deepcopy(step.state_dict()) if name != "sharded" else None
        backup = self.folder / f"backup-{name}-{plain}"
        shutil.copytree(good, backup)

        def place(folder: Path) -> Path:
            return folder / ("state.pt" if plain else "000001-step-2")

        def restore() -> None:
            if before is not None:
                step.load_state_dict(before)
            else:
                hs.load(step, place(backup))

        restore()
        kinds = {path: _kind(value) for path, value in self.state(step).items()}

        def load(folder: Path) -> str:
            hs.load(step, place(folder))
            now = {path: _kind(value) for path, value in self.state(step).items()}
            free = ["/step/scheduler", "/step/signals", "/step/policy"]
            entries = [f"/step/optimizer/state/{n}" for n in range(6)]  # of parameters, which may have none
            free += [entry for entry in entries if entry not in now]
            free += [p for p in now.keys() - kinds.keys() if p.startswith("/step/optimizer/param_groups/0/")]
            odd = sorted(p for p in kinds.keys() | now.keys() if kinds.get(p) != now.get(p))
            odd = [p for p in odd if not p.startswith(tuple(free))]
            if odd:
                return f"{odd[0]} is {now.get(odd[0])} and was {kinds.get(odd[0])}"
            try:
                for _ in range(2):
                    step(*self.batch)
                step.state_dict()
            except hs.HalfstepError:
                pass  # in words, as for any other learning rate
            except Exception as error:
                return f"the step that was loaded cannot train: {_where(error)}"
            return ""

        return _Target(good, load, lambda: self.state(step), restore)


def _where(error: BaseException) -> str:
    """Return an error in one line, with the line of halfstep that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}halfstep{os.sep}" in f.filename]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def _policies(folder: Path) -> _Target:
    import halfstep as hs
    from halfstep.policy import PRESETS, SCALE_RULES

    good = folder / "policies"
    good.mkdir()
    for i, policy in enumerate(
        (*PRESETS.values(), hs.Policy(scale=SCALE_RULES["megatron"], ops=(("softmax", "low"),)))
    ):
        (good / f"{i}.toml").write_text(policy.to_toml(), encoding="utf-8")

    def load(place: Path) -> str:
        policy = hs.Policy.of(place / "policy.toml")
        if not policy.dtype.isascii() or hs.Policy.from_toml(policy.to_toml()) != policy:
            return f"{policy!r} is not the policy that it writes"
        if eval(repr(policy), {"Policy": hs.Policy, "ScaleRule": hs.policy.ScaleRule}) != policy:
            return f"{policy!r} is not its repr"
        return ""

    return _Target(good, load)


def _evidence(folder: Path) -> _Target:
    import torch
    from torch import nn

    import halfstep as hs

    good = folder / "evidence"

    def model() -> nn.Module:
        with torch.random.fork_rng():
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    task = hs.Task(
        name="t",
        model=model,
        loss_fn=lambda m, x, by: (m(x["x"]) / by).square().mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        batches=lambda seed, step: (),
    )
    made = model()
    step = hs.TrainStep(
        made, task.optimizer(made), task.loss_fn, policy=hs.Policy.of("mixed", dtype="bf16"), blackbox=good
    )
    for by in (1.0, 0.0):
        step({"x": torch.ones(2, 3)}, by=torch.tensor(by))
    step.explain()
    for report in good.glob("*.txt"):
        report.unlink()

    def load(place: Path) -> str:
        verdict = hs.lens.replay(place / "halfstep-blackbox-2.pt", task)
        str(verdict), verdict.to_json(), verdict.to_sarif()
        return ""

    def state() -> Any:
        return _flat({"torch": torch.get_rng_state(), "random": random.getstate()})

    return _Target(good, load, state)


class Fuzz:
    """The programs of one child."""

    def __init__(self, folder: Path) -> None:
        import torch.distributed as dist

        import halfstep as hs

        self.folder, self.mark = folder, folder / "executed"
        steps = _Steps(folder)
        dist.init_process_group("gloo", f"file://{folder}/init", rank=0, world_size=1)
        steps.steps["sharded"] = steps.made(hs.Policy.of("mixed", dtype="bf16"), shard=True)
        self.targets = {f"{name} saved": steps.target(name) for name in steps.steps}
        self.targets |= {"state": steps.target("fp16", plain=True), "state low": steps.target("low", plain=True)}
        self.targets |= {"policy": _policies(folder), "evidence": _evidence(folder)}

    def make(self, seed: int) -> tuple[_Target, Path, str]:
        """Return what to load: its target, a folder, and in words what is wrong."""
        draw = random.Random(seed)
        name = draw.choice([*self.targets, "policy", "evidence", "evidence"])
        target = self.targets[name]
        place = self.folder / "case"
        if place.exists():
            shutil.rmtree(place, onerror=lambda *_: None)
        good = (
            self.targets[draw.choice([n for n in self.targets if n.endswith("saved")])].good
            if (name.endswith("saved") and draw.random() < 0.05)
            else target.good
        )  # the checkpoint of another step
        shutil.copytree(good, place)
        files = sorted(p for p in place.rglob("*") if p.is_file())
        if name == "policy":
            files = [draw.choice(files).rename(place / "policy.toml")]
            for other in place.glob("[0-9]*"):
                other.unlink()
        words = []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            path = draw.choice(files)
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30:
                words.append(f"{path.name} {self._damage(draw, path)}")
        if draw.random() < 0.85:
            _seal(place)
        return target, place, f"{name}: {'; '.join(words)}"

    def _damage(self, draw: random.Random, path: Path) -> str:
        """Make a file wrong; return how."""
        small = path.suffix in {".toml", ".json"} or "blackbox" in path.name
        if draw.random() < 0.05:
            return _no_file(draw, path, sparse=small)
        data = path.read_bytes()
        try:
            data, words = self._other(draw, path, data)
        except (ValueError, RuntimeError):  # an earlier way has left no JSON, or deep is in deep
            data, words = _damaged(draw, data)
        path.write_bytes(data)
        return words

    def _other(self, draw: random.Random, path: Path, data: bytes) -> tuple[bytes, str]:
        """Return other bytes for a file, and how they are wrong."""
        if path.suffix == ".toml":
            data, words = _policy_text(draw, data.decode("utf-8", "replace"))
        elif path.suffix == ".json" and draw.random() < 0.9:
            content, words = _wrong(draw, json.loads(data), lambda d, _: _plain(d))
            if draw.random() < 0.3:  # names of files
                for name in draw.sample(NAMES, 2):
                    sums = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
                    if isinstance(content, dict) and isinstance(content.get("files"), dict):
                        content["files"][name] = sums
                        words += f", names {name[:30]!r}"
                with contextlib.suppress(OSError):
                    os.mkfifo(path.parent / "pipe")
            data = json.dumps(content).encode("utf-8", "surrogatepass")
        elif path.suffix == ".pt" and draw.random() < 0.9:
            data, words = self._tensors(draw, data)
        elif path.name == ".metadata" and draw.random() < 0.7:
            data, words = pickle.dumps(Attack(draw, self.mark)), "executes"
            if draw.random() < 0.5:
                data = pickle.dumps({"state_dict_metadata": {"model/0.weight": Attack(draw, self.mark)}})
        else:
            data, words = _damaged(draw, data)
        return data, words

    def _tensors(self, draw: random.Random, data: bytes) -> tuple[bytes, str]:
        """Make a file of torch.save wrong; return how."""
        import torch

        try:
            content = torch.load(io.BytesIO(data), weights_only=True)
        except Exception:  # wrong already
            return _damaged(draw, data)
        chance = draw.random()
        if chance < 0.1:
            return _archive(draw, _saved(content))
        if chance < 0.2:
            path = draw.choice(_paths(content))
            content = _edited(content, path, lambda _: Attack(draw, self.mark))
            return _saved(content, new=draw.random() < 0.7), f"executes at {list(path)}"
        content, words = _wrong(draw, content, _value)
        return _saved(content, new=draw.random() < 0.95), words

    def run(self, target: _Target, place: Path) -> tuple[str, str]:
        """Load; return how it ended, and what was found in words."""
        import halfstep as hs

        before = target.state()
        kind, words = "accepted", ""
        try:
            words = target.load(place)
            kind = "nonsense" if words else kind
        except hs.HalfstepError as error:
            kind, words = "refused", _where(error)
        except BaseException as error:
            kind, words = "raw error", _where(error)
        if self.mark.exists():
            kind, words = "execution", words
            self.mark.rmdir()
        after = target.state()
        if kind == "refused" and after != before:
            changed = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
            kind, words = "change", f"{changed[0]}: {before.get(changed[0])} -> {after.get(changed[0])}; {words}"
        if after != before:
            target.restore()
        return kind, words


def _seal(place: Path) -> None:
    """Put the right sums into what is there: a manifest, or the end of evidence."""
    for path in (p for p in place.rglob("*") if p.is_file() and not p.is_symlink()):
        if "blackbox" in path.name and path.stat().st_size < 1 << 30 and os.access(path, os.R_OK):
            data = path.read_bytes()
            data = data[:-73] if data[-73:].startswith(b"\nsha256 ") else data
            path.write_bytes(data + b"\nsha256 %s\n" % hashlib.sha256(data).hexdigest().encode())
        if path.name == "manifest.json":
            with contextlib.suppress(Exception):  # it is wrong beyond that
                content = json.loads(path.read_bytes())
                for name, entry in content["files"].items():
                    file = path.parent / name
                    if file.parent == path.parent and file.is_file():
                        data = file.read_bytes()
                        sums = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                        entry.update({k: v for k, v in sums.items() if isinstance(entry.get(k), type(v))})
                path.write_text(json.dumps(content), encoding="utf-8")


def _main() -> None:
    """Load the programs whose seeds come in; tell of each what it is, then how it ended."""
    import resource

    out: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print
    warnings.simplefilter("ignore")
    import logging

    import torch

    logging.getLogger("halfstep").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        out.write("ready\n")
        for line in sys.stdin:
            target, place, what = fuzz.make(int(line))
            what = what.encode("utf-8", "backslashreplace").decode()[:400]
            out.write(json.dumps({"what": what}) + "\n")
            kind, words = fuzz.run(target, place)
            out.write(json.dumps({"what": what, "kind": kind, "words": words}) + "\n")


if __name__ == "__main__":
    _main()
