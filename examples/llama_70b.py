"""A transformer with 70 billion parameters, to be planned: its memory on N devices under a policy, without any of it.

    halfstep plan examples/llama_70b.py:task --policy pure --policies mixed,O2 --devices 64 --shard fsdp2 --gpu h100

The model is Llama 3's of that size, from its configuration, with activation checkpointing of its blocks: each keeps its
input alone, and is computed again in the backward pass. Needs transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs

LENGTH = 4096
BATCH = 1
LAYERS = 80


def model(layers: int = LAYERS) -> nn.Module:
    """Return the model, with random values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    made: nn.Module = LlamaForCausalLM(config)
    # of transformers, by its newer name where that is known
    enable: Any = getattr(made, "activation_checkpointing_enable", None) or made.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return made.train()


def batches(seed: int, step: int) -> tuple[Tensor, ...]:
    """Return tokens (BATCH, LENGTH) of one device; each is the target of the one before it."""
    return (torch.zeros(BATCH, LENGTH, dtype=torch.int64),)


def loss_fn(model: nn.Module, tokens: Tensor) -> Any:
    """Return the mean cross-entropy of the next token."""
    return model(input_ids=tokens, labels=tokens).loss


def task(layers: int = LAYERS) -> hs.Task:
    """Return the task; it can be planned, and trained where it fits."""
    return hs.Task(
        name="llama-70b",
        model=lambda: model(layers),
        batches=batches,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.1),
        about=f"Llama 3 70B, {BATCH} x {LENGTH} tokens a device",
    )


def main(layers: int = LAYERS) -> dict[str, float]:
    """Plan it for 64 devices under three policies; return the GiB that each device needs at its peak."""
    peaks = {}
    for policy in ("mixed", "O2", "pure"):
        plan = hs.plan(task(layers), policy=policy, devices=64, shard="fsdp2", gpu="h100")
        peaks[policy] = plan.peak_bytes / 2**30
        print(plan, end="\n\n")
    return peaks


if __name__ == "__main__":
    main()
