"""LoRA with PEFT: a frozen base in bf16 with nothing behind it, adapters in fp32, merged and saved.

The changed line is `hs.prepare`, after `get_peft_model` and the optimizer, which gets the trainable parameters. The
policy stores the base low; the rule for the adapters, a thousandth of a real model, makes them fp32 parameters, so that
their gradients, their checkpoint and what is merged are fp32. Without the rule they are low, with masters behind them.
"""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import halfstep as hs

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)


def base() -> LlamaForCausalLM:
    """Return the model to be fine-tuned."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def main(policy: hs.Policy | None = None, steps: int = 60) -> dict[str, float]:
    """Teach sequences that count up; return losses, and bytes of frozen and trained parameters."""
    policy = policy or hs.Policy.of("O2", dtype="bf16").with_modules({"*lora_*": "mixed"})
    model = get_peft_model(base(), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy)
    data, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        first = torch.randint(0, 32, (16, 1), generator=data)
        tokens = (first + torch.arange(12)) % 32
        loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())

    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    model.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        logits = model(input_ids=tokens).logits
        model.save_pretrained(folder)  # the adapters alone, in fp32
        again = hs.prepare(PeftModel.from_pretrained(base(), folder).eval(), policy=policy)
        reloaded = (again(input_ids=tokens).logits - logits).abs().max().item()
        with hs.edit_weights(model):  # adapters that are low are fp32 here
            merged = model.merge_and_unload()
        difference = (merged(input_ids=tokens).logits - logits).abs().max().item()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; merged weights change logits by {difference:.3g}")
    return {
        "first": losses[0],
        "last": losses[-1],
        "reloaded": reloaded,
        "merged": difference,
        "largest": logits.abs().max().item(),
        "frozen_bytes": frozen,
    }


if __name__ == "__main__":
    main()
