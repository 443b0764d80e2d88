"""Power, temperature, clocks, and why a GPU is slower than it could be."""

from __future__ import annotations

from dashboards import common
from dashboards.colors import ATTENTION
from dashboards.panels import Panel, Query, Text, lines, state_timeline
from dashboards.panels.units import CELSIUS, HERTZ, WATTS
from dashboards.queries import node

NO_GPU = "No GPU: NVML does not answer"


def panels() -> list[Panel]:
    """Four panels."""
    return [
        lines(
            Text("Power", "How much does each GPU draw, and how much may it draw? Near its limit it slows down.",
                 NO_GPU),
            [Query(node.value("power_watts"), common.GPU),
             Query(node.value("power_limit_watts"), f"{common.GPU}, limit", "text")], WATTS),
        lines(
            Text("Temperature", "How hot is each GPU, by sensor? At the slowdown threshold it protects itself by "
                 "running slower.", NO_GPU),
            [Query(node.value("temperature_celsius"), f"{common.GPU}, {{{{sensor}}}}"),
             Query(node.value("temperature_threshold_celsius", threshold="slowdown"), f"{common.GPU}, slowdown",
                   "text")], CELSIUS),
        state_timeline(
            Text("Slowed down", "Is a GPU slower than it could be, and why? sw_power_cap: at its power limit. hw_ and "
                 "sw_thermal_slowdown: too hot. hw_power_brake_slowdown: the server's power supply asks for it. "
                 "Power caps are usual under load; heat is a matter of cooling.",
                 "No GPU was slowed down in this time range"),
            Query(node.throttled(), f"{common.GPU}: {{{{reason}}}}"),
            {0: ("no", "transparent"), 1: ("yes", ATTENTION)}),
        lines(
            Text("Clocks", "How fast does each GPU run? SM clock: arithmetic; memory clock: bandwidth.", NO_GPU),
            [Query(node.value("clock_hertz", domain="sm"), f"{common.GPU}, SM"),
             Query(node.value("clock_hertz", domain="memory"), f"{common.GPU}, memory")], HERTZ).span(24),
    ]  # fmt: skip
