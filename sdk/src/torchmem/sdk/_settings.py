"""The SDK's settings: a keyword, else a `TORCHMEM_*` environment variable, else the default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.sample.run_directory import run_directory
from torchmem.sdk._cost import INTERVAL_SECONDS, SNAPSHOT_BUDGET, SNAPSHOT_INTERVAL_SECONDS
from torchmem.sdk._errors import log

PREFIX = "TORCHMEM_"


class SettingsKeywords(TypedDict, total=False):
    """The keywords of `instrument`, for type checkers; documented at `Settings`."""

    run: str | None
    run_dir: str | Path | None
    rank: int | None
    interval: float
    snapshot_interval: float
    snapshot_budget: float
    reset_peaks: bool
    idle_after: float
    stall_after: float
    capture_on_oom: bool
    release: float | None
    release_interval: float
    port: int | None
    address: str
    textfile: str | Path | None
    enabled: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `instrument`. Each one is also an environment variable: TORCHMEM_RUN etc.

    run: name of the run, a label on every series; default from the scheduler, else the script's
        name.
    run_dir: run directory; default TORCHMEM_RUN_DIR, else /run/torchmem if it exists, else
        /tmp/torchmem.
    rank: global rank; default from the launcher's environment, else 0.
    interval: seconds between two reads of the statistics, and between two publications; up to five
        times as long where they are expensive.
    snapshot_interval: shortest mean time in seconds between two memory snapshots.
    snapshot_budget: share of wall time for snapshots; expensive ones are taken less often.
    reset_peaks: reset PyTorch's peaks at the start of each phase, which makes the peaks of phases
        exact; your own `torch.cuda.max_memory_*` are not affected.
    idle_after: seconds without an optimizer step before the background thread has statistics read.
    stall_after: seconds without a step, once there was one, before the process counts as stalled.
    capture_on_oom: keep PyTorch's memory snapshot of the newest OutOfMemoryError in the run
        directory.
    release: return the cache at a step's end when the driver has less than this share of the
        device free and the next step is not expected to need it again; None never does. Resets
        PyTorch's peaks as `reset_peaks` does.
    release_interval: shortest time in seconds between two checks for `release`.
    port: also serve /metrics in this process, on port + local rank; 0 takes any free port.
    address: address that the port listens on.
    textfile: also write a node_exporter textfile: a .prom file, or a directory for one per rank.
    enabled: False makes `instrument` do nothing.
    """

    run: str | None = None
    run_dir: Path | None = None
    rank: int | None = None
    interval: float = INTERVAL_SECONDS
    snapshot_interval: float = SNAPSHOT_INTERVAL_SECONDS
    snapshot_budget: float = SNAPSHOT_BUDGET
    reset_peaks: bool = False
    idle_after: float = 5.0
    stall_after: float = 300.0
    capture_on_oom: bool = False
    release: float | None = None
    release_interval: float = 10.0
    port: int | None = None
    address: str = "127.0.0.1"
    textfile: Path | None = None
    enabled: bool = True

    def directory(self, environment: Mapping[str, str]) -> Path:
        """Return the run directory in effect."""
        return self.run_dir or run_directory(environment)


def resolve(keywords: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Merge keywords and environment.

    Raises UsageError for an unknown keyword or an impossible value. A bad environment variable is
    logged and ignored, because it may have been set for a thousand processes at once.
    """
    for name in keywords:
        if name not in _PARSERS:
            raise UsageError(f"instrument() has no setting {name!r}{_suggestion(name)}.")
    values = _from_environment(environment)
    values |= {name: _parse(name, value) for name, value in keywords.items()}
    return Settings(**values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in _PARSERS:
        text = environment.get(PREFIX + name.upper())
        if text:
            try:
                values[name] = _parse(name, text)
            except UsageError as error:
                log(logging.WARNING, "%s%s is ignored: %s", PREFIX, name.upper(), error)
    return values


def _parse(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        return _PARSERS[name](value)
    except (TypeError, ValueError):
        raise UsageError(
            f"the setting {name} cannot be {value!r}; see help(torchmem.sdk.instrument)"
        ) from None


def _suggestion(name: str) -> str:
    return "; " + did_you_mean(name, _PARSERS, f"the settings are {', '.join(_PARSERS)}")


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _boolean(value: Any) -> bool:
    text = str(value).lower()
    return _BOOLEANS[text] if text in _BOOLEANS else _reject(value)


def _positive(value: Any) -> float:
    number = float(value)
    return number if 0 < number < float("inf") else _reject(value)


def _share(value: Any) -> float:
    number = float(value)
    return number if 0 < number < 1 else _reject(value)


def _port(value: Any) -> int:
    number = int(value)
    return number if 0 <= number <= 65535 else _reject(value)


def _rank(value: Any) -> int:
    number = int(value)
    return number if number >= 0 else _reject(value)


def _reject(value: Any) -> Any:
    raise ValueError(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "run": str,
    "run_dir": Path,
    "rank": _rank,
    "interval": _positive,
    "snapshot_interval": _positive,
    "snapshot_budget": _positive,
    "reset_peaks": _boolean,
    "idle_after": _positive,
    "stall_after": _positive,
    "capture_on_oom": _boolean,
    "release": _share,
    "release_interval": _positive,
    "port": _port,
    "address": str,
    "textfile": Path,
    "enabled": _boolean,
}

assert set(_PARSERS) == {field.name for field in fields(Settings)}  # noqa: S101 - a field without a parser is a bug
