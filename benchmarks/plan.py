"""``python -m benchmarks.plan``: the memory that `hs.plan` plans beside what a step allocates, counted on this CPU.

Every allocation of torch's CPU allocator is counted by torch.profiler (``profile_memory=True``) from before the model
exists to after the second step. Planned is what persists between steps, to be within `PERSISTENT` of the count, and the
peak, within `PEAK`; both bounds were stated before anything was counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from benchmarks.count import GPT_5M, small_resnet18
from benchmarks.counts import allocations
from benchmarks.stamp import write
from halfstep.tasks import load_task, machine
from halfstep.tasks.gpt import GPT

PERSISTENT, PEAK = 0.03, 0.10
"""Largest relative error of what persists, and of the peak."""

POLICIES = ("fp32", "torch", "mixed", "O2", "pure", "lean")
FEW = ("fp32", "mixed", "pure")
STEPS = 2  # the first, which makes states, and one that is like all later ones


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch.

    Attributes:
        model: returns the model.
        batch: returns the arguments of `loss_fn`.
        loss_fn: of the model and them.
        optimizer: of the model.
        options: of hs.TrainStep.
        policies: under which it is planned.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss_fn: Callable[..., Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=lambda: {"clip_norm": 1.0})
    policies: tuple[str, ...] = POLICIES


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over the parameters of `model`."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def scores_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of scores."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def own_loss(model: nn.Module, *args: Tensor) -> Tensor:
    """Return the loss of a transformers model that is given its labels last."""
    *inputs, labels = args
    loss: Tensor = model(*inputs, labels=labels).loss
    return loss


def words(batch: int, length: int, vocabulary: int = 1000) -> tuple[Tensor, Tensor]:
    """Return two batches of word numbers."""
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


def task_case(name: str) -> Case:
    """Return a bundled task as a case."""
    task = load_task(name)
    options = {"clip_norm": task.clip_norm}
    return Case(
        model=task.model, batch=lambda: task.batches(0, 0), loss_fn=task.loss_fn, optimizer=task.optimizer,
        options=options,
    )  # fmt: skip


class CheckpointedGPT(GPT):
    """The GPT with every block under activation checkpointing."""

    def features(self, tokens: Tensor) -> Tensor:
        """As GPT."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )  # fmt: skip
    )
    return made


def bert() -> nn.Module:
    """Return a small BERT."""
    from transformers import BertConfig, BertForMaskedLM

    made: nn.Module = BertForMaskedLM(
        BertConfig(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)
    )
    return made


def vit() -> nn.Module:
    """Return a small ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    made: nn.Module = ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=3,
            image_size=64,
            patch_size=8,
            num_labels=10,
        )  # fmt: skip
    )
    return made


def t5() -> nn.Module:
    """Return a small T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    made: nn.Module = T5ForConditionalGeneration(
        T5Config(
            vocab_size=1000,
            d_model=256,
            d_kv=32,
            d_ff=1024,
            num_layers=3,
            num_heads=8,
            decoder_start_token_id=0,
            use_cache=False,
        )  # fmt: skip
    )
    return made


def t5_loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a T5."""
    loss: Tensor = model(input_ids=source, labels=target).loss
    return loss


class Tagger(nn.Module):
    """A recurrent network that gives each word of a text one of ten tags."""

    def __init__(self, cell: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 128)
        self.cell = cell(128, 256, num_layers=2, batch_first=True)
        self.tags = nn.Linear(256, 10)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.tags(self.cell(self.words(words))[0])
        return scores


class Encoder(nn.Module):
    """torch's own transformer encoder over word numbers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
        self.words = nn.Embedding(1000, 256)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(256, 1000)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.scores(self.layers(self.words(words)))
        return scores


