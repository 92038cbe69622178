"""Calls of Apex's names with Apex's arguments, and the value that Apex gives (or arithmetic by hand)."""

# ruff: noqa: E501 - a table, one call a line

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from halfstep.compat.apex import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel
from halfstep.compat.apex.amp import frontend, handle, opt, scaler
from halfstep.compat.apex.amp._process_optimizer import AmpOptimizerState
from tests.compat.calls import Call

__all__ = ["CALLS"]

FP32, HALF = torch.float32, torch.float16
X = torch.tensor([[1.0, 2.0]])


def linear() -> nn.Linear:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(0.0)
    return layer


def started(level: str = "O1", **words: Any) -> tuple[Any, Any]:
    model = linear()
    made = amp.initialize(model, torch.optim.SGD(model.parameters(), 2.0), opt_level=level, verbosity=0, **words)
    return made[0], made[1]


def stepped(net: Any, optimizer: Any, **words: Any) -> list[float]:
    """Return the weights after one step with gradients 1/4, 1/2 and 1/4, which 2**16 does not bring to inf."""
    with amp.scale_loss(net(X).sum() / 4, optimizer, **words) as scaled:
        scaled.backward()
    (optimizer[0] if isinstance(optimizer, (list, tuple)) else optimizer).step()
    return [float(v) for p in net.state_dict().values() for v in p.flatten()]


AFTER = [0.5, 0.0, -0.5]


def every_level() -> tuple[Any, Any]:
    return [stepped(*started(level)) for level in ("O0", "O1", "O2", "O3")], [AFTER] * 4


def shapes() -> tuple[Any, Any]:
    one, two = linear(), linear()
    models = amp.initialize([one, two], opt_level="O2", verbosity=0)
    return (isinstance(models, list), [m.weight.dtype for m in models], models[0] is one), (True, [HALF, HALF], True)


def alone() -> tuple[Any, Any]:
    model = linear()
    return amp.initialize(model, None, opt_level="O0", verbosity=0) is model, True


def left_half() -> tuple[Any, Any]:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    found = []
    for level, kind in (("O1", None), ("O1", False), ("O3", False)):
        model = linear().half()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        amp.initialize(model, optimizer, opt_level=level, cast_model_type=kind, verbosity=0)
        found.append(model.weight.dtype)
    return found, [HALF] * 3


class Batch:
    """Holds a tensor and can be cast."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, dtype: Any) -> Batch:
        return Batch(self.x.to(dtype))


class Unpacks(nn.Module):
    """Shows the format of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: Any, *, more: Any) -> Any:
        return [batch.x.dtype, *(one.x.dtype for one in more)]


def own_class() -> tuple[Any, Any]:
    found = []
    for level in ("O0", "O2", "O3"):
        model = amp.initialize(Unpacks(), opt_level=level, verbosity=0)
        found.append(model(Batch(X.double()), more=[Batch(X)]))
    return found, [[FP32] * 2, [HALF] * 2, [HALF] * 2]


def state_of_masters() -> tuple[Any, Any]:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    model(X).sum().backward()
    optimizer.step()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    masters = list(amp.master_params(optimizer))
    found = [optimizer.state[p]["momentum_buffer"].flatten() for p in masters if p in optimizer.state]
    optimizer.load_state_dict(optimizer.state_dict())
    found += [optimizer.state.get(p)["momentum_buffer"].flatten() for p in masters]
    return found, [[1.0, 2.0], [1.0]] * 2


def losses() -> tuple[Any, Any]:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", num_losses=2, loss_scale="dynamic", verbosity=0)
    amp._amp_state.loss_scalers[1]._loss_scale = 8.0
    with amp.scale_loss(model(X).sum(), optimizer, loss_id=1) as scaled:
        grown = float(scaled.detach())
        scaled.backward()
    return (grown, [s["loss_scale"] for s in amp.state_dict().values()]), (24.0, [65536.0, 8.0])


def ceiling() -> tuple[Any, Any]:
    started("O2", max_loss_scale=1024.0)
    return amp.state_dict()["loss_scaler0"], {"loss_scale": 1024.0, "unskipped": 0}


