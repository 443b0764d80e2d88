"""The real vLLM in a process of its own, on the phantom GPU: every number against the driver's."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from serving import recordings
from serving.conftest import MINUTES, Run, State, run_engine

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(25 * MINUTES),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not here: make test-serving"),
]

SKEW = 32
"""MiB by which two sums of the same memory may differ: rounding to pages."""
AWAKE = ("started", "served", "served long", "awake 1", "awake 2")
ASLEEP = ("asleep 1", "asleep 2", "asleep beside a neighbor")


@pytest.fixture(scope="module", params=["lora", "graphs"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what an engine goes through with LoRA adapters, or with CUDA graphs."""
    found = run_engine("vllm_engine.py", tmp_path_factory.mktemp("vllm"), str(request.param))
    pages = {name: state.text for name, state in found.states.items()}
    if request.param == "lora":
        recordings.write("vllm", pages)
    return found


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what an engine goes through whose requests need more than the profile run."""
    found = run_engine("vllm_engine.py", tmp_path_factory.mktemp("vllm"), "logprobs")
    recordings.write("vllm-beyond", {name: state.text for name, state in found.states.items()})
    return found


def engine_memory(state: State, where: str) -> dict[str, float]:
    return state.parts("torchmem_engine_memory_bytes", "part", state=where)


@pytest.mark.parametrize("name", ASLEEP)
def test_asleep_the_driver_has_what_the_engine_gave_back(run: Run, name: str) -> None:
    """The SDK's read after the sleep agrees with NVML, though the engine runs no bytecode since."""
    state = run.states[name]
    awake, asleep = (run.states[each] for each in ("awake 1", "asleep 1"))
    given_back = (asleep.mib("nvml_memory_free_bytes") or 0) - (
        awake.mib("nvml_memory_free_bytes") or 0
    )

    total = sum(engine_memory(state, "asleep").values())
    assert abs(total - given_back) <= SKEW
    assert state.mib("torchmem_reserved_unbacked_bytes") == total
    assert engine_memory(state, "resident").keys() <= {"cudagraph"}
    if "neighbor" not in name:
        assert state.mib("torchmem_driver_free_bytes") == state.mib("nvml_memory_free_bytes")


@pytest.mark.parametrize("name", AWAKE)
def test_awake_nothing_is_asleep(run: Run, name: str) -> None:
    """After each wake-up the driver's free memory and the parts are those of an engine awake."""
    state = run.states[name]

    assert engine_memory(state, "asleep") == {}
    assert state.mib("torchmem_engine_wake_margin_bytes") is None
    assert state.mib("torchmem_reserved_unbacked_bytes") is None
    free = state.mib("nvml_memory_free_bytes") or 0
    assert abs((state.mib("torchmem_driver_free_bytes") or 0) - free) <= SKEW


def test_the_parts_are_those_of_vllms_log(run: Run) -> None:
    """The KV cache has the size that vLLM logs, and what falls asleep is what it logs as freed."""
    found = re.search(r"Available KV cache memory: ([\d.]+) GiB", run.log)
    freed = re.search(r"CuMemAllocator: sleep freed ([\d.]+) GiB memory in total", run.log)
    assert found
    assert freed
    cache = engine_memory(run.states["served"], "resident")["kv_cache"] / 1024
    asleep = sum(engine_memory(run.states["asleep 1"], "asleep").values()) / 1024

    assert abs(cache - float(found[1])) < 0.02
    assert abs(asleep - float(freed[1])) < 0.02


def test_the_components_say_what_sleeps(run: Run) -> None:
    """Asleep, the bytes of the KV cache and the weights are asleep and nothing else."""
    awake = run.states["awake 1"].parts("torchmem_component_bytes", "component")
    asleep = run.states["asleep 1"].parts("torchmem_component_bytes", "component")
    weights_awake = run.states["weights awake"].parts("torchmem_component_bytes", "component")

    engines = sum(awake.get(name, 0) for name in ("weights", "lora", "kv_cache"))
    assert asleep["asleep"] == engines
    assert asleep["kv_cache"] == asleep["weights"] == 0
    assert weights_awake["asleep"] == awake["kv_cache"]
    assert sum(asleep.values()) == run.states["asleep 1"].mib("torchmem_active_bytes")


