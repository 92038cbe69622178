"""What `test_host_state` runs in a process with the host device: `state="host"` beside `state="device"`."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.auto.choose import Choice
from halfstep.errors import StepError
from halfstep.testing import host_device

NAME = "npu"
STATES = ("device", "host")
FORMS: dict[str, Any] = {"foreach": False}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, **FORMS),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, **FORMS),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, **FORMS),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, **FORMS),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2, **FORMS),
    "Lion": lambda m: hs.Lion(m.parameters(), lr=1e-3),
    "list": lambda m: [torch.optim.SGD(_split(m)[0], lr=0.1, momentum=0.9), torch.optim.AdamW(_split(m)[1])],
    "dict": lambda m: {"muon": torch.optim.Muon(_split(m)[0]), "adam": torch.optim.AdamW(_split(m)[1])},
}
AUTO = Choice(policy=hs.Policy.of("O0"), compiled=False, line="auto: O0")
MOMENTS = ("forward", "before", "hook", "after")
RESUMED = (("AdamW", "mixed"), ("SGD", "low states"), ("dict", "pure"))
WIDE = {"fp32": ["layer_norm", "batch_norm"]}
POLICIES = {
    "O0": hs.Policy.of("O0"),
    "O1": hs.Policy.of("O1", dtype="bf16"),
    "torch": hs.Policy.of("torch", dtype="bf16").with_ops(**WIDE),
    "mixed": hs.Policy.of("mixed", dtype="bf16").with_ops(**WIDE),
    "O2": hs.Policy.of("O2", dtype="fp16", emulate="always").with_ops(**WIDE),
    "pure": hs.Policy.of("pure", dtype="bf16"),
    "lean": hs.Policy.of("lean", dtype="bf16"),
    "low states": hs.Policy.of("pure", dtype="bf16", state="low"),
}


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def net(device: Any) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16),
                         nn.GELU(), nn.Linear(16, 4))  # fmt: skip
    return made.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batches(device: Any, count: int = 4, *, bad: int = -1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(count)]
    for n, (x, _) in enumerate(made):
        if n == bad:
            x[:] = torch.inf
    return [(x.to(device), y.to(device)) for x, y in made]


def step_of(device: Any, optimizer: str, policy: str, state: str, **more: Any) -> hs.TrainStep:
    """Return a step that clips."""
    model = net(device)
    given = {"clip_norm": 1.0, "policy": POLICIES.get(policy, policy), "state": state} | more
    return hs.TrainStep(model, OPTIMIZERS[optimizer](model), loss_fn, **given)


def places(step: hs.TrainStep) -> set[str]:
    """Return where the states of the optimizer are that have more than one element."""
    tensors = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return {t.device.type for t in tensors if t.numel() > 1}


def plain(value: Any) -> Any:
    """Return a state as plain values without devices."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.detach().cpu().double().tolist()]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def trained(step: hs.TrainStep, data: list[Any]) -> Any:
    """Return results, and the state after them."""
    results = [step(*batch).host() for batch in data]
    return [(r.loss, r.scale, r.skipped, r.grad_norm) for r in results], plain(step.state_dict())


def differs(device: Any, optimizer: str, policy: str, **more: Any) -> str:
    """Return in what two steps differ with their states here and there, one of whose updates is skipped."""
    made = [step_of(device, optimizer, policy, state, **more) for state in STATES]
    data = batches(device, 6, bad=3)
    one, other = (trained(step, data) for step in made)
    where = [places(step) for step in made]
    expected = [{torch.device(device).type}, {"cpu"}]
    if where != expected:
        return f"states are on {where}"
    if str(one[0]) != str(other[0]):
        return f"results: {one[0]} and {other[0]}"
    return ", ".join(name for name in one[1] if str(one[1][name]) != str(other[1][name]))


def modes(device: Any) -> dict[str, str]:
    """Return in what two steps differ in other settings."""
    found = {
        "accumulate": differs(device, "AdamW", "O2", accumulate=2, blackbox=False),
        "clip_value": differs(device, "Adam", "mixed", clip_norm=None, clip_value=0.01, blackbox=False),
        "blackbox": differs(device, "SGD", "pure", blackbox=True),
        "retry": differs(device, "AdamW", "O2", retry=3, scaler=None),
    }
    made = [step_of(device, "AdamW", "auto", state, compile=False) for state in STATES]
    with mock.patch("halfstep.step.undecided.choose", lambda *ignored: (AUTO, None)):
        found["auto"] = "".join(_compared(made, batches(device, 4)))
    for name, policy in (("AdamW", "mixed"), ("list", "O2")):
        made = [step_of(device, name, policy, state) for state in STATES]
        for step in made:
            inner = [*getattr(step.optimizer, "optimizers", {"": step.optimizer}).values()]
            step.scheduler = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in inner]  # type: ignore[assignment]
        found[f"scheduler {name}"] = "".join(_compared(made, batches(device, 4, bad=1)))
    return found


