"""Train under configurations that `Policy.to_deepspeed` writes, parse those of other engines, and write a JSON file.

    python -m benchmarks.engines --megatron DIR --torchtitan DIR --json benchmarks/results/engines.json

DeepSpeed must be installed; it runs on a CPU, on two gloo processes. Every policy trains a small GPT with ZeRO 1, 2 and
3, and its losses are compared with those of a `TrainStep` under DistributedDataParallel: of the same policy, and of all
others. DIR are checkouts; Megatron-LM's own parser and torchtitan's own dataclass read what is written for each value
of every field.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pickle
import subprocess
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import halfstep as hs
from benchmarks.stamp import commit, write
from halfstep.errors import PolicyError
from halfstep.tasks import machine
from halfstep.tasks.gpt import GPT

STEPS, ACCUMULATE, RANKS, BATCH, LENGTH, VOCABULARY = 20, 2, 2, 4, 16, 64
STAGES = (1, 2, 3)
FIELDS = tuple(f.name for f in dataclasses.fields(hs.Policy))

EXACT = hs.Policy(
    name="low", dtype="bf16", params="low", norms="low", master="master", table="none", residual="low", loss="keep"
)
"""What DeepSpeed's section bf16 is, field by field: nothing is lost."""

POLICIES: Mapping[str, hs.Policy] = {
    "low": EXACT,
    "low, grads='fp32'": EXACT.replace(grads="fp32"),
    "low, master='none'": EXACT.replace(master="none"),
    "torch": hs.Policy.of("torch", dtype="bf16"),
    "O2": hs.Policy.of("O2", dtype="bf16"),
    "O0": hs.Policy.of("O0"),
}

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": lambda weights: AdamW(weights, lr=3e-3),
}

SCALED = dataclasses.replace(hs.policy.SCALE_RULES["deepspeed"], init=2.0**24, interval=3)
FP16 = EXACT.replace(name="low fp16", dtype="fp16", emulate="never", grads="fp32", scale=SCALED)

# ------------------------------------------------------------------ training


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches: counting modulo the vocabulary, from a random start with a random stride."""
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS * ACCUMULATE):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=random)
        stride = torch.randint(1, 4, (BATCH, 1), generator=random)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        mine = tokens[rank::RANKS]
        yield mine[:, :-1], mine[:, 1:]


def small_gpt() -> nn.Module:
    """Return the model; its weights are bf16 numbers, because DeepSpeed's masters start from the lowered weights."""
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, layers=2, heads=2).bfloat16().float()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def step_losses(policy: hs.Policy, optimizer: str, rank: int) -> list[tuple[float, float]]:
    """Return (loss, scale) of every micro-batch of a TrainStep."""
    model = small_gpt()
    bare, stepped, scaler = hs.prepare(model, OPTIMIZERS[optimizer](model.parameters()), policy=policy)
    wrapped = nn.parallel.DistributedDataParallel(bare)
    step = hs.TrainStep(wrapped, stepped, loss_fn=loss_of, scaler=scaler, accumulate=ACCUMULATE)
    return [(float(step(*batch).loss), float(scaler.get_scale())) for batch in batches(rank)]


def engine_losses(policy: hs.Policy, optimizer: str, rank: int, stage: int) -> list[tuple[float, float]]:
    """Return (loss, scale) of every micro-batch of DeepSpeed's engine under the configuration that is written."""
    import deepspeed

    model = small_gpt()
    config = policy.to_deepspeed(accept=FIELDS).config
    config |= {
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.0,  # without this key DeepSpeed clips to a norm of 1
        "zero_allow_untested_optimizer": True,  # SGD
        # by default ZeRO 3 replaces torch.nn.functional.linear by one that rounds before it adds the bias
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), config=config)
    found = []
    for batch in batches(rank):
        loss = loss_of(engine, *batch)
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), float(getattr(engine.optimizer, "loss_scale", 1.0))))
    return found


