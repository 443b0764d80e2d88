"""Every mode of PyTorch's allocator: what is shown is right, and what it lacks is absent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
Run = Callable[[str], subprocess.CompletedProcess[str]]
Rows = list[tuple[dict[str, str], float]]
Series = Callable[[str], Rows]

# Leaves used and free blocks in both pools, reads everything, and prints PyTorch's own numbers.
PROGRAM = f"""
import json
sys.path.insert(0, {str(HERE)!r})
from checkpoint import count
session = sdk.instrument(interval=1e-6, snapshot_interval=0.01, snapshot_budget=1.0)
def new(mib, device=0):
    return torch.empty(int(mib * 2**20), dtype=torch.uint8, device=f"cuda:{{device}}")
def churn(device=0):
    held = [new(mib, device) for mib in (0.25, 3.1, 30, 0.5, 60, 5, 30, 0.3, 100, 12)]
    del held[1::2]
    return held
def show(device=0):
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device]
    default = [s for s in segments if s["segment_pool_id"] == (0, 0)]
    private = [b for s in segments if s["segment_pool_id"] != (0, 0) for b in s["blocks"]]
    free = sum(b["size"] for b in private if b["state"] == "inactive")
    used = sum(b["size"] for b in private) - free
    stats = torch.cuda.memory_stats(device)
    private = {{"used": used, "free": free}}
    print(json.dumps({{"stats": stats, "snapshot": count(default), "private": private}}))
def layouts():
    return [device["layout"] for sample in published() for device in sample["devices"]]
def read():
    session.step(); started = time.time()
    while not all(layout and layout["timestamp"] > started for layout in layouts() or [None]):
        time.sleep(0.001)
    session.step()
def read_without_layout():
    session.step()
    while not published(): time.sleep(0.001)
    time.sleep(0.3); session.step()
    assert layouts() == [None]
"""


def values(series: Series, name: str, *labels: str, **only: str) -> dict[str, float]:
    """Values of one metric by one label, or by several joined with a space."""
    rows = [(row, value) for row, value in series(name) if only.items() <= row.items()]
    return {
        " ".join(row.get(label, "") for label in labels): value
        for row, value in rows
        if value or not labels
    }


def check(
    series: Series, truth: dict[str, Any], *, expandable: bool = False, **device: str
) -> None:
    """Compare with `torch.cuda.memory_stats()` and with a simple count over the snapshot."""
    stats, counted = truth["stats"], truth["snapshot"]
    absent = {"inactive_split_bytes"} if expandable else set()
    for name in (
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "requested_bytes",
        "inactive_split_bytes",
    ):
        now = {pool: stats[f"{name}.{pool}_pool.current"] for pool in ("small", "large")}
        expected = {} if name in absent else {pool: value for pool, value in now.items() if value}
        assert values(series, f"torchmem_{name}", "pool", **device) == expected
    free = values(series, "torchmem_free_bytes", "state", **device)
    assert counted["free"] == sum(free.values())
    assert {"": counted["largest"]} == values(
        series, "torchmem_largest_free_block_bytes", "", **device
    )
    assert counted["segments"] == values(series, "torchmem_segments", "pool", **device)
    assert counted["blocks"] == values(series, "torchmem_blocks", "pool", "state", **device)
    private = {state: size for state, size in truth["private"].items() if size}
    assert private == values(series, "torchmem_private_pool_bytes", "state", **device)
    if not expandable:
        assert {"releasable": counted["whole"]}.items() <= ({"releasable": 0} | free).items()


NATIVE = {
    "max_split_size_mb:32": {"max_split_size": str(32 * MIB)},
    "roundup_power2_divisions:[16:2,>:4]": {"roundup_power2_divisions": "1:2,2:2,4:2,8:2"},
    "garbage_collection_threshold:0.8": {"garbage_collection_threshold": "0.8"},
    "expandable_segments:True": {"expandable_segments": "True"},
}


@pytest.mark.parametrize("conf", NATIVE)
def test_native_modes_agree_with_pytorch(
    conf: str, run: Run, series: Series, environment: dict[str, str]
) -> None:
    """Under each setting the values are PyTorch's own, and the settings those in effect."""
    environment["PYTORCH_CUDA_ALLOC_CONF"] = conf

    done = run(
        PROGRAM + "torch.cuda.set_per_process_memory_fraction(0.5); held = churn(); read(); show()"
    )

    assert done.returncode == 0, done.stderr
    check(series, json.loads(done.stdout), expandable="expandable" in conf)
    shown = series("torchmem_allocator_info")[0][0]
    assert all(shown[name].startswith(value) for name, value in NATIVE[conf].items())
    asked = {pair.split(":")[0]: 0.0 for pair in conf.replace(",>", "").split(",")}
    assert asked == {
        row["setting"]: value for row, value in series("torchmem_allocator_setting_ignored")
    }


