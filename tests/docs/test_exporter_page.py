"""The files and commands of docs/exporter.md work as they are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import promtool
from support.needs import needs

from torchmem.exporter import config as settings
from torchmem.exporter.web import config, tls


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """Return the text of the page."""
    return (root / "docs" / "exporter.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def only(page: str, key: str) -> str:
    """Return the only YAML block that begins with a key."""
    (block,) = [block for block in blocks(page, "yaml") if block.startswith(f"{key}:")]
    return block


def test_the_settings_are_valid(page: str, tmp_path: Path) -> None:
    """The exporter accepts the file of settings."""
    (tmp_path / "exporter.yml").write_text(only(page, "listen"))

    assert settings.load(tmp_path / "exporter.yml", {}).ttl_seconds == 900


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not on PATH")
def test_the_certificates_and_the_file_go_together(page: str, tmp_path: Path) -> None:
    """The openssl commands create the files that the web configuration names."""
    (commands,) = blocks(page, "bash")
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
    for suffix in ("pem", "key"):
        (tmp_path / f"gpu1.example.org.{suffix}").rename(tmp_path / f"server.{suffix}")
    (tmp_path / "web.yml").write_text(only(page, "tls_server_config"))
    loaded = config.load(tmp_path / "web.yml")

    assert loaded.tls is not None
    assert loaded.tls.allowed_sans == {"prometheus.example.org"}
    assert [name for name, _ in loaded.users] == ["prometheus"]


@pytest.mark.stack
@needs("promtool")
def test_prometheus_accepts_its_part(page: str, tmp_path: Path) -> None:
    """promtool accepts the scrape configurations of the page."""
    scraped = [block for block in blocks(page, "yaml") if block.startswith("scrape_configs:")]
    assert len(scraped) == 2
    for number, block in enumerate(scraped):
        file = tmp_path / f"{number}.yml"
        file.write_text(block)
        promtool.accepts("check", "config", "--syntax-only", file)


def test_every_key_is_explained(page: str) -> None:
    """The page explains each key of the TLS section."""
    assert [key for key in tls.Tls.KEYS if f"`{key}`" not in page] == []
