"""Presets: policies with a name. A TOML file can hold everything that a preset can."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from halfstep.policy.policy import Policy

__all__ = ["PRESETS"]

PRESETS: Mapping[str, Policy] = MappingProxyType(
    {
        # Everything fp32: what the others are compared with.
        "O0": Policy(name="O0", dtype="fp32", table="none", loss="keep", scale="none"),
        # torch.autocast's own lists of the running version, untouched: no rule on top.
        "torch": Policy(name="torch", table="torch", loss="keep", outputs="fp32"),
        # Apex O1: fp32 weights, products low, sensitive operators fp32.
        "O1": Policy(name="O1", table="apex-o1", outputs="fp32"),
        # Recommended. halfstep's table, the same on every device and torch version.
        "mixed": Policy(name="mixed", table="mixed", outputs="fp32"),
        # Apex O2: low weights with fp32 masters, norms' parameters fp32, the model's stream low, fp32 at its end.
        "O2": Policy(name="O2", params="low", table="mixed", residual="low", inputs="low", outputs="fp32"),
        # As O2, with norms' parameters low too. Outputs are fp32 where a model is called outside a step, so that a
        # loss there is computed in fp32.
        "pure": Policy(
            name="pure", params="low", norms="low", table="mixed", residual="low", inputs="low", outputs="fp32"
        ),
        # As pure, with the least behind weights that still trains: nothing, and bf16 optimizer states. Both are rounded
        # stochastically: with AdamW 6 bytes a parameter between updates, torch.amp 12 (docs/concepts/weights.md).
        "lean": Policy(
            name="lean",
            params="low",
            norms="low",
            master="stochastic",
            table="mixed",
            residual="low",
            inputs="low",
            outputs="fp32",
            state="low",
        ),
        # Everything low and no masters: an upper bound of speed, not for training.
        "O3": Policy(
            name="O3",
            params="low",
            norms="low",
            master="none",
            table="all-low",
            residual="low",
            inputs="low",
            loss="keep",
            scale=1.0,
        ),
    }
)