def test_the_plan_is_vllms_own(run: Run) -> None:
    """Planned and actual add up: the advice is vLLM's suggestion, with the actual activations."""
    state = run.states["served long"]
    planned = state.parts("torchmem_engine_planned_bytes", "part")
    peaks = state.parts("torchmem_engine_peak_bytes", "part")
    suggestion = re.search(
        r"`--kv-cache-memory=(\d+)` \([\d.]+ GiB\) to fit into requested", run.log
    )
    assert suggestion

    # vLLM's suggestion takes off its estimate of the graphs besides their actual size.
    unused = planned["activations"] - peaks["activations"] + planned.get("cudagraph", 0)
    expected = int(suggestion[1]) / (1 << 20) + unused - 0.1 * peaks["activations"]
    assert 0 < peaks["activations"] < planned["activations"]
    assert abs((state.mib("torchmem_engine_kv_cache_advice_bytes") or 0) - expected) < SKEW
    assert run.states["served"].mib("torchmem_engine_kv_cache_advice_bytes") is None


def test_requests_that_need_more_than_the_plan(beyond: Run) -> None:
    """Log probabilities of prompts are in no profile run: the KV cache should be smaller."""
    within, state = (beyond.states[f"{name} the plan"] for name in ("within", "beyond"))
    planned = state.mib("torchmem_engine_planned_bytes", part="activations") or 0
    cache = state.mib("torchmem_engine_memory_bytes", part="kv_cache") or 0
    before, after = (
        each.mib("torchmem_engine_peak_bytes", part="activations") or 0 for each in (within, state)
    )

    assert before < planned < after - 150
    assert 0 < (state.mib("torchmem_engine_kv_cache_advice_bytes") or 0) < cache
    assert sum(state.all("torchmem_sdk_errors_total")) == 0


def test_a_neighbor_bounds_the_headroom_of_an_idle_engine(run: Run) -> None:
    """What a neighbor took since the engine's last read does not count as headroom."""
    state = run.states["beside a neighbor"]
    free = state.mib("nvml_memory_free_bytes") or 0
    cached = sum(state.parts("torchmem_free_bytes", "state").values())

    without, flush = (
        state.mib("torchmem_headroom_bytes", flush=each) for each in ("false", "true")
    )
    assert without is not None
    assert flush is not None
    assert flush <= free + cached + SKEW
    assert without <= max(free, state.mib("torchmem_largest_free_block_bytes") or 0) + SKEW


def test_the_margin_says_that_waking_fails(run: Run) -> None:
    """The margin is negative beside a large neighbor, waking fails, and the OOM is counted."""
    before, after = run.states["asleep beside a neighbor"], run.states["after a failed wake-up"]
    margin = before.mib("torchmem_engine_wake_margin_bytes")
    free = before.mib("nvml_memory_free_bytes") or 0

    assert margin == free - sum(engine_memory(before, "asleep").values())
    assert margin < 0
    assert "woke up all the same" not in run.log
    assert "CUDA Error: out of memory" in run.log
    assert sum(before.all("torchmem_ooms_total")) == 0
    assert after.all("torchmem_ooms_total", cause="external") == [1]
    assert after.mib("torchmem_last_oom_requested_bytes") == sum(
        engine_memory(after, "asleep").values()
    )


def test_the_warm_up_does_not_count(run: Run) -> None:
    """Steps and requests are those of the clients, from 0 on."""
    started, served, last = (run.states[name] for name in ("started", "served", "served long"))

    assert started.all("torchmem_steps_total") == [0]
    assert sum(started.all("torchmem_samples_total")) == 0
    assert 64 <= served.all("torchmem_steps_total")[0] <= 80
    assert last.all("torchmem_samples_total")[0] >= 36
    assert served.parts("torchmem_phase_allocated_peak_bytes", "phase").keys() == {"generate"}


def test_nothing_went_wrong(run: Run) -> None:
    """The SDK has no errors of its own, and the engine is running in all states."""
    for name, state in run.states.items():
        assert sum(state.all("torchmem_sdk_errors_total")) == 0, name
        assert state.all("torchmem_process_state", state="running") == [1], name
        if not name.startswith("leak"):
            assert state.all("torchmem_engine_sleep_residual_growth_bytes") in ([], [0])


def test_what_each_sleep_leaves(run: Run) -> None:
    """A worker that keeps a buffer in each cycle leaves as much more after each sleep."""
    state = run.states["leaked"]

    assert state.mib("torchmem_engine_sleep_residual_growth_bytes") == 64


def test_lora_and_graphs_are_parts(run: Run) -> None:
    """The buffers of the adapters, or the CUDA graphs, are parts of their own."""
    parts = engine_memory(run.states["served"], "resident")

    assert {"weights", "kv_cache"} <= parts.keys()
    assert parts.keys() & {"lora", "cudagraph"}
