"""Deterministic training runs that reproduce memory behavior known from the field.

Each module of this package is one scenario: its `SCENARIO` is found by the module's presence.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

__all__ = ["SCENARIOS", "Scenario", "ScenarioEvent", "SimulatedRank"]


def _scenarios() -> dict[str, Scenario]:
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    return {module.SCENARIO.name: module.SCENARIO for module in modules}


SCENARIOS = dict(sorted(_scenarios().items()))
"""All scenarios by name, in alphabetical order."""
