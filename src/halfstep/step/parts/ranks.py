"""Ranks: averages over processes that DistributedDataParallel does not make.

DDP averages gradients during the last backward pass of a window, each in the format of its parameter, or sent low by a
communication hook (`send_low`, under ``reduce="low"``). Three averages are made here instead, after the window: of an
unfinished window (`flush`), of every window while ranks may run out of batches (`join`), and of every window where the
policy needs another format (``reduce="fp32"``, or ``grads="fp32"`` over low parameters). In the last two cases every
micro-batch runs in DDP's `no_sync`: the backward pass sends nothing.

Note [mean]: every micro-batch has the same weight on every rank: the gradient of a flush is the sum over all
micro-batches of all ranks, divided by their number. With windows of equal length that is DDP's mean over ranks of each
rank's mean. A rank without micro-batches adds zeros. A parameter that no rank used keeps no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.binding.fsdp import asked, is_distributed, refuse_other_average
from halfstep.binding.precise import KEY
from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError, UnbuiltError
from halfstep.formats import DTYPES, POLICY_DTYPES
from halfstep.meeting import announce
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of, reduces_itself, resolved
from halfstep.step.part import Part
from halfstep.step.parts.record import Record
from halfstep.torch_private.compiler import original_of
from halfstep.torch_private.distributed import (
    comm_hooks,
    communicate_as_first_forward,
    has_recorded_static_graph,
    is_joining,
    logging_data,
)
from halfstep.weights import WeightStore
from halfstep.weights.ranks import refuse_waiting_hook

NOTHING = nullcontext()
BUCKET = 25 * 2**20  # bytes that are sent at once; DDP's own default
UPDATING = ("hook_then_optimizer", "apply_optim_in_backward", "hook_with_zero")
"""Parts of the names of torch's communication hooks that update parameters."""


