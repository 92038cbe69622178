"""A language model trained with Hugging Face's Trainer, under a policy.

One line differs from a program with Trainer: the class. Start it with ``python`` or, on several processes, with
``torchrun --nproc-per-node 2``.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import transformers

import halfstep as hs

LENGTH, VOCABULARY = 12, 31


def make_data(count: int, *, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences in which every token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY, (count,), generator=generator)]
    while len(rows) < LENGTH:
        rows.append((3 * rows[-1] + 1) % VOCABULARY)
    return [{"input_ids": row, "labels": row.clone()} for row in torch.stack(rows, 1)]


def train(policy: str | hs.Policy, *, seed: int = 0, steps: int = 30, folder: str | None = None) -> float:
    """Train a small GPT-2; return its loss on sequences that it has not seen.

    Args:
        policy: what `hs.prepare` takes.
        seed: of weights, batches and dropout.
        steps: updates.
        folder: where Trainer writes; None: a temporary folder, and no checkpoints.
    """
    transformers.set_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as temporary:
        arguments = transformers.TrainingArguments(
            output_dir=folder or temporary,
            max_steps=steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no" if folder is None else "steps",
            save_steps=steps // 2,
            seed=seed,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = hs.integrations.transformers.Trainer(  # was: transformers.Trainer(
            model,
            arguments,
            train_dataset=make_data(256, seed=0),
            eval_dataset=make_data(64, seed=1),
            policy=policy,  # was: bf16=True in the arguments
        )
        trainer.train()
        last: float = trainer.evaluate()["eval_loss"]
        if folder is not None:
            trainer.save_model(folder)  # fp32 weights, and "float32" in config.json
    return last


def main(policy: str = "O2", folder: str | None = None) -> dict[str, float]:
    """Train in fp32 and under `policy`; return both losses."""
    losses = {"fp32": train("O0"), policy: train(policy, folder=folder)}
    print("  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="O2")
    parser.add_argument("--folder")
    main(**vars(parser.parse_args()))
