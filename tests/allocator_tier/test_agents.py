"""Real monitoring agents beside torchmem: New Relic, ddtrace and OpenTelemetry, each unchanged.

Each starts with a sitecustomize of its own, as torchmem does; tests/run/test_agents.py has more
ways to do that. They send nothing: what they would send to is a closed port of this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.phantom import SCRIPT_MEMORY, phantom_variables

AGENTS_BIN = Path(sys.prefix, "agents", "bin")
pytestmark = [
    pytest.mark.allocator,
    pytest.mark.skipif(
        not (AGENTS_BIN.parent / ".installed").exists(),
        reason="other agents are not installed: run make test-allocator",
    ),
]

TORCHMEM = ("python", "-m", "torchmem.cli", "run", "--")
NEW_RELIC, DDTRACE = ("newrelic-admin", "run-program"), ("ddtrace-run",)
OPENTELEMETRY = ("opentelemetry-instrument",)
# What each has replaced in a program in which it works.
LOOK = """
import http.client, sqlite3, sys
trace = sys.modules.get("opentelemetry.trace")
for name, instrumented in {
    "newrelic-admin": type(http.client.HTTPConnection.endheaders).__module__.startswith("newrelic"),
    "ddtrace-run": getattr(sqlite3, "_datadog_patch", False),
    "opentelemetry-instrument": trace is not None
    and type(trace.get_tracer_provider()).__module__ == "opentelemetry.sdk.trace",
}.items():
    print(name, "works" if instrumented else "does not work")
"""
SILENT = {
    "NEW_RELIC_DEVELOPER_MODE": "true",
    "NEW_RELIC_HOST": "127.0.0.1",
    "NEW_RELIC_PORT": "9",
    "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
}
COMPUTE = "import torch; torch.ones(256, 256, device='cuda')\n"


def run(folder: Path, *command: str) -> list[str]:
    """Run a script below a command, on a phantom GPU; return the agents that work in it.

    It prints nothing else, and torchmem monitors it.
    """
    script = folder / "train.py"
    script.write_text(COMPUTE + LOOK)
    variables = {
        "PATH": f"{AGENTS_BIN}:{os.environ['PATH']}",
        "PHANTOM_STATE_DIR": str(folder / "gpus"),
        "TORCHMEM_RUN_DIR": str(folder / "run"),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [*command, "python", script],
        env=os.environ | SILENT | phantom_variables(SCRIPT_MEMORY, 1) | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    [sample] = map(Path.read_text, (folder / "run").glob("*/*.sample.json"))
    assert json.loads(sample)["process"]["script"] == script.name
    lines = map(str.split, done.stdout.splitlines())
    return [name for name, *words in lines if words == ["works"]]


@pytest.mark.parametrize("agent", [NEW_RELIC, DDTRACE, OPENTELEMETRY], ids=lambda words: words[0])
def test_an_agent_below_torchmem(agent: tuple[str, ...], tmp_path: Path) -> None:
    """`torchmem run -- AGENT python …`: both work."""
    assert run(tmp_path, *TORCHMEM, *agent) == [agent[0]]


@pytest.mark.parametrize("agents", [(DDTRACE, NEW_RELIC), (OPENTELEMETRY,)], ids=["two", "one"])
def test_torchmem_below_agents(agents: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    """`AGENT … torchmem run -- python …`: all work. OpenTelemetry's turns other agents off."""
    words = [word for agent in agents for word in agent]
    assert sorted(run(tmp_path, *words, *TORCHMEM)) == sorted(agent[0] for agent in agents)
