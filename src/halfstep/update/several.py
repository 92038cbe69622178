"""The update of several optimizers: one norm over all gradients, one verdict, and all of them step or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from halfstep.kernels.choose import check_norms
from halfstep.optimizers import Optimizers
from halfstep.update.fused import GradientCheck
from halfstep.update.updater import ClipNorm, Updater, Write
from halfstep.weights import WeightStore
from halfstep.weights.draws import Draws


class SeveralUpdaters(Updater):
    """An `Updater` for each of several optimizers, as one."""

    def use(self, optimizer: Optimizers) -> None:  # type: ignore[override]
        """Update through `optimizer` from now on."""
        self.optimizer = optimizer
        self.host_read = 0
        self.members = {name: Updater(own, self.store, self.names) for name, own in optimizer.optimizers.items()}

    @property
    def reason(self) -> str:  # type: ignore[override]
        """Why the last update of some of them went through ``optimizer.step()``."""
        return "; ".join(member.reason for member in self.members.values() if member.reason)

    @property
    def draws(self) -> Draws | None:
        """Return where the random bits of stochastic rounding come from."""
        return next((found for member in self.members.values() if (found := member.draws) is not None), None)

    def check_optimizer(self) -> None:
        """Check the options and hooks of each of them."""
        for member in self.members.values():
            member.check_optimizer()

    def prefer_fused(self) -> None:
        """Use the fused form of each of them that has one."""
        for member in self.members.values():
            member.prefer_fused()

    def plan(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        divisor: Tensor | None,
        clip_norm: ClipNorm,
        clip_value: float | None,
        *,
        part: int | None = None,
    ) -> tuple[GradientCheck, Write]:
        """Read the gradients; return what was found in all of them, and the function that updates unless it is bad."""
        given = {id(p): n for n, p in enumerate(parameters)}
        plans: list[tuple[GradientCheck, Write]] = []
        places: list[int] = []
        for name, member in self.members.items():
            own = [p for group in member.optimizer.param_groups for p in group["params"] if id(p) in given]
            if own:
                limit = clip_norm.get(name) if isinstance(clip_norm, Mapping) else clip_norm
                some = [gradients[given[id(p)]] for p in own]
                plans.append(member.plan(own, some, divisor, limit, clip_value, part=part))
                places += [given[id(p)] for p in own]
        norms = torch.cat([check.norms for check, _ in plans])
        if places != sorted(places):  # gradients that come in a backward pass
            of = dict(zip(places, norms.unbind(), strict=True))
            norms = torch.stack([of[n] for n in sorted(places)])
        together = None if isinstance(clip_norm, Mapping) else clip_norm
        check = GradientCheck(norms, *check_norms(norms, divisor, together))

        def write(factor: Tensor, bad: Tensor) -> None:
            for own, write_own in plans:
                write_own(own.factor if isinstance(clip_norm, Mapping) else factor, bad)
            self.host_read = sum(member.host_read for member in self.members.values())

        return check, write

    def has_written(self) -> bool:
        """Return whether an update that was begun and not ended has changed anything, as far as is known."""
        return any(member.has_written() for member in self.members.values())

    def abort(self, *, written: bool) -> None:
        """Put the host's side of an update that was cut off in order."""
        for member in self.members.values():
            member.abort(written=written)


def updater_of(optimizer: object, store: WeightStore | None, names: Mapping[int, str]) -> Updater:
    """Return what updates through one optimizer or several."""
    kind: Callable[..., Updater] = SeveralUpdaters if isinstance(optimizer, Optimizers) else Updater
    return kind(optimizer, store, names)
