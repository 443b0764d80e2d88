"""The tiers of releases: everything that torchmem knows of a tier before it acts.

Settings, samples, metrics, and messages read these declarations. What a tier of the setting
`release` does is in `torchmem.sdk.release.tiers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReleaseTier = Literal["hooks", "cache", "emergency", "neighbors", "request", "communicators"]


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier.

    share: default share of the device; the tier acts when the driver has less than that free. None
        for a tier that responds to a need, and is therefore never given up.
    is_setting: whether the setting `release` can name it.
    calls_hooks: whether it calls pressure hooks.
    can_be_asked: whether another process can ask for its memory in a message.
    """

    name: ReleaseTier
    share: float | None = None
    is_setting: bool = True
    calls_hooks: bool = False
    can_be_asked: bool = False

    def __str__(self) -> str:
        """Return the tier as the setting names it."""
        return self.name if self.share is None else f"{self.name}={self.share:g}"


_DECLARED = (
    Tier("hooks", 0.1, calls_hooks=True),
    Tier("cache", 0.1),
    Tier("emergency", calls_hooks=True),
    Tier("neighbors", calls_hooks=True, can_be_asked=True),
    # By `session.release()` and `torchmem release`.
    Tier("request", is_setting=False, calls_hooks=True, can_be_asked=True),
    # By `session.suspend_communicators()`, in which all ranks take part.
    Tier("communicators", is_setting=False),
)
TIERS = {tier.name: tier for tier in _DECLARED}
SETTING_TIERS: dict[str, Tier] = {tier.name: tier for tier in _DECLARED if tier.is_setting}
EVERY_TIER = ",".join(map(str, SETTING_TIERS.values()))
"""The setting `release` with all tiers and their defaults."""
