"""Random programs over regions, operators, checkpoints, threads, exceptions and torch.compile.

A seed is one program of one of four kinds:

    torch     regions of preset torch (bf16, fp32, float64, fp16 not emulated; on, off, suspended, as decorators, made
              early, nested in regions of torch.autocast itself) around operators, checkpoints of both kinds, threads,
              raised and caught exceptions. Run with torch.autocast instead, it gives the same bits and formats at every
              operator, the same gradients and errors, and leaves the same state of autocast.
    rules     a chain of operators in regions of mixed, O1 and torch, fp16 emulated, with checkpoints. Without the
              checkpoints it gives the same bits, forward and gradients.
    oracle    one product or convolution in emulated fp16, also checkpointed, against float64.
    compiled  (one seed in 250) a decorated function under torch.compile(backend="eager"): the bits it has without.

Intended differences, and how each is kept out of a comparison:

    1. torch's cache of weight casts does not look at the format, so it hands out copies of another one where regions of
       two formats nest; halfstep's regions clear it there. The peer's regions clear it too.
    2. An object of torch.autocast that is entered again while it is open loses what it found. Each is entered once.
    3. halfstep's errors are subclasses of torch's and say more. They are compared by torch's class.
    4. The oracle's bound: one ulp of fp16 at the exact result (a rounding is half of one; the rest is for fp32 results
       next to a tie), and n fp32 roundings of the sum of absolute products, n no less than its number of terms.
       Results beyond the largest fp16 number may be infinite.
    5. A checkpoint with re-entry sums the gradients of what is used inside and outside in another order, and hands on
       gradients in another memory layout, in which kernels sum in another order. In `rules` a value is used once and
       keeps its layout.
    6. CheckpointFunction with re-entry raises where nothing in it requires a gradient, or where the backward pass meets
       what `no_grad` made; torch's error is compared, not avoided.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.cast.state import STATE
from tests.fuzz.oracle import against_float64
from tests.fuzz.tables import ONCE, OPERATORS, Weights

__all__ = ["SAMPLE", "check"]

SAMPLE = 150
COMPILED = 250
BF16, HALF, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Stop(Exception):
    """What a program raises itself."""


Program = tuple[Any, ...]


def _program(rng: random.Random, depth: int, kinds: tuple[str, ...], operators: list[str]) -> Program:
    """Return a random block: statements (kind, details, block)."""
    statements = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(kinds) if depth and rng.random() < 0.6 else "operator"
        if kind == "operator":
            statements.append(("operator", (rng.choice(operators), rng.getrandbits(30)), ()))
            continue
        details: Any = rng.random() < 0.5
        if kind == "region":
            details = (
                rng.getrandbits(30),
                rng.choice(("default", "default", BF16, BF16, FP32, FP64, HALF)),
                rng.random() < 0.75,
                rng.choice((None, None, True, False)),
                rng.choice(("with", "with", "decorator", "early", "torch's")),
            )
        elif kind == "rules":
            details = rng.choice(("torch", "mixed", "O1")), rng.choice(("bf16", "fp16")), rng.random() < 0.8
        statements.append((kind, details, _program(rng, depth - 1, kinds, operators)))
    return tuple(statements)


# ------------------------------------------------------------------ running a program


class Cleared:
    """A region of torch.autocast that lets no copy of another format in or out; difference 1."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.region = torch.autocast(*args, **named)

    def __enter__(self) -> None:
        before = torch.get_autocast_dtype("cpu")
        self.region.__enter__()
        self._clear(before)

    def __exit__(self, *error: Any) -> None:
        before = torch.get_autocast_dtype("cpu")
        self.region.__exit__(*error)
        self._clear(before)

    def _clear(self, before: torch.dtype) -> None:
        if torch.get_autocast_dtype("cpu") is not before:
            torch.clear_autocast_cache()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call


