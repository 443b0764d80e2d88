"""Settings: keyword over environment over default, with errors that help."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from torchmem.sample.errors import UsageError
from torchmem.sdk._settings import Settings, SettingsKeywords, resolve


def test_keyword_beats_environment_beats_default() -> None:
    """Each layer is used only where the one above it sets nothing."""
    environment = {"TORCHMEM_RUN": "from-env", "TORCHMEM_INTERVAL": "2.5"}

    settings = resolve({"run": "from-keyword"}, environment)

    assert ("from-keyword", 2.5, 10.0) == (
        settings.run,
        settings.interval,
        settings.snapshot_interval,
    )


def test_a_misspelled_setting_gets_a_suggestion() -> None:
    """The error names the unknown setting and the likely one."""
    with pytest.raises(UsageError, match=r"no setting 'intervall'; did you mean 'interval'"):
        resolve({"intervall": 1}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("interval", -1), ("port", 70000), ("port", "x"), ("rank", -2), ("enabled", "maybe")],
)
def test_an_impossible_keyword_is_refused(name: str, value: object) -> None:
    """A value that cannot work raises UsageError."""
    with pytest.raises(UsageError, match=f"setting {name} cannot be"):
        resolve({name: value}, {})


def test_a_bad_environment_variable_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Training starts with the default, and the log names the variable."""
    with caplog.at_level(logging.WARNING, "torchmem"):
        settings = resolve({}, {"TORCHMEM_INTERVAL": "fast", "TORCHMEM_ENABLED": "0"})

    assert (1.0, False) == (settings.interval, settings.enabled)
    assert "TORCHMEM_INTERVAL is ignored" in caplog.text


def test_the_run_directory_follows_the_environment() -> None:
    """Keyword, then TORCHMEM_RUN_DIR, then the fallback."""
    assert Path("/a") == resolve({"run_dir": "/a"}, {}).directory({"TORCHMEM_RUN_DIR": "/b"})
    assert Path("/b") == Settings().directory({"TORCHMEM_RUN_DIR": "/b"})


def test_type_checkers_know_every_setting() -> None:
    """The typed keywords are the fields that exist."""
    assert set(Settings.__dataclass_fields__) == set(SettingsKeywords.__annotations__)
