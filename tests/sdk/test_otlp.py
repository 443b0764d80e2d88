"""A process without an exporter sends its own series by OTLP."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.otlp import receiver, variables
from support.stack import free_port
from support.waiting import until

# The end of the process waits half a second for the last one, which a busy machine may need.
PATIENT = "from torchmem.sdk.publish import optional; optional.LAST_SEND_SECONDS = 60.0\n"
TRAINING = """
sdk.instrument(backend=backend)
allocator.malloc(30 << 20); backend.step()
"""


def test_a_process_sends_for_itself(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Without an exporter, a rank sends while it runs and once more at its end."""
    received_some = tmp_path / "received"

    def watch() -> None:
        until(lambda: len(received.requests) > 1)
        received_some.touch()

    with receiver() as received, ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        settings = variables(received.url) | {"TORCHMEM_OTLP": "1", "POD_NAME": "gpt-0"}
        waiting = f"while not os.path.exists({str(received_some)!r}): time.sleep(0.01)"
        done = run_script(f"{PATIENT}os.environ |= {settings}" + TRAINING + waiting)
        watching.result()

    assert (done.stderr, done.returncode) == ("", 0)
    assert received.values("torchmem_process_state", "state")["exited"] == 1.0
    assert received.resource["k8s.pod.name"] == "gpt-0"
    (steps,) = received.points("torchmem_steps_total")
    assert (steps.as_double, steps.start_time_unix_nano < steps.time_unix_nano) == (1.0, True)


def test_a_collector_that_is_away_is_reported_once(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The process ends as always, with one line from us and none from OpenTelemetry."""
    settings = variables(f"http://127.0.0.1:{free_port()}") | {
        "TORCHMEM_OTLP": "1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    waiting = """
some = lambda: any(sample["cost"]["errors"].get("otlp", 0) > 1 for sample in published())
while not some(): time.sleep(0.05)
print("done")
"""
    done = run_script(f"os.environ |= {settings}" + TRAINING + waiting)

    assert (done.stdout, done.returncode) == ("done\n", 0)
    (line,) = done.stderr.splitlines()
    assert "torchmem: otlp failed and was skipped" in line
    assert "not sent by OTLP" in line
