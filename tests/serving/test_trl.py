"""TRL's GRPO with vLLM in the trainer's own process, which sleeps while the trainer trains."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from serving import recordings
from serving.conftest import MINUTES, Run, run_engine

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(25 * MINUTES),
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not here: make test-serving"),
]

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what a training of some steps goes through."""
    folder = tmp_path_factory.mktemp("trl")
    found = run_engine("trl_grpo.py", folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    recordings.write("trl", {name: state.text for name, state in found.states.items()})
    return found


def test_the_sleeping_engine_is_no_held_memory(run: Run) -> None:
    """Each byte of the engine is asleep in each step, and the trainer has its own components."""
    state = run.states[f"step {STEPS}"]
    asleep = state.parts("torchmem_engine_memory_bytes", "part", state="asleep")
    components = state.parts("torchmem_component_bytes", "component")

    assert asleep["kv_cache"] > 20_000
    assert state.mib("torchmem_reserved_unbacked_bytes") == sum(asleep.values())
    assert components["held"] < 200
    assert {"parameters", "optimizer_state"} <= components.keys()


def test_each_step_sleeps_once_and_leaves_no_more(run: Run) -> None:
    """TRL puts the engine to sleep after its start and in each step."""
    state = run.states[f"step {STEPS}"]

    assert state.all("torchmem_engine_sleeps_total") == [STEPS + 1]
    assert state.all("torchmem_engine_sleep_residual_growth_bytes") == [0]


def test_the_trainers_steps_count(run: Run) -> None:
    """Steps are the optimizer's, not the engine's, and generation is a phase."""
    state = run.states[f"step {STEPS}"]

    assert state.all("torchmem_steps_total")[0] in {STEPS - 1, STEPS}
    assert "generate" in state.parts("torchmem_phase_allocated_peak_bytes", "phase")
    assert sum(state.all("torchmem_sdk_errors_total")) == 0
