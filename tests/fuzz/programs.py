"""Random programs over regions, operators, checkpoints, threads, exceptions and torch.compile.

A seed is one program of one of four kinds:

    torch     regions of preset torch (bf16, fp32, float64, fp16 not emulated; on, off, suspended, as decorators, made early,
              nested in regions of torch.autocast itself) around operators, checkpoints of both kinds, threads, raised and
              caught exceptions. Run with torch.autocast instead, it gives the same bits and formats at every operator, the
              same gradients and errors, and leaves the same state of autocast.
    rules     a chain of operators in regions of mixed, O1, fp16 emulated or not, with checkpoints. Without the checkpoints
              it gives the same bits, forward and gradients.
    oracle    one product or convolution in emulated fp16, also checkpointed, against float64.
    compiled  (one seed in 250) a decorated function under torch.compile(backend="eager"): the bits it has without.

Intended differences, and how each is kept out of a comparison:

    1. torch's cache of weight casts does not look at the format, so it hands out copies of another one where regions of two
       formats nest; halfstep's regions clear it there. The peer's regions clear it too.
    2. An object of torch.autocast that is entered again while it is open loses what it found. Each is entered once at a time.
    3. halfstep's errors are subclasses of torch's and say more. They are compared by torch's class.
    4. The oracle's bound: one ulp of fp16 at the exact result (one rounding is half of one, ties and fp32 results next to
       a tie the rest), and n fp32 roundings of the sum of absolute products, n its number of terms; what float64 itself
       gets wrong does not matter. Results beyond the largest fp16 number are infinite in both.
    5. A checkpoint with re-entry sums the gradients of what is used inside and outside in another order. In `rules` a
       value is used once.
    6. CheckpointFunction with re-entry raises where nothing in it requires a gradient, or where the backward pass meets
       what `no_grad` made; torch's error is compared, not avoided.
"""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.cast.state import STATE

__all__ = ["SAMPLE", "check"]

SAMPLE = 150
COMPILED = 250
BF16, HALF, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Operator = Callable[[Tensor, "Weights"], Tensor]


class Stop(Exception):
    """What a program raises itself."""