class Run:
    """One run of a program.

    Args:
        peer: run it with torch.autocast.
        checkpoints: run checkpointed blocks through checkpoint.

    Attributes:
        seen: what every operator gave, in order: (format, bytes), or the error of a statement.
        weights: by the seed of their operator.
    """

    def __init__(self, *, peer: bool = False, checkpoints: bool = True) -> None:
        self.peer, self.checkpoints = peer, checkpoints
        self.seen: list[Any] = []
        self.weights: dict[int, Weights] = {}
        self.early: dict[int, Any] = {}

    def start(self, program: Program, x: Tensor) -> tuple[Any, ...]:
        """Run `program` on `x`; return everything that can be compared."""
        leaf = x.clone().requires_grad_()
        before = ambient()
        torch.manual_seed(0)
        self._make_early(program)
        try:
            y = self.block(program, leaf)
            coefficients = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
            (y.float() * coefficients).sum().backward()
            self.seen.append(_bytes(y))
        except (RuntimeError, Stop, NotImplementedError) as error:
            self.seen.append(_class(error))
        leaves = [leaf, *(w for key in sorted(self.weights) for w in self.weights[key].made.values())]
        gradients = [None if w.grad is None else _bytes(w.grad) for w in leaves]
        after = ambient()
        return self.seen, gradients, after == before or (before, after)

    def _make_early(self, program: Program) -> None:
        for kind, details, block in program:
            if kind == "region" and details[-1] == "early":
                self.early[details[0]] = self.region(details)
            self._make_early(block)

    def region(self, details: Any) -> Any:
        """Make the region of a statement."""
        key, dtype, on, cache, how = details
        if how == "early" and key in self.early:
            return self.early[key]
        given = None if dtype == "default" else dtype
        if self.peer or how == "torch's":
            return Cleared("cpu", given, on, cache)
        if given is HALF:  # not emulated, as torch runs it
            policy = hs.Policy.of("torch", dtype="fp16", emulate="never")
            return hs.autocast("cpu", None, on, cache, policy=policy)
        if given is None and torch.get_autocast_dtype("cpu") is HALF:
            policy = hs.Policy.of("torch", dtype="fp16", emulate="never")
            return hs.autocast("cpu", None, on, cache, policy=policy)
        return hs.autocast("cpu", given, on, cache)

    def block(self, program: Program, x: Tensor) -> Tensor:
        """Run statements one after another."""
        for kind, details, block in program:
            x = getattr(self, "_" + kind)(details, block, x)
        return x

    def _operator(self, details: Any, block: Program, x: Tensor) -> Tensor:
        name, seed = details
        y = OPERATORS[name](x, self.weights.setdefault(seed, Weights(seed)))
        if torch.get_autocast_dtype("cpu") is HALF or y.dtype is HALF:
            y = y.clamp(-100, 100)  # exponents enough for what follows
        self.seen.append(_bytes(y))
        return y

    def _region(self, details: Any, block: Program, x: Tensor) -> Tensor:
        region = self.region(details)
        if details[-1] == "decorator":
            return region(self.block)(block, x)  # type: ignore[no-any-return]
        with region:
            return self.block(block, x)

    def _rules(self, details: Any, block: Program, x: Tensor) -> Tensor:
        name, dtype, on = details
        with hs.autocast("cpu", enabled=on, policy=hs.Policy.of(name, dtype=dtype, emulate="always")):
            return self.block(block, x)

    def _suspended(self, details: Any, block: Program, x: Tensor) -> Tensor:
        with Cleared("cpu", enabled=False) if self.peer else hs.suspended():
            return self.block(block, x)

    def _checkpoint(self, details: Any, block: Program, x: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.block(block, x)
        result: Tensor = checkpoint(lambda z: self.block(block, z), x, use_reentrant=details)
        return result

    def _no_grad(self, details: Any, block: Program, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.block(block, x)
        return x + y.to(x.dtype)

    def _thread(self, details: Any, block: Program, x: Tensor) -> Tensor:
        found: list[Any] = []
        before: list[Any] = []

        def work() -> None:
            before.append(ambient())
            try:
                found.append(self.block(block, x))
            except (RuntimeError, Stop, NotImplementedError) as error:
                found.append(error)
            before.append(ambient())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.seen.append(before[0] == before[1])
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]  # type: ignore[no-any-return]

    def _catch(self, details: Any, block: Program, x: Tensor) -> Tensor:
        try:
            y = self.block(block, x)
            if details:
                raise Stop
            return y
        except (RuntimeError, Stop, NotImplementedError) as error:
            self.seen.append(_class(error))
            return x


def _class(error: Exception) -> str:
    """Return torch's class of an error; difference 3."""
    kinds = (Stop, torch.utils.checkpoint.CheckpointError, NotImplementedError, RuntimeError)
    return next(kind.__name__ for kind in kinds if isinstance(error, kind))


def _bytes(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = tensor.detach().contiguous()
    return plain.dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def ambient() -> tuple[Any, ...]:
    """Return what a program must leave as it was."""
    torch.autocast_increment_nesting()
    return (
        torch.autocast_decrement_nesting(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        (STATE.mode, STATE.bound, STATE.above, len(STATE.frames), len(STATE.casts)),
    )


def _difference(a: tuple[Any, ...], b: tuple[Any, ...], names: str) -> str:
    """Say where two runs differ first, or ""."""
    for i, (p, q) in enumerate(zip(a[0], b[0], strict=False)):
        if p != q:
            return f"{names}: result {i} is {_short(p)} and {_short(q)}"
    if len(a[0]) != len(b[0]):
        return f"{names}: {len(a[0])} and {len(b[0])} results"
    if a[1] != b[1]:
        which = [i for i, (p, q) in enumerate(zip(a[1], b[1], strict=False)) if p != q]
        return f"{names}: gradients {which} differ"
    return "".join(f"state: {state}" for _, _, state in (a, b) if state is not True)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 3:
        return f"{str(value[0]).removeprefix('torch.')}{list(value[1])} {value[2][:8].hex()}"
    return str(value)


# ------------------------------------------------------------------ the four kinds


def check(seed: int) -> str:
    """Run the program of `seed`; return what is wrong, or ""."""
    rng = random.Random(seed)
    x = torch.randn(rng.randint(2, 5), rng.randint(2, 6), generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In CPU autocast")
        warnings.filterwarnings("ignore", "hs.autocast.dtype=torch.float64")
        warnings.filterwarnings("ignore", "policy 'torch' on cpu: .* emulate='never'")
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        kind = _compiled if seed % COMPILED == COMPILED - 1 else rng.choice((_torch, _torch, _rules, against_float64))
        try:
            return kind(rng, x)
        except Exception as error:  # no program of these may end in an error that it does not expect
            return f"{kind.__name__}: {type(error).__name__}: {str(error)[:200]}"


def _torch(rng: random.Random, x: Tensor) -> str:
    kinds = ("region", "region", "region", "suspended", "checkpoint", "checkpoint", "thread", "catch", "no_grad")
    program = _program(rng, 4, kinds, sorted(OPERATORS))
    return _difference(Run().start(program, x), Run(peer=True).start(program, x), "halfstep, torch.autocast")


def _rules(rng: random.Random, x: Tensor) -> str:
    program = _program(rng, 4, ("rules", "rules", "checkpoint", "checkpoint", "suspended"), ONCE)
    again, plain = Run().start(program, x), Run(checkpoints=False).start(program, x)
    return _difference(([again[0][-1]], *again[1:]), ([plain[0][-1]], *plain[1:]), "with and without checkpoints")


def _compiled(rng: random.Random, x: Tensor) -> str:
    names = [rng.choice([name for name in ONCE if name != "dropout"]) for _ in range(4)]
    weights = [Weights(rng.getrandbits(30)) for _ in names]
    policy = hs.Policy.of(rng.choice(("torch", "mixed", "O1")), dtype="bf16")

    @hs.autocast("cpu", policy=policy)
    def function(z: Tensor) -> Tensor:
        for name, weight in zip(names, weights, strict=True):
            z = OPERATORS[name](z, weight)
        return z

    torch._dynamo.reset()
    try:
        eager = _bytes(function(x))
        compiled = _bytes(torch.compile(function, backend="eager")(x))
    finally:
        torch._dynamo.reset()
    if eager == compiled:
        return ""
    return f"compiled {names} under {policy.name}: {_short(compiled)}, eager {_short(eager)}"
