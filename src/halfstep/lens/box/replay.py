"""Replay: run kept micro-batches again, exactly, and leave everything as it was.

Its backward pass returns the gradients of leaves, which changes no ``.grad`` and runs no hook that would step an
optimizer or reduce over ranks; only re-entrant checkpointing needs accumulation into ``.grad``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import StepError
from halfstep.formats import LOW_DTYPES
from halfstep.lens.box.trace import Trace
from halfstep.lens.calls import extremes
from halfstep.lens.tracing import KernelMode, Sink
from halfstep.meeting import processes
from halfstep.snapshot import Modules, Snapshot, contents, gradients, noted, put_buffers
from halfstep.step.parts.record import MicroBatch, put_random
from halfstep.torch_private.autograd import engine_run_backward
from halfstep.trees import map_tensors
from halfstep.update.updater import Deferral

Windows = Callable[..., "Attempt"]  # ``windows(window, traced=, factor=, only=) -> Attempt``: see `Replay.windows`

COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
REENTRANT = "CheckpointFunctionBackward"  # the node of a checkpoint that accumulates into ``.grad``


@dataclass(eq=False)
class Attempt:
    """The outcome of one replay."""

    losses: list[Tensor] = field(default_factory=list)  # detached, one for each micro-batch
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # leaf -> its gradient, summed over the micro-batches
    bad: bool = False  # whether the loss or a gradient is not finite
    index: int | None = None  # the first micro-batch that is not finite, or None
    trace: Trace | None = None  # the instruments of micro-batch `index`; None in a replay without
    odd: str = ""  # why the replay shows nothing, in words: the loss function returned no loss
    added: Tensor | None = None  # the leaf whose gradients are finite in each micro-batch and whose sum is not, or None

    @property
    def only(self) -> int | None:
        """The micro-batch that is not finite by itself; None if it takes the sum of all."""
        return None if self.added is not None else self.index


@dataclass(eq=False)
class Replay:
    """Runs micro-batches again."""

    model: nn.Module  # the user's model, unwrapped
    forward: Callable[[tuple[Any, ...], dict[str, Any]], Any]  # ``forward(batch, named) -> loss``, in its region
    window: Sequence[MicroBatch]  # the micro-batches
    buffers: Sequence[tuple[nn.Module, str, Tensor]] = ()  # (module, name, value before the window)
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # returns the context of a backward pass
    wide: bool = False  # whether gradients of micro-batches are added in fp32, whatever the format of their parameter

    def run(self, *, traced: bool = False, factor: float = 1.0, only: int | None = None) -> Attempt:
        """Run the window once more, or micro-batch `only` of it.

        Args:
            traced: whether with instruments; the trace is that of the first micro-batch that is not finite.
            factor: factor of every seed.
            only: number of the micro-batch; None: all.
        """
        with self.windows() as windows:
            return windows(self.window, traced=traced, factor=factor, only=only)

    @contextmanager
    def windows(self) -> Iterator[Windows]:
        """Return in a block a function that runs one window after the other, each from the state that the last left.

        It takes the arguments of `run` after the window. At the end of the block all is as it was before.
        """
        modules = Modules(self.model)  # and other models that the loss function calls: a critic, a teacher
        with ExitStack() as stack:
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.enable_grad())
            if processes()[1] > 1:
                stack.enter_context(KernelMode(_RefuseCollectives()))
            stack.enter_context(Snapshot(noted(), modules).returning(Deferral()))
            stack.enter_context(modules.watching())
            put_buffers(self.buffers)

            def run(
                window: Sequence[MicroBatch], *, traced: bool = False, factor: float = 1.0, only: int | None = None
            ) -> Attempt:
                attempt = Attempt()
                for index, micro in enumerate(window):
                    if only is None or index == only:
                        self._one(attempt, index, micro, modules, traced=traced, factor=factor)
                        if attempt.bad and attempt.trace is not None:
                            break
                return attempt

            yield run

    def _one(
        self, attempt: Attempt, index: int, micro: MicroBatch, modules: Modules, *, traced: bool, factor: float
    ) -> None:
        put_random(micro.random)
        batch, named = map_tensors((micro.batch, micro.named), _own_copy)
        trace = Trace(self.model) if traced else None
        with ExitStack() as stack:
            if trace is not None:
                trace.expect((batch, named))
                stack.enter_context(trace.watching())
            loss = self.forward(batch, named)
            if not isinstance(loss, Tensor):
                attempt.odd = f"the loss function returned {type(loss).__name__} in the replay"
                return
            with torch.no_grad():
                seed = torch.ones_like(loss) if micro.seed is None else micro.seed.to(loss.dtype).reshape(loss.shape)
                if factor != 1.0:  # a factor of 1 would be a call in the trace
                    seed = seed * factor
            with self.around():
                gradients = _gradients(loss, seed, modules)
        attempt.losses.append(loss.detach())
        bad = not all(extremes(one)[1] for one in (*gradients.values(), loss))
        if bad and attempt.index is None:
            attempt.bad, attempt.index, attempt.trace = True, index, trace
            if trace is not None:
                trace.loss = loss
                trace.gradients = gradients
                return
        for leaf, gradient in gradients.items():
            total = attempt.gradients.get(leaf)
            if self.wide and len(self.window) > 1 and gradient.dtype in LOW_DTYPES:
                gradient = gradient.float()
            attempt.gradients[leaf] = gradient if total is None else total + gradient
        if not attempt.bad:
            sums = [leaf for leaf in gradients if not extremes(attempt.gradients[leaf])[1]]
            if sums:
                attempt.bad, attempt.index, attempt.added = True, index, sums[0]


class _RefuseCollectives(Sink):
    """Refuses collectives (of SyncBatchNorm, of a gathered batch): the other ranks run no replay, or another one."""

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel that does not communicate."""
        if func.namespace in COLLECTIVE:
            raise StepError(
                f"the forward or backward pass communicates with other ranks ({func}), and a replay runs on one alone"
            )
        return func(*args, **kwargs)


def _own_copy(tensor: Tensor) -> Tensor:
    """Return a copy, to which a replay may write."""
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and tensor.is_leaf else copy


def _leaves_of(loss: Tensor) -> tuple[list[Tensor], bool]:
    """Return the leaves that `loss` depends on, and whether re-entrant checkpoints lie between."""
    found: dict[Tensor, None] = {}
    reentrant = False
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[variable] = None
        reentrant = reentrant or node.name() == REENTRANT
        todo += [following for following, _ in node.next_functions]
    return list(found), reentrant


def _gradients(loss: Tensor, seed: Tensor, modules: Modules) -> dict[Tensor, Tensor]:
    """Return the gradients of all leaves, and leave their ``.grad`` as it is."""
    leaves, reentrant = _leaves_of(loss)
    if not leaves and not reentrant:
        return {}
    if not reentrant:
        found = _run_backward(loss, seed, *leaves)
        return {leaf: gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}
    leaves = list(dict.fromkeys([*leaves, *modules.parameters()]))
    hooks = [h for h in (getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves) if h]
    with Snapshot(gradients(leaves), contents(hooks)).returning():
        for hook in hooks:
            hook.clear()
        for leaf in leaves:
            leaf.grad = None
        _run_backward(loss, seed)
        return {leaf: leaf.grad for leaf in leaves if leaf.grad is not None}


def _run_backward(loss: Tensor, seed: Tensor, *leaves: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `leaves`; without leaves accumulate those of all.

    torch's public functions for this pass modes as one operator, which would hide the operators inside.
    """
    found = engine_run_backward((loss,), (seed,), False, False, leaves, True, accumulate_grad=not leaves)
    return found or ()
