"""The files and commands of docs/web-config.md work as they are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import promtool
from support.needs import needs

from torchmem.exporter.web import config, tls


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """Return the text of the page."""
    return (root / "docs" / "web-config.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not on PATH")
def test_the_certificates_and_the_file_go_together(page: str, tmp_path: Path) -> None:
    """The openssl commands create the files that the web configuration names."""
    (commands,) = blocks(page, "bash")
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
    for suffix in ("pem", "key"):
        (tmp_path / f"gpu1.example.org.{suffix}").rename(tmp_path / f"server.{suffix}")
    (tmp_path / "web.yml").write_text(blocks(page, "yaml")[0])
    loaded = config.load(tmp_path / "web.yml")

    assert loaded.tls is not None
    assert loaded.tls.allowed_sans == {"prometheus.example.org"}
    assert [name for name, _ in loaded.users] == ["prometheus"]


@pytest.mark.stack
@needs("promtool")
def test_prometheus_accepts_its_part(page: str, tmp_path: Path) -> None:
    """promtool accepts the scrape configurations of the page."""
    for number, block in enumerate(blocks(page, "yaml")[1:]):
        file = tmp_path / f"{number}.yml"
        file.write_text(block)
        promtool.accepts("check", "config", "--syntax-only", file)


def test_every_key_is_explained(page: str) -> None:
    """The page explains each key of the TLS section."""
    assert [key for key in tls.Tls.KEYS if f"`{key}`" not in page] == []