@pytest.mark.parametrize(
    ("conf", "fraction", "claim"),
    [
        ("max_split_size_mb:32,roundup_power2_divisions:[16:2,>:4]", "1", "bound"),
        ("roundup_power2_divisions:[4:2,16:1,64:8,>:4]", "0.7", "exact"),
        ("garbage_collection_threshold:0.6", "0.4", "bound"),
        ("expandable_segments:True", "1", "bound"),
        ("expandable_segments:True,max_split_size_mb:32", "0.4", "bound"),
    ],
)
def test_headroom_is_never_too_much(
    conf: str, fraction: str, claim: str, environment: dict[str, str]
) -> None:
    """In random states under each setting headroom can be allocated, without and with a flush."""
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": conf, "FRACTION": fraction}
    trying = HERE / "headroom_by_trying.py"
    done = run_on_phantom(trying, "25", "1", claim, memory="1200MB", environment=environment)

    assert done.stdout == "25 states, 0 disagreements\n", done.stderr[-2000:]


def test_graphs_and_memory_pools_are_separate(run: Run, series: Series) -> None:
    """Memory of CUDA graphs and MemPools has its own numbers, apart from the default pools."""
    done = run(
        PROGRAM
        + """
held = churn()
graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
with torch.cuda.graph(graph):
    captured = new(30); dropped = new(7); del dropped
with torch.cuda.use_mem_pool(pool):
    pooled = [new(40), new(3), new(0.5)]
    del pooled[0]
read(); show()
"""
    )

    assert done.returncode == 0, done.stderr
    truth = json.loads(done.stdout)
    check(series, truth)
    assert truth["private"]["used"] >= 33 * MIB
    assert truth["private"]["free"] >= 40 * MIB


def test_several_devices_are_distinguished(run: Run, series: Series) -> None:
    """One process on two GPUs: each GPU's numbers are its own."""
    done = run(
        PROGRAM
        + """
held = churn(0), new(200, 1), churn(1)
read(); show(0); show(1); print(*torch.cuda._raw_device_uuid_nvml())
"""
    )

    assert done.returncode == 0, done.stderr
    first, second, uuids = done.stdout.splitlines()
    for truth, uuid in zip((first, second), uuids.split(), strict=True):
        check(series, json.loads(truth), uuid=uuid)


def test_cuda_malloc_async_has_three_totals(
    run: Run, series: Series, environment: dict[str, str]
) -> None:
    """It has allocated, active, reserved, and their peaks, without pools, and nothing else."""
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync,max_split_size_mb:32"

    done = run(
        PROGRAM + "held = churn(); session.step(); print(json.dumps(torch.cuda.memory_stats()))"
    )

    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)
    for name in ("allocated", "active", "reserved"):
        assert {"": stats[f"{name}_bytes.all.current"]} == values(
            series, f"torchmem_{name}_bytes", "pool"
        )
        assert {"": stats[f"{name}_bytes.all.peak"]} == values(
            series, f"torchmem_{name}_peak_bytes", ""
        )
    assert {name for name in KEPT if series(f"torchmem_{name}")} == {
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "allocated_peak_bytes",
        "active_peak_bytes",
        "reserved_peak_bytes",
        "device_total_bytes",
    }
    assert {row["setting"]: v for row, v in series("torchmem_allocator_setting_ignored")} == {
        "backend": 0.0
    }


# Every metric of the allocator that a device may have.
KEPT = (
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "requested_bytes",
    "inactive_split_bytes",
    "allocated_peak_bytes",
    "active_peak_bytes",
    "reserved_peak_bytes",
    "device_total_bytes",
    "segments",
    "blocks",
    "free_bytes",
    "largest_free_block_bytes",
    "fragmentation_ratio",
    "headroom_bytes",
    "private_pool_bytes",
    "alloc_retries_total",
    "ooms_total",
    "oom_rejections_total",
    "device_allocs_total",
    "device_frees_total",
    "stream_syncs_total",
    "snapshot_timestamp_seconds",
)
PLUGGABLE = """
int cudaMalloc(void **, unsigned long);
int cudaFree(void *);
void *take(long size, int device, void *stream) { void *p = 0; cudaMalloc(&p, size); return p; }
void give(void *p, long size, int device, void *stream) { cudaFree(p); }
"""


