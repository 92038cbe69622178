"""What halfstep's own operators cost, where their schemas do not say it."""

from __future__ import annotations

from halfstep.testing.traffic import Call, bytes_of, declare_traffic

__all__ = ["declare"]

UPDATES = {"adam_": ("first", "second", "steps"), "sgd_": ("momenta",), "lion_": ("momenta",)}
GIVEN = ("gradients", "factor", "bad", "draws", "rate")


def declare() -> None:
    """Declare them: on CUDA norms are two launches, and Adam counts its steps in one of its own."""
    declare_traffic("halfstep::norms", reads=("gradients",), writes=("result",), launches=2)
    for name, states in UPDATES.items():
        declare_traffic(
            f"halfstep::{name}",
            reads=("weights", *states, *GIVEN),
            writes=("weights", "beside", *states),
            extra=_beside,
            launches=2 if name == "adam_" else 1,
        )


def _beside(call: Call) -> tuple[int, int]:
    """A low copy beside a master is written only; what else may be there is read too."""
    return (0 if call["form"] == "copy" else sum(map(bytes_of, call["beside"]))), 0
