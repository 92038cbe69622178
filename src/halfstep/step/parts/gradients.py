"""The gradients of a window: how those of its micro-batches are added and weighed, and that nothing else writes them.

Note [sums]: fp32 gradients of low parameters are added over the micro-batches, none cast into memory first. With
``grad_dtype = torch.float32`` autograd casts every gradient into new memory and adds that, 18 bytes an element each
micro-batch. Here autograd hands over the low gradient and a hook adds it into memory that stays, in one pass of 10
bytes. What autograd adds up before a gradient reaches its parameter would then be added in the low format, so a
parameter that the graph of this loss reaches by several ways, and a small one, goes the way of ``grad_dtype``. That is
also how a backward pass outside of a step finds every parameter.

Note [reference]: micro-batch i, the mean of whose loss has the gradient m_i, has the weight w_i, such as its number of
tokens. The gradient of a window is the sum of w_i m_i over micro-batches and ranks, divided by the sum of w_i. A
backward pass knows its own w_i only, so it begins from ``w_i / reference``, and the update divides by the sum over
`reference`. This is a power of two near the first weight of the run, so gradients have the magnitude of means, and no
bit depends on it.
"""

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.binding.fsdp import is_distributed
from halfstep.errors import StepError
from halfstep.events import StepResult, hook_weakly
from halfstep.kernels.eager.low import add_low_
from halfstep.kernels.pages import keep_pages
from halfstep.step.arguments import Given
from halfstep.step.loss import RECOMPUTES
from halfstep.step.moments import Moments
from halfstep.step.part import Part, Run
from halfstep.step.parts.ranks import OneRank
from halfstep.step.parts.record import Record
from halfstep.torch_private.autograd import post_accumulate_grad_hooks
from halfstep.trees import graph_of
from halfstep.update.updater import Updater

MANY = 1 << 16  # elements of a gradient from which a hook and a look at the graph pay


class Sums(Part):
    """The fp32 gradients of one training step's low parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, hooked: bool, windows: bool) -> None:
        self._large: dict[int, nn.Parameter] = {}
        self._wide: dict[int, bool] = {}  # whether autograd casts the gradients of a large parameter
        self._memory: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}  # of this window
        self._on = False
        for parameter in parameters:
            if hooked and parameter.requires_grad and parameter.numel() >= MANY:
                self._large[id(parameter)] = parameter
                self._wide[id(parameter)] = True  # `hs.prepare` has seen to it
                if windows:
                    hook_weakly(parameter.register_post_accumulate_grad_hook, self.add)

    def __bool__(self) -> bool:
        return bool(self._large)

    def begin_window(self) -> None:
        """Begin a window; gradients were dropped."""
        self._on = False
        self._totals.clear()
        self._widen()

    def around_backward(self, loss: Tensor, seed: Tensor, run: Run) -> None:
        """Run the backward pass; gradients of large parameters are taken as they come."""
        several = _reached_by_several_ways(loss)
        for key, parameter in self._large.items() if several is not None else ():
            if key not in several:  # type: ignore[operator]
                parameter.grad_dtype = None
                self._wide[key] = False
        self._on = True
        try:
            run(loss, seed)
        except BaseException:
            for key, wide in self._wide.items():
                if not wide:  # partial sums, which the next window drops
                    self._large[key].grad = None
            raise
        finally:
            self._on = False
            self._widen()

    def _widen(self) -> None:
        """Let autograd cast again, but where a low gradient waits for its update."""
        for key, parameter in self._large.items():
            if not self._wide[key] and (parameter.grad is None or parameter.grad.dtype is torch.float32):
                parameter.grad_dtype = torch.float32
                self._wide[key] = True

    def add(self, parameter: Tensor) -> None:
        """Take the low gradient that `parameter` has just got."""
        gradient = parameter.grad
        if not self._on or gradient is None or gradient.dtype is torch.float32 or gradient.layout is not torch.strided:
            return
        if len(post_accumulate_grad_hooks(parameter)) > 1:  # another hook reads it
            parameter.grad = gradient.float()
            return
        key = id(parameter)
        with torch.no_grad():
            if key in self._totals:
                add_low_(self._totals[key], gradient)
            else:
                total = self._memory.get(key)
                if total is None or total.stride() != gradient.stride():
                    total = self._memory[key] = torch.empty_like(gradient, dtype=torch.float32)
                self._totals[key] = total.copy_(gradient)
        parameter.grad = None

    def before_update(self) -> None:
        """Put the sums of the window where the optimizer reads them."""
        for key, total in self._totals.items():
            parameter = self._large[key]
            parameter.grad = total if parameter.grad is None else total.add_(parameter.grad)
        self._totals.clear()

    def after_update(self, bad: Tensor) -> None:
        """Drop the gradients, and free their memory unless it is a CPU's: a caching allocator reuses it at once."""
        for parameter in self._large.values():
            parameter.grad = None
        self._widen()
        for key in [k for k, memory in self._memory.items() if memory.device.type != "cpu"]:
            del self._memory[key]

    def abort(self, *, written: bool) -> None:
        """Drop the sums of a window that was cut off."""
        if not written:
            self.begin_window()


