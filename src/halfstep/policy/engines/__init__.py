"""engines: a policy as the configuration of another training engine, and what that engine does otherwise."""

from halfstep.policy.engines.engine import ENGINES, Engine, EngineConfig, Expressed, configured, expressed

__all__ = ["ENGINES", "Engine", "EngineConfig", "Expressed", "configured", "expressed"]
