"""Prometheus shows what PyTorch's real allocator reports during a real training run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stack import Prometheus
from support.training import Training
from support.waiting import until

pytestmark = [pytest.mark.allocator, pytest.mark.stack]

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")
Train = Callable[..., Training]
CURRENT = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")
PEAKS = ("allocated", "active", "reserved")
EVENTS = {
    "torchmem_alloc_retries_total": "num_alloc_retries",
    "torchmem_device_allocs_total": "num_device_alloc",
    "torchmem_device_frees_total": "num_device_free",
    "torchmem_stream_syncs_total": "num_sync_all_streams",
}


def shown_at(watching: Prometheus, step: int, moment: float) -> Prometheus:
    """Prometheus once it has scraped a snapshot later than `moment`, with training paused."""

    def is_shown(then: Prometheus) -> bool:
        taken = then.value("torchmem_snapshot_timestamp_seconds") or 0
        return then.value("torchmem_steps_total") == step and taken > moment + 0.5

    return watching.when(is_shown)


def shown(watching: Prometheus, expression: str, label: str) -> dict[str, float]:
    """Return values by one label."""
    return {row["metric"][label]: float(row["value"][1]) for row in watching.query(expression)}


def check_statistics(watching: Prometheus, truth: dict[str, Any]) -> None:
    """Compare every statistic in Prometheus with `torch.cuda.memory_stats()`."""
    stats = truth["stats"]
    for name in CURRENT:
        expected = {pool: stats[f"{name}.{pool}_pool.current"] for pool in ("small", "large")}
        assert shown(watching, f"torchmem_{name}", "pool") == expected
    for name in PEAKS:
        assert stats[f"{name}_bytes.all.peak"] == watching.value(f"torchmem_{name}_peak_bytes")
    for metric, name in EVENTS.items():
        assert stats[name] == watching.value(metric)


def check_layout(watching: Prometheus, truth: dict[str, Any]) -> None:
    """Compare the layout with an independent count over `torch.cuda.memory_snapshot()`."""
    counted = truth["snapshot"]
    free = shown(watching, "torchmem_free_bytes", "state")
    assert counted["free"] == sum(free.values())
    assert counted["largest"] == watching.value("torchmem_largest_free_block_bytes")
    assert 1 - counted["largest"] / counted["free"] == watching.value(
        "torchmem_fragmentation_ratio"
    )
    blocks = watching.query("torchmem_blocks > 0")
    named = {
        f"{row['metric']['pool']} {row['metric']['state']}": int(row["value"][1]) for row in blocks
    }
    assert counted["blocks"] == named
    assert sum(v for k, v in named.items() if "inactive" in k) == watching.value(
        "torchmem_free_block_size_bytes_gcount"
    )
    if not counted["expandable"]:
        assert counted["whole"] == free["releasable"]
        assert counted["segments"] == {
            k: v for k, v in shown(watching, "torchmem_segments", "pool").items() if v
        }
    headroom = shown(watching, "torchmem_headroom_bytes", "flush")
    assert (
        truth["driver_free"] - 2**21 <= headroom["true"] <= truth["driver_free"] + counted["free"]
    )


def check_driver(watching: Prometheus, truth: dict[str, Any]) -> None:
    """Compare the driver's bytes of the process, and those outside the allocator, now and first."""
    used = truth["driver_total"] - truth["driver_free"]
    outside = used - truth["stats"]["reserved_bytes.all.current"]
    then = watching.when(lambda then: then.value("torchmem_outside_allocator_bytes") == outside)
    assert used == then.value("sum(nvml_process_memory_bytes)")
    assert then.value("torchmem_outside_allocator_start_bytes") == outside


def follow(training: Training, steps: range) -> tuple[dict[str, Any], Prometheus]:
    """Compare at every chosen step; return the last truth, and Prometheus at that time."""
    truth, then = {}, training.prometheus
    for step in steps:
        truth = training.truth(step)
        then = shown_at(training.prometheus, step, truth["time"])
        check_statistics(then, truth)
        check_layout(then, truth)
        check_driver(training.prometheus, truth)
        training.go_on(step)
    return truth, then


@pytest.mark.parametrize("memory", ["80GB", "9GB"])
def test_prometheus_agrees_with_pytorch(train: Train, memory: str) -> None:
    """On a large and on a small GPU every number is PyTorch's own, and fragmentation rises."""
    training = train(memory, 30, GPT, "--steps", "120")

    truth, then = follow(training, range(30, 121, 30))

    assert (then.value("torchmem_fragmentation_ratio") or 0) > 0.7
    assert (truth["stats"]["num_alloc_retries"] > 0) == (memory == "9GB")


def test_expandable_segments_stay_whole(train: Train) -> None:
    """With expandable segments the numbers agree too, with little fragmentation."""
    training = train("80GB", 40, GPT, "--steps", "120", alloc_conf="expandable_segments:True")

    _, then = follow(training, range(40, 121, 40))

    assert (then.value("torchmem_fragmentation_ratio") or 0) < 0.7
    assert then.query("torchmem_inactive_split_bytes") == []
    assert then.query("torchmem_allocator_info")[0]["metric"]["expandable_segments"] == "True"


def test_the_last_state_survives_an_oom(train: Train) -> None:
    """On a small GPU the script dies of OutOfMemoryError, and Prometheus shows its cause."""
    training = train("7GB", 10**6, GPT, "--steps", "200")
    watching = training.prometheus

    assert training.process.wait(600) != 0
    assert "OutOfMemoryError" in training.log()
    then = watching.when(lambda then: then.value('torchmem_process_state{state="oom"}') == 1)
    assert then.value("sum(torchmem_ooms_total)") == 1
    assert (then.value("torchmem_last_oom_requested_bytes") or 0) > 1 << 20
    assert (then.value("sum(torchmem_reserved_bytes)") or 0) > 0
    alert = until(
        lambda: [found for found in watching.alerts() if found["state"] == "firing"], pause=0.2
    )[0]
    assert (alert["labels"]["alertname"], alert["labels"]["run"]) == ("TorchmemOutOfMemory", "gpt")
