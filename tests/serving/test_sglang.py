"""The real SGLang with `torchmem run`, on the phantom GPU: its own gauges beside torchmem's."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import recordings
from serving.conftest import MINUTES, Run, State, run_engine

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(30 * MINUTES),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not here: make test-sglang"),
]

SKEW = 64
"""MiB by which two sums of the same memory may differ: rounding to pages, and small buffers."""
AWAKE = ("started", "served", "awake", "served again")
SCHEDULER = {"script": "launch_server.py", "world_size": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what the server goes through."""
    found = run_engine("sglang_server.py", tmp_path_factory.mktemp("sglang"))
    recordings.write("sglang", {name: state.text for name, state in found.states.items()})
    return found


def scheduler(state: State) -> str:
    """Return the pid of the process that has the model."""
    samples = (s for f in text_string_to_metric_families(state.text) for s in f.samples)
    (pid,) = (
        s.labels["pid"]
        for s in samples
        if s.name == "torchmem_process_info" and SCHEDULER.items() <= s.labels.items()
    )
    return str(pid)


def own_gib(state: State, name: str) -> float:
    """Return the sum of one of SGLang's own gauges; its gigabytes are 2^30 bytes."""
    return sum(State(state.own).all(name))


def test_its_gauges_join_by_the_name_of_the_model(run: Run) -> None:
    """The run is the model's name, and the parts that SGLang names are the bytes of tensors."""
    state = run.states["served"]
    names = {
        s.labels["model_name"]
        for f in text_string_to_metric_families(state.own)
        for s in f.samples
        if s.name == "sglang:kv_cache_memory_usage_gb"
    }
    assert max(state.all("torchmem_allocated_bytes", pool="large", run=names.pop())) > 60 << 30
    parts = ("sglang:weight_memory_usage_gb", "sglang:kv_cache_memory_usage_gb")
    own = sum(own_gib(state, name) for name in parts)
    allocated = (state.mib("torchmem_allocated_bytes") or 0) / 1024

    assert own > 60
    assert own <= allocated < own + 1
    assert abs((state.mib("torchmem_component_bytes", component="parameters") or 0) - 446) < SKEW
    assert state.parts("torchmem_engine_memory_bytes", "part") == {}


@pytest.mark.parametrize("name", AWAKE)
def test_awake_it_has_what_nvml_says(run: Run, name: str) -> None:
    """Nothing is unbacked, and the headroom is what the driver has free, also after a wake-up."""
    state = run.states[name]
    pid, free = scheduler(state), state.mib("nvml_memory_free_bytes") or 0
    held = state.mib("nvml_process_memory_bytes", pid=pid) or 0
    reserved = state.mib("torchmem_reserved_bytes", pid=pid) or 0
    outside = state.mib("torchmem_outside_allocator_bytes", pid=pid) or 0

    assert state.mib("torchmem_reserved_unbacked_bytes") is None
    assert abs(held - reserved - outside) <= SKEW
    headroom = state.mib("torchmem_headroom_bytes", pid=pid, flush="true") or 0
    assert headroom <= free + SKEW


def test_asleep_the_driver_has_what_it_gave_back(run: Run) -> None:
    """What SGLang's allocator gave back is unbacked, and free at the driver."""
    state, awake = run.states["asleep"], run.states["awake"]
    given_back = (state.mib("nvml_memory_free_bytes") or 0) - (
        awake.mib("nvml_memory_free_bytes") or 0
    )
    parts = ("weight", "kv_cache", "graph")
    own = sum(own_gib(state, f"sglang:{part}_memory_usage_gb") for part in parts)

    assert given_back > 60_000
    assert abs((state.mib("torchmem_reserved_unbacked_bytes") or 0) - given_back) < 2 * 1024
    assert abs(own - given_back / 1024) < 1


def test_nothing_went_wrong(run: Run) -> None:
    """The SDK has no errors of its own, no OOM, and all processes are running."""
    for name, state in run.states.items():
        assert sum(state.all("torchmem_sdk_errors_total")) == 0, name
        assert sum(state.all("torchmem_ooms_total")) == 0, name
        assert set(state.all("torchmem_process_state", state="running")) == {1}, name
