"""The weight strategies: what is stored behind a low parameter, and how an fp32 value becomes that.

Under all but `master` fp32 values exist only during a step, an edit or a load: 4 more bytes a parameter for them and 4
for their gradients, freed when it ends. During the update `split` and `kahan` need 2 bytes more than `master`,
otherwise 2 less (`stochastic` as many, and 4 less), in particular when activations are at their peak. Under `none`
nothing is behind low weights (2 bytes per parameter), and optimizers step them as torch does: `UnkeptWeights`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.errors import WeightsError
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.eager.low import join_bf16, split_bf16
from halfstep.kernels.reference.operators import WEIGHT, split_kahan, stochastic_bf16
from halfstep.kernels.sharded import local, shard_of, sharded_like
from halfstep.kernels.watched import Owner, owner_of, unwatch, watch
from halfstep.meeting import processes
from halfstep.torch_private.autograd import unsafe_preserve_version_counter
from halfstep.torch_private.foreach import foreach_copy_
from halfstep.weights.attachment import Turn, at_each_step
from halfstep.weights.draws import Draws
from halfstep.weights.ranks import training_wrapper
from halfstep.weights.store import WeightStore


class MasterWeights(WeightStore):
    """fp32 masters behind low parameters; low weights are their masters, rounded half to even.

    Bytes per parameter: 2 (low) + 4 (master), and 4 more during the step for the fp32 gradient (see `attachment`).
    """

    name, form = "master", "copy"
    keeps_masters = True

    def _value(self, key: int) -> nn.Parameter:
        return self._masters[key]

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        wide = local(Tensor.detach(parameter)).float().clone()
        self._masters[key] = nn.Parameter(sharded_like(parameter, wide), requires_grad=parameter.requires_grad)
        return wide.to(self.dtype)

    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        return local(self._masters[key]), local(Tensor.detach(self._parameters[key]))

    def _read_low(self, key: int) -> None:
        if key in self._fresh and processes()[1] > 1:  # a broadcast: only the low weights are equal on all ranks
            local(self._masters[key]).copy_(local(self._parameters[key]))
        else:
            self._read_unseen(key)

    def _read_unseen(self, key: int) -> None:
        master, low = local(self._masters[key]), local(Tensor.detach(self._parameters[key]))
        # where the low weight still is the rounded master, the master stays
        master.copy_(torch.where(master.to(self.dtype) == low, master, low.float()))

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        low = [local(self._parameters[k]) for k in keys]
        foreach_copy_(low, [local(self._masters[k]) for k in keys])
        return keys


class SplitWeights(WeightStore):
    """bf16 weights of the model, and the 16 bits of each fp32 pattern that bf16 drops; together the fp32 value.

    Bytes per parameter: 2 (low) + 2 (remainder). Nothing is lost: training is that of `master` bit for bit, but for low
    weights exactly half way between two bf16 numbers, which round up here (in magnitude) and to even there (see
    `kernels.reference.split_bf16`).
    """

    name, form = "split", "split"

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype, **options: Any) -> None:
        if low is not torch.bfloat16:
            raise WeightsError(
                f"master='split' is for bfloat16, whose numbers are upper halves of fp32 ones, and the low format is "
                f"{low}; use master='master' or 'kahan'"
            )
        super().__init__(named, low, **options)

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        low, rest = split_bf16(wide)
        self._keep(key, rest)
        return low

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return join_bf16(low, self._seconds[key])


class KahanWeights(WeightStore):
    """Low weights and, in the same low format, what rounding took from them, after Kahan's summation.

    Bytes per parameter: 2 (low) + 2 (compensation). The value is the exact sum of both: in bf16 at least 16 significant
    bits, so an update below half an ulp of the weight is kept until it counts, down to 2^-16 of the weight. In fp16 it
    is 22 bits or 2^-25, whichever is coarser: fp16 has no smaller compensations; and a weight that rounds to inf stays
    inf.
    """

    name, form = "kahan", "kahan"

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        low, rest = split_kahan(wide, self.dtype)
        self._keep(key, rest)
        return low

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return low.float() + self._seconds[key].float()


class StochasticWeights(WeightStore):
    """Low weights and nothing else; an update below half an ulp changes a weight with a probability.

    Bytes per parameter: 2 (low). After a step the new fp32 value is rounded to one of its two neighbours, the nearer
    the likelier, so that the mean over many steps is the value. Values set by hand or loaded round to nearest.
    """

    name, form = "stochastic", "stochastic"
    keeps_more = False
    draws: Draws

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype, **options: Any) -> None:
        self.draws = Draws()
        super().__init__(named, low, **options)

    def cannot_update(self) -> str:
        """Return why an update in one pass cannot be made; "" if it can."""
        if self.dtype is not torch.bfloat16:
            return "only bf16 weights are rounded stochastically in one pass"
        return super().cannot_update()

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        self._places = {key: i for i, key in enumerate(keys)}  # decide which bits a parameter gets
        written = super()._write_low(keys, stepped=stepped)
        for device in {self._parameters[key].device for key in written} if stepped and not self.draws.shared else ():
            self.draws.advance(device)
        return written

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        if not stepped:
            return wide.to(self.dtype)
        bits = self.draws.bits(self._places[key], WEIGHT, wide, shard_of(self._parameters[key]))
        return stochastic_bf16(wide, bits) if self.dtype is torch.bfloat16 else _stochastic_fp16(wide, bits)

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return low.float()


def _stochastic_fp16(wide: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to fp16, down or up by `bits`; what is not finite stays."""
    exponent = (torch.frexp(wide).exponent - 1).clamp(min=-14)
    spacing = torch.ldexp(torch.ones_like(wide), exponent - 10)
    steps = (wide / spacing).abs()  # every operation here is exact, in fp32
    below, chance = steps.floor(), bits / 65536
    rest = steps - below
    steps = torch.where(wide < 0, 0 - (below + (rest > chance)), below + (rest >= 1 - chance))
    rounded = steps * spacing
    return torch.where(torch.isfinite(wide), rounded, wide).half()