class OneRank(Part):
    """The ranks of a step whose gradients the step itself does not average; a wrapper with `no_sync` does."""

    own = False  # whether every window is averaged here, and all of its micro-batches run in `no_sync`
    joining = False  # whether ranks may run out of batches one after the other; every window is averaged here, by all
    group: Any = None  # the processes over which gradients are averaged; None: this one, or not known
    averaged = True  # whether the wrapper's own backward pass averages the gradients of the current window

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._no_sync: Callable[[], AbstractContextManager[Any]] | None = getattr(model, "no_sync", None)
        self._store: WeightStore | None = None

    def take_part(self, store: WeightStore | None, record: Record) -> None:
        """Take part in a training step with `store` behind its low parameters, or None."""
        self._store, self._record = store, record

    def passes(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a forward and a backward pass: a wrapper averages in the last of a window only."""
        return NOTHING if last or self._no_sync is None else self._no_sync()

    def agree(self, accumulate: int) -> tuple[float, Tensor]:
        """Return the number of micro-batches in the unfinished window, and its loss scale."""
        done = self._record.micro_batches
        if done and self._no_sync is not None and dist.is_available() and dist.is_initialized():
            raise StepError(
                f"flush() of {done} of {accumulate} micro-batches: {type(self._model).__name__} has put the average of "
                "their gradients off, by its no_sync, and only DistributedDataParallel's can be made later; give every "
                "window all of its micro-batches"
            )
        return done, self._record.scale

    def keep_up(self) -> None:
        """Do nothing: no other rank waits."""

    def join(self, flush: Callable[[], object]) -> AbstractContextManager[None]:
        """Return the context in which ranks may run out of batches one after the other."""
        if is_distributed(self._model):
            self._refuse_join("a sharded model, whose passes gather weights from all ranks")
        return NOTHING

    def _refuse_join(self, why: str) -> None:
        raise StepError(
            f"join() of {why}: a rank without batches would be missing there; give all ranks as many batches "
            "(DistributedSampler(drop_last=True))"
        )


class Ranks(OneRank):
    """The processes over which a DistributedDataParallel averages."""

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel, policy: Policy) -> None:
        super().__init__(model)
        self.ddp, self._policy = ddp, policy
        self.group = ddp.process_group
        self._count = dist.get_world_size(self.group)
        # DDP averages bucket by bucket, of which a hook can choose the format sent but not the one returned
        self._sends_low = policy.reduce == "low" and not (policy.params == "low" and policy.grads == "fp32")
        self._sends_low = self._sends_low and reduces_itself(policy) and not _sparse(ddp.module)
        self.own = reduces_itself(policy) and not self._sends_low
        self._refuse_rivals()
        if reduces_itself(policy):
            self.refuse_hook(f"{asked(policy)} needs an average of its own")
        if self.own and ddp.static_graph:
            raise UnbuiltError(
                f"{asked(policy)} needs an average of its own, and static_graph=True makes one in the first backward "
                "pass whatever the step says; leave static_graph out, or use reduce='grad' and grads='param'"
            )

    def _refuse_rivals(self) -> None:
        """Refuse what DistributedDataParallel would do in the place of the step, or would never end."""
        self._hooks = len(comm_hooks(self.ddp))
        refuse_waiting_hook(self.ddp)
        if self.ddp.mixed_precision is not None:
            raise StepError(
                "DistributedDataParallel(mixed_precision=...) casts parameters and inputs beside the policy; leave "
                "mixed_precision out"
            )
        hook = self._hook()
        if any(part in hook for part in UPDATING):
            raise StepError(
                f"the communication hook {hook!r} updates parameters in the backward pass, before gradients are "
                "unscaled, checked and clipped; leave it out: the step updates"
            )

    def passes(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch; DDP records a static graph in its first backward pass if it averages."""
        ddp = self.ddp
        if len(comm_hooks(ddp)) != self._hooks:
            self._refuse_rivals()
        if is_joining(ddp):
            raise StepError(
                "DistributedDataParallel.join() leaves the optimizer state, loss scale and fp32 weights of a rank that "
                "has no batches left behind those of the others; use `with step.join():` in its place"
            )
        first = ddp.static_graph and not has_recorded_static_graph(ddp)
        postpones = not first and (self.own or self.joining or not last)
        return self._no_sync() if postpones and self._no_sync is not None else NOTHING

    def agree(self, accumulate: int) -> tuple[float, Tensor]:
        """Return the mean of micro-batches, or weights, in all ranks' unfinished windows, and their loss scale.

        Collective where windows have several micro-batches, or in `join`; an error is raised on all ranks alike.
        """
        count, scale, weighed = self._record.micro_batches, self._record.scale, self._record.weighed
        if accumulate == 1 and not self.joining:
            return count, scale
        self._record.host_reads += 1
        if not count:
            self.keep_up()
        size = sum(parameter.numel() for parameter in self._parameters()) % 2**24  # what fp32 counts exactly
        device = self.ddp.device
        numbers = [torch.full((), n, dtype=torch.float32, device=device) for n in (count, size, -1.0)]  # no copies
        weight = numbers[2] if weighed is None or not count else weighed
        mine = torch.stack([numbers[0], scale.to(numbers[0]), numbers[1], weight])
        votes = [torch.empty_like(mine) for _ in range(self._count)]
        dist.all_gather(votes, mine, group=self.group)
        told = torch.stack(votes).tolist()
        if len({size for _, _, size, _ in told}) > 1:
            raise StepError(
                "ranks update models of different sizes; call the TrainSteps of several models in the same order on "
                "all ranks, and step.join() of one of them at a time"
            )
        busy = [(number if weight < 0.0 else weight, scale) for number, scale, _, weight in told if number]
        if not busy:
            return 0.0, scale
        self.refuse_hook("flush() averages gradients outside of a backward pass")
        scales = {scale for _, scale in busy}
        if len(scales) > 1:
            raise StepError(
                f"ranks began their windows under the loss scales {sorted(scales)}, and their gradients cannot be "
                "added; begin the windows of all ranks between the same two updates of the scaler"
            )
        return sum(number for number, _ in busy) / self._count, torch.full((), scales.pop(), device=device)

    def keep_up(self) -> None:
        """Communicate as the first forward pass of a window: DDP rebuilds its buckets once, and sends buffers."""
        communicate_as_first_forward(self.ddp)
        self.ddp.require_forward_param_sync = False

    def take_part(self, store: WeightStore | None, record: Record) -> None:
        """Take part as `OneRank`; gradients that are to be sent low get their hook."""
        super().take_part(store, record)
        if self._sends_low and not self._hook():
            self.ddp.register_comm_hook(Wire(unwrap(self.ddp), self.group), send_low)

    def join(self, flush: Callable[[], object]) -> AbstractContextManager[None]:
        """Return a context that ranks leave one after the other; one that has left calls `flush` until none has any."""
        super().join(flush)
        if any(isinstance(module, nn.SyncBatchNorm) for module in self._model.modules()):
            self._refuse_join("SyncBatchNorm, which sends statistics in each forward pass")
        if self.ddp.static_graph:
            self._refuse_join("DistributedDataParallel(static_graph=True), which averages in its first backward pass")
        self.refuse_hook("join() averages gradients outside of the backward pass")
        return self._joined(flush)

    @contextmanager
    def _joined(self, flush: Callable[[], object]) -> Iterator[None]:
        self.joining = True
        try:
            yield
            while flush() is not None:
                pass
        finally:
            self.joining = False

    def before_update(self) -> None:
        """Average the gradients of the window, unless DDP has."""
        if self.own or self.joining or not self.averaged:
            self._record.host_reads += self.average()

    @torch.no_grad()
    def average(self) -> bool:
        """Average all gradients over the ranks; collective. Return whether it waited for the device."""
        if comm_hooks(self.ddp):  # registered since
            self.refuse_hook("gradients are averaged outside of the backward pass")
        parameters = list(self._parameters())
        there = [parameter.grad is not None for parameter in parameters]
        used = torch.ones(len(there), dtype=torch.int32, device=self.ddp.device)  # a copy of `there` would wait
        for place in [n for n, one in enumerate(there) if not one]:
            used[place].zero_()
        dist.all_reduce(used, group=self.group)
        sparse = _sparse(self.ddp.module)
        for parameter in parameters:
            if id(parameter) in sparse:
                self._average_sparse(parameter)
        for bucket in self._buckets([p for p in parameters if id(p) not in sparse]):
            self._average(bucket)
        if not all(there):  # a rank that has all gradients needs no answer
            for parameter, ranks in zip(parameters, used.tolist(), strict=True):
                if not ranks:
                    parameter.grad = None
        self.ddp.require_forward_param_sync = True  # as DDP does after its own: buffers are sent again
        return not all(there)

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over what DDP averages, in an order that all ranks share."""
        ignored = getattr(self.ddp, "parameters_to_ignore", ())
        for name, parameter in self.ddp.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                yield parameter

    def _given(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the format a gradient is accumulated in."""
        wide = self._policy.grads == "fp32" and self._store is not None and parameter in self._store
        return torch.float32 if wide else parameter.dtype

    def _sent(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the format a gradient is summed in."""
        given = self._given(parameter)
        if given not in POLICY_DTYPES or self._policy.reduce == "grad":
            return given
        low = self._policy.reduce == "low" and self._policy.dtype != "fp32"
        return DTYPES[self._policy.dtype] if low else torch.float32 if self._policy.reduce == "fp32" else given

    def _put(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """Make `mean` the gradient; an fp32 mean stays fp32 where an optimizer steps fp32 values."""
        behind = self._store is not None and parameter in self._store
        dtype = torch.float32 if behind and mean.dtype is torch.float32 else self._given(parameter)
        gradient = parameter.grad
        if gradient is not None and gradient.dtype is dtype and not (gradient.is_sparse or mean.is_sparse):
            gradient.copy_(mean)
            return
        parameter.grad = None
        if parameter.grad_dtype not in {None, dtype}:
            parameter.grad_dtype = None
        parameter.grad = mean.to(dtype) if mean.is_sparse else torch.empty_like(parameter, dtype=dtype).copy_(mean)

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Split `parameters` into lists that are sent at once: one device and one pair of formats each."""
        kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, self._given(parameter), self._sent(parameter)), []).append(parameter)
        for (_, _, sent), members in kinds.items():
            bucket: list[nn.Parameter] = []
            size = 0
            for parameter in members:
                bucket.append(parameter)
                size += parameter.numel() * sent.itemsize
                if size >= BUCKET:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def _average(self, bucket: list[nn.Parameter]) -> None:
        given, sent = self._given(bucket[0]), self._sent(bucket[0])
        wide = given if given.itemsize > sent.itemsize else sent  # what is divided, so that an fp16 sum stays in range
        parts = [
            torch.zeros_like(p, dtype=wide) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
            for p in bucket
        ]
        flat = torch.cat([part.reshape(-1).to(wide) for part in parts]).mul_(1 / self._count).to(sent)
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=self.group)
        for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            self._put(parameter, mean.view(parameter.shape))

    def _average_sparse(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            shape, device = parameter.shape, parameter.device
            none = torch.empty((0, *shape[1:]), dtype=self._given(parameter), device=device)
            where = torch.empty((1, 0), dtype=torch.int64, device=device)
            gradient = torch.sparse_coo_tensor(where, none, shape, device=device, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        mean = (gradient.coalesce() * (1 / self._count)).to(self._sent(parameter)).coalesce()
        dist.all_reduce(mean, group=self.group)
        self._put(parameter, mean.coalesce())

    def refuse_hook(self, why: str) -> None:
        """Refuse a communication hook that would be bypassed, unless it does what is done here."""
        hook = self._hook()
        if hook and hook != send_low.__qualname__:
            raise UnbuiltError(
                f"{why}, and the communication hook {hook!r} of DistributedDataParallel would have no part in it; "
                "leave the hook out, or give every window all of its micro-batches"
            )

    def _hook(self) -> str:
        """Return the name of the communication hook, "" for none; DDP's log names those of C++ too."""
        return "" if self.ddp.logger is None else str(logging_data(self.ddp).get("comm_hook", ""))


def _sparse(model: nn.Module) -> set[int]:
    """Return ids of the parameters whose gradients are sparse: those of the layers that DDP checks too."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}


class Wire:
    """The state of `send_low`."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.model, self.group = model, group

    def __reduce__(self) -> tuple[type[Wire], tuple[nn.Module]]:
        return Wire, (self.model,)


def send_low(wire: Wire, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, sent low under ``reduce="low"``: a communication hook."""
    buffer = bucket.buffer()
    binding = vars(wire.model).get(KEY)
    low = DTYPES[binding.policy.dtype] if binding is not None and binding.policy.reduce == "low" else buffer.dtype
    sent = buffer.mul_(1 / dist.get_world_size(wire.group)).to(low)  # divided first: an fp16 sum stays in range
    work = dist.all_reduce(sent, group=wire.group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


send_low.__annotations__ = {}  # register_comm_hook compares types with those, which are strings


def ranks_of(model: nn.Module, policy: Policy) -> OneRank:
    """Return the ranks over which DistributedDataParallel averages, or one rank without it; `announce` this one."""
    announce()
    concrete = resolved(policy, device_types_of([model])[0])
    given = model
    while not isinstance(model, DistributedDataParallel):
        inner = model.module if isinstance(model, nn.DataParallel) else original_of(model)
        if not isinstance(inner, nn.Module):
            if reduces_itself(concrete):
                refuse_other_average(model, concrete, asked(concrete))
            return OneRank(given)
        model = inner
    return Ranks(given, model, concrete)
