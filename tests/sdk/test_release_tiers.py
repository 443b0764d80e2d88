"""Every tier of releases is declared once, and complete."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from torchmem.sample.release_tiers import EVERY_TIER, SETTING_TIERS, TIERS, ReleaseTier
from torchmem.sdk.release.tiers import ACTIONS, TierAction
from torchmem.sdk.settings import resolve

PAGE = Path(__file__).parents[2] / "docs/release.md"


def test_every_tier_is_declared() -> None:
    """The type, which type checkers and the decoders of samples read, names the same tiers."""
    assert get_args(ReleaseTier) == tuple(TIERS)


def test_every_tier_of_the_setting_acts() -> None:
    """No tier can be named in the setting and do nothing, and each can be named."""
    idle = vars(TierAction).keys() & {"end_window", "at_step", "relieve", "at_oom"}

    assert [action.tier for action in ACTIONS] == list(SETTING_TIERS)
    assert all(vars(action).keys() & idle for action in ACTIONS)
    assert all(action.acts_when_short == ("relieve" in vars(action)) for action in ACTIONS)


def test_every_tier_can_be_named_with_its_default() -> None:
    """The setting that names all of them turns each on with its declared share."""
    shares = {name: tier.share or 0.0 for name, tier in SETTING_TIERS.items()}

    assert shares == resolve({"release": EVERY_TIER}, {}).release
    assert shares == resolve({"release": ",".join(SETTING_TIERS)}, {}).release


def test_every_tier_is_documented() -> None:
    """docs/release.md has an example with all defaults, and a section and a row for each tier."""
    page = PAGE.read_text()

    assert f'release="{EVERY_TIER}"' in page
    for name in SETTING_TIERS:
        assert f"\n| `{name}` |" in page
        assert f"\n## `{name}`\n" in page
