"""Reinforcement learning in two processes: a real trainer and the real vLLM on one phantom GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from serving import recordings
from serving.conftest import MINUTES, Run, State, run_engine

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(25 * MINUTES),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not here: make test-serving"),
]
GIB = 1024
MISSING = 10 * GIB
"""MiB of what the engine takes that the trainer holds, in rl_engine.py."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what trainer and engine go through."""
    found = run_engine("rl_engine.py", tmp_path_factory.mktemp("rl"), TORCHMEM_RELEASE="neighbors")
    recordings.write("two-processes", {name: state.text for name, state in found.states.items()})
    return found


def said(state: State) -> dict[str, Any]:
    """Return what the trainer and the engine answered."""
    answers: dict[str, Any] = json.loads(state.own)
    return answers


def test_an_engine_awake_says_that_it_must_sleep(run: Run) -> None:
    """The trainer gets nothing, and the answers name the KV cache and who can return it."""
    state = run.states["awake"]
    cache = (state.mib("torchmem_engine_memory_bytes", part="kv_cache") or 0) / GIB
    note = (
        f"its inference engine holds {cache:.2f} GiB in the KV cache, which only sleep mode "
        "returns: have the engine's owner call sleep()."
    )

    assert said(state)["waited"] is False
    assert said(state)["answer"] == note
    assert said(state)["release"].splitlines()[0].endswith(f"had nothing to return; {note}")


def test_what_sleeps_is_promised_to_the_engine(run: Run) -> None:
    """`wait_for_memory` leaves it, and takes what is left, or borrows all."""
    assert said(run.states["asleep"]) == {
        "takes_too_much": False,
        "takes_what_is_left": True,
        "borrows": True,
    }


@pytest.mark.parametrize("state", ["the trainer has borrowed", "the trainer has cached"])
def test_the_margin_is_what_the_trainer_has_borrowed(run: Run, state: str) -> None:
    """Until it gives that back, the engine cannot wake up."""
    assert run.states[state].mib("torchmem_engine_wake_margin_bytes") == -MISSING


def test_the_trainers_hooks_run_once_before_the_wake_up(run: Run) -> None:
    """They are asked for what is missing, at the end of a step, and training goes on."""
    state = run.states["woken beside a training"]
    trainer = said(state)["trainer"]

    assert trainer["asked"] == [MISSING << 20]
    assert trainer["steps"] > 1
    assert state.all("torchmem_neighbor_requests_total", run="model") == [1]
    assert state.all("torchmem_releases_total", run="trainer", tier="neighbors") == [1]
    assert state.all("torchmem_engine_wake_margin_bytes") == []


def test_an_idle_trainer_gives_its_cache(run: Run) -> None:
    """In `session.idle()` the cache goes back at once, and no hook is needed."""
    state = run.states["woken beside an idle trainer"]

    assert said(state)["trainer"]["asked"] == [MISSING << 20]
    assert state.all("torchmem_neighbor_requests_total", run="model") == [2]
    assert state.all("torchmem_releases_total", run="trainer", tier="neighbors") == [2]


def test_nothing_went_wrong(run: Run) -> None:
    """No OOM, no error of the SDK, and both processes are running."""
    for name, state in run.states.items():
        assert sum(state.all("torchmem_ooms_total")) == 0, name
        assert sum(state.all("torchmem_sdk_errors_total")) == 0, name
        assert state.all("torchmem_process_state", state="running") == [1, 1], name
