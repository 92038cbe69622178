"""Training runs that are cut off at one line, and what must be true of the state that is left.

A run is cut at the n-th event (a call or a line) in the code of halfstep, torch's optimizers and schedulers: by Ctrl-C,
by a lack of memory, or by a hook of the user's. The state that can be saved then is that before the update or that
after it, or it is refused by name; and training on, from there or from the checkpoint that the refusal asks for, ends
in the state of a run that was not cut off.
"""

from __future__ import annotations

import inspect
import linecache
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import _pop_mode

import halfstep as hs
from halfstep.cast.state import STATE
from halfstep.errors import StepError
from halfstep.step.moments import Phase
from tests.step.late import late

HERE = str(Path(hs.__file__).parent)
TRACED = (HERE, str(Path(torch.optim.__file__).parent))

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "lion": lambda p: hs.Lion(p, 1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adam, one by one": lambda p: torch.optim.Adam(p, 1e-2, foreach=False, amsgrad=True),
}
SCHEDULERS: dict[str, Any] = {
    "none": lambda o: None,
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.9),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=40, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "two": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
}
POLICIES: dict[str, hs.Policy] = {
    "mixed, bf16": hs.Policy.of("mixed", dtype="bf16"),
    "mixed, fp16": hs.Policy.of("mixed", dtype="fp16"),
    "O2, split": hs.Policy.of("O2", dtype="bf16", master="split"),
    "O2, master": hs.Policy.of("O2", dtype="bf16", master="master"),
    "O2, kahan": hs.Policy.of("O2", dtype="bf16", master="kahan"),
    "O2, fp16": hs.Policy.of("O2", dtype="fp16"),
    "stochastic": hs.Policy.of("O2", dtype="bf16", master="stochastic"),
    "pure": hs.Policy.of("pure", dtype="bf16"),
}
UPDATES = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and how."""

    policy: str = "mixed, bf16"
    optimizer: str = "adamw"
    scheduler: str = "none"
    accumulate: int = 1
    norm: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    in_backward: bool = False
    behind: bool = False  # whether flags are late
    bad: int = -1  # the micro-batch whose loss is not finite

    def step(self) -> hs.TrainStep:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8) if self.norm else nn.Identity()
        model = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 2))
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        step = hs.TrainStep(
            model,
            optimizer,
            loss_fn,
            policy=POLICIES[self.policy],
            accumulate=self.accumulate,
            scheduler=SCHEDULERS[self.scheduler](optimizer),
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            blackbox=False,
            update_in_backward=self.in_backward,
        )
        if self.behind:
            late(step)
        return step

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 + number)
        x = torch.randn(6, 4, generator=generator)
        return (x * float("inf") if number == self.bad else x), torch.randint(0, 2, (6,), generator=generator)

    def states(self) -> list[dict[str, Any]]:
        """Return what is saved before the first update and after each."""
        step = self.step()
        found = [plain(step.state_dict())]
        for number in range(UPDATES * self.accumulate):
            step(*self.batch(number))
            if (number + 1) % self.accumulate == 0:
                found.append(plain(step.state_dict()))
        return found


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def plain(tree: Any) -> Any:
    """Return a copy of a saved state in which equal states are equal, nan included."""
    if isinstance(tree, Tensor):
        return tree.dtype, repr(tree.detach().double().tolist())
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    return repr(tree)


def is_instant(frame: FrameType) -> bool:
    """Return whether Python handles no signal right before a line.

    That is a ``try:``, where a ``with`` calls ``__exit__``, and the first line of a ``finally``.
    """
    above, line = (linecache.getline(frame.f_code.co_filename, frame.f_lineno - n).lstrip() for n in (1, 0))
    return line.startswith(("with ", "try:")) or above.startswith("finally:")


def is_resumed(frame: FrameType) -> bool:
    """Return whether a generator goes on: up to Python 3.10 what a tracer raises then passes by its ``finally``.

    A signal is handled in the generator, as in newer versions.
    """
    return sys.version_info < (3, 11) and frame.f_lasti > 0 and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


@dataclass
class Knife:
    """Cuts at the n-th event of a block.

    Attributes:
        at: the number of the event, from 0.
        raises: what is raised there; KeyboardInterrupt comes by a signal.
        seen: how many events there were.
        where: the line it cut at; "" as long as it has not.
    """

    at: int
    raises: type[BaseException]
    seen: int = 0
    where: str = ""

    def __enter__(self) -> Knife:
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if (event == "call" and not is_resumed(frame)) or (event == "line" and not is_instant(frame)):
            self._see(frame, event)
        return self._trace

    def _see(self, frame: FrameType, event: str) -> None:
        number, self.seen = self.seen, self.seen + 1
        if number == self.at and not self.where:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({event})"
            if self.raises is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise self.raises("cut")


def cut_run(run: Run, states: list[dict[str, Any]], micro: int, with_: Knife | str, outcomes: list[str]) -> str:
    """Cut micro-batch `micro` of `run`; return what is wrong with what is left, "" for nothing.

    Args:
        run: what is trained.
        states: what it saves if it is not cut off.
        micro: number of the micro-batch that is cut, from 0.
        with_: a knife, or where a hook raises.
        outcomes: gets "before", "after", "within a window" or "refused", or nothing if there was no such event.
    """
    step = run.step()
    checkpoint, done = step.state_dict(), 0
    for number in range(micro):
        if number % run.accumulate == 0:
            checkpoint = plain_copy(step.state_dict())
        step(*run.batch(number))
    data = run.batch(micro)
    if micro % run.accumulate == 0:
        checkpoint = plain_copy(step.state_dict())
    knife = Nick(with_, step) if isinstance(with_, str) else with_
    handlers = signal.getsignal(signal.SIGINT)
    try:
        with knife:
            step(*data)
    except knife.raises:
        pass
    except StepError as error:
        if not isinstance(error.__cause__, knife.raises):
            return f"cut at {knife.where}: {error}"
    except Exception as error:
        _close_regions()
        return f"cut at {knife.where}: {type(error).__name__}: {error}"
    if not knife.where:
        return ""
    if _len_torch_function_stack() or STATE.frames or torch.is_autocast_enabled("cpu"):
        _close_regions()
        return f"cut at {knife.where}: a region stays open"
    if signal.getsignal(signal.SIGINT) is not handlers:
        return f"cut at {knife.where}: the handler of SIGINT is another one"
    before = micro // run.accumulate
    try:
        done = step.record.done + step.record.micro_batches
        if step.record.micro_batches and step._moments.phase is Phase.REST:
            outcomes.append("within a window")
        else:
            saved = step.state_dict()
            done = saved["step"]
            there = plain(saved)
            if there not in (states[before], states[before + 1]):
                parts = [k for k in there if there[k] not in (states[before][k], states[before + 1][k])]
                return (
                    f"cut at {knife.where}: the state is neither that before nor that after; torn: {parts or 'mixed'}"
                )
            outcomes.append("after" if there == states[before + 1] else "before")
    except StepError as error:
        if "cut off" not in str(error):
            return f"cut at {knife.where}: {error}"
        try:
            step(*data)
            return f"cut at {knife.where}: state_dict refuses and a call goes on"
        except StepError:
            pass
        step.load_state_dict(checkpoint)
        done = checkpoint["step"]
        outcomes.append("refused")
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        return f"cut at {knife.where} ({outcomes[-1]}): gradients are switched off"
    try:
        for number in range(done, UPDATES * run.accumulate):
            step(*run.batch(number))
        there = plain(step.state_dict())
    except Exception as error:
        return f"cut at {knife.where} ({outcomes[-1]}): training on raises {type(error).__name__}: {error}"
    if there != states[-1]:
        parts = [key for key in there if there[key] != states[-1][key]]
        return f"cut at {knife.where} ({outcomes[-1]}): training on ends in another state; {parts}"
    return ""


def cut_everywhere(
    run: Run, micro: int, kind: type[BaseException], stride: int = 1, first: float = 0.0
) -> Counter[str]:
    """Cut micro-batch `micro` of `run` at every `stride`-th event from the share `first` on; return the outcomes."""
    states = run.states()
    if run.in_backward or run.behind:
        assert states == replace(run, in_backward=False, behind=False).states()
    whole = Knife(-1, kind)
    assert cut_run(run, states, micro, whole, []) == ""
    outcomes: list[str] = []
    problems = [
        problem
        for at in range(int(first * whole.seen), whole.seen, stride)
        if (problem := cut_run(run, states, micro, Knife(at, kind), outcomes))
    ]
    assert not problems
    return Counter(outcomes)


def _close_regions() -> None:
    while _len_torch_function_stack():
        _pop_mode()
    torch.set_autocast_enabled("cpu", False)
    STATE.frames.clear()
    STATE.mode = STATE.bound = STATE.above = None


class Nick:
    """Raises once, in a hook of the user's: what `Knife` does, at a place with a name."""

    seen = 0

    def __init__(self, place: str, step: hs.TrainStep) -> None:
        self.raises, self.where, self._place = ZeroDivisionError, "", place
        model, optimizer = step.model, step.optimizer
        if place == "forward":
            self._handle: Any = model.register_forward_hook(self)
        elif place == "backward":
            self._handle = next(model.parameters()).register_hook(self)
        elif place == "before the step":
            self._handle = optimizer.register_step_pre_hook(self)
        elif place == "after the step":
            self._handle = optimizer.register_step_post_hook(self)
        else:
            step.watchers.append(self)  # type: ignore[arg-type]
            self._handle = None
        self._step = step

    def __enter__(self) -> Nick:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._handle is None:
            self._step.watchers.clear()
        else:
            self._handle.remove()

    def __call__(self, *args: Any) -> None:
        self.where = f"the user's hook, {self._place}"
        raise self.raises("cut")

    def before_update(self, parameters: Any) -> None:
        if self._place == "before the update":
            self()

    def after_update(self, bad: Tensor) -> None:
        if self._place == "after the update":
            self()


PLACES = ("forward", "backward", "before the step", "after the step", "before the update", "after the update")


def plain_copy(tree: Any) -> Any:
    """Return a copy with tensors of its own."""
    if isinstance(tree, dict):
        return {key: plain_copy(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [plain_copy(value) for value in tree]
    return tree.clone() if isinstance(tree, Tensor) else tree


def without_warnings(check: Callable[[], str]) -> str:
    """Run `check`; torch warns of schedulers that advance before an optimizer of its own has stepped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check()
