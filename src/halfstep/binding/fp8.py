"""fp8: linear layers whose products torchao computes in eight bits.

A converted layer stays a torch.nn.Linear with its parameters: optimizers, wrappers and checkpoints see no difference.
Its binding runs, instead of its forward, what torchao's Float8Linear does: input, weight and gradient of the output are
cast to fp8 with scales from their largest numbers, products sum in fp32. The region of the layer is off: torch.autocast
and operator rules would cast inside of torchao's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from halfstep.accelerators import type_here
from halfstep.errors import PolicyError, warn
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.sharded import local, split_of
from halfstep.policy.operators import spell
from halfstep.policy.plan import Plan
from halfstep.policy.resolve import units
from halfstep.policy.rule_kinds import RULE_KINDS


def load(plans: Iterable[Plan]) -> None:
    """Import torchao if a plan converts layers; say which devices emulate.

    Raises:
        PolicyError: it is not installed.
    """
    for plan in plans:
        for rule in dict.fromkeys(m.rule for m in plan.modules if m.rule and RULE_KINDS[m.rule].recipe):
            layer_of(rule)
            for note in (note for note in plan.notes if note.startswith(f"{rule} on ")):
                warn(note)


@cache
def layer_of(rule: str) -> Any:
    """Return the class whose forward a linear layer under `rule` runs; None: its own."""
    if not (recipe := rule and RULE_KINDS[rule].recipe):
        return None
    try:
        float8: Any = import_module("torchao.float8")
        linear: Any = import_module("torchao.float8.float8_linear")
    except ImportError as error:
        raise PolicyError(f"module rule {rule!r} needs torchao: pip install 'halfstep[fp8]' ({error})") from error
    plain = float8.Float8LinearConfig.from_recipe_name(recipe)
    settings = {}
    for emulated in (False, True):
        config = replace(plain, emulate=emulated, pad_inner_dim=True)  # tokens that are no multiple of 16 are padded
        layer = linear.Float8Linear(1, 1, bias=False, device="meta", config=config)
        settings[emulated] = layer.linear_mm_config, config
    native = type_here() if type_here() and units(type_here()).fp8 else ""

    def product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        if has_torch_function((input, weight)):  # the black box and the audit see one operator
            return handle_torch_function(product, (input, weight), input, weight, bias)
        if input.dtype not in LOW_DTYPES or not input.numel():  # a shadow in a wide format; no number to scale by
            return F.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
        config = settings[input.device.type != native]
        output = linear.matmul_with_hp_or_float8_args.apply(input, weight.t(), *config)
        return output if bias is None else output + bias.to(output.dtype)

    spell(product, "linear")

    class Linear(nn.Linear):
        settings_on = staticmethod(lambda device_type: settings[device_type != native])

        def forward(self, input: Tensor) -> Any:
            return product(input, self.weight, self.bias)

    return Linear


def gather(weight: Any, low: torch.dtype) -> None:
    """Have fully_shard gather `weight`, of a layer under the rule "fp8", in eight bits and not in `low`.

    fully_shard asks this rank's part, which stays a plain tensor, for what is sent and for what becomes of it: torchao
    casts by one scale for all ranks, to the bits of a cast after gathering. What is split unevenly, twice or between
    columns stays in `low`.
    """
    mesh: Any
    mesh, *dims = split_of(weight) or (None,)
    if len(dims) != 1 or not weight.placements[dims[0]].is_shard(0) or weight.shape[0] % mesh.size(dims[0]):
        return
    part: Any = local(weight)
    linear, config = layer_of("fp8").settings_on(part.device.type)
    kind = import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
    sent = partial(kind, linear_mm_config=linear, dtype=config.cast_config_weight.target_dtype)
    part.fsdp_pre_all_gather = lambda mesh: sent(part.to(low)).fsdp_pre_all_gather(mesh)
    part.fsdp_post_all_gather = sent(part).fsdp_post_all_gather
