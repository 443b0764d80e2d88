"""Deterministic training runs that reproduce memory behaviour known from the field; one file for each."""

from __future__ import annotations

from torchmem.simulator.scenarios import fragmentation, healthy_slack
from torchmem.simulator.scenarios.scenario import Moment, Scenario, Worker

__all__ = ["SCENARIOS", "Moment", "Scenario", "Worker"]

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for scenario in (fragmentation.SCENARIO, healthy_slack.SCENARIO)
}
"""All scenarios by name."""
