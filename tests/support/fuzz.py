"""Checks that hold for any bytes, one function for each input that the exporter parses."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from support.exposition import Exposition

from torchmem.exporter import config, strict_yaml
from torchmem.exporter.collect import sample_families
from torchmem.exporter.discovery import target_groups
from torchmem.exporter.rejections import RejectedSampleError
from torchmem.exporter.run_directory import Published, decode
from torchmem.exporter.scrapes import accepts_gzip, answer_seconds, choose_format
from torchmem.exporter.web import config as web_config
from torchmem.exporter.web.access import credentials
from torchmem.sample.errors import UsageError


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self.collect = lambda: families


def _with_file(content: bytes, load: Callable[[Path], object]) -> None:
    """Check that loading succeeds or raises UsageError with one sentence."""
    with tempfile.NamedTemporaryFile(suffix=".yml") as file:
        file.write(content)
        file.flush()
        sentence = ""
        try:
            load(Path(file.name))
        except UsageError as error:
            sentence = str(error)
        assert sentence.isprintable(), sentence


def settings_file(content: bytes) -> None:
    """Check `--config`: the settings, printed as YAML, give the same settings."""

    def load(file: Path) -> None:
        settings = config.load(file, {})
        file.write_text(settings.as_yaml())
        assert settings == config.load(file, {}), settings

    _with_file(content, load)


def web_config_file(content: bytes) -> None:
    """Check `--web.config.file`."""
    _with_file(content, web_config.load)


def yaml_file(content: bytes) -> None:
    """Check that the strict reader has all keys that PyYAML reads."""

    def load(file: Path) -> None:
        section = strict_yaml.read(file, None)
        assert set(strict_yaml.read_plain(file)) == set(section)
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            plain = yaml.safe_load(content)
            if isinstance(plain, dict) and all(isinstance(key, str) for key in plain):
                assert {key for key in plain if plain[key] is not None} <= set(section), plain

    _with_file(content, load)


def sample_file(content: bytes) -> None:
    """Check a sample file: it is rejected, or gives valid metrics and targets of this node."""
    try:
        sample = decode(content)
    except RejectedSampleError:
        return
    published = [Published(sample, sample.process.pid, "running", attributed=True)]
    Exposition.of_text(generate_latest(_Families(list(sample_families(published, {})))).decode())
    for group in target_groups(published, "node5", "10.0.0.9", {"10.0.0.5"}):
        assert group["targets"][0].rpartition(":")[0] in {"node5", "10.0.0.5"}, group


def headers(content: bytes) -> None:
    """Check that any text is accepted as a request header."""
    text = content.decode("latin-1")
    choose_format(text)
    accepts_gzip(text)
    seconds = answer_seconds(text)
    assert seconds is None or seconds > 0
    credentials(text)
    target_groups([], text, text, ())


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (settings_file, web_config_file, yaml_file, sample_file, headers)
}