def states() -> tuple[Any, Any]:
    started("O2")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}})
    return amp.state_dict(), {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}}


def initialised(**words: Any) -> Any:
    amp.init(**words)
    return (X @ X.mT).dtype


def banned(allowed: bool) -> Any:
    amp.init(allow_banned=allowed)
    try:
        return nn.functional.binary_cross_entropy(torch.tensor([0.5]).half(), torch.tensor([1.0]).half()).dtype
    except NotImplementedError:
        return "refused"


def printed(**words: Any) -> bool:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        amp.init(**words)
        torch.mm(X, X.mT)
    return "Float->Half" in out.getvalue()


V = torch.tensor([1.0 + 2.0**-12])
"""Is 1 in fp16."""
SEEN = {
    "half": ([1.0], None),
    "float": ([1.0 + 2.0**-12], [FP32, FP32]),
    "promote": ([1.0 + 2.0**-12], [HALF, FP32]),
}
"""Rule -> the value seen of `V`, and the formats seen of two halves, and of a half beside fp32. (Without fp16 units
half functions see fp16 values in fp32 tensors.)"""


def seen(function: Callable[..., Any], rule: str) -> tuple[Any, Any]:
    both = [function(X.half(), X.half())[0].dtype, function(X.half(), X)[0].dtype]
    return (function(V)[0], None if rule == "half" else both), SEEN[rule]


class Functions:
    """Functions of one's own."""

    @staticmethod
    def same(*tensors: Any) -> Any:
        return tensors


def registered(rule: str) -> Call:
    def call() -> tuple[Any, Any]:
        before = Functions.same
        try:
            getattr(amp, f"register_{rule}_function")(Functions, "same")
            amp.init()
            return seen(Functions.same, rule)
        finally:
            amp._amp_state.handle._deactivate()
            Functions.same = before  # type: ignore[method-assign]

    return call


def decorated(rule: str) -> Call:
    def call() -> tuple[Any, Any]:
        function = getattr(amp, f"{rule}_function")(lambda *tensors: tensors)
        assert function(V)[0] is V  # no casts before init
        amp.init()
        return seen(function, rule)

    return call


def off() -> tuple[Any, Any]:
    amp.init()
    with amp.disable_casts():
        inside = torch.mm(X, X.mT).dtype
    return (inside, torch.mm(X, X.mT).dtype), (FP32, HALF)


def handles(name: str) -> Call:
    def call() -> tuple[Any, Any]:
        made: Any = amp.init(verbose=False)
        if name == "is_active":
            active = made.is_active()
            made._deactivate()
            return (active, made.is_active()), (True, False)
        if name == "_disable_casts":
            with made._disable_casts():
                return (made.is_active(), torch.mm(X, X.mT).dtype), (False, FP32)
        if name in ("_clear_cache", "remove_cache", "has_cache", "cache"):
            made._clear_cache()
            made.remove_cache(X)
            return (made.has_cache, len(made.cache)), (True, 0)
        if name == "wrap_optimizer":
            return wrapped(made)
        if name == "scale_loss":
            with contextlib.suppress(RuntimeError):
                made.scale_loss(X, None)
                return "taken", "refused"
            return "refused", "refused"
        return made.verbose, False

    return call


def wrapped(made: Any) -> tuple[Any, Any]:
    model = linear()
    optimizer = made.wrap_optimizer(torch.optim.SGD(model.parameters(), 2.0), num_loss=1)
    with optimizer.scale_loss(model(X).sum() / 4) as scaled:
        scaled.backward()
    optimizer.step()
    return (isinstance(optimizer, opt.OptimWrapper), model.bias), (True, [-0.5])


def no_handle() -> tuple[Any, Any]:
    made = amp.init(enabled=False)
    return (isinstance(made, handle.NoOpHandle), made.is_active(), (X @ X.mT).dtype), (True, False, FP32)