def _compared(made: list[hs.TrainStep], data: list[Any]) -> list[str]:
    one, other = (trained(step, data) for step in made)
    same = str(one) == str(other)
    return [] if same and places(made[1]) == {"cpu"} else [f"{one[0]} and {other[0]}, {places(made[1])}"]


def held(device: Any, state: str, optimizer: str, policy: str) -> dict[str, int]:
    """Return the bytes on the device at the end of a forward pass, and those of the states."""
    found: list[int] = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model, x, y)
        gc.collect()
        there = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.device.type == NAME]
        found.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there}.values()))
        return loss

    gc.collect()
    gc.freeze()  # what was there before is not looked through
    step = step_of(device, optimizer, policy, state)
    first, second, last = batches(device, 3)
    step(*first), step(*second)
    step.loss_fn = watched
    step(*last)
    tensors = [t for s in step.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return {"held": found[-1], "states": sum(t.nbytes for t in tensors if t.numel() > 1)}


def resumed(device: Any, optimizer: str, policy: str) -> dict[str, bool]:
    """Return whether a checkpoint of each kind of step is that of the other, and is continued by it."""
    data, verdicts = batches(device, 4), {}
    for state, other in (("device", "host"), ("host", "device")):
        first, twin = (step_of(device, optimizer, policy, one) for one in (state, other))
        trained(first, data[:2]), trained(twin, data[:2])
        with tempfile.TemporaryDirectory() as folder:
            hs.save(first, folder)
            again = step_of(device, optimizer, policy, other)
            again(*data[3])
            hs.load(again, folder)
            verdicts[f"{state} saved"] = plain(again.state_dict()) == plain(first.state_dict())
        third = step_of(device, optimizer, policy, other)
        third.load_state_dict(copy.deepcopy(first.state_dict()))
        ends = [trained(step, data[2:]) for step in (first, twin, again, third)]
        verdicts[f"{state} continued"] = all(end == ends[0] for end in ends)
        verdicts[f"{other} where it belongs"] = places(again) == {"cpu" if other == "host" else NAME}
    return verdicts


def copied(device: Any) -> list[bool]:
    """Return whether copies of a step, and one over states that were loaded by hand, go on with its bits."""
    data, same = batches(device, 4), []
    step = step_of(device, "AdamW", "pure", "host")
    trained(step, data[:2])
    others = [copy.deepcopy(step), pickle.loads(pickle.dumps(step))]
    same += [other.state == "host" and places(other) == {"cpu"} for other in others]
    other = copy.deepcopy(step)
    other.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    same.append(places(other) == {NAME})  # torch loads to the device of a parameter, until the next call
    end = trained(step, data[2:])
    same += [trained(one, data[2:]) == end and places(one) == {"cpu"} for one in (*others, other)]
    return same


def addresses(step: hs.TrainStep) -> list[int]:
    return [t.data_ptr() for s in step.optimizer.state.values() for t in s.values() if t.numel() > 1]


def stays(device: Any) -> list[bool]:
    """Return whether memory on the host stays where it is, and a hook of a user's finds states on the device."""
    step, seen = step_of(device, "SGD", "mixed", "host"), []
    step.optimizer.register_step_pre_hook(lambda *ignored: seen.append(places(step)))
    data = batches(device, 3)
    step(*data[0])
    before = addresses(step)
    trained(step, data[1:])
    return [addresses(step) == before, seen == [set(), {NAME}, {NAME}]]


def cut(device: Any, policy: str) -> dict[str, Any]:
    """Return what is left by exceptions: in a forward pass, before the optimizer has written, and after it."""
    data, found = batches(device, 4), {}
    twin = step_of(device, "SGD", policy, "device", blackbox=False)
    end = trained(twin, data[:3])
    for moment in MOMENTS:
        step = step_of(device, "SGD", policy, "host", blackbox=False)
        trained(step, data[:1])
        saved = copy.deepcopy(step.state_dict())

        def fail(*ignored: Any) -> None:
            raise MemoryError("no room")

        with hooked(step, moment, fail):
            try:
                step(*data[1])
            except MemoryError:
                pass
        where = places(step)
        if moment == "after":
            step.load_state_dict(saved)
        trained(step, data[1:3])
        found[moment] = [sorted(where), plain(step.optimizer.state_dict()) == end[1]["optimizer"]]
    return found


def hooked(step: hs.TrainStep, moment: str, fail: Callable[..., None]) -> Any:
    if moment == "forward":
        return mock.patch.object(step._given, "loss_fn", fail)
    if moment == "hook":
        return _part(step, hs.step.Part(), step.optimizer.register_step_pre_hook(fail).remove)
    method = "before_update" if moment == "before" else "after_update"
    return _part(step, type("Fails", (hs.step.Part,), {method: fail})())


@contextmanager
def _part(step: hs.TrainStep, part: hs.step.Part, end: Callable[[], object] = bool) -> Iterator[None]:
    step.add_part(part)
    try:
        yield
    finally:
        step.remove_part(part)
        end()


def interrupted(device: Any, optimizer: str, policy: str, stride: int) -> dict[str, Any]:
    """Cut a call off at every `stride`-th line that it runs of `host_state`; return cases, refusals, other ends."""
    data, counts = batches(device, 4), {"cases": 0, "refused": 0, "other": 0}
    twin = step_of(device, optimizer, policy, "host", blackbox=False)
    end = trained(twin, data)[1]["optimizer"]
    left = at = stride
    while left <= 0 or not counts["cases"]:
        step = step_of(device, optimizer, policy, "host", blackbox=False)
        trained(step, data[:2])
        saved = copy.deepcopy(step.state_dict())
        left = _cut_off(step, data[2], at)
        at += stride
        counts["cases"] += 1
        try:
            trained(step, data[2:] if left <= 0 else data[3:])
        except StepError:
            counts["refused"] += 1
            step.load_state_dict(saved)
            trained(step, data[2:])
        counts["other"] += plain(step.optimizer.state_dict()) != end or places(step) != {"cpu"}
    return counts


def _cut_off(step: hs.TrainStep, batch: Any, at: int) -> int:
    """Raise at line `at` of `host_state` in a call; return how many lines were missing for that."""
    left = at

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("host_state.py") or "on_host" in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        step(*batch)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return max(left, 0)


def waits(device: Any) -> list[int]:
    """Return how often the host waits for the device in three updates, and in reading the optimizer's state."""
    step, data = step_of(device, "AdamW", "mixed", "host", blackbox=False), batches(device, 3)
    counts = []
    with mock.patch.object(torch.accelerator, "synchronize") as wait:
        for batch in data:
            step(*batch)
        counts.append(wait.call_count)
        step.optimizer.state_dict()
        counts.append(wait.call_count)
    return counts


def replaced(device: Any) -> list[bool]:
    """Return whether another optimizer's states are sent home too, and a monitor sees them."""
    step, data = step_of(device, "SGD", "mixed", "host"), batches(device, 4)
    monitor = hs.Monitor(step, every=1)
    trained(step, data[:2])
    step.optimizer = torch.optim.AdamW(step.model.parameters())
    trained(step, data[2:])
    return [places(step) == {"cpu"}, bool(monitor.flush())]


def run(*, every: bool) -> dict[str, Any]:
    """Return everything that the tests look at; `every`: the bits of all other pairs, and what is cut off."""
    device = host_device(NAME)
    pairs = [(o, p) for o in OPTIMIZERS for p in POLICIES if every is not (o == "AdamW" or p == "pure")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal = {f"{o} {p}": differs(device, o, p, blackbox=False) for o, p in pairs}
        if every:
            cases = (("SGD", "mixed", 5), ("AdamW", "low states", 11))
            return {"equal": equal, "interrupted": [interrupted(device, *case) for case in cases]}
        return {
            "equal": equal,
            "modes": modes(device),
            "held": [held(device, s, o, p) for o, p in (("AdamW", "mixed"), ("SGD", "pure")) for s in STATES],
            "resumed": {f"{o} {p}": resumed(device, o, p) for o, p in RESUMED},
            "copied": copied(device),
            "stays": stays(device),
            "cut": {policy: cut(device, policy) for policy in ("mixed", "pure")},
            "waits": waits(device),
            "replaced": replaced(device),
        }


if __name__ == "__main__":
    print(json.dumps(run(every="every" in sys.argv)))
