"""DeepSpeed on a CPU, in a process of its own: what `test_engines` compares with a TrainStep."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import halfstep as hs
from halfstep.policy.engines import EngineConfig

__all__ = ["exact_losses", "in_deepspeed", "overflowing_scales"]


def in_deepspeed(work: Callable[..., Any], folder: Path, *args: Any) -> Any:
    """Return what ``work(*args)`` returns in a process with a group of one."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    spawn(_process, (work, str(folder), args), nprocs=1)
    return pickle.loads(Path(folder, "result").read_bytes())


def _process(rank: int, work: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting = Path(folder, "meeting").as_uri()
    os.environ.update(LOCAL_SIZE="1", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=1)
    Path(folder, "result").write_bytes(pickle.dumps(work(*args)))
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort some exits


def _engine(model: nn.Module, made: EngineConfig, stage: int) -> Any:
    import deepspeed

    deepspeed.init_distributed("gloo")
    rest = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**made.config, **rest})[0]


def _model() -> nn.Module:
    """Return a model of bf16 numbers, all of whose parameters fill torch's vectors, as the flat tensors of ZeRO do."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)).bfloat16().float()


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs.bfloat16()).float(), targets)


def exact_losses(policy: hs.Policy, stage: int) -> tuple[list[float], list[float]]:
    """Return the losses of DeepSpeed under the written configuration, and those of a TrainStep under the policy."""
    random = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 64, generator=random), torch.randint(64, (4,), generator=random)) for _ in range(12)]
    engine, theirs = _engine(_model(), policy.to_deepspeed(), stage), []
    for batch in batches:
        loss = _loss(engine, *batch)
        engine.backward(loss)
        engine.step()
        theirs.append(loss.item())
    model = _model()
    model, optimizer, _ = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    step = hs.TrainStep(model, optimizer, loss_fn=_loss)
    return theirs, [float(step(*batch).loss) for batch in batches]


def overflowing_scales(policy: hs.Policy, stage: int) -> list[float]:
    """Return the scale after each of four updates whose gradients are infinite."""
    from deepspeed.accelerator import get_accelerator

    vars(get_accelerator())["is_fp16_supported"] = lambda: True
    engine = _engine(_model(), policy.to_deepspeed(accept=["outputs", "scale", "loss"]), stage)
    next(engine.module.parameters()).register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    found = []
    for _ in range(4):
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(torch.ones(4, 64, dtype=dtype)).float().sum())
        engine.step()
        scaler = engine.optimizer.torch_autocast_gradscaler
        found.append(float(engine.optimizer.loss_scale if scaler is None else scaler.get_scale()))
    return found
