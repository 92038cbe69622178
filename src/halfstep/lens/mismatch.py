"""The mismatch of a trainer and a sampler: log-probabilities of the same tokens, computed in two ways.

Reinforcement learning weighs a sampled token by the ratio of its probability under the model that is trained and the
one that sampled it. Both have the same weights, and different formats and kernels: the ratio is not 1 before anything
is learned. `mismatch` measures it, and tries which part of the sampler in fp32 brings it down most.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.arguments import MODEL, POSITIVE, check, shown
from halfstep.binding.bind import is_bound
from halfstep.binding.prepare import prepare, prepared_policy, unprepare
from halfstep.binding.wrappers import unwrap
from halfstep.errors import AuditError
from halfstep.policy.policy import Policy
from halfstep.step.arguments import LOSS
from halfstep.step.train_step import TrainStep

PLAIN = frozenset({"bf16", "fp16"})
"""What a sampler is called that is the model in a low format (`O3`), as inference engines run it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far two ways to compute log-probabilities of the same tokens are apart; see `mismatch`.

    Attributes:
        tokens: how many were compared.
        mean, largest: of the absolute differences of log-probabilities.
        place: index of the token that differs most.
        ratio: (smallest, mean, largest) of ``exp(trainer - sampler)``, the importance ratio.
        clipped: share of ratios farther from 1 than `clip`.
        effective: effective sample size of the ratios over the number of tokens; 1 where all are equal.
        kl: estimate of the KL divergence of sampler and trainer, the mean of ``ratio - 1 - log(ratio)``.
        trainer_error, sampler_error: mean absolute difference of each from the model in fp32.
        without: (modules of the sampler, `mean` with these in fp32), those that add most first; ``*`` stands for the
            numbers of layers. Empty where the sampler is a model of one's own.
    """

    tokens: int
    mean: float
    largest: float
    place: tuple[int, ...]
    ratio: tuple[float, float, float]
    clipped: float
    effective: float
    kl: float
    trainer_error: float
    sampler_error: float
    without: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """Return it as readable text."""
        lines = [
            f"mismatch of {self.tokens} tokens: log-probabilities differ by {self.mean:.2g}, at most "
            f"{self.largest:.2g} (token {list(self.place)})",
            f"importance ratio {self.ratio[0]:.3f} to {self.ratio[2]:.3f}, {self.clipped:.1%} clipped, effective "
            f"sample size {self.effective:.1%}, KL {self.kl:.2g}",
            f"error to fp32: trainer {self.trainer_error:.2g}, sampler {self.sampler_error:.2g}",
        ]
        lines += [f"with {modules} of the sampler in fp32: {mean:.2g}" for modules, mean in self.without[:3]]
        return "\n".join(lines)


def mismatch(
    trainer: nn.Module | TrainStep,
    batch: Sequence[Any],
    log_probs: Callable[..., Tensor],
    sampler: nn.Module | Policy | str = "bf16",
    *,
    clip: float = 0.2,
) -> Mismatch:
    """Compare the log-probabilities of a model as it is trained and as it is sampled from, token by token.

    Nothing is changed: copies of the model compute, in evaluation mode and without gradients.

    Args:
        trainer: the model that is trained, prepared, or its `TrainStep`.
        batch: the arguments of `log_probs` after the model.
        log_probs: ``log_probs(model, *batch) -> tensor`` of log-probabilities of the sampled tokens, any shape.
        sampler: "bf16" or "fp16", the model in that format, as inference engines run it; a policy; or a model of one's
            own, with the same weights.
        clip: distance of the importance ratio from 1 from which an algorithm clips it.

    Raises:
        AuditError: arguments that make no sense, or log-probabilities of different shapes.

    Examples:
        >>> def log_probs(model, x, y):
        ...     return torch.log_softmax(model(x).float(), -1).gather(-1, y[:, None])
        >>> found = hs.mismatch(hs.prepare(model, policy="mixed"), (x, y), log_probs, "bf16")
        >>> found.ratio[0] <= 1.0 <= found.ratio[2]
        True
    """
    model = trainer.model if isinstance(trainer, TrainStep) else trainer
    check("hs.mismatch", AuditError, trainer=(model, MODEL), log_probs=(log_probs, LOSS), clip=(clip, POSITIVE))
    if not isinstance(batch, (tuple, list)):
        raise AuditError(f"hs.mismatch: batch must be a tuple of the arguments of log_probs, and is {shown(batch)}")
    wide = copy.deepcopy(unwrap(model))
    if is_bound(wide):
        unprepare(wide)
    wide = wide.eval().requires_grad_(False).float()
    policy = prepared_policy(model)

    def under(wanted: Policy | None) -> Tensor:
        made = copy.deepcopy(wide)
        return _computed(made if wanted is None else prepare(made, policy=wanted), batch, log_probs)

    exact, mine = under(None), under(policy)
    wanted: Policy | None = None
    if not isinstance(sampler, nn.Module):
        wanted = Policy.of("O3", dtype=sampler) if sampler in PLAIN else Policy.of(sampler)
    theirs = _computed(sampler, batch, log_probs) if wanted is None else under(wanted)
    if theirs.shape != mine.shape:
        raise AuditError(
            f"hs.mismatch: log_probs has {tuple(theirs.shape)} tokens of the sampler, and "
            f"{tuple(mine.shape)} of the trainer"
        )
    difference = mine - theirs
    ratio = difference.exp()
    worst = int(difference.abs().argmax())
    return Mismatch(
        tokens=difference.numel(),
        mean=_mean(difference),
        largest=float(difference.abs().max()),
        place=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), difference.shape)),
        ratio=(float(ratio.min()), float(ratio.mean()), float(ratio.max())),
        clipped=float(((ratio - 1).abs() > clip).double().mean()),
        effective=float(ratio.sum() ** 2 / ratio.square().sum() / ratio.numel()),
        kl=float((ratio - 1 - difference).mean()),
        trainer_error=_mean(mine - exact),
        sampler_error=_mean(theirs - exact),
        without=() if wanted is None else _without(wanted, wide, lambda policy: _mean(mine - under(policy))),
    )


def _mean(difference: Tensor) -> float:
    return float(difference.abs().mean())


@torch.no_grad()
def _computed(model: Any, batch: Sequence[Any], log_probs: Callable[..., Tensor]) -> Tensor:
    training = model.training
    try:
        found = log_probs(model.eval(), *batch)
    finally:
        model.train(training)
    if not isinstance(found, Tensor) or not found.is_floating_point() or not found.numel():
        raise AuditError(f"hs.mismatch: log_probs must return a tensor of log-probabilities, and returned {found!r}")
    return found.detach().cpu().double()


def _without(policy: Policy, model: nn.Module, measure: Callable[[Policy], float]) -> tuple[tuple[str, float], ...]:
    """Return (pattern, what is left with these modules in fp32) for all modules that have parameters of their own."""
    named = [name for name, module in model.named_modules() if name and [*module.parameters(recurse=False)]]
    patterns = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in named)
    found = [(pattern, measure(policy.with_modules({pattern: "fp32"}))) for pattern in patterns]
    return tuple(sorted(found, key=lambda pair: pair[1]))
