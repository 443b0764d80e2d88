"""Settings: keyword over environment over default, with errors that help."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from torchmem.sample.errors import UsageError
from torchmem.sdk.settings import Settings, SettingsKeywords, resolve


def test_keyword_beats_environment_beats_default() -> None:
    """Each layer is used only where the one above it sets nothing."""
    environment = {"TORCHMEM_RUN": "from-env", "TORCHMEM_INTERVAL": "2.5"}

    settings = resolve({"run": "from-keyword"}, environment)

    assert (
        settings.run,
        settings.interval,
        settings.snapshot_interval,
    ) == ("from-keyword", 2.5, 10.0)


def test_a_misspelled_setting_gets_a_suggestion() -> None:
    """The error names the unknown setting and the likely one."""
    with pytest.raises(UsageError, match=r"no setting 'intervall'; did you mean 'interval'"):
        resolve({"intervall": 1}, {})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("interval", -1, "above 0 and at most 604800"),
        ("interval", 0, "above 0"),
        ("interval", 1e10, "at most 604800"),
        ("interval", 10**400, "at most 604800"),
        pytest.param("interval", 10**5000, "so large: it must be", id="thousands of digits"),
        ("interval", "inf", "at most 604800"),
        ("interval", float("nan"), "at most 604800"),
        ("snapshot_interval", 1e10, "at most 604800"),
        ("snapshot_budget", 2, "above 0 and at most 1"),
        ("idle_after", 1e10, "at most 604800"),
        ("stall_after", 1e10, "at most 604800"),
        ("release", 1, "above 0 and below 1"),
        ("release", "cash", "tiers such as"),
        ("release", "cache=1", "tiers such as"),
        ("release", "cache,cache", "tiers such as"),
        ("release", "emergency=0.1", "tiers such as"),
        ("release", "", "tiers such as"),
        ("release_interval", 1e10, "at most 604800"),
        ("port", 70000, "an integer from 0 to 65535"),
        ("port", float("inf"), "an integer"),
        ("port", "x", "an integer"),
        ("rank", -2, "an integer from 0 to 2147483647"),
        ("rank", 2**31, "an integer from 0 to 2147483647"),
        ("enabled", "maybe", "true or false"),
        ("run_dir", 7, "a path"),
    ],
)
def test_an_impossible_keyword_is_refused(name: str, value: object, expected: str) -> None:
    """A value that cannot work raises UsageError with one sentence that names the bounds."""
    with pytest.raises(UsageError, match=f"setting {name} cannot be .*{expected}") as refused:
        resolve({name: value}, {})

    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("name", ["INTERVALL", "RUNDIR", "STALLAFTER", "RANKS", "HISTROY"])
def test_a_misspelled_environment_variable_gets_a_suggestion(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the process is monitored without it."""
    with caplog.at_level(logging.WARNING, "torchmem"):
        settings = resolve({}, {f"TORCHMEM_{name}": "1"})

    assert settings == Settings()
    start = f"TORCHMEM_{name} is not a setting and is ignored; did you mean TORCHMEM_"
    assert [message.startswith(start) for message in caplog.messages] == [True]


def test_an_unknown_environment_variable_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A variable that resembles no setting may not be torchmem's; its other ones are fine."""
    others = {"TORCHMEM_DASHBOARDS": "/d", "TORCHMEM_EXPORTER_ARGS": "", "TORCHMEM_PREFLIGHT": "{}"}
    with caplog.at_level(logging.WARNING, "torchmem"):
        settings = resolve({}, {"TORCHMEM_COLOR": "blue", **others})

    assert Settings() == settings
    assert caplog.messages == ["TORCHMEM_COLOR is not a setting and is ignored"]


def test_a_bad_environment_variable_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Training starts with the default, and the log names the variable."""
    with caplog.at_level(logging.WARNING, "torchmem"):
        settings = resolve({}, {"TORCHMEM_INTERVAL": "fast", "TORCHMEM_ENABLED": "0"})

    assert (settings.interval, settings.enabled) == (1.0, False)
    assert "TORCHMEM_INTERVAL is ignored" in caplog.text


def test_the_run_directory_follows_the_environment() -> None:
    """Keyword, then TORCHMEM_RUN_DIR, then the fallback."""
    assert Path("/a") == resolve({"run_dir": "/a"}, {}).directory({"TORCHMEM_RUN_DIR": "/b"})
    assert Path("/b") == Settings().directory({"TORCHMEM_RUN_DIR": "/b"})


def test_type_checkers_know_every_setting() -> None:
    """The typed keywords are the fields that exist."""
    assert set(Settings.__dataclass_fields__) == set(SettingsKeywords.__annotations__)


def test_release_names_tiers_with_thresholds() -> None:
    """The setting `release` is a share for the cache, or tiers with or without a share."""
    named = resolve({}, {"TORCHMEM_RELEASE": "cache=0.3, hooks,emergency"}).release

    assert resolve({"release": 0.1}, {}).release == {"cache": 0.1}
    assert named == {"cache": 0.3, "hooks": 0.1, "emergency": 0.0}
    assert resolve({}, {}).release is None
