"""Presets: the fields of policies with a name; `policy.py` makes the policies. A TOML file can hold everything here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESET_FIELDS"]

PRESET_FIELDS: Mapping[str, Mapping[str, Any]] = {
    # Everything fp32: what the others are compared with.
    "O0": {"dtype": "fp32", "table": "none", "loss": "keep", "scale": "none"},
    # torch.autocast's own lists of the running version, untouched: no rule on top.
    "torch": {"table": "torch", "loss": "keep", "outputs": "fp32"},
    # Apex O1: fp32 weights, products low, sensitive operators fp32.
    "O1": {"table": "apex-o1", "outputs": "fp32"},
    # Recommended. halfstep's table, the same on every device and torch version.
    "mixed": {"table": "mixed", "outputs": "fp32"},
    # Apex O2: low weights with fp32 masters, norms' parameters fp32, the model's stream low, fp32 at its end.
    "O2": {"params": "low", "table": "mixed", "residual": "low", "inputs": "low", "outputs": "fp32"},
    # As O2, with norms' parameters low too. Outputs are fp32 where a model is called outside a step, so that a
    # loss there is computed in fp32.
    "pure": {"params": "low", "norms": "low", "table": "mixed", "residual": "low", "inputs": "low", "outputs": "fp32"},
    # As pure, with the least behind weights that still trains: nothing, and bf16 optimizer states. Both are rounded
    # stochastically: with AdamW 6 bytes a parameter between updates, torch.amp 12 (docs/concepts/weights.md).
    "lean": {
        "params": "low",
        "norms": "low",
        "master": "stochastic",
        "table": "mixed",
        "residual": "low",
        "inputs": "low",
        "outputs": "fp32",
        "state": "low",
    },
    # Everything low and no masters: an upper bound of speed, not for training.
    "O3": {
        "params": "low",
        "norms": "low",
        "master": "none",
        "table": "all-low",
        "residual": "low",
        "inputs": "low",
        "loss": "keep",
        "scale": 1.0,
    },
}
"""Name -> the fields of the policy that are not the default."""
