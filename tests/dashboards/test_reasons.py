"""Why a rank runs out of memory, on the board: what the rank judges, long before an alert fires."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from dashboards import reasons
from support import promtool
from support.dashboards import QUERIES, filled_in
from support.promql import ROOT

from torchmem.explain.threat_series import OTHER_KINDS
from torchmem.explain.threats import ThreatKind
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.sample import OomCause

GIB = 1 << 30
PANEL = "training-memory: Ranks with the least headroom"
(WHY,) = [
    text for name, text in QUERIES.items() if name.startswith(PANEL) and '"remedy", "–"' in text
]
FRAGMENTED, FULL, CALM, DIED, GROWS, UNTOLD, ALERTED = range(7)
TOLD = {
    "fragmentation": "Enable expandable segments",
    "capacity": "Use a smaller batch",
    "kept": "Find what keeps tensors",
    "limit": "Raise the memory fraction",
    "external": REMEDY_WORDS["before_wake_up"],
    "none": "–",
}


def _series(rank: int, headroom: str, state: str = "running") -> Iterator[tuple[str, str]]:
    process = f'job="torchmem",instance="n:9847",rank="{rank}",pid="{rank}",run="gpt"'
    device = f'{process},gpu="{rank}",uuid="GPU-{rank}"'
    yield f'torchmem_process_state{{{process},state="{state}"}}', "1x40"
    yield f"torchmem_sample_timestamp_seconds{{{process}}}", "0+15x40"
    yield f"torchmem_reserved_peak_bytes{{{device}}}", f"{70 * GIB}x40"
    yield f"torchmem_device_total_bytes{{{device}}}", f"{80 * GIB}x40"
    yield f'torchmem_headroom_bytes{{{device},flush="true"}}', headroom


def _threat(rank: int, kind: str, values: str) -> tuple[str, str]:
    device = f'gpu="{rank}",uuid="GPU-{rank}",rank="{rank}",pid="{rank}",run="gpt"'
    told = f'threat="{kind}",remedy="{TOLD[kind]}"'
    return f'torchmem_threat_info{{job="torchmem",instance="n:9847",{device},{told}}}', values


def _last_oom(rank: int, cause: str) -> tuple[str, str]:
    device = f'gpu="{rank}",uuid="GPU-{rank}",rank="{rank}",pid="{rank}",run="gpt"'
    told = f'cause="{cause}",remedy="{TOLD[cause]}"'
    return f'torchmem_last_oom_info{{job="torchmem",instance="n:9847",{device},{told}}}', "1x40"


def _alert(rank: int, name: str, cause: str) -> tuple[str, str]:
    device = f'gpu="{rank}",uuid="GPU-{rank}",rank="{rank}",pid="{rank}",run="gpt"'
    labels = f'job="torchmem",instance="n:9847",{device},cause="{cause}",severity="critical"'
    return f'ALERTS{{alertname="{name}",alertstate="firing",{labels}}}', "1x40"


SERIES = dict(
    [
        *_series(FRAGMENTED, f"{6 * GIB}x40"),
        _threat(FRAGMENTED, "fragmentation", "1x40"),
        *_series(FULL, f"{30 * GIB}x10 {GIB} {GIB} {30 * GIB}x28"),
        _threat(FULL, "capacity", "_x11 1 1 stale"),
        *_series(CALM, f"{30 * GIB}x40"),
        *_series(DIED, f"{GIB}x40", "oom"),
        _alert(DIED, "TorchmemOutOfMemory", "limit"),
        _last_oom(DIED, "limit"),
        *_series(UNTOLD, f"{2 * GIB}x40", "oom"),
        _alert(UNTOLD, "TorchmemOutOfMemory", "pending"),
        *_series(ALERTED, f"{30 * GIB}x40"),
        _alert(ALERTED, "TorchmemEngineCannotWake", ""),
        *_series(GROWS, f"{30 * GIB}x40"),
        _threat(GROWS, "kept", "1x40"),
        _alert(GROWS, "TorchmemRetryStorm", ""),
    ]
)


def _names(threat: str, *ranks: int) -> list[dict[str, object]]:
    remedy = f',remedy="{TOLD[threat]}"' if threat in TOLD else ""
    return [
        {"labels": f'{{rank="{rank}",threat="{threat}"{remedy}}}', "value": 1} for rank in ranks
    ]


@pytest.mark.stack
def test_every_rank_of_the_table_has_a_reason(tmp_path: Path) -> None:
    """What a rank judges comes first, what it judged while it had least room, then an alert.

    The remedy is what the rank advises, of an alert that it does not judge the alert's own, and
    unknown for an OOM whose rank has told none. A rank whose lowest headroom of 5 minutes is below
    the threshold is never without a reason, although the newest snapshot shows more room.
    """
    expected = {"fragmentation": FRAGMENTED, "capacity": FULL, "kept": GROWS, "limit": DIED}
    expected |= {"none": CALM, "pending": UNTOLD, "external": ALERTED}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in SERIES.items()],
        "promql_expr_test": [
            {
                "expr": f"group by (rank, threat, remedy) ({filled_in(WHY)})",
                "eval_time": "5m",
                "exp_samples": [row for each in expected.items() for row in _names(*each)],
            }
        ],
    }
    rules = [str(path) for path in (ROOT / "prometheus" / "rules").glob("recording-*.yml")]
    promtool.passes(tmp_path, test, rule_files=rules, evaluation_interval="15s")


def test_every_threat_has_a_name_and_a_color() -> None:
    """So has every cause of an OOM."""
    threats = {*get_args(ThreatKind), *get_args(OomCause)} - {*OTHER_KINDS, "ended"}
    assert threats <= reasons.NAMES.keys() & reasons.COLORS.keys()
