"""The mismatch of trainer and sampler over a small run of GRPO, in bf16 and in fp16.

    python -m benchmarks.rl_formats --json benchmarks/results/rl_formats.json

A decoder over the bundled text is rewarded for a quarter of the characters. Each update samples from a copy in the low
format, as an inference engine holds it, and takes one step under `O2` in that format, with the sampler's
log-probabilities as the old ones. Both are compared on the samples before each update, the last time by `hs.mismatch`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.recipes import RECIPES, trained
from benchmarks.stamp import write
from halfstep.tasks import machine

__all__ = ["rl_formats_table"]

UPDATES, GROUP, LENGTH, LAST = 30, 48, 20, 5
CLIP = 0.2


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token behind the first, in fp32."""
    logits = model(tokens)[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def grpo_loss(model: nn.Module, tokens: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    ratio = (log_probs(model, tokens) - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


@torch.no_grad()
def sampled(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Return (GROUP, LENGTH) tokens that `model` continues one after the other."""
    tokens = torch.full((GROUP, 1), 40)
    for _ in range(LENGTH - 1):
        chances = torch.softmax(model(tokens)[:, -1].float(), -1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return tokens


def run(dtype: str, begin: nn.Module, seed: int = 0) -> dict[str, Any]:
    """Train in a format; return what was measured before each update."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(begin)
    policy = hs.Policy.of("O2", dtype=dtype).with_modules({"head": "fp32"})
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), grpo_loss, policy=policy, clip_norm=1.0)
    sampler, low = copy.deepcopy(begin), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    rows = []
    for _ in range(UPDATES):
        sampler.to(torch.float32).load_state_dict(model.state_dict())
        sampler.to(low)
        tokens = sampled(sampler, generator)
        reward = (tokens[:, 1:] % 4 == 0).float().mean(1, keepdim=True)
        with torch.no_grad():
            old = log_probs(sampler, tokens)
            apart = (log_probs(model, tokens) - old).double()
        found = {"mean": float(apart.abs().mean()), "largest": float(apart.abs().max())}
        found["kl"] = float((apart.exp() - 1 - apart).mean())
        result = step(tokens, (reward - reward.mean()) / (reward.std() + 1e-4), old).host()
        rows.append({**found, "skipped": result.skipped, "reward": float(reward.mean())})
    last = hs.mismatch(step, (tokens,), log_probs, dtype)
    return {
        "format": dtype,
        "mean": mean(row["mean"] for row in rows),
        "largest": max(row["largest"] for row in rows),
        "kl": mean(row["kl"] for row in rows),
        "last": {"mean": last.mean, "without": last.without[:1]},
        "skipped": sum(row["skipped"] for row in rows),
        "reward": [mean(row["reward"] for row in part) for part in (rows[:LAST], rows[-LAST:])],
    }


def rl_formats_table(report: Mapping[str, Any]) -> str:
    """Return a row for each format."""
    rows = [
        [
            row["format"],
            *(f"{row[key]:.2g}" for key in ("mean", "largest", "kl")),
            f"{row['reward'][0]:.2f} to {row['reward'][1]:.2f}",
            str(row["skipped"]),
        ]
        for row in report["rows"]
    ]
    return table(["trainer and sampler", "mean mismatch", "largest", "KL", "reward", "skipped updates"], rows)


def main() -> None:
    """Run both formats and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begin = trained(RECIPES["LM head"])
    rows = [run(dtype, begin) for dtype in ("bf16", "fp16")]
    write(given.json, {"command": "make bench-rl-formats", "machine": machine(), "updates": UPDATES, "rows": rows})


if __name__ == "__main__":
    main()
