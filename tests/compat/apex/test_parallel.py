"""apex.parallel: DistributedDataParallel in two processes, Reducer, synchronised BatchNorm, LARC."""

from __future__ import annotations

import copy
import datetime
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfstep.compat.apex import amp, parallel
from halfstep.compat.apex.parallel import LARC, DistributedDataParallel
from tests.two_processes import run_all

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"delay_allreduce": True, "message_size": 10},
    "fp32": {"allreduce_always_fp32": True, "retain_allreduce_buffers": True},
    "sum": {"gradient_average": False},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sum, predivided": {"gradient_average": False, "gradient_predivide_factor": 4.0},
}


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad  # behind a call mypy does not remember the last look


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 6, 4)


def work(rank: int, folder: str) -> None:
    """Compute gradients on one of two ranks and save them."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        for level in ("O1", "O2"):
            model, x = model_and_data()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
            wrapped = DistributedDataParallel(model, **options)
            with amp.scale_loss(wrapped(x[rank]).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            found[f"{name} {level}"] = [p.grad.float() for p in model.parameters() if p.grad is not None]
    tensor = torch.full((2,), float(rank))
    parallel.Reducer([tensor]).reduce()
    found["reducer"] = tensor
    plain = nn.Linear(2, 1)
    with torch.no_grad():
        plain.weight.fill_(float(rank + 1))
    reducer = parallel.Reducer(plain)
    plain.weight.grad = torch.full((1, 2), float(rank))
    reducer.reduce()
    found["module"] = (plain.weight.detach(), plain.weight.grad)
    group = parallel.create_syncbn_process_group(1)
    found["group"] = (dist.get_world_size(group), parallel.create_syncbn_process_group(0))
    try:
        parallel.create_syncbn_process_group(3)
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.dist
def test_two_processes_reduce_as_apexs_arguments_say(tmp_path: Path) -> None:
    run_all(work, (str(tmp_path),))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model, x = model_and_data()
    (model(x[0]).square().mean() + model(x[1]).square().mean()).backward()
    for name in OPTIONS:
        factor = 1.0 if name.startswith("sum") else 0.5
        for level in ("O1", "O2"):
            for one, other, p in zip(*(r[f"{name} {level}"] for r in ranks), model.parameters(), strict=True):
                assert torch.equal(one, other) and p.grad is not None
                torch.testing.assert_close(one, factor * p.grad, atol=3e-3, rtol=3e-2)
    for rank in ranks:
        assert rank["reducer"].tolist() == [0.5, 0.5]
        assert rank["module"][0].tolist() == [[1.0, 1.0]] and rank["module"][1].tolist() == [[0.5, 0.5]]
        assert rank["group"] == (1, None) and "group_size=3 does not divide the 2 processes" in rank["error"]


def test_arguments_that_make_no_sense_are_refused() -> None:
    for options, saying in (
        ({"shared_param": True}, "delay_allreduce=True"),
        ({"gradient_average_split_factor": 2.0}, "use gradient_predivide_factor"),
        ({"num_allreduce_streams": 0}, "expected at least 1"),
        ({"allreduce_trigger_params": [torch.ones(1)]}, "not a parameter of the module"),
    ):
        with pytest.raises(ValueError, match=saying):
            DistributedDataParallel(nn.Linear(1, 1), **options)


def test_batchnorms_become_synchronised_ones() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2, affine=False)))
    weight = model[1].weight
    found = parallel.convert_syncbn_model(model, channel_last=True)
    assert found is model and isinstance(model[1], parallel.SyncBatchNorm) and model[1].weight is weight
    assert isinstance(parallel.convert_syncbn_model(nn.BatchNorm1d(3)), nn.SyncBatchNorm)


# ---------------------------------------------------------------------- LARC


@pytest.mark.parametrize("clip", [True, False])
def test_larc_scales_gradients_by_its_formula(clip: bool) -> None:
    torch.manual_seed(0)
    lr, decay, trust = 0.1, 0.2, 0.02
    parameter, zero = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.zeros(2))
    optimizer = LARC(torch.optim.SGD([parameter, zero], lr=lr, weight_decay=decay), trust, clip=clip, eps=1e-8)
    value, gradient = parameter.detach().double().clone(), torch.randn(3, 3)
    parameter.grad, zero.grad = gradient.clone(), torch.ones(2)
    optimizer.step()
    g = gradient.double()
    rate = trust * value.norm() / (g.norm() + decay * value.norm() + 1e-8)
    rate = min(float(rate) / lr, 1.0) if clip else float(rate)
    torch.testing.assert_close(parameter.detach(), (value - lr * rate * (g + decay * value)).float())
    assert torch.equal(zero.detach(), torch.full((2,), -lr))
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_larc_is_an_optimizer_in_everything_else() -> None:
    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer = LARC(inner)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state is inner.state and optimizer.param_groups is inner.param_groups
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert gradient(parameter) is None and "SGD" in repr(optimizer)
    again = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(copy.deepcopy(again), LARC)
    optimizer.param_groups = inner.param_groups[:1]
    assert len(inner.param_groups) == 1


def test_larc_reads_masters_and_skips_overflows() -> None:
    model = nn.Linear(3, 2)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = model.state_dict()["weight"]
    with amp.scale_loss(model(torch.ones(1, 3)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], before) and amp.step_was_skipped(optimizer)
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 3)).sum() * 1e-2, optimizer) as scaled:
        scaled.backward()
    gradient = model.weight.grad.clone()
    optimizer.step()
    rate = min(float(0.02 * before.norm() / (gradient.norm() + 1e-8)) / 0.1, 1.0)
    torch.testing.assert_close(model.state_dict()["weight"], before - 0.1 * rate * gradient)