def _process(rank: int, label: str, folder: str) -> None:
    """Train one policy with every optimizer and stage, and write what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo")
    policy = FP16 if label == FP16.name else POLICIES[label]
    if policy.dtype == "fp16":  # DeepSpeed refuses it on a CPU, whose kernels have it
        vars(get_accelerator())["is_fp16_supported"] = lambda: True
    found = {}
    for optimizer in OPTIMIZERS:
        found[optimizer, 0] = step_losses(policy, optimizer, rank)
        for stage in STAGES:
            found[optimizer, stage] = engine_losses(policy, optimizer, rank, stage)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort some exits


def trained(label: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return (optimizer, ZeRO stage; 0 is the TrainStep) -> (loss, scale) of every micro-batch of rank 0."""
    os.environ.update(
        DS_ACCELERATOR="cpu", LOCAL_SIZE=str(RANKS), LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29600",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (label, folder), nprocs=RANKS)
        found: dict[tuple[str, int], list[tuple[float, float]]] = pickle.loads(Path(folder, "0.pickle").read_bytes())
        return found


def apart(mine: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float:
    return max(abs(a - b) for (a, _), (b, _) in zip(mine, theirs, strict=True))


def runs() -> list[dict[str, Any]]:
    """Return how far every engine's losses are from those of every TrainStep."""
    found = {label: trained(label) for label in POLICIES}
    rows = []
    for label in POLICIES:
        for optimizer in OPTIMIZERS:
            for stage in STAGES:
                engine, own = found[label][optimizer, stage], found[label][optimizer, 0]
                others = {other: apart(engine, found[other][optimizer, 0]) for other in POLICIES if other != label}
                nearest = min(others, key=lambda other: others[other])
                rows.append(
                    {
                        "policy": label,
                        "optimizer": optimizer,
                        "stage": stage,
                        "accepted": lost(POLICIES[label]),
                        "equal": sum(a == b for (a, _), (b, _) in zip(engine, own, strict=True)),
                        "of": len(own),
                        "apart": apart(engine, own),
                        "nearest_other": nearest,
                        "apart_from_it": others[nearest],
                    }
                )
    return rows


def scaled() -> list[dict[str, Any]]:
    """Return in how many micro-batches of an fp16 run with overflows the scales are equal."""
    found = trained(FP16.name)
    return [
        {
            "optimizer": optimizer,
            "stage": stage,
            "equal": sum(a == b for (_, a), (_, b) in zip(found[optimizer, stage], found[optimizer, 0], strict=True)),
            "of": STEPS * ACCUMULATE,
            "moves": sum(a != b for (_, a), (_, b) in zip(found[optimizer, 0], found[optimizer, 0][1:], strict=False)),
        }
        for optimizer in OPTIMIZERS
        for stage in STAGES
    ]


def lost(policy: hs.Policy) -> list[str]:
    """Return the fields that must be accepted for DeepSpeed."""
    from halfstep.policy.engines import ENGINES, expressed

    return [e.field for e in expressed(ENGINES["deepspeed"], policy) if e.lost]


# ------------------------------------------------------------------ parsers


def written_policies() -> Iterator[hs.Policy]:
    """Yield every preset in every format, and each with every value of every field that it can have."""
    hints = get_type_hints(hs.Policy)
    more: dict[str, tuple[Any, ...]] = {
        "scale": ("none", 1024.0, *hs.policy.SCALE_RULES),
        "ops": ((("softmax", "fp32"),),),
        "modules": ((("head", "fp32"),),),
    }
    for dtype in ("bf16", "fp16", "fp32"):
        for preset in hs.policy.PRESETS.values():
            base = preset.replace(dtype=dtype)
            for name in FIELDS:
                literal = get_args(hints[name]) if get_origin(hints[name]) is typing.Literal else ()
                for value in (*literal, *more.get(name, ())):
                    yield base.replace(**{name: value})


def written(method: str) -> list[Any]:
    """Return the different configurations that `method` of a policy writes."""
    made = {}
    for policy in written_policies():
        try:
            config = getattr(policy, method)(accept=FIELDS)
        except PolicyError:  # two fields contradict each other, or the engine lacks the format
            continue
        made[config.text] = config
    return list(made.values())


def git(folder: Path) -> str:
    made = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
    )
    return made.stdout.strip() or "unknown"


def megatron(folder: Path) -> dict[str, Any]:
    """Parse the arguments with Megatron-LM's own parser, and compare what it read with the configuration."""
    import typing_extensions

    vars(typing).setdefault("override", typing_extensions.override)  # Python 3.12's
    sys.path.insert(0, str(folder))
    from megatron.core.package_info import __version__ as version
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    made = written("to_megatron")
    for config in made:
        read = vars(parser.parse_args(config.args))
        wrong = {key: read[key] for key, value in config.config.items() if read[key] != value}
        if wrong:
            raise SystemExit(f"Megatron-LM reads {config} as {wrong}")
    keys = {key for config in made for key in config.config}
    return {"version": version, "commit": git(folder), "configurations": len(made), "keys": len(keys)}


def torchtitan(folder: Path) -> dict[str, Any]:
    """Parse the arguments with tyro into torchtitan's own dataclass, and compare what it read."""
    import tyro

    sys.path.insert(0, str(folder))
    from torchtitan.config.configs import TrainingConfig

    job = dataclasses.make_dataclass("Job", [("training", TrainingConfig)])
    made = written("to_torchtitan")
    for config in made:
        read = dataclasses.asdict(tyro.cli(job, args=list(config.args)))["training"]
        if any(read[key] != value for key, value in config.config["training"].items()):
            raise SystemExit(f"torchtitan reads {config.args} as {read}")
    keys = {key for config in made for key in config.config["training"]}
    return {"commit": git(folder), "configurations": len(made), "keys": len(keys)}


def deepspeed_models() -> dict[str, Any]:
    """Read the configurations with DeepSpeed's own models, and compare what they read."""
    from deepspeed.runtime.config import DeepSpeedConfig

    made = written("to_deepspeed")
    for config in made:
        whole = {**config.config, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        read = DeepSpeedConfig(whole)
        for section, model in (("fp16", read.float16_config), ("bf16", read.bfloat16_config)):
            for key, value in config.config.get(section, {}).items():
                if getattr(model, key) != value:
                    raise SystemExit(f"DeepSpeed reads {section}.{key}={value!r} as {getattr(model, key)!r}")
    keys = {
        f"{section}.{key}" for c in made for section, part in c.config.items() if isinstance(part, dict) for key in part
    }
    return {"configurations": len(made), "keys": len(keys | {"communication_data_type"})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--torchtitan", type=Path, help="a checkout of torchtitan")
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    report: dict[str, Any] = {
        "command": "python -m benchmarks.engines --megatron DIR --torchtitan DIR --json FILE",
        "commit": commit(),
        "machine": machine(),
        "deepspeed": {"version": deepspeed.__version__, **deepspeed_models()},
        "megatron": megatron(options.megatron) if options.megatron else {},
        "torchtitan": torchtitan(options.torchtitan) if options.torchtitan else {},
        "steps": STEPS,
        "accumulate": ACCUMULATE,
        "ranks": RANKS,
        "scales": scaled(),
        "runs": runs(),
    }
    assert all(math.isfinite(run["apart"]) for run in report["runs"])
    write(options.json, report)


if __name__ == "__main__":
    main()