def own_scale() -> tuple[Any, Any]:
    made = scaler.LossScaler("dynamic", init_scale=16.0, scale_factor=2.0, scale_window=1, max_loss_scale=32.0)
    seen = [made.loss_scale()]
    for bad in (False, False, True):
        made.clear_overflow_state()
        made._has_overflow = bad
        seen.append(made.update_scale())
        seen.append(made.loss_scale())
    return seen, [16.0, False, 32.0, False, 32.0, True, 16.0]


def unscaled() -> tuple[Any, Any]:
    made, master = scaler.LossScaler(4.0), torch.zeros(2)
    made.unscale([torch.tensor([4.0, 8.0]).half()], [master], 4.0)
    return master, [1.0, 2.0]


def with_stash() -> tuple[Any, Any]:
    made, master = scaler.LossScaler(4.0), torch.zeros(2)
    made.unscale_with_stashed([torch.tensor([4.0, 8.0])], [torch.tensor([10.0, 20.0])], [master])
    return master, [11.0, 22.0]


def stash() -> tuple[Any, Any]:
    model, optimizer = started("O2")
    found = optimizer._amp_stash
    counts = [len(found.all_fp16_params), len(found.all_fp32_from_fp16_params), len(found.all_fp32_from_fp32_params)]
    return (isinstance(found, AmpOptimizerState), counts, found.all_fp16_params[0] is model.weight), (
        True,
        [2, 2, 0],
        True,
    )


def by_hand(flat: bool) -> Call:
    def call() -> tuple[Any, Any]:
        model = linear().half()
        low, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
        model(X.half()).sum().backward()
        fp16_utils.model_grads_to_master_grads(low, masters, flat)
        torch.optim.SGD(masters, 0.5).step()
        fp16_utils.master_params_to_model_params(low, masters, flat)
        return (len(masters), masters[0].dtype, [float(v) for p in low for v in p.detach().flatten()]), (
            1 if flat else 2,
            FP32,
            AFTER,
        )

    return call


def fp16_optimizer() -> tuple[Any, Any]:
    model = linear().half()
    optimizer = fp16_utils.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), 2.0), dynamic_loss_scale=True, verbose=False
    )
    optimizer.zero_grad()
    optimizer.backward(model(X.half()).float().sum() / 4)
    clipped = optimizer.clip_master_grads(1e9)
    optimizer.step()
    return ([float(v) for p in model.parameters() for v in p.detach().flatten()], clipped, optimizer.loss_scale), (
        AFTER, math.sqrt(6.0) / 4, 65536.0,
    )  # fmt: skip


def old_scales() -> tuple[Any, Any]:
    made, seen = fp16_utils.DynamicLossScaler(init_scale=8, scale_factor=2.0, scale_window=2), []
    for bad in (True, False, False, False):
        made.update_scale(bad)
        seen.append(made.loss_scale)
    return (seen, fp16_utils.LossScaler(4).loss_scale), ([4.0, 4.0, 8.0, 8.0], 4.0)


class Bn(nn.Sequential):
    """A Linear and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))

    @property
    def formats(self) -> list[Any]:
        return [p.dtype for p in self.parameters()]


def to_halves() -> tuple[Any, Any]:
    net = Bn()
    made = fp16_utils.network_to_half(net)
    return (net.formats, made.eval()(X).dtype), ([HALF, HALF, FP32, FP32], HALF)


def converted() -> tuple[Any, Any]:
    one = nn.Linear(2, 2)
    fp16_utils.convert_module(one, HALF)
    return (fp16_utils.convert_network(Bn(), HALF).formats, one.weight.dtype), ([HALF, HALF, FP32, FP32], HALF)


CHILD = """
import json, os
import torch
from halfstep.compat.apex import parallel
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
def gradients(**words):
    layer = torch.nn.Linear(2, 1)
    model = parallel.DistributedDataParallel(layer, **words)
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    return [v for p in layer.parameters() for v in p.grad.flatten().tolist()]
found = {"": gradients()}
for name, value in (("message_size", 1), ("allreduce_always_fp32", True), ("gradient_average", False),
                    ("gradient_predivide_factor", 4.0)):
    found[name] = gradients(**{name: value})
