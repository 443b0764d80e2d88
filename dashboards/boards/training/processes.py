"""Every process with its last values, and what is set in it."""

from __future__ import annotations

from dashboards import common
from dashboards.colors import STATES
from dashboards.panels import Column, Panel, Text, joined_table
from dashboards.panels.units import AGO, BYTES, RATIO
from dashboards.queries import ranks

from torchmem.allocator.settings import LAST_PARSED

WHO = (
    Column("Run", label="run"),
    Column("Rank", label="rank", width=70),
    Column("Node", label="instance"),
)
CARD = (Column("GPU", label="gpu", width=60), Column("Pid", label="pid", width=90))


def panels() -> list[Panel]:
    """Three tables."""
    return [_ranks(), _settings(), _ignored()]


def _ranks() -> Panel:
    text = Text(
        "Ranks",
        "What did each process need and lose? Every process on every GPU, dead ones for 15 minutes with their last "
        "values. Active peak is what the job needed, reserved peak what PyTorch took for it.",
    )
    columns = [
        *WHO,
        *CARD,
        Column("State", ranks.table_state(), label="state", colors=STATES),
        Column("Active peak", ranks.table_active_peak(), unit=BYTES),
        Column("Reserved peak", ranks.table_reserved_peak(), unit=BYTES),
        Column("Slack at peak", ranks.table_slack(), unit=RATIO, bar=True),
        Column("Stranded", ranks.table_stranded(), unit=BYTES),
        Column(
            "Newest OOM",
            ranks.table_oom_time(),
            unit=AGO,
            link=common.link(common.OOM, "After an OOM", run="Run"),
        ),
        Column("OOM asked for", ranks.table_oom_request(), unit=BYTES),
        Column("OOM cause", ranks.table_oom_cause(), label="cause"),
    ]
    return joined_table(text, columns)


def _settings() -> Panel:
    text = Text(
        "Allocator settings in force",
        "What is the allocator really set to? Not what the environment asks for, but what PyTorch took over. Differing "
        "ranks of one run are a mistake.",
        "PyTorch does not tell its settings before version 2.1, nor before CUDA starts",
    )
    names = {
        "expandable_segments": "Expandable segments",
        "max_split_size": "Largest block to split",
        "garbage_collection_threshold": "Collect garbage from",
        LAST_PARSED: "As last parsed",
    }
    query = ranks.allocator_settings(*names)
    columns = [*WHO, *(Column(heading, query, label=name) for name, heading in names.items())]
    return joined_table(text, columns).span(16)


def _ignored() -> Panel:
    text = Text(
        "Settings that PyTorch ignored",
        "Was a setting of PYTORCH_CUDA_ALLOC_CONF or its like not taken over? Wrong name for this version of PyTorch, "
        "or set after CUDA had started.",
        "None: all settings are in force",
    )
    columns = [*WHO, Column("Setting", ranks.ignored_settings(), label="setting")]
    return joined_table(text, columns).span(8)
