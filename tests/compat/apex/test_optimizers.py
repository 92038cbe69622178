"""The fused optimizers against their formulas, one parameter at a time in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

STEPS = 5


def gradient(parameter: Tensor) -> Tensor | None:
    return parameter.grad  # behind a call mypy does not remember the last look


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((3, 4), (4,), (2, 2))]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(*shape, generator=generator) for shape in ((3, 4), (4,), (2, 2))]


def trained(kind: Any, **options: Any) -> list[Tensor]:
    params = parameters()
    optimizer = kind(params, **options)
    for step in range(STEPS):
        for parameter, gradient in zip(params, gradients(step), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in params]


def assert_all_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"lr": 0.01, "betas": (0.8, 0.9), "capturable": False}])
def test_adam_is_torchs(options: dict[str, Any]) -> None:
    assert_all_close(trained(FusedAdam, **options), trained(torch.optim.AdamW, **{"weight_decay": 0.0, **options}))
    assert_all_close(trained(FusedAdam, adam_w_mode=False, **options), trained(torch.optim.Adam, **options))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction_is_its_formula(decoupled: bool) -> None:
    lr, decay, eps = 0.1, 0.05, 1e-8
    params = [p.detach().double() for p in parameters()]
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for step in range(STEPS):
        for p, m, v, g in zip(params, first, second, gradients(step), strict=True):
            g = g.double() if decoupled else g.double() + decay * p
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            old = p.clone()
            p.sub_(lr * m / (v.sqrt() + eps))
            if decoupled:
                p.sub_(lr * decay * old)
    found = trained(FusedAdam, lr=lr, bias_correction=False, weight_decay=decay, adam_w_mode=decoupled)
    assert_all_close(found, params)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.2},
    ],
)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    assert_all_close(trained(FusedSGD, lr=0.1, **options), trained(torch.optim.SGD, lr=0.1, **options))


@pytest.mark.parametrize("nesterov", [True, False])
def test_decay_after_the_momentum_is_its_formula(nesterov: bool) -> None:
    lr, momentum, decay = 0.1, 0.9, 0.2
    params = [p.detach().double() for p in parameters()]
    buffers: list[Tensor] = []
    for step in range(STEPS):
        for i, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            g = g.double()
            if step == 0:
                buffers.append(g.clone())
            else:
                buffers[i] = momentum * buffers[i] + g
            update = g + momentum * buffers[i] if nesterov else buffers[i]
            p.sub_(lr * (update + decay * p))
    found = trained(FusedSGD, lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov, wd_after_momentum=True)
    assert_all_close(found, params)
    plain = trained(FusedSGD, lr=lr, weight_decay=decay, wd_after_momentum=True)
    assert_all_close(plain, trained(torch.optim.SGD, lr=lr, weight_decay=decay))


@pytest.mark.parametrize(
    ("adam_w", "decay", "nvlamb", "averaging", "correct", "limit"),
    list(itertools.product([True, False], [0.0, 0.1], [True, False], [True], [True], [1.0]))
    + [(True, 0.1, False, False, False, 0.0), (False, 0.1, False, False, True, 100.0)],
)
def test_lamb_is_its_formula(
    adam_w: bool, decay: float, nvlamb: bool, averaging: bool, correct: bool, limit: float
) -> None:
    lr, eps, beta1, beta2 = 0.01, 1e-6, 0.9, 0.999
    params = [p.detach().double() for p in parameters()]
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for step in range(1, STEPS + 1):
        grads = [g.double() for g in gradients(step - 1)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        shrink = max(1.0, norm / limit) if limit else 1.0
        for p, m, v, g in zip(params, first, second, grads, strict=True):
            g = g / shrink + (0.0 if adam_w else decay) * p
            m.mul_(beta1).add_((1 - beta1 if averaging else 1.0) * g)
            v.mul_(beta2).add_((1 - beta2) * g * g)
            below = (v / ((1 - beta2**step) if correct else 1.0)).sqrt() + eps
            update = m / ((1 - beta1**step) if correct else 1.0) / below + (decay if adam_w else 0.0) * p
            rate = lr * float(p.norm() / update.norm()) if nvlamb or decay else lr
            p.sub_(rate * update)
    found = trained(
        FusedLAMB, lr=lr, weight_decay=decay, adam_w_mode=adam_w, use_nvlamb=nvlamb, grad_averaging=averaging,
        bias_correction=correct, max_grad_norm=limit,
    )  # fmt: skip
    assert_all_close(found, params)


@pytest.mark.parametrize(
    ("inside", "averaging", "norm_type", "zero", "correct"),
    [
        (False, True, 2, False, True),
        (True, True, 2, False, True),
        (False, False, 0, True, True),
        (True, False, 2, True, False),
    ],
)
def test_novograd_is_its_formula(inside: bool, averaging: bool, norm_type: int, zero: bool, correct: bool) -> None:
    lr, eps, beta1, beta2, decay = 0.01, 1e-8, 0.95, 0.98, 0.1
    params = [p.detach().double() for p in parameters()]
    first, norms = [torch.zeros_like(p) for p in params], [0.0] * len(params)
    for step in range(1, STEPS + 1):
        for i, (p, m, g) in enumerate(zip(params, first, gradients(step - 1), strict=True)):
            g = g.double()
            size = float(g.norm() if norm_type == 2 else g.abs().max())
            old = size if step == 1 and not zero else norms[i]
            if norm_type == 2:
                norms[i] = math.sqrt(beta2 * old**2 + (1 - beta2) * size**2)
            else:
                norms[i] = beta2 * old + (1 - beta2) * size
            bias1, bias2 = (1 - beta1**step, math.sqrt(1 - beta2**step)) if correct else (1.0, 1.0)
            below, share = norms[i] / bias2 + eps, 1 - beta1 if averaging else 1.0
            if inside:
                m.mul_(beta1).add_(share * (g / below + decay * p))
                p.sub_(lr * m / bias1)
            else:
                m.mul_(beta1).add_(share * g)
                p.sub_(lr * (m / bias1 / below + decay * p))
    found = trained(
        FusedNovoGrad, lr=lr, betas=(beta1, beta2), weight_decay=decay, reg_inside_moment=inside,
        grad_averaging=averaging, norm_type=norm_type, init_zero=zero, bias_correction=correct,
    )  # fmt: skip
    assert_all_close(found, params)


KINDS: list[Any] = [FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad]


@pytest.mark.parametrize("kind", KINDS)
def test_closures_state_and_zero_grad_work(kind: Any) -> None:
    params = parameters()
    optimizer = kind([{"params": params[:1]}, {"params": iter(params[1:]), "lr": 0.2}], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    again = kind(params, lr=0.1)
    optimizer.step(closure)
    assert float(optimizer.step(closure).detach()) < first
    other = kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    other.step(closure)
    params[0].grad = torch.ones_like(params[0])
    optimizer.zero_grad()
    assert (gradient(params[0]) is None) == (kind is not FusedSGD)
    optimizer.zero_grad(set_to_none=True)
    assert gradient(params[0]) is None
    again.step()  # without gradients: nothing to do


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_amsgrad_is_refused(kind: Any) -> None:
    with pytest.raises(RuntimeError, match="does not support the AMSGrad variant"):
        kind(parameters(), amsgrad=True)


def test_what_apex_took_away_or_keeps_elsewhere_is_explained() -> None:
    with pytest.raises(RuntimeError, match="takes no gradients"):
        FusedAdam(parameters()).step(scale=2.0)
    with pytest.raises(RuntimeError, match="opt_level='O2'"):
        FusedAdam(parameters(), master_weights=True)
    with pytest.raises(RuntimeError, match="norm_type=1; expected 2, or 0"):
        FusedNovoGrad(parameters(), norm_type=1)
    with pytest.raises(TypeError, match="single tensor"):
        FusedAdam(torch.ones(2))
    assert FusedAdam(parameters(), capturable=True).defaults["capturable"]
    assert FusedAdam(parameters()).defaults["fused"] and FusedSGD(parameters(), lr=0.1).defaults["fused"]


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, hs.GradScaler])
@pytest.mark.parametrize(
    "kind", ["sgd", "sgd, decay after", "adam", "adam, one group without", "adam, one without later"]
)
def test_steps_of_a_scaler_have_gradients_without_scale_and_leave_out_what_is_not_finite(
    kind: str, scaler: Any
) -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer: torch.optim.Optimizer
    if kind.startswith("sgd"):
        optimizer = FusedSGD([p, q], lr=0.5, momentum=0.9, wd_after_momentum="after" in kind)
    else:
        groups: list[dict[str, Any]] = [{"params": [p]}, {"params": [q], "bias_correction": "without" not in kind}]
        optimizer = FusedAdam(groups[:1] if "later" in kind else groups, lr=0.5, eps=1.0)
        if "later" in kind:
            optimizer.add_param_group(groups[1])
    scale = scaler("cpu", init_scale=8.0)
    moved = []
    for factor in (0.5, math.inf):
        optimizer.zero_grad()
        scale.scale((p * factor).sum() + (q * factor).sum()).backward()
        scale.step(optimizer)
        scale.update()
        moved.append(p.detach().clone())
    assert torch.equal(*moved)
    assert moved[0].tolist() == pytest.approx([0.75 if kind.startswith("sgd") else 1 - 0.5 * 0.5 / 1.5] * 2)


@pytest.mark.parametrize("lowered", ["before", "after"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sgd_moves_every_element_of_low_parameters(dtype: torch.dtype, momentum: float, lowered: str) -> None:
    p = nn.Parameter(torch.ones(64, dtype=dtype if lowered == "before" else torch.float32))
    optimizer = FusedSGD([p], lr=0.5, momentum=momentum)
    p.data = p.data.to(dtype)
    for _ in range(2):
        p.grad = torch.full_like(p, 0.25)
        optimizer.step()
    assert p.tolist() == [torch.tensor(1 - 0.125 * (2 + momentum)).to(dtype).item()] * 64