def test_a_pluggable_allocator_shows_only_the_total(
    run: Run, series: Series, tmp_path: Path
) -> None:
    """Only the device's total is known, nothing crashes, and nothing counts as an error."""
    library = tmp_path / "pluggable.so"
    (tmp_path / "pluggable.c").write_text(PLUGGABLE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "pluggable.c"], check=True)

    done = run(f"""
own = torch.cuda.memory.CUDAPluggableAllocator({str(library)!r}, "take", "give")
torch.cuda.memory.change_current_allocator(own)
session = sdk.instrument(interval=1e-6, snapshot_interval=0.01, snapshot_budget=1.0)
held = torch.empty(1 << 24, device="cuda"); session.step()
time.sleep(0.3); session.step()
print(sum(session.errors.counts.values()))
session.close(); sys.stdout.flush(); os._exit(0)
""")

    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert [name for name in KEPT if series(f"torchmem_{name}")] == ["device_total_bytes"]
    assert series("torchmem_allocator_info")[0][0]["backend"] == "pluggable"


def test_without_caching_the_zeros_are_not_shown(
    run: Run, series: Series, environment: dict[str, str]
) -> None:
    """PYTORCH_NO_CUDA_MEMORY_CACHING=1 keeps every statistic at zero, so none is shown."""
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

    done = run(
        PROGRAM
        + """
held = churn(); read_without_layout()
print(torch.cuda.memory_reserved(), sum(session.errors.counts.values()))
"""
    )

    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr
    assert [name for name in KEPT if series(f"torchmem_{name}")] == ["device_total_bytes"]
    assert series("torchmem_allocator_info")[0][0]["caching"] == "False"


def test_a_setting_that_was_set_too_late_is_ignored(run: Run, series: Series) -> None:
    """A setting made after CUDA has started has no effect, and the metric is 1."""
    done = run(
        PROGRAM
        + """
held = churn()
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
read()
"""
    )

    assert done.returncode == 0, done.stderr
    assert [
        (row["setting"], value) for row, value in series("torchmem_allocator_setting_ignored")
    ] == [("expandable_segments", 1.0)]


def test_settings_changed_at_run_time_are_shown(
    run: Run, series: Series, environment: dict[str, str]
) -> None:
    """The next snapshot has the new settings, and the environment's are no longer judged.

    Statistics of split segments stay unknown once segments were expandable.
    """
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    done = run(
        PROGRAM
        + """
held = churn(); read()
torch.cuda.memory._set_allocator_settings("expandable_segments:False,max_split_size_mb:64"); read()
"""
    )

    assert done.returncode == 0, done.stderr
    shown = series("torchmem_allocator_info")[0][0]
    assert ("False", str(64 * MIB)) == (shown["expandable_segments"], shown["max_split_size"])
    assert [
        series(f"torchmem_{name}")
        for name in ("allocator_setting_ignored", "inactive_split_bytes", "headroom_bytes")
    ] == [[], [], []]


@pytest.mark.parametrize(("visible", "gpus"), [("1,0", [1, 0]), ("GPU-01", [1])], ids=str)
def test_each_device_has_its_own_gpus_uuid(
    visible: str, gpus: list[int], run: Run, series: Series, environment: dict[str, str]
) -> None:
    """Under any CUDA_VISIBLE_DEVICES a device has the UUID of the GPU its memory is on."""
    environment |= {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    done = run(
        PROGRAM
        + """
held = [new(32 * (index + 1), index) for index in range(torch.cuda.device_count())]
read(); print(*torch.cuda._raw_device_uuid_nvml())
"""
    )

    assert done.returncode == 0, done.stderr
    uuids = done.stdout.split()
    expected = {uuids[gpu]: 32.0 * MIB * (index + 1) for index, gpu in enumerate(gpus)}
    assert values(series, "torchmem_allocated_bytes", "uuid", pool="large") == expected


def test_no_visible_device_means_no_series(
    run: Run, series: Series, environment: dict[str, str]
) -> None:
    """With an empty CUDA_VISIBLE_DEVICES the script runs on the CPU and nothing is published."""
    environment["CUDA_VISIBLE_DEVICES"] = ""

    done = run("sdk.instrument(); print(torch.cuda.is_available(), torch.ones(3).sum().item())")

    assert (done.returncode, done.stdout) == (0, "False 3.0\n"), done.stderr
    assert series("torchmem_process_info") == []
