"""engines: a policy as the configuration of another training engine, and what that engine does otherwise."""

from collections.abc import Mapping
from types import MappingProxyType

from halfstep.policy.engines.deepspeed import DEEPSPEED
from halfstep.policy.engines.engine import Engine, EngineConfig, Expressed, configured, expressed
from halfstep.policy.engines.megatron import MEGATRON
from halfstep.policy.engines.torchtitan import TORCHTITAN

__all__ = ["ENGINES", "Engine", "EngineConfig", "Expressed", "configured", "expressed"]

ENGINES: Mapping[str, Engine] = MappingProxyType(
    {"deepspeed": DEEPSPEED, "megatron": MEGATRON, "torchtitan": TORCHTITAN}
)
"""Engines by the name of their command line."""
