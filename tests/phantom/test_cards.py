"""The catalogue of cards, and how people name them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.phantom.cards import CATALOG, Card, context_bytes, parse_card, parse_memory
from torchmem.sample.errors import UsageError

MIB = 2**20


@pytest.mark.parametrize("one", CATALOG, ids=lambda one: one.name)
def test_each_card_has_the_memory_in_its_name(one: Card) -> None:
    """A card shows 90 to 100 % of the memory on its box, and its context takes less than 3 % of it."""
    sold = {
        "rtx-3090": 24,
        "rtx-4090": 24,
        "rtx-5090": 32,
        "rtx-a6000": 48,
        "rtx-6000-ada": 48,
        "rtx-pro-6000": 96,
    }
    gigabytes = sold.get(one.name) or int(one.name.rsplit("-", 1)[1].removesuffix("gb"))

    assert 0.90 * gigabytes <= one.memory_bytes / 2**30 <= gigabytes
    assert 100 * MIB < one.context_bytes < 0.03 * one.memory_bytes
    assert one == parse_card(one.name)


def test_names_are_their_own() -> None:
    """No two cards share a name or a product."""
    assert (
        len(CATALOG) == len({one.name for one in CATALOG}) == len({one.product for one in CATALOG})
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100-80gb", "h100-80gb"),
        (" H100-80GB ", "h100-80gb"),
        ("h200", "h200-141gb"),
        ("RTX 4090", "rtx-4090"),
    ],
)
def test_a_card_is_named_as_people_write_it(text: str, name: str) -> None:
    """Case, blanks and what follows from the beginning do not matter."""
    assert name == parse_card(text).name


def test_a_size_is_a_card_too() -> None:
    """24GB is an H100 with so much memory."""
    found = parse_card("22.5GiB")

    assert (int(22.5 * 2**30), 132, (9, 0)) == (
        found.memory_bytes,
        found.multiprocessors,
        found.capability,
    )
    assert 24 * 10**9 == parse_card("24GB").memory_bytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("h100", "h100-80gb, h100-nvl-94gb"),
        ("a100-48gb", "a100-40gb"),
        ("-5GB", "memory size"),
        ("", "there are v100"),
    ],
)
def test_what_names_no_card_is_answered_with_names(text: str, hint: str) -> None:
    """The sentence names the nearest cards, or all when nothing is near."""
    with pytest.raises(UsageError, match="names no card") as caught:
        parse_card(text)

    assert hint in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_card_or_a_usage_error(text: str) -> None:
    """No text crashes the catalogue, and a card always has memory."""
    try:
        found = parse_card(text)
    except UsageError:
        return

    assert found.memory_bytes >= 1


@given(st.integers(1, 10**6), st.sampled_from(["", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_sizes_are_exact(number: int, unit: str) -> None:
    """A whole number of a unit is that many bytes, in any case."""
    factor = {"": 1, "K": 1, "M": 2, "G": 3}[unit[:1]]
    expected = number * (1024 if "i" in unit else 1000) ** factor if unit else number

    assert expected == parse_memory(f"{number}{unit}") == parse_memory(f"{number} {unit.lower()}")


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "seen_mib"),
    [(48, (8, 6), 210), (58, (8, 9), 251), (142, (8, 9), 507), (108, (8, 0), 502)],
    ids=["RTX A4000", "L4", "L40", "A100"],
)
def test_the_estimate_of_the_context_meets_what_was_seen(
    multiprocessors: int, capability: tuple[int, int], seen_mib: int
) -> None:
    """Memory outside the allocator in public OutOfMemoryError messages is met within 10 %."""
    assert context_bytes(multiprocessors, capability) / MIB == pytest.approx(seen_mib, rel=0.10)


def test_the_documented_table_is_the_catalogue(root: Path) -> None:
    """Each card has its line in docs/phantom.md, with its memory and its context."""
    lines = (root / "docs" / "phantom.md").read_text().splitlines()
    expected = [
        f"| `{one.name}` | {one.product} | {one.memory_bytes / 2**30:.2f} GiB | {one.context_bytes // MIB} MiB | "
        f"{one.multiprocessors} | {one.capability[0]}.{one.capability[1]} |"
        for one in CATALOG
    ]

    assert expected == [
        line for line in lines if re.match(r"\| `[a-z0-9-]+` \| (?:NVIDIA|Tesla)", line)
    ]
