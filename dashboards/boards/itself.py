"""The dashboard "torchmem itself": does the watching work, and what does it cost?"""

from __future__ import annotations

from dashboards import choices, common
from dashboards.colors import FAILED
from dashboards.panels import Board, Panel, Query, Text, lines, stat_panel, state_timeline
from dashboards.panels.units import COUNT, PER_MINUTE, RATIO, SECONDS
from dashboards.queries import itself

NO_EXPORTER = "Prometheus scrapes no exporter with job torchmem"
NO_RANK = "No rank matches the choice above"


def _numbers() -> list[Panel]:
    return [
        stat_panel(
            Text("Exporters down", "How many exporters does Prometheus not reach? Their nodes are not watched."),
            Query(itself.exporters_down()), COUNT, warn_above=1),
        stat_panel(
            Text("Versions", "Which versions of torchmem run, on how many nodes?", NO_EXPORTER),
            Query(itself.versions(), "{{version}}"), COUNT),
        stat_panel(
            Text("Collectors failed", "How many parts of the exporters' newest reading failed? Shown by node and "
                 "collector below; the exporter's log says why.", NO_EXPORTER),
            Query(itself.collectors_failed()), COUNT, warn_above=1),
        stat_panel(
            Text("Files refused", "How many files in run directories did the exporters refuse in the chosen time "
                 "range? By reason below.", NO_EXPORTER),
            Query(itself.rejected_in_range()), COUNT, warn_above=1),
        stat_panel(
            Text("SDK errors", "How many errors did the SDK meet and swallow in the chosen time range? Training goes "
                 "on, but some values may be missing. By stage below.", NO_RANK),
            Query(itself.sdk_errors_in_range()), COUNT, warn_above=1),
        stat_panel(
            Text("Dearest rank", "What does the SDK cost where it costs most? CPU time as a share of one core.",
                 NO_RANK),
            Query(itself.dearest_sdk(), common.RANK), RATIO).decimals(3),
    ]  # fmt: skip


def _exporter() -> list[Panel]:
    return [
        lines(
            Text("Scrape duration", "How long does Prometheus wait for each exporter? The shipped limit is 8 s; a "
                 "driver that answers slowly shows here first.", NO_EXPORTER),
            [Query(itself.scrape_seconds(), "{{instance}}")], SECONDS),
        lines(
            Text("Scrape size", "How many samples does each exporter give? It grows with GPUs, ranks and processes; "
                 "Prometheus' memory grows with it.", NO_EXPORTER),
            [Query(itself.scrape_samples(), "{{instance}}")], COUNT),
        state_timeline(
            Text("Collectors", "Which part of the exporter fails, and since when? A failed one leaves its metrics out; "
                 "the others are not touched.", NO_EXPORTER),
            Query(itself.collectors(), "{{instance}}: {{collector}}"), {0: ("failed", FAILED), 1: ("works", "green")}),
        lines(
            Text("Collector duration", "Where does the scrape's time go?", NO_EXPORTER),
            [Query(itself.collector_seconds(), "{{instance}}: {{collector}}")], SECONDS),
        lines(
            Text("Files refused per minute", "Why are files in the run directory refused? Every refused file of every "
                 "reading counts, so one bad file makes a steady line until it is gone.", "None"),
            [Query(itself.rejected(), "{{instance}}: {{reason}}")], PER_MINUTE),
        stat_panel(
            Text("Nodes without NVML", "On how many nodes does the driver not answer, and why? There all nvml_ metrics "
                 "are missing; training is watched all the same.", "None"),
            Query(itself.nvml_down(), "{{reason}}"), COUNT, warn_above=1).span(12).height(8),
        lines(
            Text("Ranks read", "How many processes does each exporter read? A number that falls while jobs run means "
                 "that a run directory is not shared.", "No rank anywhere"),
            [Query(itself.ranks(), "{{instance}}")], COUNT),
    ]  # fmt: skip


def _sdk() -> list[Panel]:
    return [
        lines(
            Text("CPU time of the SDK", "What does watching cost each rank, as a share of one core?", NO_RANK),
            [Query(itself.sdk_share(), common.RANK)], RATIO),
        lines(
            Text("Duration of a reading", "How long does reading take in the training process? Statistics at the end "
                 "of a step, once a second at most. The sampler waits longer where it takes longer.", NO_RANK),
            [Query(itself.read_seconds("stats"), common.RANK)], SECONDS),
        lines(
            Text("Duration of a snapshot", "How long does a snapshot of all blocks take, in the background? It grows "
                 "with the number of blocks, and the pauses between two grow with it.", "No snapshot yet"),
            [Query(itself.read_seconds("snapshot"), common.RANK)], SECONDS),
        lines(
            Text("Age of the state", "How old is what is shown of each rank? More than some seconds in a rank that "
                 "runs: it makes no steps, its sampler hangs, or the run directory is full.", NO_RANK),
            [Query(itself.sample_age(), common.RANK)], SECONDS),
        lines(
            Text("Age of the snapshot", "How old are fragmentation and headroom? 10 s is usual; a slow reading makes "
                 "it longer, and so does a script that records memory history itself.", "No snapshot yet"),
            [Query(itself.snapshot_age(), common.RANK)], SECONDS),
        lines(
            Text("Errors by stage", "What did the SDK fail at? Since each process started; training is not touched.",
                 "None"),
            [Query(itself.sdk_errors(), f"{common.RANK}: {{{{stage}}}}")], COUNT),
    ]  # fmt: skip


BOARD = Board(
    common.ITSELF,
    "torchmem itself",
    "Whether the exporters and the SDK work, and what they cost.",
    choices.EVERYTHING,
    {"In short": _numbers(), "Exporters": _exporter(), "The SDK in the ranks": _sdk()},
)
