"""engines: a policy as the configuration of another training engine, and what that engine does otherwise."""

from halfstep.policy.engines.engine import Engine, EngineConfig, Expressed, configured, expressed
from halfstep.policy.engines.engines import ENGINES

__all__ = ["ENGINES", "Engine", "EngineConfig", "Expressed", "configured", "expressed"]
