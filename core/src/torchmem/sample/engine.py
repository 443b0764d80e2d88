"""`Engine`: the GPU memory of an inference engine in a process, in the engine's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_ENGINE_PARTS = 16
"""More parts than any engine has."""

MAX_RESIDUALS = 16
"""How many sleeps are kept."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine on one device; all sizes in bytes.

    Attributes:
        name: of the engine, such as vllm.
        resident: by part, what is on the device.
        asleep: by part, what the engine has given back to the driver, and takes again when it wakes
            up. PyTorch still counts these bytes as allocated.
        planned: by part, what the engine planned at its start, by its profile run.
        peaks: by part, the most that was used since the engine was ready to serve.
        kv_cache_advice_bytes: the size of the KV cache that the peaks leave room for within the
            memory that the engine was given; None if it has served too little to tell.
        sleeps: how often the engine has gone to sleep.
        residual_bytes: what stayed on the device after each of the latest sleeps, oldest first: the
            bytes that PyTorch had reserved and the engine did not give back.
        residual_growth_bytes: by how much that grows with each sleep, 0 if it does not; None after
            too few sleeps.
    """

    name: str
    resident: dict[str, int] = field(default_factory=dict)
    asleep: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    kv_cache_advice_bytes: int | None = None
    sleeps: int = 0
    residual_bytes: tuple[int, ...] = ()
    residual_growth_bytes: float | None = None

    @property
    def asleep_bytes(self) -> int:
        """What the engine takes again when it wakes up."""
        return sum(self.asleep.values())


def too_long(engine: Engine) -> Mapping[str, Any]:
    """Return replacements for the fields that have more entries than any engine's."""
    parts = ("resident", "asleep", "planned", "peaks")
    long: dict[str, Any] = {
        name: {} for name in parts if len(getattr(engine, name)) > MAX_ENGINE_PARTS
    }
    sleeps = {} if len(engine.residual_bytes) <= MAX_RESIDUALS else {"residual_bytes": ()}
    return {**long, **sleeps}