STRATEGIES: Mapping[str, type[WeightStore]] = MappingProxyType(
    {kind.name: kind for kind in (MasterWeights, SplitWeights, KahanWeights, StochasticWeights)}
)
"""Value of `Policy.master` -> what keeps the precise weights."""


# ------------------------------------------------------------------ nothing behind low weights

LOST = 0.05  # of the movement that a change by hand makes


class UnkeptWeights(Owner):
    """The low parameters of prepared models under `master="none"`; they keep it alive.

    Where no policy computes, methods and copies of such a `kernels.watched.WatchedParameter` compute in fp32, as those
    of a store do; a change by hand is rounded to nearest, with a warning if the low format loses it.
    """

    _wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], records: Callable[[], bool | None]) -> None:
        super().__init__(records)
        self._stepping: set[int] = set()  # optimizers
        for name, parameter in named:
            watch(parameter, self, name, held=True)
            self.names[id(parameter)], self.versions[id(parameter)] = name, parameter._version
        at_each_step(Turn.CHECK, self, _before_step, _after_step)

    def __contains__(self, parameter: object) -> bool:
        """Return whether `parameter` is low, and no optimizer is stepping: it sees low values."""
        return not self._stepping and isinstance(parameter, Tensor) and parameter.dtype in LOW_DTYPES

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Return the low values in fp32."""
        return Tensor.detach(parameter).float()

    @contextmanager
    def writing(self, parameter: nn.Parameter, *, fills: bool, counted: bool) -> Iterator[Tensor]:
        """Give the values of `parameter` in fp32, to be changed, and round them at the end; warn if that loses it."""
        low = Tensor.detach(parameter)
        wide, before = low.float(), low.float()
        self.check(parameter)
        yield wide
        with nullcontext() if counted else unsafe_preserve_version_counter(parameter):
            low.copy_(wide)
        self.versions[id(parameter)] = parameter._version
        if not (fills or self.loading or self.warned) and (wide - low).norm() > LOST * (wide - before).norm():
            self._warn_rounded(parameter)

    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor, *, converted: bool) -> Tensor:
        """Return the data of `parameter` where it is set to `value`, rounded unless a cast of it was asked for."""
        if converted or parameter not in self or value.dtype is parameter.dtype or value.shape != parameter.shape:
            return value
        with torch.no_grad(), self.writing(parameter, fills=False, counted=False) as wide:
            wide.copy_(value)
        return Tensor.detach(parameter)

    def check(self, parameter: nn.Parameter) -> None:
        """Warn if low values were written by no method of `parameter`."""
        if self.written_unseen(parameter):
            self.versions[id(parameter)] = parameter._version
            self._warn_rounded(parameter)

    def _warn_rounded(self, parameter: nn.Parameter) -> None:
        kind = str(parameter.dtype).removeprefix("torch.")
        self.warn_once(
            "rounded",
            f"the weight {self.names[id(parameter)]} was changed by hand, and master='none' keeps only its {kind} "
            f"value: what {kind} cannot hold of the change is lost; a policy with master='split' keeps it, or give "
            "its module the rule 'fp32'",
        )

    @staticmethod
    def of(named: Iterable[tuple[Any, nn.Parameter | None]]) -> list[tuple[Any, nn.Parameter, UnkeptWeights]]:
        """Return those of (name, parameter) pairs that are such low ones, with what watches them."""
        owners = [(name, p, owner_of(p)) for name, p in named if p is not None]
        return [(name, p, owner) for name, p, owner in owners if isinstance(owner, UnkeptWeights)]

    @classmethod
    def before_forward(cls, module: nn.Module) -> None:
        """Take note that DistributedDataParallel has sent low values, once for each wrapper of `module` that trains."""
        if (wrapper := training_wrapper(module)) is not None and wrapper not in cls._wrappers:
            cls._wrappers.add(wrapper)
            cls.stepped(module.parameters())

    @staticmethod
    def stepped(parameters: Iterable[nn.Parameter]) -> None:
        """Take note that an update has written those of `parameters` that are such low ones."""
        for _, parameter, owner in UnkeptWeights.of(enumerate(parameters)):
            owner.versions[id(parameter)] = parameter._version

    @staticmethod
    def release(parameters: Iterable[nn.Parameter]) -> None:
        """Give those of `parameters` that are such low ones torch's own class again."""
        for _, parameter, owner in UnkeptWeights.of(enumerate(parameters)):
            unwatch(parameter, owner)


def _before_step(optimizer: Optimizer) -> None:  # optimizers of any kind write low values, without a word
    for _, parameter, owner in UnkeptWeights.of(enumerate(_stepped(optimizer))):
        owner.check(parameter)
        owner._stepping.add(id(optimizer))


def _after_step(optimizer: Optimizer) -> None:
    for _, parameter, owner in UnkeptWeights.of(enumerate(_stepped(optimizer))):
        owner.versions[id(parameter)] = parameter._version
        owner._stepping.discard(id(optimizer))


def _stepped(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
