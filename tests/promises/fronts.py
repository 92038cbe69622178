"""The front-ends of other libraries: each trains a job in that library's words, under its own options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.compat.apex import amp as apex
from halfstep.compat.apex import parallel as apex_parallel
from halfstep.compat.megengine import amp as megengine
from halfstep.compat.megengine.autodiff import GradManager
from halfstep.compat.mindspore import amp as mindspore
from tests.promises.probe import Entry, Job, Trained, one_rank

__all__ = ["Apex", "Front", "MegEngine", "MindSpore", "TorchAmp"]


class Front(Entry):
    """A front-end with some options; the policy an entry is called with says nothing here."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def of(self, *names: str) -> dict[str, Any]:
        """Return those of the options."""
        return {name: self.options[name] for name in names if name in self.options}

    @contextmanager
    def around(self) -> Iterator[None]:
        """Start a process group of one rank where `parallel` asks for one."""
        if "parallel" not in self.options:
            yield
            return
        with one_rank():
            yield


class TorchAmp(Front):
    """``torch_amp.autocast`` and ``torch_amp.GradScaler`` in the loop of torch's documentation."""

    name = "torch_amp"

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        region = torch_amp.autocast("cpu", **self.of("dtype", "enabled"))
        scaler = torch_amp.GradScaler("cpu", **{"enabled": False, **self.options.get("scaler", {})})
        optimizer = job.optimizer(job.model.parameters())
        scale = scaler.get_scale()
        for window in job.windows:
            for batch in window:
                with region:
                    loss = job.loss(job.model, *batch)
                scaler.scale(loss.float() / len(window)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        def call(*batch: Any) -> Any:
            with region:
                return job.model(*batch)

        return Trained(job.model, optimizer, len(job.windows), call, name=repr(region).split()[1], scale=scale)


class Apex(Front):
    """``amp.initialize`` and ``amp.scale_loss``."""

    name = "apex"

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        given = dict(self.options)
        delay, parallel = given.pop("delay_unscale", False), given.pop("parallel", None)
        for function, module, name in given.pop("register", ()):
            function(module, name)
        try:
            model, optimizer = apex.initialize(job.model, job.optimizer(job.model.parameters()), verbosity=0, **given)
            known = hs.prepared_policy(model)
            if parallel is not None:
                model = apex_parallel.DistributedDataParallel(model, **parallel)
            scale = float(apex.state_dict()["loss_scaler0"]["loss_scale"])
            for window in job.windows:
                for batch in window:
                    last = batch is window[-1]
                    loss = job.loss(model, *batch) / len(window)
                    with apex.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled:
                        scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
            name = "" if known is None else known.name
            return Trained(job.model, optimizer, len(job.windows), model, name=name, scale=scale)
        finally:
            apex.initialize(nn.Linear(1, 1), enabled=False, verbosity=0)  # casts off


class MegEngine(Front):
    """``amp.autocast``, ``GradManager`` and ``amp.GradScaler``."""

    name = "megengine"

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        region = megengine.autocast(**self.of("enabled", "low_prec_dtype", "high_prec_dtype"))
        manager = GradManager().attach(list(job.model.parameters()))
        scaler = megengine.GradScaler(**self.of("init_scale", "growth_interval"))
        optimizer = job.optimizer(job.model.parameters())
        before, scale = megengine.policy, scaler.scale_factor
        if "policy" in self.options:
            megengine.policy = self.options["policy"]
        try:
            name = megengine.policy.name
            for window in job.windows:
                for batch in window:
                    with manager:
                        with region:
                            loss = job.loss(job.model, *batch)
                        loss = loss.float() / len(window)
                        scaler.backward(manager, loss, unscale_grad=batch is window[-1])
                optimizer.step()
                optimizer.zero_grad()

            def call(*batch: Any) -> Any:
                with region:
                    return job.model(*batch)

            out = call(*job.windows[0][0][:-1]) if len(job.windows[0][0]) > 1 else None
            return Trained(job.model, optimizer, len(job.windows), lambda *batch: out, name=name, scale=scale)
        finally:
            megengine.policy = before


class _Whole(nn.Module):
    """A network that returns its loss, as MindSpore's training cells want it."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self.model, *batch)


class MindSpore(Front):
    """``amp.build_train_network``; a micro-batch is an update, as MindSpore has no other."""

    name = "mindspore"

    def __call__(self, policy: hs.Policy, job: Job) -> Trained:
        """Train `job`."""
        given = dict(self.options)
        white, black = given.pop("white_list", None), given.pop("black_list", None)
        low = given.pop("dtype", torch.bfloat16)
        level = given.pop("level", "O0")
        manager = given.pop("loss_scale_manager", None)
        model = job.model
        for function, name, flags in given.pop("flags", ()):
            function(model.get_submodule(name), **flags)
        if white is not None or black is not None:
            mindspore.custom_mixed_precision(model, white_list=white, black_list=black, dtype=low)
        else:
            mindspore.auto_mixed_precision(model, level, low)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fp16 without a scale
            optimizer = job.optimizer(model.parameters())
            cell = mindspore.build_train_network(_Whole(model, job.loss), optimizer, loss_scale_manager=manager)
        batches: Iterable[Any] = [batch for window in job.windows for batch in window]
        for batch in batches:
            cell(*batch)
        known = hs.prepared_policy(model)
        scale = 1.0 if manager is None else float(manager.get_loss_scale())
        return Trained(
            model,
            optimizer,
            sum(len(window) for window in job.windows),
            model,
            name="" if known is None else known.name,
            scale=scale,
        )
