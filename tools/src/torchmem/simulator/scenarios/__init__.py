"""Deterministic training runs that reproduce memory behaviour known from the field; one file for each."""

from __future__ import annotations

from torchmem.simulator.scenarios import (
    amp_accumulate_checkpoint,
    checkpointing,
    fragmentation,
    healthy_slack,
    imbalanced_ranks,
    interleaved,
    leak,
    multitask,
    neighbour,
    qkv,
    retry_storm,
    rl_phases,
    variable_length,
)
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

__all__ = ["SCENARIOS", "Scenario", "ScenarioEvent", "Worker"]

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        fragmentation.SCENARIO,
        interleaved.SCENARIO,
        qkv.SCENARIO,
        multitask.SCENARIO,
        checkpointing.SCENARIO,
        variable_length.SCENARIO,
        rl_phases.SCENARIO,
        retry_storm.SCENARIO,
        leak.SCENARIO,
        imbalanced_ranks.SCENARIO,
        neighbour.SCENARIO,
        amp_accumulate_checkpoint.SCENARIO,
        healthy_slack.SCENARIO,
    )
}
"""All scenarios by name."""
