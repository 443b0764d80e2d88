"""docs/other-tools.md names what torchmem has, and its queries compare two exporters."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import promql_parser
import pytest
from support.dashboards import BOARDS, PANELS
from support.promql import ROOT, RULES, problems
from support.promtool import answers

from torchmem.cli.main import command_line

PAGE = (ROOT / "docs" / "other-tools.md").read_text()
QUERIES = re.findall(r"```promql\n(.*?)```", PAGE.partition("## Compare")[2], re.DOTALL)
TEXT = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", TEXT)
THIS, OTHER = "0a7c03e1-5f42-9d08-b3c6-0d41e80f2a90", "1a7c03e1-5f42-9d08-b3c6-1d41e80f2a91"
MIB = 1 << 20
# The value that each command's flag needs to be complete.
FLAG_VALUES = {"--at": "peak"}
FILES = {"snapshot": 1, "whatif": 1, "compare": 2}


def torchmem_series(gpu: str) -> dict[str, str]:
    """Return the series of one GPU with one process of 40,960 MiB and half a MiB."""
    labels = f'job="torchmem",instance="n:9847",gpu="3",uuid="GPU-{gpu}"'
    return {
        f"nvml_gpu_up{{{labels}}}": "1",
        f"nvml_memory_used_bytes{{{labels}}}": f"{42 * 1024 * MIB + MIB // 2}",
        f'nvml_process_memory_bytes{{{labels},pid="7"}}': f"{40 * 1024 * MIB + MIB // 2}",
    }


def old_series(gpu: str) -> dict[str, str]:
    """Return the series of the other exporters for one GPU; DCGM's twice, as with two pods."""
    dcgm = f'job="dcgm-exporter",instance="10.0.0.9:9400",gpu="0",UUID="GPU-{gpu}",Hostname="n"'
    nvitop = f'job="nvitop",hostname="10.0.0.9",index="0",uuid="GPU-{gpu}",pid="7",username="a"'
    return {
        f'DCGM_FI_DEV_FB_USED{{{dcgm},exported_pod="gpt-0"}}': f"{42 * 1024}",
        f'DCGM_FI_DEV_FB_USED{{{dcgm},exported_pod="gpt-1"}}': f"{42 * 1024}",
        f'nvidia_smi_memory_used_bytes{{job="smi",instance="n:9835",uuid="{gpu}"}}': "44040192000",
        f"process_gpu_memory_MiB{{{nvitop}}}": f"{40 * 1024}",
    }


@pytest.mark.stack
def test_exporters_that_agree_show_no_difference(tmp_path: Path) -> None:
    """No GPU is missing, the counts agree, and memory differs by what a MiB rounds off."""
    assert answers(tmp_path, QUERIES, torchmem_series(THIS) | old_series(THIS), RULES) == [
        [],
        [],
        [0],
        [MIB / 2],
        [MIB / 2],
    ]


@pytest.mark.stack
def test_a_gpu_that_torchmem_does_not_show_is_found(tmp_path: Path) -> None:
    """A second GPU of the other exporters is in the queries for missing GPUs and in the count."""
    both = torchmem_series(THIS) | old_series(THIS) | old_series(OTHER)
    assert answers(tmp_path, QUERIES, both, RULES) == [
        [42 * 1024],
        [44040192000],
        [1],
        [MIB / 2],
        [MIB / 2],
    ]


def test_the_queries_are_promql() -> None:
    """Each query of the page parses."""
    assert len(QUERIES) == 5
    for text in QUERIES:
        promql_parser.parse(text)


def test_every_metric_exists() -> None:
    """Each metric of torchmem on the page exists, with the labels that the page names."""
    named = [span for span in SPANS if re.match(r"(torchmem|nvml)_", span)]
    assert len(named) > 40
    assert [message for span in named for message in problems(span)] == []


def test_every_panel_exists() -> None:
    """Each panel on the page is on the dashboard that the page names."""
    titles = {
        f"{BOARDS[key.partition(': ')[0]]['title']}: {key.partition(': ')[2]}" for key in PANELS
    }
    named = set(re.findall(r"(?<!\*)\*([^*:\n]+: [^*\n]+)\*", TEXT)) - {"Dashboard: panel"}
    assert len(named) > 20
    assert named - titles == set()


def test_every_command_is_valid() -> None:
    """The parser accepts each command with its flags, once files and values are filled in."""
    commands = [span for span in SPANS if span.startswith("torchmem ")]
    assert len(commands) > 5
    for command in commands:
        name, *flags = shlex.split(command)[1:]
        files = ["a.pickle"] * max(FILES.get(word, 0) for word in (name, *flags))
        filled = [part for flag in flags for part in (flag, FLAG_VALUES.get(flag)) if part]
        assert callable(command_line().parse_args([name, *files, *filled]).run), command
