"""Training loops of other libraries: accelerate, Lightning Fabric, torchao's optimizers.

They are optional (``pip install 'halfstep[bench]'``) and come without types, so they are imported when a loop is made.
Each runs as its documentation recommends, with torch's fused AdamW where it does not bring an optimizer of its own.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.cases import Batch, Case
from benchmarks.loops import CLIP, Absent, Run, adamw, device_of
from benchmarks.stages import Stages

PACKAGES = ("accelerate", "lightning-fabric", "torchao")


def versions() -> dict[str, str]:
    """Return the version of each peer, "absent" if it is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def imported(module: str) -> Any:
    """Return a module of a peer.

    Raises:
        Absent: it is not installed, or does not load here.
    """
    package = module.partition(".")[0].replace("_", "-")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels for other machines, and of torch's own changes
            logging.getLogger("torchao").setLevel(logging.ERROR)
            return importlib.import_module(module)
    except ImportError as error:
        raise Absent(f"{package} does not import ({error}); pip install 'halfstep[bench]'") from error


def accelerate(case: Case, model: nn.Module) -> Run:
    """accelerate: prepare, its autocast, its backward and its clipping."""
    library = imported("accelerate")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)  # one a process, else
    device = device_of(model)
    made = library.Accelerator(mixed_precision=case.dtype, cpu=device == "cpu")
    model, optimizer = made.prepare(model, adamw(case, model))
    stages = Stages(device)
    loss_fn, parameters = stages.watched(case.loss_fn), list(model.parameters())

    def step(batch: Batch) -> Tensor:
        with made.autocast():
            loss = loss_fn(model, *batch)
        made.backward(loss)
        made.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Run(step=step, model=model, holds=(model, optimizer.optimizer), stages=stages)


def fabric(case: Case, model: nn.Module) -> Run:
    """Lightning Fabric: setup, its autocast, its backward and its clipping."""
    library = imported("lightning_fabric")
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces its precision
    device = device_of(model)
    precision = {"bf16": "bf16-mixed", "fp16": "16-mixed"}[case.dtype]
    made = library.Fabric(accelerator=device, devices=1, precision=precision)
    plain = adamw(case, model)
    wrapped, optimizer = made.setup(model, plain)
    stages = Stages(device)
    loss_fn = stages.watched(case.loss_fn)

    def step(batch: Batch) -> Tensor:
        with made.autocast():
            loss = loss_fn(wrapped, *batch)
        made.backward(loss)
        made.clip_gradients(wrapped, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Run(step=step, model=model, holds=(model, plain), stages=stages)


def torchao(case: Case, model: nn.Module, optimizer: str) -> Run:
    """A low model under one of torchao's optimizers, with stochastic rounding; the loss of fp32 scores.

    Args:
        case: what to train.
        model: its model.
        optimizer: name of a class in `torchao.optim`.
    """
    make = getattr(imported("torchao.optim"), optimizer)
    model.to(case.low)
    made = make(model.parameters(), lr=case.rate, bf16_stochastic_round=True)
    stages, parameters = Stages(device_of(model)), list(model.parameters())
    scores = WidensScores(model)
    loss_fn = stages.watched(case.loss_fn)

    def step(batch: Batch) -> Tensor:
        loss = loss_fn(scores, *(t.to(case.low) if t.is_floating_point() else t for t in batch))
        loss.backward()
        clip_grad_norm_(parameters, CLIP)
        with _disable_current_modes():  # it compiles itself, which torch refuses while something counts operators
            made.step()
        made.zero_grad()
        return loss.detach()

    return Run(step=step, model=model, holds=(model, made), stages=stages)


class WidensScores(nn.Module):
    """A low model with fp32 outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).to(torch.float32)  # type: ignore[no-any-return]  # module calls are Any
