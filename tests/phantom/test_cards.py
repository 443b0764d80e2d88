"""The catalog of cards, and the names that it accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import GIB, MIB
from torchmem.phantom.cards import CATALOG, Card, context_bytes, parse_card, parse_memory
from torchmem.sample.errors import UsageError


@pytest.mark.parametrize("card", CATALOG, ids=lambda card: card.name)
def test_each_card_has_the_memory_in_its_name(card: Card) -> None:
    """A card has 90 to 100 % of its advertised memory; its context takes less than 3 % of it."""
    sold = {
        "rtx-3090": 24,
        "rtx-4090": 24,
        "rtx-5090": 32,
        "rtx-a6000": 48,
        "rtx-6000-ada": 48,
        "rtx-pro-6000": 96,
    }
    gigabytes = sold.get(card.name) or int(card.name.rsplit("-", 1)[1].removesuffix("gb"))

    assert 0.90 * gigabytes <= card.memory_bytes / GIB <= gigabytes
    assert 100 * MIB < card.context_bytes < 0.03 * card.memory_bytes
    assert card == parse_card(card.name)


def test_names_are_unique() -> None:
    """No two cards have the same name or product."""
    for values in ([card.name for card in CATALOG], [card.product for card in CATALOG]):
        assert len(values) == len(set(values))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100-80gb", "h100-80gb"),
        (" H100-80GB ", "h100-80gb"),
        ("h200", "h200-141gb"),
        ("RTX 4090", "rtx-4090"),
    ],
)
def test_names_are_matched_leniently(text: str, name: str) -> None:
    """Case and spaces do not matter, and a unique prefix is enough."""
    assert name == parse_card(text).name


def test_a_size_is_a_card_too() -> None:
    """24GB is an H100 with that much memory."""
    card = parse_card("22.5GiB")

    assert (int(22.5 * 2**30), 132, (9, 0)) == (
        card.memory_bytes,
        card.multiprocessors,
        card.capability,
    )
    assert 24 * 10**9 == parse_card("24GB").memory_bytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("h100", "h100-80gb, h100-nvl-94gb"),
        ("a100-48gb", "a100-40gb"),
        ("-5GB", "memory size"),
        ("", "the known GPUs are v100"),
    ],
)
def test_an_unknown_card_is_a_usage_error_with_a_hint(text: str, hint: str) -> None:
    """The error names the closest cards, or all cards if none is close."""
    with pytest.raises(UsageError, match="is not a known GPU") as caught:
        parse_card(text)

    assert hint in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_card_or_a_usage_error(text: str) -> None:
    """No text causes another error, and a card always has memory."""
    try:
        card = parse_card(text)
    except UsageError:
        return

    assert card.memory_bytes >= 1


@given(st.integers(1, 10**6), st.sampled_from(["", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_sizes_are_exact(number: int, unit: str) -> None:
    """A whole number of units is exactly that many bytes, in upper and lower case."""
    factor = {"": 1, "K": 1, "M": 2, "G": 3}[unit[:1]]
    expected = number * (1024 if "i" in unit else 1000) ** factor if unit else number

    assert expected == parse_memory(f"{number}{unit}") == parse_memory(f"{number} {unit.lower()}")


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "seen_mib"),
    [(48, (8, 6), 210), (58, (8, 9), 251), (142, (8, 9), 507), (108, (8, 0), 502)],
    ids=["RTX A4000", "L4", "L40", "A100"],
)
def test_the_context_estimate_matches_public_figures(
    multiprocessors: int, capability: tuple[int, int], seen_mib: int
) -> None:
    """It is within 10 % of the memory outside the allocator in public OutOfMemoryErrors."""
    assert context_bytes(multiprocessors, capability) / MIB == pytest.approx(seen_mib, rel=0.10)


def test_the_documented_table_is_the_catalog(root: Path) -> None:
    """Each card has its row in docs/phantom.md."""
    lines = (root / "docs" / "phantom.md").read_text().splitlines()
    expected = [
        f"| `{card.name}` | {card.product} | {card.memory_bytes / GIB:.2f} GiB | "
        f"{card.context_bytes // MIB} MiB | {card.multiprocessors} | "
        f"{card.capability[0]}.{card.capability[1]} |"
        for card in CATALOG
    ]

    assert expected == [
        line for line in lines if re.match(r"\| `[a-z0-9-]+` \| (?:NVIDIA|Tesla)", line)
    ]
