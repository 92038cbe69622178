"""torchtitan: the precision keys of its section ``training``.

Its models are sharded by FSDP2 (`fully_shard`): parameters are stored in ``training.dtype``, and each all-gather casts
them to ``mixed_precision_param``, in which a module's whole forward runs.

Source: https://github.com/pytorch/torchtitan (config, distributed/fsdp.py, components/loss.py), read at v0.2.2, which
reads TOML, and at commit b5bcd76c, which has the same keys as arguments only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from halfstep.errors import PolicyError
from halfstep.policy.engines.engine import Engine, Expressed, in_words, wide_operators

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

__all__ = ["TORCHTITAN"]

NAMES = {"bf16": "bfloat16", "fp32": "float32"}

MASTERS = {
    "split": "fp32 shards: the same numbers, at the same 4 bytes a parameter while nothing is gathered",
    "kahan": "fp32 shards: more precise, at the same 4 bytes a parameter while nothing is gathered",
    "stochastic": "fp32 shards: more precise, 2 bytes a parameter more",
}


def _express(policy: Policy) -> Iterator[Expressed]:
    if policy.dtype not in NAMES:
        raise PolicyError(
            f"policy {policy.name!r}: dtype={policy.dtype!r}, and torchtitan trains in bfloat16 or float32; use "
            "dtype='bf16'"
        )
    lowered, low = policy.dtype != "fp32", policy.params == "low"
    bare = low and policy.master == "none"
    yield Expressed(field="name")
    yield Expressed(field="dtype", settings={"training.mixed_precision_param": NAMES[policy.dtype]})
    yield Expressed(field="params")
    norms = "norms compute with bf16 weights; set norms='low'"
    yield Expressed(field="norms", lost=norms if low and policy.norms == "fp32" else "")
    stored = {"training.dtype": "bfloat16" if bare else "float32"}
    yield Expressed(field="master", settings=stored, note=MASTERS.get(policy.master, ""))
    grads = "sharded gradients are fp32 and accumulate so: more precise"
    yield Expressed(field="grads", note=grads if low and not bare and policy.grads == "param" else "")
    yield from _operators(policy) if lowered else (Expressed(field=name) for name in ("table", "ops", "modules"))
    yield _residual(policy) if lowered else Expressed(field="residual")
    inputs = "tokens are not floating, and floating inputs stay as they are"
    yield Expressed(field="inputs", note=inputs if policy.inputs == "low" else "")
    outputs = "logits stay bf16; torchtitan's losses cast them to fp32"
    yield Expressed(field="outputs", note=outputs if lowered and policy.outputs == "fp32" else "")
    losses = "losses are computed in fp32: more precise"
    yield Expressed(field="loss", note=losses if lowered and policy.loss == "keep" else "")
    wire = policy.reduce == "low" or (policy.reduce == "grad" and low)
    yield Expressed(
        field="reduce",
        settings={"training.mixed_precision_reduce": "float32"},
        note="reduced in fp32: more precise, at twice the bytes" if lowered and wire else "",
    )
    states = "states have the format of the parameters, fp32: more precise, at twice the bytes"
    yield Expressed(field="state", note=states if policy.state == "low" else "")
    scaled = policy.scale not in ("none", 1.0)
    yield Expressed(field="scale", lost="torchtitan has no loss scale; set scale='none'" if scaled else "")
    yield Expressed(field="emulate")  # of fp16


def _operators(policy: Policy) -> Iterator[Expressed]:
    own = "operators run in the format of their inputs, where torchtitan's modules do not cast"
    lost = f"{own}: {in_words(wide_operators(policy))} lose fp32; set table='all-low'"
    if policy.table == "none":
        lost = (
            "weights are gathered in bf16, and operators run in it; set dtype='fp32'" if policy.params == "fp32" else ""
        )
    bare = policy.table == "all-low"
    yield Expressed(field="table", lost="" if bare else lost, note=own if bare else "")
    yield Expressed(field="ops", lost=f"{own}; leave ops out" if policy.ops else "")
    yield Expressed(field="modules", lost=f"{own}; leave modules out" if policy.modules else "")


def _residual(policy: Policy) -> Expressed:
    stream = "embeddings give bf16, as their gathered weights are, and the stream stays bf16"
    if policy.residual == "low":
        return Expressed(field="residual")
    if policy.params == "low":
        return Expressed(field="residual", note=stream)
    return Expressed(field="residual", lost=f"{stream}; set residual='low'")


def _toml(config: dict[str, Any], args: tuple[str, ...]) -> str:
    lines = []
    for section, values in config.items():
        lines += [f"[{section}]", *(f'{key} = "{value}"' for key, value in values.items())]
    return "\n".join(lines)


TORCHTITAN = Engine(
    name="torchtitan",
    method="to_torchtitan",
    express=_express,
    arguments=lambda key, value: (f"--{key}={value}",),
    text=_toml,
)
