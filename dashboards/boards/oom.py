"""The dashboard "After an OOM": which ranks ran out of memory, why, what was free, and what to do."""

from __future__ import annotations

from dashboards import choices, common
from dashboards.colors import CAUSES, STATES
from dashboards.panels import (
    Board,
    Column,
    Panel,
    Query,
    Text,
    joined_table,
    lines,
    stack,
    stat_panel,
    state_timeline,
)
from dashboards.panels.units import AGO, BYTES, COUNT, PER_MINUTE, RATIO
from dashboards.queries import oom

from torchmem.allocator.settings import LAST_PARSED
from torchmem.sample import catalog

NOBODY = "No rank ran out of memory in this time range"

REMEDIES = {
    "capacity": "Smaller batch, recompute activations, shard, or a larger GPU",
    "fragmentation": "Restart with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "limit": "Raise the memory fraction, or do with less",
    "external": "See below who else holds the GPU; end it or move",
}


def _numbers() -> list[Panel]:
    return [
        stat_panel(
            Text("OutOfMemoryErrors", "How often were the processes of this time range out of memory? Counted since "
                 "each process started, caught by the script or not.", NOBODY),
            Query(oom.ooms()), COUNT, warn_above=1),
        stat_panel(
            Text("By cause", "Why? capacity: the job is too large. fragmentation: enough was free, but in pieces. "
                 "limit: the memory fraction. external: other programs.", NOBODY),
            Query(oom.ooms_by_cause(), "{{cause}}"), COUNT, colors=CAUSES).span(8),
        stat_panel(
            Text("Ended by an OOM", "How many processes died of it, or have it as their newest step's end? A script "
                 "that catches the error goes on and is not counted here.", NOBODY),
            Query(oom.ended("oom")), COUNT, warn_above=1),
        stat_panel(
            Text("Killed", "How many processes ended by a signal, without a word? The kernel's killer when the host's "
                 "memory is full, the scheduler, or somebody.", "None"),
            Query(oom.ended("killed")), COUNT, warn_above=1),
        stat_panel(
            Text("Newest", "When was the newest OutOfMemoryError?", NOBODY), Query(oom.newest()), AGO),
    ]  # fmt: skip


def _failed() -> Panel:
    text = Text(
        "Ranks that ran out of memory or were killed",
        "Which ranks, how large was the request, what was free, and what helps? The values are each process's last "
        "ones, kept here as long as Prometheus keeps them. Free but stranded bytes larger than the request are "
        "fragmentation. On the node, `torchmem oom` explains the same case in full.",
        NOBODY,
    )
    columns = [
        Column("Run", label="run", link=common.link(common.TRAINING, "Training memory", run="Run")),
        Column("Rank", label="rank", width=60),
        Column("Node", label="instance"),
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=80),
        Column("State", oom.state(), label="state", colors=STATES),
        Column("When", oom.time(), unit=AGO),
        Column("Asked for", oom.requested(), unit=BYTES),
        Column("Cause", oom.cause(), label="cause", colors=CAUSES),
        Column("Reserved", oom.last_reserved(), unit=BYTES),
        Column("Free in the cache", oom.last_free(), unit=BYTES),
        Column("Of that, stranded", oom.last(catalog.FREE, state="stranded"), unit=BYTES),
        Column("Largest free block", oom.last(catalog.LARGEST_FREE_BLOCK), unit=BYTES),
        Column("Fragmentation index", oom.last(catalog.FRAGMENTATION), unit=RATIO, bar=True),
        Column("What to do", oom.cause(), label="remedy", words=REMEDIES),
    ]
    return joined_table(text, columns, sort="When", descending=True)


def _states() -> Panel:
    text = Text(
        "How the ranks ended",
        "Which rank stopped first, and did the others hang after it? One row per process; a row ends when the exporter "
        "drops the process, 15 minutes after its end.",
        "No rank matches the choice above",
    )
    names = {index: (name, STATES[name]) for index, name in enumerate(oom.STATES)}
    return state_timeline(text, Query(oom.states(), f"{common.RANK} pid {{{{pid}}}}"), names)


def _before() -> list[Panel]:
    return [
        lines(
            Text("Allocated and reserved", "What did the ranks hold before they ran out, and how much of it was in "
                 "use? Only ranks with an OutOfMemoryError in this time range.", NOBODY),
            [Query(oom.allocated(), f"{common.RANK}, allocated"), Query(oom.reserved(), f"{common.RANK}, reserved")],
            BYTES),
        lines(
            Text("Headroom against the request", "Did the room shrink slowly, or did one request ask for too much? "
                 "The headroom after a flush, and from the error on what was asked for.", NOBODY),
            [Query(oom.headroom(), f"{common.RANK}, headroom"), Query(oom.request(), f"{common.RANK}, asked for")],
            BYTES),
        lines(
            Text("Stranded", "Did fragmentation grow before the error? Free bytes between live blocks.", NOBODY),
            [Query(oom.stranded(), common.RANK)], BYTES),
        lines(
            Text("Allocator retries", "Was there a warning? Flushes of the whole cache per minute; they often begin "
                 "minutes before the error.", NOBODY),
            [Query(oom.retries(), common.RANK)], PER_MINUTE),
        stack(
            Text("Memory of the GPUs that ran out", "Did something else take the room? All GPUs on which a rank ran "
                 f"out of memory, together. {common.PARTS_EXPLAINED}", NOBODY),
            common.parts(oom.part), BYTES, Query(oom.total(), "Device total")),
    ]  # fmt: skip


def _settings() -> Panel:
    text = Text(
        "Allocator settings of these ranks",
        "What was set when it happened? With expandable segments on already, fragmentation needs another remedy.",
        NOBODY,
    )
    names = {"expandable_segments": "Expandable segments", LAST_PARSED: "As last parsed"}
    query = oom.settings(*names)
    columns = [
        Column("Run", label="run"),
        Column("Rank", label="rank"),
        Column("Node", label="instance"),
    ]
    return joined_table(
        text, [*columns, *(Column(words, query, label=name) for name, words in names.items())]
    )


BOARD = Board(
    common.OOM,
    "After an OOM",
    "Ranks that ran out of GPU memory in the chosen time range: their last state, the cause, what was free, what led "
    "to it and what to do.",
    choices.TRAINING,
    {
        "What happened?": [*_numbers(), _failed()],
        "In what order?": [_states()],
        "What led to it?": _before(),
        "What was set?": [_settings()],
    },
    (common.OOM_NOTE,),
    since="now-6h",
)