class Weights:
    """The weights of one operator of a program: fp32 leaves, made once and found again when it runs again."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.made: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, *shape: int) -> Tensor:
        if shape not in self.made:
            self.made[shape] = (torch.randn(shape, generator=self.generator) / 2).requires_grad_()
        return self.made[shape]


def _sdpa(x: Tensor, w: Weights) -> Tensor:
    n, d = x.shape
    return F.scaled_dot_product_attention(x[None], (x @ w(d, d)).to(x.dtype)[None], x[None])[0]


def _lstm(x: Tensor, w: Weights) -> Tensor:
    n, d = x.shape
    zero = torch.zeros(n, d, dtype=x.dtype)
    return torch.lstm_cell(x, (zero, zero), w(4 * d, d), w(4 * d, d))[0]


def _batch_norm(x: Tensor, w: Weights) -> Tensor:
    d = x.shape[1]
    return F.batch_norm(x, torch.zeros(d), torch.ones(d), w(d), None, training=len(x) > 1)


OPERATORS: dict[str, Operator] = {
    "linear": lambda x, w: F.linear(x, w(x.shape[1], x.shape[1])),
    "linear_bias": lambda x, w: F.linear(x, w(x.shape[1], x.shape[1]), w(x.shape[1])),
    "matmul": lambda x, w: x @ w(x.shape[1], x.shape[1]),
    "matmul_t": lambda x, w: x @ w(x.shape[1], x.shape[1]).t(),
    "mm": lambda x, w: torch.mm(x, w(x.shape[1], x.shape[1])),
    "rmatmul": lambda x, w: w(x.shape[0], x.shape[0]) @ x,
    "addmm": lambda x, w: torch.addmm(w(x.shape[1]), x, w(x.shape[1], x.shape[1])),
    "bmm": lambda x, w: torch.bmm(x[None], w(1, x.shape[1], x.shape[1]))[0],
    "baddbmm": lambda x, w: torch.baddbmm(w(1, 1, x.shape[1]), x[None], w(1, x.shape[1], x.shape[1]))[0],
    "einsum": lambda x, w: torch.einsum("nd,de->ne", x, w(x.shape[1], x.shape[1])),
    "mv": lambda x, w: x * torch.mv(x, w(x.shape[1]))[:, None],
    "conv1d": lambda x, w: F.conv1d(x[None], w(x.shape[0], x.shape[0], 3), padding=1)[0],
    "conv2d": lambda x, w: F.conv2d(x[None, None], w(1, 1, 3, 3), padding=1)[0, 0],
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x[None], w(x.shape[0], x.shape[0], 3), padding=1)[0],
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[1:], w(x.shape[1])),
    "layer_norm_bare": lambda x, w: F.layer_norm(x, x.shape[1:]),
    "group_norm": lambda x, w: F.group_norm(x, 1),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[1:]),
    "batch_norm": _batch_norm,
    "attention": _sdpa,
    "lstm_cell": _lstm,
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: torch.log_softmax(x, 0),
    "softmax_dtype": lambda x, w: F.softmax(x, -1, dtype=FP32),
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "relu": lambda x, w: x.relu(),
    "tanh": lambda x, w: torch.tanh(x),
    "prelu": lambda x, w: F.prelu(x, w(1)),
    "exp": lambda x, w: x.tanh().exp(),
    "log": lambda x, w: (x.abs() + 1).log(),
    "pow": lambda x, w: x.tanh().pow(2),
    "rpow": lambda x, w: 2 ** x.tanh(),
    "rsqrt": lambda x, w: (x.abs() + 1).rsqrt(),
    "reciprocal": lambda x, w: (x.abs() + 1).reciprocal(),
    "softplus": lambda x, w: F.softplus(x),
    "sum": lambda x, w: x + x.tanh().sum(-1, keepdim=True),
    "mean": lambda x, w: x - x.mean(-1, keepdim=True),
    "var": lambda x, w: x / (1 + x.var(-1, keepdim=True, unbiased=False)),
    "norm": lambda x, w: x / (1 + x.norm(dim=-1, keepdim=True)),
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "cumsum": lambda x, w: x.tanh().cumsum(-1),
    "cat": lambda x, w: torch.cat([x, w(*x.shape)])[: len(x)],
    "stack": lambda x, w: torch.stack([x, w(*x.shape)]).mean(0),
    "add": lambda x, w: x + w(*x.shape),
    "mul": lambda x, w: x.tanh() * w(*x.shape),
    "addcmul": lambda x, w: torch.addcmul(x, x.tanh(), w(*x.shape)),
    "where": lambda x, w: torch.where(x > 0, x, w(*x.shape)),
    "embedding": lambda x, w: x + F.embedding(torch.arange(len(x)) % 2, w(2, x.shape[1])),
    "cross_entropy": lambda x, w: x * F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "mse_loss": lambda x, w: x * F.mse_loss(x, w(*x.shape)),
    "bce_logits": lambda x, w: x + F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "cosine": lambda x, w: x * F.cosine_similarity(x, w(*x.shape), dim=-1)[:, None],
    "cdist": lambda x, w: x + torch.cdist(x, w(*x.shape)).sum(),
    "outer": lambda x, w: x + torch.outer(x[:, 0], w(x.shape[1])),
    "float": lambda x, w: x.float(),
    "bfloat16": lambda x, w: x.bfloat16(),
    "in_place": lambda x, w: x.clone().add_(w(*x.shape)),
    "transpose": lambda x, w: x.t().contiguous().t(),
    "dropout": lambda x, w: F.dropout(x, 0.25),
}
"""Name -> function of a value of shape (n, d) to another of that shape, and of weights."""

ONCE = sorted(
    set(OPERATORS)
    - {"attention", "mv", "sum", "mean", "var", "norm", "cross_entropy", "mse_loss", "bce_logits", "cosine", "cdist"}
    - {"outer", "silu", "addcmul", "where"}
)
"""Operators that use their value once."""

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
        (STATE.mode, STATE.bound, STATE.above, len(STATE.frames), len(STATE.casts._casts)),
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
    x = torch.randn(rng.randint(1, 5), rng.randint(1, 6), generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In CPU autocast")
        warnings.filterwarnings("ignore", "hs.autocast.dtype=torch.float64")
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        if seed % COMPILED == COMPILED - 1:
            return _compiled(rng, x)
        return rng.choice((_torch, _torch, _rules, _oracle))(rng, x)


def _torch(rng: random.Random, x: Tensor) -> str:
    kinds = ("region", "region", "region", "suspended", "checkpoint", "checkpoint", "thread", "catch", "no_grad")
    program = _program(rng, 4, kinds, sorted(OPERATORS))
    return _difference(Run().start(program, x), Run(peer=True).start(program, x), "halfstep, torch.autocast")


def _rules(rng: random.Random, x: Tensor) -> str:
    program = _program(rng, 4, ("rules", "rules", "checkpoint", "checkpoint", "suspended"), ONCE)
    again, plain = Run().start(program, x), Run(checkpoints=False).start(program, x)
    return _difference(([again[0][-1]], *again[1:]), ([plain[0][-1]], *plain[1:]), "with and without checkpoints")


PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[[Callable[..., int]], tuple[tuple[int, ...], ...]]]] = {
    "linear": (F.linear, lambda r: ((n := r(), k := r(16))[:2], (r(), k))),
    "matmul": (torch.matmul, lambda r: ((r(3), r(), k := r(16)), (k, r()))),
    "mm": (torch.mm, lambda r: ((r(), k := r(16)), (k, r()))),
    "bmm": (torch.bmm, lambda r: ((b := r(3), r(), k := r(16)), (b, k, r()))),
    "mv": (torch.mv, lambda r: ((r(), k := r(16)), (k,))),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), lambda r: ((r(), k := r(16)), (r(), k))),
    "conv1d": (F.conv1d, lambda r: ((r(2), c := r(3), 4 + r()), (r(3), c, r(4)))),
    "conv2d": (F.conv2d, lambda r: ((r(2), c := r(3), 3 + r(3), 3 + r(3)), (r(3), c, r(3), r(3)))),
    "conv3d": (F.conv3d, lambda r: ((1, c := r(2), 3, 3, 3), (r(2), c, r(3), r(3), r(3)))),
    "conv_transpose1d": (F.conv_transpose1d, lambda r: ((r(2), c := r(3), r()), (c, r(3), r(3)))),
    "conv_transpose2d": (F.conv_transpose2d, lambda r: ((1, c := r(3), r(3), r(3)), (c, r(3), r(2), r(2)))),
}
"""Name -> bilinear function, and the shapes of its arguments, drawn by a function of the largest size."""


def _oracle(rng: random.Random, x: Tensor) -> str:
    name = rng.choice(sorted(PRODUCTS))
    function, draw = PRODUCTS[name]
    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    size = 2.0 ** rng.randint(-9, 7)
    shapes = draw(lambda most=5: rng.randint(1, most))
    a, b = ((torch.randn(shape, generator=generator) * size).half().float() for shape in shapes)
    policy = hs.Policy.of(rng.choice(("torch", "mixed", "O1")), dtype="fp16", emulate="always")
    kind = rng.choice((None, True, False))
    leaves = [t.clone().requires_grad_() for t in (a, b)]
    with hs.autocast("cpu", policy=policy):
        y = function(*leaves) if kind is None else checkpoint(function, *leaves, use_reentrant=kind)
    seed = (torch.randn(y.shape, generator=generator) / size).half()
    y.backward(seed)
    exact = [t.double().requires_grad_() for t in (a, b)]
    function(*exact).backward(seed.double())
    sums = [t.double().abs().requires_grad_() for t in (a, b)]
    total = function(*sums)
    total.backward(seed.double().abs())
    found = [y.detach(), *(t.grad for t in leaves)]
    wanted = [function(*(t.detach() for t in exact)), *(t.grad for t in exact)]
    absolute = [total.detach(), *(t.grad for t in sums)]
    for what, got, right, terms in zip(("result", "gradient 0", "gradient 1"), found, wanted, absolute, strict=True):
        if got is None or right is None or terms is None:
            return f"{name} {kind}: no {what}"
        wrong = _beyond(got.double(), right, terms * (a.numel() + b.numel() + y.numel()) * 2.0**-24)
        if wrong:
            return f"{name} {policy.name} {shapes} x {size}, use_reentrant={kind}: {what} {wrong}"
    return "" if y.dtype is HALF else f"{name}: {y.dtype}"


def _beyond(got: Tensor, right: Tensor, slack: Tensor) -> str:
    """Say which element is further from the exact one than difference 4 allows, or ""."""
    largest = torch.finfo(HALF).max
    exponent = torch.frexp(right.abs().clamp(min=2.0**-14))[1] - 1
    ulp = torch.ldexp(torch.ones_like(right), exponent - 10)
    near = (got - right).abs() <= ulp + slack
    overflow = got.isinf() & (right.abs() + ulp + slack >= largest) & (got.sign() == right.sign())
    bad = ~(near | overflow)
    if not bad.any():
        return ""
    i = int(bad.flatten().nonzero()[0])
    return f"element {i} is {got.flatten()[i]:.8g}, exactly {right.flatten()[i]:.8g}, ulp {ulp.flatten()[i]:.3g}"


def _compiled(rng: random.Random, x: Tensor) -> str:
    names = [rng.choice([name for name in ONCE if name != "dropout"]) for _ in range(4)]
    weights = [Weights(rng.getrandbits(30)) for _ in names]
    policy = hs.Policy.of(rng.choice(("torch", "mixed", "O1")), dtype="bf16")

    @hs.autocast("cpu", policy=policy)
    def function(z: Tensor) -> Tensor:
        for name, weight in zip(names, weights, strict=True):
            z = OPERATORS[name](z, weight)
        return z

    def outcome(run: Callable[[Tensor], Tensor]) -> Any:
        try:
            return _bytes(run(x))
        except RuntimeError as error:
            return "error" if isinstance(error, RuntimeError) else ""

    with _fresh_dynamo():
        eager, compiled = outcome(function), outcome(torch.compile(function, backend="eager"))
    return "" if eager == compiled else f"compiled {names} under {policy.name}: {_short(compiled)}, eager {_short(eager)}"


@contextlib.contextmanager
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
