"""What `test_transformers.py` launches with torchrun: Trainer over DDP and FSDP2 in gloo processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import DistributedType, PartialState

import halfstep as hs

OLD = transformers.__version__.startswith("4.")
LENGTH, VOCABULARY = 8, 19
POLICIES = {
    "O2-bf16": hs.Policy.of("O2", dtype="bf16"),
    "pure-bf16": hs.Policy.of("pure", dtype="bf16"),
    "pure-fp16": hs.Policy.of("pure", dtype="fp16", scale=hs.ScaleRule(init=2.0**19, interval=2)),
    "mixed-bf16": hs.Policy.of("mixed", dtype="bf16"),
}


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (64, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def run(folder: Path, policy: Any, *, resume: str | None = None, seed: int = 0, **settings: Any) -> Any:
    defaults = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "max_steps": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "learning_rate": 3e-3, "logging_steps": 1, "ddp_backend": "gloo",
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **{**defaults, **settings})
    if args.fsdp:
        PartialState().distributed_type = DistributedType.MULTI_GPU  # of CPU processes accelerate makes DDP, unasked
    made = model(seed)
    if args.fsdp and policy.name == "O2":
        hs.shard(made, policy)  # accelerate would gather norms, which are fp32, with low weights
    ran = hs.integrations.transformers.Trainer(made, args, train_dataset=data(), policy=policy)
    ran.train(resume_from_checkpoint=resume)
    return ran


def sharding(policy: Any) -> dict[str, Any]:
    """Return the settings of FSDP2; O2 comes sharded, by groups of one format."""
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    if policy.name == "O2":
        config = {"version": 2, "auto_wrap_policy": "NO_WRAP"}
    return {"fsdp": True, "fsdp_config": config}


def full(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def digest(ran: Any) -> list[float]:
    """Return what tells runs apart: logged losses and norms, and the exact sums of the fp32 weights."""
    state = {key: full(value) for key, value in ran.model.state_dict().items()}
    logs = [record for record in ran.state.log_history if "loss" in record]
    numbers = [record[key] for record in logs for key in ("loss", "grad_norm", "skipped_steps")]
    return [*numbers, *(float(value.double().sum()) for value in state.values())]


def main(folder: Path, cases: list[str]) -> None:
    """Train each case, "ddp:POLICY" or "fsdp:POLICY" (those last), and once more from its middle."""
    rank = int(os.environ["RANK"])
    found = {}
    for case in cases:
        way, name = case.split(":")
        policy, place = POLICIES[name], folder / case.replace(":", "-")
        settings = sharding(policy) if way == "fsdp" else {}
        # under DDP weights of rank 0 count, wherever the others begin
        whole = run(place, policy, seed=rank if way == "ddp" else 0, **settings)
        assert whole.is_fsdp_enabled is (way == "fsdp")
        again = whole
        if not OLD:  # under DDP on a CPU Trainer of transformers 4 cannot load an optimizer: it asks for "cpu:0"
            again = run(place, policy, resume=str(place / "checkpoint-2"), seed=7, **settings)
        whole.save_model(str(place / "saved"))
        found[case] = {"whole": digest(whole), "again": digest(again)}
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
