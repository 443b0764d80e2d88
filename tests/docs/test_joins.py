"""The queries of docs/other-tools.md that join two exporters."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
from support.promql import ROOT, RULES
from support.promtool import answers

PAGE = (ROOT / "docs" / "other-tools.md").read_text()
PAGE_QUERIES = re.findall(
    r"```promql\n(.*?)```", PAGE.partition("## Join")[2].partition("\n## ")[0], re.DOTALL
)
THIS, OTHER = "0a7c03e1-5f42-9d08-b3c6-0d41e80f2a90", "1a7c03e1-5f42-9d08-b3c6-1d41e80f2a91"
GIB = 1 << 30
TARGET = 'job="torchmem",instance="n:9847"'
GPU = f'{TARGET},gpu="3",uuid="GPU-{THIS}"'
RANK = f'{GPU},rank="1",pid="7",run="gpt"'


def torchmem_series() -> dict[str, str]:
    """Return the series of one rank on one idle GPU whose memory is held."""
    return {
        f'torchmem_process_state{{{TARGET},rank="1",pid="7",run="gpt",state="running"}}': "1",
        f'torchmem_reserved_bytes{{{RANK},pool="large"}}': f"{40 * GIB}",
        f'torchmem_active_bytes{{{RANK},pool="large"}}': f"{30 * GIB}",
        f'torchmem_free_bytes{{{RANK},state="stranded"}}': f"{10 * GIB}",
        f'torchmem_free_bytes{{{RANK},state="releasable"}}': "0",
        f'torchmem_private_pool_bytes{{{RANK},state="free"}}': "0",
        f'torchmem_headroom_bytes{{{RANK},flush="true"}}': f"{9 * GIB}",
        f"torchmem_device_total_bytes{{{RANK}}}": f"{80 * GIB}",
        f"nvml_memory_used_bytes{{{GPU}}}": f"{42 * GIB}",
        f'nvml_utilization_ratio{{{GPU},engine="gpu"}}': "0",
    }


def dcgm(gpu: str, tensor: float, engine: float) -> dict[str, str]:
    """Return the series of dcgm-exporter 4 for a GPU, with its labels and those of Kubernetes."""
    labels = (
        f'job="dcgm-exporter",instance="10.0.0.9:9400",gpu="0",UUID="GPU-{gpu}",'
        'pci_bus_id="00000000:18:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",'
        'Hostname="n",DCGM_FI_DRIVER_VERSION="580.95.05",'
        'exported_namespace="team",exported_pod="gpt-0",exported_container="train"'
    )
    return {
        f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{labels}}}": f"{tensor}",
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels}}}": f"{engine}",
        f"DCGM_FI_DEV_FB_USED{{{labels}}}": f"{42 * 1024}",
        f"DCGM_FI_DEV_GPU_UTIL{{{labels}}}": "0",
    }


def nvidia_gpu_exporter(gpu: str) -> dict[str, str]:
    """Return the series of nvidia_gpu_exporter 1 for a GPU."""
    labels = f'job="nvidia_gpu_exporter",instance="n:9835",uuid="{gpu}"'
    facts = (
        'name="NVIDIA H100 80GB HBM3",driver_version="580.95.05",index="0",'
        'pci_bus_id="00000000:18:00.0"'
    )
    return {
        f"nvidia_smi_power_draw_watts{{{labels}}}": "120",
        f"nvidia_smi_memory_used_bytes{{{labels}}}": f"{42 * GIB}",
        f"nvidia_smi_gpu_info{{{labels},{facts}}}": "1",
    }


def nvitop_exporter(gpu: str) -> dict[str, str]:
    """Return a series of nvitop-exporter 1.7 for a GPU."""
    labels = f'job="nvitop",instance="n:8000",hostname="10.0.0.9",index="0",uuid="GPU-{gpu}"'
    return {f"gpu_utilization_Percentage{{{labels}}}": "0"}


def peers(gpu: str, tensor: float, engine: float) -> dict[str, str]:
    """Return the series of all other exporters for a GPU."""
    return dcgm(gpu, tensor, engine) | nvidia_gpu_exporter(gpu) | nvitop_exporter(gpu)


def counts(folder: Path, series: dict[str, str]) -> list[int]:
    """Return the number of series that each query of the page returns."""
    return [len(found) for found in answers(folder, PAGE_QUERIES, series, RULES)]


@pytest.mark.stack
@pytest.mark.parametrize(
    ("tensor", "engine", "empty"),
    [(0.7, 0.9, [1]), (0.0, 0.01, [])],
    ids=["busy", "idle"],
)
def test_every_query_joins(tmp_path: Path, tensor: float, engine: float, empty: list[int]) -> None:
    """Each query joins the GPU of two exporters, unless the query's own threshold excludes it."""
    found = counts(tmp_path, torchmem_series() | peers(THIS, tensor, engine))
    assert [int(number not in empty) for number in range(len(PAGE_QUERIES))] == found


@pytest.mark.stack
def test_no_query_joins_different_gpus(tmp_path: Path) -> None:
    """Queries join by UUID only: each is empty if the other exporters have another GPU."""
    found = counts(tmp_path, torchmem_series() | peers(OTHER, 0.7, 0.01))
    assert [0] * len(PAGE_QUERIES) == found


def test_the_queries_are_promql() -> None:
    """The page has queries, and each of them parses."""
    assert len(PAGE_QUERIES) == 6
    for text in PAGE_QUERIES:
        promql_parser.parse(text)
