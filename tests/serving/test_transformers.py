"""Continuous batching of Transformers, which is a part of the script, on the phantom GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from serving.conftest import MINUTES, run_engine

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(10 * MINUTES),
    pytest.mark.skipif(find_spec("transformers") is None, reason="make test-serving installs it"),
]


def test_a_batch_is_a_step_with_its_peak(tmp_path: Path) -> None:
    """The paged cache, most of the GPU, is in the peak of the phase; requests are samples."""
    state = run_engine("transformers_batch.py", tmp_path).states["served"]
    peak = state.mib("torchmem_phase_allocated_peak_bytes", phase="generate")

    assert state.all("torchmem_steps_total") == [2]
    assert state.all("torchmem_samples_total") == [8]
    assert peak is not None
    assert peak > 10_000
    assert state.parts("torchmem_engine_memory_bytes", "part") == {}
    assert sum(state.all("torchmem_sdk_errors_total")) == 0
