"""A server in the way of vLLM on PyTorch's real allocator: requests, pools, graphs, and sleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.stack import free_port

pytestmark = pytest.mark.allocator

ENGINE = Path(__file__).resolve().parent / "serving"
MIB = 1 << 20
WEIGHTS, CACHE = 64 * MIB, 512 * MIB

# As vLLM does it: the class comes from its name; the engine calls these methods in this order.
SERVE = """
import importlib, json, subprocess, sys, time, torch
from contextlib import suppress
from types import SimpleNamespace
from urllib.request import urlopen

address = sys.argv[1]
exporter = subprocess.Popen([sys.executable, "-m", "torchmem.cli", "exporter", "--listen", address])

def scrape(steps, *names):
    text, start = "", "torchmem_steps_total{"
    while not all(f"{name}{{" in text for name in names) or not any(
        line.startswith(start) and line.endswith(f" {steps}.0") for line in text.splitlines()
    ):
        time.sleep(0.05)
        assert exporter.poll() is None
        with suppress(OSError):
            text = urlopen(f"http://{address}/metrics").read().decode()
    segments = torch.cuda.memory_snapshot()
    private = sum(s["total_size"] for s in segments if s["segment_pool_id"] != (0, 0))
    state = json.load(urlopen(f"http://{address}/api/v1/state"))
    print(json.dumps({
        "text": text, "reserved": torch.cuda.memory_reserved(), "private": private, "state": state
    }))

Worker = importlib.import_module("torchmem.integrations.vllm").Worker
model_config = SimpleNamespace(served_model_name=None, model="/models/tiny")
parallel_config = SimpleNamespace(distributed_executor_backend="mp")
worker = Worker(
    vllm_config=SimpleNamespace(model_config=model_config, parallel_config=parallel_config),
    local_rank=0, rank=1,
    distributed_init_method="env://", is_driver_worker=True,
)
worker.init_device()
worker.load_model()
worker.initialize_from_config(256 << 20)
worker.compile_or_warm_up_model()

def run(finished):
    batch = SimpleNamespace(finished_req_ids=finished, total_num_scheduled_tokens=1)
    assert worker.execute_model(batch) is None
    worker.sample_tokens(None)

for finished in (set(), {"a"}, {"b", "c"}):
    run(finished)
    time.sleep(0.05)
known = "torchmem_private_pool_bytes", "torchmem_component_bytes"
scrape(3, "torchmem_outside_allocator_bytes", *known)
worker.sleep()
scrape(3, "torchmem_reserved_unbacked_bytes")
worker.wake_up()
run({"d"})
scrape(4, "torchmem_outside_allocator_bytes")
exporter.terminate(); exporter.wait()
"""

Shown = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what the exporter shows of the server at work, asleep, and at work again."""
    folder = tmp_path_factory.mktemp("serving")
    library = folder / "sleep_allocator.so"
    compiler = ("cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library)
    subprocess.run([*compiler, ENGINE / "sleep_allocator.c"], check=True)
    settings = {
        "SLEEP_ALLOCATOR": str(library),
        "PYTHONPATH": str(ENGINE),
        "TORCHMEM_RUN_DIR": str(folder / "run"),
        "TORCHMEM_INTERVAL": "0.02",
        "TORCHMEM_IDLE_AFTER": "0.05",
        "TORCHMEM_SNAPSHOT_INTERVAL": "0.05",
        "TORCHMEM_SNAPSHOT_BUDGET": "1",
        "PHANTOM_STATE_DIR": str(folder / "gpus"),
    }
    phantom = (sys.executable, "-m", "torchmem.phantom", "--memory", "4GiB", "--")
    done = subprocess.run(
        [*phantom, sys.executable, "-W", "ignore", "-c", SERVE, f"127.0.0.1:{free_port()}"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        json.loads(line) | {"shown": _shown(json.loads(line))} for line in done.stdout.splitlines()
    ]


def _shown(scrape: dict[str, Any]) -> Shown:
    """Return labels and values of each series."""
    found: Shown = {}
    for family in text_string_to_metric_families(scrape["text"]):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(shown: Shown, name: str, **labels: str) -> float | None:
    """Return the sum of the series of a metric with these labels; None without any."""
    values = [value for found, value in shown.get(name, ()) if labels.items() <= found.items()]
    return sum(values) if values else None


def test_requests_are_samples_and_passes_are_steps(scrapes: list[dict[str, Any]]) -> None:
    """The batch ran three times and three requests finished; then once more, and one more."""
    names = ("torchmem_steps_total", "torchmem_samples_total")
    counts = [tuple(total(one["shown"], name) for name in names) for one in scrapes]

    assert counts == [(3, 3), (3, 3), (4, 4)]
    [(labels, _)] = scrapes[0]["shown"]["torchmem_steps_total"]
    assert (labels["run"], labels["rank"]) == ("tiny", "1")


def test_a_server_that_waits_is_running(scrapes: list[dict[str, Any]]) -> None:
    """It is not stalled, and the batch shows as the phase generate."""
    for scrape in scrapes:
        assert total(scrape["shown"], "torchmem_process_state", state="running") == 1
    peak = total(scrapes[0]["shown"], "torchmem_phase_allocated_peak_bytes", phase="generate")
    assert peak is not None
    assert peak >= WEIGHTS + CACHE


def test_model_and_cache_are_components(scrapes: list[dict[str, Any]]) -> None:
    """The bytes of the weights and of the KV cache are those of their tensors."""
    for component, size in (("weights", WEIGHTS), ("kv_cache", CACHE)):
        assert size == total(scrapes[0]["shown"], "torchmem_component_bytes", component=component)


def test_pools_and_graphs_are_shown(scrapes: list[dict[str, Any]]) -> None:
    """The memory of the pool and of the CUDA graph is in private pools, to the byte."""
    shown = scrapes[0]["shown"]

    assert scrapes[0]["private"] == total(shown, "torchmem_private_pool_bytes")
    assert scrapes[0]["private"] > WEIGHTS + CACHE


def test_sleep_is_said(scrapes: list[dict[str, Any]]) -> None:
    """What PyTorch still counts and the driver has back is shown; the bytes outside stay."""
    awake, asleep, again = (one["shown"] for one in scrapes)
    unbacked, outside = "torchmem_reserved_unbacked_bytes", "torchmem_outside_allocator_bytes"

    assert (
        scrapes[0]["reserved"] == scrapes[1]["reserved"] == total(asleep, "torchmem_reserved_bytes")
    )
    assert total(asleep, unbacked) == WEIGHTS + CACHE
    assert [total(awake, unbacked), total(again, unbacked)] == [None, None]
    assert total(awake, outside) == total(asleep, outside) == total(again, outside)
    held = [total(shown, "nvml_process_memory_bytes") for shown in (awake, asleep)]
    assert (held[0] or 0) - (held[1] or 0) == WEIGHTS + CACHE


def test_the_live_page_draws_what_is_on_the_gpu(scrapes: list[dict[str, Any]]) -> None:
    """A rank has what NVML says, also asleep, and the parts of the GPU add up."""
    for scrape in scrapes:
        [gpu] = [gpu for gpu in scrape["state"]["gpus"] if gpu.get("ranks")]
        [rank] = gpu["ranks"]
        own = sum(part["bytes"] for part in rank["parts"])
        assert own == total(scrape["shown"], "nvml_process_memory_bytes")
        assert gpu["total_bytes"] == sum(part["bytes"] for part in gpu["parts"])
