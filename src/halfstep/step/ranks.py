"""Ranks: averages over processes that DistributedDataParallel does not make.

DDP averages gradients during the last backward pass of a window, each in the format of its parameter. Two averages are
made here instead, after the window: of an unfinished window (`flush`), and of every window where the policy needs
another format (``reduce``, or ``grads="fp32"`` over low parameters). In the second case every micro-batch runs in DDP's
`no_sync`, so nothing is sent during the backward pass.

Note [mean]: every micro-batch has the same weight on every rank: the gradient of a flush is the sum over all
micro-batches of all ranks, divided by their number. With windows of equal length that is DDP's mean over ranks of each
rank's mean. A rank without micro-batches adds zeros. A parameter that no rank used keeps no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import StepError, UnbuiltError
from halfstep.formats import DTYPES, POLICY_DTYPES
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of, reduces_itself, resolved
from halfstep.step.record import Record
from halfstep.weights import WeightStore

__all__ = ["Ranks", "ranks_of", "refuse_own_loop"]

BUCKET = 25 * 2**20  # bytes that are sent at once; DDP's own default


class Ranks:
    """The processes over which a DistributedDataParallel averages.

    Args:
        ddp: around the model.
        policy: resolved.

    Attributes:
        own: whether every window is averaged here, and all of its micro-batches run in `no_sync`.
        averaged: whether DDP's own backward pass averages the gradients of the current window.

    Raises:
        UnbuiltError: the policy wants an average of its own, and a communication hook or a static graph has one too.
    """

    def __init__(self, ddp: DistributedDataParallel, policy: Policy) -> None:
        self._ddp, self._policy = ddp, policy
        self._store: WeightStore | None = None
        self._group = ddp.process_group
        self._count = dist.get_world_size(self._group)
        self.own = reduces_itself(policy)
        self.averaged = True
        if self.own:
            self._refuse_hook(f"{_asked(policy)} needs an average of its own")
        if self.own and ddp.static_graph:
            raise UnbuiltError(
                f"{_asked(policy)} needs an average of its own, and static_graph=True makes one in the first backward "
                "pass whatever the step says; leave static_graph out, or use reduce='grad' and grads='param'"
            )

    def postpones(self, *, last: bool) -> bool:
        """Return whether DDP must not average in the backward pass of the next micro-batch.

        DDP records a static graph in its first backward pass, and only if it averages there.
        """
        ddp = self._ddp
        if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
            return False
        return self.own or not last

    @property
    def device(self) -> torch.device:
        """The device for tensors of host numbers that are sent."""
        device: torch.device = next(self._ddp.module.parameters()).device
        return device

    def agree(self, count: int, scale: Tensor) -> tuple[float, Tensor]:
        """Return the mean window and the scale of all ranks' unfinished windows; collective, and waits for the device.

        Args:
            count: micro-batches in this rank's window.
            scale: the loss scale they ran with.

        Returns:
            The mean number of micro-batches, 0.0 if no rank has any, and the loss scale of those that have some.

        Raises:
            StepError: loss scales differ, or a communication hook would be passed over; on all ranks alike.
        """
        if not count:
            self.keep_up()
        mine = torch.tensor([float(count), 0.0], device=self.device)
        mine[1] = scale
        votes = [torch.empty_like(mine) for _ in range(self._count)]
        dist.all_gather(votes, mine, group=self._group)
        busy = [(number, scale) for number, scale in torch.stack(votes).tolist() if number]
        if not busy:
            return 0.0, scale
        self._refuse_hook("flush() averages gradients outside of a backward pass")
        scales = {scale for _, scale in busy}
        if len(scales) > 1:
            raise StepError(
                f"ranks began their windows under the loss scales {sorted(scales)}, and their gradients cannot be "
                "added; begin the windows of all ranks between the same two updates of the scaler"
            )
        return sum(number for number, _ in busy) / self._count, torch.full((), scales.pop(), device=self.device)

    def keep_up(self) -> None:
        """Communicate as the first forward pass of a window does, which other ranks may have made already.

        DDP rebuilds its buckets once, and sends buffers from one rank to the others.
        """
        if self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets = True
        if self._ddp._check_sync_bufs_pre_fwd():
            self._ddp._sync_buffers()
        self._ddp.require_forward_param_sync = False

    def join(self, store: WeightStore | None, record: Record) -> None:
        """Take part in a training step with `store` behind its low parameters, or None."""
        self._store, self._record = store, record

    def before_update(self) -> None:
        """Average the gradients of the window, unless DDP has."""
        if self.own or not self.averaged:
            self._record.host_reads += self.average()

    @torch.no_grad()
    def average(self) -> bool:
        """Average all gradients over the ranks; collective. Return whether it waited for the device."""
        if getattr(self._ddp, "_comm_hooks", ()):  # registered since
            self._refuse_hook("gradients are averaged outside of the backward pass")
        parameters = list(self._parameters())
        there = [parameter.grad is not None for parameter in parameters]
        used = torch.tensor(there, dtype=torch.int32, device=self.device)
        dist.all_reduce(used, group=self._group)
        sparse = _sparse(self._ddp.module)
        for parameter in parameters:
            if id(parameter) in sparse:
                self._average_sparse(parameter)
        for bucket in self._buckets([p for p in parameters if id(p) not in sparse]):
            self._average(bucket)
        if not all(there):  # a rank that has all gradients needs no answer
            for parameter, ranks in zip(parameters, used.tolist(), strict=True):
                if not ranks:
                    parameter.grad = None
        self._ddp.require_forward_param_sync = True  # as DDP does after its own: buffers are sent again
        return not all(there)

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over what DDP averages, in an order that all ranks share."""
        ignored = getattr(self._ddp, "parameters_to_ignore", ())
        for name, parameter in self._ddp.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                yield parameter

    # ------------------------------------------------------------------ formats

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

    # ------------------------------------------------------------------ sums

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
            torch.zeros(p.numel(), dtype=wide, device=p.device) if p.grad is None else _dense(p.grad).to(wide)
            for p in bucket
        ]
        flat = torch.cat(parts).mul_(1 / self._count).to(sent)
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=self._group)
        for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            self._put(parameter, mean.view(parameter.shape))

    def _average_sparse(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            size = (0, *parameter.shape[1:])
            none = torch.empty(size, dtype=self._given(parameter), device=parameter.device)
            where = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            gradient = torch.sparse_coo_tensor(where, none, parameter.shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        mean = (gradient.coalesce() * (1 / self._count)).to(self._sent(parameter)).coalesce()
        dist.all_reduce(mean, group=self._group)
        self._put(parameter, mean.coalesce())

    def _refuse_hook(self, why: str) -> None:
        """Refuse a communication hook that would be bypassed; DDP's log names those of C++ too."""
        hook = self._ddp._get_ddp_logging_data().get("comm_hook", "")
        if hook:
            raise UnbuiltError(
                f"{why}, and the communication hook {hook!r} of DistributedDataParallel would have no part in it; "
                "leave the hook out, or give every window all of its micro-batches"
            )


def _dense(gradient: Tensor) -> Tensor:
    """Return the elements of `gradient`, in order."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)


def _sparse(model: nn.Module) -> set[int]:
    """Return ids of the parameters whose gradients are sparse: those of the layers that DDP checks too."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}


def _asked(policy: Policy) -> str:
    """Return the field that DDP's own average does not satisfy."""
    return f"reduce={policy.reduce!r}" if policy.reduce != "grad" else f"grads={policy.grads!r} over low parameters"


# ------------------------------------------------------------------ which ranks, and refusals


def ranks_of(model: nn.Module, policy: Policy) -> Ranks | None:
    """Return the ranks of the DistributedDataParallel around the user's model; None without one. Changes nothing.

    Args:
        model: as it was given to `TrainStep`.
        policy: what the model is, or will be, prepared with.

    Raises:
        UnbuiltError: the policy wants an average that is not made for this model.
    """
    concrete = resolved(policy, device_types_of([model])[0])
    while not isinstance(model, DistributedDataParallel):
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            if reduces_itself(concrete):
                _refuse_sharded(model, concrete)
            return None
        model = inner
    return Ranks(model, concrete)


def refuse_own_loop(model: nn.Module, policy: Policy) -> None:
    """Refuse a forward pass in the user's own loop if DDP or fully_shard would average its gradients in another format.

    Args:
        model: the prepared model, called outside of a `TrainStep`.
        policy: one that `reduces_itself`.

    Raises:
        UnbuiltError: DDP or fully_shard will average them.
    """
    if not (torch.is_grad_enabled() and dist.is_available() and dist.is_initialized()):
        return
    ddp = DistributedDataParallel._active_ddp_module  # Dynamo guards on it
    if ddp is not None and ddp.require_backward_grad_sync:
        raise UnbuiltError(
            f"policy {policy.name!r}: DistributedDataParallel averages each gradient in its parameter's format, so "
            f"{_asked(policy)} is not what a loop of one's own gets; train with hs.TrainStep, which averages itself, "
            "or use reduce='grad' and grads='param'"
        )
    _refuse_sharded(model, policy)


def _refuse_sharded(model: nn.Module, policy: Policy) -> None:
    """Refuse a model whose gradients are averaged by the library that sharded it."""
    sharded = any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
    if sharded or any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise UnbuiltError(
            f"policy {policy.name!r}: {_asked(policy)} is carried out under DistributedDataParallel only; fully_shard "
            "has its own setting for the format gradients are summed in: fully_shard(..., "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=...)); use reduce='grad' and grads='param'"
        )
