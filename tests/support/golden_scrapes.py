"""Scrapes of the exporter on each node of tests/fake_nvml/nodes, without what differs per run."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from support.exporter_process import ExporterProcess, exporter_process
from support.exposition import Exposition
from support.fake_nvml import NO_PID, NODES, FakeNode
from support.publishing import own_process, publish
from support.samples import UUID, full_sample
from support.waiting import until

from torchmem.host.process_table import INITIAL_PID_NAMESPACE
from torchmem.host.procfs import pid_namespace, start_ticks
from torchmem.sample.sample import Allocator, ByPool, Sample

GOLDEN = Path(__file__).resolve().parents[1] / "exporter" / "golden"
NAMES = sorted(file.stem for file in NODES.glob("*.txt"))
FULL_SAMPLE_BYTES = 61 << 30

# Lines that take effect while the exporter runs
CHANGES = r"^(event\..*|error = gpu_is_lost)\n"

# Times and durations are recorded as NaN, which the exporter never exposes.
VOLATILE_VALUES = {
    "torchmem_exporter_collector_duration_seconds",
    "torchmem_exporter_run_directory_size_bytes",
    "torchmem_exporter_run_directory_free_bytes",
    "torchmem_exporter_run_directory_inodes",
    "torchmem_exporter_run_directory_free_inodes",
    "torchmem_exporter_start_timestamp_seconds",
    "torchmem_sample_timestamp_seconds",
    "nvml_xid_last_timestamp_seconds",
    "torchmem_host_rss_bytes",
    "torchmem_host_limit_bytes",
    "torchmem_host_available_bytes",
}
# Labels of the machine, the user or an installed version are left out.
VOLATILE_LABELS = {
    "torchmem_exporter_build_info": {"version", "python_version"},
    "nvml_process_info": {"uid", "user", "container_id", "pod_uid", "slurm_job_id"},
}
# In a container the exporter's pids are not the driver's, so these series are absent.
NEEDS_INITIAL_PID_NAMESPACE = ("nvml_process_info", "torchmem_outside_allocator_")


def scrape_of(name: str, folder: Path) -> str:
    """Return the normalized body of a scrape of the exporter process on a node."""
    with subprocess.Popen(["sleep", "600"]) as trainer:
        try:
            node = FakeNode(folder / "node", name, pid=trainer.pid)
            now = node.text
            _publish_ranks(node, folder / "run", trainer.pid, most=3 if name == "h100_busy" else 1)
            node.write(re.sub(CHANGES, "", now, flags=re.MULTILINE))
            deadline = 1 if name == "hung" else 30
            with exporter_process(
                node, folder / "run", scrape_deadline_seconds=deadline
            ) as exporter:
                exporter.get()
                node.write(now)
                return _settled(exporter, node, trainer.pid)
        finally:
            trainer.kill()


def normalized(body: str, pid: int) -> str:
    """Return the body without what differs between two runs or machines."""
    return "".join(_normalized_line(line, pid) + "\n" for line in body.splitlines())


def portable(text: str) -> str:
    """Return the part that does not depend on whether this process is in a container."""
    if pid_namespace() == INITIAL_PID_NAMESPACE:
        return text
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if not line.startswith(NEEDS_INITIAL_PID_NAMESPACE)
    )


def _normalized_line(line: str, pid: int) -> str:
    name = re.match(r"\w*", line)[0]  # type: ignore[index]
    if name in VOLATILE_VALUES:
        line = f"{line.rpartition(' ')[0]} NaN"
    for label in VOLATILE_LABELS.get(name, ()):
        line = re.sub(rf'\b{label}="[^"]*",?', "", line)
    line = re.sub(r"e\+0(\d\d)$", r"e+\1", line)  # an old prometheus-client: e+010
    line = line.replace(f'launch="{os.geteuid()}-', 'launch="UID-')
    return line.replace(f'pid="{pid}"', 'pid="PID"')


def _settled(exporter: ExporterProcess, node: FakeNode, pid: int) -> str:
    """Return the first scrape that equals the previous one, with all events and GPM means."""
    events = len(re.findall(r"^event\.", node.text, re.MULTILINE))
    has_gpm = "GpmQueryDeviceSupport = 1" in node.text and "nvmlGpmSampleGet = " not in node.text
    bodies = [""]

    def settled() -> str | None:
        bodies.append(normalized(exporter.get(), pid))
        arrived = sum(Exposition.of_text(bodies[-1]).matching("nvml_xid_errors_total").values())
        complete = arrived == events and ("nvml_sm_active_ratio{" in bodies[-1] or not has_gpm)
        return bodies[-1] if complete and bodies[-1] == bodies[-2] else None

    return until(settled, pause=0.2)


def _publish_ranks(node: FakeNode, run_dir: Path, trainer: int, most: int) -> None:
    for sample in islice(_samples(node, trainer), most):
        publish(run_dir, sample, f"{sample.process.rank}.sample.json")


def _samples(node: FakeNode, trainer: int) -> Iterator[Sample]:
    """Yield rank 0, which is training on the first GPU, rank 1 after an OOM, and rank 2, killed."""
    held = re.search(rf"\b{trainer}:(\d+)", node.text)
    above = node.text[: held.start()] if held else ""
    uuids = re.findall(r"^UUID = (.*)$", above, re.MULTILINE)
    free = re.findall(r"^MemoryInfo = \d+ \d+ (\d+)", above, re.MULTILINE)
    sample = full_sample(uuid=uuids[-1] if uuids else UUID)
    if free:  # the driver has as much free as when the statistics were read
        device = replace(sample.devices[0], driver_free_bytes=int(free[-1]))
        sample = replace(sample, devices=(device,))
    if held and int(held[1]) < FULL_SAMPLE_BYTES:
        sample = _on_a_small_gpu(sample)
    living = own_process(pid=trainer, start_ticks=start_ticks(trainer))
    gone = replace(living, pid=NO_PID, start_ticks=1)
    now = time.time()
    yield replace(sample, process=living, timestamp=now)
    yield replace(
        sample, process=replace(gone, rank=1, local_rank=1), timestamp=now - 10, ended="oom"
    )
    yield replace(sample, process=replace(gone, rank=2, local_rank=2), timestamp=now - 20)


def _on_a_small_gpu(sample: Sample) -> Sample:
    gib = 1 << 30
    reserved = Allocator(
        ByPool(1 << 20, 10 * gib),
        ByPool(1 << 20, 10 * gib),
        ByPool(2 << 20, 15 * gib),
        ByPool(1 << 20, 9 * gib),
        ByPool(1 << 20, 3 * gib),
        12 * gib,
        12 * gib,
        16 * gib,
    )
    device = replace(
        sample.devices[0],
        total_bytes=24 * gib,
        allocator=reserved,
        layout=None,
        phase_peaks={},
        first_read=None,
    )
    return replace(sample, devices=(device,))