tensors = [torch.tensor([2.0])]
parallel.Reducer(tensors).reduce()
parallel.Reducer(torch.nn.Linear(2, 1)).reduce()
found["reducer"] = tensors[0].tolist()
found["groups"] = [parallel.create_syncbn_process_group(size) is None for size in (0, 1)]
print(json.dumps(found), flush=True)
os._exit(0)  # the group's threads end with the process: nothing waits for them
"""


@functools.cache
def of_one_process() -> dict[str, Any]:
    """Return what a process group of one process gives, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def reduced(name: str = "") -> Call:
    return lambda: (of_one_process()[name], [1.0, 2.0, 1.0])


def refused(**words: Any) -> Call:
    def call() -> tuple[Any, Any]:
        try:
            parallel.DistributedDataParallel(linear(), **words)
        except ValueError:
            return "refused", "refused"
        return "taken", "refused"

    return call


def reducer() -> tuple[Any, Any]:
    return of_one_process()["reducer"], [2.0]


def groups() -> tuple[Any, Any]:
    return of_one_process()["groups"], [True, False]


def synced() -> tuple[Any, Any]:
    converted: Any = parallel.convert_syncbn_model(Bn())
    norm = parallel.SyncBatchNorm(1, eps=1e-12, momentum=0.1, affine=True, track_running_stats=True, process_group=None,
                                  channel_last=False, fuse_relu=True)  # fmt: skip
    x = torch.tensor([[1.0], [3.0]])
    return (isinstance(converted[1], parallel.SyncBatchNorm), norm(x), norm(x, torch.tensor([[2.0], [2.0]]))), (
        True, np.array([[0], [1]], np.float32), np.array([[1], [3]], np.float32),
    )  # fmt: skip


def larc(clip: bool) -> Call:
    def call() -> tuple[Any, Any]:
        p = nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = parallel.LARC(torch.optim.SGD([p], 0.1, weight_decay=0.5), trust_coefficient=0.01, clip=clip)
        p.grad = torch.tensor([0.6, 0.8])
        optimizer.step()
        rate = 0.01 * 5 / (1 + 5 * 0.5 + 1e-8)
        rate = min(rate / 0.1, 1.0) if clip else rate
        return p, [3.0 - 0.1 * rate * (0.6 + 1.5), 4.0 - 0.1 * rate * (0.8 + 2.0)]

    return call


