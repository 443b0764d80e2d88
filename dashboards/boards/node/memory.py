"""Memory by GPU and by process, and by MIG instance."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Column, Panel, Query, Text, joined_table, lines, stack
from dashboards.panels.units import BYTES, RATIO
from dashboards.queries import node

NO_GPU = "No GPU: NVML does not answer"
NO_PROCESS = "No process uses a GPU here"


def panels() -> list[Panel]:
    """Who holds it, then over time."""
    return [_processes(), _stack(), _used(), _by_process(), _unexplained(), _bar1()]


def _processes() -> Panel:
    text = Text(
        "Processes",
        "Whose processes hold the memory? Every process on every GPU, PyTorch or not. Run and rank are there for "
        "processes with torchmem's SDK; PyTorch is what its allocator holds, outside is what the process holds beside "
        "it: CUDA context, NCCL, other libraries. Names need an exporter that sees the host's processes. The pid other "
        "stands for all processes past the largest.",
        NO_PROCESS,
    )
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=90),
        Column("Name", node.process_facts(), label="name"),
        Column("User", node.process_facts(), label="user"),
        Column("Run", node.process_facts(), label="run",
               link=common.link(common.TRAINING, "Training memory", run="Run")),
        Column("Rank", node.process_facts(), label="rank", width=60),
        Column("Slurm job", node.process_facts(), label="slurm_job_id"),
        Column("Pod", node.process_facts(), label="pod_uid"),
        Column("Memory", node.processes(), unit=BYTES),
        Column("PyTorch", node.process_reserved(), unit=BYTES),
        Column("Outside", node.process_outside(), unit=BYTES),
        Column("Busy", node.process_utilization(), unit=RATIO, bar=True),
    ]  # fmt: skip
    return joined_table(text, columns, sort="Memory", descending=True)


def _stack() -> Panel:
    text = Text(
        "Memory of the chosen GPUs", f"Who holds it, by kind? {common.PARTS_EXPLAINED}", NO_GPU
    )
    total = Query(node.total(), "Total")
    return stack(text, common.parts(node.part), BYTES, total)


def _used() -> Panel:
    text = Text(
        "Used memory",
        "How full is each GPU, as the driver counts it? All processes together.",
        NO_GPU,
    )
    return lines(text, [Query(node.value("memory_used_bytes"), common.GPU)], BYTES)


def _by_process() -> Panel:
    text = Text(
        "Memory by process",
        "Whose memory grew, and when? Every process on the chosen GPUs.",
        NO_PROCESS,
    )
    return lines(
        text, [Query(node.value("process_memory_bytes"), f"{common.GPU} pid {{{{pid}}}}")], BYTES
    )


def _unexplained() -> Panel:
    text = Text(
        "Used by no visible process",
        "How much is used that no process accounts for? The driver itself takes some; more may be a process of "
        "another container or a leak after a crash.",
        "Nothing, or the driver does not tell processes' memory",
    )
    return lines(text, [Query(node.value("unattributed_memory_bytes"), common.GPU)], BYTES)


def _bar1() -> Panel:
    text = Text(
        "BAR1 used",
        "How much of the window is used through which the host and other devices reach GPU memory? When it is full, "
        "GPUDirect and peer access fail although memory is free.",
        "This driver does not tell",
    )
    return lines(text, [Query(node.value("bar1_used_bytes"), common.GPU)], BYTES)


def mig() -> list[Panel]:
    """The MIG instances of all chosen GPUs."""
    text = Text(
        "MIG instances",
        "How full is each MIG instance? Memory belongs to the GPU instance; its compute instances share it.",
        "No GPU is in MIG mode",
    )
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu"),
        Column("Instance", label="gpu_instance"),
        Column("Profile", node.mig_facts(), label="profile"),
        Column("Used", node.mig("used"), unit=BYTES),
        Column("Free", node.mig("free"), unit=BYTES),
        Column("Memory", node.mig("total"), unit=BYTES),
    ]
    return [joined_table(text, columns).height(7)]