def convnext() -> nn.Module:
    """Return a small ConvNeXt."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    made: nn.Module = ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], image_size=64, num_labels=10)
    )
    return made


def mlp(*widths: int) -> Case:
    """Return a plain network of linear layers, with a batch of 256."""

    def model() -> nn.Module:
        pairs = list(itertools.pairwise(widths))
        layers = [layer for a, b in pairs[:-1] for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(*pairs[-1]))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(256, widths[0]), torch.randint(widths[-1], (256,))

    return Case(model=model, batch=batch, loss_fn=scores_loss, optimizer=adamw, policies=FEW)


def tags() -> tuple[Tensor, Tensor]:
    """Return word numbers and their tags."""
    return torch.randint(1000, (16, 64)), torch.randint(10, (16, 64))


def cases() -> dict[str, Case]:
    """Return the models by name."""

    def pictures() -> tuple[Tensor, Tensor]:
        return torch.randn(16, 3, 32, 32), torch.randint(100, (16,))

    def patches() -> tuple[Tensor, Tensor]:
        return torch.randn(8, 3, 64, 64), torch.randint(10, (8,))

    gpt = Case(model=lambda: GPT(**GPT_5M), batch=lambda: words(4, 128), loss_fn=scores_loss, optimizer=adamw)
    return {
        "lenet5": task_case("lenet5"),
        "gpt": task_case("gpt"),
        "resnet18": Case(model=small_resnet18, batch=pictures, loss_fn=scores_loss, optimizer=momentum),
        "gpt-5m": gpt,
        "llama": Case(model=llama, batch=lambda: words(4, 128), loss_fn=own_loss, optimizer=adamw),
        "bert": Case(model=bert, batch=lambda: words(4, 128), loss_fn=own_loss, optimizer=adamw),
        "vit": Case(model=vit, batch=patches, loss_fn=own_loss, optimizer=adamw),
        "gpt-5m accumulate": dataclasses.replace(gpt, options={"accumulate": 2, "clip_norm": 1.0}, policies=FEW),
        "gpt-5m in backward": dataclasses.replace(gpt, options={"update_in_backward": True}, policies=FEW),
        "gpt-5m checkpointed": dataclasses.replace(gpt, model=lambda: CheckpointedGPT(**GPT_5M), policies=FEW),
        "t5": Case(model=t5, batch=lambda: words(4, 64), loss_fn=t5_loss, optimizer=adamw),
        "convnext": Case(model=convnext, batch=patches, loss_fn=own_loss, optimizer=adamw, policies=FEW),
        "encoder": Case(model=Encoder, batch=lambda: words(8, 64), loss_fn=scores_loss, optimizer=adamw, policies=FEW),
        "mlp, tiny": mlp(16, 32, 32, 4),
        "mlp, wide": mlp(512, 2048, 2048, 10),
        "lstm": Case(model=lambda: Tagger(nn.LSTM), batch=tags, loss_fn=scores_loss, optimizer=adamw, policies=FEW),
        "gru": Case(model=lambda: Tagger(nn.GRU), batch=tags, loss_fn=scores_loss, optimizer=adamw, policies=FEW),
    }


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum over the parameters of `model`."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def policy_of(label: str) -> hs.Policy:
    """Return a policy by label: "fp32", or a preset in bf16."""
    return hs.Policy.of("O0") if label == "fp32" else hs.Policy.of(label, dtype="bf16")


def trained(case: Case, policy: hs.Policy) -> object:
    """Train a new model for some steps; return what persists."""
    torch.manual_seed(0)
    batch = case.batch()
    model = case.model()
    optimizer = case.optimizer(model)
    step = hs.TrainStep(model, optimizer, case.loss_fn, policy=policy, **case.options)
    for _ in range(STEPS * int(case.options.get("accumulate", 1))):
        step(*batch)
    return step, batch


def compare(case: Case, label: str) -> dict[str, Any]:
    """Return what is planned and counted of one model under one policy."""
    policy = policy_of(label)
    persistent, peak = allocations(lambda: trained(case, policy))
    begin = time.perf_counter()
    plan = hs.plan(case.model, case.batch(), case.loss_fn, case.optimizer, policy=policy, **case.options)
    seconds = time.perf_counter() - begin
    return {
        "planned_persistent": plan.persistent_bytes, "counted_persistent": persistent,
        "persistent_ratio": plan.persistent_bytes / persistent,
        "planned_peak": plan.peak_bytes, "counted_peak": peak, "peak_ratio": plan.peak_bytes / peak,
        "peak_phase": plan.peak_at.phase, "peak_operator": plan.peak_at.name, "peak_module": plan.peak_at.module,
        "parts": plan.by_part(), "operators": plan.operators, "seconds": round(seconds, 3),
    }  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    parser.add_argument("--policies", nargs="*", default=[], help="labels of policies")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name, case in cases().items():
        if given.only and name not in given.only:
            continue
        results[name] = {}
        trained(case, hs.Policy.of("mixed", dtype="bf16"))  # caches fill, whose memory is not a step's
        for label in given.policies or case.policies:
            row = results[name][label] = compare(case, label)
            print(
                f"{name:20} {label:6} persistent {row['persistent_ratio']:.4f}  peak {row['peak_ratio']:.4f}  "
                f"{row['counted_peak'] / 2**20:8.1f} MiB  {row['peak_phase']} {row['peak_operator']} "
                f"{row['peak_module']}  {row['seconds']:.2f} s",
                flush=True,
            )
    ratios = [
        (abs(f["persistent_ratio"] - 1), abs(f["peak_ratio"] - 1)) for rows in results.values() for f in rows.values()
    ]
    worst = [max(column) for column in zip(*ratios, strict=True)]
    print(f"largest error: persistent {worst[0]:.2%} (bound {PERSISTENT:.0%}), peak {worst[1]:.2%} (bound {PEAK:.0%})")
    if given.json is not None:
        report = {
            "command": "python -m benchmarks.plan --json benchmarks/results/plan.json", "machine": machine(),
            "threads": torch.get_num_threads(), "bounds": {"persistent": PERSISTENT, "peak": PEAK},
            "largest_error": {"persistent": worst[0], "peak": worst[1]}, "cases": results,
        }  # fmt: skip
        write(given.json, report)


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    main()
