"""What holds the memory, as the SDK counts it, against an independent count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.phantom import SCRIPT_MEMORY, run_on_phantom

pytestmark = pytest.mark.allocator

HERE = Path(__file__).resolve().parent
CASES = (
    "transformer",
    "fused",
    "momentum",
    "no_state",
    "accumulation",
    "lora",
    "eight_bit",
    "offload",
    "average",
    "shared",
    "tied",
    "kv_cache",
    "raising",
    "hugging_face",
    "fsdp2",
)
"""Functions of component_cases.py."""


@pytest.mark.parametrize("case", CASES)
def test_components_are_those_of_the_blocks(case: str, tmp_path: Path) -> None:
    """Each component has the bytes of its blocks and all add up to allocated, or all are absent."""
    done = run_on_phantom(
        HERE / "component_cases.py",
        case,
        memory=SCRIPT_MEMORY,
        state=tmp_path / "phantom",
        environment={"TORCHMEM_RUN_DIR": str(tmp_path / "run")},
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    rows, errors = json.loads(done.stdout.splitlines()[-1])
    for components, independent, allocated in rows:
        assert components in ({}, independent)
        assert sum(components.values()) in {0, allocated}
    assert rows[-1][0]
    assert 0 == errors["components"]