def weight_after(make: Callable[[Any], Any]) -> float:
    """Return a weight that began at 1 after the gradients 0.5 and -1."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = make([weight])
    for gradient in (0.5, -1.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    return weight.item()


def adam(*, decoupled: bool, correct: bool = True) -> float:
    weight, first, second = 1.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -1.0), 1):
        gradient += 0.0 if decoupled else 0.1 * weight
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        a, b = (1 - 0.8**step, 1 - 0.9**step) if correct else (1.0, 1.0)
        weight -= 0.1 * (first / a / (math.sqrt(second / b) + 1e-3) + (0.1 * weight if decoupled else 0.0))
    return weight


def lamb() -> float:
    weight, first, second = 1.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -1.0), 1):
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        update = first / (1 - 0.8**step) / (math.sqrt(second / (1 - 0.9**step)) + 1e-3) + 0.1 * weight
        weight -= 0.1 * abs(weight) / abs(update) * update
    return weight


def novograd() -> float:
    weight, first, norm = 1.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -1.0), 1):
        norm = abs(gradient) if step == 1 else math.sqrt(0.9 * norm**2 + 0.1 * gradient**2)
        first = 0.8 * first + 0.2 * gradient
        update = first / (1 - 0.8**step) / (norm / math.sqrt(1 - 0.9**step) + 1e-3) + 0.1 * weight
        weight -= 0.1 * update
    return weight


def adagrad(*, decoupled: bool) -> float:
    weight, total = 1.0, 0.0
    for gradient in (0.5, -1.0):
        gradient += 0.0 if decoupled else 0.1 * weight
        total += gradient**2
        weight -= 0.1 * (gradient / (math.sqrt(total) + 1e-3) + (0.1 * weight if decoupled else 0.0))
    return weight


def own_rates(kind: Any) -> Call:
    def call() -> tuple[Any, Any]:
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        optimizer = kind([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.25}])
        return [group["lr"] for group in optimizer.param_groups], [0.5, 0.25]

    return call


def sgd(*, last: bool) -> float:
    weight, speed = 1.0, 0.0
    for gradient in (0.5, -1.0):
        gradient += 0.0 if last else 0.1 * weight
        speed = 0.5 * speed + gradient
        weight -= 0.1 * (speed + (0.1 * weight if last else 0.0))
    return weight


def normal(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def rms(x: Any, eps: float = 1e-5) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


ROW = np.array([[1.0, 2.0, 4.0]], np.float32)
T = torch.from_numpy(ROW)
F1, F0 = torch.full((3,), 2.0), torch.full((3,), 1.0)


CALLS: dict[str, Call] = {
    "amp.initialize": every_level,
    "amp.initialize(models)": shapes,
    "amp.initialize(optimizers=None)": alone,
    "amp.initialize(opt_level='O1')": every_level,
    "amp.initialize(cast_model_type=None)": left_half,
    "amp.initialize(patch_torch_functions=None)": lambda: (
        started("O1", patch_torch_functions=True)[0](X).dtype, HALF,
    ),
    "amp.initialize(keep_batchnorm_fp32=None)": lambda: (
        [amp.initialize(Bn(), opt_level="O2", keep_batchnorm_fp32=k, verbosity=0).formats[2] for k in ("True", False)], [FP32, HALF],
    ),
    "amp.initialize(master_weights=None)": lambda: (
        [next(iter(amp.master_params(started("O2", master_weights=m)[1]))).dtype for m in (True, False)], [FP32, HALF],
    ),
    "amp.initialize(loss_scale=None)": lambda: (
        [(started("O2", loss_scale=s), amp.state_dict()["loss_scaler0"]["loss_scale"])[1] for s in ("128.0", "dynamic", 2)],
        [128.0, 65536.0, 2.0],
    ),
    "amp.initialize(cast_model_outputs=None)": lambda: (
        [started(level, cast_model_outputs=HALF)[0](X).dtype for level in ("O0", "O1", "O2")], [HALF] * 3,
    ),
    "amp.initialize(num_losses=1)": losses,
    "amp.initialize(max_loss_scale=16777216.0)": ceiling,
    "amp.initialize of a class that has to": own_class,
    "amp.initialize after steps": state_of_masters,
    "amp.scale_loss": every_level,
    "amp.scale_loss(loss)": losses,
    "amp.scale_loss(optimizers)": lambda: (
        (lambda model, optimizer: stepped(model, [optimizer]))(*started("O2")), AFTER,
    ),
    "amp.scale_loss(loss_id=0)": losses,
    "amp.scale_loss(model=None)": lambda: ((lambda m, o: stepped(m, o, model=m))(*started("O2")), AFTER),
    "amp.master_params": lambda: ([p.dtype for p in amp.master_params(started("O2")[1])], [FP32, FP32]),
    "amp.state_dict": states,
    "amp.load_state_dict": states,
    "amp.init": lambda: (initialised(), HALF),
    "amp.init(enabled=True)": lambda: ([initialised(enabled=e) for e in (True, False)], [HALF, FP32]),
    "amp.init(loss_scale='dynamic')": lambda: (
        amp.init(loss_scale=4.0).wrap_optimizer(torch.optim.SGD(linear().parameters(), 0.1))._loss_scaler[0].loss_scale(), 4.0,
    ),
    "amp.init(verbose=False)": lambda: ([printed(verbose=v) for v in (False, True)], [False, True]),
    "amp.init(allow_banned=False)": lambda: ([banned(a) for a in (False, True)], ["refused", FP32]),
    **{f"amp.{rule}_function": decorated(rule) for rule in ("half", "float", "promote")},
    **{f"amp.register_{rule}_function": registered(rule) for rule in ("half", "float", "promote")},
    "amp.disable_casts": off,
    "amp.step_was_skipped": lambda: ((lambda m, o: (stepped(m, o), amp.step_was_skipped(o))[1])(*started("O2")), False),
    "amp._amp_state": lambda: ((started("O2"), amp._amp_state.opt_properties.opt_level, len(amp._amp_state.loss_scalers))[1:], ("O2", 1)),
    "amp.lists": lambda: ("linear" in amp.lists.functional_overrides.FP16_FUNCS, True),
    "amp.lists.functional_overrides": lambda: (
        [name in amp.lists.functional_overrides.FP32_FUNCS for name in ("softmax", "linear")], [True, False],
    ),
    "amp.frontend": lambda: ((sorted(frontend.opt_levels), frontend.Properties().enabled), (["O0", "O1", "O2", "O3"], False)),
    "amp.handle": lambda: (handle.scale_loss is amp.scale_loss, True),
    "amp.handle.AmpHandle": lambda: (isinstance(amp.init(), handle.AmpHandle), True),
    **{f"amp.handle.AmpHandle.{name}": handles(name) for name in (
        "is_active", "wrap_optimizer", "scale_loss", "_disable_casts", "_clear_cache", "has_cache", "remove_cache",
        "verbose", "cache",
    )},
    "amp.handle.NoOpHandle": no_handle,
    "amp.opt": lambda: wrapped(amp.init()),
    "amp.opt.OptimWrapper": lambda: wrapped(amp.init()),
    "amp.scaler": own_scale,
    "amp.scaler.LossScaler": own_scale,
    "amp.scaler.LossScaler(loss_scale)": lambda: (scaler.LossScaler(8.0).loss_scale(), 8.0),
    "amp.scaler.LossScaler(init_scale=65536.0)": lambda: (scaler.LossScaler("dynamic", init_scale=2.0).loss_scale(), 2.0),
    "amp.scaler.LossScaler(scale_window=2000)": own_scale,
    "amp.scaler.LossScaler(max_loss_scale=16777216.0)": own_scale,
    "amp.scaler.LossScaler.loss_scale": own_scale,
    "amp.scaler.LossScaler.unscale": unscaled,
    "amp.scaler.LossScaler.unscale_with_stashed": with_stash,
    "amp.scaler.LossScaler.clear_overflow_state": own_scale,
    "amp.scaler.LossScaler.update_scale": own_scale,
    "amp._initialize": alone,
    "amp._process_optimizer.AmpOptimizerState": stash,
    "fp16_utils.BN_convert_float": lambda: (fp16_utils.BN_convert_float(Bn().half()).formats, [HALF, HALF, FP32, FP32]),
    "fp16_utils.network_to_half": to_halves,
    "fp16_utils.convert_module": converted,
    "fp16_utils.convert_network": converted,
    "fp16_utils.FP16Model": lambda: (fp16_utils.FP16Model(linear())(X).dtype, HALF),
    "fp16_utils.tofp16": lambda: (fp16_utils.tofp16()(X).dtype, HALF),
    "fp16_utils.prep_param_lists": by_hand(flat=False),
    "fp16_utils.model_grads_to_master_grads": by_hand(flat=True),
    "fp16_utils.master_params_to_model_params": by_hand(flat=True),
    "fp16_utils.to_python_float": lambda: (fp16_utils.to_python_float(torch.tensor([2.0])), 2.0),
    "fp16_utils.clip_grad_norm": lambda: (fp16_utils.clip_grad_norm([], 1.0), 0.0),
    "fp16_utils.FP16_Optimizer": fp16_optimizer,
    "fp16_utils.LossScaler": old_scales,
    "fp16_utils.DynamicLossScaler": old_scales,
    "multi_tensor_apply.multi_tensor_applier": lambda: (multi_tensor_apply.multi_tensor_applier.available, False),
    "multi_tensor_apply.MultiTensorApply": lambda: (multi_tensor_apply.MultiTensorApply(7).chunk_size, 7),
    "normalization.FusedLayerNorm": lambda: (normalization.FusedLayerNorm(3, 1e-5, True, False)(T), normal(ROW)),
    "normalization.FusedRMSNorm": lambda: (normalization.FusedRMSNorm(3)(T), rms(ROW)),
    "normalization.MixedFusedLayerNorm": lambda: (
        normalization.MixedFusedLayerNorm([3])(T.half()), normal(ROW),
    ),
    "normalization.MixedFusedRMSNorm": lambda: (normalization.MixedFusedRMSNorm([3]).half()(T).dtype, HALF),
    "normalization.fused_layer_norm": lambda: (normalization.fused_layer_norm(T, (3,), 1e-5), normal(ROW)),
    "normalization.fused_layer_norm_affine": lambda: (
        normalization.fused_layer_norm_affine(T, F1, F0, (3,), 1e-5), normal(ROW) * 2 + 1,
    ),
    "normalization.fused_rms_norm": lambda: (normalization.fused_rms_norm(T, (3,), 1e-5), rms(ROW)),
    "normalization.fused_rms_norm_affine": lambda: (normalization.fused_rms_norm_affine(T, F1, (3,), 1e-5), rms(ROW) * 2),
    "parallel.DistributedDataParallel": reduced(),
    "parallel.DistributedDataParallel(message_size=10000000)": reduced("message_size"),
    "parallel.DistributedDataParallel(shared_param=None)": refused(shared_param=True),
    "parallel.DistributedDataParallel(allreduce_always_fp32=False)": reduced("allreduce_always_fp32"),
    "parallel.DistributedDataParallel(gradient_average=True)": reduced("gradient_average"),
    "parallel.DistributedDataParallel(gradient_predivide_factor=1.0)": reduced("gradient_predivide_factor"),
    "parallel.DistributedDataParallel(gradient_average_split_factor=None)": refused(gradient_average_split_factor=2.0),
    "parallel.Reducer": reducer,
    "parallel.SyncBatchNorm": synced,
    "parallel.convert_syncbn_model": synced,
    "parallel.create_syncbn_process_group": groups,
    "parallel.LARC": larc(clip=True),
    "parallel.LARC without clip": larc(clip=False),
    "optimizers.FusedAdam": lambda: (
        weight_after(lambda p: optimizers.FusedAdam(p, 0.1, True, (0.8, 0.9), 1e-3, True, 0.1)), adam(decoupled=True),
    ),
    "optimizers.FusedAdam L2, not corrected": lambda: (
        weight_after(lambda p: optimizers.FusedAdam(p, 0.1, False, (0.8, 0.9), 1e-3, False, 0.1)), adam(decoupled=False, correct=False),
    ),
    "optimizers.FusedAdam groups": own_rates(optimizers.FusedAdam),
    "optimizers.FusedSGD": lambda: (weight_after(lambda p: optimizers.FusedSGD(p, 0.1, 0.5, 0.0, 0.1)), sgd(last=False)),
    "optimizers.FusedSGD decaying last": lambda: (
        weight_after(lambda p: optimizers.FusedSGD(p, 0.1, 0.5, 0.0, 0.1, wd_after_momentum=True)), sgd(last=True),
    ),
    "optimizers.FusedSGD groups": own_rates(optimizers.FusedSGD),
    "optimizers.FusedLAMB": lambda: (
        weight_after(lambda p: optimizers.FusedLAMB(p, 0.1, True, (0.8, 0.9), 1e-3, 0.1, max_grad_norm=0.0)), lamb(),
    ),
    "optimizers.FusedLAMB groups": own_rates(optimizers.FusedLAMB),
    "optimizers.FusedNovoGrad": lambda: (
        weight_after(lambda p: optimizers.FusedNovoGrad(p, 0.1, True, (0.8, 0.9), 1e-3, 0.1)), novograd(),
    ),
    "optimizers.FusedNovoGrad groups": own_rates(optimizers.FusedNovoGrad),
    "optimizers.FusedAdagrad": lambda: (weight_after(lambda p: optimizers.FusedAdagrad(p, 0.1, 1e-3, 0.1)), adagrad(decoupled=False)),
    "optimizers.FusedAdagrad decoupled": lambda: (
        weight_after(lambda p: optimizers.FusedAdagrad(p, 0.1, 1e-3, 0.1, adagrad_w_mode=True)), adagrad(decoupled=True),
    ),
}  # fmt: skip