def _reached_by_several_ways(loss: Tensor) -> set[int] | None:
    """Return ids of the parameters to which the graph of `loss` has several edges; None: not all of it can be seen."""
    once, several = set[int](), set[int]()
    for node in graph_of(loss):
        if node.name() == RECOMPUTES:
            return None
        for following, _ in node.next_functions:
            if type(following).__name__ == "AccumulateGrad":
                key = id(following.variable)  # type: ignore[union-attr]
                (several if key in once else once).add(key)
    return several


class KeptPages(Part):
    """Has malloc keep the pages of steps on a CPU, from the first update on; note [pages] in `keep_pages`."""

    def __init__(self, owner: object, moments: Moments) -> None:
        self._owner, self._moments = weakref.ref(owner), moments

    def end_call(self, result: StepResult, batch: Any) -> None:
        """Begin after the first update, and be no part any longer."""
        if result.due:
            if result.skipped.device.type == "cpu":
                keep_pages(self._owner())
            self._moments.remove(self)


class Unfinished(Part):
    """The gradients that one training step has left for its next micro-batch."""

    def __init__(self, updater: Updater, record: Record) -> None:
        self._updater, self._record = updater, record
        self._seen: list[tuple[Tensor, Tensor | None, int]] = []

    def end_micro_batch(self, seed: Tensor, *, last: bool) -> None:
        """Note the gradients as they are; torch counts the writes to each."""
        if last:
            return
        gradients = [(p, p.grad) for group in self._updater.optimizer.param_groups for p in group["params"]]
        self._seen = [(p, grad, 0 if grad is None else grad._version) for p, grad in gradients]

    def begin_call(self) -> None:
        """Compare the gradients of a window that has begun with what was noted."""
        for parameter, noted, version in self._seen if self._record.micro_batches else ():
            now = parameter.grad
            if now is not noted or (now is not None and now._version != version):
                raise StepError(
                    f"the gradient of {self._updater.names.get(id(parameter), 'a parameter')} was "
                    f"{'dropped' if now is None else 'written to'} between two micro-batches of a window, outside of "
                    "the step; leave zero_grad(), clipping (clip_norm=) and backward() to the step, and end the window "
                    "of one step before the loss of another runs through its model. The window begins anew"
                )


class Weights(Part):
    """Weighs the micro-batches of windows whose loss function returns an `hs.Loss`."""

    def __init__(self, given: Given, record: Record, ranks: OneRank) -> None:
        self._given, self._record, self._ranks = given, record, ranks
        self._group = ranks.group if ranks.group is not None or not is_distributed(given.model) else dist.group.WORLD
        self.reference: float | None = None

    def begin_window(self) -> None:
        """Forget the weights of the last window."""
        self._record.weighed = self._record.share = None

    def seed(self, seed: Tensor) -> Tensor:
        """Return `seed` times the weight of the micro-batch."""
        record = self._record
        if record.micro_batches and (record.weight is None) is not (record.weighed is None):
            this, before = ("no", "an") if record.weight is None else ("an", "no")
            raise StepError(
                f"micro-batch {record.micro_batches + 1} of a window returned {this} hs.Loss, and the one before it "
                f"{before}; return hs.Loss(sum, weight) from all of them"
            )
        if record.weight is None:
            return seed
        if self.reference is None:
            self.reference = self._near(record.weight)
        weight = record.weight / self.reference
        record.weighed = weight if record.weighed is None else record.weighed + weight
        return seed * weight.to(seed.dtype)

    def _near(self, weight: Tensor) -> float:
        """Return a power of two near `weight`, the same on all ranks; waits for the device, once in a run."""
        largest = torch.zeros_like(weight) if self._ranks.joining else weight.clone()
        if self._group is not None and not self._ranks.joining:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        size = float(largest)
        return 2.0 ** round(math.log2(size)) if 0.0 < size < math.inf else 1.0

    def before_update(self) -> None:
        """Say by what the gradients are to be divided beside the loss scale; `Ranks.agree` has where it is asked."""
        total = self._record.weighed
        ranks = self._ranks
        if total is None or (ranks.group is not None and (ranks.joining or not ranks.averaged)):
            return
        if self._group is not None:
            total = total / dist.get_world_size(self._group)
            dist.all_reduce(total, group=self._group)
        self._record.share = total / self._given.accumulate
