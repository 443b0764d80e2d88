"""The site's search, in a browser: what people ask is answered by the first page that it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.test_site import served, site
from support import browser

__all__ = ["site"]

QUESTIONS = {
    "CUDA out of memory tried to allocate": "messages",
    "reserved but unallocated": "messages",
    "already allocated free reserved in total": "messages",
    "process has memory in use": "messages",
    "cuBLAS alloc failed": "messages",
    "free memory less than desired vLLM": "messages",
    "OOMKilled": "messages runbooks/TorchmemHostMemoryLow runbooks/TorchmemRankKilled",
    "is it a memory leak": "leak-or-fragmentation",
    "what is fragmentation index": "concepts",
    "headroom": "concepts",
    "stranded memory": "concepts runbooks/TorchmemFragmentationHigh",
    "nvidia-smi shows more than PyTorch": "concepts leak-or-fragmentation",
    "difference between allocated and reserved": "concepts",
    "cause and onset": "verdict",
    "how to install exporter": "exporter install",
    "docker compose": "install",
    "helm chart values": "kubernetes",
    "kubernetes pod of a process": "kubernetes",
    "slurm prolog": "slurm",
    "dcgm-exporter join": "other-tools",
    "change alert thresholds": "alerts",
    "grafana dashboards": "dashboards",
    "torchmem top keys": "screens",
    "live page API": "screens",
    "memory snapshot pickle": "recordings screens",
    "replay other allocator settings": "recordings",
    "will my model fit on the GPU": "preflight",
    "the largest batch that fits": "preflight",
    "compare two runs in CI": "compare",
    "pytest memory limit": "memory-tests",
    "releasing memory": "release",
    "vLLM sleep mode": "serving",
    "Hugging Face Trainer": "frameworks",
    "torchrun restart": "frameworks",
    "Weights & Biases": "integrations",
    "OpenTelemetry": "integrations",
    "overhead of the SDK": "measurements/overhead",
    "TLS password": "exporter",
    "supported PyTorch versions": "sdk",
    "environment variables settings": "settings",
    "idle GPU": "fleet runbooks/TorchmemGpuIdle",
    "XID": "runbooks/TorchmemGpuXid",
    "all metrics by name": "metrics",
}
"""What people type, and the pages that answer it, by their addresses."""
SEARCH = "[...document.querySelectorAll('*')].find(each => each.shadowRoot).shadowRoot"
LINKS = f"[...{SEARCH}.querySelectorAll('a')].map(each => each.href)"
IS_OPEN = (
    "[...document.querySelectorAll('*')].some(each => each.shadowRoot?.querySelector('input'))"
)


def _type(page: browser.Page, text: str) -> None:
    page.evaluate(f"{SEARCH}.querySelector('input').value = {text!r}")
    event = "new Event('input', {bubbles: true})"
    page.evaluate(f"{SEARCH}.querySelector('input').dispatchEvent({event})")


def _found(page: browser.Page, url: str, question: str) -> str:
    """Return the page of the first result."""
    _type(page, "zzyzx")
    page.wait(f"({LINKS}).length === 0")
    _type(page, question)
    page.wait(f"({LINKS}).length > 0")
    first: str = page.evaluate(f"({LINKS})[0]")
    return first.removeprefix(url).split("?")[0].split("#")[0].strip("/")


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_the_first_page_answers_the_question(site: Path) -> None:
    """At least forty questions, each with the page that a reader needs as the first result."""
    assert len(QUESTIONS) >= 40
    with served(site) as url, browser.open_page() as page:
        page.goto(url)
        page.press("/")
        page.wait(IS_OPEN)
        wrong = {
            question: found
            for question, pages in QUESTIONS.items()
            if (found := _found(page, url, question)) not in pages.split()
        }
    assert wrong == {}
